"""Maintenance: removes what is past its retention, finds events that are missing, and counts keys that are stuck."""

from collections import Counter, deque
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime
from uuid import UUID

from psycopg.rows import class_row, scalar_row

from charging import errors, sql
from charging.database import SILENCE_SECONDS, Database

# A statement that removes so many rows takes some ten milliseconds, of the five seconds that the server allows it.
# Nobody who takes over a key that is being removed waits for longer. A larger batch removes hardly more rows a second.
BATCH = 1000
# After this long a charge or a refund is committed or never will be: at `created_at` its transaction had begun, and the
# server ends each transaction after 8 s.
SETTLED_SECONDS = 60
# A slice is one statement, which the server ends after five seconds; the next run would begin with the same one. The
# first to read rows that were just written, it takes a second for some 160,000 charges: ten minutes at 2,000 charges a
# second were too much, and half a minute at the 10,000 that the API lets through takes two seconds. A run goes from
# slice to slice, so that at 10,000 a second it still works a backlog off five times as fast as charges come. An empty
# slice takes milliseconds.
SLICE_SECONDS = 30
# So many findings of a kind are read. Were there more, to know how many would not change what has to be done.
FINDINGS = 10_000
# The longest step, of two statements, and the two that read the findings, each at the end of the database's patience.
RESERVE_SECONDS = 4 * SILENCE_SECONDS


@dataclass(frozen=True, slots=True)
class MissingEvent:
    """An event that should be in the outbox, at this place among those of its aggregate, and is not."""

    event_type: str
    aggregate_id: UUID
    sequence: int
    found_at: datetime


@dataclass(frozen=True, slots=True)
class StartedKey:
    """A key whose claim is committed and whose result is not; this service never writes one."""

    endpoint: str
    key: UUID
    created_at: datetime


@dataclass(frozen=True, slots=True)
class Slice:
    """A slice of time that was reconciled: how many events belong to it, and whether more time follows."""

    checked: int
    is_followed: bool


@dataclass(frozen=True, slots=True)
class Run:
    """What a run came to.

    `counts` has what was removed, as keys, events, processed_events, deliveries, endpoints (with what was left of their
    deliveries) and reports, and how many events were checked to be there. The findings are all that are known, from
    this run or an earlier one, up to 10,000 of each. An unfinished run ran out of time, or met an `error`, the last of
    which is kept; the next one goes on where it ended.
    """

    counts: Counter[str]
    missing_events: Sequence[MissingEvent]
    started_keys: Sequence[StartedKey]
    is_finished: bool
    error: errors.ChargingError | None = None


# Work that is done step by step. Each step is a transaction of its own, and yields what it counts.
type Steps = Iterator[Counter[str]]


def run(
    database: Database,
    *,
    outbox_retention_days: int,
    processed_events_retention_days: int,
    remaining_seconds: Callable[[], float],
) -> Run:
    """Does what is to be done, a step of each kind of work in turn, so that a backlog of one delays no other.

    Nor does a failure: that kind of work is over for this run, and the others go on. Stops before a step that could
    outlast `remaining_seconds`, the time until the function is ended. A run that is cut short loses nothing but the
    step that it was at, and runs that overlap share the work. Raises as `Database.fetch` does where the findings cannot
    be read.
    """
    # Reports before events: an event that was added for a report is seen before it can be removed.
    outbox_retention = {"retention_days": outbox_retention_days}
    inbox_retention = {"retention_days": processed_events_retention_days}
    work = deque(
        [
            _reconcile(database, outbox_retention_days),
            _forget(database),
            _remove(database, "keys", sql.PURGE_KEYS, {}),
            _remove(database, "events", sql.PURGE_EVENTS, outbox_retention),
            _remove(database, "processed_events", sql.PURGE_PROCESSED_EVENTS, inbox_retention),
            _remove(database, "deliveries", sql.PURGE_DELIVERIES, outbox_retention),
            _remove(database, "endpoints", sql.PURGE_ENDPOINTS, outbox_retention),
        ]
    )
    counts: Counter[str] = Counter()
    error: errors.ChargingError | None = None
    while work and remaining_seconds() > RESERVE_SECONDS:
        steps = work.popleft()
        try:
            counted = next(steps, None)
        except errors.ChargingError as failed:
            error = failed
            continue
        if counted is not None:
            counts += counted
            work.append(steps)
    limit = {"limit": FINDINGS}
    return Run(
        counts,
        database.fetch(class_row(MissingEvent), sql.FIND_MISSING_EVENTS, limit),
        database.fetch(class_row(StartedKey), sql.FIND_STARTED_KEYS, limit),
        is_finished=not work and error is None,
        error=error,
    )


def _remove(database: Database, kind: str, statement: bytes, parameters: Mapping[str, object]) -> Steps:
    """Removes batch after batch, until one is not full: what comes in meanwhile is for the next run."""
    removed = BATCH
    while removed >= BATCH:
        [removed] = database.fetch(scalar_row, statement, {**parameters, "limit": BATCH})
        yield Counter({kind: removed})


def _forget(database: Database) -> Steps:
    """Takes settled reports off the list, for as long as those that go make room for others to be looked at."""
    removed = BATCH
    while removed:
        [removed] = database.fetch(scalar_row, sql.FORGET_MISSING_EVENTS, {"limit": BATCH})
        yield Counter(reports=removed)


def _reconcile(database: Database, retention_days: int) -> Steps:
    """Checks slice after slice, from where the last run ended up to what is settled."""
    bounds = {
        "retention_days": retention_days,
        "settled_seconds": SETTLED_SECONDS,
        "slice_seconds": SLICE_SECONDS,
    }
    database.fetch(scalar_row, sql.START_RECONCILIATION, bounds)
    is_followed = True
    while is_followed:
        slices = database.fetch(class_row(Slice), sql.RECONCILE_EVENTS, bounds)
        is_followed = any(slice_.is_followed for slice_ in slices)
        yield Counter(checked=sum(slice_.checked for slice_ in slices))
