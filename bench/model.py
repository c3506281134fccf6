"""Holds the model of how far the service goes against this machine, wherever a machine can speak for or against it."""

import contextlib
import heapq
import os
import random
import resource
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import psycopg
from psycopg.rows import tuple_row

from bench import broker, charge, events, function, measuring, reporting, sizing, stages
from bench.function import Function, silence
from bench.plotting import Plot
from bench.reporting import Report, Table
from bench.sizing import Cost
from tests.support.database import Databases
from tests.support.invocation import charge_event

type Connection = psycopg.Connection[tuple[Any, ...]]


@dataclass(frozen=True, slots=True)
class Scale:
    """How many charges go through the stages; how many clients charge at a time, for so many seconds and as many tries;
    how many keys are there and how many come to them; how many events are drained at first and then; and how many calls
    arrive at instances that are only imagined."""

    charges: int
    clients: tuple[int, ...]
    seconds: int
    tries: int
    keys: int
    added: int
    drained: tuple[int, int]
    arrivals: int


FULL = Scale(
    charges=3_000,
    clients=(1, 4, 8, 16, 32, 64),
    seconds=2,
    tries=3,
    keys=300_000,
    added=3_000,
    drained=(2_000, 30_000),
    arrivals=1_000_000,
)
QUICK = Scale(
    charges=500, clients=(1, 8, 32), seconds=1, tries=1, keys=30_000, added=500, drained=(500, 3_000), arrivals=100_000
)

TARGETS: Mapping[str, reporting.Target] = {}

# What an instance is busy with, or idle, between two charges.
THINK_SECONDS = 0.005
# As many charges a second, and as long for each, as in docs/scaling.md.
ARRIVALS_PER_S = 1_000


@dataclass(frozen=True, slots=True)
class Check:
    """What the model said, and what was found."""

    predicted: float
    found: float

    @property
    def error(self) -> float:
        """By how much the model is off, as a share of what was found."""
        return self.predicted / self.found - 1

    def cells(self, shown: Callable[[float], str]) -> list[str]:
        """The check as a row shows it."""
        return [shown(self.predicted), shown(self.found), f"{100 * self.error:+.0f} %"]


def run(databases: Databases, scale: Scale) -> Report:
    """Measures what the model is made of, and then what it foretells."""
    found = stages.measure(databases, scale.charges)
    saturation = _saturation(databases, scale)
    drain = _drain(databases, scale)
    images = _images(databases, scale)
    instances = _instances(scale)
    worst = max(saturation.values(), key=lambda check: abs(check.error))
    tables = sizing.tables()
    return Report(
        "model",
        {
            **{f"model.{name}_database_ms": cost.database_ms for name, cost in found.costs.items()},
            **{f"model.{name}_function_ms": cost.function_ms for name, cost in found.costs.items()},
            **{f"model.{name}_wal_bytes": cost.wal_bytes for name, cost in found.costs.items()},
            "model.saturation_error": worst.error,
            "model.drain_error": drain.error,
            "model.images_error": None if images is None else images.error,
            "model.instances_error": instances.error,
        },
        TARGETS,
        [
            *tables.values(),
            Table(
                f"What {scale.charges:,} charges cost here, each, beside what the model takes for it",
                ["stage", "database", "model", "function", "model", "WAL", "model", "commits", "model"],
                [[name, *_compared(name, cost, found.costs)] for name, cost in found.costs.items()],
            ),
            Table(
                "What stays of each",
                ["table", "found", "model"],
                [[table, f"{size:.0f} B", _kept(table)] for table, size in found.kept_bytes.items()],
            ),
            Table(
                f"Charges a second of clients that think for {THINK_SECONDS * 1000:.0f} ms between two",
                ["clients", "predicted", "found", "error"],
                [[str(clients), *check.cells(_rate)] for clients, check in saturation.items()],
                "Predicted from what one client alone takes, and from the number of cores.",
            ),
            Table(
                "The rest",
                ["", "predicted", "found", "error"],
                [
                    [f"draining {scale.drained[1]:,} events", *drain.cells(lambda value: f"{value:.1f} s")],
                    *(
                        []
                        if images is None
                        else [["page images of a charge", *images.cells(lambda value: f"{value:.2f}")]]
                    ),
                    [
                        f"instances for {ARRIVALS_PER_S:,} charges a second",
                        *instances.cells(lambda value: f"{value:.0f}"),
                    ],
                ],
            ),
        ],
        {
            "saturation": Plot(
                f"Charges by clients that think for {THINK_SECONDS * 1000:.0f} ms",
                {
                    f"{clients} clients": {"predicted": check.predicted, "found": check.found}
                    for clients, check in saturation.items()
                },
                "/s",
            )
        },
    )


def _rate(value: float) -> str:
    return f"{value:,.0f}/s"


def _kept(table: str) -> str:
    size = sizing.KEPT_BYTES.get(table)
    return "" if size is None else f"{size:.0f} B"


def _compared(name: str, cost: Cost, costs: Mapping[str, Cost]) -> list[str]:
    """The cells of a stage. An endpoint's are what it adds to a charge."""
    model, less = sizing.STAGES[name], costs["charge"] if name == "endpoint" else None
    values: Sequence[tuple[str, Callable[[Cost], float | None]]] = (
        ("{:.2f} ms", lambda it: it.database_ms),
        ("{:.2f} ms", lambda it: it.function_ms),
        ("{:,.0f} B", lambda it: it.wal_bytes),
        ("{:.2f}", lambda it: it.commits),
    )
    cells = []
    for shown, value in values:
        here = value(cost)
        if here is not None and less is not None:
            here -= value(less) or 0.0
        cells += ["not known" if here is None else shown.format(here), shown.format(value(model))]
    return cells


