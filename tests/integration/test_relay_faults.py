"""Faults that last: clocks that are off, rows that commit late, a database that restarts, a broker that is slow, busy,
or away for hours.

The crash matrix (test_relay_crashes) has each break at each step of a sweep, and test_relay what a broker may answer;
here is what lies beside them.
"""

import itertools
import os
import signal
import socket
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack, closing, suppress
from pathlib import Path

import psycopg
import pytest
from psycopg import sql as composing

from charging import errors, migrations, relay
from charging.database import Database
from charging.outbox import LEASE_SECONDS
from charging.relay import EVENTS_PER_SWEEP
from charging.topic import ENTRIES_PER_CALL, Topic
from local import lock, postgres
from tests.conftest import Connect
from tests.support import deployment, outbox, sns
from tests.support.database import SCHEMA
from tests.support.ledger import until
from tests.support.outbox import Clock, Connection
from tests.support.sns import Answer, Broker, Entry, Refusal

HOUR = 3600
MAX_ATTEMPTS = 5
# Longer than any delay before a next attempt.
DELAY_SECONDS = 60
# Until the function is ended: more than a run can need, and none.
PLENTY, NOTHING = 600.0, 0.0


@pytest.fixture
def broker(monkeypatch: pytest.MonkeyPatch) -> Iterator[Broker]:
    with sns.serve(monkeypatch) as running:
        running.faults.delivers = False
        yield running


@pytest.fixture
def topic(broker: Broker) -> Topic:
    return Topic(broker.topic_arn, max_attempts=MAX_ATTEMPTS)


def drain(database: Database, topic: Topic, remaining_seconds: Callable[[], float] = lambda: PLENTY) -> relay.Sweep:
    """A run that takes what is due."""
    return relay.run(database, topic, budget_seconds=0, poll_seconds=0.25, remaining_seconds=remaining_seconds)


def assert_sent_once(connection: Connection, broker: Broker) -> None:
    """Each event is published, was never held to be at fault, and has been accepted once."""
    rows = outbox.rows(connection)
    assert {(row.is_published, row.is_failed, row.refusals) for row in rows} == {(True, False, 0)}
    assert sorted(broker.accepted) == [row.id for row in rows]


# ---- clocks ---------------------------------------------------------------------------------------------------------


def a_function_off_by(hours: int, monkeypatch: pytest.MonkeyPatch, _: Connection) -> None:
    now, now_ns = time.time, time.time_ns
    monkeypatch.setattr(time, "time", lambda: now() + hours * HOUR)
    monkeypatch.setattr(time, "time_ns", lambda: now_ns() + hours * HOUR * 10**9)


def a_function_in(zone: str, monkeypatch: pytest.MonkeyPatch, _: Connection) -> None:
    monkeypatch.setenv("TZ", zone)
    monkeypatch.setenv("PGTZ", zone)


def a_server_in(zone: str, _: pytest.MonkeyPatch, connection: Connection) -> None:
    name = composing.Identifier(connection.info.dbname)
    connection.execute(composing.SQL("ALTER DATABASE {} SET timezone = {}").format(name, composing.Literal(zone)))


@pytest.fixture(
    params=[
        pytest.param((a_function_off_by, -2), id="function-two-hours-behind"),
        pytest.param((a_function_off_by, 2), id="function-two-hours-ahead"),
        pytest.param((a_function_in, "Pacific/Kiritimati"), id="function-in-UTC+14"),
        pytest.param((a_function_in, "Pacific/Pago_Pago"), id="function-in-UTC-11"),
        pytest.param((a_server_in, "Pacific/Kiritimati"), id="server-in-UTC+14"),
        pytest.param((a_server_in, "Pacific/Pago_Pago"), id="server-in-UTC-11"),
    ]
)
def odd_clock(request: pytest.FixtureRequest, connect: Connect, monkeypatch: pytest.MonkeyPatch) -> None:
    """A clock, or a time zone, that is not the usual."""
    set_up, value = request.param
    set_up(value, monkeypatch, connect())


