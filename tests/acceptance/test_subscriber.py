"""The subscriber function: messages in, totals in the database, and the names of those that have to come back."""

import json
import threading
import time
from collections.abc import Iterator
from datetime import date
from typing import Any
from uuid import UUID, uuid4

import psycopg
import pytest

from charging import relay
from charging.identifiers import time_ordered_uuid
from charging.topic import Topic
from tests.conftest import Connect
from tests.support import deployment, outbox, sns
from tests.support.deployment import Invoke
from tests.support.invocation import sample
from tests.support.sns import Message, subscriber_event

SECONDS = 10.0


@pytest.fixture
def subscriber(
    database_url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Iterator[Invoke]:
    capsys.readouterr()
    with deployment.instance("subscriber", database_url, monkeypatch) as invoke:
        yield invoke


def message(body: str | None = None) -> Message:
    """A delivery of an event of its own, or of whatever is given."""
    event_id = time_ordered_uuid()
    text = outbox.payload(event_id) if body is None else body
    return Message(uuid4(), text, {"eventType": "ChargeCreated", "outboxId": str(event_id)})


def again(delivered: Message) -> Message:
    """The same event, sent to the queue a second time."""
    return delivered._replace(id=uuid4())


def changed(**changes: object) -> str:
    """A charge's event with other attributes."""
    return json.dumps(json.loads(outbox.payload(time_ordered_uuid())) | changes)


def failures(answer: Any) -> set[UUID]:
    return {UUID(failure["itemIdentifier"]) for failure in answer["batchItemFailures"]}


def totals(connection: outbox.Connection) -> list[tuple[Any, ...]]:
    return connection.execute(
        "SELECT principal, currency, day, charges, amount_cents FROM charge_totals ORDER BY principal, currency, day"
    ).fetchall()


def processed(connection: outbox.Connection) -> int:
    row = connection.execute("SELECT count(*) FROM processed_events").fetchone()
    assert row is not None
    return int(row[0])


def test_a_message_is_counted(subscriber: Invoke, connect: Connect) -> None:
    """The sample event adds its amount to its principal's total of the currency and day."""
    assert subscriber(sample("subscriber-sqs")) == {"batchItemFailures": []}
    principal = "arn:aws:iam::111122223333:role/checkout"
    assert totals(connect()) == [(principal, "USD", date(2026, 1, 31), 1, 4900)]


def test_a_second_delivery_changes_nothing(
    subscriber: Invoke, connect: Connect, capsys: pytest.CaptureFixture[str]
) -> None:
    """Under the same message id or a new one, in the same batch or a later one, the event counts once."""
    connection = connect()
    one = message()
    assert subscriber(subscriber_event([one, one, again(one)])) == {"batchItemFailures": []}
    assert subscriber(subscriber_event([again(one), one])) == {"batchItemFailures": []}
    [(_, _, _, charges, amount)] = totals(connection)
    assert (charges, amount) == (1, 4900)
    said = [line["message"] for line in deployment.logs(capsys.readouterr().out)]
    assert said == ["event_applied"] + ["event_repeated"] * 4


@pytest.mark.parametrize("is_first", [True, False])
def test_a_refund_counts_on_its_own_day_before_or_after_its_charge(
    is_first: bool, subscriber: Invoke, connect: Connect
) -> None:
    """The sample's refund of the sample's charge, in either order, in one batch, and both again in another."""
    event = sample("subscriber-refund")
    event["Records"] = event["Records"][:: 1 if is_first else -1]
    for _ in range(2):
        assert subscriber(event) == {"batchItemFailures": []}
    found = connect().execute(
        "SELECT day, charges, amount_cents, refunds, refunded_cents FROM charge_totals ORDER BY day"
    )
    assert found.fetchall() == [(date(2026, 1, 31), 1, 4900, 0, 0), (date(2026, 2, 1), 0, 0, 1, 1200)]


def test_what_the_relay_sends_is_what_the_subscriber_reads(
    subscriber: Invoke, connect: Connect, database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Sent twice by way of topic and queue, since the mark was lost, twelve events are counted once each."""
    connection = connect()
    outbox.write(connection, count=12)
    with sns.serve(monkeypatch) as broker, deployment.database(database_url) as database:
        topic = Topic(broker.topic_arn, max_attempts=5)
        relay.run_once(database, topic)
        connection.execute("UPDATE outbox SET published_at = NULL, next_attempt_at = now()")
        relay.run_once(database, topic)
        messages = broker.receive()
    assert len(messages) == 24
    for start in range(0, 24, 10):
        assert subscriber(subscriber_event(messages[start : start + 10])) == {"batchItemFailures": []}
    assert sum(total[3] for total in totals(connection)) == 12


@pytest.mark.parametrize("is_ordered", [True, False])
def test_a_failed_message_of_a_fifo_queue_is_not_overtaken(
    is_ordered: bool, subscriber: Invoke, connect: Connect
) -> None:
    """What follows it in its group comes back with it; other groups go on. Any other queue promises no order."""
    event = subscriber_event([message(), message("no event"), message(), message()])
    for record, group in zip(event["Records"], ["a", "b", "b", "a"], strict=True):
        record["attributes"]["MessageGroupId"] = group
        record["eventSourceARN"] += ".fifo" if is_ordered else ""
    came_back = [UUID(failure["itemIdentifier"]) for failure in subscriber(event)["batchItemFailures"]]
    messages = [UUID(record["messageId"]) for record in event["Records"]]
    assert came_back == (messages[1:3] if is_ordered else messages[1:2])
    assert processed(connect()) == 4 - len(came_back)


@pytest.mark.parametrize(
    "body",
    [
        pytest.param("", id="empty"),
        pytest.param("not JSON", id="no JSON"),
        pytest.param("[]", id="no object"),
        pytest.param("{}", id="no attributes"),
        pytest.param('{"Type":"Notification","Message":"{}"}', id="not delivered raw"),
        pytest.param(changed(specversion="0.3"), id="another specversion"),
        pytest.param(changed(type="ChargeVoided"), id="another type"),
        pytest.param(changed(id="42"), id="an id of no outbox"),
        pytest.param(changed(time="2026-01-31T12:00:00"), id="a time without an offset"),
        pytest.param(changed(data={"amountCents": 0, "currency": "USD"}), id="no amount"),
        pytest.param(changed(data={"amountCents": 10**30, "currency": "USD"}), id="more than the total can hold"),
        pytest.param(changed(principal="al\0ice"), id="a NUL"),
    ],
)
def test_only_a_poison_message_comes_back(
    body: str, subscriber: Invoke, connect: Connect, capsys: pytest.CaptureFixture[str]
) -> None:
    """The other nine of its batch are counted, before and behind it; nothing is kept of it, and one error says so."""
    connection = connect()
    poison = message(body)
    batch = [message() for _ in range(9)]
    batch.insert(4, poison)
    assert failures(subscriber(subscriber_event(batch))) == {poison.id}
    [(_, _, _, charges, _)] = totals(connection)
    assert (charges, processed(connection)) == (9, 9)
    [line] = [line for line in deployment.logs(capsys.readouterr().out) if line["level"] == "ERROR"]
    assert line["message_id"] == str(poison.id)


def test_a_poison_messages_content_is_not_logged(subscriber: Invoke, capsys: pytest.CaptureFixture[str]) -> None:
    """A principal and a reference are personal, also where they are unreadable."""
    subscriber(
        subscriber_event([message(changed(principal="alice@example.com", id="the id of alice", data="of alice"))])
    )
    assert "alice" not in capsys.readouterr().out


def test_without_a_database_every_message_comes_back(database_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """The batch is answered all the same, so that SQS counts ten receptions and not a crash."""
    batch = [message() for _ in range(10)]
    with deployment.instance("subscriber", psycopg.conninfo.make_conninfo(database_url, port=1), monkeypatch) as invoke:
        assert failures(invoke(subscriber_event(batch))) == {delivered.id for delivered in batch}


def test_a_database_that_is_back_is_used_within_the_batch(subscriber: Invoke, connect: Connect) -> None:
    """A warm instance's lost connection costs no message."""
    connection = connect()
    subscriber(subscriber_event([message()]))
    connection.execute(
        "SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity"
        " WHERE datname = current_database() AND application_name = 'charging'"
    )
    assert subscriber(subscriber_event([message(), message()])) == {"batchItemFailures": []}
    assert processed(connection) == 3


def test_a_failure_between_inbox_and_projection_leaves_neither(subscriber: Invoke, connect: Connect) -> None:
    """The session ends between the two statements: the event is as if it had never come, and counts when it does."""
    connection, locker = connect(), connect()
    one = message()

    def cut() -> None:
        """Ends the session that waits for the totals, having noted the event."""
        deadline = time.monotonic() + SECONDS
        while time.monotonic() < deadline:
            ended = connection.execute(
                """
                SELECT pg_terminate_backend(pid, 5000)
                FROM pg_stat_activity
                WHERE datname = current_database() AND application_name = 'charging' AND wait_event_type = 'Lock'
                """
            ).fetchall()
            if ended:
                return

    with locker.transaction():
        locker.execute("LOCK TABLE charge_totals")
        cutter = threading.Thread(target=cut)
        cutter.start()
        answer = subscriber(subscriber_event([one]))
        cutter.join()
    assert failures(answer) == {one.id}
    assert (processed(connection), totals(connection)) == (0, [])

    assert subscriber(subscriber_event([again(one)])) == {"batchItemFailures": []}
    [(_, _, _, charges, _)] = totals(connection)
    assert (processed(connection), charges) == (1, 1)


@pytest.mark.parametrize(
    ("moment", "day"),
    [
        ("2026-01-31T23:59:59.999999Z", date(2026, 1, 31)),
        ("2026-02-01T00:00:00Z", date(2026, 2, 1)),
        ("2026-01-31T22:00:00-02:00", date(2026, 2, 1)),
        ("2026-02-01T13:59:59+14:00", date(2026, 1, 31)),
    ],
)
def test_the_day_is_that_of_utc(moment: str, day: date, subscriber: Invoke, connect: Connect) -> None:
    """Whatever offset the event's time has."""
    subscriber(subscriber_event([message(changed(time=moment))]))
    [(_, _, counted, _, _)] = totals(connect())
    assert counted == day


def test_totals_are_kept_apart(subscriber: Invoke, connect: Connect) -> None:
    """By principal, currency and day; the events of one of each add up."""
    charged = [("alice", "USD", 100), ("alice", "USD", 20), ("alice", "EUR", 3), ("bob", "USD", 4000)]
    batch = [
        message(
            changed(principal=principal, data={"amountCents": cents, "currency": currency}, time="2026-01-31T12:00:00Z")
        )
        for principal, currency, cents in charged
    ]
    subscriber(subscriber_event(batch))
    day = date(2026, 1, 31)
    assert totals(connect()) == [
        ("alice", "EUR", day, 1, 3),
        ("alice", "USD", day, 2, 120),
        ("bob", "USD", day, 1, 4000),
    ]
