"""What a database holds of charges, and another caller who is in the middle of one."""

import contextlib
import os
import threading
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from types import TracebackType
from typing import Any, LiteralString, Self
from unittest import mock
from uuid import UUID, uuid4

import psycopg

from charging import charges, contract, refunds
from charging.charges import ChargeCommand
from charging.contract import Call, Command, Scope
from charging.database import Database
from charging.idempotency import Created, Outcome
from charging.refunds import RefundCommand
from charging.settings import DatabaseSettings
from tests.support.invocation import database_variables

type Connection = psycopg.Connection[tuple[Any, ...]]

# Charges or refunds, events, keys.
NOTHING = (0, 0, 0)
ONCE = (1, 1, 1)

# Whatever is waited for here comes in milliseconds; this ends a test that would hang.
PATIENCE_SECONDS = 20.0


def counts(connection: Connection, effects: LiteralString = "charges") -> tuple[int, ...]:
    """How many charges, or rows of another table, and how many events and keys are committed."""
    tables = (effects, "outbox", "idempotency_keys")
    row = connection.execute(f"SELECT {', '.join(f'(SELECT count(*) FROM {table})' for table in tables)}").fetchone()
    assert row is not None
    return row


def settings(database_url: str) -> DatabaseSettings:
    """The settings that lead to a database."""
    with mock.patch.dict(os.environ, database_variables(database_url)):
        return DatabaseSettings.from_environment()


def charge(
    database: Database, key: UUID, *, principal: str = "alice", amount_cents: int = 4900, wait_seconds: float = 0.0
) -> Outcome:
    """Charges as the function does, for callers that share a process and each have a connection of their own."""
    command = ChargeCommand(amountCents=amount_cents)
    return charges.create(
        database, call_of(charges.ENDPOINT, key, command, principal=principal, wait_seconds=wait_seconds)
    )


def charged(database: Database, *, amount_cents: int = 1000) -> UUID:
    """A new charge of alice's."""
    outcome = charge(database, uuid4(), amount_cents=amount_cents)
    assert isinstance(outcome, Created)
    return UUID(outcome.response.headers["Location"].removeprefix("/charges/"))


def refund(database: Database, key: UUID, charge_id: UUID, amount_cents: int, *, principal: str = "alice") -> Outcome:
    """Refunds as the function does."""
    command = RefundCommand(amountCents=amount_cents)
    return refunds.create(database, call_of(refunds.ENDPOINT, key, command, principal=principal), charge_id)


def call_of[C: Command](
    endpoint: str,
    key: UUID,
    command: C,
    *,
    principal: str = "alice",
    traceparent: str | None = None,
    wait_seconds: float = 0.0,
) -> Call[C]:
    """A call as a request makes it, with all the time that there is."""
    return Call(
        Scope(principal, endpoint, key),
        command,
        traceparent=traceparent,
        retention_hours=24,
        in_flight_wait_seconds=wait_seconds,
        deadline=time.monotonic() + PATIENCE_SECONDS,
    )


@contextlib.contextmanager
def warm_callers(database_url: str, number: int, key: UUID) -> Iterator[list[Database]]:
    """Opens a connection for each of so many callers, and charges over it as a principal whom no test asks about."""
    with contextlib.ExitStack() as opened:
        databases = []
        for _ in range(number):
            database = Database(settings(database_url))
            opened.callback(database.close)
            charge(database, key, principal="warm")
            databases.append(database)
        yield databases


def race(callers: Sequence[Database], call: Callable[[int, Database], Outcome]) -> list[Outcome]:
    """Lets all callers go at once and returns what each was told; an exception of any is an exception here."""
    together = threading.Barrier(len(callers))

    def run(number: int) -> Outcome:
        together.wait()
        return call(number, callers[number])

    with ThreadPoolExecutor(len(callers)) as threads:
        return list(threads.map(run, range(len(callers))))


class Twin:
    """Another caller, whose charge is made and neither committed nor undone: the very statement, in an open
    transaction."""

    def __init__(self, database_url: str, key: UUID, *, principal: str = "alice", amount_cents: int = 4900) -> None:
        self._open = contextlib.ExitStack()
        self._database = Database(settings(database_url))
        self._open.callback(self._database.close)
        self._open.enter_context(self._database.transaction())
        outcome = charge(self._database, key, principal=principal, amount_cents=amount_cents)
        assert isinstance(outcome, Created)
        self.response = outcome.response

    def commit(self) -> None:
        """Ends as a success."""
        self._open.close()

    def roll_back(self) -> None:
        """Ends as a failure."""
        undone = psycopg.Rollback()
        self._open.__exit__(type(undone), undone, None)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.roll_back()


# What a statement is held up by when all of its rows are written: a trigger that waits for an advisory lock.
_HOLD = 20261201
_HOLD_UP = """
CREATE FUNCTION hold_up() RETURNS trigger LANGUAGE plpgsql
AS 'BEGIN PERFORM pg_advisory_xact_lock_shared({lock}); RETURN NULL; END';
CREATE CONSTRAINT TRIGGER hold_up AFTER {event} {when} FOR EACH ROW WHEN ({rows}) EXECUTE FUNCTION hold_up()
"""


@contextlib.contextmanager
def holding_up(
    connection: Connection, *, at_commit: bool, event: str = "INSERT ON outbox", rows: str = "true"
) -> Iterator[None]:
    """Holds charges up as long as the block lasts: within the statement, or later, when its answer stands in the
    server's buffer and only the commit is missing. Or whatever else happens to a row of some kind."""
    when = "DEFERRABLE INITIALLY DEFERRED" if at_commit else ""
    connection.execute(_HOLD_UP.format(lock=_HOLD, event=event, when=when, rows=rows))
    connection.execute("SELECT pg_advisory_lock(%s)", [_HOLD])
    try:
        yield
    finally:
        connection.execute("SELECT pg_advisory_unlock(%s)", [_HOLD])


def until(is_so: Callable[[], bool]) -> None:
    """Returns once it is so."""
    end = time.monotonic() + PATIENCE_SECONDS
    while not is_so():
        assert time.monotonic() < end


def until_blocked(connection: Connection, *, waiting: int = 1) -> None:
    """Returns once so many other connections to this database wait for a lock."""
    query = (
        "SELECT count(*) FROM pg_stat_activity "
        "WHERE datname = current_database() AND pid <> pg_backend_pid() AND wait_event_type = 'Lock'"
    )
    until(lambda: connection.execute(query).fetchone() == (waiting,))


def stored_by_hand(
    connection: Connection, key: UUID, *, endpoint: str = charges.ENDPOINT, amount_cents: int = 4900
) -> None:
    """Stores a key as a caller would that does not take the key's advisory lock: only the unique index tells of it."""
    connection.execute(
        "INSERT INTO idempotency_keys "
        "(principal, endpoint, key, fingerprint, status, response_status, response_headers, response_body, expires_at) "
        "VALUES ('alice', %s, %s, %s, 'COMPLETED', 201, '{}', '{\"by\":\"hand\"}', now() + interval '24 hours')",
        [endpoint, key, contract.fingerprint(ChargeCommand(amountCents=amount_cents))],
    )
