"""How a command hears that it is to end: Ctrl-C, SIGTERM, or the end of its terminal."""

import signal
from types import FrameType
from typing import NoReturn

SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


class Stopped(BaseException):
    """Somebody asked the command to end."""


def listen() -> None:
    """Raise Stopped in the main thread at the first such signal, and let the others pass."""
    for number in SIGNALS:
        signal.signal(number, _stop)


def _stop(_number: int, _frame: FrameType | None) -> NoReturn:
    # From here on all is on its way out, which takes a second or two. A second Ctrl-C would only tear that work; should
    # somebody come with SIGKILL, the guards finish it.
    for number in SIGNALS:
        signal.signal(number, signal.SIG_IGN)
    raise Stopped
