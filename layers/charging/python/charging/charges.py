"""Charges: the one statement that makes a charge, its event and its replayable answer a single fact."""

import json
from dataclasses import dataclass
from uuid import UUID

from psycopg.rows import class_row

from charging import contract, errors, idempotency, outbox, sql
from charging.contract import ChargeCommand
from charging.database import Database
from charging.idempotency import Outcome, Scope, StoredResponse
from charging.identifiers import time_ordered_uuid

ENDPOINT = "POST /charges"
EVENT_TYPE = "ChargeCreated"


@dataclass(frozen=True, slots=True)
class Charge:
    """A charge as its owner sees it."""

    id: UUID
    amount_cents: int
    currency: str
    reference: str | None

    def to_json(self) -> str:
        """Returns the charge as the API shows it, in the order in which it always shows it."""
        members: dict[str, object] = {
            "id": str(self.id),
            "amountCents": self.amount_cents,
            "currency": self.currency,
        }
        if self.reference is not None:
            members["reference"] = self.reference
        return json.dumps(members, ensure_ascii=False, separators=(",", ":"))


def create(
    database: Database,
    scope: Scope,
    command: ChargeCommand,
    *,
    retention_hours: int,
    in_flight_wait_seconds: float,
    traceparent: str | None,
    deadline: float,
) -> Outcome:
    """Makes the charge, once for its key; a repetition gets the first answer back.

    The key, the charge, its outbox row and the stored response are committed by one statement, in one round
    trip. Raises TemporarilyUnavailable and OutcomeUnknown as `idempotency.perform` does.
    """
    charge_id = time_ordered_uuid()
    event_id = time_ordered_uuid()
    money = command.model_dump(by_alias=True, exclude_none=True)
    response = StoredResponse(
        status=201,
        headers={"Content-Type": "application/json", "Location": f"/charges/{charge_id}"},
        body=Charge(charge_id, command.amount_cents, command.currency, command.reference).to_json(),
    )
    event = outbox.event(
        event_id,
        EVENT_TYPE,
        subject=charge_id,
        principal=scope.principal,
        data={"chargeId": str(charge_id), **money},
        traceparent=traceparent,
    )
    parameters = {
        "principal": scope.principal,
        "endpoint": scope.endpoint,
        "key": scope.key,
        "fingerprint": contract.fingerprint(command),
        "retention_hours": retention_hours,
        "response_status": response.status,
        "response_headers": json.dumps(response.headers),
        "response_body": response.body,
        "charge_id": charge_id,
        "amount_cents": command.amount_cents,
        "currency": command.currency,
        "reference": command.reference,
        "event_id": event_id,
        "event_type": EVENT_TYPE,
        "event": event,
    }
    return idempotency.perform(
        database,
        sql.CREATE_CHARGE,
        parameters,
        command,
        response,
        in_flight_wait_seconds=in_flight_wait_seconds,
        deadline=deadline,
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
