"""What each stage of a charge's way costs: the database, over all of its processes, and the stage's function."""

import contextlib
import importlib
import os
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from unittest import mock

import psycopg
from psycopg.sql import SQL, Identifier

from bench import broker, events, function, reporting, webhooks
from bench.function import CONTEXT_SECONDS, Function, silence
from bench.sizing import Cost
from charging.topic import ENTRIES_PER_CALL
from tests.support import deliveries
from tests.support.database import Databases
from tests.support.invocation import Context, Event, Instance, charge_event, database_variables, sample

type Connection = psycopg.Connection[tuple[Any, ...]]

# As long as a role's ARN is.
PRINCIPAL = "arn:aws:iam::111122223333:role/checkout"
MAINTENANCE = {"OUTBOX_RETENTION_DAYS": "14", "PROCESSED_EVENTS_RETENTION_DAYS": "60"}
TABLES = (
    "idempotency_keys",
    "charges",
    "outbox",
    "processed_events",
    "outbox_deliveries",
    "delivery_attempts",
    "charge_totals",
)
_VACUUM = f"VACUUM {', '.join(TABLES)}".encode()
# All of it is past its retention, but for charges, which are to be looked at in one slice of the reconciliation.
_AGED = b"""
    WITH keys AS (UPDATE idempotency_keys SET created_at = created_at - interval '1 year', expires_at = now()),
    events AS (UPDATE outbox SET published_at = published_at - interval '1 year'),
    processed AS (UPDATE processed_events SET processed_at = processed_at - interval '1 year'),
    charged AS (UPDATE charges SET created_at = now() - interval '75 seconds')
    UPDATE reconciliation SET checked_until = now() - interval '85 seconds'
"""


@dataclass(frozen=True, slots=True)
class Found:
    """A charge's costs by stage, and the bytes that it leaves by table with its indexes, as long as all is kept."""

    costs: Mapping[str, Cost]
    kept_bytes: Mapping[str, float]


def measure(databases: Databases, charges: int) -> Found:
    """Takes so many charges through the stages, one stage after the other, on a database that nobody else uses."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(silence())
        url = stack.enter_context(databases.migrated())
        others = stack.enter_context(psycopg.connect(url, autocommit=True))
        events.lift_limits(others)
        for table in TABLES:
            # What autovacuum does is a stage of its own.
            others.execute(f"ALTER TABLE {table} SET (autovacuum_enabled = false)".encode())
        server = Server(others)
        authorities, certificate = webhooks.certified(Path(stack.enter_context(TemporaryDirectory())))
        receiver = stack.enter_context(broker.serve(certificate=certificate))
        charging = stack.enter_context(contextlib.closing(Function(url)))
        subscriber = importlib.import_module("functions.subscriber.handler")
        subscriber.database.cache_clear()
        with mock.patch.dict(os.environ, database_variables(url, "subscriber")):
            stack.enter_context(contextlib.closing(subscriber.database()))
        maintenance = stack.enter_context(contextlib.closing(Instance("maintenance", url, MAINTENANCE)))
        relay = stack.enter_context(function.relay(url, stack.enter_context(broker.serve())))
        dispatcher = stack.enter_context(function.webhooks(url, receiver, authorities))
        # Each imports and connects at its first run.
        maintenance.invoke(sample("maintenance-schedule"), context=Context(CONTEXT_SECONDS))
        for scheduled in (relay, dispatcher):
            scheduled.run()
        others.execute("TRUNCATE outbox, idempotency_keys, charges, refunds")
        costs: dict[str, Cost] = {}

        def stage(name: str, work: Callable[[], object], pid: int = os.getpid()) -> None:
            reporting.progress(name)
            costs[name] = server.cost(work, pid, charges)

        def upkeep() -> None:
            maintenance.invoke(sample("maintenance-schedule"), context=Context(CONTEXT_SECONDS))
            others.execute(_VACUUM)

        asked = [charge_event(principal=PRINCIPAL) for _ in range(charges)]
        stage("charge", lambda: [charging.call(event) for event in asked])
        stage("replay", lambda: [charging.call(event) for event in asked])
        stage("relay", relay.run, relay.pid)
        batches = _batches(others)
        stage("subscriber", lambda: [subscriber.handler(batch, Context(CONTEXT_SECONDS)) for batch in batches])
        kept = _kept_bytes(others, charges)
        others.execute(_AGED)
        others.execute(_VACUUM)
        stage("upkeep", upkeep)
        _check(others, "idempotency_keys", 0)
        _check(others, "outbox", 0)
        deliveries.register(others, url=f"{receiver}/webhooks", principal=PRINCIPAL)
        announced = [charge_event(principal=PRINCIPAL) for _ in range(charges)]
        stage("endpoint", lambda: [charging.call(event) for event in announced])
        stage("webhook", dispatcher.run, dispatcher.pid)
        _check(others, "delivery_attempts", charges)
        kept |= {table: size for table, size in _kept_bytes(others, charges).items() if "deliver" in table}
        return Found(costs, kept)


def _check(others: Connection, table: str, rows: int) -> None:
    found = others.execute(SQL("SELECT count(*) FROM {}").format(Identifier(table))).fetchone()
    if found != (rows,):
        raise AssertionError(f"{table} has {found} rows in place of {rows}")


def _kept_bytes(others: Connection, charges: int) -> dict[str, float]:
    """Measures what is alive, without the room that dead rows have left."""
    others.execute(b"VACUUM FULL " + ", ".join(TABLES).encode())
    sizes = others.execute(
        """
        SELECT name, pg_total_relation_size(name::regclass)::float8
        FROM unnest(%(tables)s::text[] || 'idempotency_keys_pkey'::text) AS kept (name)
        """,
        {"tables": list(TABLES)},
    )
    return {name: size / charges for name, size in sizes}


def _batches(others: Connection) -> list[Event]:
    """The outbox's events as SQS hands them to the subscriber."""
    bodies = [body for (body,) in others.execute("SELECT payload FROM outbox ORDER BY id")]
    batches = []
    for first in range(0, len(bodies), ENTRIES_PER_CALL):
        event = sample("subscriber-sqs")
        [record] = event["Records"]
        event["Records"] = [record | {"body": body} for body in bodies[first : first + ENTRIES_PER_CALL]]
        batches.append(event)
    return batches


