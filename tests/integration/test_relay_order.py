"""The order of an aggregate's events on a FIFO topic, with relays that race, crash and are refused."""

import json
import threading
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from itertools import chain, combinations
from typing import Any
from uuid import UUID, uuid4

import pytest

from charging import outbox, relay, sql
from charging.database import Database
from charging.idempotency import Created
from charging.outbox import LEASE_SECONDS, Completion
from charging.relay import EVENTS_PER_SWEEP
from charging.topic import Topic
from tests.conftest import Connect
from tests.support import deployment, ledger, sns
from tests.support import outbox as table
from tests.support.invocation import RELAY
from tests.support.process import Worker
from tests.support.sns import Broker, Refusal

# Longer than any delay before a next attempt.
DELAY_SECONDS = 60


@pytest.fixture
def database(database_url: str) -> Iterator[Database]:
    """A relay's connection."""
    with deployment.database(database_url) as opened:
        yield opened


@pytest.fixture
def broker(monkeypatch: pytest.MonkeyPatch) -> Iterator[Broker]:
    with sns.serve(monkeypatch, is_ordered=True) as running:
        yield running


@pytest.fixture
def topic(broker: Broker) -> Topic:
    return Topic(broker.topic_arn, max_attempts=3)


def plenty() -> float:
    return 600.0


def drain(database: Database, topic: Topic, *, parked_blocks: bool = True) -> relay.Sweep:
    return relay.run(
        database, topic, budget_seconds=0, poll_seconds=0.25, parked_blocks=parked_blocks, remaining_seconds=plenty
    )


def claim(database: Database, *, parked_blocks: bool = True) -> list[UUID]:
    claimed = outbox.claim_in_order(
        database, limit=EVENTS_PER_SWEEP, lease_seconds=LEASE_SECONDS, parked_blocks=parked_blocks
    )
    return [event.id for event in claimed]


def first_sent(broker: Broker) -> dict[UUID, list[UUID]]:
    """For each group, its events in the order in which they first reached the broker."""
    order: dict[UUID, list[UUID]] = defaultdict(list)
    for entry in chain.from_iterable(broker.calls):
        assert entry.group is not None
        if entry.id not in order[UUID(entry.group)]:
            order[UUID(entry.group)].append(entry.id)
    return order


def test_a_group_is_an_aggregate_and_an_event_is_known_by_its_row(
    connect: Connect, database: Database, topic: Topic, broker: Broker
) -> None:
    """The broker orders by aggregate and drops what it is sent twice; the queue gets the events in their places."""
    ids = table.write_aggregates(connect(), aggregates=1, events=3)
    [(aggregate, events)] = ids.items()
    drain(database, topic)
    assert first_sent(broker) == ids
    entries = list(chain.from_iterable(broker.calls))
    assert [(entry.group, entry.deduplication_id) for entry in entries] == [
        (str(aggregate), str(event_id)) for event_id in events
    ]
    assert [message.attributes["outboxId"] for message in broker.receive()] == [str(event_id) for event_id in events]


def test_only_the_next_event_of_an_aggregate_is_claimed(connect: Connect, database: Database) -> None:
    """Whatever its followers' due time; and while it is leased or waits for its next attempt, none of them is."""
    connection = connect()
    ids = table.write_aggregates(connection, aggregates=5, events=4)
    heads = {events[0] for events in ids.values()}
    assert set(claim(database)) == heads
    assert claim(database) == []
    table.let_pass(connection, seconds=LEASE_SECONDS)
    events = outbox.claim_in_order(database, limit=100, lease_seconds=LEASE_SECONDS, parked_blocks=True)
    assert {event.id for event in events} == heads
    outbox.complete(database, [Completion(event, "POSTPONED") for event in events])
    assert claim(database) == []


def test_relays_that_race_keep_each_aggregates_order(
    connect: Connect, database_url: str, topic: Topic, broker: Broker
) -> None:
    """Four relays, 40 aggregates of 5 events, calls that fail now and then: each aggregate's events in their places."""
    connection = connect()
    broker.faults.delivers = False
    ids = table.write_aggregates(connection, aggregates=40, events=5)
    unlucky = [events[1] for events in ids.values()][:10]
    broker.faults.refused = dict.fromkeys(unlucky, Refusal("InternalError", sender_fault=False))
    start = threading.Barrier(4)

    def work() -> None:
        with deployment.database(database_url) as database:
            start.wait(10)
            drain(database, topic)

    def race() -> None:
        relays = [threading.Thread(target=work) for _ in range(4)]
        for each in relays:
            each.start()
        for each in relays:
            each.join()

    race()
    broker.faults.refused = {}
    while waiting := [row for row in table.rows(connection) if not row.is_published]:
        table.let_pass(connection, seconds=DELAY_SECONDS)
        before = len(waiting)
        race()
        assert sum(not row.is_published for row in table.rows(connection)) < before
    assert first_sent(broker) == ids
    # What was refused inside its call is sent again, and nothing else.
    assert {event_id for event_id, times in Counter(broker.sent).items() if times > 1} <= set(unlucky)


