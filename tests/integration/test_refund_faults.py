"""Refunds that are held up or cut off, beyond what the crash matrix plays."""

import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from uuid import UUID, uuid4

import psycopg
import pytest
from psycopg.rows import scalar_row

from charging import sql
from charging.api import ANSWER_SECONDS
from charging.database import Database
from charging.idempotency import FIRST_PAUSE_SECONDS, LOCK_SECONDS, Created, Refused
from charging.migrations import LIMITS
from tests.conftest import Connect
from tests.support.invocation import CHARGES, Instance, charge_event, refund_event
from tests.support.ledger import Connection, charged, refund, settings, until_blocked
from tests.support.wire import Message, Verdict, Wire, lose_answer

KEY = UUID("8e03978e-40d5-43e8-bc93-6894a57f9324")


@pytest.fixture
def function(wire: Wire) -> Iterator[Instance]:
    """A warm instance."""
    instance = Instance("charges", wire.url, CHARGES)
    instance.call(charge_event())
    yield instance
    instance.close()


def test_a_lost_confirmation_is_no_replay(function: Instance, wire: Wire, database: Connection) -> None:
    """Of a refusal as of a refund: the call finds what it has itself committed, and its caller is told as if nothing
    had been. The charge is looked at before, and that answer arrives."""
    charge = function.call(charge_event(body={"amountCents": 1000})).headers["location"]

    def judge(message: Message) -> Verdict:
        if message.kind == "Z":
            wire.judge = lose_answer("B")
        return Verdict.PASS

    for cents, status in ((600, 201), (401, 409)):
        connections, event = wire.connections, refund_event(charge, uuid4(), {"amountCents": cents})
        wire.judge = judge
        first = function.call(event)
        again = function.call(event)
        assert wire.connections == connections + 1
        assert (first.status, first.is_replay) == (status, False)
        assert (again.status, again.is_replay, again.body) == (status, True, first.body)
    assert database.execute("SELECT sum(refunded_cents), sum(refunds) FROM charges").fetchone() == (600, 1)


def test_a_charge_that_is_held_too_long_is_503_and_nothing_is_under_way(
    function: Instance, database: Connection, connect: Connect
) -> None:
    """The call ends before its time does, while it can be sure: nothing was refunded, and the server does nothing more.
    The same key refunds once the charge is free."""
    charge = function.call(charge_event(body={"amountCents": 1000})).headers["location"]
    event = refund_event(charge, KEY)
    holder = connect()
    with holder.transaction(force_rollback=True):
        holder.execute("SELECT FROM charges FOR UPDATE")
        answer = function.call(event, seconds=LOCK_SECONDS + 2)
        assert (answer.status, answer.code, answer.json["retrySameKey"]) == (503, "temporarily_unavailable", True)
        assert database.execute("SELECT count(*) FROM pg_locks WHERE NOT granted").fetchone() == (0,)
    assert database.execute("SELECT count(*) FROM refunds").fetchone() == (0,)
    again = function.call(event)
    assert (again.status, again.is_replay) == (201, False)


def test_a_call_waits_for_its_charge_only_as_long_as_it_can_tell_how_that_ends(
    function: Instance, connect: Connect
) -> None:
    """After one wait there is time for another, and none for the pause before: the call ends here, and is certain."""
    charge = function.call(charge_event(body={"amountCents": 1000})).headers["location"]
    holder = connect()
    with holder.transaction(force_rollback=True):
        holder.execute("SELECT FROM charges FOR UPDATE")
        left = ANSWER_SECONDS + 2 * LOCK_SECONDS + 0.75 * FIRST_PAUSE_SECONDS
        answer = function.call(refund_event(charge, KEY), seconds=left)
    assert (answer.status, answer.code) == (503, "temporarily_unavailable")


def test_whoever_has_waited_for_a_twin_waits_for_the_charge_as_long_as_anybody(database_url: str) -> None:
    """The time that a call has for its twin is no time for the lock of another's refund."""
    caller, begun = Database(settings(database_url)), time.monotonic()
    waiting = {"principal": "alice", "endpoint": "POST /charges/{id}/refunds", "key": KEY, "wait_ms": 4000}
    [limit] = caller.fetch_after(
        sql.AWAIT_TWIN, scalar_row, b"SELECT current_setting('lock_timeout')", waiting, deadline=begun + 10
    )
    assert limit == LIMITS["lock_timeout"]
    caller.close()


def test_a_wait_for_a_lock_is_as_long_as_the_server_allows() -> None:
    """What a call reckons with is what the migrations set."""
    assert LIMITS["lock_timeout"] == f"{LOCK_SECONDS:.0f}s"


def test_a_refund_whose_forerunner_dies_takes_its_place(database_url: str, database: Connection) -> None:
    """What a server process had refunded that was killed counts for nothing, and who waited for it is not refused."""
    caller, begun = Database(settings(database_url)), time.monotonic()
    charge_id = charged(caller)
    holder = psycopg.connect(database_url)
    holder.execute("UPDATE charges SET refunded_cents = 600, refunds = 1 WHERE id = %s", [charge_id])
    with ThreadPoolExecutor(1) as thread:
        waiting = thread.submit(refund, caller, KEY, charge_id, 600)
        until_blocked(database)
        database.execute("SELECT pg_terminate_backend(%s, 10000)", [holder.info.backend_pid])
        assert isinstance(waiting.result(), Created)
    assert time.monotonic() - begun < LOCK_SECONDS
    assert isinstance(refund(caller, uuid4(), charge_id, 600), Refused)
    caller.close()
    holder.close()


def test_an_expired_key_and_its_expired_charge_refund_anew(function: Instance, database: Connection) -> None:
    """The key of a charge and that of its refund are over: the one charges anew, the other refunds the charge that it
    names, which is still the first. The new one has had nothing taken off."""
    event = charge_event(KEY, {"amountCents": 1000})
    first = function.call(event).headers["location"]
    function.call(refund_event(first, KEY, {"amountCents": 400}))
    database.execute(
        "UPDATE idempotency_keys "
        "SET created_at = created_at - interval '1 day', expires_at = expires_at - interval '1 day'"
    )
    second = function.call(event)
    again = function.call(refund_event(first, KEY, {"amountCents": 400}))
    assert (second.status, second.is_replay, again.status, again.is_replay) == (201, False, 201, False)
    refunded: dict[str, int] = dict(
        database.execute("SELECT '/charges/' || id, refunded_cents FROM charges").fetchall()
    )
    assert (refunded[first], refunded[second.headers["location"]]) == (800, 0)


def test_the_largest_charge_is_refunded_to_its_last_cent(database_url: str) -> None:
    """At the bound of amounts nothing overflows and nothing is rounded."""
    caller = Database(settings(database_url))
    charge_id = charged(caller, amount_cents=999_999_999_999)
    outcomes = [type(refund(caller, uuid4(), charge_id, cents)) for cents in (999_999_999_998, 2, 1, 1)]
    assert outcomes == [Created, Refused, Created, Refused]
    caller.close()
