"""The dispatcher between a real database and receivers that are quick, slow, angry or gone."""

import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime
from typing import Any, Self
from uuid import UUID

import psycopg
import pytest
from standardwebhooks.webhooks import Webhook, WebhookVerificationError

from charging import errors, signing, webhooks
from charging.database import Database
from charging.deliveries import MAX_FAILURES, Attempt, ClaimedDelivery
from charging.sender import Sender
from charging.webhooks import LEASE_SECONDS, SHARE, SLOTS, SLOW_SLOTS, SWEEP_SECONDS, Courier, Sweep
from tests.conftest import Connect
from tests.support import deliveries as table
from tests.support import deployment, merchant
from tests.support.merchant import Merchants

MASTER_KEY = b"m" * 32
HOURS = 3600
# What is waited for here comes in milliseconds.
PATIENCE_SECONDS = 30.0


@pytest.fixture
def database(database_url: str) -> Iterator[Database]:
    """A dispatcher's connection."""
    with deployment.database(database_url) as opened:
        yield opened


@pytest.fixture
def merchants() -> Iterator[Merchants]:
    with merchant.serve() as running:
        yield running


@pytest.fixture(scope="module")
def courier() -> Courier:
    return Courier(Sender(deadline_seconds=PATIENCE_SECONDS, allows_loopback=True), [MASTER_KEY])


def plenty() -> float:
    return 600.0


def drain(database: Database, deliver: Callable[[ClaimedDelivery], Attempt]) -> Counter[str]:
    """Delivers what is due, and returns how often each result came."""
    return summed(webhooks.run(database, deliver, budget_seconds=0, poll_seconds=0.01, remaining_seconds=plenty))


def summed(sweeps: Iterator[Sweep]) -> Counter[str]:
    found: Counter[str] = Counter()
    for sweep in sweeps:
        found.update(attempt.result for attempt in sweep.attempts)
        found.update(transition.change for transition in sweep.transitions)
        found.update(lease_lost=sweep.lease_lost, abandoned=sweep.abandoned)
        found.update(errors=0 if sweep.error is None else 1)
    return +found


def transactions(connection: psycopg.Connection[tuple[Any, ...]]) -> int:
    """How many transactions last wrote the deliveries that were tried."""
    row = connection.execute("SELECT count(DISTINCT xmin::text) FROM outbox_deliveries WHERE attempts > 0").fetchone()
    assert row is not None
    count: int = row[0]
    return count


class Running:
    """A run in a thread of its own, which goes on until the block ends."""

    def __init__(self, database: Database, deliver: Callable[[ClaimedDelivery], Attempt]) -> None:
        self._seconds_left = 600.0
        sweeps = webhooks.run(
            database, deliver, budget_seconds=600, poll_seconds=0.05, remaining_seconds=lambda: self._seconds_left
        )
        self._threads = ThreadPoolExecutor(1)
        self._run = self._threads.submit(summed, sweeps)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self._seconds_left = 0.0
        self._threads.shutdown()

    def result(self) -> Counter[str]:
        """What the run came to. It claims nothing more from now on."""
        self._seconds_left = 0.0
        return self._run.result(PATIENCE_SECONDS)


