"""The relay function: the scheduler's event in, messages in the queue, figures in the log."""

from collections import Counter
from collections.abc import Iterator

import psycopg
import pytest

from charging import errors
from charging.outbox import LEASE_SECONDS
from charging.relay import SWEEP_SECONDS
from tests.conftest import Connect
from tests.support import deployment, outbox, sns
from tests.support.deployment import Invoke
from tests.support.invocation import RELAY, database_variables, sample
from tests.support.process import Worker
from tests.support.sns import Broker, Entry, Refusal

SECONDS = 30.0


@pytest.fixture
def broker(monkeypatch: pytest.MonkeyPatch) -> Iterator[Broker]:
    with sns.serve(monkeypatch) as running:
        yield running


@pytest.fixture
def relay(
    database_url: str, broker: Broker, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Iterator[Invoke]:
    capsys.readouterr()
    with deployment.instance("relay", database_url, monkeypatch, RELAY | broker.variables) as invoke:
        yield invoke


def test_a_run_takes_events_to_the_queue(relay: Invoke, connect: Connect, broker: Broker) -> None:
    """Started by the scheduler, it returns what the run came to."""
    ids = outbox.write(connect(), count=12)
    came_to = {"claimed": 12, "results": {"PUBLISHED": 12}, "lease_lost": 0, "unmarked": 0}
    assert relay(sample("relay-schedule")) == came_to
    assert Counter(message.attributes["outboxId"] for message in broker.receive()) == Counter(map(str, ids))


def test_a_run_counts_what_it_published_and_what_it_could_not(
    relay: Invoke, connect: Connect, broker: Broker, capsys: pytest.CaptureFixture[str]
) -> None:
    """By destination, which is the topic's name: nothing unbounded. And the run itself, as a sign of life."""
    first, second, *_ = outbox.write(connect(), count=10)
    broker.faults.refused = {
        first: Refusal("InternalError", sender_fault=False),
        second: Refusal("InvalidParameter", sender_fault=True),
    }
    relay(sample("relay-schedule"))
    assert deployment.metrics(capsys.readouterr().out) == [
        ({"EventsPublished": 8, "PublishErrors": 2, "lease_lost": 0}, {"destination": "charge-events"}),
        ({"RelayRuns": 1}, {}),
    ]


def test_a_run_without_work_counts_nothing_and_says_so(relay: Invoke, capsys: pytest.CaptureFixture[str]) -> None:
    """Zeros show that the relay is alive."""
    relay(sample("relay-schedule"))
    output = capsys.readouterr().out
    assert deployment.metrics(output) == [
        ({"EventsPublished": 0, "PublishErrors": 0, "lease_lost": 0}, {"destination": "charge-events"}),
        ({"RelayRuns": 1}, {}),
    ]
    [line] = deployment.logs(output)
    assert (line["level"], line["message"], line["claimed"]) == ("INFO", "relay_run", 0)


def test_a_run_without_a_database_fails_once_and_at_once(
    database_url: str, broker: Broker, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One error is logged, with no password in it, and the run is over before its budget is. It counts as none."""
    nowhere = psycopg.conninfo.make_conninfo(database_url, port=1)
    budget = RELAY | broker.variables | {"RELAY_BUDGET_SECONDS": "60"}
    with (
        deployment.instance("relay", nowhere, monkeypatch, budget) as invoke,
        pytest.raises(errors.TemporarilyUnavailable),
    ):
        invoke(sample("relay-schedule"))
    output = capsys.readouterr().out
    [line] = deployment.logs(output)
    assert (line["level"], line["message"]) == ("ERROR", "relay_run_failed")
    assert "RelayRuns" not in output
    assert database_variables(database_url)["DATABASE_PASSWORD"] not in output


def test_a_run_that_is_cut_short_says_what_it_had_done(
    relay: Invoke, connect: Connect, broker: Broker, capsys: pytest.CaptureFixture[str]
) -> None:
    """Somebody locks the outbox while SNS has the events: how many are published and not marked stands in the error."""
    holder = connect()
    outbox.write(connect(), count=3)

    def lock(_: list[Entry]) -> None:
        holder.execute("BEGIN")
        holder.execute("LOCK TABLE outbox")

    broker.faults.intercept = lock
    with pytest.raises(errors.TemporarilyUnavailable):
        relay(sample("relay-schedule"))
    output = capsys.readouterr().out
    [line] = deployment.logs(output)
    assert (line["level"], line["message"]) == ("ERROR", "relay_run_failed")
    assert (line["claimed"], line["results"], line["unmarked"]) == (3, {"PUBLISHED": 3}, 3)
    assert [values for values, _ in deployment.metrics(output)] == [
        {"EventsPublished": 3, "PublishErrors": 0, "lease_lost": 0}
    ]


def test_an_invocation_that_is_about_to_end_claims_nothing(relay: Invoke, connect: Connect) -> None:
    """The time that Lambda says is left decides, before the budget does."""
    connection = connect()
    [event_id] = outbox.write(connection)
    assert relay(sample("relay-schedule"), seconds=SWEEP_SECONDS - 1)["claimed"] == 0
    assert outbox.row(connection, event_id).attempts == 0


def test_an_instance_survives_a_run_that_failed(relay: Invoke, connect: Connect) -> None:
    """The next minute's run on the same warm instance finds the database that is back, and does its work."""
    connection = connect()
    relay(sample("relay-schedule"))
    connection.execute(
        "SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity"
        " WHERE datname = current_database() AND application_name = 'charging'"
    )
    outbox.write(connection)
    assert relay(sample("relay-schedule"))["results"] == {"PUBLISHED": 1}


@pytest.mark.parametrize("holding", ["before it is accepted", "after it was accepted"])
def test_a_relay_that_is_killed_loses_nothing(
    holding: str, relay: Invoke, connect: Connect, database_url: str, broker: Broker
) -> None:
    """SIGKILL while the broker holds a call: when the lease has ended, the next run sends what was not marked.

    Killed before the broker accepted it, the event comes once; killed between the send and the mark, twice.
    """
    connection = connect()
    [event_id] = outbox.write(connection)
    hold = sns.Hold()
    if holding == "after it was accepted":
        broker.faults.intercept_answer = hold
    else:
        hold.answer = sns.HANG_UP
        broker.faults.intercept = hold

    with Worker("relay", database_url, RELAY | broker.variables) as doomed:
        doomed.begin()
        assert hold.reached.wait(SECONDS)
        row = outbox.row(connection, event_id)
        assert (row.attempts, row.is_published) == (1, False)
        doomed.kill()
    hold.let_go.set()
    broker.faults = sns.Faults()

    assert relay(sample("relay-schedule"))["claimed"] == 0, "the dead relay's lease has not ended"
    outbox.let_pass(connection, seconds=LEASE_SECONDS)
    assert relay(sample("relay-schedule"))["results"] == {"PUBLISHED": 1}
    expected = 2 if holding == "after it was accepted" else 1
    assert [message.attributes["outboxId"] for message in broker.receive()] == [str(event_id)] * expected
    assert outbox.row(connection, event_id).attempts == 2
