"""Races: however many callers meet on a key, one charges, and every other is told the truth."""

import os
import threading
from collections import Counter
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from uuid import UUID, uuid4

import psycopg
import pytest

from charging.database import Database
from charging.idempotency import Created, InFlight, KeyReused, Outcome, Replayed
from tests.conftest import Connect
from tests.support.invocation import CHARGES, Answer, Instance, call_together, charge_event, set_limit
from tests.support.ledger import (
    NOTHING,
    ONCE,
    Connection,
    Twin,
    charge,
    counts,
    race,
    stored_by_hand,
    until_blocked,
    warm_callers,
)
from tests.support.wire import Message, Sender, Verdict, Wire

KEY = UUID("8e03978e-40d5-43e8-bc93-6894a57f9324")
CALLERS = 50
# Each round is one more race. The default takes seconds; a thousand is for a night.
ROUNDS = int(os.environ.get("RACE_ROUNDS", "20"))


@pytest.fixture
def callers(database_url: str) -> Iterator[list[Database]]:
    """Callers with a connection each, open and warm."""
    with warm_callers(database_url, CALLERS, KEY) as databases:
        yield databases


def of_alice(connection: Connection) -> dict[UUID, int]:
    """How many charges each of alice's keys has led to, by the stored answer and by the rows."""
    rows = connection.execute(
        "SELECT k.key, count(c.id) FROM idempotency_keys AS k "
        "LEFT JOIN charges AS c ON c.id = (k.response_body::jsonb ->> 'id')::uuid "
        "LEFT JOIN outbox AS o ON o.aggregate_id = c.id "
        "WHERE k.principal = 'alice' GROUP BY k.key"
    ).fetchall()
    return dict(rows)


def bodies(outcomes: Sequence[Outcome]) -> set[str]:
    return {outcome.response.body for outcome in outcomes if isinstance(outcome, Created | Replayed)}


def test_of_fifty_callers_on_a_new_key_one_creates(callers: list[Database], connect: Connect) -> None:
    """The others are told 409 or given the winner's own answer; there is one charge and one event for each key."""
    keys = [uuid4() for _ in range(ROUNDS)]
    for key in keys:
        outcomes = race(callers, lambda _, database, key=key: charge(database, key))  # type: ignore[misc]
        told = Counter(type(outcome) for outcome in outcomes)
        assert told[Created] == 1, told
        assert told.keys() <= {Created, InFlight, Replayed}
        assert len(bodies(outcomes)) == 1
    assert of_alice(connect()) == dict.fromkeys(keys, 1)
    assert counts(connect()) == (ROUNDS + 1,) * 3


def test_of_different_commands_under_a_new_key_one_is_created(callers: list[Database], connect: Connect) -> None:
    """The same command is in flight or replayed, another one is in flight or refused, and nothing is charged twice."""
    keys = [uuid4() for _ in range(ROUNDS)]
    for key in keys:
        outcomes = race(
            callers,
            lambda number, database, key=key: charge(database, key, amount_cents=1 + number % 3),  # type: ignore[misc]
        )
        (winner,) = [number for number, outcome in enumerate(outcomes) if isinstance(outcome, Created)]
        for number, outcome in enumerate(outcomes):
            same = number % 3 == winner % 3
            assert isinstance(outcome, Created | InFlight | (Replayed if same else KeyReused)), (winner, number)
        assert len(bodies(outcomes)) == 1
    assert of_alice(connect()) == dict.fromkeys(keys, 1)
    assert counts(connect()) == (ROUNDS + 1,) * 3


def test_of_fifty_callers_on_an_expired_key_one_takes_it_over(callers: list[Database], connect: Connect) -> None:
    """Nobody is given the expired answer, and each expiry leads to one new charge."""
    operator = connect()
    seen: set[str] = bodies([charge(callers[0], KEY)])
    for number in range(ROUNDS):
        operator.execute(
            "UPDATE idempotency_keys "
            "SET created_at = created_at - interval '2 days', expires_at = expires_at - interval '2 days' "
            "WHERE principal = 'alice'"
        )
        outcomes = race(callers, lambda _, database: charge(database, KEY))
        told = Counter(type(outcome) for outcome in outcomes)
        assert told[Created] == 1, told
        assert told.keys() <= {Created, InFlight, Replayed}
        assert len(bodies(outcomes)) == 1
        assert seen.isdisjoint(bodies(outcomes))
        seen |= bodies(outcomes)
        assert counts(operator) == (number + 3, number + 3, 2)


def test_callers_with_keys_of_their_own_do_not_meet(callers: list[Database], connect: Connect) -> None:
    """Fifty new keys at once are fifty charges: no lock is shared between keys."""
    outcomes = race(callers, lambda _, database: charge(database, uuid4()))
    assert {type(outcome) for outcome in outcomes} == {Created}
    assert counts(connect()) == (CALLERS + 1,) * 3


