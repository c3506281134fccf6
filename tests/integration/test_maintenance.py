"""Maintenance: what is removed and what is kept, beside everybody else at work; and which events are missing."""

import itertools
import math
import threading
from collections import Counter
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID, uuid4

import psycopg
import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from psycopg import sql as composing

from charging import errors, inbox, maintenance, outbox, sql
from charging.database import Database
from charging.idempotency import Created, KeyReused, Outcome, Replayed
from charging.maintenance import SETTLED_SECONDS, SLICE_SECONDS, Run
from tests.conftest import Connect
from tests.support import deployment, history
from tests.support.database import Databases
from tests.support.history import DAY, HOUR, MINUTE, SECOND, Connection
from tests.support.invocation import CHARGES, Instance, charge_event
from tests.support.ledger import (
    Twin,
    charge,
    charged,
    counts,
    holding_up,
    refund,
    stored_by_hand,
    until,
    until_blocked,
)
from tests.support.wire import Message, Sender, Verdict, Wire

KEY = UUID("8e03978e-40d5-43e8-bc93-6894a57f9324")
OUTBOX_DAYS = 14
PROCESSED_DAYS = 60
SETTLED = SETTLED_SECONDS * SECOND
# What a run gives its statements.
BOUNDS = {
    "limit": maintenance.BATCH,
    "retention_days": OUTBOX_DAYS,
    "settled_seconds": SETTLED_SECONDS,
    "slice_seconds": SLICE_SECONDS,
}
# Kinds of work. A run does a step of each in turn.
KINDS = 5


@pytest.fixture
def database(database_url: str, connect: Connect) -> Iterator[Database]:
    """The function's connection to a database in which every charge was checked up to two hours ago."""
    set_watermark(connect(), ago=2 * HOUR)
    with deployment.database(database_url) as opened:
        yield opened


BATCH = 10


@pytest.fixture
def small_batches(monkeypatch: pytest.MonkeyPatch) -> None:
    """Such as a test can fill."""
    monkeypatch.setattr(maintenance, "BATCH", BATCH)


@pytest.fixture
def long_slices(monkeypatch: pytest.MonkeyPatch) -> None:
    """A day each, for tests with few charges over many days."""
    monkeypatch.setattr(maintenance, "SLICE_SECONDS", DAY.total_seconds())


def run(database: Database, *, steps: float = math.inf) -> Run:
    """A run that has time for so many steps."""
    asked = itertools.count(1)
    return maintenance.run(
        database,
        outbox_retention_days=OUTBOX_DAYS,
        processed_events_retention_days=PROCESSED_DAYS,
        remaining_seconds=lambda: math.inf if next(asked) <= steps else 0,
    )


def kept(connection: Connection, table: str, column: str) -> set[UUID]:
    """What a table still has."""
    query = composing.SQL("SELECT {} FROM {}").format(composing.Identifier(column), composing.Identifier(table))
    return {row[0] for row in connection.execute(query).fetchall()}


def kept_keys(connection: Connection) -> set[UUID]:
    return kept(connection, "idempotency_keys", "key")


def kept_events(connection: Connection) -> set[UUID]:
    return kept(connection, "outbox", "id")


def kept_notes(connection: Connection) -> set[UUID]:
    return kept(connection, "processed_events", "event_id")


def impatient(connection: Connection) -> None:
    """Turns waiting for another transaction into an error, on every connection that is opened from now on."""
    connection.execute(
        composing.SQL("ALTER DATABASE {} SET lock_timeout = '1ms'").format(composing.Identifier(connection.info.dbname))
    )


def plan(connection: Connection, statement: bytes, parameters: Mapping[str, object]) -> list[dict[str, Any]]:
    """The nodes of a statement's plan."""
    explained = connection.execute(b"EXPLAIN (FORMAT JSON) " + statement, parameters).fetchone()
    assert explained is not None
    nodes, found = [explained[0][0]["Plan"]], []
    while nodes:
        found.append(nodes.pop())
        nodes += found[-1].get("Plans", [])
    return found


# ---- what is removed -------------------------------------------------------------------------------------------------

# How far something is past its retention: mostly about nothing at all, in either direction.
PAST = st.one_of(
    st.integers(-3, 3).map(lambda microseconds: timedelta(microseconds=microseconds)),
    st.integers(-(10**6), 10**7).map(lambda seconds: timedelta(seconds=seconds)),
)
# Rolled back after each example, in a database for all of them.
EXAMPLES = settings(suppress_health_check=[HealthCheck.function_scoped_fixture])


def settle(connection: Connection, event_id: UUID, state: str) -> None:
    """Takes an event back that was published, or parks it."""
    connection.execute(
        "UPDATE outbox SET published_at = NULL, failed_at = CASE WHEN %s THEN published_at END WHERE id = %s",
        [state == "parked", event_id],
    )


