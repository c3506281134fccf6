"""What a charge costs: the function beside its bare statement, the textbook's transaction, and a library's three."""

import contextlib
import multiprocessing
import os
import re
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from itertools import pairwise
from multiprocessing.connection import Connection as Pipe
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from uuid import UUID, uuid4

import psycopg
from psycopg import conninfo
from psycopg.rows import tuple_row

from bench import delay, measuring, reporting, rivals
from bench.function import Function, Parameters, invocation, silence
from bench.measuring import Spread
from bench.plotting import Plot
from bench.reporting import Report, Table
from local.postgres import binary
from tests.support.database import Databases
from tests.support.invocation import Event, charge_event
from tests.support.wire import Sender, Wire

type Connection = psycopg.Connection[tuple[Any, ...]]


@dataclass(frozen=True, slots=True)
class Scale:
    """`rounds` of `calls` each are timed, fewer where they are delayed; over `counted` calls it is counted what one
    costs; and each number of `processes` runs for so many seconds, a few times over."""

    rounds: int
    calls: int
    counted: int
    processes: tuple[int, ...]
    seconds: int
    repeats: int


FULL = Scale(rounds=40, calls=50, counted=1000, processes=(1, 2, 4, 8), seconds=2, repeats=3)
QUICK = Scale(rounds=10, calls=20, counted=100, processes=(1, 2), seconds=1, repeats=1)

TARGETS = {
    "charge.vs_floor": reporting.at_least(0.85),
    "charge.vs_textbook": reporting.at_least(2),
    "charge.vs_library": reporting.at_least(2.5),
    "charge.vs_textbook_1ms": reporting.at_least(4),
    "charge.round_trips_created": reporting.at_most(1),
    "charge.round_trips_replay": reporting.at_most(1),
    # Every some thousand charges a segment of the WAL is full, and synced too.
    "charge.wal_syncs_created": reporting.at_most(1.01),
    "charge.wal_bytes_replay": reporting.at_most(0),
}

DELAY_SECONDS = 0.001
DELAYED_SHARE = 5
# The first release that counts WAL by connection.
COUNTED_SINCE = 180000
# Calls through the proxy that reads the protocol along, which is slow.
WATCHED_CALLS = 20

_PROCESSES = multiprocessing.get_context("spawn")