def test_fifty_processes_agree_on_one_charge(database_url: str, connect: Connect) -> None:
    """Functions are processes: through the handler, each key has one 201 that is no replay, and no 5xx."""
    keys = [uuid4() for _ in range(max(ROUNDS // 4, 1))]
    events = [charge_event(principal="warm"), *(charge_event(key) for key in keys)]
    answers = call_together(database_url, [events] * CALLERS)
    for round_ in zip(*answers, strict=True):
        told = Counter((answer.status, answer.is_replay) for answer in round_)
        assert told[201, False] == 1, told
        assert told.keys() <= {(201, False), (201, True), (409, False)}
        assert len({answer.body for answer in round_ if answer.status == 201}) == 1
    assert of_alice(connect()) == dict.fromkeys(keys, 1)


@pytest.mark.parametrize("ending", ["commit", "roll_back"])
def test_patient_callers_end_with_the_holder(
    callers: list[Database], database_url: str, connect: Connect, ending: str
) -> None:
    """All who waited for a holder that commits get its answer; after one that fails, one of them charges for all."""
    patient, observer = callers[:20], connect()
    twin = Twin(database_url, KEY)

    def release() -> None:
        until_blocked(observer, waiting=len(patient))
        getattr(twin, ending)()

    with ThreadPoolExecutor(1) as thread:
        released = thread.submit(release)
        outcomes = race(patient, lambda _, database: charge(database, KEY, wait_seconds=4))
        released.result()
    told = Counter(type(outcome) for outcome in outcomes)
    if ending == "commit":
        assert told == {Replayed: len(patient)}
        assert bodies(outcomes) == {twin.response.body}
    else:
        assert told == {Created: 1, Replayed: len(patient) - 1}
        assert len(bodies(outcomes)) == 1
    assert of_alice(observer) == {KEY: 1}


# ---- what is committed after a statement's snapshot ------------------------------------------------------------------


def stored_and_expired(connection: Connection) -> None:
    """The key, with a response that is a day too old to be replayed."""
    stored_by_hand(connection, KEY)
    connection.execute(
        "UPDATE idempotency_keys SET created_at = now() - interval '2 days', expires_at = now() - interval '1 day' "
        "WHERE key = %s",
        [KEY],
    )


@pytest.fixture
def instance(database_url: str) -> Iterator[tuple[Instance, Wire]]:
    with Wire(database_url) as wire:
        function = Instance("charges", wire.url, CHARGES)
        function.call(charge_event(principal="warm"))
        wire.messages.clear()
        yield function, wire
        function.close()


def runs(wire: Wire) -> int:
    """How many times the claim was sent."""
    return wire.kinds(Sender.CLIENT).count("B")


@pytest.mark.parametrize(("amount", "status"), [(4900, 201), (1, 422)])
def test_a_conflict_committed_after_the_snapshot_is_read_again(
    instance: tuple[Instance, Wire], connect: Connect, amount: int, status: int
) -> None:
    """The statement that met it shows no row: it is neither a charge nor a fault, and the command is compared."""
    function, wire = instance
    holder, observer = connect(), connect()
    with ThreadPoolExecutor(1) as caller:
        with holder.transaction():
            stored_by_hand(holder, KEY)
            call = caller.submit(function.call, charge_event(KEY, {"amountCents": amount}))
            until_blocked(observer)
        answer = call.result()
    assert runs(wire) == 2
    assert answer.status == status
    assert answer.is_replay == (status == 201)
    assert counts(observer) == (1, 1, 2)


def test_a_key_that_is_free_again_after_the_snapshot_is_claimed(
    instance: tuple[Instance, Wire], connect: Connect
) -> None:
    """The holder that the statement waited for failed: it goes on and creates, in the same run."""
    function, wire = instance
    holder, observer = connect(), connect()
    with ThreadPoolExecutor(1) as caller:
        with holder.transaction(force_rollback=True):
            stored_by_hand(holder, KEY)
            call = caller.submit(function.call, charge_event(KEY))
            until_blocked(observer)
        answer = call.result()
    assert runs(wire) == 1
    assert (answer.status, answer.is_replay) == (201, False)
    assert counts(observer) == (2, 2, 2)


def test_a_takeover_lost_after_the_snapshot_is_read_again(instance: tuple[Instance, Wire], connect: Connect) -> None:
    """Another caller took the expired key over meanwhile: its answer is replayed, and nothing else is charged."""
    function, wire = instance
    holder, observer = connect(), connect()
    stored_and_expired(holder)
    with ThreadPoolExecutor(1) as caller:
        with holder.transaction():
            holder.execute(
                "UPDATE idempotency_keys SET expires_at = now() + interval '1 day', response_body = '{\"new\":1}' "
                "WHERE key = %s",
                [KEY],
            )
            call = caller.submit(function.call, charge_event(KEY))
            until_blocked(observer)
        answer = call.result()
    assert runs(wire) == 2
    assert (answer.status, answer.is_replay, answer.body) == (201, True, '{"new":1}')
    assert counts(observer) == (1, 1, 2)


def test_a_conflict_that_is_purged_before_it_is_read_is_claimed(
    instance: tuple[Instance, Wire], connect: Connect
) -> None:
    """The row that was in the way is gone when it is looked for: the claim is made again, and never left out."""
    function, wire = instance
    holder, observer = connect(), connect()
    purged = threading.Event()

    def hold_the_second_run(message: Message) -> Verdict:
        if message.sender is Sender.CLIENT and message.kind == "B" and runs(wire) == 2:
            purged.wait(10)
        return Verdict.PASS

    wire.judge = hold_the_second_run
    with ThreadPoolExecutor(1) as caller:
        with holder.transaction():
            stored_by_hand(holder, KEY)
            call = caller.submit(function.call, charge_event(KEY))
            until_blocked(observer)
        while runs(wire) < 2:
            assert not call.done()
        holder.execute("DELETE FROM idempotency_keys WHERE key = %s", [KEY])
        purged.set()
        answer = call.result()
    assert runs(wire) == 2
    assert (answer.status, answer.is_replay) == (201, False)
    assert counts(observer) == (2, 2, 2)


def test_a_deadlock_is_settled_by_another_run(instance: tuple[Instance, Wire], connect: Connect) -> None:
    """The server undoes the statement in favour of a transaction that wanted its locks the other way round."""
    function, wire = instance
    holder, observer = connect(), connect()
    stored_and_expired(holder)

    def play() -> Answer:
        with ThreadPoolExecutor(1) as caller, holder.transaction():
            holder.execute("SELECT FROM idempotency_keys WHERE key = %s FOR UPDATE", [KEY])
            call = caller.submit(function.call, charge_event(KEY))
            until_blocked(observer)
            # The statement holds the key's advisory lock and waits for the row; this waits the other way round. The
            # statement has waited longer, finds the circle first, and is undone.
            holder.execute(
                "SELECT pg_advisory_xact_lock("
                "hash_record_extended(ROW('alice'::text, 'POST /charges'::text, %s::uuid), 0))",
                [KEY],
            )
            return call.result()

    # Where the machine stands still meanwhile, the circle is closed only after the statement has looked for one, and
    # the other side is undone: the scene is then set again.
    answer: Answer | None = None
    while answer is None:
        try:
            answer = play()
        except psycopg.errors.DeadlockDetected:
            observer.execute("TRUNCATE charges, refunds, outbox, idempotency_keys")
            stored_and_expired(holder)
            wire.messages.clear()
    assert runs(wire) == 2
    assert answer.status == 409  # the other transaction has the key now
    assert counts(observer) == (1, 1, 2)
    assert (function.call(charge_event(KEY)).status, counts(observer)) == (201, (2, 2, 2))


def test_a_serialization_failure_is_settled_by_another_run(database_url: str, connect: Connect) -> None:
    """A database whose default is REPEATABLE READ undoes what lost a race: the next run sees what won it."""
    holder, observer = connect(), connect()
    set_limit(holder, "charges", "default_transaction_isolation", "repeatable read")
    stored_by_hand(holder, KEY)
    expire = "UPDATE idempotency_keys SET created_at = now() - interval '2 days', expires_at = now() - interval '1 day'"
    holder.execute(expire)
    with Wire(database_url) as wire, ThreadPoolExecutor(1) as caller:
        function = Instance("charges", wire.url, CHARGES)
        with holder.transaction():
            holder.execute("UPDATE idempotency_keys SET expires_at = now() + interval '1 day'")
            call = caller.submit(function.call, charge_event(KEY))
            until_blocked(observer)
        answer = call.result()
        assert runs(wire) == 2
        function.close()
    assert (answer.status, answer.is_replay) == (201, True)
    assert counts(observer) == (0, 0, 1)


def test_a_statement_that_is_undone_every_time_ends_in_503(database_url: str, connect: Connect) -> None:
    """Five runs and no more; then nothing is charged, the caller is told so, and the next call creates."""
    holder, observer = connect(), connect()
    set_limit(holder, "charges", "lock_timeout", "50ms")
    with Wire(database_url) as wire:
        function = Instance("charges", wire.url, CHARGES)
        with holder.transaction(force_rollback=True):
            stored_by_hand(holder, KEY)
            answer = function.call(charge_event(KEY))
        assert (answer.status, answer.code) == (503, "temporarily_unavailable")
        assert "retry-after" in answer.headers
        assert runs(wire) == 5
        assert counts(observer) == NOTHING
        assert function.call(charge_event(KEY)).status == 201
        assert counts(observer) == ONCE
        function.close()
