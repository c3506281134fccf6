"""A process that ends its child when its parent ends: ``python -S -m local.guard SIGNAL GRACE COMMAND…``.

The parent holds the write end of a pipe that is the guard's standard input, and writes nothing to it. When it closes
the pipe, or dies in whatever way, the guard sees the end of input, sends SIGNAL to its child, and after GRACE seconds
SIGKILL to all that is left of the child's process group. So an orderly stop and the parent's sudden death take one and
the same path, on Linux and on macOS, whichever thread started it.

Ctrl-C in a terminal signals the whole foreground group; guard and child have sessions of their own, so that the parent
alone hears it and decides in which order things stop.
"""

import argparse
import contextlib
import ctypes
import os
import select
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

from local import unprivileged

PR_SET_PDEATHSIG = 1
INPUT = 0


def main(arguments: list[str]) -> int:
    """Run the command until it ends or the input does; its exit status, or 128 and the signal that ended it."""
    parser = argparse.ArgumentParser(prog="guard")
    parser.add_argument("--unprivileged", type=Path, metavar="FOLDER", help="root gives the folder away and steps down")
    parser.add_argument("signal", type=lambda name: signal.Signals[name])
    parser.add_argument("grace", type=float)
    parser.add_argument("command", nargs=argparse.REMAINDER)
    options = parser.parse_args(arguments)

    with _wakeups() as woken:
        child = _start(options.command, options.unprivileged)
        if not _ended(child.pid, woken, or_until=INPUT):
            os.kill(child.pid, options.signal)
            _ended(child.pid, woken, seconds=options.grace)
        # Its own children (the emulator's workers) are in its group. The child is reaped after this: until then no
        # other process can be given its number.
        with contextlib.suppress(ProcessLookupError, PermissionError):
            os.killpg(child.pid, signal.SIGKILL)
        status = child.wait()
    return status if status >= 0 else 128 - status


def _start(command: list[str], folder: Path | None) -> subprocess.Popen[bytes]:
    def prepare() -> None:
        if folder is not None:
            try:
                unprivileged.become(folder)
            except OSError as error:
                # subprocess would say no more than that something was raised here.
                os.write(sys.stderr.fileno(), f"cannot stop being root: {error}\n".encode())
                raise
        # For the one death that leaves no guard to act: its own. After the change of user, which would clear it.
        if sys.platform == "linux":
            ctypes.CDLL(None).prctl(PR_SET_PDEATHSIG, signal.SIGKILL)

    return subprocess.Popen(
        command,
        stdin=subprocess.DEVNULL,
        start_new_session=True,
        close_fds=False,  # The lock of the folder is handed on, and held as long as any of them lives.
        preexec_fn=prepare,  # noqa: PLW1509 - this process has one thread
    )


def _ended(pid: int, woken: int, *, or_until: int | None = None, seconds: float = float("inf")) -> bool:
    """Wait for the process to end; False when something else came first: a request to stop, or the end of patience."""
    deadline = time.monotonic() + seconds
    watched = [woken] if or_until is None else [woken, or_until]
    while not os.waitid(os.P_PID, pid, os.WEXITED | os.WNOWAIT | os.WNOHANG):
        left = deadline - time.monotonic()
        ready, _, _ = select.select(watched, [], [], None if left == float("inf") else max(0.0, left))
        if not ready:
            return False
        if woken in ready:
            os.read(woken, 64)
        if or_until in ready:
            return False
    return True


@contextlib.contextmanager
def _wakeups() -> Iterator[int]:
    """A descriptor that can be read when a child has ended.

    The guard is deaf to the polite signals, since its input is how it is told to stop. A handler that does nothing
    makes it so, and not SIG_IGN, which the command would inherit.
    """
    reader, writer = os.pipe()
    os.set_blocking(writer, False)
    signal.set_wakeup_fd(writer)
    for number in (signal.SIGCHLD, signal.SIGTERM, signal.SIGINT, signal.SIGHUP):
        signal.signal(number, lambda *_: None)
    try:
        yield reader
    finally:
        signal.set_wakeup_fd(-1)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
