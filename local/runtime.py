"""What a function finds around it in Lambda, for the worker processes of the emulator.

The emulator runs a worker with its own interpreter, in which everything is installed that develops and tests this
service. A package missing from a layer would not be missed. So the worker gets an interpreter without packages, and
from here the few that Lambda's Python runtime brings along. Its log goes to a file at once as well: the emulator takes
it up only when an invocation is over, which for the relay is a minute later.
"""

import importlib.abc
import importlib.machinery
import io
import os
import runpy
import sys
import traceback
from collections.abc import Sequence
from types import ModuleType
from typing import TextIO

# https://docs.aws.amazon.com/lambda/latest/dg/lambda-python.html: the SDK, and what it needs.
BROUGHT_ALONG = frozenset({"boto3", "botocore", "dateutil", "jmespath", "s3transfer", "six", "urllib3"})


class Packages(importlib.abc.MetaPathFinder):
    """Finds those packages alone in the folder where the emulator's own are installed."""

    def __init__(self, folder: str) -> None:
        self._folder = folder

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if path is not None or not self._provides(fullname):
            return None
        return importlib.machinery.PathFinder.find_spec(fullname, [self._folder], target)

    def _provides(self, name: str) -> bool:
        # The layer's compiled packages are Linux ones. Elsewhere the installed ones stand in for them.
        return name in BROUGHT_ALONG or (sys.platform != "linux" and name != "charging")


class Log(io.TextIOBase):
    """Writes to the emulator's pipe, and each full line to a file too, so that lines of several workers do not mix."""

    def __init__(self, pipe: TextIO, path: str) -> None:
        self._pipe = pipe
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        self._begun = ""

    def write(self, text: str) -> int:
        self._pipe.write(text)
        self._pipe.flush()
        *lines, self._begun = (self._begun + text).split("\n")
        if lines:
            os.write(self._file, "".join(f"{line}\n" for line in lines).encode(errors="backslashreplace"))
        return len(text)

    def flush(self) -> None:
        self._pipe.flush()


def run(worker: str, packages: str, log: str) -> None:
    """Run the emulator's worker program in this process."""
    sys.path.remove(os.path.dirname(__file__))  # noqa: PTH120 - what a script's start put there
    finder = Packages(packages)
    if sys.platform == "linux":
        sys.meta_path.append(finder)  # Last, so that a layer's own copy is preferred, as in Lambda.
    else:
        sys.meta_path.insert(0, finder)
    sys.stderr = Log(sys.stderr, log)
    _log_tracebacks()
    sys.argv = [worker]
    runpy.run_path(worker, run_name="__main__")


def _log_tracebacks() -> None:
    # The worker formats a handler's exception for the emulator, and logs nothing; Lambda logs it.
    formatted = traceback.format_exc

    def format_exc(limit: int | None = None, chain: bool = True) -> str:
        text = formatted(limit, chain)
        sys.stderr.write(text)
        return text

    traceback.format_exc = format_exc


if __name__ == "__main__":
    run(sys.argv[3], sys.argv[1], sys.argv[2])
