"""How long claims and completions take on an outbox that is not empty: with a backlog, with a history, just before it
is vacuumed, and while somebody holds an old snapshot. Each is compared with an empty outbox beside it."""

import contextlib
import json
import re
import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any

import psycopg
from psycopg import IsolationLevel

from bench import events, measuring, reporting
from bench.plotting import Plot
from bench.reporting import Report, Table
from charging import outbox, sql
from charging.database import Database
from charging.outbox import LEASE_SECONDS, ClaimedEvent, Claims, Completion
from charging.relay import EVENTS_PER_SWEEP
from charging.settings import DatabaseSettings
from charging.topic import ENTRIES_PER_CALL
from tests.support.database import Databases
from tests.support.invocation import database_variables

type Connection = psycopg.Connection[tuple[Any, ...]]


@dataclass(frozen=True, slots=True)
class Scale:
    """How much of everything. `under_snapshot` is how many events have gone through an outbox since an old snapshot was
    taken, when the measurement ends; `sweeps` is how many claims a phase measures."""

    due: int
    published: int
    under_snapshot: tuple[int, ...]
    sweeps: int


FULL = Scale(due=1_000_000, published=5_000_000, under_snapshot=(16_000, 50_000, 100_000), sweeps=160)
QUICK = Scale(due=50_000, published=200_000, under_snapshot=(4_000, 8_000), sweeps=40)

TARGETS = {
    "backlog.p95_ratio_due": reporting.at_most(1.5),
    "backlog.p95_ratio_published": reporting.at_most(1.5),
    "backlog.p95_ratio_old_snapshot": reporting.at_most(3.0),
    "backlog.claim_by_outbox_due": reporting.at_least(1),
    "backlog.completion_by_primary_key": reporting.at_least(1),
}

SHARES = (0.5, 0.95)
# Events that are let through at once.
MANY = 1_000
# The empty outbox is kept empty: after so many sweeps it is vacuumed.
SWEEPS_TO_VACUUM = 5


