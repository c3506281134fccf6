"""Events by the hundred thousand, as charges write them: made by the database, since Python would take minutes."""

from typing import Any

import psycopg

from bench import reporting

type Connection = psycopg.Connection[tuple[Any, ...]]

# Rows of one statement: enough to be quick, few enough for progress to show.
_CHUNK = 100_000

# 400 bytes each, with ids in the order of their making; `number` counts them.
_EVENTS = b"""
    SELECT
        number,
        id,
        'ChargeCreated' AS event_type,
        aggregate_id,
        json_build_object(
            'specversion', '1.0', 'id', id, 'source', '/charges', 'type', 'ChargeCreated', 'subject', aggregate_id,
            'datacontenttype', 'application/json', 'principal', 'arn:aws:sts::111122223333:assumed-role/checkout',
            'data', json_build_object('chargeId', aggregate_id, 'amountCents', 4900, 'currency', 'USD'),
            'time', now()
        )::text AS payload
    FROM (
        SELECT number, uuidv7() AS id, uuidv7() AS aggregate_id
        FROM generate_series(%(first)s::bigint, %(last)s::bigint) AS number
    ) AS made
"""

# What has just been charged.
CHARGED = (
    b"""
    INSERT INTO outbox (id, event_type, aggregate_id, payload)
    SELECT id, event_type, aggregate_id, payload
    FROM (%b) AS events
"""
    % _EVENTS
)
# What an outage of an hour has left: due since they were charged, one after the other.
PILED_UP = (
    b"""
    INSERT INTO outbox (id, event_type, aggregate_id, payload, created_at, next_attempt_at)
    SELECT id, event_type, aggregate_id, payload, charged_at, charged_at
    FROM (%b) AS events,
        LATERAL (VALUES (now() - interval '1 hour' * (2 - number::float8 / %%(count)s))) AS outage (charged_at)
"""
    % _EVENTS
)
# What has been published, and is kept.
KEPT = (
    b"""
    INSERT INTO outbox (id, event_type, aggregate_id, payload, created_at, attempts, next_attempt_at, published_at)
    SELECT id, event_type, aggregate_id, payload, at, 1, at, at
    FROM (%b) AS events, (VALUES (now() - interval '1 day')) AS history (at)
"""
    % _EVENTS
)


def write(connection: Connection, kind: bytes, count: int) -> None:
    """Writes so many events of a kind."""
    for first in range(1, count + 1, _CHUNK):
        last = min(count, first + _CHUNK - 1)
        connection.execute(kind, {"first": first, "last": last, "count": count})
        if last % (10 * _CHUNK) == 0:
            reporting.progress(f"{last:,} of {count:,} events")


def lift_limits(connection: Connection) -> None:
    """Frees a session from the limits that the migrations set for the functions."""
    for limit in ("statement_timeout", "transaction_timeout", "idle_in_transaction_session_timeout"):
        connection.execute(f"SET {limit} = 0")
