"""Refunds that meet: together never more than the charge, each once for its key, events in the order of commits."""

import os
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from uuid import UUID, uuid4

import pytest
from hypothesis import HealthCheck, given
from hypothesis import settings as examples
from hypothesis import strategies as st

from charging.database import Database
from charging.idempotency import Created, InFlight, KeyReused, Outcome, Refused, Replayed
from tests.conftest import Connect
from tests.support.ledger import Connection, charged, race, refund, until_blocked, warm_callers

# Each round is one more race. The default takes seconds; a thousand is for a night.
ROUNDS = int(os.environ.get("RACE_ROUNDS", "20"))
CALLERS = 8


@pytest.fixture
def callers(database_url: str) -> Iterator[list[Database]]:
    """Callers with a connection each, open and warm."""
    with warm_callers(database_url, CALLERS, uuid4()) as databases:
        yield databases


def assert_adds_up(connection: Connection, charge_id: UUID) -> None:
    """The charge's own count is that of its refunds, each of which has a stored answer and an event in its place."""
    refunded = connection.execute(
        "SELECT refunded_cents, refunds FROM charges WHERE id = %s AND refunded_cents <= amount_cents", [charge_id]
    ).fetchone()
    rows = connection.execute(
        """
        SELECT coalesce(sum(refunds.amount_cents), 0)::bigint, count(*)
        FROM refunds
        JOIN outbox ON outbox.aggregate_id = charge_id AND outbox.sequence = number + 1
        JOIN idempotency_keys AS stored
            ON stored.response_status = 201 AND stored.response_body::jsonb ->> 'id' = refunds.id::text
        WHERE charge_id = %s AND payload::jsonb #>> '{data,refundId}' = refunds.id::text
        """,
        [charge_id],
    ).fetchone()
    assert rows == refunded
    times = connection.execute(
        "SELECT payload::jsonb ->> 'time' FROM outbox WHERE aggregate_id = %s ORDER BY sequence", [charge_id]
    ).fetchall()
    assert times == sorted(times)
    assert (
        connection.execute("SELECT count(*), max(sequence) FROM outbox WHERE aggregate_id = %s", [charge_id]).fetchone()
        == ((refunded or (0, 0))[1] + 1,) * 2
    )


def test_of_two_refunds_that_do_not_fit_together_one_wins(callers: list[Database], connect: Connect) -> None:
    """Sixty per cent each, under two keys, at once: one is made, the other one refused, in every round."""
    connection = connect()
    for _ in range(ROUNDS):
        charge_id, keys = charged(callers[0]), [uuid4(), uuid4()]
        outcomes = race(callers[:2], lambda number, database: refund(database, keys[number], charge_id, 600))  # noqa: B023
        assert Counter(type(outcome) for outcome in outcomes) == {Created: 1, Refused: 1}
        assert_adds_up(connection, charge_id)
        again = race(callers[:2], lambda number, database: refund(database, keys[number], charge_id, 600))  # noqa: B023
        assert [type(outcome) for outcome in again] == [Replayed, Replayed]
        assert [outcome.response for outcome in again] == [outcome.response for outcome in outcomes]  # type: ignore[union-attr]


def test_of_many_refunds_as_many_are_made_as_fit(callers: list[Database], connect: Connect) -> None:
    """Eight callers, three hundred each of a thousand: three are made and five refused, each with its place."""
    connection = connect()
    for _ in range(ROUNDS):
        charge_id = charged(callers[0])
        outcomes = race(callers, lambda _, database: refund(database, uuid4(), charge_id, 300))  # noqa: B023
        assert Counter(type(outcome) for outcome in outcomes) == {Created: 3, Refused: 5}
        assert_adds_up(connection, charge_id)


def test_of_many_callers_on_one_key_one_refunds(callers: list[Database], connect: Connect) -> None:
    """The others are told 409 or given the winner's own answer, whether that was a refund or a refusal."""
    connection = connect()
    for number in range(ROUNDS):
        charge_id, key, cents = charged(callers[0]), uuid4(), 600 if number % 2 else 1001
        outcomes = race(callers, lambda _, database: refund(database, key, charge_id, cents))  # noqa: B023
        told = Counter(type(outcome) for outcome in outcomes)
        assert told[Created] + told[Refused] == 1, told
        assert told.keys() <= {Created, Refused, InFlight, Replayed}
        assert told[Created] == number % 2
        assert_adds_up(connection, charge_id)


def test_a_refund_waits_for_the_one_before_it(callers: list[Database], connect: Connect) -> None:
    """One that is made and not committed is neither overlooked nor counted before its end."""
    connection = connect()
    for ends_well, expected in ((True, Refused), (False, Created)):
        charge_id = charged(callers[0])
        holder = connect()
        holder.execute("BEGIN")
        holder.execute("UPDATE charges SET refunded_cents = 600, refunds = 1 WHERE id = %s", [charge_id])
        with ThreadPoolExecutor(1) as thread:
            waiting = thread.submit(refund, callers[0], uuid4(), charge_id, 600)
            until_blocked(connection)
            holder.execute("COMMIT" if ends_well else "ROLLBACK")
            assert isinstance(waiting.result(), expected)


def test_the_same_body_for_another_charge_is_another_command(callers: list[Database]) -> None:
    """A key is the operation's and not the charge's: used for a second charge it refunds nothing."""
    [database, *_] = callers
    key, first, second = uuid4(), charged(database), charged(database)
    assert isinstance(refund(database, key, first, 100), Created)
    assert isinstance(refund(database, key, second, 100), KeyReused)
    assert isinstance(refund(database, key, first, 100), Replayed)


@given(amounts=st.lists(st.integers(1, 700), min_size=1, max_size=8), repeated=st.lists(st.integers(0, 7), max_size=6))
@examples(max_examples=30, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_refunds_one_after_another_come_to_what_was_left(
    callers: list[Database], connect: Connect, amounts: list[int], repeated: list[int]
) -> None:
    """Each is made exactly when it still fits, and a repetition, however much later, is given its own first answer."""
    [database, *_] = callers
    charge_id, left = charged(database), 1000
    calls = [(uuid4(), cents) for cents in amounts]
    first: list[Outcome] = []
    for key, cents in calls:
        outcome = refund(database, key, charge_id, cents)
        assert type(outcome) is (Created if cents <= left else Refused)
        left -= cents if cents <= left else 0
        first.append(outcome)
    for index in repeated:
        number = index % len(calls)
        again, before = refund(database, calls[number][0], charge_id, calls[number][1]), first[number]
        assert isinstance(again, Replayed)
        assert isinstance(before, Created | Refused)
        assert again.response == before.response
    with connect() as connection:
        assert_adds_up(connection, charge_id)
        assert connection.execute("SELECT refunded_cents FROM charges WHERE id = %s", [charge_id]).fetchone() == (
            1000 - left,
        )
