"""Faults: whatever breaks between the function and its database, a caller who retries ends with exactly one charge.

The crash matrix (test_charge_crashes) has each fault at each step of a charge; here is what lies beside it.
"""

import itertools
import random
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from uuid import UUID, uuid4

import pytest

from charging import errors
from charging.database import Database
from charging.idempotency import Created, InFlight, Replayed
from charging.migrations import LIMITS
from tests.conftest import Connect
from tests.support.invocation import CHARGES, Answer, Instance, charge_event, set_limit
from tests.support.ledger import (
    NOTHING,
    ONCE,
    PATIENCE_SECONDS,
    Connection,
    Twin,
    charge,
    counts,
    holding_up,
    settings,
    until,
    until_blocked,
)
from tests.support.process import Process
from tests.support.wire import Judge, Message, Sender, Verdict, Wire, cut_before, lose_answer, silent

KEY = UUID("8e03978e-40d5-43e8-bc93-6894a57f9324")

# The function's own backends, apart from those of the test.
OURS = "FROM pg_stat_activity WHERE datname = current_database() AND application_name = 'charging'"


@pytest.fixture
def function(wire: Wire) -> Iterator[Instance]:
    """An instance that has not been called yet."""
    instance = Instance("charges", wire.url, CHARGES)
    yield instance
    instance.close()


@pytest.fixture
def warm(function: Instance, database: Connection, wire: Wire) -> Instance:
    """An instance whose connection is open and whose statement is prepared; nothing is charged yet."""
    function.call(charge_event(KEY))
    database.execute("TRUNCATE charges, refunds, outbox, idempotency_keys")
    wire.messages.clear()
    return function


def end_backends(database: Connection) -> int:
    return len(database.execute(f"SELECT pg_terminate_backend(pid) {OURS}").fetchall())


def until_ended(database: Connection) -> None:
    """Returns once the function has no backend left."""
    until(lambda: database.execute(f"SELECT count(*) {OURS}").fetchone() == (0,))


def assert_created(answer: Answer) -> None:
    assert (answer.status, answer.is_replay) == (201, False), answer


def assert_unavailable(answer: Answer, code: str) -> None:
    assert (answer.status, answer.code, answer.json["retrySameKey"]) == (503, code, True), answer
    assert int(answer.headers["retry-after"]) >= 1


# ---- the connection ends between calls ------------------------------------------------------------------------------


def test_a_connection_that_was_ended_between_calls_is_replaced(
    warm: Instance, database: Connection, wire: Wire
) -> None:
    """The caller does not notice: created, once, over a second connection."""
    assert end_backends(database) == 1
    until_ended(database)
    assert_created(warm.call(charge_event(KEY)))
    assert counts(database) == ONCE
    assert wire.connections == 2


def test_a_connection_that_ends_as_the_call_begins_is_replaced(warm: Instance, database: Connection) -> None:
    """Whether the end arrives before the statement or after it, each key is charged once."""
    rounds = 30
    for _ in range(rounds):
        end_backends(database)
        assert_created(warm.call(charge_event()))
    assert counts(database) == (rounds, rounds, rounds)


def test_a_replay_survives_the_loss_of_the_connection(warm: Instance, database: Connection) -> None:
    """A replay stays a replay."""
    first = warm.call(charge_event(KEY))
    end_backends(database)
    until_ended(database)
    again = warm.call(charge_event(KEY))
    assert (again.is_replay, again.body) == (True, first.body)
    assert counts(database) == ONCE


# ---- the connection ends during the statement -----------------------------------------------------------------------


def test_a_row_is_no_charge_before_its_commit(
    database_url: str, wire: Wire, database: Connection, connect: Connect
) -> None:
    """A caller who waited for a twin is charged with two statements in one round trip. The server ends the connection
    when the second one has given its row out and is not committed: that row is not believed, and the charge is made
    anew."""
    patient = Instance("charges", wire.url, {**CHARGES, "IN_FLIGHT_WAIT_MS": "4000"})
    with ThreadPoolExecutor(1) as caller, holding_up(connect(), at_commit=True):
        twin = Twin(database_url, KEY)
        call = caller.submit(patient.call, charge_event(KEY))
        until_blocked(database)
        twin.roll_back()
        until(lambda: database.execute(f"SELECT query LIKE 'WITH%stored%' {OURS}").fetchall() == [(True,)])
        until_blocked(database)
        assert end_backends(database) == 1
        until_blocked(database)
    answer = call.result()
    assert_created(answer)
    assert database.execute("SELECT id::text FROM charges").fetchall() == [(answer.json["id"],)]
    assert counts(database) == ONCE
    assert wire.connections == 2
    patient.close()