@dataclass(frozen=True, slots=True)
class Refunded:
    """A refund, and when its caller asked for it and knew of it."""

    id: UUID
    began: float
    ended: float


def refund_each(caller: Database, charges: list[UUID]) -> list[Refunded]:
    """Refunds a little of each charge, one after another."""
    made = []
    for charge_id in charges:
        began = time.monotonic()
        outcome = ledger.refund(caller, uuid4(), charge_id, 7)
        assert isinstance(outcome, Created)
        made.append(Refunded(UUID(json.loads(outcome.response.body)["id"]), began, time.monotonic()))
    return made


def test_refunds_follow_their_charge_in_the_order_in_which_they_were_made(
    connect: Connect, database_url: str, broker: Broker
) -> None:
    """Four callers refund six charges while three relays run, of which one after another is killed and replaced: each
    charge's own event leaves first, and no refund's before that of one that had been answered before it began."""
    connection = connect()
    broker.faults.delivers = False
    with ExitStack() as opened:

        def relay() -> Worker:
            return opened.enter_context(Worker("relay", database_url, RELAY | broker.variables))

        relays = [relay() for _ in range(3)]
        callers = [opened.enter_context(deployment.database(database_url)) for _ in range(4)]
        threads = opened.enter_context(ThreadPoolExecutor(4))
        charges = [ledger.charged(callers[0]) for _ in range(6)]
        made: list[Refunded] = []
        for _ in range(3):
            doomed, reached = relays.pop(0), len(broker.calls)
            for each in (doomed, *relays):
                each.begin()
            refunding = [threads.submit(refund_each, caller, charges * 2) for caller in callers]
            ledger.until(lambda: len(broker.calls) > reached)  # noqa: B023
            doomed.kill()
            assert all(each.summary() for each in relays)
            made += chain.from_iterable(under_way.result() for under_way in refunding)
            table.let_pass(connection, seconds=LEASE_SECONDS)
            relays.append(relay())
        for each in relays:
            each.begin()
        assert all(each.summary() for each in relays)
    assert all(row.is_published for row in table.rows(connection))
    assert_order_of_refunds(connection, first_sent(broker), charges, {refunded.id: refunded for refunded in made})


def assert_order_of_refunds(
    connection: table.Connection, sent: dict[UUID, list[UUID]], charges: list[UUID], made: dict[UUID, Refunded]
) -> None:
    """Each charge's event before its refunds', and of two refunds that did not overlap the earlier one's first."""
    rows = connection.execute("SELECT id, payload FROM outbox").fetchall()
    events = {event_id: json.loads(payload) for event_id, payload in rows}
    assert sent.keys() == set(charges)
    for charge_id, ids in sent.items():
        first, *others = [events[event_id] for event_id in ids]
        assert (first["type"], first["data"]["chargeId"]) == ("ChargeCreated", str(charge_id))
        assert {event["type"] for event in others} == {"ChargeRefunded"}
        refunds = [made[UUID(event["data"]["refundId"])] for event in others]
        assert len(refunds) == len(set(refunds)) == 24
        assert all(later.ended > earlier.began for earlier, later in combinations(refunds, 2))


@pytest.mark.parametrize("parked_blocks", [True, False])
def test_a_parked_event_blocks_its_aggregate_or_is_passed_over(
    parked_blocks: bool, connect: Connect, database: Database, topic: Topic, broker: Broker
) -> None:
    """As the operator has chosen; other aggregates go on in either case, and what is redriven goes on from there."""
    connection = connect()
    broker.faults.delivers = False
    ids = table.write_aggregates(connection, aggregates=3, events=3)
    (_, poisoned, last), *others = ids.values()
    broker.faults.refused = {poisoned: Refusal("InvalidParameter", sender_fault=True)}
    drain(database, topic, parked_blocks=parked_blocks)
    assert table.row(connection, poisoned).is_failed
    assert table.row(connection, last).is_published is not parked_blocks
    assert all(row.is_published for row in table.rows(connection, chain.from_iterable(others)))

    broker.faults.refused = {}
    connection.execute("UPDATE outbox SET failed_at = NULL, next_attempt_at = now() WHERE id = %s", [poisoned])
    drain(database, topic, parked_blocks=parked_blocks)
    assert all(row.is_published for row in table.rows(connection))
    if parked_blocks:
        assert first_sent(broker) == ids