class Outbox:
    """One outbox, its relay's way to it, and whoever else works on it. `is_kept_empty` is what others compare with."""

    def __init__(self, url: str, *, is_kept_empty: bool = False) -> None:
        self._url = url
        self._database = Database(DatabaseSettings.model_validate(database_variables(url)))
        self._claims = Claims(self._database)
        self.others: Connection = psycopg.connect(url, autocommit=True)
        events.lift_limits(self.others)
        # It comes when the measurement says so, and not in the middle of a phase that it would change.
        self.others.execute("ALTER TABLE outbox SET (autovacuum_enabled = false)")
        self._is_kept_empty = is_kept_empty
        self._sweeps = 0

    def close(self) -> None:
        """Ends its connections."""
        self._database.close()
        self.others.close()

    def vacuum(self) -> None:
        """Does what autovacuum does when it comes round."""
        self.others.execute("VACUUM (ANALYZE) outbox")

    def vacuumed_after(self) -> int:
        """Returns how many events have gone through the outbox when it is time for autovacuum: a claim and a
        completion leave a dead row each."""
        row = self.others.execute(
            """
            SELECT
                COALESCE(table_threshold, current_setting('autovacuum_vacuum_threshold')::float8)
                + COALESCE(table_share, current_setting('autovacuum_vacuum_scale_factor')::float8) * reltuples
            FROM
                pg_class,
                LATERAL (
                    SELECT
                        max(option_value::float8) FILTER (WHERE option_name = 'autovacuum_vacuum_threshold'),
                        max(option_value::float8) FILTER (WHERE option_name = 'autovacuum_vacuum_scale_factor')
                    FROM pg_options_to_table(reloptions)
                ) AS options (table_threshold, table_share)
            WHERE oid = 'outbox'::regclass
            """
        ).fetchone()
        return int(row[0]) // 2 if row else 0

    def pass_through(self, rows: int) -> None:
        """Lets rows be charged, claimed and published, with leases of a second: what a claim leaves behind at a lease's
        end then lies in later claims' way as it otherwise would after half a minute."""
        for done in range(0, rows, MANY):
            count = min(MANY, rows - done)
            events.write(self.others, events.CHARGED, count)
            claimed = outbox.claim(self._database, limit=count, lease_seconds=1)
            outbox.complete(self._database, [Completion(event, "PUBLISHED") for event in claimed])

    def sweep(self) -> tuple[float, list[float]]:
        """Lets a sweep's worth of events be charged, and returns how long its claim and its completions take."""
        events.write(self.others, events.CHARGED, EVENTS_PER_SWEEP)
        begun = time.perf_counter()
        claimed = self._claims.claim(EVENTS_PER_SWEEP)
        claiming = time.perf_counter() - begun
        if len(claimed) != EVENTS_PER_SWEEP:
            raise AssertionError("as much as was charged is due")
        calls = [claimed[first : first + ENTRIES_PER_CALL] for first in range(0, len(claimed), ENTRIES_PER_CALL)]
        completed = [self._completed(call) for call in calls]
        self._sweeps += 1
        if self._is_kept_empty:
            self.others.execute("DELETE FROM outbox")
            if self._sweeps % SWEEPS_TO_VACUUM == 0:
                self.others.execute("VACUUM outbox")
        return claiming, completed

    def _completed(self, call: Sequence[ClaimedEvent]) -> float:
        completions = [Completion(event, "PUBLISHED") for event in call]
        return measuring.seconds(lambda: outbox.complete(self._database, completions))

    def watched(self) -> float:
        """Returns how long the monitor's question takes."""
        return measuring.seconds(lambda: outbox.measure(self._database))

    @contextlib.contextmanager
    def old_snapshot(self) -> Iterator[None]:
        """Holds a snapshot, as a long report or a dump does whose session has lifted the database's limits."""
        with psycopg.connect(self._url) as holder:
            events.lift_limits(holder)
            holder.commit()
            holder.isolation_level = IsolationLevel.REPEATABLE_READ
            holder.execute("SELECT count(*) FROM schema_migrations")
            yield
            holder.rollback()

    def indexes(self, statement: bytes, **parameters: object) -> set[str]:
        """Returns by which indexes a statement finds its rows, with its parameters known and with them unknown, as a
        prepared statement may be planned either way. Those that are not given are empty lists. A scan of a whole table
        counts as an index."""
        names = sorted({name.decode() for name in re.findall(rb"%\((\w+)\)s", statement)})
        unknown = re.sub(rb"%\((\w+)\)s", lambda name: b"$%d" % (names.index(name[1].decode()) + 1), statement)
        plans = [
            self.others.execute(
                b"EXPLAIN (FORMAT JSON) " + statement, {name: parameters.get(name, []) for name in names}
            ).fetchone(),
            self.others.execute(b"EXPLAIN (FORMAT JSON, GENERIC_PLAN) " + unknown).fetchone(),
        ]
        return set(re.findall(r'(?<="Index Name": ")\w+|Seq Scan', json.dumps(plans)))


@dataclass(slots=True)
class Times:
    """How long each claim and each completion of an outbox took in one phase, in seconds."""

    claims: list[float] = field(default_factory=list)
    completions: list[float] = field(default_factory=list)

    def add(self, subject: Outbox) -> float:
        """Measures one sweep, and returns how long its claim took."""
        claimed, completed = subject.sweep()
        self.claims.append(claimed)
        self.completions += completed
        return claimed


@dataclass(slots=True)
class Phases:
    """The phases so far, as rows of the table, each measured beside the empty outbox."""

    scale: Scale
    empty: Outbox
    rows: list[list[str]] = field(default_factory=list)
    ratios: dict[str, dict[str, float]] = field(default_factory=dict)

    def measure(self, phase: str, **subjects: Outbox) -> dict[str, float]:
        """Lets the outboxes take turns with the empty one, and returns the worse of each one's two p95 ratios."""
        reporting.progress(phase)
        compared = {"empty": self.empty, **subjects}
        times = {name: Times() for name in compared}
        measuring.take_turns(
            self.scale.sweeps, {name: partial(times[name].add, subject) for name, subject in compared.items()}
        )
        worse: dict[str, float] = {}
        for name, taken in times.items():
            cells = [phase, name]
            for kind in ("claims", "completions"):
                values, others = getattr(taken, kind), getattr(times["empty"], kind)
                ratios = [measuring.percentile(values, share) / measuring.percentile(others, share) for share in SHARES]
                for share, ratio in zip(SHARES, ratios, strict=True):
                    cells.append(reporting.milliseconds(measuring.percentile(values, share)))
                    cells.append("" if name == "empty" else reporting.times(ratio))
                worse[name] = max(worse.get(name, 0.0), ratios[-1])
            self.rows.append(cells)
        self.ratios[phase] = worse
        return worse