@EXAMPLES
@pytest.mark.usefixtures("long_slices")
@given(
    keys=st.lists(st.tuples(PAST, st.sampled_from(["COMPLETED", "STARTED"])), max_size=12),
    events=st.lists(st.tuples(PAST, st.sampled_from(["published", "parked", "waiting"])), max_size=12),
    notes=st.lists(PAST, max_size=12),
)
@example(keys=[(timedelta(), "COMPLETED")], events=[(timedelta(), "published")], notes=[timedelta()])
def test_a_purge_removes_exactly_what_is_past_its_retention(
    keys: list[tuple[timedelta, str]],
    events: list[tuple[timedelta, str]],
    notes: list[timedelta],
    database: Database,
) -> None:
    """To the microsecond: completed keys whose time is over, and published events and notes that are older than their
    retention. However old it is, no STARTED key, and no event that waits or is parked."""
    nothing = timedelta()
    with database.transaction() as connection:  # in which it is the same moment all the time
        left: dict[str, set[UUID]] = {"keys": set(), "events": set(), "notes": set()}
        for past, status in keys:
            [key] = history.keys(connection, 1, over_for=past, status=status)
            if status == "STARTED" or past < nothing:
                left["keys"].add(key)
        for past, state in events:
            [event_id] = history.events(connection, 1, published=OUTBOX_DAYS * DAY + past)
            if state != "published":
                settle(connection, event_id, state)
            if state != "published" or past <= nothing:
                left["events"].add(event_id)
        for past in notes:
            [event_id] = history.notes(connection, 1, processed=PROCESSED_DAYS * DAY + past)
            if past <= nothing:
                left["notes"].add(event_id)
        run(database)
        assert left == {
            "keys": kept_keys(connection),
            "events": kept_events(connection),
            "notes": kept_notes(connection),
        }
        raise psycopg.Rollback


@pytest.mark.parametrize(("first", "last"), [(-3, 3), (-100, -3)], ids=["begun since", "ended since"])
def test_a_day_has_24_hours_in_every_time_zone(first: int, last: int, database: Database) -> None:
    """Summer time that began or ended within the retention moves no bound by an hour."""
    today = datetime.now(UTC).date()
    begin, end = (f"J{(today + timedelta(days=days)).timetuple().tm_yday}/0" for days in (first, last))
    with database.transaction() as connection:
        connection.execute(composing.SQL("SET LOCAL timezone = {}").format(f"WINTER0SUMMER,{begin},{end}"))
        shifts = connection.execute("SELECT now() - interval '14 days' <> now() - interval '336 hours'").fetchone()
        assert shifts == (True,)
        events = history.events(connection, 2, published=OUTBOX_DAYS * DAY)
        notes = history.notes(connection, 2, processed=PROCESSED_DAYS * DAY)
        run(database)
        assert (kept_events(connection), kept_notes(connection)) == ({events[0]}, {notes[0]})
        raise psycopg.Rollback


@pytest.mark.usefixtures("small_batches")
def test_a_step_removes_no_more_than_a_batch(database: Database, connect: Connect) -> None:
    """The oldest first. What a run has no time for is left to the next ones."""
    connection = connect()
    keys = history.keys(connection, 25, over_for=HOUR)
    events = history.events(connection, 25, published=OUTBOX_DAYS * DAY)
    notes = history.notes(connection, 25, processed=PROCESSED_DAYS * DAY)
    first = run(database, steps=KINDS)
    assert first.counts == {"keys": BATCH, "events": BATCH, "processed_events": BATCH}
    assert not first.is_finished
    assert kept_keys(connection) == set(keys[:-BATCH])
    assert kept_events(connection) == set(events[:-BATCH])
    assert kept_notes(connection) == set(notes[:-BATCH])
    second = run(database)
    assert second.counts == {"keys": 15, "events": 15, "processed_events": 15}
    assert second.is_finished
    assert kept_keys(connection) | kept_events(connection) | kept_notes(connection) == set()


@pytest.mark.usefixtures("small_batches")
def test_a_backlog_of_one_kind_delays_no_other(database: Database, connect: Connect) -> None:
    """With more expired keys than a run has time for, the few events that are due for removal are removed."""
    connection = connect()
    history.keys(connection, 20 * BATCH, over_for=HOUR)
    history.events(connection, 3, published=OUTBOX_DAYS * DAY)
    [charge_id] = history.charges(connection, 1, made=HOUR)
    set_watermark(connection, ago=HOUR + MINUTE)
    cut = run(database, steps=2 * KINDS)
    assert (cut.counts["events"], missing(cut), cut.is_finished) == (3, [charge_id], False)


def test_a_failure_of_one_kind_delays_no_other(database: Database, connect: Connect) -> None:
    """While the charges cannot be checked, tables are kept to their retention all the same; the run is not finished."""
    connection, holder = connect(), connect()
    history.keys(connection, 3, over_for=HOUR)
    history.events(connection, 3, published=OUTBOX_DAYS * DAY)
    [started] = history.keys(connection, 1, over_for=HOUR, status="STARTED")
    with holder.transaction():
        holder.execute("LOCK TABLE reconciliation")
        failed = run(database)
    assert failed.counts == {"keys": 3, "events": 3}
    assert ([key.key for key in failed.started_keys], failed.is_finished) == ([started], False)
    assert isinstance(failed.error, errors.Contended)
    assert run(database).is_finished


