"""Events by the hundred thousand, as charges write them: made by the database, since Python would take minutes."""

from typing import Any

import psycopg

from bench import reporting

type Connection = psycopg.Connection[tuple[Any, ...]]

# Rows of one statement: enough to be quick, few enough for progress to show.
_CHUNK = 100_000

# 400 bytes each, with ids in the order of their making.
_EVENTS = b"""
    SELECT
        id,
        'ChargeCreated' AS event_type,
        aggregate_id,
        json_build_object(
            'specversion', '1.0', 'id', id, 'source', '/charges', 'type', 'ChargeCreated', 'subject', aggregate_id,
            'datacontenttype', 'application/json', 'principal', 'arn:aws:sts::111122223333:assumed-role/checkout',
            'data', json_build_object('chargeId', aggregate_id, 'amountCents', 4900, 'currency', 'USD'),
            'time', now()
        )::text AS payload
    FROM (SELECT uuidv7() AS id, uuidv7() AS aggregate_id FROM generate_series(1, %(count)s)) AS made
"""

# What has just been charged.
CHARGED = b"INSERT INTO outbox (id, event_type, aggregate_id, payload)" + _EVENTS
# What an outage of an hour has left.
PILED_UP = (
    b"""
    INSERT INTO outbox (id, event_type, aggregate_id, payload, created_at, next_attempt_at)
    SELECT events.*, due_since, due_since
    FROM (%b) AS events, (VALUES (now() - interval '1 hour')) AS outage (due_since)
"""
    % _EVENTS
)
# What has been published, and is kept.
KEPT = (
    b"""
    INSERT INTO outbox (id, event_type, aggregate_id, payload, created_at, attempts, next_attempt_at, published_at)
    SELECT events.*, at, 1, at, at
    FROM (%b) AS events, (VALUES (now() - interval '1 day')) AS history (at)
"""
    % _EVENTS
)


def write(connection: Connection, kind: bytes, count: int) -> None:
    """Writes so many events of a kind."""
    for written in range(0, count, _CHUNK):
        connection.execute(kind, {"count": min(_CHUNK, count - written)})
        if (written + _CHUNK) % (10 * _CHUNK) == 0:
            reporting.progress(f"{written + _CHUNK:,} of {count:,} events")


def lift_limits(connection: Connection) -> None:
    """Frees a session from the limits that the migrations set for the functions."""
    for limit in ("statement_timeout", "transaction_timeout", "idle_in_transaction_session_timeout"):
        connection.execute(f"SET {limit} = 0")
