"""The relay between a real outbox and a broker that fails in every way it knows."""

import json
import re
import threading
import time
from collections import Counter
from collections.abc import Iterator, Sequence
from datetime import datetime
from uuid import UUID, uuid4

import psycopg
import pytest
from psycopg import sql as composing

from charging import charges, errors, relay
from charging import topic as topic_module
from charging.charges import ChargeCommand
from charging.database import Database
from charging.outbox import FULL_LOOK_SECONDS, LEASE_SECONDS, ClaimedEvent, claim
from charging.relay import EVENTS_PER_SWEEP, SWEEP_SECONDS
from charging.topic import BYTES_PER_CALL, CALLS_IN_FLIGHT, ENTRIES_PER_CALL, Topic
from tests.conftest import Connect
from tests.support import deployment, outbox, sns
from tests.support.ledger import call_of, until
from tests.support.outbox import Clock
from tests.support.sns import Answer, Broker, Entry, Refusal

MAX_ATTEMPTS = 3
# How many events the sweeps of a run claim at most, as long as all goes well, and how many sweeps it takes to the most.
LIMITS = [10, 20, 40, 80, 100, 100]
SLOW_START = 3
# Longer than any delay before a next attempt.
DELAY_SECONDS = 60


@pytest.fixture
def database(database_url: str) -> Iterator[Database]:
    """A relay's connection."""
    with deployment.database(database_url) as opened:
        yield opened


@pytest.fixture
def broker(monkeypatch: pytest.MonkeyPatch) -> Iterator[Broker]:
    with sns.serve(monkeypatch) as running:
        yield running


@pytest.fixture
def topic(broker: Broker) -> Topic:
    return Topic(broker.topic_arn, max_attempts=MAX_ATTEMPTS)


def plenty() -> float:
    return 600.0