class Server:
    """The server, seen from outside: by what its processes have used, and by how far its counters have come."""

    def __init__(self, others: Connection) -> None:
        self._others = others
        self._postmaster = _parent(others.info.backend_pid)

    def cost(self, work: Callable[[], object], pid: int, charges: int) -> Cost:
        """Returns what the work costs by charge, done in the process with this id or on its behalf."""
        before = self._look(pid)
        work()
        database, function, wal, transactions = (
            (now - then) / charges for then, now in zip(before, self._look(pid), strict=True)
        )
        return Cost(None if self._postmaster is None else 1000 * database, 1000 * function, wal, transactions)

    def _look(self, pid: int) -> tuple[float, float, int, int]:
        [(wal, transactions)] = self._others.execute(
            """
            SELECT
                (pg_current_wal_insert_lsn() - '0/0')::bigint,
                pg_snapshot_xmax(pg_current_snapshot())::text::bigint
            """
        )
        return self.cpu_seconds(), cpu_seconds(pid), wal, transactions

    def cpu_seconds(self) -> float:
        """The processor time of all the server's processes; 0 where it is on another machine."""
        if self._postmaster is None:
            return 0.0
        processes = [int(entry.name) for entry in Path("/proc").iterdir() if entry.name.isdigit()]
        children = [pid for pid in processes if _parent(pid) == self._postmaster]
        return sum(cpu_seconds(pid) for pid in [self._postmaster, *children])


def _parent(pid: int) -> int | None:
    found = _stat(pid)
    return None if found is None else int(found[1])


def cpu_seconds(pid: int) -> float:
    """The processor time of a process with all of its threads, and of its children that have ended; 0 for none."""
    found = _stat(pid)
    return 0.0 if found is None else sum(map(int, found[11:15])) / os.sysconf("SC_CLK_TCK")


def _stat(pid: int) -> list[str] | None:
    """What the kernel says of a process, from its state on; None where there is none, or no such kernel.

    Source: proc_pid_stat(5), fields 3 and following.
    """
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
    except OSError:
        return None