def test_without_time_nothing_is_begun(database: Database, connect: Connect) -> None:
    """Only what is known already is told."""
    connection = connect()
    history.keys(connection, 1, over_for=HOUR)
    [started] = history.keys(connection, 1, over_for=HOUR, status="STARTED")
    late = run(database, steps=0)
    assert (late.counts, late.is_finished) == (Counter(), False)
    assert [key.key for key in late.started_keys] == [started]
    assert len(kept_keys(connection)) == 2


# ---- beside everybody else -------------------------------------------------------------------------------------------


def test_a_row_that_somebody_holds_is_skipped_and_not_waited_for(database: Database, connect: Connect) -> None:
    """An open transaction on one row of each kind delays the run not at all, and its rows alone are left."""
    connection, holder = connect(), connect()
    impatient(connection)
    charges = history.charges(connection, 3, made=HOUR)
    assert set(missing(run(database))) == set(charges)
    for charge_id in charges:
        history.announce(connection, charge_id)
    keys = history.keys(connection, 3, over_for=HOUR)
    events = history.events(connection, 3, published=OUTBOX_DAYS * DAY)
    notes = history.notes(connection, 3, processed=PROCESSED_DAYS * DAY)
    with holder.transaction():
        for table, column, ids in [
            ("missing_events", "aggregate_id", charges),
            ("idempotency_keys", "key", keys),
            ("outbox", "id", events),
            ("processed_events", "event_id", notes),
        ]:
            hold = composing.SQL("SELECT FROM {} WHERE {} = %s FOR UPDATE")
            holder.execute(hold.format(composing.Identifier(table), composing.Identifier(column)), [ids[-1]])
        beside = run(database)
    assert beside.is_finished
    assert beside.counts == {"reports": 2, "keys": 2, "events": 2, "processed_events": 2}
    assert missing(beside) == [charges[-1]]
    assert (kept_keys(connection), kept_notes(connection)) == ({keys[-1]}, {notes[-1]})
    assert kept_events(connection) >= {events[-1]}
    assert run(database).counts == {"reports": 1, "keys": 1, "events": 1, "processed_events": 1}


def test_a_batch_blocks_nobody(database: Database, database_url: str, connect: Connect) -> None:
    """While one is removed and not yet committed: charges, replays, claims, deliveries, redrives, and another run."""
    connection, purge = connect(), connect()
    impatient(connection)
    history.keys(connection, 20, over_for=HOUR)
    events = history.events(connection, 20, published=OUTBOX_DAYS * DAY)
    history.notes(connection, 20, processed=PROCESSED_DAYS * DAY)
    charge(database, KEY)
    with deployment.database(database_url) as other:
        with purge.transaction():
            for statement in (sql.PURGE_KEYS, sql.PURGE_EVENTS, sql.PURGE_PROCESSED_EVENTS):
                removed = purge.execute(statement, {"limit": 10, "retention_days": OUTBOX_DAYS}).fetchone()
                assert removed == (10,)
            assert isinstance(charge(other, KEY), Replayed)
            assert isinstance(charge(other, KEY, amount_cents=1), KeyReused)
            assert isinstance(charge(other, uuid4()), Created)
            assert len(outbox.claim(other, limit=10, lease_seconds=30)) == 2
            with other.transaction() as delivery:
                assert inbox.is_first_delivery(delivery, "charge_totals", uuid4())
            redrive = "UPDATE outbox SET published_at = NULL WHERE id = %s RETURNING id"
            assert connection.execute(redrive, [events[0]]).fetchone() == (events[0],)
            beside = run(other)
        assert beside.counts == {"keys": 10, "events": 9, "processed_events": 10}
    assert kept_events(connection) >= {events[0]}


@pytest.mark.parametrize("is_committed", [True, False])
def test_a_takeover_of_a_key_that_is_being_removed_charges_once(
    is_committed: bool, database: Database, connect: Connect
) -> None:
    """It waits for the batch, and no longer, and claims the key in the same run: as a new one, or, where the batch was
    undone, as an expired one."""
    purge, observer = connect(), connect()
    charge(database, KEY)
    expire(observer)
    with ThreadPoolExecutor(1) as caller:
        with purge.transaction(force_rollback=not is_committed):
            assert purge.execute(sql.PURGE_KEYS, {"limit": 10}).fetchone() == (1,)
            call = caller.submit(charge, database, KEY)
            until_blocked(observer)
        assert isinstance(call.result(), Created)
    assert counts(observer) == (2, 2, 1)
    assert run(database).counts["keys"] == 0


def test_a_key_that_is_being_taken_over_is_kept(database: Database, database_url: str, connect: Connect) -> None:
    """The purge neither waits for the takeover nor removes what it makes."""
    connection = connect()
    impatient(connection)
    charge(database, KEY)
    expire(connection)
    history.keys(connection, 3, over_for=HOUR)
    with Twin(database_url, KEY) as twin:
        assert run(database).counts["keys"] == 3
        twin.commit()
    assert run(database).counts["keys"] == 0
    again = charge(database, KEY)
    assert isinstance(again, Replayed)
    assert again.response == twin.response


