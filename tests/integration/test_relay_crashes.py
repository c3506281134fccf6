"""The relay's crash matrix: each fault at each step of a sweep, with one relay and with four, and the page that tells.

Every cell fills an outbox and lets relays work on it, each in a process of its own. One of them is stopped where it has
come to the step, the others begin, and while they are at work it breaks, for that one alone. When all have ended, and
the leases too, whoever is left takes the rest. What was found has to be what docs/reliability.md says; with
WRITE_RELIABILITY=1 it is written there instead.
"""

import enum
import os
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass, replace
from typing import Any

import pytest

from charging.outbox import LEASE_SECONDS
from charging.relay import EVENTS_PER_SWEEP
from charging.topic import ENTRIES_PER_CALL
from tests.conftest import Connect
from tests.support import outbox, reliability, sns
from tests.support.invocation import RELAY
from tests.support.ledger import PATIENCE_SECONDS, Connection, until
from tests.support.process import Worker
from tests.support.reliability import WRITES
from tests.support.sns import HANG_UP, Answer, Broker, Entry
from tests.support.wire import Message, Sender, Verdict, Wire

# What undisturbed relays send, and what every cell has on the page. Where a cell only has to be as the page says, it is
# smaller by default: the relay that is struck takes 250 of its rows, and the other three share the rest.
ALL_ROWS = 10_000
ROWS = ALL_ROWS if WRITES else int(os.environ.get("RELAY_CRASH_ROWS", "600"))

# A relay begins with one call and doubles. It is stopped in its first sweep that has as much in flight as any can have.
EARLIER_SWEEPS = [ENTRIES_PER_CALL << number for number in range(4)]
assert EARLIER_SWEEPS[-1] < EVENTS_PER_SWEEP <= 2 * EARLIER_SWEEPS[-1]

TABLE = reliability.Table(
    "relay crash matrix", ["what breaks", "when", "relays", "rows", "in flight", "lost", "duplicates"]
)


class Fault(enum.Enum):
    """What breaks. The value is what the page calls it."""

    NONE = "nothing"
    KILLED = "the relay's process is killed"
    ENDED = "the database ends the connection"
    RESET = "the connection to the database is reset"
    CUT = "the connections to SNS are cut"


class Step(enum.Enum):
    """When it breaks."""

    NEVER = "never"
    CLAIM = "before the claim"
    CLAIMED = "after the claim, before the relay hears of it"
    HEARD = "after the claim, before anything is sent"
    SEND = "in the send, before SNS accepts"
    ACCEPTED = "in the send, after SNS has accepted"
    MARK = "before the mark"
    MARKED = "after the mark, before the relay hears of it"


AT_SNS = (Step.HEARD, Step.SEND, Step.ACCEPTED)
CELLS = [
    (fault, step, relays)
    for fault in Fault
    for step in Step
    for relays in (1, 4)
    if (fault is Fault.NONE) == (step is Step.NEVER) and (fault is not Fault.CUT or step in AT_SNS)
]

type Cell = tuple[Fault, Step, int]


# ---- the page -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def found() -> Iterator[dict[Cell, str]]:
    """The rows of this run; written to the page at its end where that is wanted."""
    rows: dict[Cell, str] = {}
    yield rows
    if WRITES:
        TABLE.write(rows[cell] for cell in CELLS)


@pytest.mark.skipif(WRITES, reason="the page is being written")
def test_the_page_has_every_cell_once_and_nothing_else() -> None:
    """A cell that is added, renamed or taken away shows on the page."""
    named = [row.split(" | ")[:3] for row in TABLE.rows()]
    expected = [[f"| {fault.value}", step.value, str(relays)] for fault, step, relays in CELLS]
    assert named == expected, "run `make reliability`"


# ---- the scene ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class State:
    """How many events are leased, how many marked as published, and how many SNS has accepted."""

    leased: int | None
    published: int
    accepted: int

    @property
    def in_flight(self) -> int:
        """How many SNS has accepted that are not marked."""
        return self.accepted - self.published


