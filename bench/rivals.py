"""What a user would write instead, at its best: prepared statements on a warm connection, and nothing around them.

The parameters are the ones that the charge's own statement takes, and the tables are the same.
"""

from collections.abc import Callable, Mapping
from typing import TYPE_CHECKING, Any

import psycopg

if TYPE_CHECKING:
    from mypy_boto3_sns import SNSClient
    from mypy_boto3_sns.type_defs import MessageAttributeValueTypeDef

type Connection = psycopg.Connection[tuple[Any, ...]]
type Parameters = Mapping[str, Any]

_FIND_KEY = b"""
    SELECT status, fingerprint, response_status, response_headers, response_body
    FROM idempotency_keys
    WHERE principal = %(principal)s AND endpoint = %(endpoint)s AND key = %(key)s
"""
_INSERT_KEY = b"""
    INSERT INTO idempotency_keys (principal, endpoint, key, fingerprint, status, expires_at)
    VALUES (
        %(principal)s, %(endpoint)s, %(key)s, %(fingerprint)s, 'STARTED',
        now() + make_interval(hours => %(retention_hours)s::int)
    )
"""
_INSERT_CHARGE = b"""
    INSERT INTO charges (id, principal, amount_cents, currency, reference)
    VALUES (%(charge_id)s, %(principal)s, %(amount_cents)s, %(currency)s, %(reference)s)
"""
_INSERT_EVENT = b"""
    INSERT INTO outbox (id, event_type, aggregate_id, payload)
    VALUES (%(event_id)s, %(event_type)s, %(charge_id)s, %(event)s)
"""
_COMPLETE_KEY = b"""
    UPDATE idempotency_keys
    SET status = 'COMPLETED',
        response_status = %(response_status)s,
        response_headers = %(response_headers)s::jsonb,
        response_body = %(response_body)s
    WHERE principal = %(principal)s AND endpoint = %(endpoint)s AND key = %(key)s
"""


def charge_by_the_textbook(connection: Connection, parameters: Parameters) -> None:
    """Charges in one transaction of several statements."""
    with connection.transaction():
        if connection.execute(_FIND_KEY, parameters).fetchone() is None:
            connection.execute(_INSERT_KEY, parameters)
            connection.execute(_INSERT_CHARGE, parameters)
            connection.execute(_INSERT_EVENT, parameters)
            connection.execute(_COMPLETE_KEY, parameters)


def charge_like_a_library(connection: Connection, parameters: Parameters) -> None:
    """Charges as where idempotency is a library around the work: the key, the work and the completion are committed
    one after another."""
    connection.execute(_INSERT_KEY, parameters)
    with connection.transaction():
        connection.execute(_INSERT_CHARGE, parameters)
        connection.execute(_INSERT_EVENT, parameters)
    connection.execute(_COMPLETE_KEY, parameters)


_FIND_EVENTS = b"""
    SELECT id, event_type, payload
    FROM outbox
    WHERE published_at IS NULL AND failed_at IS NULL
    ORDER BY next_attempt_at, id
    LIMIT %(limit)s
    FOR UPDATE SKIP LOCKED
"""
_MARK_EVENT = b"UPDATE outbox SET published_at = now() WHERE id = %(id)s"


def relay_by_the_textbook(connection: Connection, topic: "SNSClient", arn: str, *, limit: int) -> int:
    """Sends as many events, each in a call of its own and marked in a statement of its own, all in one transaction.

    Returns how many there were.
    """
    with connection.transaction():
        events = connection.execute(_FIND_EVENTS, {"limit": limit}).fetchall()
        for event_id, event_type, payload in events:
            attributes: dict[str, MessageAttributeValueTypeDef] = {
                "eventType": {"DataType": "String", "StringValue": event_type},
                "outboxId": {"DataType": "String", "StringValue": str(event_id)},
            }
            topic.publish(TopicArn=arn, Message=payload, MessageAttributes=attributes)
            connection.execute(_MARK_EVENT, {"id": event_id})
    return len(events)


_FIND_DELIVERIES = b"""
    SELECT endpoint_id, event_id, payload
    FROM outbox_deliveries
    WHERE status = 'PENDING' AND next_attempt_at <= now()
    ORDER BY next_attempt_at
    LIMIT %(limit)s
    FOR UPDATE SKIP LOCKED
"""
_MARK_DELIVERY = b"""
    UPDATE outbox_deliveries
    SET status = 'SENT', sent_at = now()
    WHERE endpoint_id = %(endpoint_id)s AND event_id = %(event_id)s
"""


def deliver_by_the_textbook(connection: Connection, post: Callable[[bytes], bool], *, limit: int) -> int:
    """Sends as many deliveries one after the other, each marked in a statement of its own, all in one transaction.

    Returns how many arrived.
    """
    sent = 0
    with connection.transaction():
        deliveries = connection.execute(_FIND_DELIVERIES, {"limit": limit}).fetchall()
        for endpoint_id, event_id, payload in deliveries:
            if post(payload.encode()):
                connection.execute(_MARK_DELIVERY, {"endpoint_id": endpoint_id, "event_id": event_id})
                sent += 1
    return sent
