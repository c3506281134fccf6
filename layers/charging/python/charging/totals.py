"""The subscriber's projection: what each principal charged, by currency and UTC day."""

from datetime import UTC
from typing import Annotated, Any, Literal
from uuid import UUID

import psycopg
from pydantic import AwareDatetime, BaseModel, ConfigDict, Field, ValidationError

from charging import errors, inbox, sql
from charging.database import Database

CONSUMER = "charge_totals"


class _Charge(BaseModel):
    model_config = ConfigDict(frozen=True)

    amount_cents: Annotated[int, Field(alias="amountCents", ge=1)]
    currency: str


class ChargeCreated(BaseModel):
    """A `ChargeCreated` event, as far as the projection needs it. Unknown attributes are somebody else's."""

    model_config = ConfigDict(frozen=True)

    specversion: Literal["1.0"]
    type: Literal["ChargeCreated"]
    id: UUID
    time: AwareDatetime
    principal: str
    data: _Charge


def read(message: str) -> ChargeCreated:
    """Returns the event in a message's body. Raises InvalidEvent, without the message's content."""
    try:
        return ChargeCreated.model_validate_json(message)
    except ValidationError as invalid:
        faults = invalid.errors(include_url=False, include_input=False, include_context=False)
        where = "; ".join(f"{'.'.join(map(str, fault['loc']))}: {fault['msg']}" for fault in faults)
        raise errors.InvalidEvent(f"The message is no ChargeCreated event. {where}") from None


def apply(database: Database, event: ChargeCreated) -> bool:
    """Adds the charge to its principal's total, once; returns False for an event that was there before."""
    with database.transaction() as transaction:
        if not inbox.is_first_delivery(transaction, CONSUMER, event.id):
            return False
        _add(transaction, event)
        return True


def _add(transaction: psycopg.Connection[Any], event: ChargeCreated) -> None:
    transaction.execute(
        sql.ADD_TO_TOTALS,
        {
            "principal": event.principal,
            "currency": event.data.currency,
            "day": event.time.astimezone(UTC).date(),
            "amount_cents": event.data.amount_cents,
        },
    )