class TestPublish:
    """Each event's result is its own."""

    def test_only_accepted_events_are_marked(
        self, connect: Connect, database: Database, topic: Topic, broker: Broker
    ) -> None:
        """Three of ten fail inside an HTTP 200: exactly these three stay, with their error, and are sent again."""
        connection = connect()
        ids = outbox.write(connection, count=10)
        withheld = {ids[1], ids[4], ids[9]}
        broker.faults.refused = dict.fromkeys(
            withheld, Refusal("InternalError", sender_fault=False, message="try later")
        )
        assert relay.run_once(database, topic).results == Counter(PUBLISHED=7, POSTPONED=3)
        for row in outbox.rows(connection):
            assert row.is_published == (row.id not in withheld)
            assert row.last_error == ("InternalError: try later" if row.id in withheld else None)
            assert (row.attempts, row.refusals, row.is_failed) == (1, 0, False)

        broker.faults.refused = {}
        broker.calls.clear()
        outbox.let_pass(connection, seconds=DELAY_SECONDS)
        assert relay.run_once(database, topic).results == Counter(PUBLISHED=3)
        assert set(broker.sent) == withheld
        assert Counter(message.attributes["outboxId"] for message in broker.receive()) == Counter(map(str, ids))

    def test_an_entry_without_a_result_is_sent_again(
        self, connect: Connect, database: Database, topic: Topic, broker: Broker
    ) -> None:
        """What the broker does not mention it has not accepted."""
        connection = connect()
        forgotten, other = outbox.write(connection, count=2)
        broker.faults.forgotten = {forgotten}
        relay.run_once(database, topic)
        row = outbox.row(connection, forgotten)
        assert (row.is_published, row.is_failed, row.refusals) == (False, False, 0)
        assert row.last_error is not None
        assert outbox.row(connection, other).is_published

        broker.faults.forgotten = set()
        outbox.let_pass(connection, seconds=DELAY_SECONDS)
        relay.run_once(database, topic)
        assert outbox.row(connection, forgotten).is_published

    @pytest.mark.parametrize("code", ["InvalidParameter", "ParameterValueInvalid", "ValidationException"])
    def test_a_malformed_event_is_parked_at_once(
        self, code: str, connect: Connect, database: Database, topic: Topic, broker: Broker
    ) -> None:
        """Sending it again cannot help. Its neighbours are published in the same call."""
        connection = connect()
        ids = outbox.write(connection, count=10)
        broker.faults.refused = {ids[0]: Refusal(code, sender_fault=True, message="no such character")}
        assert relay.run_once(database, topic).results == Counter(PUBLISHED=9, FAILED=1)
        row = outbox.row(connection, ids[0])
        assert (row.is_failed, row.is_published, row.attempts) == (True, False, 1)
        assert row.last_error == f"{code}: no such character"
        outbox.let_pass(connection, seconds=DELAY_SECONDS)
        assert relay.run_once(database, topic).claimed == 0

    def test_an_event_that_is_refused_for_another_reason_is_parked_after_its_attempts(
        self, connect: Connect, database: Database, topic: Topic, broker: Broker
    ) -> None:
        """A sender's fault that may pass is offered again, as often as configured and at growing distances."""
        connection = connect()
        refused, _ = outbox.write(connection, count=2)
        broker.faults.refused = {refused: Refusal("KMSDisabled", sender_fault=True)}
        for attempt in range(1, MAX_ATTEMPTS):
            relay.run_once(database, topic)
            row = outbox.row(connection, refused)
            assert (row.refusals, row.is_failed) == (attempt, False)
            assert relay.run_once(database, topic).claimed == 0  # not before it is due
            outbox.let_pass(connection, seconds=DELAY_SECONDS)
            outbox.write(connection)
        relay.run_once(database, topic)
        row = outbox.row(connection, refused)
        assert (row.refusals, row.is_failed, row.last_error) == (MAX_ATTEMPTS, True, "KMSDisabled: refused")
        assert broker.sent.count(refused) == MAX_ATTEMPTS

    @pytest.mark.parametrize("code", ["KMSDisabled", "InvalidParameter", None])
    def test_a_topic_that_begins_to_refuse_everything_is_an_outage(
        self, code: str | None, connect: Connect, database: Database, topic: Topic, broker: Broker
    ) -> None:
        """Its key is disabled, or its policy changed: however long that lasts, nothing is parked for it."""
        connection = connect()
        outbox.write(connection)
        assert relay.run_once(database, topic).results == Counter(PUBLISHED=1)
        ids = outbox.write(connection, count=25)
        if code is not None:
            broker.faults.refused = dict.fromkeys(ids, Refusal(code, sender_fault=True))
        else:
            broker.faults.intercept = lambda _: Answer.error(400, "InvalidParameter", "TopicArn")
        for _ in range(5 * MAX_ATTEMPTS):
            assert relay.run_once(database, topic).results == Counter(POSTPONED=25)
            outbox.let_pass(connection, seconds=DELAY_SECONDS)
        assert {(row.refusals, row.is_failed) for row in outbox.rows(connection)} == {(0, False)}
        broker.faults.refused, broker.faults.intercept = {}, lambda _: None
        assert relay.run_once(database, topic).results == Counter(PUBLISHED=25)

    def test_a_lone_event_is_refused_once_for_each_that_is_accepted(
        self, connect: Connect, database: Database, topic: Topic, broker: Broker
    ) -> None:
        """Where nothing else is sent, nobody can tell whose fault it is: it waits, and its age shows."""
        connection = connect()
        [lone] = outbox.write(connection)
        broker.faults.refused = {lone: Refusal("KMSDisabled", sender_fault=True)}
        for count in range(1, MAX_ATTEMPTS):
            for _ in range(5):
                outbox.let_pass(connection, seconds=DELAY_SECONDS)
                relay.run_once(database, topic)
            assert outbox.row(connection, lone).refusals == count - 1
            outbox.let_pass(connection, seconds=DELAY_SECONDS)
            outbox.write(connection)
            relay.run_once(database, topic)
            assert outbox.row(connection, lone).refusals == count

    @pytest.mark.parametrize("code", ["Throttled", "ThrottlingException", "KMSThrottling", "RequestThrottled"])
    def test_an_entry_that_is_throttled_keeps_its_life(
        self, code: str, connect: Connect, database: Database, topic: Topic, broker: Broker
    ) -> None:
        """SNS calls throttling the sender's fault, in an entry's own result too. It is the moment's."""
        connection = connect()
        throttled, _ = outbox.write(connection, count=2)
        broker.faults.refused = {throttled: Refusal(code, sender_fault=True, message="slow down")}
        for _ in range(2 * MAX_ATTEMPTS):
            assert relay.run_once(database, topic).results["POSTPONED"] == 1
            outbox.let_pass(connection, seconds=DELAY_SECONDS)
        broker.faults.refused = {}
        relay.run_once(database, topic)
        row = outbox.row(connection, throttled)
        assert (row.is_published, row.refusals) == (True, 0)

    @pytest.mark.parametrize(
        "members",
        [
            pytest.param(
                "<Successful><member><MessageId>1</MessageId></member></Successful>", id="accepted-without-an-id"
            ),
            pytest.param("<Successful><member><Id>1</Id></member></Successful>", id="accepted-what-was-not-sent"),
            pytest.param("<Failed><member><Code>InternalError</Code></member></Failed>", id="failed-without-an-id"),
            pytest.param("<Failed><member><Id>{id}</Id></member></Failed>", id="failed-without-a-reason"),
        ],
    )
    def test_an_answer_that_lacks_something_is_no_result(
        self, members: str, connect: Connect, database: Database, topic: Topic, broker: Broker
    ) -> None:
        """Nothing is marked or held against an event, and it is due again long before a lease would have ended."""
        connection = connect()
        [event_id] = outbox.write(connection)
        result = f"<PublishBatchResult>{members.format(id=event_id)}</PublishBatchResult>"
        answer = Answer(200, f"<PublishBatchResponse>{result}</PublishBatchResponse>")
        broker.faults.intercept = lambda _: answer
        assert relay.run_once(database, topic).results == Counter(POSTPONED=1)
        row = outbox.row(connection, event_id)
        assert (row.refusals, row.is_published, row.is_failed) == (0, False, False)
        assert row.due_in_seconds <= 1

    def test_an_outage_is_not_held_against_an_event(
        self, connect: Connect, database: Database, topic: Topic, broker: Broker
    ) -> None:
        """After any number of attempts that met an outage, an event still has every attempt that a refusal costs."""
        connection = connect()
        [event_id] = outbox.write(connection)
        broker.stop()
        for _ in range(5 * MAX_ATTEMPTS):
            assert relay.run_once(database, topic).results == Counter(POSTPONED=1)
            outbox.let_pass(connection, seconds=DELAY_SECONDS)
        broker.start()
        broker.faults.refused = {event_id: Refusal("KMSDisabled", sender_fault=True)}
        outbox.write(connection)
        assert relay.run_once(database, topic).results == Counter(REFUSED=1, PUBLISHED=1)
        row = outbox.row(connection, event_id)
        assert (row.attempts, row.refusals, row.is_failed) == (5 * MAX_ATTEMPTS + 1, 1, False)

    def test_a_topic_that_refuses_every_call_is_an_outage(
        self, connect: Connect, database: Database, topic: Topic, broker: Broker
    ) -> None:
        """A misconfigured topic parks nothing, however long; once it accepts events, the refused one is parked."""
        connection = connect()
        ids = outbox.write(connection, count=15)
        culprits = set(ids)

        def refuse(entries: list[Entry]) -> Answer | None:
            guilty = not culprits.isdisjoint(entry.id for entry in entries)
            return Answer.error(400, "InvalidParameter", "not like that") if guilty else None

        broker.faults.intercept = refuse
        for _ in range(2 * MAX_ATTEMPTS):
            assert relay.run_once(database, topic).results == Counter(POSTPONED=15)
            outbox.let_pass(connection, seconds=DELAY_SECONDS)
        assert {(row.refusals, row.is_failed) for row in outbox.rows(connection)} == {(0, False)}
        culprits.intersection_update(ids[:1])
        assert relay.run_once(database, topic).results["PUBLISHED"] == 14
        outbox.let_pass(connection, seconds=DELAY_SECONDS)
        relay.run_once(database, topic)
        assert [row.is_failed for row in outbox.rows(connection) if not row.is_published] == [True]

    @pytest.mark.parametrize(
        "answer",
        [
            pytest.param(Answer.error(400, "Throttling"), id="Throttling"),
            pytest.param(Answer.error(400, "ThrottlingException"), id="ThrottlingException"),
            pytest.param(Answer.error(429, "TooManyRequestsException"), id="TooManyRequests"),
            pytest.param(Answer.error(400, "KMSThrottling"), id="KMSThrottling"),
            pytest.param(Answer.error(403, "ExpiredToken"), id="ExpiredToken"),
            pytest.param(Answer.error(403, "AuthorizationError"), id="AuthorizationError"),
            pytest.param(Answer.error(404, "NotFound"), id="NotFound"),
            pytest.param(Answer.error(500, "InternalError"), id="InternalError"),
            pytest.param(Answer.error(503, "ServiceUnavailable"), id="ServiceUnavailable"),
            pytest.param(Answer(500, ""), id="500-without-a-body"),
            pytest.param(Answer(503, "<html><body>Service Unavailable</body></html>"), id="503-as-HTML"),
            pytest.param(Answer(503, "upstream connect error"), id="503-as-text"),
            pytest.param(Answer(200, "<PublishBatchResponse><Publi"), id="200-cut-off"),
            pytest.param(Answer(200, ""), id="200-without-a-body"),
            pytest.param(Answer(200, "<html><body>Sign in</body></html>"), id="200-as-XHTML"),
            pytest.param(Answer(200, "<PublishResponse/>"), id="200-to-something-else"),
            pytest.param(Answer(302, ""), id="redirect"),
            pytest.param(Answer(302, "<html><body>Moved</body></html>"), id="redirect-as-XHTML"),
            pytest.param(Answer(403, "<html><body>Forbidden</body></html>"), id="403-as-XHTML"),
            pytest.param(Answer(400, "<ErrorResponse><Error>busy</Error></ErrorResponse>"), id="error-as-text"),
            pytest.param(Answer(400, "<ErrorResponse><Error/></ErrorResponse>"), id="error-without-a-code"),
            pytest.param(sns.HANG_UP, id="hung-up"),
        ],
    )
    def test_an_outage_costs_no_event_its_life(
        self, answer: Answer, connect: Connect, database: Database, topic: Topic, broker: Broker
    ) -> None:
        """A broker that cannot take the call is asked again later, and then gets every event."""
        connection = connect()
        ids = outbox.write(connection, count=12)
        broker.faults.intercept = lambda _: answer
        assert relay.run_once(database, topic).results == Counter(POSTPONED=12)
        self._all_wait(connection)
        broker.faults.intercept = lambda _: None
        outbox.let_pass(connection, seconds=DELAY_SECONDS)
        assert relay.run_once(database, topic).results == Counter(PUBLISHED=12)
        assert Counter(message.attributes["outboxId"] for message in broker.receive()) == Counter(map(str, ids))

    def test_a_broker_that_refuses_connections_costs_no_event_its_life(
        self, connect: Connect, database: Database, topic: Topic, broker: Broker
    ) -> None:
        """Nobody listens: the events wait, and go when somebody does."""
        connection = connect()
        outbox.write(connection, count=12)
        broker.stop()
        assert relay.run_once(database, topic).results == Counter(POSTPONED=12)
        self._all_wait(connection)
        broker.start()
        outbox.let_pass(connection, seconds=DELAY_SECONDS)
        assert relay.run_once(database, topic).results == Counter(PUBLISHED=12)

    def test_a_broker_that_does_not_answer_costs_no_event_its_life(
        self, connect: Connect, database: Database, broker: Broker, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """The call is given up in time. That the broker had accepted it all the same, the subscriber has to bear."""
        monkeypatch.setattr("charging.topic.READ_SECONDS", 0.2)
        topic = Topic(broker.topic_arn, max_attempts=MAX_ATTEMPTS)
        connection = connect()
        [event_id] = outbox.write(connection)
        answers = broker.faults.intercept_answer = sns.Hold()
        assert relay.run_once(database, topic).results == Counter(POSTPONED=1)
        self._all_wait(connection)
        assert outbox.row(connection, event_id).last_error == "ReadTimeoutError"
        answers.let_go.set()
        outbox.let_pass(connection, seconds=DELAY_SECONDS)
        assert relay.run_once(database, topic).results == Counter(PUBLISHED=1)
        assert [message.attributes["outboxId"] for message in broker.receive()] == [str(event_id)] * 2

    def _all_wait(self, connection: outbox.Connection) -> None:
        for row in outbox.rows(connection):
            assert (row.is_published, row.is_failed, row.attempts, row.refusals) == (False, False, 1, 0)
            assert row.last_error
            assert row.due_in_seconds < LEASE_SECONDS / 2, "an outage does not keep the lease"

    def test_a_call_that_is_refused_is_halved_until_the_culprit_is_alone(
        self, connect: Connect, database: Database, topic: Topic, broker: Broker
    ) -> None:
        """The broker refuses whole calls for one event's sake: that one is parked, its nine neighbours published."""
        connection = connect()
        ids = outbox.write(connection, count=10)
        culprit = ids[3]

        def refuse(entries: list[Entry]) -> Answer | None:
            guilty = culprit in [entry.id for entry in entries]
            return Answer.error(400, "InvalidParameter", "one of them") if guilty else None

        broker.faults.intercept = refuse
        assert relay.run_once(database, topic).results == Counter(PUBLISHED=9, FAILED=1)
        row = outbox.row(connection, culprit)
        assert (row.is_failed, row.last_error) == (True, "InvalidParameter: one of them")
        assert len(broker.receive()) == 9
        # 10, then halves: a culprit among ten costs at most 4 levels of two calls each.
        assert len(broker.calls) <= 1 + 2 * 4

    def test_what_does_not_fit_into_a_sweep_is_given_back(
        self, connect: Connect, database: Database, topic: Topic, broker: Broker
    ) -> None:
        """Events so large that each needs a call of its own: as many as can be in flight are sent, the rest is due."""
        connection = connect()
        ids = outbox.write(connection, *["x" * (BYTES_PER_CALL - 1000)] * (CALLS_IN_FLIGHT + 2))
        broker.faults.delivers = False
        assert relay.run_once(database, topic).results == Counter(PUBLISHED=CALLS_IN_FLIGHT, RETURNED=2)
        left = [row for row in outbox.rows(connection, ids) if not row.is_published]
        assert [(row.refusals, row.last_error, row.due_in_seconds <= 0) for row in left] == [(0, None, True)] * 2
        assert relay.run_once(database, topic).results == Counter(PUBLISHED=2)

    def test_large_events_are_packed_by_their_bytes(
        self, connect: Connect, database: Database, topic: Topic, broker: Broker
    ) -> None:
        """Ten events of 60 kB, in characters of three bytes, are no call that the broker refuses for its size."""
        connection = connect()
        broker.faults.delivers = False  # moto takes seconds for messages of this size
        outbox.write(connection, *[json.dumps({"note": "€" * 20_000}, ensure_ascii=False)] * 10)
        assert relay.run_once(database, topic).results == Counter(PUBLISHED=10)
        assert sorted(len(call) for call in broker.calls) == [2, 4, 4]

    def test_a_topic_that_takes_more_is_asked_once_and_given_more(
        self, connect: Connect, database: Database, topic: Topic, broker: Broker
    ) -> None:
        """An event of 600 kB goes to a topic whose size was raised to 1 MiB; and so do two of 500 kB in one call."""
        broker.faults.delivers = False
        broker.faults.topic_bytes = 1_048_576
        outbox.write(connect(), "x" * 600_000)
        assert relay.run_once(database, topic).results == Counter(PUBLISHED=1)
        outbox.write(connect(), "x" * 500_000, "x" * 500_000)
        assert relay.run_once(database, topic).results == Counter(PUBLISHED=2)
        assert [len(call) for call in broker.calls] == [1, 2]
        assert broker.questions == 1

    def test_an_event_is_not_judged_by_a_limit_that_could_not_be_learnt(
        self, connect: Connect, database: Database, topic: Topic, broker: Broker
    ) -> None:
        """Above the ordinary size it waits until the topic tells its own; all others are sent meanwhile."""
        connection = connect()
        broker.faults.delivers = False
        broker.faults.topic_bytes = 1_048_576
        broker.faults.intercept_question = lambda _: Answer.error(403, "AuthorizationError", "may not be asked")
        large, small = outbox.write(connection, "x" * 600_000, "x")
        assert relay.run_once(database, topic).results == Counter(PUBLISHED=1, POSTPONED=1)
        assert outbox.row(connection, small).is_published
        assert "could not be read" in str(outbox.row(connection, large).last_error)

        broker.faults.intercept_question = lambda _: None
        outbox.let_pass(connection, seconds=DELAY_SECONDS)
        assert relay.run_once(database, topic).results == Counter(PUBLISHED=1)

    @pytest.mark.parametrize("attribute", ["<key>MaximumMessageSize</key><value>much</value>", "", None])
    def test_an_answer_that_tells_no_limit_stops_nothing(
        self, attribute: str | None, database: Database, topic: Topic, broker: Broker, connect: Connect
    ) -> None:
        """What is of the ordinary size is sent, whatever was answered when the topic's own was asked for."""
        outbox.write(connect(), count=3)
        attributes = f"<Attributes><entry>{attribute}</entry></Attributes>"
        result = f"<GetTopicAttributesResult>{attributes}</GetTopicAttributesResult>" if attribute else ""
        body = f"<GetTopicAttributesResponse>{result}</GetTopicAttributesResponse>"
        answer = Answer(200, "<html><body>Sign in</body></html>" if attribute is None else body)
        broker.faults.intercept_question = lambda _: answer
        assert relay.run_once(database, topic).results == Counter(PUBLISHED=3)

    def test_an_oversized_event_is_parked_visibly(
        self, connect: Connect, database: Database, topic: Topic, broker: Broker
    ) -> None:
        """It is never sent, says why, and delays nobody."""
        connection = connect()
        [oversized] = outbox.write(connection, json.dumps({"note": "x" * 262_144}))
        others = outbox.write(connection, count=10)
        assert relay.run_once(database, topic).results == Counter(PUBLISHED=10, FAILED=1)
        row = outbox.row(connection, oversized)
        assert row.is_failed
        assert row.last_error is not None
        assert "larger" in row.last_error
        assert set(broker.sent) == set(others)

    def test_a_limit_that_was_raised_is_noticed(
        self, connect: Connect, database: Database, topic: Topic, broker: Broker
    ) -> None:
        """An event was parked for its size, and the topic's was raised: redriven, a relay that runs on sends it."""
        connection = connect()
        broker.faults.delivers = False
        [large] = outbox.write(connection, "x" * 600_000)
        assert relay.run_once(database, topic).results == Counter(FAILED=1)
        assert broker.questions == 1
        broker.faults.topic_bytes = 1_048_576
        connection.execute("UPDATE outbox SET failed_at = NULL WHERE id = %s", [large])
        assert relay.run_once(database, topic).results == Counter(PUBLISHED=1)

    def test_what_is_not_sent_delays_nothing_that_is(
        self, connect: Connect, database: Database, topic: Topic, broker: Broker
    ) -> None:
        """While it is still to be written down that one event is too large, the broker has all the others."""
        broker.faults.delivers = False
        outbox.write(connect(), "x" * 600_000)
        ids = outbox.write(connect(), count=EVENTS_PER_SWEEP - 1)
        calls, unsent = topic.send(claim(database, limit=EVENTS_PER_SWEEP, lease_seconds=LEASE_SECONDS))
        assert [completion.result for completion in unsent] == ["FAILED"]
        until(lambda: len(broker.sent) == len(ids))
        assert {completion.result for call in calls for completion in call.result()} == {"PUBLISHED"}

    def test_a_long_error_is_cut(self, connect: Connect, database: Database, topic: Topic, broker: Broker) -> None:
        """What the broker says does not grow the table."""
        connection = connect()
        [event_id] = outbox.write(connection)
        broker.faults.refused = {event_id: Refusal("InternalError", sender_fault=False, message="x" * 5_000)}
        relay.run_once(database, topic)
        assert len(outbox.row(connection, event_id).last_error or "") == 500


class TestSend:
    """What else may happen while the broker has the events."""

    def test_no_transaction_is_open_during_a_send(
        self, connect: Connect, database: Database, topic: Topic, broker: Broker
    ) -> None:
        """Seen from the broker, the relay's connection is idle and holds no lock on any row or table."""
        connection, observer = connect(), connect()
        outbox.write(connection, count=10)
        seen: list[tuple[object, ...]] = []

        def look(_: list[Entry]) -> None:
            seen.extend(
                observer.execute(
                    """
                    SELECT state, xact_start, (SELECT count(*) FROM pg_locks WHERE pg_locks.pid = activity.pid)
                    FROM pg_stat_activity AS activity
                    WHERE datname = current_database() AND application_name = 'charging'
                    """
                ).fetchall()
            )

        broker.faults.intercept = look
        assert relay.run_once(database, topic).results == Counter(PUBLISHED=10)
        assert seen == [("idle", None, 0)]

    def test_ten_calls_are_in_flight_at_once(
        self, connect: Connect, database: Database, topic: Topic, broker: Broker
    ) -> None:
        """The broker answers none of a full sweep's calls before it has all ten of them."""
        broker.faults.delivers = False
        outbox.write(connect(), count=EVENTS_PER_SWEEP)
        all_there = threading.Barrier(10)

        def wait(_: list[Entry]) -> None:
            all_there.wait(4)

        broker.faults.intercept = wait
        assert relay.run_once(database, topic).results == Counter(PUBLISHED=EVENTS_PER_SWEEP)

    def test_a_slow_call_keeps_the_others_places_from_nobody(
        self, connect: Connect, database: Database, broker: Broker, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """At full speed one call is not answered before SNS has all else that is due, three sweeps' worth. And never is
        more leased than one sweep's."""
        monkeypatch.setattr("charging.topic.READ_SECONDS", 60)
        topic = Topic(broker.topic_arn, max_attempts=MAX_ATTEMPTS)
        connection, observer = connect(), connect()
        broker.faults.delivers = False
        slow_start = sum(LIMITS[:-2])
        ids = outbox.write(connection, count=slow_start + 3 * EVENTS_PER_SWEEP)
        all_others = threading.Event()
        leased: list[tuple[int]] = []

        def look(entries: list[Entry]) -> None:
            leased.extend(
                observer.execute("SELECT count(*) FROM outbox WHERE attempts > 0 AND published_at IS NULL").fetchall()
            )
            if ids[slow_start] in [entry.id for entry in entries]:
                all_others.wait(sns.HOLD_SECONDS / 2)

        def count(_: list[Entry]) -> None:
            if len(broker.accepted) == len(ids) - ENTRIES_PER_CALL:
                all_others.set()

        broker.faults.intercept, broker.faults.intercept_answer = look, count
        run = relay.run(database, topic, budget_seconds=0, poll_seconds=0.25, remaining_seconds=plenty)
        assert run.results == Counter(PUBLISHED=len(ids))
        assert all_others.is_set()
        assert max(leased) <= (EVENTS_PER_SWEEP,)

    def test_a_slow_call_delays_no_other_calls_mark(
        self, connect: Connect, database: Database, topic: Topic, broker: Broker
    ) -> None:
        """While one call is unanswered, what another delivered is already marked, and would survive a crash."""
        connection, observer = connect(), connect()
        slow, *_ = outbox.write(connection, count=20)

        def hold(entries: list[Entry]) -> Answer | None:
            if slow not in [entry.id for entry in entries]:
                return None
            deadline = time.monotonic() + 4
            while time.monotonic() < deadline:
                if sum(row.is_published for row in outbox.rows(observer)) == 10:
                    return None
            return Answer.error(500, "NothingWasMarked")

        broker.faults.intercept = hold
        assert relay.run_once(database, topic).results == Counter(PUBLISHED=20)

    def test_a_connection_that_is_lost_during_a_send_costs_no_mark(
        self, connect: Connect, database: Database, topic: Topic, broker: Broker
    ) -> None:
        """Postgres ends the relay's session meanwhile: the results go down on a new one, and nothing comes twice."""
        connection, observer = connect(), connect()
        outbox.write(connection, count=10)

        def cut(_: list[Entry]) -> None:
            disconnect(observer)

        broker.faults.intercept = cut
        assert relay.run_once(database, topic).results == Counter(PUBLISHED=10)
        assert all(row.is_published for row in outbox.rows(connection))

    def test_a_mark_that_fails_costs_no_other_call_its_mark(
        self, connect: Connect, database: Database, topic: Topic, broker: Broker
    ) -> None:
        """Somebody holds one row until the database gives up: the events of the other calls are marked published."""
        connection, holder = connect(), connect()
        broker.faults.delivers = False
        ids = outbox.write(connection, count=3 * ENTRIES_PER_CALL)
        held: list[UUID] = []

        def hold(entries: list[Entry]) -> None:
            if ids[0] in [entry.id for entry in entries]:
                # Calls that end in the same instant are marked together.
                until(lambda: sum(row.is_published for row in outbox.rows(holder)) == 2 * ENTRIES_PER_CALL)
                held.extend(entry.id for entry in entries)
                holder.execute("BEGIN")
                holder.execute("SELECT FROM outbox WHERE id = %s FOR UPDATE", [ids[0]])

        broker.faults.intercept = hold
        run = relay.run_once(database, topic)
        holder.execute("ROLLBACK")
        assert (run.results, run.unmarked) == (Counter(PUBLISHED=len(ids)), len(held))
        assert isinstance(run.error, errors.TemporarilyUnavailable)
        assert {row.id for row in outbox.rows(connection) if not row.is_published} == set(held)

    def test_a_mistake_in_one_call_costs_no_other_call_its_mark(
        self, connect: Connect, database: Database, topic: Topic, broker: Broker, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A bug is heard of, and only its own events wait for the end of their lease."""
        connection = connect()
        broker.faults.delivers = False
        ids = outbox.write(connection, count=3 * ENTRIES_PER_CALL)
        fair_group = topic_module._fair_group  # noqa: SLF001 - a place for a bug

        def fail(payload: str) -> str | None:
            if str(ids[0]) in payload:
                raise ZeroDivisionError
            return fair_group(payload)

        monkeypatch.setattr(topic_module, "_fair_group", fail)
        with pytest.raises(ZeroDivisionError):
            relay.run_once(database, topic)
        assert sum(row.is_published for row in outbox.rows(connection)) == 2 * ENTRIES_PER_CALL

    def test_a_lease_that_ends_during_a_send_is_counted(
        self, connect: Connect, database: Database, topic: Topic, broker: Broker, database_url: str
    ) -> None:
        """Another relay claims the rows meanwhile and answers for them; the slow one counts what it lost."""
        connection, observer = connect(), connect()
        outbox.write(connection, count=10)
        with deployment.database(database_url) as other:

            def outlast(_: list[Entry]) -> None:
                broker.faults.intercept = lambda _: None
                outbox.let_pass(observer, seconds=LEASE_SECONDS)
                assert relay.run_once(other, topic).results == Counter(PUBLISHED=10)

            broker.faults.intercept = outlast
            sweep = relay.run_once(database, topic)
        assert sweep.lease_lost == 10
        assert {row.attempts for row in outbox.rows(connection)} == {2}


def disconnect(observer: outbox.Connection) -> None:
    """Ends every session of the service, as a fail-over does, and waits until they are gone."""
    observer.execute(
        """
        SELECT pg_terminate_backend(pid, 5000)
        FROM pg_stat_activity
        WHERE datname = current_database() AND application_name = 'charging'
        """
    )


class TestMessage:
    """What arrives in the queue."""

    TRACEPARENT = "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"

    def charge(self, database: Database, *, traceparent: str | None = None, reference: str | None = None) -> None:
        given = {"amountCents": 4900} | ({} if reference is None else {"reference": reference})
        charges.create(
            database,
            call_of(charges.ENDPOINT, uuid4(), ChargeCommand.model_validate(given), traceparent=traceparent),
        )

    def test_it_is_a_cloud_event(self, connect: Connect, database: Database, topic: Topic, broker: Broker) -> None:
        """All attributes that the contract names, and no others, on a charge's event."""
        connection = connect()
        self.charge(database)
        relay.run_once(database, topic)
        [message] = broker.receive()
        event = json.loads(message.body)
        charge = connection.execute("SELECT id, created_at FROM charges").fetchone()
        event_id = connection.execute("SELECT id FROM outbox").fetchone()
        assert charge is not None
        assert event_id is not None
        assert event == {
            "specversion": "1.0",
            "id": str(event_id[0]),
            "source": "/charges",
            "type": "ChargeCreated",
            "subject": str(charge[0]),
            "time": charge[1].strftime("%Y-%m-%dT%H:%M:%S.%fZ"),
            "datacontenttype": "application/json",
            "principal": "alice",
            "data": {"chargeId": str(charge[0]), "amountCents": 4900, "currency": "USD"},
        }

    def test_its_time_is_that_of_the_charge_in_utc(
        self, connect: Connect, database_url: str, topic: Topic, broker: Broker
    ) -> None:
        """On a server in any time zone, to the microsecond."""
        connection = connect()
        connection.execute(
            composing.SQL("ALTER DATABASE {} SET timezone = 'Pacific/Kiritimati'").format(
                composing.Identifier(connection.info.dbname)
            )
        )
        with deployment.database(database_url) as database:
            self.charge(database)
            relay.run_once(database, topic)
        [message] = broker.receive()
        [(created_at,)] = connection.execute("SELECT created_at FROM charges").fetchall()
        time_of_event = json.loads(message.body)["time"]
        assert time_of_event.endswith("Z")
        assert datetime.fromisoformat(time_of_event) == created_at

    def test_what_the_caller_sent_along_is_carried(self, database: Database, topic: Topic, broker: Broker) -> None:
        """A trace context and a reference are in the event where they were in the request."""
        self.charge(database, traceparent=self.TRACEPARENT, reference='Ünï "42" <&>')
        relay.run_once(database, topic)
        [message] = broker.receive()
        event = json.loads(message.body)
        assert event["traceparent"] == self.TRACEPARENT
        assert event["data"]["reference"] == 'Ünï "42" <&>'

    def test_it_is_the_rows_payload_byte_for_byte(
        self, connect: Connect, database: Database, topic: Topic, broker: Broker
    ) -> None:
        """It is serialised once, when the row is written: white space, escapes and order arrive as they are."""
        payload = '{ "b":"\\u00e9é😀&<>+%20\\"",\t"a" : 1.50,\r\n "a": 2 }'
        outbox.write(connect(), payload)
        relay.run_once(database, topic)
        [message] = broker.receive()
        assert message.body == payload

    def test_its_attributes_serve_filters_and_deduplication(
        self, connect: Connect, database: Database, topic: Topic, broker: Broker
    ) -> None:
        """eventType and outboxId, and nothing else, stand beside the body as strings."""
        [event_id] = outbox.write(connect())
        relay.run_once(database, topic)
        [message] = broker.receive()
        assert message.attributes == {"eventType": "ChargeCreated", "outboxId": str(event_id)}
        [[entry]] = broker.calls
        assert {kind for kind, _ in entry.attributes.values()} == {"String"}

    def test_a_call_is_what_the_sdk_alone_would_send(
        self, connect: Connect, database: Database, topic: Topic, broker: Broker, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Byte for byte, whatever the event holds: it is only encoded once, where the SDK does so twice."""
        text = json.dumps({"principal": "ünï", "note": "é😀 &=+%20~*\x7f\n\"'<>#?/\\"}, ensure_ascii=False)
        broker.faults.delivers = False  # by the SDK
        outbox.write(connect(), text)
        events = claim(database, limit=1, lease_seconds=LEASE_SECONDS)
        requests: list[bytes] = []
        answer = broker.answer

        def record(request: bytes) -> Answer:
            requests.append(request)
            return answer(request)

        monkeypatch.setattr(broker, "answer", record)
        assert published(topic, events) == 1

        monkeypatch.setattr(topic_module, "_encode_once", lambda **_: None)
        assert published(Topic(broker.topic_arn, max_attempts=MAX_ATTEMPTS), events) == 1
        [ours, alone] = [request for request in requests if b"Action=PublishBatch" in request]
        assert ours == alone

        def encode(*_: object, **__: object) -> str:
            raise AssertionError("the SDK encodes the call, too")

        monkeypatch.setattr("botocore.awsrequest.urlencode", encode)
        assert published(topic, events) == 1


def published(topic: Topic, events: Sequence[ClaimedEvent]) -> int:
    """Sends events, and returns how many the broker accepted."""
    calls, _ = topic.send(events)
    return sum(completion.result == "PUBLISHED" for call in calls for completion in call.result())


class TestGroups:
    """Fairness among principals, where SQS knows it."""

    def test_a_principals_events_are_one_group(
        self, connect: Connect, database: Database, topic: Topic, broker: Broker
    ) -> None:
        """The group is the principal's and tells nobody who that is; it fits SNS's alphabet whatever the name."""
        alices, again, bobs, strange = (uuid4() for _ in range(4))
        connection = connect()
        for event_id, principal in ((alices, "alice"), (again, "alice"), (bobs, "bob"), (strange, "ünï/ \x1f" * 80)):
            [row_id] = outbox.write(connection, outbox.payload(event_id, principal=principal))
            connection.execute("UPDATE outbox SET id = %s WHERE id = %s", [event_id, row_id])
        relay.run_once(database, topic)
        [call] = broker.calls
        groups = {entry.id: entry.group or "" for entry in call}
        assert len(groups) == 4
        assert groups[alices] == groups[again]
        assert len({groups[alices], groups[bobs], groups[strange]}) == 3
        assert all(re.fullmatch(r"[0-9a-f]{64}", group) for group in groups.values())
        assert {entry.deduplication_id for entry in call} == {None}

    @pytest.mark.parametrize("text", ["no JSON", "[]", "7", '{"type":"x"}', "[" * 20_000])
    def test_an_event_without_a_principal_is_sent_without_a_group(
        self, text: str, connect: Connect, database: Database, topic: Topic, broker: Broker
    ) -> None:
        """Whatever it is, it holds nobody up."""
        outbox.write(connect(), text)
        assert relay.run_once(database, topic).results == Counter(PUBLISHED=1)
        [[entry]] = broker.calls
        assert (entry.group, entry.message) == (None, text)


class TestRun:
    """How long a run goes on, and at what pace."""

    @pytest.fixture
    def clock(self, connect: Connect, broker: Broker, monkeypatch: pytest.MonkeyPatch) -> Clock:
        broker.faults.delivers = False
        return Clock(monkeypatch, connect())

    def test_it_drains_more_than_one_sweep(
        self, connect: Connect, database: Database, topic: Topic, clock: Clock
    ) -> None:
        """A backlog of two and a half sweeps is gone before the first pause."""
        connection = connect()
        count = 5 * EVENTS_PER_SWEEP // 2
        outbox.write(connection, count=count)
        run = relay.run(
            database, topic, budget_seconds=0, poll_seconds=0.25, remaining_seconds=plenty, pause=clock.pause
        )
        assert run.results == Counter(PUBLISHED=count)
        assert all(row.is_published for row in outbox.rows(connection))
        assert clock.pauses == []

    def test_without_a_budget_it_looks_once_and_returns(
        self, database: Database, topic: Topic, broker: Broker, clock: Clock
    ) -> None:
        """A budget of 0 is for a person, or a test, that waits for the result."""
        run = relay.run(
            database, topic, budget_seconds=0, poll_seconds=0.25, remaining_seconds=plenty, pause=clock.pause
        )
        assert (run.claimed, clock.pauses, broker.calls) == (0, [], [])

    def test_it_polls_until_its_budget_ends(
        self, connect: Connect, database: Database, topic: Topic, clock: Clock
    ) -> None:
        """What is committed while it runs leaves with the next poll."""
        connection = connect()

        def pause(seconds: float) -> None:
            clock.pause(seconds)
            if len(clock.pauses) == 5:
                outbox.write(connection)

        run = relay.run(database, topic, budget_seconds=10, poll_seconds=0.25, remaining_seconds=plenty, pause=pause)
        assert run.results == Counter(PUBLISHED=1)
        assert clock.pauses == [0.25] * 39

    def test_a_backlog_does_not_outlast_the_budget(
        self, connect: Connect, database: Database, topic: Topic, broker: Broker, clock: Clock
    ) -> None:
        """The rest is for the next run, which begins by then: otherwise runs would pile up, each at its own pace."""
        connection = connect()
        outbox.write(connection, count=100)

        def take_a_minute(_: list[Entry]) -> None:
            clock.pause(60)

        broker.faults.intercept = take_a_minute
        run = relay.run(database, topic, budget_seconds=75, poll_seconds=0.25, remaining_seconds=plenty)
        # A call of ten, then two of ten: the second sweep begins after a minute, and a third would begin after three.
        assert run.results == Counter(PUBLISHED=30)

    @pytest.mark.parametrize("remaining", [SWEEP_SECONDS - 0.1, 0.0, -1.0])
    def test_it_claims_nothing_that_it_could_not_finish(
        self, remaining: float, connect: Connect, database: Database, topic: Topic, broker: Broker
    ) -> None:
        """With less time than a sweep can take, or none, no row is leased."""
        connection = connect()
        [event_id] = outbox.write(connection)
        run = relay.run(database, topic, budget_seconds=60, poll_seconds=0.25, remaining_seconds=lambda: remaining)
        assert (run.claimed, broker.calls) == (0, [])
        assert outbox.row(connection, event_id).attempts == 0

    def test_a_lease_outlives_the_worst_that_a_sweep_can_come_to(self) -> None:
        """One that ended early would send its events twice."""
        assert LEASE_SECONDS > SWEEP_SECONDS

    def test_it_stops_between_sweeps_when_the_function_is_about_to_end(
        self, connect: Connect, database: Database, topic: Topic, broker: Broker
    ) -> None:
        """The rest of the backlog is left unclaimed, due at once for the next run."""
        connection = connect()
        outbox.write(connection, count=2 * EVENTS_PER_SWEEP)
        broker.faults.delivers = False
        remaining = iter([60.0] * SLOW_START + [SWEEP_SECONDS - 0.1])
        run = relay.run(
            database, topic, budget_seconds=60, poll_seconds=0.25, remaining_seconds=lambda: next(remaining)
        )
        assert run.results == Counter(PUBLISHED=sum(LIMITS[:SLOW_START]))
        rest = [row for row in outbox.rows(connection) if not row.is_published]
        assert len(rest) == 2 * EVENTS_PER_SWEEP - run.claimed
        assert all(row.attempts == 0 and row.due_in_seconds < 0 for row in rest)

    def test_it_backs_off_while_the_broker_takes_nothing(
        self, connect: Connect, database: Database, topic: Topic, broker: Broker, clock: Clock
    ) -> None:
        """Pauses grow from a second to ten, so that an outage does not turn the backlog over and over."""
        connection = connect()
        outbox.write(connection, count=12 * EVENTS_PER_SWEEP)
        broker.stop()
        run = relay.run(
            database, topic, budget_seconds=60, poll_seconds=0.25, remaining_seconds=plenty, pause=clock.pause
        )
        assert clock.pauses == [1, 2, 4, 8, 10, 10, 10, 10]
        # A single call asks each time.
        assert run.results == Counter(POSTPONED=ENTRIES_PER_CALL * 9)
        assert not any(row.is_failed for row in outbox.rows(connection))

    def test_it_begins_with_one_call_and_doubles(
        self, connect: Connect, database: Database, topic: Topic, broker: Broker, clock: Clock
    ) -> None:
        """A broker that has just come back is not met with all that has piled up."""
        outbox.write(connect(), count=sum(LIMITS))
        relay.run(database, topic, budget_seconds=0, poll_seconds=0.25, remaining_seconds=plenty, pause=clock.pause)
        sent = iter(broker.calls)
        for limit in LIMITS:
            assert sum(len(next(sent)) for _ in range(limit // ENTRIES_PER_CALL)) == limit
        assert next(sent, None) is None

    def test_it_slows_down_while_the_broker_throttles(
        self, connect: Connect, database: Database, topic: Topic, broker: Broker, clock: Clock
    ) -> None:
        """A broker that takes three calls in a second is asked for a few more, and not for ten at a time."""
        connection = connect()
        outbox.write(connection, count=2000)
        allowed = 0

        def throttle(_: list[Entry]) -> Answer | None:
            nonlocal allowed
            allowed -= 1
            return None if allowed >= 0 else Answer.error(400, "Throttled", "slow down")

        def remaining() -> float:
            nonlocal allowed
            allowed = 3  # for this sweep
            return plenty()

        broker.faults.intercept = throttle
        run = relay.run(
            database, topic, budget_seconds=0, poll_seconds=0.25, remaining_seconds=remaining, pause=clock.pause
        )
        assert run.results["FAILED"] == run.results["REFUSED"] == 0
        # Of 2, 4, 2, 4 ... calls every second one is one too many.
        assert run.results["POSTPONED"] <= run.claimed / 5

    def test_it_lets_go_at_full_speed_when_the_broker_throttles(
        self, connect: Connect, database: Database, topic: Topic, broker: Broker, clock: Clock
    ) -> None:
        """Nothing more is claimed for the places of calls that were refused: only what was in flight is postponed, and
        then a sweep that is half as large."""
        outbox.write(connect(), count=1000)
        broker.faults.intercept = lambda _: Answer.error(400, "Throttled") if len(broker.accepted) >= 300 else None
        run = relay.run(
            database, topic, budget_seconds=0, poll_seconds=0.25, remaining_seconds=plenty, pause=clock.pause
        )
        assert run.results["PUBLISHED"] >= 300
        assert run.results["POSTPONED"] <= EVENTS_PER_SWEEP + EVENTS_PER_SWEEP // 2

    def test_an_event_that_is_due_further_back_than_the_run_has_got_is_found_in_it(
        self, connect: Connect, database: Database, topic: Topic, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """A transaction of an hour ago commits while a relay polls: the event leaves within a quarter of a minute."""
        connection = connect()
        outbox.write(connection)
        now = 0.0
        monkeypatch.setattr(time, "monotonic", lambda: now)

        def pause(seconds: float) -> None:
            nonlocal now
            now += seconds
            if now == 5:
                outbox.write(connection)
                connection.execute(
                    "UPDATE outbox SET next_attempt_at = now() - interval '1 hour' WHERE published_at IS NULL"
                )

        # From its commit on, the longest that it may take.
        run = relay.run(
            database,
            topic,
            budget_seconds=5 + FULL_LOOK_SECONDS + 0.25,
            poll_seconds=0.25,
            remaining_seconds=plenty,
            pause=pause,
        )
        assert run.results == Counter(PUBLISHED=2)

    def test_it_recovers_with_the_broker(
        self, connect: Connect, database: Database, topic: Topic, broker: Broker, clock: Clock
    ) -> None:
        """Within the same run the backlog leaves as soon as it is due, and polling has its usual pace again."""
        connection = connect()
        outbox.write(connection, count=EVENTS_PER_SWEEP)
        broker.stop()

        def pause(seconds: float) -> None:
            clock.pause(seconds)
            if len(clock.pauses) == 3:
                broker.start()

        run = relay.run(database, topic, budget_seconds=60, poll_seconds=0.25, remaining_seconds=plenty, pause=pause)
        assert run.results["PUBLISHED"] == EVENTS_PER_SWEEP
        assert clock.pauses[-1] == 0.25

    def test_a_poison_event_delays_nobody(
        self, connect: Connect, database: Database, topic: Topic, broker: Broker, clock: Clock
    ) -> None:
        """The one at the head is refused again and again; everything behind it leaves in the first sweeps."""
        connection = connect()
        poison, *others = outbox.write(connection, count=2 * EVENTS_PER_SWEEP)
        broker.faults.refused = {poison: Refusal("KMSDisabled", sender_fault=True)}
        run = relay.run(
            database, topic, budget_seconds=0, poll_seconds=0.25, remaining_seconds=plenty, pause=clock.pause
        )
        assert run.results["PUBLISHED"] == len(others)
        assert (outbox.row(connection, poison).is_published, outbox.row(connection, poison).is_failed) == (False, False)

    def test_it_goes_on_after_the_database_has_restarted(
        self, connect: Connect, database: Database, topic: Topic, clock: Clock
    ) -> None:
        """A session that ends between two polls is replaced, and the next event leaves in the same run."""
        connection = connect()
        outbox.write(connection)

        def pause(seconds: float) -> None:
            clock.pause(seconds)
            if len(clock.pauses) == 2:
                disconnect(connection)
                outbox.write(connection)

        run = relay.run(database, topic, budget_seconds=2, poll_seconds=0.25, remaining_seconds=plenty, pause=pause)
        assert run.results == Counter(PUBLISHED=2)

    def test_it_ends_at_once_where_there_is_no_database(self, database_url: str, topic: Topic) -> None:
        """No loop of errors: the first one ends the run, whose successor comes with the next minute."""
        pauses: list[float] = []
        with deployment.database(psycopg.conninfo.make_conninfo(database_url, port=1)) as nowhere:
            run = relay.run(
                nowhere, topic, budget_seconds=60, poll_seconds=0.25, remaining_seconds=plenty, pause=pauses.append
            )
        assert isinstance(run.error, errors.TemporarilyUnavailable)
        assert (run.claimed, pauses) == (0, [])

    def test_runs_that_overlap_share_the_work(
        self, connect: Connect, database: Database, topic: Topic, broker: Broker, database_url: str
    ) -> None:
        """The scheduler starts two at once: each event is sent once."""
        broker.faults.delivers = False
        ids = outbox.write(connect(), count=5 * EVENTS_PER_SWEEP)
        start = threading.Barrier(2)

        def drain(by: Database) -> relay.Sweep:
            start.wait(10)
            return relay.run(by, topic, budget_seconds=0, poll_seconds=0.25, remaining_seconds=plenty)

        with deployment.database(database_url) as other:
            runs = [relay.Sweep()]
            twin = threading.Thread(target=lambda: runs.append(drain(other)))
            twin.start()
            runs.append(drain(database))
            twin.join()
        assert sum(run.results["PUBLISHED"] for run in runs) == len(ids)
        assert sum(run.lease_lost for run in runs) == 0
        assert sorted(broker.sent) == sorted(ids)


def test_what_is_sent_is_what_was_claimed(connect: Connect, database: Database, topic: Topic, broker: Broker) -> None:
    """An entry's id is its row's, so that the broker's answer finds the row."""
    ids = outbox.write(connect(), count=10)
    relay.run_once(database, topic)
    assert {UUID(message.attributes["outboxId"]) for message in broker.receive()} == set(broker.sent) == set(ids)