def run(databases: Databases, scale: Scale) -> Report:
    """Times the ways to charge in turns, near and far, counts what each costs, and adds processes."""
    with databases.migrated() as url, silence():
        reporting.progress("near")
        near = _compare(url, scale.rounds, scale.calls)
        with delay.serve(url, DELAY_SECONDS) as distant_url:
            reporting.progress("far")
            far = _compare(distant_url, scale.rounds, max(1, scale.calls // DELAYED_SHARE))
        reporting.progress("answers")
        answers = _answers(url, scale)
        reporting.progress("costs")
        costs = _costs(url, scale.counted)
        reporting.progress("processes")
        scaling = _scaling(url, scale)
    created, replay = costs["created"], costs["replayed"]
    return Report(
        "charge",
        {
            "charge.vs_floor": near.ratio("function", "statement").value,
            "charge.vs_textbook": near.ratio("function", "textbook").value,
            "charge.vs_library": near.ratio("function", "library").value,
            "charge.floor_vs_textbook": near.ratio("statement", "textbook").value,
            "charge.floor_vs_library": near.ratio("statement", "library").value,
            "charge.vs_floor_1ms": far.ratio("function", "statement").value,
            "charge.vs_textbook_1ms": far.ratio("function", "textbook").value,
            "charge.vs_library_1ms": far.ratio("function", "library").value,
            "charge.round_trips_created": created.round_trips,
            "charge.round_trips_replay": replay.round_trips,
            "charge.wal_syncs_created": created.wal_syncs,
            "charge.wal_bytes_created": created.wal_bytes,
            "charge.wal_bytes_replay": replay.wal_bytes,
            **{f"charge.vs_pgbench_{processes}": ratio.value for processes, (_, _, ratio) in scaling.items()},
        },
        TARGETS,
        [
            near.table("New charges on one connection"),
            far.table(f"The same, where a round trip takes {DELAY_SECONDS * 1000:.0f} ms more"),
            Table(
                "What the function answers, on one connection",
                ["answer", "calls"],
                [[name, f"{1 / seconds:.0f}/s"] for name, seconds in answers.items()],
            ),
            Table(
                "What one call costs the database",
                ["", "round trips", "statements", "WAL syncs", "WAL bytes"],
                [[name, *cost.cells()] for name, cost in costs.items()],
            ),
            Table(
                "New charges of several processes, beside as many clients of pgbench that run the same statement",
                ["processes", "function", "pgbench", "function to pgbench"],
                [
                    [str(processes), f"{ours:.0f}/s", f"{theirs:.0f}/s", reporting.spread(ratio)]
                    for processes, (ours, theirs, ratio) in scaling.items()
                ],
            ),
        ],
        {
            "rates": Plot(
                "New charges on one connection",
                {"near": near.rates(), f"{DELAY_SECONDS * 1000:.0f} ms away": far.rates()},
                "/s",
            ),
            "processes": Plot(
                "New charges of several processes",
                {
                    f"{processes} processes": {"function": ours, "pgbench": theirs}
                    for processes, (ours, theirs, _) in scaling.items()
                },
                "/s",
            ),
        },
    )


@dataclass(frozen=True, slots=True)
class _Comparison:
    """Seconds a call, a value a round, by the way to charge."""

    rounds: Mapping[str, list[float]]

    def ratio(self, name: str, other: str) -> Spread:
        """How many times as many calls the one makes as the other."""
        return measuring.ratio(self.rounds[other], self.rounds[name])

    def rates(self) -> dict[str, float]:
        """Calls a second, by the way to charge."""
        return {name: 1 / measuring.percentile(seconds, 0.5) for name, seconds in self.rounds.items()}

    def table(self, title: str) -> Table:
        return Table(
            title,
            ["way", "calls", "one takes", "function to it"],
            [
                [
                    name,
                    f"{1 / measuring.percentile(seconds, 0.5):.0f}/s",
                    reporting.milliseconds(measuring.percentile(seconds, 0.5)),
                    "" if name == "function" else reporting.spread(self.ratio("function", name)),
                ]
                for name, seconds in self.rounds.items()
            ],
        )


def _compare(url: str, rounds: int, calls: int) -> _Comparison:
    with _ways(url) as ways:
        for way in ways.values():
            way.round(10)  # until its statements are prepared
        return _Comparison(
            measuring.take_turns(rounds, {name: partial(way.round, calls) for name, way in ways.items()})
        )


class _Way:
    """One way to charge, on a connection of its own."""

    def __init__(
        self,
        arguments: Callable[[], Any],
        call: Callable[[Any], object],
        ask: Callable[[bytes], Sequence[tuple[Any, ...]]],
    ) -> None:
        self._arguments = arguments
        self._call = call
        self.ask = ask

    def round(self, calls: int) -> float:
        """Returns how many seconds a call takes, over so many in a row. What is given to them is made before."""
        arguments = [self._arguments() for _ in range(calls)]
        call = self._call
        begun = time.perf_counter()
        for argument in arguments:
            call(argument)
        return (time.perf_counter() - begun) / calls


@contextlib.contextmanager
def _ways(url: str) -> Iterator[dict[str, _Way]]:
    with contextlib.ExitStack() as stack:
        function = stack.enter_context(contextlib.closing(Function(url)))

        def parameters() -> Parameters:
            return function.statement()[1]

        def bare(charge: Callable[[Connection, Parameters], object], **options: Any) -> _Way:
            connection = stack.enter_context(psycopg.connect(url, autocommit=True, **options))
            return _Way(parameters, partial(charge, connection), lambda query: connection.execute(query).fetchall())

        statement = function.statement()[0]
        yield {
            "function": _way(function, charge_event),
            "statement": bare(lambda connection, given: connection.execute(statement, given).fetchall()),
            "textbook": bare(rivals.charge_by_the_textbook),
            "library": bare(rivals.charge_like_a_library),
        }


def _way(function: Function, event: Callable[[], Event], status: int = 201) -> _Way:
    return _Way(
        lambda: invocation(event()),
        partial(function.answer, status=status),
        lambda query: function.database.fetch(tuple_row, query, {}),
    )


@contextlib.contextmanager
def _kinds(url: str) -> Iterator[dict[str, _Way]]:
    """Each answer that the function gives without an error, as a way to call it."""
    with contextlib.ExitStack() as stack:
        function = stack.enter_context(contextlib.closing(Function(url)))
        key, busy = uuid4(), uuid4()
        function.call(charge_event(key))
        twin = stack.enter_context(psycopg.connect(url))
        twin.execute("SET idle_in_transaction_session_timeout = 0")
        twin.execute("SET transaction_timeout = 0")
        twin.commit()
        twin.execute(*function.statement(busy))
        kinds: dict[str, tuple[int, Callable[[], Event]]] = {
            "created": (201, charge_event),
            "replayed": (201, lambda: charge_event(key)),
            "key reused": (422, lambda: charge_event(key, {"amountCents": 1})),
            "in flight": (409, lambda: charge_event(busy)),
        }
        yield {name: _way(function, event, status) for name, (status, event) in kinds.items()}


def _answers(url: str, scale: Scale) -> dict[str, float]:
    with _kinds(url) as kinds:
        turns = measuring.take_turns(
            scale.rounds, {name: partial(way.round, scale.calls) for name, way in kinds.items()}
        )
    return {name: measuring.percentile(seconds, 0.5) for name, seconds in turns.items()}


@dataclass(frozen=True, slots=True)
class _Cost:
    """What one call costs. None where the server does not count it by connection, as before PostgreSQL 18."""

    round_trips: float
    statements: float
    wal_syncs: float | None
    wal_bytes: float | None

    def cells(self) -> list[str]:
        found = (self.round_trips, self.statements, self.wal_syncs, self.wal_bytes)
        return ["not known" if value is None else f"{value:.5g}" for value in found]


def _costs(url: str, calls: int) -> dict[str, _Cost]:
    costs = {}
    for opened in (_kinds, _ways):
        with Wire(url) as wire, opened(wire.url) as watched, opened(url) as counted:
            for name in watched.keys() - {"function", "statement"}:
                watched[name].round(10)
                wire.messages.clear()
                watched[name].round(WATCHED_CALLS)
                senders = [message.sender for message in wire.messages]
                turns = sum(pair == (Sender.CLIENT, Sender.SERVER) for pair in pairwise(senders))
                statements = sum(wire.kinds(Sender.CLIENT).count(kind) for kind in "EQ")
                syncs, written = _wal(counted[name], calls)
                costs[name] = _Cost(turns / WATCHED_CALLS, statements / WATCHED_CALLS, syncs, written)
    return {name: costs[name] for name in ("created", "replayed", "key reused", "in flight", "textbook", "library")}


def _wal(way: _Way, calls: int) -> tuple[float | None, float | None]:
    """Returns how often the WAL is synced, and how many bytes are written to it, by one call."""
    [(version,)] = way.ask(b"SELECT current_setting('server_version_num')::int")
    if version < COUNTED_SINCE:
        return None, None

    def count() -> tuple[int, int]:
        way.ask(b"SELECT pg_stat_force_next_flush()")
        [found] = way.ask(
            b"""
            SELECT
                (SELECT sum(fsyncs) FROM pg_stat_get_backend_io(pg_backend_pid()) WHERE object = 'wal')::bigint,
                (SELECT wal_bytes FROM pg_stat_get_backend_wal(pg_backend_pid()))::bigint
            """
        )
        return found[0], found[1]

    way.round(10)
    syncs, written = count()
    way.round(calls)
    more_syncs, more_written = count()
    return (more_syncs - syncs) / calls, (more_written - written) / calls


def _scaling(url: str, scale: Scale) -> dict[int, tuple[float, float, Spread]]:
    """Returns, for each number of processes, the calls a second of the function and of pgbench, and their ratio."""
    found = {}
    with contextlib.ExitStack() as stack:
        function = stack.enter_context(contextlib.closing(Function(url)))
        script = Path(stack.enter_context(TemporaryDirectory()), "charge.sql")
        variables = pgbench_script(script, *function.statement())
        for processes in scale.processes:
            reporting.progress(f"{processes} processes")
            rates = measuring.take_turns(
                scale.repeats,
                {
                    "function": partial(_together, url, processes, scale.seconds),
                    "pgbench": partial(pgbench, url, script, variables, processes, scale.seconds),
                },
            )
            ours, theirs = rates["function"], rates["pgbench"]
            found[processes] = (
                measuring.percentile(ours, 0.5),
                measuring.percentile(theirs, 0.5),
                measuring.ratio(ours, theirs),
            )
    return found


def _together(url: str, processes: int, seconds: float) -> float:
    """Returns how many charges a second so many functions make, each in a process of its own."""
    running = []
    for _ in range(processes):
        here, there = _PROCESSES.Pipe()
        process = _PROCESSES.Process(target=_charge_on, args=(url, seconds, there), daemon=True)
        process.start()
        there.close()
        running.append((process, here))
    for _, pipe in running:
        pipe.recv()
    for _, pipe in running:
        pipe.send("begin")
    charged = sum(pipe.recv() for _, pipe in running)
    for process, _ in running:
        process.join()
    return float(charged) / seconds


def _charge_on(url: str, seconds: float, caller: Pipe) -> None:
    with silence(), contextlib.closing(Function(url)) as function:
        caller.send("ready")
        caller.recv()
        charged = 0
        end = time.perf_counter() + seconds
        while time.perf_counter() < end:
            function.call(charge_event())
            charged += 1
        caller.send(charged)


# How pgbench writes what differs from call to call, where the function has it from Python.
_NUMBER = "lpad(to_hex(:number::bigint), 32, '0')::uuid"
_FRESH = {"key": _NUMBER, "charge_id": "uuidv7()", "aggregate_id": "uuidv7()", "event_id": "uuidv7()"}
_TYPES = {str: "text", int: "bigint", UUID: "uuid"}


def pgbench_script(script: Path, statement: bytes, parameters: Parameters) -> list[str]:
    """Writes the charge's statement as pgbench runs it, and returns the options that give it the parameters."""
    options = []

    def variable(name: str, value: object) -> str:
        if name in _FRESH:
            return _FRESH[name]
        if value is None:
            return "NULL"
        options.append(f"--define={name}={value}")
        return f":{name}::{_TYPES[type(value)]}"

    text = re.sub(r"%\((\w+)\)s", lambda match: variable(match[1], parameters[match[1]]), statement.decode())
    # pgbench takes a colon for a variable, be it inside of a string.
    text = re.sub(r"'([^']*)'", lambda match: variable("literal", match[1]) if ":" in match[1] else match[0], text)
    script.write_text(f"\\set number random(1, {2**62})\n{text};\n")
    return options


def pgbench(url: str, script: Path, variables: Sequence[str], clients: int, seconds: int) -> float:
    """Returns how many times a second so many clients of pgbench run the script."""
    parts = conninfo.conninfo_to_dict(url)
    finished = subprocess.run(
        [
            *(binary("pgbench"), "--no-vacuum", "--protocol=prepared", f"--file={script}", *variables),
            *(f"--client={clients}", f"--jobs={clients}", f"--time={seconds}"),
        ],
        # The password by way of the environment: arguments are for every account of the machine to see.
        env=os.environ
        | {f"PG{'DATABASE' if name == 'dbname' else name.upper()}": str(value) for name, value in parts.items()},
        capture_output=True,
        text=True,
        check=True,
    )
    return float(re.findall(r"tps = ([0-9.]+)", finished.stdout)[0])
