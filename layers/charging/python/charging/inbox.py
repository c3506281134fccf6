"""A consumer's inbox: each event takes effect once, however often it is delivered.

Copy this module, its statement and the table `processed_events` into any service that consumes the events.
"""

from typing import Any
from uuid import UUID

import psycopg

from charging import sql


def is_first_delivery(transaction: psycopg.Connection[Any], consumer: str, event_id: UUID) -> bool:
    """Notes the event for this consumer, and tells whether it is new to it.

    Call it inside the transaction that applies the event, before the effects: both are committed or neither.
    """
    return transaction.execute(sql.RECORD_DELIVERY, {"consumer": consumer, "event_id": event_id}).rowcount == 1
