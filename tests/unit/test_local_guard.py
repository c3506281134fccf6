"""A child under guard, and what is left of it: nothing."""

import contextlib
import os
import signal
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Protocol

import pytest

from local.child import Child

SECONDS = 30.0

# Says that it is there, starts a process of its own, and heeds no polite request.
STUBBORN = """
import os, signal, subprocess, sys, time
signal.signal(signal.SIGTERM, signal.SIG_IGN)
writer = int(sys.argv[1])
subprocess.Popen([sys.executable, "-S", "-c", "import time; time.sleep(3600)"], pass_fds=[writer])
os.write(writer, b".")
time.sleep(3600)
"""


class Start(Protocol):
    """Starts a Python program under guard."""

    def __call__(self, program: str, *arguments: str, keep: Sequence[int] = (), grace: float = 0.1) -> Child: ...


@pytest.fixture
def child(tmp_path: Path) -> Iterator[Start]:
    """Starts a Python program under guard, which is stopped after the test in any case."""
    with contextlib.ExitStack() as started:

        def start(program: str, *arguments: str, keep: Sequence[int] = (), grace: float = 0.1) -> Child:
            child = Child(
                [sys.executable, "-S", "-E", "-c", program, *arguments],
                log=tmp_path / "log",
                environment=os.environ,
                stop_by=signal.SIGTERM,
                grace=grace,
                keep=keep,
            )
            started.callback(child.stop)
            return child

        yield start


@pytest.fixture
def pipe() -> Iterator[tuple[int, int]]:
    """Who reads it to its end knows that every process is gone that held its other end."""
    reader, writer = os.pipe()
    yield reader, writer
    os.close(reader)


def test_the_exit_status_is_the_childs(child: Start) -> None:
    """Also of one that ends by a signal: 128 and its number."""
    assert child("raise SystemExit(3)").wait(SECONDS) == 3
    assert child("import os; os.kill(os.getpid(), 9)").wait(SECONDS) == 128 + signal.SIGKILL


def test_what_a_child_says_is_kept(child: Start) -> None:
    """Its last lines, without those of an earlier child that wrote to the same log."""
    assert child("print('earlier')").wait(SECONDS) == 0
    later = child("print('one'); print('two')")
    assert later.wait(SECONDS) == 0
    assert later.said() == "    one\n    two"


def test_stopping_asks_first(child: Start, pipe: tuple[int, int]) -> None:
    """A child that ends when asked is not killed, and its status is its own."""
    reader, writer = pipe
    polite = child(
        "import os, signal, sys\n"
        "signal.pthread_sigmask(signal.SIG_BLOCK, [signal.SIGTERM])\n"
        "os.write(int(sys.argv[1]), b'.')\n"
        "signal.sigwait([signal.SIGTERM])\n"
        "sys.exit(7)",
        str(writer),
        keep=[writer],
        grace=SECONDS,
    )
    os.close(writer)
    assert os.read(reader, 1) == b"."
    assert polite.stop() == 7
    assert polite.stop() == 7


def test_stopping_takes_all_that_the_child_has_started(child: Start, pipe: tuple[int, int]) -> None:
    """After its grace the child is killed, and so is its own child."""
    reader, writer = pipe
    stubborn = child(STUBBORN, str(writer), keep=[writer])
    os.close(writer)
    assert os.read(reader, 1) == b"."
    assert stubborn.stop() == 128 + signal.SIGKILL
    assert os.read(reader, 1) == b""