def run(databases: Databases, scale: Scale) -> Report:
    """Measures an empty outbox beside one with a backlog and one with a history."""
    with contextlib.ExitStack() as stack:

        def opened(*, is_kept_empty: bool = False) -> Outbox:
            url = stack.enter_context(databases.migrated())
            return stack.enter_context(contextlib.closing(Outbox(url, is_kept_empty=is_kept_empty)))

        phases = Phases(scale, opened(is_kept_empty=True))
        due, published = opened(), opened()
        reporting.progress("a backlog")
        events.write(due.others, events.PILED_UP, scale.due)
        reporting.progress("a history")
        events.write(published.others, events.KEPT, scale.published)
        return _measure(phases, due, published)


def _measure(phases: Phases, due: Outbox, published: Outbox) -> Report:
    scale = phases.scale
    measured = scale.sweeps * EVENTS_PER_SWEEP
    for subject in (due, published):
        subject.vacuum()
    vacuumed = phases.measure("vacuumed", due=due, published=published)
    for subject in (due, published):
        subject.pass_through(subject.vacuumed_after() - measured)
    churned = phases.measure("a vacuum is due", due=due, published=published)

    for subject in (due, published):
        subject.vacuum()
    under_snapshot: list[float] = []
    passed = 0
    with due.old_snapshot(), published.old_snapshot():
        for count in scale.under_snapshot:
            for subject in (due, published):
                subject.pass_through(count - passed - measured)
            passed = count
            worse = phases.measure(f"{count:,} under a snapshot", due=due, published=published)
            under_snapshot += [worse["due"], worse["published"]]

    # Of this the statistics know nothing yet.
    published.vacuum()
    reporting.progress("a backlog on top of the history")
    events.write(published.others, events.PILED_UP, scale.due)
    outage = phases.measure("after an outage", both=published)
    paths = {
        "claim": published.indexes(sql.CLAIM_EVENTS, limit=EVENTS_PER_SWEEP, lease_seconds=LEASE_SECONDS, since=None),
        "completion": published.indexes(sql.COMPLETE_EVENTS),
    }
    return Report(
        "backlog",
        {
            "backlog.p95_ratio_due": max(vacuumed["due"], churned["due"], outage["both"]),
            "backlog.p95_ratio_published": max(vacuumed["published"], churned["published"]),
            "backlog.p95_ratio_old_snapshot": max(under_snapshot),
            "backlog.claim_by_outbox_due": float(paths["claim"] == {"outbox_due", "outbox_pkey"}),
            "backlog.completion_by_primary_key": float(paths["completion"] == {"outbox_pkey"}),
        },
        TARGETS,
        [
            Table(
                f"An outbox with {scale.due:,} due events, and one with {scale.published:,} published ones",
                ["when", "outbox", "claim p50", "", "p95", "", "completion p50", "", "p95", ""],
                phases.rows,
                f"A claim is of {EVENTS_PER_SWEEP} events, a completion of {ENTRIES_PER_CALL}. x: to the empty outbox.",
            ),
            Table(
                "How the rows are found in an outbox with both",
                ["statement", "by"],
                [[statement, ", ".join(sorted(path))] for statement, path in paths.items()],
            ),
            Table(
                "The monitor's question",
                ["outbox", "time"],
                [
                    [name, reporting.milliseconds(subject.watched())]
                    for name, subject in (("empty", phases.empty), ("due", due), ("both", published))
                ],
            ),
        ],
        {"ratios": Plot("Claims and completions to those of an empty outbox, the worse p95", phases.ratios, " x")},
    )
