"""Claims and completions: leases, fencing, the database's clock, the partial index."""

import json
import re
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime, timedelta
from uuid import UUID

import psycopg
import pytest
from psycopg import sql as composing

from charging import errors, outbox, sql
from charging.database import Database
from charging.outbox import FULL_LOOK_SECONDS, ClaimedEvent, Claims, Completion
from tests.conftest import Connect
from tests.support import deployment
from tests.support import outbox as table
from tests.support.wire import Sender, Wire, lose_answer, silent

LEASE_SECONDS = 30.0
HOURS = 3600


@pytest.fixture
def database(database_url: str) -> Iterator[Database]:
    """A relay's connection."""
    with deployment.database(database_url) as opened:
        yield opened


def claim(database: Database, limit: int = 100) -> list[ClaimedEvent]:
    return list(outbox.claim(database, limit=limit, lease_seconds=LEASE_SECONDS))


def claim_one(database: Database) -> ClaimedEvent:
    [event] = claim(database)
    return event


def claimed_ids(database: Database, limit: int = 100) -> list[UUID]:
    return [event.id for event in claim(database, limit)]


class TestClaim:
    """What is taken, for how long, and by whom."""

    def test_what_has_been_due_longest_comes_first(self, connect: Connect, database: Database) -> None:
        """With a limit of two, the two that have waited longest are claimed, whatever the order of their ids."""
        connection = connect()
        first, second, third = table.write(connection, count=3)
        connection.execute("UPDATE outbox SET next_attempt_at = now() - interval '1 minute' WHERE id = %s", [third])
        connection.execute("UPDATE outbox SET next_attempt_at = now() - interval '1 hour' WHERE id = %s", [second])
        assert set(claimed_ids(database, limit=2)) == {second, third}
        assert claimed_ids(database) == [first]

    def test_it_charges_the_attempt(self, connect: Connect, database: Database) -> None:
        """A claim counts before anything is sent, so that a relay that dies each time leaves a trace."""
        connection = connect()
        [event_id] = table.write(connection)
        for attempt in (1, 2, 3):
            assert claim_one(database).attempts == attempt
            assert table.row(connection, event_id).attempts == attempt
            table.let_pass(connection, seconds=LEASE_SECONDS)

    def test_attempts_that_cannot_grow_begin_anew(self, connect: Connect, database: Database) -> None:
        """A number that somebody has set to the largest there is stops no claim, and still changes with each."""
        connection = connect()
        table.write(connection, count=2)
        connection.execute(
            "UPDATE outbox SET attempts = 2147483647 WHERE id = (SELECT min(id::text)::uuid FROM outbox)"
        )
        assert [event.attempts for event in claim(database)] == [1, 1]

    def test_it_leases_for_as_long_as_asked(self, connect: Connect, database: Database) -> None:
        """The row is due again when the lease ends, and not before."""
        connection = connect()
        [event_id] = table.write(connection)
        claim_one(database)
        assert table.row(connection, event_id).due_in_seconds == pytest.approx(LEASE_SECONDS, abs=5)
        assert claim(database) == []

    def test_the_rows_of_a_dead_relay_come_back_by_themselves(self, connect: Connect, database: Database) -> None:
        """Nobody has to free them: the claim itself takes a row whose lease has ended."""
        connection = connect()
        ids = table.write(connection, count=3)
        claim(database)
        table.let_pass(connection, seconds=LEASE_SECONDS - 5)
        assert claim(database) == []
        table.let_pass(connection, seconds=5)
        assert set(claimed_ids(database)) == set(ids)

    def test_two_at_once_never_take_the_same_row(self, connect: Connect, database: Database, database_url: str) -> None:
        """Two relays that claim in turns of ten, side by side, share 400 rows without an overlap or a rest."""
        connection = connect()
        ids = table.write(connection, count=400)
        start = threading.Barrier(2)

        def drain(by: Database) -> list[UUID]:
            start.wait(10)
            taken: list[UUID] = []
            while some := claimed_ids(by, limit=10):
                taken += some
            return taken

        with deployment.database(database_url) as other, ThreadPoolExecutor(2) as relays:
            one, two = relays.map(drain, [database, other])
        assert sorted(one + two) == sorted(ids)
        assert {row.attempts for row in table.rows(connection)} == {1}

    def test_a_row_that_is_being_taken_is_skipped_and_not_waited_for(
        self, connect: Connect, database: Database
    ) -> None:
        """While another claim's transaction is still open, the rows beside its own are claimed at once."""
        connection, other = connect(), connect()
        table.write(connection, count=3)
        with other.transaction():
            taken = other.execute(
                sql.CLAIM_EVENTS, {"limit": 2, "lease_seconds": LEASE_SECONDS, "since": None}
            ).fetchall()
            # Waiting would end in lock_timeout, and so in an error.
            rest = claimed_ids(database)
        assert len(taken) == 2
        assert len(rest) == 1
        assert rest[0] not in {row[0] for row in taken}

    def test_a_row_that_commits_late_is_picked_up(self, connect: Connect, database: Database) -> None:
        """An older transaction commits after younger rows were published: its row is claimed all the same."""
        connection, late = connect(), connect()
        with late.transaction():
            [late_id] = table.write(late)
            young = table.write(connection, count=3)
            events = claim(database)
            assert {event.id for event in events} == set(young)
            outbox.complete(database, [Completion(event, "PUBLISHED") for event in events])
        assert claimed_ids(database) == [late_id]

    @pytest.mark.parametrize("column", ["published_at", "failed_at"])
    def test_what_is_settled_is_never_claimed(self, column: str, connect: Connect, database: Database) -> None:
        """A published or parked row stays as it is, however long ago it was due."""
        connection = connect()
        table.write(connection)
        settled = composing.SQL("UPDATE outbox SET {} = now(), next_attempt_at = now() - interval '1 day'")
        connection.execute(settled.format(composing.Identifier(column)))
        assert claim(database) == []

    def test_it_uses_the_partial_index_however_long_the_history(self, connect: Connect) -> None:
        """With 50,000 published rows kept and 1,000 due, the claim reads outbox_due and never the whole table."""
        connection = connect()
        connection.execute(
            """
            INSERT INTO outbox (id, event_type, aggregate_id, payload, published_at)
            SELECT gen_random_uuid(), 'ChargeCreated', gen_random_uuid(), '{}', CASE WHEN n % 51 > 0 THEN now() END
            FROM generate_series(1, 51000) AS n
            """
        )
        connection.execute("ANALYZE outbox")
        explained = connection.execute(
            b"EXPLAIN (FORMAT JSON) " + sql.CLAIM_EVENTS, {"limit": 100, "lease_seconds": LEASE_SECONDS, "since": None}
        ).fetchone()
        assert explained is not None
        plan = json.dumps(explained[0])
        assert '"Index Name": "outbox_due"' in plan
        assert "Seq Scan" not in plan


