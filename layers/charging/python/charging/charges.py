"""Charges: the one statement that makes a charge, its event and its replayable answer a single fact."""

from dataclasses import dataclass
from uuid import UUID

from psycopg.rows import class_row
from pydantic import Field

from charging import compact, errors, idempotency, outbox, sql
from charging.contract import AmountCents, Call, Command, Currency, Reference
from charging.database import Database
from charging.idempotency import Outcome, StoredResponse
from charging.identifiers import time_ordered_uuid

ENDPOINT = "POST /charges"


class ChargeCommand(Command):
    """One charge: an amount in the currency's minor unit, and a text of the caller's own."""

    amount_cents: AmountCents = Field(alias="amountCents")
    currency: Currency = "USD"
    reference: Reference = None


@dataclass(frozen=True, slots=True)
class Charge:
    """A charge as its owner sees it. What has been refunded of it is shown where there is something."""

    id: UUID
    amount_cents: int
    currency: str
    reference: str | None
    refunded_cents: int = 0

    def members(self) -> dict[str, object]:
        """Returns the charge as the API shows it, in the order in which it always shows it."""
        return compact.given({"id": str(self.id), **self.money(), "refundedCents": self.refunded_cents or None})

    def money(self) -> dict[str, object]:
        """Returns what was charged."""
        return compact.given({"amountCents": self.amount_cents, "currency": self.currency, "reference": self.reference})


def create(database: Database, call: Call[ChargeCommand]) -> Outcome:
    """Makes the charge, once for its key; a repetition gets the first answer back.

    The key, the charge, its outbox row, the event's deliveries and the stored response are committed by one statement,
    in one round trip. Raises TemporarilyUnavailable and OutcomeUnknown as `idempotency.perform` does.
    """
    command = call.command
    charge = Charge(time_ordered_uuid(), command.amount_cents, command.currency, command.reference)
    return idempotency.perform(
        database,
        call,
        sql.CREATE_CHARGE,
        {
            "charge_id": charge.id,
            **outbox.event_of(
                call, "ChargeCreated", subject=charge.id, data={"chargeId": str(charge.id), **charge.money()}
            ),
        },
        StoredResponse.created(f"/charges/{charge.id}", charge.members()),
    )


def read(database: Database, principal: str, charge_id: UUID, *, deadline: float) -> Charge:
    """Returns the principal's charge.

    Raises NoSuchResource where it is nobody's or somebody else's, alike, and TemporarilyUnavailable.
    """
    parameters = {"charge_id": charge_id, "principal": principal}
    rows = database.fetch_repeatable(class_row(Charge), sql.READ_CHARGE, parameters, deadline=deadline)
    if not rows:
        raise errors.NoSuchResource("The caller has no charge with this id.")
    return rows[0]
