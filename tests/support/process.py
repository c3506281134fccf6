"""A function's instance in a process of its own: it can be killed, and one of charges can be stopped at two places that
only Lambda's side of it can reach."""

import contextlib
import enum
import io
import os
import sys
import time
from collections.abc import Callable, Mapping
from importlib import import_module
from multiprocessing.connection import Connection
from pathlib import Path
from types import TracebackType
from typing import Any, Self
from unittest import mock

from charging import database, topic, webhooks
from charging.errors import ChargingError
from tests.support import deployment
from tests.support.invocation import (
    CHARGES,
    PATIENCE_SECONDS,
    PROCESSES,
    TIMEOUT_SECONDS,
    Answer,
    Context,
    Event,
    Instance,
    database_variables,
    sample,
)

# Ten thousand events take ten seconds; a run that takes this long hangs.
RUN_SECONDS = 200


class Stop(enum.Enum):
    """Where a call is held, each at something that Lambda does for the function."""

    BEFORE_THE_STATEMENT = enum.auto()
    """When it asks for the time that is left to it: the request is read, and nothing has been said to the database."""
    BEFORE_THE_ANSWER = enum.auto()
    """When it writes its first log line: it knows what became of the request, and has not answered."""


class _Child:
    """A process that is told over a pipe what to do."""

    def __init__(self, serve: Callable[..., None], *arguments: object) -> None:
        self._here, there = PROCESSES.Pipe()
        self._process = PROCESSES.Process(target=serve, args=(there, *arguments), daemon=True)
        self._process.start()
        there.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, _: TracebackType | None) -> None:
        self.kill()
        self._process.close()
        self._here.close()

    def kill(self) -> None:
        """SIGKILL: from now on nothing of the process runs, and the kernel closes what it had open."""
        self._process.kill()
        self._process.join()

    def _receive(self, seconds: float = PATIENCE_SECONDS) -> object:
        assert self._here.poll(seconds), "the function says nothing"
        return self._here.recv()


class Process(_Child):
    """An instance of charges in a process of its own. One call at a time."""

    def __init__(self, database_url: str) -> None:
        super().__init__(_serve, database_url)

    def call(self, event: Event) -> Answer:
        """Returns what an event is answered, having let it take its course."""
        self.begin(event)
        return self.answer()

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

    def has_answered(self) -> bool:
        """Whether an answer has come out of the process that nobody has read yet."""
        try:
            return self._here.poll() and isinstance(self._here.recv(), Answer)
        except EOFError:
            return False


def _serve(tester: Connection, database_url: str) -> None:
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


class Worker(_Child):
    """An instance of the relay or of webhooks in a process of its own, whose runs take what is due and end."""

    def __init__(self, function: str, database_url: str, variables: Mapping[str, str]) -> None:
        """Returns once it waits for its first run; it has opened no connection yet."""
        super().__init__(_work, function, {**database_variables(database_url, function), **variables})
        self._function = function
        self._receive()

    def begin(self) -> None:
        """Starts a run."""
        self._here.send(sample(f"{self._function}-schedule"))

    def summary(self) -> Any:
        """Returns what the run came to, once it is over; None where it ended with an error, which its log names."""
        return self._receive(RUN_SECONDS)


def _work(tester: Connection, function: str, variables: Mapping[str, str]) -> None:
    os.environ.update(variables)
    # Whatever holds it up, and for however long on a busy machine, is what the test has to say, and not its patience.
    topic.READ_SECONDS = database.SILENCE_SECONDS = webhooks.SEND_SECONDS = RUN_SECONDS
    handler = import_module(f"functions.{function}.handler").handler
    with (
        Path(os.devnull).open("w") as sys.stdout,
        mock.patch("charging.vault.read_with_previous", return_value=["m" * 32]),
    ):
        tester.send(None)
        while True:
            event, summary = tester.recv(), None
            with contextlib.suppress(ChargingError):
                summary = handler(event, Context(deployment.TIMEOUT_SECONDS))
            tester.send(summary)