@pytest.mark.usefixtures("clock")
class TestClaims:
    """Where a relay's claims begin, which decides how soon an event is found, and nothing else."""

    @pytest.fixture
    def claims(self, connect: Connect, database: Database) -> Claims:
        """Claims that have got to this moment, of a relay whose clock only the test moves."""
        claims = Claims(database)
        [event_id] = table.write(connect())
        assert taken(claims) == {event_id}
        return claims

    @pytest.fixture
    def clock(self, monkeypatch: pytest.MonkeyPatch) -> "Clock":
        return Clock(monkeypatch)

    def test_a_row_that_commits_a_little_late_is_in_the_next_claim(self, connect: Connect, claims: Claims) -> None:
        """It came to be due a good while before the last claim's end, in terms of what a charge takes."""
        connection = connect()
        [(due_at,)] = connection.execute("SELECT max(created_at) FROM outbox").fetchall()
        [late] = table.write(connection)
        connection.execute(
            "UPDATE outbox SET next_attempt_at = %s WHERE id = %s", [due_at - timedelta(seconds=0.4), late]
        )
        assert taken(claims) == {late}

    def test_a_row_is_due_when_it_is_written(self, connect: Connect, claims: Claims) -> None:
        """Its statement may have waited for another one: what came and went meanwhile does not put it out of sight."""
        connection, waiting = connect(), connect()
        with waiting.transaction():
            waiting.execute("SELECT pg_sleep(0.6)")
            young = table.write(connection)
            assert taken(claims) == set(young)
            [late] = table.write(waiting)
        assert taken(claims) == {late}

    @pytest.mark.parametrize("seconds_ago", [5, HOURS, 24 * 365 * HOURS])
    def test_a_row_that_is_due_further_back_waits_for_a_quarter_of_a_minute(
        self, seconds_ago: float, connect: Connect, claims: Claims, clock: "Clock"
    ) -> None:
        """Committed late, or set so by hand, however far back: the next claim that begins at the beginning has it."""
        connection = connect()
        late = write_due(connection, seconds_ago=seconds_ago)
        young = write_due(connection, seconds_ago=0)
        assert taken(claims) == young
        clock.pass_by(FULL_LOOK_SECONDS - 0.1)
        assert taken(claims) == set()
        clock.pass_by(0.1)
        assert taken(claims) == late

    @pytest.mark.parametrize("at", ["-infinity", "4713-01-01 BC"])
    def test_a_row_that_is_due_since_ever_holds_up_nobody(self, at: str, connect: Connect, database: Database) -> None:
        """Somebody has set it so by hand, and to a time that Python has no word for. It is taken with the others."""
        connection = connect()
        ids = table.write(connection, count=2)
        connection.execute("UPDATE outbox SET next_attempt_at = %s WHERE id = %s", [at, ids[0]])
        claims = Claims(database)
        assert taken(claims) == set(ids)
        assert taken(claims) == set()

    def test_another_relay_has_it_at_once(self, connect: Connect, claims: Claims, database: Database) -> None:
        """Where claims begin is one relay's own matter, and a new run begins at the beginning."""
        late = write_due(connect(), seconds_ago=HOURS)
        assert taken(claims) == set()
        assert taken(Claims(database)) == late

    def test_a_backlog_further_back_is_taken_without_another_wait(
        self, connect: Connect, claims: Claims, clock: "Clock"
    ) -> None:
        """Once it is found, claim follows upon claim until it is gone, and then what is due now."""
        connection = connect()
        late = write_due(connection, seconds_ago=HOURS, count=30)
        clock.pass_by(FULL_LOOK_SECONDS)
        young = write_due(connection, seconds_ago=0, count=5)
        found = [taken(claims, limit=10) for _ in range(4)]
        assert set().union(*found[:3]) == late
        assert found[3] == young

    def test_a_straggler_does_not_set_the_claims_back(self, connect: Connect, claims: Claims, clock: "Clock") -> None:
        """When one old row has been found and nothing else is due, the next claim begins where others have got to."""
        connection = connect()
        straggler = write_due(connection, seconds_ago=HOURS)
        clock.pass_by(FULL_LOOK_SECONDS)
        assert taken(claims) == straggler
        write_due(connection, seconds_ago=HOURS / 2)
        assert taken(claims) == set()

    def test_a_claim_does_not_step_over_what_earlier_ones_left(self, connect: Connect, database: Database) -> None:
        """Beside a snapshot that keeps every dead row, a claim reads what the last of a thousand events left."""
        connection, holder, claims = connect(), connect(), Claims(database)
        events: Sequence[ClaimedEvent] = []
        with holder.transaction():
            holder.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
            holder.execute("SELECT FROM outbox")
            for minutes in range(10, 0, -1):
                write_due(connection, seconds_ago=60 * minutes, count=100)
                events = claims.claim(100)
                outbox.complete(database, [Completion(event, "PUBLISHED") for event in events])
            since = max(event.due_at for event in events) - outbox.OVERLAP
            beginning, end = (blocks_read(connection, since) for since in (None, since))
        assert end < beginning / 5


