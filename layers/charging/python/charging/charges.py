"""Charges: the one statement that makes a charge, its event and its replayable answer a single fact."""

import json
from typing import Any

from charging import contract, idempotency, outbox, sql
from charging.contract import ChargeCommand
from charging.database import Database
from charging.idempotency import Outcome, Scope, StoredResponse
from charging.identifiers import time_ordered_uuid

ENDPOINT = "POST /charges"
EVENT_TYPE = "ChargeCreated"


def create(
    database: Database,
    scope: Scope,
    command: ChargeCommand,
    *,
    retention_hours: int,
    traceparent: str | None,
    deadline: float,
) -> Outcome:
    """Makes the charge, once for its key; a repetition gets the first answer back.

    The key, the charge, its outbox row and the stored response are committed by one statement, in one round
    trip. Raises TemporarilyUnavailable and OutcomeUnknown as `idempotency.perform` does.
    """
    charge_id = time_ordered_uuid()
    event_id = time_ordered_uuid()
    money: dict[str, Any] = {"amountCents": command.amount_cents, "currency": command.currency}
    if command.reference is not None:
        money["reference"] = command.reference
    response = StoredResponse(
        status=201,
        headers={"Content-Type": "application/json", "Location": f"/charges/{charge_id}"},
        body=json.dumps({"id": str(charge_id), **money}, ensure_ascii=False, separators=(",", ":")),
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
    return idempotency.perform(database, sql.CREATE_CHARGE, parameters, command, response, deadline=deadline)
