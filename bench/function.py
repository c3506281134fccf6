"""The functions as Lambda runs them: charges warm and in this process, a scheduled one in one of its own."""

import atexit
import contextlib
import importlib
import logging
import multiprocessing
import os
import re
import resource
import sys
import time
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any
from unittest import mock
from uuid import UUID

from bench import broker
from charging import errors, telemetry
from charging.database import Database
from charging.settings import LOOPBACK
from tests.packaging.artifacts import FUNCTIONS
from tests.support.invocation import CHARGES, Context, Event, Instance, charge_event, database_variables, sample

type Parameters = Mapping[str, Any]

# Longer than any call needs: what is measured is not what a lack of time does.
CONTEXT_SECONDS = 3600.0

_PROCESSES = multiprocessing.get_context("spawn")

_NOWHERE = Path(os.devnull).open("w")  # noqa: SIM115 - open as long as the process, as standard output is
atexit.register(_NOWHERE.close)


class Function:
    """One instance: its connection is open and its statement is prepared."""

    def __init__(self, url: str) -> None:
        self._instance = Instance("charges", url, CHARGES)
        self._handler = self._instance.module.handler
        self.database: Database = self._instance.module.database()
        self.call(charge_event())

    def call(self, event: Event, *, status: int = 201) -> Mapping[str, Any]:
        """Answers one event."""
        return self.answer(invocation(event), status=status)

    def answer(self, given: tuple[Event, Context], *, status: int) -> Mapping[str, Any]:
        """Answers what Lambda gives to a handler, as it has to: a fault is answered, too, and that much sooner."""
        answer: Mapping[str, Any] = self._handler(*given)
        if answer["statusCode"] != status:
            raise AssertionError(f"{answer['statusCode']} in place of {status}: {answer['body']}")
        return answer

    def statement(self, key: UUID | None = None) -> tuple[bytes, Parameters]:
        """Returns what a new charge would send to the database: a statement and its parameters."""
        sent: list[tuple[bytes, Parameters]] = []

        def fetch(_database: Database, _row: object, statement: bytes, parameters: Parameters, **_: object) -> None:
            sent.append((statement, parameters))
            raise errors.TemporarilyUnavailable("only asked what would be sent")

        with mock.patch.object(Database, "fetch", fetch):
            self.call(charge_event(key), status=503)
        return sent[0]

    def close(self) -> None:
        """Ends its connection."""
        self._instance.close()


@contextlib.contextmanager
def relay(url: str, address: str, *, budget_seconds: int = 0) -> Iterator["Scheduled"]:
    """Runs the relay's function in a process of its own, between a database and a broker."""
    variables = {
        "TOPIC_ARN": broker.TOPIC_ARN,
        "RELAY_BUDGET_SECONDS": str(budget_seconds),
        "RELAY_PARKED_HEAD": "block",
    }
    with _scheduled("relay", url, broker.variables(address) | variables, budget_seconds) as relay:
        yield relay


@contextlib.contextmanager
def webhooks(url: str, address: str, authorities: Path) -> Iterator["Scheduled"]:
    """Runs the dispatcher's function in a process of its own, with the master key from a broker, and with authorities
    that it takes for the world's. A run sends what is due and ends."""
    variables = {
        "WEBHOOK_MASTER_KEY_ARN": broker.MASTER_KEY_ARN,
        "WEBHOOKS_BUDGET_SECONDS": "0",
        LOOPBACK: "allowed",
        # Of Python's TLS, and of boto3's.
        "SSL_CERT_FILE": str(authorities),
        "AWS_CA_BUNDLE": str(authorities),
    }
    with _scheduled("webhooks", url, broker.variables(address) | variables, 0) as dispatcher:
        yield dispatcher


@contextlib.contextmanager
def _scheduled(name: str, url: str, variables: Mapping[str, str], budget_seconds: int) -> Iterator["Scheduled"]:
    here, there = _PROCESSES.Pipe()
    process = _PROCESSES.Process(target=_run, args=(name, url, variables, budget_seconds, there), daemon=True)
    process.start()
    there.close()
    try:
        yield Scheduled(here)
    finally:
        process.terminate()
        process.join()
        here.close()


@dataclass(frozen=True, slots=True)
class Run:
    """What one run came to: what the function returned, when it began in Unix seconds, how long it took, and the most
    memory that its process had."""

    summary: Mapping[str, Any]
    begun: float
    seconds: float
    peak_bytes: int


class Scheduled:
    """A function that does nothing until it is told. The first run also imports, connects and makes its clients."""

    def __init__(self, process: Connection) -> None:
        self._process = process
        self.pid: int = process.recv()

    def begin(self) -> None:
        """Starts a run, which lasts as long as its budget."""
        self._process.send(None)

    def run(self) -> Run:
        """Does what is due, and returns when that is done."""
        self.begin()
        run: Run = self._process.recv()
        return run


def _run(name: str, url: str, variables: Mapping[str, str], budget_seconds: int, caller: Connection) -> None:
    deployed = FUNCTIONS[f"{name.capitalize()}Function"]["Environment"]["Variables"]
    os.environ |= {variable: value for variable, value in deployed.items() if isinstance(value, str)}
    os.environ |= database_variables(url, name) | dict(variables)
    sys.stdout = _NOWHERE
    # Only here, where it is to run: it loads the SDK.
    handler = importlib.import_module(f"functions.{name}.handler").handler
    caller.send(os.getpid())
    # The pipe ends when the process that wants the function is dead.
    with contextlib.suppress(EOFError):
        while True:
            caller.recv()
            begun = time.time()
            summary = handler(sample(f"{name}-schedule"), Context(budget_seconds + CONTEXT_SECONDS))
            caller.send(Run(summary, begun, time.time() - begun, _peak_bytes()))


def _peak_bytes() -> int:
    """The most memory that this process has had, in bytes."""
    try:
        # Linux counts what was before the exec into ru_maxrss: the process that this one was forked from.
        [kilobytes] = re.findall(r"VmHWM:\s*(\d+) kB", Path("/proc/self/status").read_text())
        return int(kilobytes) * 1024
    except OSError:
        return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss


def invocation(event: Event) -> tuple[Event, Context]:
    """What Lambda gives to a handler."""
    return event, Context(CONTEXT_SECONDS)


@contextlib.contextmanager
def silence() -> Iterator[None]:
    """Lets what the function writes go to the null device, as long as the block lasts."""
    # A logger keeps the standard output that it has found at its making.
    telemetry.logger("charges")
    with contextlib.ExitStack() as stack:
        stack.enter_context(contextlib.redirect_stdout(_NOWHERE))
        for handler in logging.getLogger("charges").handlers:
            if isinstance(handler, logging.StreamHandler):
                # Not by its own method, which flushes the one before: that may be a closed one.
                stack.callback(setattr, handler, "stream", handler.stream)
                handler.stream = _NOWHERE
        yield
