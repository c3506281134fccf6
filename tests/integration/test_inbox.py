"""The inbox: of all deliveries of an event to a consumer, one takes effect."""

import threading
from concurrent.futures import ThreadPoolExecutor
from uuid import uuid4

import pytest

from charging import inbox
from tests.conftest import Connect
from tests.support import outbox
from tests.support.ledger import until_blocked

SECONDS = 10.0


def deliver(connection: outbox.Connection, consumer: str, event_id: object) -> bool:
    with connection.transaction():
        return inbox.is_first_delivery(connection, consumer, event_id)  # type: ignore[arg-type]


def test_a_delivery_is_the_first_once(connect: Connect) -> None:
    """However often the event comes after it has been noted."""
    connection, event_id = connect(), uuid4()
    assert [deliver(connection, "totals", event_id) for _ in range(3)] == [True, False, False]


def test_each_consumer_has_its_own_first_delivery(connect: Connect) -> None:
    """What one has seen is still new to another."""
    connection, event_id = connect(), uuid4()
    assert [deliver(connection, consumer, event_id) for consumer in ("totals", "ledger", "totals")] == [
        True,
        True,
        False,
    ]


def test_an_event_whose_effects_were_undone_is_new_again(connect: Connect) -> None:
    """The note is part of the transaction that applies the event."""
    connection, event_id = connect(), uuid4()
    with connection.transaction(force_rollback=True):
        assert inbox.is_first_delivery(connection, "totals", event_id)
    assert deliver(connection, "totals", event_id)


@pytest.mark.parametrize(("first_is_kept", "second_is_first"), [(True, False), (False, True)])
def test_a_delivery_that_races_another_waits_for_its_end(
    first_is_kept: bool, second_is_first: bool, connect: Connect
) -> None:
    """It is a repetition if the other commits, and takes its place if the other is rolled back."""
    one, two, observer, event_id = connect(), connect(), connect(), uuid4()
    with ThreadPoolExecutor(1) as other:
        with one.transaction(force_rollback=not first_is_kept):
            assert inbox.is_first_delivery(one, "totals", event_id)
            second = other.submit(deliver, two, "totals", event_id)
            until_blocked(observer)
        assert second.result(SECONDS) is second_is_first


def test_of_many_deliveries_at_once_one_is_the_first(connect: Connect) -> None:
    """Eight sessions, twenty events, each delivered to all of them at the same moment."""
    connections = [connect() for _ in range(8)]
    events = [uuid4() for _ in range(20)]
    start = threading.Barrier(len(connections))

    def consume(connection: outbox.Connection) -> int:
        firsts = 0
        for event_id in events:
            start.wait(SECONDS)
            firsts += deliver(connection, "totals", event_id)
        return firsts

    with ThreadPoolExecutor(len(connections)) as consumers:
        assert sum(consumers.map(consume, connections)) == len(events)