@pytest.mark.parametrize("kind", ["B", "E", "S"])
def test_a_statement_that_never_arrived_is_sent_again(
    warm: Instance, wire: Wire, database: Connection, kind: str
) -> None:
    """The connection is reset before or within the statement: nothing is committed by it, and the next run creates."""
    wire.judge = cut_before(kind)
    assert_created(warm.call(charge_event(KEY)))
    assert counts(database) == ONCE
    assert wire.connections == 2


@pytest.mark.parametrize("kind", ["", "p", "P", "S", "B"])
def test_a_connection_that_breaks_while_it_is_opened_ends_in_a_charge_or_in_503(
    function: Instance, wire: Wire, database: Connection, kind: str
) -> None:
    """At start-up, at the password and before the first statement: one charge or none, as the answer says."""
    wire.judge = cut_before(kind)
    answer = function.call(charge_event(KEY))
    if answer.status != 201:
        assert_unavailable(answer, "temporarily_unavailable")
        assert counts(database) == NOTHING
        assert_created(function.call(charge_event(KEY)))
    assert counts(database) == ONCE


def test_the_first_charge_of_an_instance_is_found_when_its_confirmation_was_lost(
    function: Instance, wire: Wire, database: Connection, api: Instance
) -> None:
    """The commit stood, its answer did not arrive: the same call finds its own charge, 201 and no replay."""
    wire.judge = lose_answer(after="B")
    answer = function.call(charge_event(KEY))
    assert_created(answer)
    assert wire.connections == 2
    assert counts(database) == ONCE
    replay = api.call(charge_event(KEY))
    assert (replay.is_replay, replay.body) == (True, answer.body)
    assert counts(database) == ONCE


def test_a_fault_after_a_lost_confirmation_denies_nothing(
    function: Instance, wire: Wire, database: Connection, api: Instance
) -> None:
    """The commit stood, and the second look cannot be taken: the caller is not told that nothing was charged."""
    lose = lose_answer(after="B")

    def judge(message: Message) -> Verdict:
        verdict = lose(message)
        if verdict is Verdict.CUT:
            database.execute("ALTER TABLE charges RENAME TO elsewhere")
        return verdict

    wire.judge = judge
    answer = function.call(charge_event(KEY))
    assert (answer.status, answer.code) == (503, "outcome_unknown")
    database.execute("ALTER TABLE elsewhere RENAME TO charges")
    assert api.call(charge_event(KEY)).is_replay
    assert counts(database) == ONCE


def test_a_takeover_whose_confirmation_was_lost_is_found_too(warm: Instance, wire: Wire, database: Connection) -> None:
    """An expired key that this very call has taken over is not taken over again."""
    warm.call(charge_event(KEY))
    database.execute(
        "UPDATE idempotency_keys SET created_at = now() - interval '2 days', expires_at = now() - interval '1 day'"
    )
    wire.judge = lose_answer(after="B")
    assert_created(warm.call(charge_event(KEY)))
    assert counts(database) == (2, 2, 1)


def test_a_replay_whose_answer_was_lost_is_a_replay(warm: Instance, wire: Wire, database: Connection) -> None:
    """What somebody else committed is not taken for this call's own work."""
    first = warm.call(charge_event(KEY))
    wire.judge = lose_answer(after="B")
    again = warm.call(charge_event(KEY))
    assert (again.is_replay, again.body) == (True, first.body)
    assert counts(database) == ONCE


def test_a_refusal_whose_answer_was_lost_is_a_refusal(warm: Instance, wire: Wire, database: Connection) -> None:
    """The second look compares the commands, too."""
    warm.call(charge_event(KEY))
    wire.judge = lose_answer(after="B")
    assert warm.call(charge_event(KEY, {"amountCents": 1})).status == 422
    assert counts(database) == ONCE


