"""The folder of a run, and the file in it that tells other programs where the running stack is."""

import os
from collections.abc import Mapping
from pathlib import Path

from local.child import ROOT
from local.errors import StackError


def folder() -> Path:
    """Where the embedded stack keeps everything: LOCAL_DIR, or .local in the repository."""
    return ROOT / (os.environ.get("LOCAL_DIR") or ".local")


def path() -> Path:
    """The file with lines NAME=value. It is there exactly while the stack is up."""
    return folder() / "env"


def write(values: Mapping[str, str]) -> None:
    """Write the file, whole or not at all, readable by its owner: it holds a password."""
    unfinished = path().with_suffix(".new")
    unfinished.unlink(missing_ok=True)
    unfinished.touch(mode=0o600)
    unfinished.write_text("".join(f"{name}={value}\n" for name, value in values.items()))
    unfinished.replace(path())


def read() -> Mapping[str, str]:
    """What the file says. Raises StackError where there is none."""
    try:
        lines = path().read_text().splitlines()
    except FileNotFoundError as error:
        raise StackError(
            f"{path()} is not there.",
            means="The embedded stack does not run, or runs with another LOCAL_DIR, or is not up yet.",
            remedy="start it with `make run`, in another terminal, and wait until it says that it is up.",
        ) from error
    return dict(line.split("=", 1) for line in lines)


def remove() -> None:
    """Take the file away: what it says is not true any more, or not yet."""
    path().unlink(missing_ok=True)
