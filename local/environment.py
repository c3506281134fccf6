"""The folder of a run, and the file in it that tells other programs where the running stack is."""

import os
import shlex
import tempfile
from collections.abc import Mapping
from pathlib import Path

from local.child import ROOT
from local.errors import StackError


def folder() -> Path:
    """Where the embedded stack keeps everything: LOCAL_DIR, or .local in the repository."""
    return ROOT / (os.environ.get("LOCAL_DIR") or ".local")


def create() -> Path:
    """The folder, made where it is not there yet. Raises StackError where nothing can be kept in it."""
    given = folder()
    try:
        given.mkdir(mode=0o700, parents=True, exist_ok=True)
        # What an ordinary user may not write, or a file system that is mounted read-only.
        with tempfile.TemporaryFile(dir=given):
            pass
    except OSError as error:
        reason = "It is a file" if isinstance(error, FileExistsError) else error.strerror
        raise StackError(
            f"The folder {given} cannot be used: {reason}.",
            means="The embedded stack has nowhere to keep its database.",
            remedy="name a folder that you can write, or that can be made: make run LOCAL_DIR=/another/folder.",
        ) from error
    return given


def parameters() -> Mapping[str, str]:
    """What PARAMETERS gives the template's parameters: words NAME=value. Raises StackError for any other word."""
    words = shlex.split(os.environ.get("PARAMETERS") or "")
    if strange := [word for word in words if not word.partition("=")[1]]:
        raise StackError(
            f"PARAMETERS has {', '.join(strange)}, which gives nothing a value.",
            means="It is a list of NAME=value, separated by spaces.",
            remedy="for example: make run PARAMETERS='EventOrder=per-aggregate InFlightWaitMs=2000'.",
        )
    return dict(word.split("=", 1) for word in words)


def port(default: int) -> int:
    """What PORT asks for; 0 for any that is free. Raises StackError where it is no port."""
    given = os.environ.get("PORT") or str(default)
    if not given.isdecimal() or int(given) > 65535:  # noqa: PLR2004 - the largest port there is
        raise StackError(
            f"PORT is {given!r}.", means="It is not a port.", remedy="give a number up to 65535; 0 finds a free port."
        )
    return int(given)


def command(target: str) -> str:
    """What to type, to make the target on this very folder."""
    given = os.environ.get("LOCAL_DIR")
    return f"make {target} LOCAL_DIR={shlex.quote(given)}" if given else f"make {target}"


def path() -> Path:
    """The file with lines NAME=value. It is there exactly while the stack is up."""
    return folder() / "env"


def write(values: Mapping[str, str], file: Path) -> None:
    """Write such a file, whole or not at all, readable by its owner: it holds a password."""
    unfinished = file.with_suffix(".new")
    unfinished.unlink(missing_ok=True)
    unfinished.touch(mode=0o600)
    unfinished.write_text("".join(f"{name}={value}\n" for name, value in values.items()))
    unfinished.replace(file)


def read() -> Mapping[str, str]:
    """What the file says. Raises StackError where there is none, or none that this account may read."""
    try:
        lines = path().read_text().splitlines()
    except OSError as error:
        raise StackError(
            f"{path()} cannot be read: {error.strerror}.",
            means="The embedded stack does not run, or runs with another LOCAL_DIR, or is not up yet.",
            remedy=f"start it with `{command('run')}`, in another terminal, and wait until it says that it is up.",
        ) from error
    return dict(line.split("=", 1) for line in lines)


def remove() -> None:
    """Take the file away: what it says is not true any more, or not yet."""
    path().unlink(missing_ok=True)