BEFORE = sum(EARLIER_SWEEPS)
AFTER = BEFORE + EVENTS_PER_SWEEP
STATES = {
    Step.CLAIM: State(0, BEFORE, BEFORE),
    Step.CLAIMED: State(EVENTS_PER_SWEEP, BEFORE, BEFORE),
    # Between a claim and its calls a relay can be seen only once: it asks for the topic's size before its first call.
    Step.HEARD: State(ENTRIES_PER_CALL, 0, 0),
    Step.SEND: State(EVENTS_PER_SWEEP, BEFORE, BEFORE),
    Step.ACCEPTED: State(EVENTS_PER_SWEEP, BEFORE, AFTER),
    Step.MARK: State(EVENTS_PER_SWEEP, BEFORE, AFTER),
    # By then the places of calls that have ended are leased to others, which are held before SNS accepts them.
    Step.MARKED: State(None, AFTER, AFTER),
}


@dataclass(frozen=True, slots=True)
class Scene:
    """An outbox, a topic, and a way between a relay and the outbox that can be spoilt."""

    database: Connection
    broker: Broker
    wire: Wire

    def state(self) -> State:
        row = self.database.execute(
            "SELECT count(*) FILTER (WHERE attempts > 0 AND published_at IS NULL), count(published_at) FROM outbox"
        ).fetchone()
        assert row is not None
        leased, published = row
        return State(leased, published, len(self.broker.accepted))

    def is_at(self, expected: State) -> bool:
        """Whether the state is that one, or any with as many published and accepted where it leaves the leased open."""
        state = self.state()
        return expected in (state, replace(state, leased=None))

    def waits(self) -> bool:
        """Whether an event is neither published nor parked."""
        row = self.database.execute(
            "SELECT count(*) FROM outbox WHERE published_at IS NULL AND failed_at IS NULL"
        ).fetchone()
        return row != (0,)


@pytest.fixture
def scene(database_url: str, connect: Connect, monkeypatch: pytest.MonkeyPatch) -> Iterator[Scene]:
    with sns.serve(monkeypatch) as broker, Wire(database_url) as wire:
        broker.faults.delivers = False
        yield Scene(connect(), broker, wire)


class Halt:
    """Stops the one relay that is at work at a step; `reached` is set when all that it has under way is there.

    Where the step is a message's, the message is lost. Where it is a call's, the call waits.
    """

    def __init__(self, scene: Scene, step: Step) -> None:
        self.reached = threading.Event()
        self._scene = scene
        self._step = step
        self._statements: dict[bytes, bytes] = {}
        self._doing = Step.NEVER
        self._claims = 0
        self._held = 0
        self._one_at_a_time = threading.Lock()
        self._let_go = threading.Event()
        self._answer: Answer | None = None
        scene.wire.judge = self._judge
        match step:
            case Step.HEARD:
                scene.broker.faults.intercept_question = self._hold
            case Step.SEND:
                scene.broker.faults.intercept = self._hold
            case Step.ACCEPTED:
                scene.broker.faults.intercept_answer = self._hold
            case Step.MARKED:
                scene.broker.faults.intercept = self._hold_what_comes_after

    def is_still(self) -> bool:
        """Whether all that was claimed for the places of calls that had ended has come to where it is held."""
        return self._step is not Step.MARKED or self._held - AFTER == self._scene.state().leased

    def let_go(self, answer: Answer | None) -> None:
        """Lets the calls that wait go on, or answers them."""
        self._answer = answer
        self._let_go.set()

    def _judge(self, message: Message) -> Verdict:
        if message.sender is Sender.CLIENT:
            self._learn(message)
            is_there = self._doing is self._step
        elif self._step is Step.CLAIMED:
            is_there = self._doing is Step.CLAIM
        else:
            # Events are marked as their calls end. The last mark of the sweep's first hundred is meant.
            is_there = self._step is Step.MARKED and self._doing is Step.MARK and message.kind == "Z"
            is_there = is_there and self._scene.state().published == AFTER
        if self._claims <= len(EARLIER_SWEEPS) or not is_there:
            return Verdict.PASS
        if message.kind in "SZ":  # the last of a statement, and of its answer
            self.reached.set()
        return Verdict.DROP

    def _learn(self, message: Message) -> None:
        """Tells from a message what the relay is about to do: a statement is parsed once, and bound each time."""
        if message.kind == "P":
            name, statement, _ = message.content.split(b"\0", 2)
            self._statements[name] = statement
        elif message.kind == "B":
            _, name, _ = message.content.split(b"\0", 2)
            is_claim = b"SKIP LOCKED" in self._statements[name]
            self._claims += is_claim
            self._doing = Step.CLAIM if is_claim else Step.MARK

    def _hold(self, entries: list[Entry]) -> Answer | None:
        is_question = self._step is Step.HEARD
        with self._one_at_a_time:
            if self.reached.is_set() or not (is_question or self._claims > len(EARLIER_SWEEPS)):
                return None
            self._held += len(entries)
            if is_question or self._held == EVENTS_PER_SWEEP:
                self.reached.set()
        self._let_go.wait(sns.HOLD_SECONDS)
        return self._answer

    def _hold_what_comes_after(self, entries: list[Entry]) -> Answer | None:
        with self._one_at_a_time:
            self._held += len(entries)
            if self._held <= AFTER:
                return None
        self._let_go.wait(sns.HOLD_SECONDS)
        return self._answer


