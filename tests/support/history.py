"""Rows that have grown old: keys, events, what a consumer noted of events, and charges and refunds with their events or
without."""

from datetime import timedelta
from typing import Any
from uuid import UUID, uuid4

import psycopg

type Connection = psycopg.Connection[tuple[Any, ...]]

SECOND = timedelta(seconds=1)
MINUTE = timedelta(minutes=1)
HOUR = timedelta(hours=1)
DAY = timedelta(days=1)


def keys(connection: Connection, count: int, *, over_for: timedelta, status: str = "COMPLETED") -> list[UUID]:
    """Stores keys whose time has been over for so long, each a millisecond longer than the one before it."""
    return _ids(
        connection,
        """
        WITH stored AS (
            SELECT number, now() - make_interval(secs => %(over_for)s) - (number - 1) * interval '1 ms' AS expires_at
            FROM generate_series(1, %(count)s) AS number
        )
        INSERT INTO idempotency_keys (
            principal, endpoint, key, fingerprint, status,
            response_status, response_headers, response_body, created_at, expires_at
        )
        SELECT
            'alice', 'POST /charges', gen_random_uuid(), 'v1:0', %(status)s,
            201, '{}', '{}', expires_at - interval '24 hours', expires_at
        FROM stored
        RETURNING key
        """,
        {"count": count, "over_for": over_for.total_seconds(), "status": status},
    )


def events(connection: Connection, count: int, *, published: timedelta) -> list[UUID]:
    """Writes events that were published so long ago, each a millisecond before the one before it."""
    return _ids(
        connection,
        """
        INSERT INTO outbox (id, event_type, aggregate_id, payload, created_at, next_attempt_at, attempts, published_at)
        SELECT gen_random_uuid(), 'ChargeCreated', gen_random_uuid(), '{}', published_at, published_at, 1, published_at
        FROM (
            SELECT now() - make_interval(secs => %(published)s) - (number - 1) * interval '1 ms' AS published_at
            FROM generate_series(1, %(count)s) AS number
        ) AS event
        RETURNING id
        """,
        {"count": count, "published": published.total_seconds()},
    )


def notes(connection: Connection, count: int, *, processed: timedelta) -> list[UUID]:
    """Notes events that a consumer has processed so long ago, each a millisecond before the one before it."""
    return _ids(
        connection,
        """
        INSERT INTO processed_events (consumer, event_id, processed_at)
        SELECT
            'charge_totals', gen_random_uuid(),
            now() - make_interval(secs => %(processed)s) - (number - 1) * interval '1 ms'
        FROM generate_series(1, %(count)s) AS number
        RETURNING event_id
        """,
        {"count": count, "processed": processed.total_seconds()},
    )


def charges(connection: Connection, count: int, *, made: timedelta) -> list[UUID]:
    """Makes charges as they should never be made: without an event."""
    return _ids(
        connection,
        """
        INSERT INTO charges (id, principal, amount_cents, currency, created_at)
        SELECT
            gen_random_uuid(), 'alice', 4900, 'USD',
            now() - make_interval(secs => %(made)s) - (number - 1) * interval '1 ms'
        FROM generate_series(1, %(count)s) AS number
        RETURNING id
        """,
        {"count": count, "made": made.total_seconds()},
    )


def refund(connection: Connection, charge_id: UUID, *, made: timedelta) -> int:
    """Refunds a part of a charge without an event, and returns the place among the charge's events that this has."""
    [place] = connection.execute(
        """
        WITH refunded AS (
            UPDATE charges
            SET refunds = refunds + 1, refunded_cents = refunded_cents + 1
            WHERE id = %(charge_id)s
            RETURNING refunds AS number
        )
        INSERT INTO refunds (id, charge_id, number, amount_cents, created_at)
        SELECT gen_random_uuid(), %(charge_id)s, number, 1, now() - make_interval(secs => %(made)s)
        FROM refunded
        RETURNING number + 1
        """,
        {"charge_id": charge_id, "made": made.total_seconds()},
    ).fetchall()
    number: int = place[0]
    return number


def announce(connection: Connection, charge_id: UUID, *, place: int = 1, published: timedelta | None = None) -> UUID:
    """Writes an event of a charge, by its place: one that waits, or one that was published so long ago."""
    [event_id] = _ids(
        connection,
        """
        INSERT INTO outbox (id, event_type, aggregate_id, sequence, payload, published_at)
        VALUES (
            %(id)s, %(event_type)s, %(charge_id)s, %(place)s, '{}', now() - make_interval(secs => %(published)s)
        )
        RETURNING id
        """,
        {
            "id": uuid4(),
            "event_type": "ChargeCreated" if place == 1 else "ChargeRefunded",
            "charge_id": charge_id,
            "place": place,
            "published": None if published is None else published.total_seconds(),
        },
    )
    return event_id


def _ids(connection: Connection, statement: str, parameters: dict[str, object]) -> list[UUID]:
    return [row[0] for row in connection.execute(statement, parameters).fetchall()]