def every_answer_lost() -> Judge:
    """Every connection carries one statement there and nothing back."""
    fresh = lose_answer(after="B")

    def judge(message: Message) -> Verdict:
        nonlocal fresh
        verdict = fresh(message)
        if verdict is Verdict.CUT:
            fresh = lose_answer(after="B")
        return verdict

    return judge


def test_an_outcome_that_cannot_be_learnt_is_said_to_be_unknown(
    warm: Instance, wire: Wire, database: Connection, api: Instance
) -> None:
    """After five lost answers: 503 outcome_unknown. One charge stands, and the retry is given it."""
    wire.judge = every_answer_lost()
    assert_unavailable(warm.call(charge_event(KEY)), "outcome_unknown")
    assert counts(database) == ONCE
    assert api.call(charge_event(KEY)).is_replay
    assert counts(database) == ONCE


# ---- silence --------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("senders", [[Sender.SERVER], [Sender.CLIENT], [Sender.CLIENT, Sender.SERVER]])
def test_a_silent_server_is_waited_for_until_the_deadline(
    warm: Instance, wire: Wire, database: Connection, api: Instance, senders: list[Sender]
) -> None:
    """503 outcome_unknown before Lambda ends the function, whichever way the statement is lost; the retry is 201."""
    wire.judge = silent(senders)
    begun = time.monotonic()
    answer = warm.call(charge_event(KEY), seconds=1.8)
    assert time.monotonic() - begun < 1.8
    assert_unavailable(answer, "outcome_unknown")
    again = api.call(charge_event(KEY))
    assert (again.status, again.is_replay) == (201, Sender.CLIENT not in senders)
    assert counts(database) == ONCE


@pytest.mark.parametrize("seconds", [1.8, 2.4, 3.0])
def test_a_server_that_takes_a_connection_and_says_nothing_is_given_up_in_time(
    function: Instance, wire: Wire, database: Connection, seconds: float
) -> None:
    """503 while the function still has time to say so, and nothing was charged."""
    wire.judge = silent([Sender.SERVER])
    begun = time.monotonic()
    answer = function.call(charge_event(KEY), seconds=seconds)
    assert time.monotonic() - begun < seconds
    assert_unavailable(answer, "temporarily_unavailable")
    assert counts(database) == NOTHING


@pytest.mark.parametrize("seconds", [1.4, 0.5, 0.0, -3.0])
@pytest.mark.parametrize("temperature", ["warm", "cold"])
def test_a_deadline_too_near_opens_nothing(
    temperature: str, request: pytest.FixtureRequest, wire: Wire, database: Connection, seconds: float
) -> None:
    """503 before a connection is opened or a statement sent; no time left is not taken for no limit."""
    instance: Instance = request.getfixturevalue("warm" if temperature == "warm" else "function")
    before = wire.connections
    assert_unavailable(instance.call(charge_event(KEY), seconds=seconds), "temporarily_unavailable")
    assert (wire.connections, wire.messages) == (before, [])
    assert counts(database) == NOTHING
    assert_created(instance.call(charge_event(KEY)))


# ---- no database ----------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("temperature", ["warm", "cold"])
def test_a_database_that_is_down_is_503_at_once(
    temperature: str, request: pytest.FixtureRequest, wire: Wire, database: Connection, api: Instance
) -> None:
    """Refused connections are not waited for, a restart between calls is no unknown outcome, and a retry is created."""
    instance: Instance = request.getfixturevalue("warm" if temperature == "warm" else "function")
    wire.refuse()
    end_backends(database)
    until_ended(database)
    wire.until_told()
    begun = time.monotonic()
    assert_unavailable(instance.call(charge_event(KEY)), "temporarily_unavailable")
    assert time.monotonic() - begun < 1
    assert counts(database) == NOTHING
    assert_created(api.call(charge_event(KEY)))


@pytest.mark.parametrize("setting", ["statement_timeout", "transaction_timeout", "lock_timeout"])
def test_a_limit_of_the_server_is_503(
    function: Instance, database: Connection, connect: Connect, api: Instance, setting: str
) -> None:
    """A statement that the server ends by its own limits has charged nothing; a retry with the same key is created."""
    holder = connect()
    set_limit(database, "charges", setting, "50ms")
    with holder.transaction():
        holder.execute("LOCK TABLE outbox IN SHARE MODE")
        answer = function.call(charge_event(KEY))
    assert answer.status == 503
    assert counts(database) == NOTHING
    set_limit(database, "charges", setting, LIMITS[setting])
    assert_created(api.call(charge_event(KEY)))


