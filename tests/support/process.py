"""A function's instance in a process of its own: it can be killed, and it can be stopped at two places that only
Lambda's side of it can reach."""

import enum
import io
import sys
import time
from multiprocessing.connection import Connection
from types import TracebackType
from typing import Self

from tests.support.invocation import (
    CHARGES,
    PATIENCE_SECONDS,
    PROCESSES,
    TIMEOUT_SECONDS,
    Answer,
    Context,
    Event,
    Instance,
)


class Stop(enum.Enum):
    """Where a call is held, each at something that Lambda does for the function."""

    BEFORE_THE_STATEMENT = enum.auto()
    """When it asks for the time that is left to it: the request is read, and nothing has been said to the database."""
    BEFORE_THE_ANSWER = enum.auto()
    """When it writes its first log line: it knows what became of the request, and has not answered."""


class Process:
    """A warm instance of charges in a process of its own. One call at a time."""

    def __init__(self, database_url: str, warm_up: Event) -> None:
        """Returns once the first event is answered: the connection is open and the statement prepared."""
        self._here, there = PROCESSES.Pipe()
        self._process = PROCESSES.Process(target=_serve, args=(database_url, there), daemon=True)
        self._process.start()
        there.close()
        self.begin(warm_up)
        self.answer()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.kill()
        self._process.close()
        self._here.close()

    def begin(self, event: Event, *, seconds: float = TIMEOUT_SECONDS, stop: Stop | None = None) -> None:
        """Hands over an event, which is to be answered within so many seconds."""
        self._here.send((event, seconds, stop))

    def until_stopped(self) -> str:
        """Returns once the call is held where `begin` has said, with what the function was writing."""
        written = self._receive()
        assert isinstance(written, str), written
        return written

    def go_on(self) -> None:
        """Lets a call that is held go on."""
        self._here.send(None)

    def answer(self) -> Answer:
        """Returns what the call was answered."""
        answer = self._receive()
        assert isinstance(answer, Answer), answer
        return answer

    def kill(self) -> None:
        """SIGKILL: from now on nothing of the process runs, and the kernel closes what it had open."""
        self._process.kill()
        self._process.join()

    def has_answered(self) -> bool:
        """Whether an answer has come out of the process that nobody has read yet."""
        try:
            return self._here.poll() and isinstance(self._here.recv(), Answer)
        except EOFError:
            return False

    def _receive(self) -> object:
        assert self._here.poll(PATIENCE_SECONDS), "the function says nothing"
        return self._here.recv()


def _serve(database_url: str, tester: Connection) -> None:
    log = sys.stdout = _Log(tester)
    instance = Instance("charges", database_url, CHARGES)
    while True:
        event, seconds, stop = tester.recv()
        log.holds = stop is Stop.BEFORE_THE_ANSWER
        context = _HeldContext(tester, seconds) if stop is Stop.BEFORE_THE_STATEMENT else Context(seconds)
        tester.send(instance.call(event, context=context))


class _Log(io.StringIO):
    """Lambda's end of the function's log, which may take its time."""

    def __init__(self, tester: Connection) -> None:
        super().__init__()
        self.holds = False
        self._tester = tester

    def write(self, text: str) -> int:
        if self.holds:
            self.holds = False
            self._tester.send(text)
            self._tester.recv()
        return len(text)


class _HeldContext(Context):
    """An invocation whose clock does not run while it is held."""

    def __init__(self, tester: Connection, seconds: float) -> None:
        super().__init__(seconds)
        self._tester = tester
        self._holds = True

    def get_remaining_time_in_millis(self) -> int:  # type: ignore[override]  # declared static there
        """As ever, and held the first time."""
        if self._holds:
            self._holds = False
            begun = time.monotonic()
            self._tester.send("")
            self._tester.recv()
            self._end += time.monotonic() - begun
        return super().get_remaining_time_in_millis()
