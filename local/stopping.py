"""How a command hears that it is to end: Ctrl-C, SIGTERM, or the end of its terminal."""

import contextlib
import signal
from collections.abc import Iterator
from types import FrameType
from typing import NoReturn

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Stopped(KeyboardInterrupt):
    """Somebody asked the command to end. A KeyboardInterrupt, for which psycopg cancels the statement at work."""


def listen() -> None:
    """Raise Stopped in the main thread at the first such signal, and let the others pass."""
    for number in SIGNALS:
        signal.signal(number, _stop)


@contextlib.contextmanager
def deferred() -> Iterator[None]:
    """Let a signal that comes during the block wait for the block's end. It is then heard, even where the block failed.

    For what takes milliseconds and is not to be left half-way. A statement that is sent and not waited for makes an
    error of each that follows on its connection, and such an error would take the place of Stopped. The process has one
    thread, and starts no child in the block: the child would be deaf to these signals.
    """
    before = signal.pthread_sigmask(signal.SIG_BLOCK, ())
    try:
        signal.pthread_sigmask(signal.SIG_BLOCK, SIGNALS)
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _stop(_number: int, _frame: FrameType | None) -> NoReturn:
    # From here on all is on its way out, which takes a second or two. A second Ctrl-C would only tear that work; should
    # somebody come with SIGKILL, the guards finish it.
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    raise Stopped
