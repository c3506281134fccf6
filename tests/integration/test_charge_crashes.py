"""The crash matrices: each fault at each step of a charge or a refund, the retry that follows it, and the page that
tells of both.

Every cell makes its request in a process of its own, breaks something, and retries with the same key through another
instance. What was found has to be what docs/reliability.md says; with WRITE_RELIABILITY=1 it is written there instead.
"""

import contextlib
import enum
import os
import signal
import threading
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path
from typing import LiteralString
from uuid import UUID

import pytest

from tests.conftest import Connect
from tests.support import reliability
from tests.support.invocation import CHARGES, TIMEOUT_SECONDS, Answer, Event, Instance, charge_event, refund_event
from tests.support.ledger import NOTHING, ONCE, PATIENCE_SECONDS, Connection, counts, holding_up, until, until_blocked
from tests.support.process import Process, Stop
from tests.support.wire import Message, Sender, Verdict, Wire

KEY = UUID("8e03978e-40d5-43e8-bc93-6894a57f9324")

# A server that says nothing is waited for until the end of the function's time: little more than it needs to begin.
SHORT_SECONDS = 1.8


class Fault(enum.Enum):
    """What breaks. The value is what the page calls it."""

    KILLED = "the function's process is killed"
    ENDED = "the database ends the connection"
    RESET = "the connection is reset"
    DOWN = "the connection is reset and no other can be had"
    STOPPED = "the server process stops and stays connected"


class Step(enum.Enum):
    """When it breaks."""

    BEFORE = "before the statement is sent"
    LOOKED = "after a look at the charge, before the statement arrives"
    RUNS = "while the statement runs"
    COMMITS = "while the statement is committed"
    COMMITTED = "after the commit, before the function hears of it"
    ANSWERS = "while the function answers"


@dataclass(frozen=True, slots=True)
class Finding:
    """One cell: what the first caller was told, what was committed by then, and what the retries were told."""

    told: Answer | None
    is_done: bool
    retries: list[Answer]

    def row(self, operation: "Operation", fault: Fault, step: Step) -> str:
        done = "yes" if self.is_done else "no"
        *held_up, settled = [_said(retry) for retry in self.retries]
        retried = "".join(f"{said} while the server process is stopped, then " for said in held_up) + settled
        retried += f": the first call's {operation.name}" if self.is_done else f": a new {operation.name}"
        return reliability.row(fault.value, step.value, _said(self.told), done, retried)


def _said(answer: Answer | None) -> str:
    if answer is None:
        return "nothing"
    return f"{answer.status} `{answer.code}`" if answer.code else str(answer.status)


# ---- the operations -------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True, eq=False)
class Operation:
    """What is asked for, and what is then to be found of it exactly once."""

    name: str
    done: str
    effects: LiteralString
    steps: Sequence[Step]
    request: Callable[[str], Event]
    """The request, given the path of a charge."""
    forgetting: LiteralString
    """Takes away all that requests have done."""
    finding: LiteralString
    """The ids that the effects and the events name."""

    @property
    def table(self) -> reliability.Table:
        columns = ["what breaks", "when", "the caller is told", f"{self.done} by then", "a retry with the same key"]
        return reliability.Table(f"{self.name} crash matrix", columns)

    @property
    def cells(self) -> "list[Cell]":
        return [(self, fault, step) for fault in Fault for step in self.steps]

    @property
    def looks(self) -> int:
        """How many statements go before the one that does it."""
        return int(Step.LOOKED in self.steps)


CHARGE = Operation(
    "charge",
    "charged",
    "charges",
    [step for step in Step if step is not Step.LOOKED],
    request=lambda _: charge_event(KEY),
    forgetting="TRUNCATE charges, refunds, outbox, idempotency_keys",
    finding="SELECT charges.id::text, payload::jsonb #>> '{data,chargeId}' FROM charges CROSS JOIN outbox",
)
REFUND = Operation(
    "refund",
    "refunded",
    "refunds",
    list(Step),
    request=lambda charge: refund_event(charge, KEY),
    forgetting="TRUNCATE refunds, outbox, idempotency_keys; UPDATE charges SET refunded_cents = 0, refunds = 0",
    # Nothing is found where the charge's own count is another.
    finding="""
    SELECT refunds.id::text, payload::jsonb #>> '{data,refundId}'
    FROM refunds
    CROSS JOIN outbox
    JOIN charges ON charges.id = charge_id AND refunded_cents = refunds.amount_cents AND charges.refunds = 1
    """,
)
OPERATIONS = (CHARGE, REFUND)
type Cell = tuple[Operation, Fault, Step]