def test_a_standby_is_503_and_left(function: Instance, database: Connection, wire: Wire) -> None:
    """A former primary takes no charge; the next call looks for the new one over another connection."""
    name = database.info.dbname
    database.execute(f"ALTER DATABASE {name} SET default_transaction_read_only = on")
    assert_unavailable(function.call(charge_event(KEY)), "temporarily_unavailable")
    database.execute(f"ALTER DATABASE {name} RESET default_transaction_read_only")
    assert_created(function.call(charge_event(KEY)))
    assert counts(database) == ONCE
    assert wire.connections == 2


def test_a_database_without_a_free_connection_is_503(
    database: Connection, function: Instance, connect: Connect
) -> None:
    """The caller is told to come again, and is created when there is room."""
    database.execute(f"ALTER DATABASE {database.info.dbname} CONNECTION LIMIT 1")
    assert_unavailable(function.call(charge_event(KEY)), "temporarily_unavailable")
    database.execute(f"ALTER DATABASE {database.info.dbname} CONNECTION LIMIT -1")
    assert_created(function.call(charge_event(KEY)))
    assert counts(connect()) == ONCE


# ---- the process dies -----------------------------------------------------------------------------------------------


def test_a_process_killed_in_mid_statement_leaves_one_charge_or_none(
    database: Connection, database_url: str, connect: Connect, api: Instance
) -> None:
    """Its statement may still be committed before the server notices: the retries then find it."""
    with Process(database_url) as function:
        function.call(charge_event())
        with holding_up(connect(), at_commit=False):
            function.begin(charge_event(KEY))
            until_blocked(database)
            function.kill()
    answer = until_settled(api, KEY)
    assert answer.status == 201
    assert counts(database) == (2, 2, 2)


def until_settled(instance: Instance, key: UUID) -> Answer:
    """Retries as a client does for as long as it is told to."""
    end = time.monotonic() + PATIENCE_SECONDS
    while (answer := instance.call(charge_event(key))).status in (409, 503):
        assert answer.json["retrySameKey"]
        assert time.monotonic() < end
    return answer


# ---- all of it at once ----------------------------------------------------------------------------------------------


def test_under_constant_failure_each_key_is_charged_once(database_url: str, connect: Connect) -> None:
    """Callers share keys and retry until they know, while backends are ended and connections cut all the time: in the
    end each key has one charge, one event, and one answer that everybody was given."""
    keys = [uuid4() for _ in range(40)]
    chance = random.Random(20261201)  # noqa: S311 - so that a failure can be had again
    frames = itertools.count()

    def judge(message: Message) -> Verdict:
        # Not while a connection is opened: most would never be.
        return Verdict.CUT if message.kind in "BSZ2C" and next(frames) % 97 == 13 else Verdict.PASS

    def client(url: str, order: list[UUID]) -> dict[UUID, str]:
        database = Database(settings(url))
        known: dict[UUID, str] = {}
        while len(known) < len(order):
            for key in order:
                try:
                    outcome = charge(database, key)
                except (errors.TemporarilyUnavailable, errors.OutcomeUnknown):
                    continue
                assert isinstance(outcome, Created | Replayed | InFlight)
                if not isinstance(outcome, InFlight):
                    known[key] = outcome.response.body
        database.close()
        return known

    with Wire(database_url) as wire, ExitStack() as stack:
        wire.judge = judge
        operator = stack.enter_context(connect())
        clients = stack.enter_context(ThreadPoolExecutor(4))
        calls = [clients.submit(client, wire.url, chance.sample(keys, len(keys))) for _ in range(4)]
        ended = 0
        while not all(call.done() for call in calls):
            pids = operator.execute(f"SELECT pid {OURS}").fetchall()
            if pids and chance.random() < 0.02:
                operator.execute("SELECT pg_terminate_backend(%s)", chance.choice(pids))
                ended += 1
        answers = [call.result() for call in calls]
        assert ended
        assert wire.connections > 4
    assert all(answer == answers[0] for answer in answers)
    assert counts(connect()) == (len(keys),) * 3
    assert len(set(answers[0].values())) == len(keys)