# ---- the cells ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: f"{cell[0].name}-{cell[1].name}-{cell[2]}".lower())
def test_no_crash_loses_an_event(database_url: str, scene: Scene, found: dict[Cell, str], cell: Cell) -> None:
    """In the end SNS has accepted every event, and none of them twice but for those that were in flight."""
    fault, step, relays = cell
    ids = outbox.fill(scene.database, count=ALL_ROWS if fault is Fault.NONE else ROWS)
    with ExitStack() as running:
        variables = RELAY | scene.broker.variables
        struck = running.enter_context(Worker("relay", scene.wire.url, variables))
        others = [running.enter_context(Worker("relay", database_url, variables)) for _ in range(relays - 1)]
        if fault is Fault.NONE:
            in_flight = 0
            summaries = run(struck, *others)
            assert sum(summary["results"]["PUBLISHED"] for summary in summaries) == len(ids)
            assert {(summary["lease_lost"], summary["unmarked"]) for summary in summaries} == {(0, 0)}
        else:
            in_flight = break_off(scene, fault, step, struck, others)
            heir = running.enter_context(Worker("relay", database_url, variables)) if fault is Fault.KILLED else struck
            while scene.waits():
                outbox.let_pass(scene.database, seconds=LEASE_SECONDS)
                run(heir)

    rows = outbox.rows(scene.database)
    assert {(row.is_published, row.is_failed, row.refusals) for row in rows} == {(True, False, 0)}
    times = Counter(scene.broker.accepted)
    lost, duplicates = len(ids - times.keys()), times.total() - len(times)
    assert lost == 0
    assert duplicates <= in_flight

    found[cell] = reliability.row(fault.value, step.value, relays, f"{ALL_ROWS:,}", in_flight, lost, duplicates)
    if not WRITES:
        assert found[cell] in TABLE.rows(), "if that is meant, run `make reliability`"


def run(*relays: Worker) -> list[Any]:
    """Lets relays run side by side, and returns what each one's run came to."""
    for relay in relays:
        relay.begin()
    return [relay.summary() for relay in relays]


def break_off(scene: Scene, fault: Fault, step: Step, struck: Worker, others: list[Worker]) -> int:
    """Plays one cell until all runs have ended, and returns how many events were in flight when it broke."""
    halt = Halt(scene, step)
    struck.begin()
    assert halt.reached.wait(PATIENCE_SECONDS)
    # Where the step is the mark's, the other calls of the sweep are still on their way.
    until(lambda: scene.is_at(STATES[step]) and halt.is_still())
    scene.broker.faults.intercept = lambda _: None  # the others' calls are not held
    ((backend,),) = scene.database.execute(
        "SELECT pid FROM pg_stat_activity WHERE datname = current_database() AND application_name = 'charging'"
    ).fetchall()
    for other in others:
        other.begin()
    if others:
        until(lambda: len(scene.broker.accepted) > STATES[step].accepted)

    scene.wire.judge = lambda _: Verdict.PASS
    match fault:
        case Fault.KILLED:
            struck.kill()
        case Fault.ENDED:
            scene.database.execute("SELECT pg_terminate_backend(%s, 10000)", [backend])
        case Fault.RESET:
            scene.wire.cut()
    halt.let_go(HANG_UP if fault in (Fault.KILLED, Fault.CUT) else None)

    for relay in others if fault is Fault.KILLED else [struck, *others]:
        relay.summary()
    return STATES[step].in_flight
