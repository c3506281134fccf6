"""The dispatcher's crash matrix: each fault at each step of a delivery, with one dispatcher and with four, and the page
that tells.

Every cell lets dispatchers work, each in a process of its own. One of them fills its slots and is stopped where it has
come to the step; more deliveries are written, the others begin, and while they work it breaks for that one alone.
When all have ended, and the leases too, whoever is left takes the rest. What was found has to be what
docs/reliability.md says; with WRITE_RELIABILITY=1 it is written there instead.
"""

import enum
import os
import threading
from collections import Counter
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass
from socket import socket
from typing import Any

import pytest

from charging.webhooks import LEASE_SECONDS, SLOTS
from tests.conftest import Connect
from tests.support import deliveries as table
from tests.support import reliability
from tests.support.invocation import WEBHOOKS
from tests.support.ledger import PATIENCE_SECONDS, Connection, until
from tests.support.process import Worker
from tests.support.receiver import OK, Receiver, read_request
from tests.support.reliability import WRITES
from tests.support.wire import Message, Sender, Verdict, Wire

# So many endpoints fill the slots evenly.
ENDPOINTS = 16
# What every cell has on the page. By default it is smaller: the dispatcher that is struck has its slots full anyway.
ALL_ROWS = 2_000
ROWS = ALL_ROWS if WRITES else int(os.environ.get("WEBHOOK_CRASH_ROWS", "320"))

TABLE = reliability.Table(
    "dispatcher crash matrix", ["what breaks", "when", "dispatchers", "rows", "in flight", "lost", "duplicates"]
)


class Fault(enum.Enum):
    """What breaks. The value is what the page calls it."""

    NONE = "nothing"
    KILLED = "the dispatcher's process is killed"
    ENDED = "the database ends the connection"
    RESET = "the connection to the database is reset"
    CUT = "the connections to the receivers are cut"


class Step(enum.Enum):
    """When it breaks."""

    NEVER = "never"
    CLAIM = "before the claim"
    CLAIMED = "after the claim, before the dispatcher hears of it"
    SEND = "in the send, before the receivers take it"
    TAKEN = "in the send, after the receivers have taken it"
    MARK = "before the mark"
    MARKED = "after the mark, before the dispatcher hears of it"


