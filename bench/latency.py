"""How long an event takes from its commit to its receipt in SQS while the relay is idle, and what idling costs."""

import contextlib
import json
import os
import random
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import boto3
import psycopg

from bench import broker, function, measuring, reporting
from bench.function import Function
from bench.reporting import Report, Table
from tests.support.database import Databases
from tests.support.invocation import charge_event

type Connection = psycopg.Connection[tuple[Any, ...]]


@dataclass(frozen=True, slots=True)
class Scale:
    """For how long the idle relay is watched, and how many events are then timed."""

    idle_seconds: float
    events: int


FULL = Scale(idle_seconds=30.0, events=400)
QUICK = Scale(idle_seconds=5.0, events=50)

TARGETS = {"latency.p50_ms": reporting.at_most(300), "latency.p99_ms": reporting.at_most(1000)}

# One run of the relay lasts longer than the measurement, which ends it; the rest is as it is deployed.
BUDGET_SECONDS = 3600
# Between two charges, so that they fall on all moments of the relay's period.
GAP_SECONDS = (0.05, 0.35)
# What has not happened by then never will.
PATIENCE_SECONDS = 30.0


def run(databases: Databases, scale: Scale) -> Report:
    """Watches an idle relay, then charges at random moments and waits for each charge's event in the queue."""
    with (
        databases.migrated() as url,
        broker.serve(delivers=True) as address,
        function.relay(url, address, budget_seconds=BUDGET_SECONDS) as relay,
    ):
        relay.begin()
        with psycopg.connect(url, autocommit=True) as connection:
            backend = _backend_of_relay(connection)
            reporting.progress("an idle relay")
            idle = _idle(connection, backend, relay.pid, scale.idle_seconds)
        reporting.progress("single events")
        with mock.patch.dict(os.environ, broker.variables(address)):
            seconds = sorted(_latencies(url, scale.events))
    p50, p90, p99 = (measuring.percentile(seconds, share) * 1000 for share in (0.5, 0.9, 0.99))
    return Report(
        "latency",
        {
            "latency.p50_ms": p50,
            "latency.p99_ms": p99,
            "latency.idle_statements_per_s": idle.statements,
            "latency.idle_database_cpu_percent": idle.database_percent,
            "latency.idle_relay_cpu_percent": idle.relay_percent,
        },
        TARGETS,
        [
            Table(
                f"From the charge to the receipt in SQS, {scale.events} events, one at a time",
                ["p50", "p90", "p99", "longest"],
                [[f"{value:.0f} ms" for value in (p50, p90, p99, seconds[-1] * 1000)]],
                "The stand-in broker takes no time. SNS and SQS take some tens of milliseconds.",
            ),
            Table(
                "An idle relay",
                ["statements", "processor time of the database", "of the relay"],
                [
                    [
                        f"{idle.statements:.1f}/s",
                        *(
                            "not known" if percent is None else f"{percent:.2f} % of a core"
                            for percent in (idle.database_percent, idle.relay_percent)
                        ),
                    ]
                ],
            ),
        ],
    )


@dataclass(frozen=True, slots=True)
class _Idle:
    statements: float
    database_percent: float | None
    relay_percent: float | None


def _idle(connection: Connection, backend: int, relay: int, seconds: float) -> _Idle:
    def look() -> tuple[float, int, float | None, float | None]:
        return time.monotonic(), _commits(connection), _cpu_seconds(backend), _cpu_seconds(relay)

    then, commits, database, itself = look()
    time.sleep(seconds)
    now, more_commits, more_database, more_itself = look()

    def percent(before: float | None, after: float | None) -> float | None:
        return None if before is None or after is None else 100 * (after - before) / (now - then)

    return _Idle(
        (more_commits - commits) / (now - then), percent(database, more_database), percent(itself, more_itself)
    )


def _backend_of_relay(connection: Connection) -> int:
    found = _eventually(
        lambda: connection.execute(
            "SELECT pid FROM pg_stat_activity WHERE datname = current_database() AND application_name = 'charging'"
        ).fetchone(),
        "the relay to connect",
    )
    return int(found[0])


def _commits(connection: Connection) -> int:
    """How many statements the database has run; each of the relay's is a transaction."""
    row = connection.execute("SELECT xact_commit FROM pg_stat_database WHERE datname = current_database()").fetchone()
    return int(row[0]) if row else 0


def _cpu_seconds(pid: int) -> float | None:
    """The processor time of a process's main thread, to the nanosecond; None where it cannot be read, as of a server
    on another machine."""
    try:
        return int(Path(f"/proc/{pid}/schedstat").read_text().split()[0]) / 1e9
    except OSError:
        return None


def _latencies(url: str, events: int) -> list[float]:
    """Charges so often, at random moments, and returns how long each event took, in seconds.

    The clock starts with the charge's request, just before its commit.
    """
    charged: dict[str, float] = {}
    received: dict[str, float] = {}
    done = threading.Event()
    receiver = threading.Thread(target=_receive, args=(received, done), daemon=True)
    receiver.start()
    with function.silence(), contextlib.closing(Function(url)) as charges:
        chance = random.Random(events)  # noqa: S311 - moments, not secrets
        for _ in range(events):
            time.sleep(chance.uniform(*GAP_SECONDS))
            begun = time.monotonic()
            charged[json.loads(charges.call(charge_event())["body"])["id"]] = begun
    _eventually(lambda: charged.keys() <= received.keys(), "every event to arrive")
    done.set()
    receiver.join()
    return [received[charge] - begun for charge, begun in charged.items()]


def _receive(received: dict[str, float], done: threading.Event) -> None:
    queue = boto3.client("sqs")
    while not done.is_set():
        for message in queue.receive_message(QueueUrl=broker.QUEUE_URL, WaitTimeSeconds=1).get("Messages", []):
            received[json.loads(message["Body"])["subject"]] = time.monotonic()


def _eventually[T](look: Callable[[], T | None], what: str) -> T:
    """Returns what there is once there is something."""
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not (found := look()):
        if time.monotonic() > deadline:
            raise TimeoutError(f"waited {PATIENCE_SECONDS:.0f} s for {what}")
        time.sleep(0.01)
    return found