# ---- the page -------------------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def found() -> Iterator[dict[Cell, str]]:
    """The rows of this run; written to the page at its end where that is wanted."""
    rows: dict[Cell, str] = {}
    yield rows
    if reliability.WRITES:
        for operation in OPERATIONS:
            operation.table.write(rows[cell] for cell in operation.cells)


@pytest.mark.skipif(reliability.WRITES, reason="the page is being written")
@pytest.mark.parametrize("operation", OPERATIONS, ids=lambda operation: operation.name)
def test_the_page_has_every_cell_once_and_nothing_else(operation: Operation) -> None:
    """A cell that is added, renamed or taken away shows on the page."""
    named = [tuple(row.split(" | ")[:2]) for row in operation.table.rows()]
    expected = [(f"| {fault.value}", step.value) for _, fault, step in operation.cells]
    assert named == expected, "run `make reliability`"


# ---- the faults -----------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Scene:
    """A call that is under way, and what can break around it."""

    operation: Operation
    event: Event
    wire: Wire
    function: Process
    database: Connection
    backend: int

    def strike(self, fault: Fault) -> None:
        match fault:
            case Fault.KILLED:
                self.function.kill()
            case Fault.ENDED:
                self.database.execute("SELECT pg_terminate_backend(%s, 10000)", [self.backend])
            case Fault.RESET:
                self.wire.cut()
            case Fault.DOWN:
                self.wire.refuse()
                self.wire.cut()
            case Fault.STOPPED:
                os.kill(self.backend, signal.SIGSTOP)
                until(lambda: _state(self.backend) == "T")

    def until_backend_ended(self) -> None:
        """Returns once the function's first connection is no more on the server, either."""
        query = "SELECT count(*) FROM pg_stat_activity WHERE pid = %s"
        until(lambda: self.database.execute(query, [self.backend]).fetchone() == (0,))

    def stored_body(self) -> str | None:
        row = self.database.execute("SELECT response_body FROM idempotency_keys").fetchone()
        return None if row is None else str(row[0])


def _state(process: int) -> str:
    return Path(f"/proc/{process}/stat").read_text().rpartition(")")[2].split()[0]


def can_be_stopped(backend: int, database_name: str) -> bool:
    """Whether the number is that of a server process on this machine, and of this database."""
    with contextlib.suppress(OSError):
        title = Path(f"/proc/{backend}/cmdline").read_text()
        os.kill(backend, 0)
        return title.startswith("postgres:") and database_name in title
    return False


def withhold(wire: Wire, sender: Sender, *, after: int) -> threading.Event:
    """Swallows one statement or one answer, and nothing after it: the one that follows so many that have been answered.
    The event is set when all of it is lost."""
    lost = threading.Event()
    answered = 0

    def judge(message: Message) -> Verdict:
        nonlocal answered
        if answered == after and message.sender is sender and not lost.is_set():
            if message.kind in "SZ":  # the last of a statement, the last of an answer
                lost.set()
            return Verdict.DROP
        answered += message.kind == "Z"
        return Verdict.PASS

    wire.judge = judge
    return lost


# ---- the cells ------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "cell",
    [cell for operation in OPERATIONS for cell in operation.cells],
    ids=lambda cell: "-".join(part.name.lower() for part in cell),
)
def test_after_any_crash_a_retry_ends_with_it_done_once(
    database_url: str, connect: Connect, found: dict[Cell, str], cell: Cell
) -> None:
    """One charge or refund, one event, one key; the retry is given the bytes that the first call was, or would have
    been."""
    operation, fault, step = cell
    database, holder = connect(), connect()
    with Wire(database_url) as wire, Process(wire.url) as function, ExitStack() as lasting:
        event = operation.request(function.call(charge_event()).headers["location"])
        assert function.call(event).status == 201
        ((backend,),) = database.execute(
            "SELECT pid FROM pg_stat_activity WHERE datname = current_database() AND application_name = 'charging'"
        ).fetchall()
        if fault is Fault.STOPPED and not can_be_stopped(backend, database.info.dbname):
            pytest.skip("the server's processes are not of this machine")
        database.execute(operation.forgetting)
        retry = Instance("charges", database_url, CHARGES)
        lasting.callback(retry.close)

        finding = crash(Scene(operation, event, wire, function, database, backend), holder, retry, fault, step)

        final = finding.retries[-1]
        again = retry.call(event)
        assert (again.status, again.is_replay, again.body) == (201, True, final.body)
        if fault not in (Fault.KILLED, Fault.DOWN):
            # So does the instance that met the fault.
            assert function.call(event).body == final.body
        assert counts(database, operation.effects) == ONCE
        assert database.execute(operation.finding).fetchall() == [(final.json["id"], final.json["id"])]

    found[cell] = row = finding.row(operation, fault, step)
    if not reliability.WRITES:
        assert row in operation.table.rows(), "if that is meant, run `make reliability`"


