"""Refunds: parts of a charge given back, together never more than it."""

import json
from dataclasses import dataclass
from uuid import UUID

from psycopg.rows import class_row
from pydantic import Field

from charging import charges, compact, errors, idempotency, outbox, problem, sql
from charging.contract import AmountCents, Call, Command, Reference, Scope
from charging.database import Database
from charging.idempotency import Outcome, StoredResponse
from charging.identifiers import time_ordered_uuid
from charging.problem import Problem

ENDPOINT = "POST /charges/{id}/refunds"

EXCEEDS_CHARGE = Problem(
    409,
    "refund_exceeds_charge",
    "The charge has not so much left",
    "All its refunds together may come to the charge's amount and no more. Look at the charge's refundedCents. This is "
    "the result of this key: use a new one for another refund.",
    retry_same_key=False,
)


class RefundCommand(Command):
    """One refund of the charge in the path: an amount in the charge's currency, and a text of the caller's own."""

    amount_cents: AmountCents = Field(alias="amountCents")
    reference: Reference = None


@dataclass(frozen=True, slots=True)
class Refund:
    """A refund as the charge's owner sees it."""

    id: UUID
    charge_id: UUID
    amount_cents: int
    currency: str
    reference: str | None

    def members(self) -> dict[str, object]:
        """Returns the refund as the API shows it, in the order in which it always shows it."""
        return {"id": str(self.id), "chargeId": str(self.charge_id), **self.money()}

    def money(self) -> dict[str, object]:
        """Returns what was refunded."""
        return compact.given({"amountCents": self.amount_cents, "currency": self.currency, "reference": self.reference})


def create(database: Database, call: Call[RefundCommand], charge_id: UUID) -> Outcome:
    """Refunds a part of the principal's charge, once for its key; a repetition gets the first answer back.

    Refused where the charge has not so much left, also by refunds that are made at the same moment; that is the
    result then. Raises NoSuchResource where the charge is nobody's or somebody else's, and otherwise as
    `idempotency.perform` does.
    """
    charge = charges.read(database, call.scope.principal, charge_id, deadline=call.deadline)
    refund = Refund(time_ordered_uuid(), charge.id, call.command.amount_cents, charge.currency, call.command.reference)
    return idempotency.perform(
        database,
        call,
        sql.CREATE_REFUND,
        {
            "refund_id": refund.id,
            "charge_id": charge.id,
            **outbox.event_of(
                call,
                "ChargeRefunded",
                subject=charge.id,
                data={"chargeId": str(charge.id), "refundId": str(refund.id), **refund.money()},
            ),
        },
        StoredResponse.created(f"/charges/{charge.id}/refunds/{refund.id}", refund.members()),
        refusal=problem.result(EXCEEDS_CHARGE, refund.id, chargeId=str(charge.id)),
        target=charge.id,
    )


def find(database: Database, scope: Scope, charge_id: UUID, *, deadline: float) -> StoredResponse | None:
    """Returns what a repetition under this key would be given now for this charge; None when nothing was committed for
    it or is kept. Raises TemporarilyUnavailable."""
    response = idempotency.find(database, scope, deadline=deadline)
    # Refund and refusal alike name the charge.
    is_of_charge = response is not None and json.loads(response.body).get("chargeId") == str(charge_id)
    return response if is_of_charge else None


def read(database: Database, principal: str, charge_id: UUID, refund_id: UUID, *, deadline: float) -> Refund:
    """Returns the refund of the principal's charge. Raises NoSuchResource and TemporarilyUnavailable."""
    parameters = {"refund_id": refund_id, "charge_id": charge_id, "principal": principal}
    rows = database.fetch_repeatable(class_row(Refund), sql.READ_REFUND, parameters, deadline=deadline)
    if not rows:
        raise errors.NoSuchResource("The caller's charge has no refund with this id.")
    return rows[0]
