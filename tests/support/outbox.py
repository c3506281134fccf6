"""Rows in the outbox, and the passing of their time."""

import json
import time
from collections.abc import Iterable
from dataclasses import dataclass
from datetime import UTC, datetime
from typing import Any
from uuid import UUID, uuid4

import psycopg
import pytest
from psycopg.rows import class_row

from charging import outbox
from charging.identifiers import time_ordered_uuid

type Connection = psycopg.Connection[tuple[Any, ...]]


@dataclass(frozen=True, slots=True)
class Row:
    """What is to be known of one row. `due_in_seconds` is negative for a row that is due."""

    id: UUID
    attempts: int
    refusals: int
    last_error: str | None
    is_published: bool
    is_failed: bool
    due_in_seconds: float


def payload(
    event_id: UUID,
    *,
    event_type: str = "ChargeCreated",
    principal: str = "alice",
    amount_cents: int = 4900,
    currency: str = "USD",
    at: datetime | None = None,
) -> str:
    """A charge's event, or a refund's, as their statements write it."""
    charge_id = uuid4()
    data = {"chargeId": str(charge_id), "amountCents": amount_cents, "currency": currency}
    event = outbox.event(event_type, subject=charge_id, principal=principal, data=data, traceparent=None)["event"]
    return json.dumps(json.loads(str(event)) | {"id": str(event_id), "time": (at or datetime.now(UTC)).isoformat()})


def write(connection: Connection, *payloads: str | None, count: int = 1) -> list[UUID]:
    """Writes rows that are due and returns their ids.

    Without payloads, `count` rows with charges' events.
    """
    texts = payloads or [None] * count
    ids = [time_ordered_uuid() for _ in texts]
    with connection.transaction(), connection.cursor() as cursor:
        cursor.executemany(
            "INSERT INTO outbox (id, event_type, aggregate_id, payload) VALUES (%s, 'ChargeCreated', %s, %s)",
            [
                (event_id, uuid4(), payload(event_id) if text is None else text)
                for event_id, text in zip(ids, texts, strict=True)
            ],
        )
    return ids


def write_aggregates(connection: Connection, *, aggregates: int, events: int) -> dict[UUID, list[UUID]]:
    """Writes several events of each aggregate, all due, and returns each one's ids in the order of their places.

    The rows are written in an order of their own, and each is due at a moment of its own.
    """
    ids = {uuid4(): [uuid4() for _ in range(events)] for _ in range(aggregates)}
    rows = [
        (event_id, aggregate, payload(event_id), place)
        for aggregate, its in ids.items()
        for place, event_id in enumerate(its, start=1)
    ]
    with connection.transaction(), connection.cursor() as cursor:
        cursor.executemany(
            """
            INSERT INTO outbox (id, event_type, aggregate_id, payload, sequence, next_attempt_at)
            VALUES (%s, 'ChargeCreated', %s, %s, %s, now() - random() * interval '1 hour')
            """,
            sorted(rows),  # by ids that are random
        )
    return ids


def fill(connection: Connection, *, count: int) -> set[UUID]:
    """Writes many rows that are due, each of a charge of its own, and returns their ids."""
    written = connection.execute(
        """
        INSERT INTO outbox (id, event_type, aggregate_id, payload)
        SELECT
            id, 'ChargeCreated', gen_random_uuid(),
            json_build_object('id', id, 'data', json_build_object('amountCents', n))
        FROM generate_series(1, %s) AS n, LATERAL (SELECT gen_random_uuid() AS id WHERE n > 0) AS made
        RETURNING id
        """,
        [count],
    ).fetchall()
    return {event_id for (event_id,) in written}


def rows(connection: Connection, ids: Iterable[UUID] | None = None) -> list[Row]:
    """The rows as they are now, in the order of the ids, or all of them in the order of their making."""
    found = (
        connection.cursor(row_factory=class_row(Row))
        .execute(
            """
            SELECT id, attempts, refusals, last_error,
                published_at IS NOT NULL AS is_published, failed_at IS NOT NULL AS is_failed,
                extract(EPOCH FROM next_attempt_at - clock_timestamp())::float8 AS due_in_seconds
            FROM outbox
            ORDER BY id
            """
        )
        .fetchall()
    )
    by_id = {row.id: row for row in found}
    return found if ids is None else [by_id[event_id] for event_id in ids]


def row(connection: Connection, event_id: UUID) -> Row:
    """One row as it is now."""
    return rows(connection, [event_id])[0]


def let_pass(connection: Connection, *, seconds: float) -> None:
    """Lets time pass for every row that waits, whether for its turn or for the end of a lease."""
    connection.execute(
        """
        UPDATE outbox
        SET next_attempt_at = next_attempt_at - make_interval(secs => %s)
        WHERE published_at IS NULL AND failed_at IS NULL
        """,
        [seconds],
    )


class Clock:
    """Time that passes only while the relay pauses, for the relay and for the rows alike."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, connection: Connection) -> None:
        self.pauses: list[float] = []
        self._connection = connection
        self._passed = 0.0
        monkeypatch.setattr(time, "monotonic", lambda: self._passed)
        # The rows are set back, and with them those that a claim has not got to yet.
        monkeypatch.setattr(outbox, "FULL_LOOK_SECONDS", 0.0)

    def pause(self, seconds: float) -> None:
        self.pauses.append(seconds)
        self._passed += seconds
        let_pass(self._connection, seconds=seconds)