def expire(connection: Connection) -> None:
    """Lets a day pass for all keys."""
    connection.execute(
        "UPDATE idempotency_keys"
        " SET created_at = created_at - interval '1 day', expires_at = expires_at - interval '1 day'"
    )


@pytest.mark.parametrize("is_purged", [True, False])
def test_a_conflict_that_is_purged_before_it_is_read_is_claimed(
    is_purged: bool, database: Database, database_url: str, connect: Connect
) -> None:
    """The row that was in the way of the claim is gone when it is looked for, or still there and expired: in both cases
    the claim is made again, and never left out."""
    holder, observer = connect(), connect()
    purged = threading.Event()

    def runs() -> int:
        return wire.kinds(Sender.CLIENT).count("B")

    def hold_the_second_run(message: Message) -> Verdict:
        if message.sender is Sender.CLIENT and message.kind == "B" and runs() == 2:
            purged.wait(10)
        return Verdict.PASS

    with Wire(database_url) as wire, ThreadPoolExecutor(1) as caller:
        function = Instance("charges", wire.url, CHARGES)
        function.call(charge_event(principal="warm"))
        wire.messages.clear()
        wire.judge = hold_the_second_run
        with holder.transaction():
            stored_by_hand(holder, KEY)
            expire(holder)
            call = caller.submit(function.call, charge_event(KEY))
            until_blocked(observer)
        until(lambda: runs() == 2)
        assert not call.done()
        if is_purged:
            run(database)
            assert KEY not in kept_keys(observer)
        purged.set()
        answer = call.result()
        function.close()
    assert runs() == 2
    assert (answer.status, answer.is_replay) == (201, False)
    assert counts(observer)[:2] == (2, 2)


@pytest.mark.usefixtures("small_batches")
def test_takeovers_race_the_purge(database: Database, database_url: str, connect: Connect) -> None:
    """Four callers take over the same expired keys while they are being removed: each time, each key leads to one new
    charge, is kept, and is replayed from then on."""
    connection, keys = connect(), [uuid4() for _ in range(50)]
    rounds, removed, together = 5, 0, threading.Barrier(5)

    def take_over(own: Database) -> list[Outcome]:
        together.wait()
        return [charge(own, key) for key in keys]

    with ExitStack() as opened, ThreadPoolExecutor(4) as threads:
        callers = [opened.enter_context(deployment.database(database_url)) for _ in range(4)]
        for own in (database, *callers):
            for key in keys:
                charge(own, key)
        for _ in range(rounds):
            expire(connection)
            taken = [threads.submit(take_over, own) for own in callers]
            together.wait()
            while not all(call.done() for call in taken):
                removed += run(database).counts["keys"]
            for told in zip(*[call.result() for call in taken], strict=True):
                assert Counter(type(outcome) for outcome in told)[Created] == 1
    assert removed > 0
    assert all(isinstance(charge(database, key), Replayed) for key in keys)
    assert counts(connection) == (len(keys) * (1 + rounds), len(keys) * (1 + rounds), len(keys))


@pytest.mark.usefixtures("small_batches")
def test_redrives_race_the_purge(database: Database, connect: Connect) -> None:
    """An event whose time is over is removed or made due again, and never removed after that."""
    connection, operator = connect(), connect()
    events = history.events(connection, 400, published=OUTBOX_DAYS * DAY)
    together = threading.Barrier(2)

    def redrive() -> set[UUID]:
        """From the youngest on, while the purge comes from the oldest."""
        together.wait()
        statement = (
            "UPDATE outbox SET published_at = NULL WHERE published_at IS NOT NULL AND id = ANY (ARRAY("
            "SELECT id FROM outbox WHERE id = ANY (%s) FOR UPDATE SKIP LOCKED)) RETURNING id"
        )
        redriven: set[UUID] = set()
        for start in range(0, len(events), BATCH):
            rows = operator.execute(statement, [events[start : start + BATCH]]).fetchall()
            redriven |= {row[0] for row in rows}
        return redriven

    with ThreadPoolExecutor(1) as thread:
        redriving = thread.submit(redrive)
        together.wait()
        removed = run(database).counts["events"]
        redriven = redriving.result()
    removed += run(database).counts["events"]
    assert kept_events(connection) == redriven
    assert removed == len(events) - len(redriven)