@pytest.mark.usefixtures("odd_clock")
def test_no_clock_but_the_databases_says_what_is_due(
    database_url: str, connect: Connect, topic: Topic, broker: Broker
) -> None:
    """What was due an hour ago is sent, and what is due in an hour is not. A lease and a delay are as long as ever."""
    connection, observer = connect(), connect()
    leases: list[float] = []

    def look(entries: list[Entry]) -> None:
        leases.extend(row.due_in_seconds for row in outbox.rows(observer, [entry.id for entry in entries]))

    broker.faults.intercept = look
    overdue, due, refused, not_due = outbox.write(connection, count=4)
    connection.execute("UPDATE outbox SET next_attempt_at = now() - interval '1 hour' WHERE id = %s", [overdue])
    connection.execute("UPDATE outbox SET next_attempt_at = now() + interval '1 hour' WHERE id = %s", [not_due])
    broker.faults.refused = {refused: Refusal("InternalError", sender_fault=False)}
    with deployment.database(database_url) as database:
        assert drain(database, topic).results == Counter(PUBLISHED=2, POSTPONED=1)
    assert leases == pytest.approx([LEASE_SECONDS] * 3, abs=5)
    assert set(broker.accepted) == {overdue, due}
    assert outbox.row(connection, refused).due_in_seconds <= 1
    assert outbox.row(connection, not_due).due_in_seconds == pytest.approx(HOUR, abs=20)


# ---- the database ---------------------------------------------------------------------------------------------------