class TestRequest:
    """What a receiver gets."""

    def test_it_is_the_event_signed_as_standard_webhooks_has_it(
        self, connect: Connect, database: Database, merchants: Merchants, courier: Courier
    ) -> None:
        """The reference library accepts it under the endpoint's secret, and under no other one."""
        connection = connect()
        endpoint = table.register(connection, url=merchants.url("/a"))
        [event_id] = table.write(connection, endpoint)
        assert drain(database, courier.deliver) == Counter(SENT=1)
        [request] = merchants.received("/a")
        assert request.headers["content-type"] == "application/json"
        assert request.headers["webhook-id"] == str(event_id)
        event = Webhook(signing.secret(MASTER_KEY, endpoint, 1)).verify(request.body, request.headers)
        assert event["id"] == str(event_id)
        with pytest.raises(WebhookVerificationError):
            Webhook(signing.secret(MASTER_KEY, endpoint, 2)).verify(request.body, request.headers)
        [payload] = connection.execute("SELECT payload FROM outbox_deliveries").fetchone() or ()
        assert request.body == payload.encode()

    def test_both_secrets_sign_while_they_overlap(
        self, connect: Connect, database: Database, merchants: Merchants, courier: Courier
    ) -> None:
        """A receiver that has the old one or the new one accepts it; when the overlap is over, only the new one."""
        connection = connect()
        endpoint = table.register(connection, url=merchants.url("/a"))
        connection.execute(
            "UPDATE webhook_endpoints SET secret_version = 2, previous_signs_until = now() + interval '1 day'"
        )
        old, new = (Webhook(signing.secret(MASTER_KEY, endpoint, version)) for version in (1, 2))
        table.write(connection, endpoint)
        drain(database, courier.deliver)
        table.let_pass(connection, seconds=24 * HOURS)
        table.write(connection, endpoint)
        drain(database, courier.deliver)
        first, second = merchants.received("/a")
        for webhook in (old, new):
            webhook.verify(first.body, first.headers)
        new.verify(second.body, second.headers)
        with pytest.raises(WebhookVerificationError):
            old.verify(second.body, second.headers)

    def test_every_attempt_has_the_same_id_and_body_and_a_time_of_its_own(
        self,
        connect: Connect,
        database: Database,
        merchants: Merchants,
        courier: Courier,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        """All eight attempts come, over 45 hours by time travel, each acceptable when it arrives; and no ninth."""
        connection = connect()
        endpoint = table.register(connection, url=merchants.url("/a"))
        [event_id] = table.write(connection, endpoint)
        merchants.behave("/a", 500)
        real, travelled = time.time, 0.0
        monkeypatch.setattr(time, "time", lambda: real() + travelled)
        results: Counter[str] = Counter()
        while (row := table.row(connection, endpoint)).status != "FAILED":
            seconds = max(row.due_in_seconds, table.state(connection, endpoint).resumes_in_seconds or 0) + 0.01
            travelled += seconds
            table.let_pass(connection, seconds=seconds)
            results += drain(database, courier.deliver)
        assert results == Counter(REFUSED=MAX_FAILURES - 1, FAILED=1, opened=1, half_opened=3, reopened=3)
        assert 40 * HOURS < travelled < 51 * HOURS
        table.let_pass(connection, seconds=1000 * HOURS)
        assert drain(database, courier.deliver) == Counter()
        requests = merchants.received("/a")
        assert len(requests) == MAX_FAILURES
        assert {(request.headers["webhook-id"], request.body) for request in requests} == {
            (str(event_id), requests[0].body)
        }
        times = [int(request.headers["webhook-timestamp"]) for request in requests]
        assert times == sorted(set(times))
        assert times[-1] - times[0] == pytest.approx(travelled, abs=30)

    def test_a_redirect_is_not_followed(
        self, connect: Connect, database: Database, merchants: Merchants, courier: Courier
    ) -> None:
        """It is a failure like another, and nothing comes to where it points."""
        connection = connect()
        table.write(connection, table.register(connection, url=merchants.url("/a")))
        merchants.behave("/a", 307, headers={"Location": merchants.url("/b")})
        assert drain(database, courier.deliver) == Counter(REFUSED=1)
        assert merchants.received("/b") == []

    def test_what_the_receiver_said_is_kept_for_its_owner(
        self, connect: Connect, database: Database, merchants: Merchants, courier: Courier
    ) -> None:
        """Status, duration, and how the answer begins; or why there was none."""
        connection = connect()
        table.write(connection, table.register(connection, url=merchants.url("/a")))
        merchants.behave("/a", 422, body=b"no such order")
        drain(database, courier.deliver)
        connection.execute("UPDATE webhook_endpoints SET url = 'http://127.0.0.1:1/'")
        connection.execute("UPDATE webhook_endpoints SET url = 'https://receiver.invalid/'")
        table.let_pass(connection, seconds=60)
        drain(database, courier.deliver)
        kept = connection.execute("SELECT status, excerpt, error FROM delivery_attempts ORDER BY attempt").fetchall()
        assert kept[0] == (422, "no such order", None)
        status, excerpt, error = kept[1]
        assert (status, excerpt) == (None, None)
        assert error.startswith("name_not_resolved: ")


class TestFairness:
    """No receiver holds up another."""

    def test_a_slow_receiver_with_a_thousand_deliveries_delays_nobody(
        self, connect: Connect, database: Database, merchants: Merchants, courier: Courier
    ) -> None:
        """It takes thirty seconds for each; the healthy one beside it has its ten within fifteen, in fact at once."""
        connection = connect()
        slow, healthy = (table.register(connection, url=merchants.url(path)) for path in ("/slow", "/healthy"))
        merchants.behave("/slow", held_until=threading.Event())
        table.write(connection, slow, count=1000)
        table.write(connection, healthy, count=10)
        begun = time.monotonic()
        with Running(database, courier.deliver) as run:
            merchants.wait_for("/healthy", 10)
            taken = time.monotonic() - begun
            merchants.wait_for("/slow", SHARE - 1)
            held = merchants.behaviours["/slow"].held_until
            assert held is not None
            # What comes later does not wait for the slow one either: a slot is filled when it is free.
            begun = time.monotonic()
            table.write(connection, healthy)
            merchants.wait_for("/healthy", 11)
            taken_later = time.monotonic() - begun
            assert merchants.most_under_way["/slow"] <= SHARE
            held.set()
            run.result()
        assert taken < 15
        assert taken_later < 5
        print(f"\nthe healthy one had its ten after {taken:.2f} s, and one that came later after {taken_later:.2f} s")

    def test_many_slow_receivers_leave_slots_for_the_next(
        self, connect: Connect, database: Database, merchants: Merchants, courier: Courier
    ) -> None:
        """Thirty of them, each with deliveries enough to fill every slot; the healthy one has all of its own done."""
        connection = connect()
        held = threading.Event()
        for number in range(30):
            endpoint = table.register(connection, url=merchants.url(f"/slow/{number}"))
            merchants.behave(f"/slow/{number}", held_until=held)
            table.write(connection, endpoint, count=SLOTS)
        with Running(database, courier.deliver) as run:
            for number in range(30):
                merchants.wait_for(f"/slow/{number}")
            table.write(connection, table.register(connection, url=merchants.url("/healthy")), count=10)
            begun = time.monotonic()
            merchants.wait_for("/healthy", 10)
            assert time.monotonic() - begun < 15
            held.set()
            run.result()

    def test_receivers_that_are_known_to_be_slow_leave_the_quick_ones_their_slots(
        self, connect: Connect, database: Database, merchants: Merchants, courier: Courier
    ) -> None:
        """More of them than there are slots of all kinds; the healthy one has its ten at once."""
        connection = connect()
        held = threading.Event()
        merchants.behave("/slow", held_until=held)
        for _ in range(SLOTS + SLOW_SLOTS + 10):
            tried, _ = table.write(connection, table.register(connection, url=merchants.url("/slow")), count=2)
            table.settle(connection, tried, duration_ms=14_000)
        with Running(database, courier.deliver) as run:
            merchants.wait_for("/slow", SLOW_SLOTS)
            begun = time.monotonic()
            table.write(connection, table.register(connection, url=merchants.url("/healthy")), count=10)
            merchants.wait_for("/healthy", 10)
            taken = time.monotonic() - begun
            assert merchants.most_under_way["/slow"] == SLOW_SLOTS
            held.set()
            run.result()
        assert taken < 5
        print(f"\nbeside {SLOTS + SLOW_SLOTS + 10} slow receivers the healthy one had its ten after {taken:.2f} s")

    def test_receivers_that_turn_out_to_be_slow_give_the_quick_ones_their_slots(
        self, connect: Connect, database: Database, merchants: Merchants, courier: Courier
    ) -> None:
        """More of them than there are quick slots, each with more deliveries than one: none of them gets a second quick
        slot, and the healthy one has its ten in seconds, which is long before any of them answers."""
        connection = connect()
        held = threading.Event()
        merchants.behave("/slow", held_until=held)
        for _ in range(SLOTS + 10):
            table.write(connection, table.register(connection, url=merchants.url("/slow")), count=SHARE)
        with Running(database, courier.deliver) as run:
            merchants.wait_for("/slow", SLOTS)
            begun = time.monotonic()
            table.write(connection, table.register(connection, url=merchants.url("/healthy")), count=10)
            merchants.wait_for("/healthy", 10)
            taken = time.monotonic() - begun
            held.set()
            run.result()
        assert taken < 15
        print(f"\nbeside {SLOTS + 10} receivers that nobody knew to be slow it had them after {taken:.2f} s")

    def test_what_waits_for_a_dead_receiver_delays_nobody(
        self, connect: Connect, database: Database, merchants: Merchants, courier: Courier
    ) -> None:
        """After its first failures it is asked now and then, and the slots are the others'."""
        connection = connect()
        dead, healthy = (table.register(connection, url=merchants.url(path)) for path in ("/dead", "/healthy"))
        merchants.behave("/dead", 500)
        table.write(connection, dead, count=1000)
        table.write(connection, healthy, count=200)
        results = drain(database, courier.deliver)
        assert results["SENT"] == 200
        assert results["opened"] == 1
        # The fifth failure opens the breaker, and whatever was claimed before it was written down is still sent.
        assert len(merchants.received("/dead")) <= 4 + SHARE
        assert table.state(connection, dead).is_open


class TestRun:
    """Until when it goes on, and what ends it."""

    def test_a_drain_takes_all_that_is_due(
        self, connect: Connect, database: Database, merchants: Merchants, courier: Courier
    ) -> None:
        """Also more than fit into the slots, of more endpoints than one."""
        connection = connect()
        for number in range(3):
            endpoint = table.register(connection, url=merchants.url(f"/{number}"))
            table.write(connection, endpoint, count=SLOTS)
        assert drain(database, courier.deliver) == Counter(SENT=3 * SLOTS)
        assert Counter(request.headers["webhook-id"] for request in merchants.requests).most_common(1)[0][1] == 1

    def test_runs_that_overlap_share_the_work(
        self, connect: Connect, database: Database, database_url: str, merchants: Merchants, courier: Courier
    ) -> None:
        """The scheduler starts two at once: each delivery is sent once."""
        connection = connect()
        for number in range(5):
            table.write(connection, table.register(connection, url=merchants.url(f"/{number}")), count=60)
        start = threading.Barrier(2)

        def begin(by: Database) -> Counter[str]:
            start.wait(10)
            return drain(by, courier.deliver)

        with deployment.database(database_url) as other, ThreadPoolExecutor(2) as dispatchers:
            one, two = dispatchers.map(begin, [database, other])
        assert one + two == Counter(SENT=300)
        assert len({request.headers["webhook-id"] for request in merchants.requests}) == len(merchants.requests) == 300

    def test_a_run_claims_nothing_when_its_function_is_about_to_end(
        self, connect: Connect, database: Database, courier: Courier
    ) -> None:
        """What could not end in time is not begun."""
        connection = connect()
        endpoint = table.register(connection)
        table.write(connection, endpoint)
        sweeps = webhooks.run(
            database,
            courier.deliver,
            budget_seconds=60,
            poll_seconds=0.01,
            remaining_seconds=lambda: SWEEP_SECONDS - 1,
        )
        assert summed(sweeps) == Counter()
        assert table.row(connection, endpoint).attempts == 0

    def test_what_is_under_way_at_the_end_is_still_written_down(
        self, connect: Connect, database: Database, merchants: Merchants, courier: Courier
    ) -> None:
        """The run ends when its last attempt does."""
        connection = connect()
        endpoint = table.register(connection, url=merchants.url("/a"))
        held = threading.Event()
        merchants.behave("/a", held_until=held)
        table.write(connection, endpoint, count=3)
        with Running(database, courier.deliver) as run, ThreadPoolExecutor(1) as waiting:
            merchants.wait_for("/a", 3)
            result = waiting.submit(run.result)
            held.set()
            assert result.result() == Counter(SENT=3)
        assert {row.status for row in table.rows(connection)} == {"SENT"}

    def test_an_endpoint_that_is_deleted_while_deliveries_are_queued_holds_nobody_up(
        self, connect: Connect, database: Database, merchants: Merchants, courier: Courier
    ) -> None:
        """Its deliveries fail with their reason, and the others are sent in the same run."""
        connection = connect()
        gone = table.register(connection, url=merchants.url("/gone"))
        table.write(connection, gone, count=20)
        connection.execute("DELETE FROM webhook_endpoints")
        table.write(connection, table.register(connection, url=merchants.url("/here")), count=3)
        assert drain(database, courier.deliver) == Counter(SENT=3, abandoned=20)
        assert {row.status for row in table.rows(connection, gone)} == {"FAILED"}
        assert merchants.received("/gone") == []

    def test_a_pause_holds_the_endpoint_within_the_same_run(
        self, connect: Connect, database: Database, merchants: Merchants, courier: Courier
    ) -> None:
        """After a 429 nothing more is begun there, and all of it goes when the pause is over."""
        connection = connect()
        endpoint = table.register(connection, url=merchants.url("/a"))
        table.write(connection, endpoint, count=100)
        merchants.behave("/a", 429, headers={"Retry-After": "30"})
        results = drain(database, courier.deliver)
        assert results["POSTPONED"] <= SHARE
        assert results["paused"] >= 1
        assert {row.failures for row in table.rows(connection)} == {0}
        merchants.behave("/a", 200)
        table.let_pass(connection, seconds=30)
        results = drain(database, courier.deliver)
        assert results["SENT"] == 100

    def test_a_fault_of_ours_in_one_delivery_does_not_take_the_others_with_it(
        self, connect: Connect, database: Database, merchants: Merchants, courier: Courier
    ) -> None:
        """It is a failed attempt, with a reason that says whose fault it is."""
        connection = connect()
        endpoint = table.register(connection, url=merchants.url("/a"))
        poison, *_ = table.write(connection, endpoint, count=10)

        def deliver(delivery: ClaimedDelivery) -> Attempt:
            if delivery.event_id == poison:
                raise RuntimeError
            return courier.deliver(delivery)

        assert drain(database, deliver) == Counter(SENT=9, REFUSED=1)
        [row] = [row for row in table.rows(connection) if row.status != "SENT"]
        assert (row.event_id, row.last_error) == (poison, "internal_error: RuntimeError")

    @pytest.mark.parametrize("fault", ["its excerpt is no text", "its place is taken"])
    def test_what_cannot_be_written_down_does_not_take_the_others_with_it(
        self, fault: str, connect: Connect, database: Database
    ) -> None:
        """The database refuses one of ten attempts that end together: nine are written down, and the one is told of."""
        connection = connect()
        endpoints = [table.register(connection) for _ in range(10)]
        poison, *_ = [table.write(connection, endpoint)[0] for endpoint in endpoints]
        excerpt = "\0" if fault == "its excerpt is no text" else None
        if fault == "its place is taken":
            connection.execute(
                "INSERT INTO delivery_attempts (endpoint_id, event_id, attempt, duration_ms) VALUES (%s, %s, 1, 1)",
                [endpoints[0], poison],
            )
        together = threading.Barrier(10)

        def deliver(delivery: ClaimedDelivery) -> Attempt:
            together.wait(PATIENCE_SECONDS)
            return Attempt(delivery, 1, status=200, excerpt=excerpt if delivery.event_id == poison else None)

        results = drain(database, deliver)
        assert (results["SENT"], results["errors"]) == (10, 1)
        assert [row.event_id for row in table.rows(connection) if row.status != "SENT"] == [poison]

    def test_attempts_that_end_soon_after_one_another_are_written_down_together(
        self,
        connect: Connect,
        database: Database,
        merchants: Merchants,
        courier: Courier,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        """Receivers of which each takes longer than the one before it: their ends are one transaction."""
        monkeypatch.setattr(webhooks, "GATHER_SECONDS", PATIENCE_SECONDS)
        connection = connect()
        for number in range(5):
            merchants.behave(f"/{number}", seconds=number / 10)
            table.write(connection, table.register(connection, url=merchants.url(f"/{number}")))
        assert drain(database, courier.deliver) == Counter(SENT=5)
        assert transactions(connection) == 1

    def test_an_attempt_that_is_under_way_alone_waits_for_no_other(
        self,
        connect: Connect,
        database: Database,
        merchants: Merchants,
        courier: Courier,
        monkeypatch: pytest.MonkeyPatch,
    ) -> None:
        """It is written down when it ends, however long others would be waited for."""
        monkeypatch.setattr(webhooks, "GATHER_SECONDS", PATIENCE_SECONDS)
        connection = connect()
        table.write(connection, table.register(connection, url=merchants.url("/a")))
        begun = time.monotonic()
        assert drain(database, courier.deliver) == Counter(SENT=1)
        assert time.monotonic() - begun < PATIENCE_SECONDS / 3

    def test_a_lone_endpoint_has_its_share_after_two_claims(
        self, connect: Connect, database: Database, merchants: Merchants, courier: Courier
    ) -> None:
        """The first claim asks who waits at all, and the second knows that the slots are for one."""
        connection = connect()
        held = threading.Event()
        merchants.behave("/a", held_until=held)
        table.write(connection, table.register(connection, url=merchants.url("/a")), count=SLOTS)
        with Running(database, courier.deliver) as run:
            merchants.wait_for("/a", SHARE - 1)
            claims = transactions(connection)
            held.set()
            run.result()
        assert claims == 2

    def test_it_ends_at_once_where_there_is_no_database(self, database_url: str, courier: Courier) -> None:
        """No loop of errors: the first one ends the run, whose successor comes with the next minute."""
        begun = time.monotonic()
        with (
            deployment.database(psycopg.conninfo.make_conninfo(database_url, port=1)) as nowhere,
            pytest.raises(errors.TemporarilyUnavailable),
        ):
            drain(nowhere, courier.deliver)
        assert time.monotonic() - begun < 10

    def test_it_goes_on_after_the_database_has_cut_its_connection(
        self, connect: Connect, database: Database, merchants: Merchants, courier: Courier
    ) -> None:
        """While attempts are under way: their results are written down over the next connection."""
        connection = connect()
        endpoint = table.register(connection, url=merchants.url("/a"))
        held = threading.Event()
        merchants.behave("/a", held_until=held)
        table.write(connection, endpoint, count=3)
        with Running(database, courier.deliver) as run:
            merchants.wait_for("/a", 3)
            connection.execute(
                "SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity"
                " WHERE datname = current_database() AND application_name = 'charging'"
            )
            held.set()
            merchants.behave("/a")
            table.write(connection, endpoint)
            merchants.wait_for("/a", 4)
            results = run.result()
        assert results["SENT"] == 4
        assert {row.status for row in table.rows(connection)} == {"SENT"}

    def test_a_lease_outlives_the_worst_that_can_happen_to_its_delivery(self) -> None:
        """One that ended early would send its delivery twice."""
        assert LEASE_SECONDS > SWEEP_SECONDS


def test_the_figures_of_an_attempt_are_its_own(
    connect: Connect, database: Database, merchants: Merchants, courier: Courier
) -> None:
    """An attempt that takes a while says so, and says when it ended."""
    connection = connect()
    table.write(connection, table.register(connection, url=merchants.url("/a")))
    merchants.behave("/a", seconds=0.3)
    drain(database, courier.deliver)
    found = connection.execute("SELECT duration_ms, ended_at FROM delivery_attempts").fetchone()
    assert found is not None
    assert 300 <= found[0] < 5000
    assert abs((datetime.now(UTC) - found[1]).total_seconds()) < 10


def test_ids_round_the_endpoints(connect: Connect, database: Database, merchants: Merchants, courier: Courier) -> None:
    """A hundred endpoints with three deliveries each, more than there are slots: each has its three, once."""
    connection = connect()
    expected: Counter[UUID] = Counter()
    for _ in range(100):
        endpoint = table.register(connection, url=merchants.url("/a"))
        expected[endpoint] = len(table.write(connection, endpoint, count=3))
    assert drain(database, courier.deliver) == Counter(SENT=300)
    assert Counter(row.endpoint_id for row in table.rows(connection) if row.attempts == 1) == expected