def crash(scene: Scene, holder: Connection, retry: Instance, fault: Fault, step: Step) -> Finding:
    """Plays one cell and returns what all were told."""
    with ExitStack() as held, ExitStack() as stopped:
        begin(scene, holder, held, step, SHORT_SECONDS if fault is Fault.STOPPED else TIMEOUT_SECONDS)
        if fault is Fault.STOPPED:
            stopped.callback(os.kill, scene.backend, signal.SIGCONT)
        scene.strike(fault)
        if fault in (Fault.ENDED, Fault.RESET):
            held.close()  # so that the function's second attempt is not held up, too
        if step in (Step.BEFORE, Step.ANSWERS) and fault is not Fault.KILLED:
            scene.function.go_on()
        told = None if fault is Fault.KILLED else scene.function.answer()
        if fault in (Fault.KILLED, Fault.DOWN):
            assert not scene.function.has_answered()
            scene.until_backend_ended()
            held.close()

        done, body = counts(scene.database, scene.operation.effects), scene.stored_body()
        assert done in (NOTHING, ONCE)
        retries = [retry.call(scene.event)]
        if fault is Fault.STOPPED:
            # What was sent to the stopped process, or held by it, comes to its end only now.
            stopped.close()
            if told is not None and told.status != 201:
                scene.until_backend_ended()
            held.close()
        if retries[-1].status != 201:
            retries.append(retry.call(scene.event))

    assert_kept(told, is_done=done == ONCE, retries=retries)
    assert body in (None, retries[-1].body)
    return Finding(told, done == ONCE, retries)


def assert_kept(told: Answer | None, *, is_done: bool, retries: list[Answer]) -> None:
    """Every answer's promise is held against the rows and against the answer that settles it."""
    *held_up, final = retries
    assert (final.status, final.is_replay) == (201, is_done)
    assert all(early.json["retrySameKey"] for early in held_up)
    if told is None:
        return
    if told.status == 201:
        assert is_done
        assert (told.is_replay, told.body) == (False, final.body)
        assert {**told.headers, "idempotent-replayed": "true"} == final.headers
    else:
        assert (told.status, told.json["retrySameKey"]) == (503, True)
        if told.code != "outcome_unknown":
            assert not is_done, "the caller was told that nothing was done"


def begin(scene: Scene, holder: Connection, held: ExitStack, step: Step, seconds: float) -> None:
    """Starts the call and returns when it has come to the step, and has been seen to be there."""
    stop = {Step.BEFORE: Stop.BEFORE_THE_STATEMENT, Step.ANSWERS: Stop.BEFORE_THE_ANSWER}.get(step)
    if step in (Step.RUNS, Step.COMMITS):
        held.enter_context(holding_up(holder, at_commit=step is Step.COMMITS))
    looks = scene.operation.looks
    lost: threading.Event | None = None
    if step in (Step.LOOKED, Step.COMMITTED):
        sender = Sender.CLIENT if step is Step.LOOKED else Sender.SERVER
        lost = withhold(scene.wire, sender, after=looks)
    scene.wire.messages.clear()
    scene.function.begin(scene.event, seconds=seconds, stop=stop)
    match step:
        case Step.BEFORE:
            scene.function.until_stopped()
            assert scene.wire.messages == []
        case Step.RUNS | Step.COMMITS:
            until_blocked(scene.database)
            assert scene.wire.kinds(Sender.SERVER).count("Z") == looks
        case Step.LOOKED | Step.COMMITTED:
            assert lost is not None
            assert lost.wait(PATIENCE_SECONDS)
        case Step.ANSWERS:
            assert '"created"' in scene.function.until_stopped()
            assert scene.wire.kinds(Sender.SERVER).endswith("Z")
    assert counts(scene.database, scene.operation.effects) == (
        ONCE if step in (Step.COMMITTED, Step.ANSWERS) else NOTHING
    )
