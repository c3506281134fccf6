"""Webhook endpoints and their deliveries as rows, and the passing of their time."""

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any
from uuid import UUID, uuid4

import psycopg
from psycopg.rows import class_row

from charging.identifiers import time_ordered_uuid
from tests.support import outbox

type Connection = psycopg.Connection[tuple[Any, ...]]

URL = "https://receiver.test/hook"


@dataclass(frozen=True, slots=True)
class Row:
    """What is to be known of one delivery. `due_in_seconds` is negative for one that is due."""

    endpoint_id: UUID
    event_id: UUID
    status: str
    attempts: int
    failures: int
    last_error: str | None
    due_in_seconds: float


@dataclass(frozen=True, slots=True)
class State:
    """What is to be known of one endpoint. `resumes_in_seconds` is None where nothing was ever held."""

    failures_in_a_row: int
    is_open: bool
    disabled_reason: str | None
    resumes_in_seconds: float | None


def register(
    connection: Connection, *, url: str = URL, principal: str = "alice", event_types: Iterable[str] = ("ChargeCreated",)
) -> UUID:
    """Writes an endpoint and returns its id."""
    endpoint_id = time_ordered_uuid()
    connection.execute(
        "INSERT INTO webhook_endpoints (id, principal, url, event_types) VALUES (%s, %s, %s, %s)",
        [endpoint_id, principal, url, list(event_types)],
    )
    return endpoint_id


def write(connection: Connection, endpoint_id: UUID, *, count: int = 1) -> list[UUID]:
    """Writes deliveries that are due and returns their events' ids."""
    ids = [time_ordered_uuid() for _ in range(count)]
    with connection.transaction(), connection.cursor() as cursor:
        cursor.executemany(
            "INSERT INTO outbox_deliveries (endpoint_id, event_id, event_type, aggregate_id, sequence, payload)"
            " VALUES (%s, %s, 'ChargeCreated', %s, 1, %s)",
            [(endpoint_id, event_id, uuid4(), outbox.payload(event_id)) for event_id in ids],
        )
    return ids


def settle(connection: Connection, event_id: UUID, *, duration_ms: int) -> None:
    """Has a delivery sent already, by an attempt that took so long."""
    connection.execute(
        """
        WITH sent AS (
            UPDATE outbox_deliveries SET status = 'SENT', sent_at = now(), attempts = 1
            WHERE event_id = %s
            RETURNING endpoint_id, event_id
        )
        INSERT INTO delivery_attempts (endpoint_id, event_id, attempt, duration_ms, status)
        SELECT endpoint_id, event_id, 1, %s, 200 FROM sent
        """,
        [event_id, duration_ms],
    )


def rows(connection: Connection, endpoint_id: UUID | None = None) -> list[Row]:
    """The deliveries as they are now, of all endpoints or of one, in the order of their events' ids."""
    return (
        connection.cursor(row_factory=class_row(Row))
        .execute(
            """
            SELECT endpoint_id, event_id, status, attempts, failures, last_error,
                extract(EPOCH FROM next_attempt_at - clock_timestamp())::float8 AS due_in_seconds
            FROM outbox_deliveries
            WHERE endpoint_id = COALESCE(%(endpoint_id)s, endpoint_id)
            ORDER BY event_id
            """,
            {"endpoint_id": endpoint_id},
        )
        .fetchall()
    )


def row(connection: Connection, endpoint_id: UUID) -> Row:
    """The endpoint's one delivery as it is now."""
    [found] = rows(connection, endpoint_id)
    return found


def state(connection: Connection, endpoint_id: UUID) -> State:
    """The endpoint as it is now."""
    [found] = (
        connection.cursor(row_factory=class_row(State))
        .execute(
            """
            SELECT failures_in_a_row, opened_at IS NOT NULL AS is_open, disabled_reason,
                extract(EPOCH FROM resumes_at - clock_timestamp())::float8 AS resumes_in_seconds
            FROM webhook_endpoints
            WHERE id = %s
            """,
            [endpoint_id],
        )
        .fetchall()
    )
    return found


def let_pass(connection: Connection, *, seconds: float) -> None:
    """Lets time pass for whatever waits: a delivery's turn, a lease, a pause, a probe, a secret's overlap."""
    passed = {"passed": seconds}
    connection.execute(
        """
        UPDATE outbox_deliveries
        SET next_attempt_at = next_attempt_at - make_interval(secs => %(passed)s)
        WHERE status IN ('PENDING', 'CLAIMED', 'RETRY')
        """,
        passed,
    )
    connection.execute(
        """
        UPDATE webhook_endpoints
        SET resumes_at = resumes_at - make_interval(secs => %(passed)s),
            opened_at = opened_at - make_interval(secs => %(passed)s),
            previous_signs_until = previous_signs_until - make_interval(secs => %(passed)s)
        """,
        passed,
    )