def test_the_followers_of_a_parked_event_wait_visibly(connect: Connect, database: Database) -> None:
    """They are pending and grow old, so that the alarm on the age tells of them."""
    connection = connect()
    [events] = table.write_aggregates(connection, aggregates=1, events=3).values()
    connection.execute("UPDATE outbox SET failed_at = now() WHERE id = %s", [events[0]])
    connection.execute("UPDATE outbox SET created_at = now() - interval '1 hour'")
    assert claim(database) == []
    measured = outbox.measure(database)
    assert (measured.pending, measured.failed) == (2, 1)
    assert measured.oldest_age_seconds >= 3600


def test_a_relay_that_dies_leaves_its_aggregates_their_order(connect: Connect, database: Database) -> None:
    """What it held comes back with the lease's end, and until then nothing overtakes it."""
    connection = connect()
    ids = table.write_aggregates(connection, aggregates=3, events=2)
    dead = claim(database)
    assert claim(database) == []
    table.let_pass(connection, seconds=LEASE_SECONDS)
    assert set(claim(database)) == set(dead) == {events[0] for events in ids.values()}


def test_an_aggregate_with_one_event_is_claimed_as_ever(connect: Connect, database: Database) -> None:
    """As many as asked for, those that have been due longest first."""
    connection = connect()
    ids = table.write(connection, count=20)
    connection.execute(
        "UPDATE outbox SET next_attempt_at = next_attempt_at - interval '1 hour' WHERE id = %s", [ids[7]]
    )
    events = outbox.claim_in_order(database, limit=5, lease_seconds=LEASE_SECONDS, parked_blocks=True)
    assert len(events) == 5
    assert ids[7] in [event.id for event in events]


def test_it_uses_the_partial_index_and_the_places(connect: Connect) -> None:
    """However long the history, it reads due rows and the places of their aggregates, and never the table."""
    connection = connect()
    connection.execute(
        """
        INSERT INTO outbox (id, event_type, aggregate_id, payload, published_at)
        SELECT gen_random_uuid(), 'ChargeCreated', gen_random_uuid(), '{}', now() FROM generate_series(1, 50000)
        """
    )
    table.write_aggregates(connection, aggregates=200, events=3)
    connection.execute("ANALYZE outbox")
    plan = "\n".join(
        row[0]
        for row in connection.execute(
            b"EXPLAIN " + sql.CLAIM_EVENTS_IN_ORDER, {"limit": 100, "lease_seconds": 30, "parked_blocks": True}
        )
    )
    assert "Index Scan using outbox_due" in plan
    assert "outbox_places_are_taken_once" in plan
    assert "Seq Scan" not in plan


def test_a_long_history_of_one_aggregate_costs_its_backlog_nothing(connect: Connect, database: Database) -> None:
    """2,000 events that wait behind 20,000 published ones are no reason to read those again and again.

    From the earliest on, each of them would read the whole history: minutes, of the five seconds that the server gives
    the claim, and no aggregate's events would leave any more.
    """
    connection = connect()
    connection.execute(
        """
        INSERT INTO outbox (id, event_type, aggregate_id, payload, sequence, published_at)
        SELECT gen_random_uuid(), 'ChargeCreated', aggregate_id, '{}', n, CASE WHEN n <= 20000 THEN now() END
        FROM generate_series(1, 22000) AS n, (SELECT gen_random_uuid() AS aggregate_id) AS one
        """
    )
    connection.execute("ANALYZE outbox")
    parameters = {"limit": 100, "lease_seconds": LEASE_SECONDS, "parked_blocks": True}
    with connection.transaction(force_rollback=True):
        [plan] = (
            connection.execute(b"EXPLAIN (ANALYZE, FORMAT JSON) " + sql.CLAIM_EVENTS_IN_ORDER, parameters).fetchone()
            or []
        )
    assert history_read(plan[0]["Plan"]) < 2 * 20_000
    assert len(claim(database)) == 1


def history_read(node: dict[str, Any]) -> float:
    """How many rows the plan's nodes read and threw away."""
    own = node.get("Rows Removed by Filter", 0) * node.get("Actual Loops", 0)
    return float(own + sum(map(history_read, node.get("Plans", []))))
