"""One command, a charge, its event, its replay: the deployed template, over HTTP to SQS, on this machine."""

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from uuid import uuid4

import pytest

from tests.support.stack import STOP_SECONDS, Stack, processes, running, wait_until_gone

# One worker runs them all: two stacks at once would take more than twice as long on two cores.
pytestmark = pytest.mark.xdist_group("local stack")

# What the service promises on a quiet machine, over the emulator that adds a little.
EVENT_SECONDS = 2.0


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with running(tmp_path_factory.mktemp("stack")) as stack:
        yield stack


def test_a_charge_is_taken_and_its_event_arrives(stack: Stack) -> None:
    """201 with where it is; within two seconds its event is in the queue, as it was written."""
    answer = stack.charge(uuid4())
    assert answer.status == 201
    charge = answer.headers["Location"].removeprefix("/charges/")
    event = stack.event(charge, EVENT_SECONDS)
    assert event is not None
    assert event["type"] == "ChargeCreated"
    assert event["data"]["amountCents"] == 4900


def test_a_repeated_charge_is_answered_as_the_first(stack: Stack) -> None:
    """The same status, body and place, marked as a replay, and one charge; 422 for another amount."""
    key = uuid4()
    first, second = stack.charge(key, 1200), stack.charge(key, 1200)
    assert (second.status, second.body) == (first.status, first.body)
    for name in ("Location", "Content-Type"):
        assert second.headers[name] == first.headers[name]
    assert "Idempotent-Replayed" not in first.headers
    assert second.headers["Idempotent-Replayed"] == "true"
    assert stack.charge(key, 1300).status == 422
    assert stack.query("SELECT count(*) FROM charges WHERE amount_cents = 1200") == [(1,)]
    assert stack.query("SELECT count(*) FROM charges WHERE amount_cents = 1300") == [(0,)]


def test_the_subscriber_counts_each_charge_once(stack: Stack) -> None:
    """The projection is of the caller alone, whom the local header names; another's use of a key is another charge."""
    key = uuid4()
    assert stack.charge(key, 70, principal="ada").status == 201
    assert stack.charge(key, 70, principal="ada").headers["Idempotent-Replayed"] == "true"
    other = stack.charge(key, 80, principal="grace")
    assert other.status == 201
    assert "Idempotent-Replayed" not in other.headers
    deadline = time.monotonic() + STOP_SECONDS
    totals = "SELECT principal, charges, amount_cents FROM charge_totals WHERE principal <> 'local' ORDER BY principal"
    while (counted := stack.query(totals)) != [("ada", 1, 70), ("grace", 1, 80)]:
        assert time.monotonic() < deadline, f"the projection is {counted}"
        stack.query("SELECT pg_sleep(0.1)")  # the subscriber is starting, on the same processors


def test_nothing_outlives_a_killed_run(stack: Stack) -> None:
    """SIGKILL leaves no process either. The stack that the tests above share is gone after it."""
    assert len(processes(stack.folder)) > 2
    stack.process.kill()
    wait_until_gone(stack.folder)


def test_it_stops_when_told_and_keeps_what_it_took(tmp_path: Path) -> None:
    """SIGTERM, even twice: exit status 0, no process, no file that says it is up. The next start has the charge.

    A child that dies ends the run: status 1, and what happened.
    """
    folder = tmp_path / "a new folder"
    with running(folder) as first:
        key = uuid4()
        answer = first.charge(key)
        first.process.terminate()
        first.process.send_signal(signal.SIGINT)
        assert first.process.wait(STOP_SECONDS) == 0
        assert not (folder / "env").exists()
        assert processes(folder) == {}
    with running(folder) as second:
        repeated = second.charge(key)
        assert (repeated.status, repeated.body) == (answer.status, answer.body)
        assert repeated.headers["Idempotent-Replayed"] == "true"
        emulator = next(pid for pid, line in processes(folder).items() if "ministack" in line and "guard" not in line)
        os.kill(emulator, signal.SIGKILL)
        assert second.process.wait(STOP_SECONDS) == 1
        assert second.process.stdout is not None
        assert "The emulated AWS has ended unexpectedly" in second.process.stdout.read()
        assert processes(folder) == {}