@pytest.mark.parametrize("is_purged", [True, False])
@pytest.mark.parametrize(("age", "is_new"), [(DAY - MINUTE, False), (DAY, True), (30 * DAY, True)])
def test_a_key_is_new_after_24_hours_whether_or_not_it_was_removed(
    age: timedelta, is_new: bool, is_purged: bool, database: Database, connect: Connect
) -> None:
    """A caller cannot tell whether the purge has run: neither from a repetition nor from another command."""
    connection, other = connect(), uuid4()
    for key in (KEY, other):
        charge(database, key)
    connection.execute(
        "UPDATE idempotency_keys SET created_at = created_at - %(age)s, expires_at = expires_at - %(age)s",
        {"age": age},
    )
    if is_purged:
        run(database)
        assert kept_keys(connection) == (set() if is_new else {KEY, other})
    assert isinstance(charge(database, KEY), Created if is_new else Replayed)
    assert isinstance(charge(database, other, amount_cents=1), Created if is_new else KeyReused)


@pytest.mark.usefixtures("small_batches")
def test_two_runs_at_once_share_the_work(
    database: Database, database_url: str, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each row is removed once and each event is looked for once, whatever one does beside the other."""
    monkeypatch.setattr(maintenance, "SLICE_SECONDS", 60)
    connection = connect()
    for minutes in range(2, 122):
        history.charges(connection, 5, made=minutes * MINUTE)
    charges = kept(connection, "charges", "id")
    set_watermark(connection, ago=3 * HOUR)
    history.keys(connection, 1000, over_for=HOUR)
    history.events(connection, 1000, published=OUTBOX_DAYS * DAY)
    history.notes(connection, 1000, processed=PROCESSED_DAYS * DAY)
    together = threading.Barrier(2)

    def maintain(own: Database) -> Run:
        together.wait()
        return run(own)

    with deployment.database(database_url) as other, ThreadPoolExecutor(2) as runs:
        one, two = runs.map(maintain, [database, other])
    assert one.is_finished
    assert two.is_finished
    last = run(database)  # what one left to the other, which then had it no more
    total = one.counts + two.counts + last.counts
    assert total == {"keys": 1000, "events": 1000, "processed_events": 1000, "checked": len(charges)}
    assert set(missing(last)) == charges


# ---- when it is cut --------------------------------------------------------------------------------------------------


def end_the_run(connection: Connection) -> None:
    """Ends the session of the run, which is held up."""
    until_blocked(connection)
    ended = connection.execute(
        "SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity "
        "WHERE datname = current_database() AND application_name = 'charging'"
    ).fetchall()
    assert ended == [(True,)]


@pytest.mark.usefixtures("small_batches")
def test_a_run_that_is_cut_loses_no_more_than_its_step(database: Database, connect: Connect) -> None:
    """The batches before are removed, the one at hand is as if it had never begun, and the next run goes on."""
    connection, holder = connect(), connect()
    keys = history.keys(connection, 25, over_for=HOUR)
    in_the_second_batch = keys[-BATCH - 5]
    with ThreadPoolExecutor(1) as thread:
        with holding_up(
            holder, at_commit=False, event="DELETE ON idempotency_keys", rows=f"OLD.key = '{in_the_second_batch}'"
        ):
            cut = thread.submit(run, database)
            end_the_run(connection)
        assert isinstance(cut.result().error, errors.ConnectionLost)
    assert kept_keys(connection) == set(keys[:-BATCH])
    assert run(database).counts["keys"] == 25 - BATCH
    assert kept_keys(connection) == set()


def test_a_reconciliation_that_is_cut_has_moved_nothing(database: Database, connect: Connect) -> None:
    """The watermark and the reports are one transaction: the charges are checked again, and found."""
    connection, holder = connect(), connect()
    charges = history.charges(connection, 3, made=HOUR)
    set_watermark(connection, ago=HOUR + SECOND)
    before = checked_until(connection)
    with ThreadPoolExecutor(1) as thread:
        with holding_up(holder, at_commit=False, event="INSERT ON missing_events"):
            cut = thread.submit(run, database)
            end_the_run(connection)
        assert isinstance(cut.result().error, errors.ConnectionLost)
    assert checked_until(connection) == before
    assert kept(connection, "missing_events", "aggregate_id") == set()
    assert set(missing(run(database))) == set(charges)


# ---- events that are missing -----------------------------------------------------------------------------------------


def checked_until(connection: Connection) -> datetime:
    row = connection.execute("SELECT checked_until FROM reconciliation").fetchone()
    assert row is not None
    moment: datetime = row[0]
    return moment


def set_watermark(connection: Connection, *, ago: timedelta | None) -> None:
    """Lets the reconciliation go on from so long ago, or begin."""
    connection.execute("DELETE FROM reconciliation")
    if ago is not None:
        connection.execute("INSERT INTO reconciliation (checked_until) VALUES (now() - %s)", [ago])


def let_pass(connection: Connection, time: timedelta) -> None:
    """Lets time pass for charges and refunds, and for what was checked of them."""
    with connection.transaction():
        connection.execute("UPDATE charges SET created_at = created_at - %s", [time])
        connection.execute("UPDATE refunds SET created_at = created_at - %s", [time])
        connection.execute("UPDATE reconciliation SET checked_until = checked_until - %s", [time])


def missing(found: Run) -> list[UUID]:
    """The charges of which a run knows that an event is missing."""
    return [event.aggregate_id for event in found.missing_events]


def places(found: Run) -> set[tuple[UUID, int]]:
    """The events that a run knows to be missing, by the charge and the place among its events."""
    return {(event.aggregate_id, event.sequence) for event in found.missing_events}


def test_a_charge_and_its_refunds_have_their_events(database: Database, connect: Connect) -> None:
    """As the service makes them they are checked and not reported, while events wait and when they are published."""
    connection = connect()
    run(database)
    charge_id = charged(database)
    for _ in range(2):
        refund(database, uuid4(), charge_id, 100)
    let_pass(connection, HOUR)
    assert run(database).counts == {"checked": 3}
    connection.execute("UPDATE outbox SET published_at = now()")
    set_watermark(connection, ago=2 * HOUR)
    again = run(database)
    assert (again.counts, missing(again)) == ({"checked": 3}, [])


@pytest.mark.parametrize("place", [1, 2, 3])
def test_an_event_that_is_gone_is_found_by_its_place(place: int, database: Database, connect: Connect) -> None:
    """A charge's own or that of one of its refunds, and no other; it stays found until it is there again."""
    connection = connect()
    run(database)
    charge_id = charged(database)
    for _ in range(2):
        refund(database, uuid4(), charge_id, 100)
    [event_type] = connection.execute("DELETE FROM outbox WHERE sequence = %s RETURNING event_type", [place]).fetchall()
    let_pass(connection, HOUR)
    for found in (run(database), run(database)):
        assert [(event.aggregate_id, event.sequence, event.event_type) for event in found.missing_events] == [
            (charge_id, place, *event_type)
        ]
    history.announce(connection, charge_id, place=place)
    mended = run(database)
    assert (mended.counts, missing(mended)) == ({"reports": 1}, [])


def test_a_charge_without_its_event_is_found(database: Database, connect: Connect) -> None:
    """None at all, or another in its place; and it stays found, run after run."""
    connection = connect()
    charges = history.charges(connection, 2, made=HOUR)
    history.announce(connection, charges[0])
    connection.execute("UPDATE outbox SET event_type = 'ChargeRefunded'")
    first, second = run(database), run(database)
    assert set(missing(first)) == set(charges)
    assert second.missing_events == first.missing_events
    assert (first.counts["checked"], second.counts["checked"]) == (2, 0)


def test_a_charge_that_is_committed_late_is_checked(database: Database, connect: Connect) -> None:
    """The watermark never passes a transaction that may still be committed."""
    connection, late = connect(), connect()
    with late.transaction():
        [charge_id] = history.charges(late, 1, made=timedelta())
        assert run(database).counts == {}
    assert missing(run(database)) == []
    let_pass(connection, 2 * MINUTE)
    assert missing(run(database)) == [charge_id]


def test_what_counts_as_settled_is_older_than_any_transaction(connect: Connect) -> None:
    """`created_at` is the transaction's beginning, and the server ends a transaction long before that is settled."""
    bound = "SELECT make_interval(secs => %s) > 2 * current_setting('transaction_timeout')::interval"
    assert connect().execute(bound, [SETTLED_SECONDS]).fetchone() == (True,)


MADE = st.one_of(
    st.integers(0, 20 * 24 * 60).map(lambda minutes: timedelta(minutes=minutes)),
    # About the bounds.
    st.sampled_from([SETTLED, OUTBOX_DAYS * DAY - SETTLED, OUTBOX_DAYS * DAY]).flatmap(
        lambda bound: st.integers(-2, 2).map(lambda microseconds: bound + timedelta(microseconds=microseconds))
    ),
)


@EXAMPLES
@pytest.mark.usefixtures("long_slices")
@given(
    done=st.lists(
        st.tuples(st.booleans(), MADE, st.sampled_from(["never", "waiting", "at once", "late"])), max_size=12
    ),
    watermarks=st.lists(st.none() | MADE, min_size=1, max_size=3),
)
def test_exactly_the_events_that_never_were_are_found(
    done: list[tuple[bool, timedelta, str]], watermarks: list[timedelta | None], database: Database
) -> None:
    """From the watermark, or where that is missing or older, from what the purge leaves alone; up to what is settled.

    Of charges and of refunds. An event that was published and has been removed is not among them, wherever the check
    begins again.
    """
    with database.transaction() as connection:  # in which it is the same moment all the time
        without: dict[tuple[UUID, int], timedelta] = {}
        [refunded] = history.charges(connection, 1, made=timedelta())
        for is_charge, made, announced in done:
            if is_charge:
                [charge_id], place = history.charges(connection, 1, made=made), 1
            else:
                charge_id, place = refunded, history.refund(connection, refunded, made=made)
            if announced == "never":
                without[charge_id, place] = made
            else:
                published = {"waiting": None, "at once": made, "late": made / 2}[announced]
                history.announce(connection, charge_id, place=place, published=published)
        found: set[tuple[UUID, int]] = set()
        for watermark in watermarks:
            set_watermark(connection, ago=watermark)
            since = OUTBOX_DAYS * DAY - SETTLED
            if watermark is not None:
                since = min(since, watermark)
            found |= {place for place, made in without.items() if SETTLED < made <= since}
            assert places(run(database)) == found
        raise psycopg.Rollback


@pytest.mark.usefixtures("long_slices")
def test_an_event_that_is_removed_during_the_check_is_not_missed(database: Database, connect: Connect) -> None:
    """The purge begins after the reconciliation and ends before that looks: then the event was there for its time."""
    connection, reconciliation = connect(), connect()
    set_watermark(connection, ago=30 * DAY)
    with reconciliation.transaction():
        now = reconciliation.execute("SELECT now()").fetchone()
        assert now is not None
        [charge_id] = history.charges(connection, 1, made=timedelta())
        history.announce(connection, charge_id, published=timedelta())
        bound = now[0] - OUTBOX_DAYS * DAY
        connection.execute("UPDATE charges SET created_at = %s", [bound])
        connection.execute("UPDATE outbox SET published_at = %s", [bound])
        removed = connection.execute(sql.PURGE_EVENTS, {"retention_days": OUTBOX_DAYS, "limit": 1}).fetchone()
        assert removed == (1,)
        reconciliation.execute(sql.RECONCILE_EVENTS, BOUNDS)
    assert missing(run(database)) == []


def test_each_charge_is_in_one_slice(database: Database) -> None:
    """Also one that was made at the very moment at which a slice ends and the next one begins."""
    with database.transaction() as connection:
        set_watermark(connection, ago=HOUR)
        for number in range(6):
            # A millisecond after the moment, at it, and a millisecond before it.
            history.charges(connection, 3, made=HOUR - number * SLICE_SECONDS * SECOND - timedelta(milliseconds=1))
        # All but the one before the first of them.
        assert run(database).counts == {"checked": 3 * 6 - 1}
        raise psycopg.Rollback


@pytest.mark.usefixtures("small_batches")
def test_a_charge_whose_event_has_come_is_taken_off_the_list(database: Database, connect: Connect) -> None:
    """More of them than a batch, at once."""
    connection = connect()
    charges = history.charges(connection, 3 * BATCH, made=HOUR)
    assert len(missing(run(database))) == 3 * BATCH
    for charge_id in charges[1:]:
        history.announce(connection, charge_id)
    mended = run(database)
    assert mended.counts == {"reports": 3 * BATCH - 1}
    assert missing(mended) == charges[:1]


def test_a_charge_that_an_operator_takes_off_the_list_stays_off(database: Database, connect: Connect) -> None:
    """They have decided, and it is not found again."""
    connection = connect()
    history.charges(connection, 1, made=HOUR)
    run(database)
    connection.execute("DELETE FROM missing_events")
    assert missing(run(database)) == []


def test_the_watermark_only_goes_forward(database: Database, connect: Connect) -> None:
    """Also one that is ahead of the clock, as after a failover to a server whose clock is behind, stays."""
    connection = connect()
    run(database)
    first = checked_until(connection)
    run(database)
    assert checked_until(connection) > first
    set_watermark(connection, ago=-HOUR)
    ahead = checked_until(connection)
    assert run(database).is_finished
    assert checked_until(connection) == ahead


def test_a_run_leaves_the_reconciliation_to_the_one_that_is_at_it(database: Database, connect: Connect) -> None:
    """It does not wait for the watermark, and does the rest of its work."""
    connection, other = connect(), connect()
    impatient(connection)
    history.charges(connection, 1, made=HOUR)
    history.keys(connection, 1, over_for=HOUR)
    set_watermark(connection, ago=2 * HOUR)
    with other.transaction():
        other.execute("SELECT FROM reconciliation FOR UPDATE")
        beside = run(database)
    assert (beside.counts, missing(beside), beside.is_finished) == ({"keys": 1}, [], True)
    assert len(missing(run(database))) == 1


def test_no_more_findings_are_read_than_can_be_told(
    database: Database, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A table that was emptied by mistake does not bring the function down that should tell of it."""
    monkeypatch.setattr(maintenance, "FINDINGS", 3)
    connection = connect()
    history.charges(connection, 5, made=HOUR)
    started = history.keys(connection, 5, over_for=HOUR, status="STARTED")
    told = run(database)
    assert len(told.missing_events) == 3
    assert [key.key for key in told.started_keys] == started[:1:-1]


# ---- what it costs ---------------------------------------------------------------------------------------------------

HISTORY = 50_000


# One worker makes the history, for all of these.
in_a_long_history = pytest.mark.xdist_group("long history")


@pytest.fixture(scope="module")
def long_history_url(database_server: Databases) -> Iterator[str]:
    """Each table with 50,000 rows that are kept, and 1,000 that are past their retention."""
    with database_server.migrated() as url, psycopg.connect(url, autocommit=True) as connection:
        grow_old(connection)
        yield url


@pytest.fixture
def long_history(long_history_url: str) -> Iterator[Connection]:
    with psycopg.connect(long_history_url, autocommit=True) as connection:
        yield connection


def grow_old(connection: Connection) -> None:
    for age in (timedelta(), 100 * DAY):
        count = 1000 if age else HISTORY
        history.keys(connection, count, over_for=age - MINUTE if age else -DAY)
        history.events(connection, count, published=age)
        history.notes(connection, count, processed=age)
    # Over eight hours, as they come in.
    connection.execute(
        "INSERT INTO charges (id, principal, amount_cents, currency, created_at)"
        " SELECT gen_random_uuid(), 'alice', 4900, 'USD', now() - (%(count)s - n) * interval '0.6 s'"
        " FROM generate_series(1, %(count)s) AS n",
        {"count": HISTORY},
    )
    connection.execute(
        "INSERT INTO refunds (id, charge_id, number, amount_cents, created_at)"
        " SELECT gen_random_uuid(), id, 1, 100, created_at FROM charges ORDER BY created_at"
    )
    for table in ("idempotency_keys", "outbox", "processed_events", "charges", "refunds"):
        connection.execute(composing.SQL("VACUUM ANALYZE {}").format(composing.Identifier(table)))


@in_a_long_history
@pytest.mark.parametrize(
    ("statement", "indexes"),
    [
        (sql.PURGE_KEYS, {"idempotency_keys_expiring"}),
        (sql.PURGE_EVENTS, {"outbox_published"}),
        (sql.PURGE_PROCESSED_EVENTS, {"processed_events_by_age"}),
        (sql.RECONCILE_EVENTS, {"charges_by_age", "refunds_by_age", "outbox_places_are_taken_once"}),
        (sql.FIND_STARTED_KEYS, {"idempotency_keys_started"}),
    ],
    ids=["keys", "events", "processed events", "missing events", "started keys"],
)
def test_it_uses_the_indexes_however_long_the_history(
    statement: bytes, indexes: set[str], long_history: Connection
) -> None:
    """What is kept costs nothing: no table is read whole but those that are nearly empty."""
    nodes = plan(long_history, statement, BOUNDS)
    assert {node["Index Name"] for node in nodes if "Index Name" in node} == indexes
    read = {node["Relation Name"] for node in nodes if node["Node Type"] == "Seq Scan"}
    assert read <= {"reconciliation", "missing_events"}


def test_the_outbox_is_asked_by_its_index_where_reading_it_looks_cheaper(connect: Connect) -> None:
    """With statistics that know many charges and few events, as they were before an outbox has grown."""
    connection = connect()
    history.charges(connection, HISTORY, made=HOUR)
    history.events(connection, HISTORY // 20, published=HOUR)
    connection.execute("VACUUM ANALYZE charges")
    connection.execute("VACUUM ANALYZE outbox")
    nodes = plan(connection, sql.RECONCILE_EVENTS, BOUNDS)
    [found] = [node for node in nodes if node.get("Relation Name") == "outbox"]
    assert found["Index Name"] == "outbox_places_are_taken_once"


@in_a_long_history
def test_no_run_reads_a_table_whole(
    long_history_url: str, long_history: Connection, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Batch after batch and slice after slice, whichever plan the server has settled on for its prepared statements."""
    monkeypatch.setattr(maintenance, "BATCH", 50)
    # A gross of them in the day: enough for the server to settle on a plan.
    monkeypatch.setattr(maintenance, "SLICE_SECONDS", 600)
    set_watermark(long_history, ago=DAY)
    tables = ["idempotency_keys", "outbox", "processed_events", "charges", "refunds"]
    read = "SELECT relname, seq_tup_read, idx_scan FROM pg_stat_user_tables WHERE relname = ANY (%s)"

    def counted() -> dict[str, tuple[int, int]]:
        return {name: (whole, by_index) for name, whole, by_index in long_history.execute(read, [tables]).fetchall()}

    # What this test itself has read is counted before, and what the run reads once its connection is closed.
    long_history.execute("SELECT pg_stat_force_next_flush()")
    before = counted()
    with deployment.database(long_history_url) as database:
        done = run(database)
    assert done.counts["checked"] > 2 * (HISTORY - 200)
    assert done.counts["keys"] == done.counts["events"] == done.counts["processed_events"] == 1000
    until(lambda: all(counted()[table][1] > before[table][1] for table in tables))
    # One charge is looked at, for whether there are any.
    assert all(counted()[table][0] - before[table][0] <= 1 for table in tables)


@in_a_long_history
@pytest.mark.parametrize("table", ["outbox", "processed_events"])
def test_a_few_dead_rows_are_removed_from_the_indexes_too(table: str, long_history: Connection) -> None:
    """By default the server leaves them there, for every claim and every purge to step over."""
    said: list[str] = []
    long_history.add_notice_handler(lambda notice: said.append(notice.message_primary or ""))
    column = "event_id" if table == "processed_events" else "id"
    long_history.execute(f"DELETE FROM {table} WHERE {column} = (SELECT {column} FROM {table} LIMIT 1)")
    long_history.execute(f"VACUUM (VERBOSE) {table}")
    assert "index scan needed" in "\n".join(said)
    assert "index scan bypassed" not in "\n".join(said)
