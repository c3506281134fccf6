"""The subscriber's projection: what each principal charged and refunded, by currency and UTC day.

Every event only adds to its day's figures, so any order of them comes to the same.
"""

from datetime import UTC
from typing import Annotated, Any, Literal
from uuid import UUID

import psycopg
from pydantic import AwareDatetime, BaseModel, ConfigDict, Field, ValidationError

from charging import errors, inbox, sql
from charging.database import Database

CONSUMER = "charge_totals"


class _Money(BaseModel):
    model_config = ConfigDict(frozen=True)

    amount_cents: Annotated[int, Field(alias="amountCents", ge=1)]
    currency: str


class MoneyMoved(BaseModel):
    """A charge's or a refund's event, as far as the projection needs it. Unknown attributes are somebody else's."""

    model_config = ConfigDict(frozen=True)

    specversion: Literal["1.0"]
    type: Literal["ChargeCreated", "ChargeRefunded"]
    id: UUID
    time: AwareDatetime
    principal: str
    data: _Money


def read(message: str) -> MoneyMoved:
    """Returns the event in a message's body. Raises InvalidEvent, without the message's content."""
    try:
        return MoneyMoved.model_validate_json(message)
    except ValidationError as invalid:
        faults = invalid.errors(include_url=False, include_input=False, include_context=False)
        where = "; ".join(f"{'.'.join(map(str, fault['loc']))}: {fault['msg']}" for fault in faults)
        raise errors.InvalidEvent(f"The message is no event of a charge or a refund. {where}") from None


def apply(database: Database, event: MoneyMoved) -> bool:
    """Adds the event to its principal's totals, once; returns False for an event that was there before."""
    with database.transaction() as transaction:
        if not inbox.is_first_delivery(transaction, CONSUMER, event.id):
            return False
        _add(transaction, event)
        return True


def _add(transaction: psycopg.Connection[Any], event: MoneyMoved) -> None:
    is_refund = event.type == "ChargeRefunded"
    transaction.execute(
        sql.ADD_TO_TOTALS,
        {
            "principal": event.principal,
            "currency": event.data.currency,
            "day": event.time.astimezone(UTC).date(),
            "charges": int(not is_refund),
            "amount_cents": 0 if is_refund else event.data.amount_cents,
            "refunds": int(is_refund),
            "refunded_cents": event.data.amount_cents if is_refund else 0,
        },
    )