def test_what_commits_late_leaves_with_the_next_poll(
    database_url: str, connect: Connect, topic: Topic, broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A row's transaction stays open while younger rows are published: once it commits, the same run sends it."""
    connection, late = connect(), connect()
    clock = Clock(monkeypatch, connect())
    with ExitStack() as transaction, deployment.database(database_url) as database:
        transaction.enter_context(late.transaction())
        [late_id] = outbox.write(late)
        outbox.write(connection, count=3)

        def pause(seconds: float) -> None:
            clock.pause(seconds)
            if len(clock.pauses) == 2:
                assert late_id not in broker.accepted
                transaction.close()

        run = relay.run(
            database, topic, budget_seconds=2, poll_seconds=0.25, remaining_seconds=lambda: PLENTY, pause=pause
        )
    assert run.results == Counter(PUBLISHED=4)
    assert_sent_once(connection, broker)


class Server:
    """A server of this test's own with the schema in it, which can be stopped, and started where it was."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._running = ExitStack()
        self._server = self._running.enter_context(postgres.serve(folder))
        self.url = self._server.url
        with self.connect() as connection:
            migrations.migrate(connection, SCHEMA)

    def close(self) -> None:
        """Stops it for good."""
        self._running.close()

    def connect(self) -> Connection:
        """A new connection, which a `with` block closes."""
        return psycopg.connect(self.url, autocommit=True)

    def stop(self, how: signal.Signals) -> None:
        """SIGINT shuts it down in good order; after SIGKILL its data is as a crash leaves it."""
        if how is signal.SIGKILL:
            pid = (self._folder / "data" / "postmaster.pid").read_text().split("\n", 1)[0]
            os.kill(int(pid), signal.SIGKILL)
        self._running.close()
        # What the killed one had started is still there for a moment, and holds the folder.
        until(self._is_free)

    def _is_free(self) -> bool:
        with suppress(lock.InUse), lock.held(self._folder / "lock"):
            return True
        return False

    def start(self) -> None:
        """Takes up the data, on the same port."""
        self._server = self._running.enter_context(postgres.serve(self._folder, port=self._server.port))


@pytest.fixture(scope="module")
def own_server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Server]:
    with closing(Server(tmp_path_factory.mktemp("postgres"))) as started:
        yield started


@pytest.fixture
def server(own_server: Server) -> Server:
    """A server with an empty outbox."""
    with own_server.connect() as connection:
        connection.execute("TRUNCATE outbox")
    return own_server


ways_to_stop = pytest.mark.parametrize("how", [signal.SIGINT, signal.SIGKILL], ids=["in-good-order", "crash"])


@ways_to_stop
def test_a_restart_during_a_send_costs_nothing(
    how: signal.Signals, server: Server, topic: Topic, broker: Broker
) -> None:
    """It comes while SNS has the first call. The run marks that call over a new connection, and goes on to the end."""

    def restart(_: list[Entry]) -> None:
        broker.faults.intercept = lambda _: None
        server.stop(how)
        server.start()

    with server.connect() as connection:
        outbox.write(connection, count=EVENTS_PER_SWEEP)
    broker.faults.intercept = restart
    with deployment.database(server.url) as database:
        assert drain(database, topic) == relay.Sweep(Counter(PUBLISHED=EVENTS_PER_SWEEP))
    with server.connect() as connection:
        assert_sent_once(connection, broker)


@ways_to_stop
def test_a_restart_between_two_polls_costs_nothing(
    how: signal.Signals, server: Server, topic: Topic, broker: Broker
) -> None:
    """The run goes on where it was."""
    polls = 0

    def pause(_: float) -> None:
        nonlocal polls
        polls += 1
        if polls == 1:
            server.stop(how)
            server.start()
            with server.connect() as connection:
                outbox.write(connection, count=20)

    with server.connect() as connection:
        outbox.write(connection, count=20)
    with deployment.database(server.url) as database:
        run = relay.run(
            database,
            topic,
            budget_seconds=HOUR,
            poll_seconds=0.25,
            remaining_seconds=lambda: PLENTY if polls < 2 else NOTHING,
            pause=pause,
        )
    assert run == relay.Sweep(Counter(PUBLISHED=40))
    with server.connect() as connection:
        assert_sent_once(connection, broker)


@ways_to_stop
def test_a_database_that_is_away_for_longer_costs_a_second_sending_and_no_event(
    how: signal.Signals, server: Server, topic: Topic, broker: Broker
) -> None:
    """It stops while SNS has the first call, whose events cannot be marked: the run ends. A later one sends the rest,
    and that call's events again when their lease has ended."""

    def stop(_: list[Entry]) -> None:
        broker.faults.intercept = lambda _: None
        server.stop(how)

    with server.connect() as connection:
        ids = outbox.write(connection, count=EVENTS_PER_SWEEP)
    broker.faults.intercept = stop
    with deployment.database(server.url) as database:
        run = drain(database, topic)
        assert (run.results, run.unmarked) == (Counter(PUBLISHED=ENTRIES_PER_CALL), ENTRIES_PER_CALL)
        assert isinstance(run.error, errors.TemporarilyUnavailable)
        in_flight = set(broker.accepted)

        server.start()
        with server.connect() as connection:
            assert drain(database, topic).results == Counter(PUBLISHED=EVENTS_PER_SWEEP - ENTRIES_PER_CALL)
            outbox.let_pass(connection, seconds=LEASE_SECONDS)
            assert drain(database, topic).results == Counter(PUBLISHED=ENTRIES_PER_CALL)
            assert all(row.is_published for row in outbox.rows(connection))
    assert Counter(broker.accepted) == Counter(ids) + Counter(in_flight)


# ---- the broker -----------------------------------------------------------------------------------------------------


def test_a_topic_that_throttles_gets_every_event_once(
    database_url: str, connect: Connect, topic: Topic, broker: Broker
) -> None:
    """It takes one call in three. The others' events are sent again until it has them all, and none is parked."""
    connection = connect()
    outbox.fill(connection, count=2 * EVENTS_PER_SWEEP)
    calls = itertools.count()
    broker.faults.intercept = lambda _: None if next(calls) % 3 == 0 else Answer.error(400, "Throttled", "slow down")
    with deployment.database(database_url) as database:
        while not all(row.is_published for row in outbox.rows(connection)):
            assert drain(database, topic).results.keys() <= {"PUBLISHED", "POSTPONED"}
            outbox.let_pass(connection, seconds=DELAY_SECONDS)
    assert_sent_once(connection, broker)


def test_a_call_that_times_out_costs_the_others_nothing(
    database_url: str, connect: Connect, broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """One of three calls is accepted and not answered. Its events alone are sent again."""
    monkeypatch.setattr("charging.topic.READ_SECONDS", 2.0)
    topic = Topic(broker.topic_arn, max_attempts=MAX_ATTEMPTS)
    connection = connect()
    ids = outbox.write(connection, count=3 * ENTRIES_PER_CALL)
    hold = sns.Hold()
    slow: set[object] = set()

    def hold_one(entries: list[Entry]) -> Answer | None:
        if ids[0] not in [entry.id for entry in entries]:
            return None
        slow.update(entry.id for entry in entries)
        return hold(entries)

    broker.faults.intercept_answer = hold_one
    with deployment.database(database_url) as database:
        results = relay.run_once(database, topic).results
        assert results == Counter(PUBLISHED=2 * ENTRIES_PER_CALL, POSTPONED=ENTRIES_PER_CALL)
        hold.let_go.set()
        outbox.let_pass(connection, seconds=DELAY_SECONDS)
        assert drain(database, topic).results == Counter(PUBLISHED=ENTRIES_PER_CALL)
    times = Counter(broker.accepted)
    assert times.keys() == set(ids)
    assert {event_id for event_id, count in times.items() if count == 2} == slow
    assert times.total() == len(ids) + len(slow)


def test_a_broker_that_takes_no_connection_costs_no_event_its_life(
    database_url: str, connect: Connect, broker: Broker, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Nothing refuses the connection, and nothing accepts it: it is given up in time, and the events wait."""
    monkeypatch.setattr("charging.topic.CONNECT_SECONDS", 0.2)
    connection = connect()
    outbox.write(connection, count=2 * ENTRIES_PER_CALL)
    with socket.create_server(("127.0.0.1", 0), backlog=0) as full, socket.create_connection(full.getsockname()):
        monkeypatch.setenv("AWS_ENDPOINT_URL_SNS", f"http://127.0.0.1:{full.getsockname()[1]}")
        unreachable = Topic(broker.topic_arn, max_attempts=MAX_ATTEMPTS)
        with deployment.database(database_url) as database:
            assert relay.run_once(database, unreachable).results == Counter(POSTPONED=2 * ENTRIES_PER_CALL)
    rows = outbox.rows(connection)
    assert {(row.last_error, row.refusals, row.is_failed) for row in rows} == {("ConnectTimeoutError", 0, False)}


def test_an_outage_of_two_hours_costs_time_and_nothing_else(
    database_url: str, connect: Connect, topic: Topic, broker: Broker
) -> None:
    """A run a minute for two hours, of which SNS refuses connections in the first and calls in the second, while
    charges go on. Then the next run sends all of it, once, beginning with one call. No event is parked."""
    connection = connect()
    outbox.fill(connection, count=30)
    broker.stop()
    with deployment.database(database_url) as database:
        for minute in range(120):
            if minute == 60:
                broker.start()
                broker.faults.intercept = lambda _: Answer.error(503, "ServiceUnavailable")
            outbox.fill(connection, count=1)
            assert drain(database, topic).results.keys() == {"POSTPONED"}
            outbox.let_pass(connection, seconds=60)
        rows = outbox.rows(connection)
        assert {(row.is_published, row.is_failed, row.refusals) for row in rows} == {(False, False, 0)}
        assert max(row.attempts for row in rows) > MAX_ATTEMPTS

        broker.faults.intercept = lambda _: None
        broker.calls.clear()
        calls: list[int] = []

        def remaining() -> float:
            calls.append(len(broker.calls))  # before each sweep
            return PLENTY

        assert drain(database, topic, remaining).results == Counter(PUBLISHED=len(rows))
    assert calls == [0, 1, 3, 7, 15]
    assert_sent_once(connection, broker)


def test_more_relays_do_not_retry_an_event_more_often(
    database_url: str, connect: Connect, topic: Topic, broker: Broker
) -> None:
    """Four relays meet whenever a refused event comes due: one offers it, and then none until it is due again."""
    connection = connect()
    [refused] = outbox.write(connection)
    # From here on the delay is half a minute or more.
    connection.execute("UPDATE outbox SET attempts = 6")
    broker.faults.refused = {refused: Refusal("KMSDisabled", sender_fault=True)}
    together = threading.Barrier(4)

    def meet(database: Database) -> int:
        together.wait(20)
        return relay.run_once(database, topic).claimed

    with ExitStack() as opened, ThreadPoolExecutor(4) as relays:
        databases = [opened.enter_context(deployment.database(database_url)) for _ in range(4)]
        for attempt in range(1, MAX_ATTEMPTS + 1):
            assert sum(relays.map(meet, databases)) == 1
            assert sum(relays.map(meet, databases)) == 0
            assert broker.sent == [refused] * attempt
            outbox.let_pass(connection, seconds=DELAY_SECONDS)
    assert outbox.row(connection, refused).attempts == 6 + MAX_ATTEMPTS