def _saturation(databases: Databases, scale: Scale) -> dict[int, Check]:
    """Lets clients of pgbench run the charge's statement, and foretells from one of them how many charges more make."""
    with contextlib.ExitStack() as stack:
        url = stack.enter_context(databases.migrated())
        others = stack.enter_context(psycopg.connect(url, autocommit=True))
        server = stages.Server(others)
        with silence(), contextlib.closing(Function(url)) as charges:
            statement = charges.statement()
        script = Path(stack.enter_context(TemporaryDirectory()), "charge.sql")
        variables = charge.pgbench_script(script, *statement)
        with script.open("a") as more:
            more.write(f"\\sleep {THINK_SECONDS * 1000:.0f} ms\n")

        used: list[float] = []

        def rate(clients: int) -> float:
            before = _processor_seconds(server)
            found = charge.pgbench(url, script, variables, clients, scale.seconds)
            if clients == 1:
                used.append((_processor_seconds(server) - before) / (found * scale.seconds))
            return found

        reporting.progress("clients")
        rates = measuring.take_turns(scale.tries, {clients: partial(rate, clients) for clients in scale.clients})
        # The best try, since whatever else the machine does can only take from it.
        best = {clients: max(found) for clients, found in rates.items()}
        response = 1 / best[1] - THINK_SECONDS
        demand, processors = min(*used, response), os.cpu_count() or 1
        return {
            clients: Check(sizing.throughput(clients, THINK_SECONDS, response, demand, processors), found)
            for clients, found in best.items()
        }


def _processor_seconds(server: stages.Server) -> float:
    """The processor time of the server, and of its clients that have ended."""
    clients = resource.getrusage(resource.RUSAGE_CHILDREN)
    return server.cpu_seconds() + clients.ru_utime + clients.ru_stime


def _drain(databases: Databases, scale: Scale) -> Check:
    """Foretells from a short drain how long a long one takes."""
    few, many = scale.drained
    with (
        databases.migrated() as url,
        psycopg.connect(url, autocommit=True) as others,
        broker.serve() as address,
        function.relay(url, address) as relay,
    ):

        def drain(count: int) -> float:
            events.write(others, events.CHARGED, count)
            return relay.run().seconds

        drain(few)  # it imports and connects
        reporting.progress(f"draining {many:,} events")
        before, found, after = drain(few), drain(many), drain(few)
        return Check((before + after) / 2 * many / few, found)


# As many keys more as there are, in no order.
_KEYS = """
    INSERT INTO idempotency_keys (
        principal, endpoint, key, fingerprint, status, response_status, response_headers, response_body, expires_at
    )
    SELECT
        principal, endpoint, gen_random_uuid(), fingerprint, status, response_status, response_headers, response_body,
        expires_at
    FROM (SELECT * FROM idempotency_keys LIMIT 1) AS one, generate_series(1, %(keys)s)
"""


def _images(databases: Databases, scale: Scale) -> Check | None:
    """Counts the page images of charges after a checkpoint. None where the server does not count by connection, as
    before PostgreSQL 18."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(silence())
        url = stack.enter_context(databases.migrated())
        others = stack.enter_context(psycopg.connect(url, autocommit=True))
        events.lift_limits(others)
        if others.info.server_version < charge.COUNTED_SINCE:
            return None
        reporting.progress(f"{scale.keys:,} keys")
        charges = stack.enter_context(contextlib.closing(Function(url)))
        for _ in range(10):
            charges.call(charge_event())  # what comes later goes to pages that are there
        others.execute(_KEYS, {"keys": scale.keys})
        row = others.execute("SELECT pg_relation_size('idempotency_keys_pkey') / current_setting('block_size')::int")
        [(pages,)] = row
        # The images of what the keys' insertion has filled are not to be ours.
        others.execute("VACUUM idempotency_keys")
        with databases.empty():
            pass  # to drop a database is a checkpoint, for which others have no privilege

        def images() -> int:
            charges.database.fetch(tuple_row, b"SELECT pg_stat_force_next_flush()", {})
            query = b"SELECT wal_fpi::bigint FROM pg_stat_get_backend_wal(pg_backend_pid())"
            return int(charges.database.fetch(tuple_row, query, {})[0][0])

        before = images()
        for _ in range(scale.added):
            charges.call(charge_event())
        return Check(sizing.images(scale.added, pages), (images() - before) / scale.added)


def _instances(scale: Scale) -> Check:
    """Lets calls arrive by chance at instances that are as many as are asked for, and finds how many are busy at a time
    but for as small a part of it as the model leaves out."""
    chance = random.Random(scale.arrivals)  # noqa: S311 - arrivals, not secrets
    now, ends = 0.0, list[float]()
    spent: dict[int, float] = {}
    for _ in range(scale.arrivals):
        arrival = now + chance.expovariate(ARRIVALS_PER_S)
        while ends and ends[0] < arrival:
            end = heapq.heappop(ends)
            spent[len(ends) + 1] = spent.get(len(ends) + 1, 0.0) + end - now
            now = end
        spent[len(ends)] = spent.get(len(ends), 0.0) + arrival - now
        now = arrival
        heapq.heappush(ends, now + chance.expovariate(1 / sizing.CHARGE_SECONDS))
    left = now * sizing.LEFT_OUT
    for busy in sorted(spent, reverse=True):
        left -= spent[busy]
        if left < 0:
            return Check(sizing.instances(ARRIVALS_PER_S, sizing.CHARGE_SECONDS), busy)
    raise AssertionError("time passes")