AT_RECEIVERS = (Step.SEND, Step.TAKEN)
CELLS = [
    (fault, step, dispatchers)
    for fault in Fault
    for step in Step
    for dispatchers in (1, 4)
    if (fault is Fault.NONE) == (step is Step.NEVER) and (fault is not Fault.CUT or step in AT_RECEIVERS)
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
    expected = [[f"| {fault.value}", step.value, str(dispatchers)] for fault, step, dispatchers in CELLS]
    assert named == expected, "run `make reliability`"


# ---- the scene ------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class State:
    """How many deliveries are leased, how many marked as sent, and how many their receivers have taken."""

    leased: int
    sent: int
    taken: int

    @property
    def in_flight(self) -> int:
        """How many were taken that are not marked."""
        return self.taken - self.sent


STATES = {
    Step.CLAIM: State(0, 0, 0),
    # At first one for each endpoint is claimed.
    Step.CLAIMED: State(ENDPOINTS, 0, 0),
    Step.SEND: State(SLOTS, 0, 0),
    Step.TAKEN: State(SLOTS, 0, SLOTS),
    Step.MARK: State(SLOTS, 0, SLOTS),
    Step.MARKED: State(0, SLOTS, SLOTS),
}


class Receivers:
    """Every endpoint's receiver. It takes the first deliveries, as many as there are slots, and answers them together;
    where the step is its own, not before it is let go."""

    def __init__(self, step: Step) -> None:
        self.taken: list[str] = []
        self.have_all = threading.Event()
        self._step = step
        self._arrived = 0
        self._one_at_a_time = threading.Lock()
        self._let_go = threading.Event()
        self._hang_up = False

    def let_go(self, *, hang_up: bool) -> None:
        """Lets the deliveries that are held be taken and answered, or hangs up on their senders."""
        self._hang_up = hang_up
        self._let_go.set()

    def behave(self, end: socket) -> None:
        """Treats one delivery."""
        [event_id] = read_request(end).values("webhook-id")
        with self._one_at_a_time:
            is_first = self._arrived < SLOTS
            self._arrived += 1
            if not is_first or self._step is not Step.SEND:
                self.taken.append(event_id)
            if self._arrived == SLOTS:
                self.have_all.set()
        if is_first and self._step is not Step.NEVER:
            self.have_all.wait(PATIENCE_SECONDS)
            if self._step in AT_RECEIVERS:
                self._let_go.wait(PATIENCE_SECONDS)
                if self._hang_up:
                    return
                if self._step is Step.SEND:
                    self.taken.append(event_id)
        end.sendall(OK)


@dataclass(frozen=True, slots=True)
class Scene:
    """The deliveries, their receivers, and a way between a dispatcher and the database that can be spoilt."""

    database: Connection
    receivers: Receivers
    wire: Wire

    def write(self, rows: int) -> set[str]:
        """Writes deliveries that are due, as many for each endpoint."""
        endpoints = self.database.execute("SELECT id FROM webhook_endpoints").fetchall()
        return {
            str(event_id)
            for (endpoint,) in endpoints
            for event_id in table.write(self.database, endpoint, count=rows // ENDPOINTS)
        }

    def state(self) -> State:
        row = self.database.execute(
            "SELECT count(*) FILTER (WHERE status = 'CLAIMED'), count(sent_at) FROM outbox_deliveries"
        ).fetchone()
        assert row is not None
        leased, sent = row
        return State(leased, sent, len(self.receivers.taken))

    def waits(self) -> bool:
        """Whether a delivery is neither sent nor given up."""
        return any(row.status not in ("SENT", "FAILED") for row in table.rows(self.database))


class Halt:
    """Stops a dispatcher at a step that is a message's: that one is lost, and all after it. `reached` is set then."""

    def __init__(self, scene: Scene, step: Step) -> None:
        self.reached = threading.Event()
        self._scene = scene
        self._step = step
        self._statements: dict[bytes, bytes] = {}
        self._doing = Step.NEVER
        self._is_there = False

    def judge(self, message: Message) -> Verdict:
        """Tells what becomes of a message."""
        if message.sender is Sender.CLIENT:
            self._learn(message)
            self._is_there = self._is_there or self._doing is self._step
        elif self._step is Step.CLAIMED:
            self._is_there = self._is_there or self._doing is Step.CLAIM
        elif self._step is Step.MARKED and self._doing is Step.MARK and message.content.startswith(b"COMMIT"):
            # Deliveries are marked as they end. The last mark is meant, after whose commit nothing is leased.
            self._is_there = self._scene.state().leased == 0
        by = Sender.SERVER if self._step in (Step.CLAIMED, Step.MARKED) else Sender.CLIENT
        if not self._is_there or message.sender is not by:
            return Verdict.PASS
        if message.kind in "SZ":  # the last of a statement, and of its answer
            self.reached.set()
        return Verdict.DROP

    def _learn(self, message: Message) -> None:
        """Tells from a message what the dispatcher is about to do: a statement is parsed once, and bound each time."""
        if message.kind == "P":
            name, statement, _ = message.content.split(b"\0", 2)
            self._statements[name] = statement
        elif message.kind == "B":
            _, name, _ = message.content.split(b"\0", 2)
            if b"AS busy" in self._statements[name]:
                self._doing = Step.CLAIM
            elif b"completed_before" in self._statements[name]:
                self._doing = Step.MARK


# ---- the cells ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize("cell", CELLS, ids=lambda cell: f"{cell[0].name}-{cell[1].name}-{cell[2]}".lower())
def test_no_crash_loses_a_delivery(database_url: str, connect: Connect, found: dict[Cell, str], cell: Cell) -> None:
    """In the end every delivery was taken, and none of them twice but for those that were in flight."""
    fault, step, dispatchers = cell
    receivers = Receivers(step)
    with ExitStack() as running:
        scene = Scene(connect(), receivers, running.enter_context(Wire(database_url)))
        port = running.enter_context(Receiver(receivers.behave)).port
        for _ in range(ENDPOINTS):
            table.register(scene.database, url=f"http://127.0.0.1:{port}/")
        ids = scene.write(SLOTS)
        struck, *others = (
            running.enter_context(Worker("webhooks", url, WEBHOOKS))
            for url in [scene.wire.url, *[database_url] * (dispatchers - 1)]
        )
        if fault is Fault.NONE:
            in_flight = 0
            ids |= scene.write(ROWS - SLOTS)
            assert sum(summary["SENT"] for summary in run(struck, *others)) == len(ids)
        else:
            in_flight = STATES[step].in_flight
            stop(scene, step, struck)
            ids |= scene.write(ROWS - SLOTS)
            break_off(scene, fault, struck, others)
            is_dead = fault is Fault.KILLED
            heir = running.enter_context(Worker("webhooks", database_url, WEBHOOKS)) if is_dead else struck
            while scene.waits():
                table.let_pass(scene.database, seconds=LEASE_SECONDS)
                run(heir)

    rows = table.rows(scene.database)
    assert {row.status for row in rows} == {"SENT"}
    # What a receiver broke off is held against the delivery; what became of us is not.
    assert {row.failures for row in rows} == ({0, 1} if fault is Fault.CUT else {0})
    times = Counter(receivers.taken)
    lost, duplicates = len(ids - times.keys()), times.total() - len(times)
    assert lost == 0
    assert duplicates <= in_flight

    found[cell] = reliability.row(fault.value, step.value, dispatchers, f"{ALL_ROWS:,}", in_flight, lost, duplicates)
    if not WRITES:
        assert found[cell] in TABLE.rows(), "if that is meant, run `make reliability`"


def run(*dispatchers: Worker) -> list[Any]:
    """Lets dispatchers run side by side, and returns what each one's run came to."""
    for dispatcher in dispatchers:
        dispatcher.begin()
    return [dispatcher.summary() for dispatcher in dispatchers]


def stop(scene: Scene, step: Step, struck: Worker) -> None:
    """Lets a dispatcher begin, and returns when it is stopped where it is to be struck."""
    halt = Halt(scene, step)
    scene.wire.judge = halt.judge
    struck.begin()
    is_there = scene.receivers.have_all if step in AT_RECEIVERS else halt.reached
    assert is_there.wait(PATIENCE_SECONDS)
    until(lambda: scene.state() == STATES[step])


def break_off(scene: Scene, fault: Fault, struck: Worker, others: list[Worker]) -> None:
    """Lets the others begin, strikes the one that is stopped, and returns when all runs have ended."""
    ((backend,),) = scene.database.execute(
        "SELECT pid FROM pg_stat_activity WHERE datname = current_database() AND application_name = 'charging'"
    ).fetchall()
    taken = len(scene.receivers.taken)
    for other in others:
        other.begin()
    if others:
        until(lambda: len(scene.receivers.taken) > taken)

    scene.wire.judge = lambda _: Verdict.PASS
    match fault:
        case Fault.KILLED:
            struck.kill()
        case Fault.ENDED:
            scene.database.execute("SELECT pg_terminate_backend(%s, 10000)", [backend])
        case Fault.RESET:
            scene.wire.cut()
    scene.receivers.let_go(hang_up=fault in (Fault.KILLED, Fault.CUT))

    for dispatcher in others if fault is Fault.KILLED else [struck, *others]:
        dispatcher.summary()