def taken(claims: Claims, limit: int = 100) -> set[UUID]:
    return {event.id for event in claims.claim(limit)}


def write_due(connection: table.Connection, *, seconds_ago: float, count: int = 1) -> set[UUID]:
    """Commits rows that have come to be due so long ago, as an old transaction does."""
    written = connection.execute(
        """
        INSERT INTO outbox (id, event_type, aggregate_id, payload, next_attempt_at)
        SELECT gen_random_uuid(), 'ChargeCreated', gen_random_uuid(), '{}', now() - make_interval(secs => %s)
        FROM generate_series(1, %s)
        RETURNING id
        """,
        [seconds_ago, count],
    ).fetchall()
    return {event_id for (event_id,) in written}


def blocks_read(connection: table.Connection, since: datetime | None) -> int:
    """Returns how many blocks a claim reads to find that nothing is due."""
    explained = connection.execute(
        b"EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) " + sql.CLAIM_EVENTS,
        {"limit": 100, "lease_seconds": LEASE_SECONDS, "since": since},
    ).fetchone()
    assert explained is not None
    plan = explained[0][0]["Plan"]
    return int(plan["Shared Hit Blocks"]) + int(plan["Shared Read Blocks"])


class Clock:
    """A function's monotonic clock that stands still but for what a test lets pass."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._now = time.monotonic()
        monkeypatch.setattr(time, "monotonic", lambda: self._now)

    def pass_by(self, seconds: float) -> None:
        self._now += seconds


class TestComplete:
    """What is written down of each result."""

    def test_accepted_events_are_published(self, connect: Connect, database: Database) -> None:
        """Only the ids that are given are marked; the row beside them keeps its lease."""
        connection = connect()
        table.write(connection, count=3)
        sent, other, waiting = claim(database)
        assert outbox.complete(database, [Completion(sent, "PUBLISHED"), Completion(other, "PUBLISHED")]) == 0
        assert [row.is_published for row in table.rows(connection, [sent.id, other.id, waiting.id])] == [
            True,
            True,
            False,
        ]

    def test_it_finds_its_rows_by_primary_key_whatever_the_statistics_say(self, connect: Connect) -> None:
        """Statistics from before an outage say that nothing is due, and those of a new table that nothing is published.
        Neither makes a completion read all that is."""
        connection = connect()
        completion = {
            "ids": [UUID(int=1)] * 10,
            "attempts": [1] * 10,
            "outcomes": ["PUBLISHED"] * 10,
            "refusals": [0] * 10,
            "errors": [None] * 10,
        }
        for published in (True, False):
            connection.execute("DELETE FROM outbox")
            connection.execute(
                """
                INSERT INTO outbox (id, event_type, aggregate_id, payload, published_at)
                SELECT gen_random_uuid(), 'ChargeCreated', gen_random_uuid(), '{}', CASE WHEN %s THEN now() END
                FROM generate_series(1, 5000)
                """,
                [published],
            )
            connection.execute("ANALYZE outbox")
            explained = connection.execute(b"EXPLAIN (FORMAT JSON) " + sql.COMPLETE_EVENTS, completion).fetchone()
            assert explained is not None
            plan = json.dumps(explained[0])
            assert set(re.findall(r'"Index Name": "(\w+)"', plan)) == {"outbox_pkey"}
            assert "Seq Scan" not in plan

    def test_a_postponed_event_keeps_its_life(self, connect: Connect, database: Database) -> None:
        """An outage is noted and costs nothing but time: no refusal, due again later, never failed."""
        connection = connect()
        [event_id] = table.write(connection)
        for _ in range(200):
            outbox.complete(database, [Completion(claim_one(database), "POSTPONED", "ConnectTimeoutError")])
            table.let_pass(connection, seconds=60)
        row = table.row(connection, event_id)
        assert (row.attempts, row.refusals, row.is_published, row.is_failed) == (200, 0, False, False)
        assert row.last_error == "ConnectTimeoutError"

    @pytest.mark.parametrize(("attempts", "longest"), [(1, 1), (2, 2), (3, 4), (6, 32), (7, 60), (1000, 60)])
    def test_the_delay_doubles_up_to_a_minute_and_is_spread(
        self, attempts: int, longest: float, connect: Connect, database: Database
    ) -> None:
        """After the n-th attempt it is from half of 2^(n-1) seconds to the whole, and never more than a minute."""
        connection = connect()
        table.write(connection, count=51)
        connection.execute("UPDATE outbox SET attempts = %s", [attempts - 1])
        published, *postponed = claim(database)
        # Published by the same statement, one row tells what time it was.
        outbox.complete(
            database, [Completion(published, "PUBLISHED"), *[Completion(event, "POSTPONED") for event in postponed]]
        )
        rows = connection.execute(
            """
            SELECT extract(EPOCH FROM next_attempt_at - (SELECT max(published_at) FROM outbox))::float8
            FROM outbox
            WHERE published_at IS NULL
            """
        ).fetchall()
        delays = [delay for (delay,) in rows]
        assert all(longest / 2 <= delay <= longest for delay in delays)
        assert max(delays) - min(delays) > longest / 10

    def test_a_refusal_is_counted(self, connect: Connect, database: Database) -> None:
        """A refused event is due again later; its refusals say how often, and come back with its next claim."""
        connection = connect()
        [event_id] = table.write(connection)
        outbox.complete(database, [Completion(claim_one(database), "REFUSED", "Odd: refused")])
        row = table.row(connection, event_id)
        assert (row.refusals, row.is_failed, row.last_error) == (1, False, "Odd: refused")
        assert row.due_in_seconds > 0
        table.let_pass(connection, seconds=60)
        assert claim_one(database).refusals == 1

    def test_a_failed_event_is_parked_with_its_error(self, connect: Connect, database: Database) -> None:
        """It is neither published nor ever claimed again."""
        connection = connect()
        [event_id] = table.write(connection)
        outbox.complete(database, [Completion(claim_one(database), "FAILED", "InvalidParameter: no")])
        row = table.row(connection, event_id)
        assert (row.is_failed, row.is_published, row.last_error) == (True, False, "InvalidParameter: no")
        table.let_pass(connection, seconds=HOURS)
        assert claim(database) == []

    def test_an_error_is_forgotten_once_the_event_is_published(self, connect: Connect, database: Database) -> None:
        """What is last said of a published row is that it was published."""
        connection = connect()
        [event_id] = table.write(connection)
        outbox.complete(database, [Completion(claim_one(database), "POSTPONED", "Throttling")])
        table.let_pass(connection, seconds=60)
        outbox.complete(database, [Completion(claim_one(database), "PUBLISHED")])
        assert table.row(connection, event_id).last_error is None

    def test_a_lost_lease_is_counted_and_changes_nothing(self, connect: Connect, database: Database) -> None:
        """A relay that wakes up after its lease cannot answer for a row that another has claimed since."""
        connection = connect()
        event_id, kept_id = table.write(connection, count=2)
        slow = {event.id: event for event in claim(database)}
        outbox.complete(database, [Completion(slow[kept_id], "PUBLISHED")])
        table.let_pass(connection, seconds=LEASE_SECONDS)
        quick = claim_one(database)
        before = table.row(connection, event_id)
        assert outbox.complete(database, [Completion(slow[event_id], "FAILED", "late")]) == 1
        after = table.row(connection, event_id)
        assert (after.attempts, after.is_failed, after.last_error) == (before.attempts, False, None)
        assert outbox.complete(database, [Completion(quick, "PUBLISHED")]) == 0

    def test_a_lease_that_has_ended_is_not_lost_until_it_is_taken(self, connect: Connect, database: Database) -> None:
        """The broker did accept the event: while nobody else has claimed it, that is still worth knowing."""
        connection = connect()
        [event_id] = table.write(connection)
        event = claim_one(database)
        table.let_pass(connection, seconds=HOURS)
        assert outbox.complete(database, [Completion(event, "PUBLISHED")]) == 0
        assert table.row(connection, event_id).is_published

    @pytest.mark.parametrize("again", ["PUBLISHED", "FAILED", "POSTPONED"])
    def test_a_completion_twice_changes_nothing_more(
        self, again: outbox.Result, connect: Connect, database: Database
    ) -> None:
        """A published row is not parked, postponed or published again; and its lease was not lost, but used."""
        connection = connect()
        [event_id] = table.write(connection)
        event = claim_one(database)
        outbox.complete(database, [Completion(event, "PUBLISHED")])
        before = table.row(connection, event_id)
        assert outbox.complete(database, [Completion(event, again, "too late")]) == 0
        after = table.row(connection, event_id)
        assert (after.is_published, after.is_failed, after.last_error) == (True, False, None)
        assert (after.attempts, after.refusals) == (before.attempts, before.refusals)

    def test_a_confirmation_that_is_lost_costs_no_lease(self, connect: Connect, database_url: str) -> None:
        """The connection dies with the mark committed: it is made once more, and finds itself."""
        connection = connect()
        ids = table.write(connection, count=3)
        with Wire(database_url) as wire, deployment.database(wire.url) as database:
            events = claim(database)
            wire.judge = lose_answer(after="B")
            assert outbox.complete(database, [Completion(event, "PUBLISHED") for event in events]) == 0
            assert wire.connections == 2
        assert all(row.is_published for row in table.rows(connection, ids))

    @pytest.mark.parametrize("result", ["REFUSED", "POSTPONED", "RETURNED"])
    def test_what_is_written_down_twice_counts_once(
        self, result: outbox.Result, connect: Connect, database_url: str
    ) -> None:
        """The connection dies with a result committed that settles nothing: a refusal is not counted again."""
        connection = connect()
        [event_id] = table.write(connection)
        with Wire(database_url) as wire, deployment.database(wire.url) as database:
            event = claim_one(database)
            wire.judge = lose_answer(after="B")
            assert outbox.complete(database, [Completion(event, result, "Odd: refused")]) == 0
            assert wire.connections == 2
        row = table.row(connection, event_id)
        assert (row.attempts, row.refusals, row.is_failed) == (1, 1 if result == "REFUSED" else 0, False)

    def test_results_of_many_kinds_go_down_in_one_statement(self, connect: Connect, database: Database) -> None:
        """Each row gets its own result and its own error."""
        connection = connect()
        table.write(connection, count=4)
        events = claim(database)
        kinds: list[outbox.Result] = ["PUBLISHED", "REFUSED", "FAILED", "POSTPONED"]
        completions = [
            Completion(event, kind, None if kind == "PUBLISHED" else kind)
            for event, kind in zip(events, kinds, strict=True)
        ]
        assert outbox.complete(database, completions) == 0
        seen = [
            (row.is_published, row.is_failed, row.refusals, row.last_error)
            for row in table.rows(connection, [event.id for event in events])
        ]
        assert seen == [
            (True, False, 0, None),
            (False, False, 1, "REFUSED"),
            (False, True, 1, "FAILED"),
            (False, False, 0, "POSTPONED"),
        ]

    def test_nothing_to_complete_asks_nothing_of_the_database(self, database_url: str) -> None:
        """An empty list is no statement: it works even where no connection could be opened."""
        with deployment.database(unreachable(database_url)) as nowhere:
            assert outbox.complete(nowhere, []) == 0


def unreachable(url: str) -> str:
    """The same database, behind a port where nobody listens."""
    return psycopg.conninfo.make_conninfo(url, port=1)


class TestClocks:
    """Whose time it is."""

    @pytest.mark.parametrize("hours_off", [-2, 2])
    def test_the_functions_own_clock_decides_nothing(
        self, hours_off: int, connect: Connect, database: Database, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """With a function's clock two hours off, rows are claimed, leased, and postponed as always."""
        now, now_ns = time.time, time.time_ns
        monkeypatch.setattr(time, "time", lambda: now() + hours_off * HOURS)
        monkeypatch.setattr(time, "time_ns", lambda: now_ns() + hours_off * HOURS * 10**9)
        assert_ordinary(connect(), database)

    @pytest.mark.parametrize("zone", ["Pacific/Kiritimati", "Pacific/Pago_Pago"])
    def test_the_servers_time_zone_does_not_matter(self, zone: str, connect: Connect, database_url: str) -> None:
        """Fourteen hours ahead of UTC or eleven behind, nothing comes due earlier or later."""
        connection = connect()
        connection.execute(
            composing.SQL("ALTER DATABASE {} SET timezone = {}").format(
                composing.Identifier(connection.info.dbname), composing.Literal(zone)
            )
        )
        with deployment.database(database_url) as database:
            assert_ordinary(connect(), database)


def assert_ordinary(connection: table.Connection, database: Database) -> None:
    """A row goes through its claim, its lease and its postponement in the time that these take."""
    [event_id] = table.write(connection)
    event = claim_one(database)
    assert claim(database) == []
    assert table.row(connection, event_id).due_in_seconds == pytest.approx(LEASE_SECONDS, abs=5)
    outbox.complete(database, [Completion(event, "POSTPONED")])
    assert table.row(connection, event_id).due_in_seconds <= 1
    table.let_pass(connection, seconds=1)
    event = claim_one(database)
    outbox.complete(database, [Completion(event, "PUBLISHED")])
    measured = outbox.measure(database)
    assert (measured.oldest_age_seconds, measured.pending, measured.failed) == (0, 0, 0)


class TestMeasure:
    """What the monitor is told."""

    def test_an_empty_outbox_has_no_age(self, database: Database) -> None:
        """Zero is measured, since a metric that is missing is an alarm."""
        measured = outbox.measure(database)
        assert (measured.oldest_age_seconds, measured.pending, measured.failed) == (0, 0, 0)

    def test_it_reads_no_more_than_so_many(
        self, connect: Connect, database: Database, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Amid an outage of any length it takes no longer; the oldest event that was not tried yet still shows."""
        connection = connect()
        monkeypatch.setattr(outbox, "MEASURED_EVENTS", 10)
        ids = table.write(connection, count=30)
        connection.execute("UPDATE outbox SET failed_at = now() WHERE id = ANY (%s)", [ids[15:]])
        connection.execute(
            "UPDATE outbox SET created_at = now() - interval '1 hour', next_attempt_at = now() - interval '1 hour'"
            " WHERE id = %s",
            [ids[7]],
        )
        measured = outbox.measure(database)
        assert (measured.pending, measured.failed) == (10, 10)
        assert measured.oldest_age_seconds >= HOURS

    def test_a_snapshot_that_is_held_open_grows_old(self, connect: Connect, database: Database) -> None:
        """The age is that of the oldest one that anybody holds, in transactions that others made since."""
        holder, writer = connect(), connect()
        with holder.transaction():
            holder.execute("SET TRANSACTION ISOLATION LEVEL REPEATABLE READ")
            holder.execute("SELECT FROM outbox")
            for _ in range(500):
                writer.execute("SELECT pg_current_xact_id()")
            assert outbox.measure(database).xmin_age >= 500
        assert outbox.measure(database).xmin_age < 500

    def test_the_age_is_that_of_the_oldest_waiting_row(self, connect: Connect, database: Database) -> None:
        """Retries do not make a row younger, and rows that are settled are no longer waited for."""
        connection = connect()
        published, failed, oldest, _ = table.write(connection, count=4)
        connection.execute("UPDATE outbox SET created_at = now() - interval '9 days' WHERE id = %s", [published])
        connection.execute("UPDATE outbox SET published_at = now() WHERE id = %s", [published])
        connection.execute("UPDATE outbox SET created_at = now() - interval '8 days' WHERE id = %s", [failed])
        connection.execute("UPDATE outbox SET failed_at = now() WHERE id = %s", [failed])
        connection.execute("UPDATE outbox SET created_at = now() - interval '2 hours' WHERE id = %s", [oldest])
        outbox.complete(database, [Completion(event, "POSTPONED") for event in claim(database)])
        measured = outbox.measure(database)
        assert measured.oldest_age_seconds == pytest.approx(2 * HOURS, abs=10)
        assert (measured.pending, measured.failed) == (2, 1)


def test_a_server_that_falls_silent_is_given_up(database_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A relay, a monitor or a subscriber ends its run with an error, rather than wait for a server that is gone."""
    monkeypatch.setattr("charging.database.SILENCE_SECONDS", 2.5)
    with Wire(database_url) as wire, deployment.database(wire.url) as database:
        outbox.claim(database, limit=1, lease_seconds=LEASE_SECONDS)
        wire.judge = silent([Sender.SERVER])
        began = time.monotonic()
        with pytest.raises(errors.ConnectionLost):
            outbox.claim(database, limit=1, lease_seconds=LEASE_SECONDS)
        assert 2.5 <= time.monotonic() - began < 10
