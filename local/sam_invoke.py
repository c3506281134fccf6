"""One function in a container of its own, with a sample event: ``python -m local sam_invoke EVENT``.

It runs beside `python -m local sam_local`, and leaves the event to `sam local invoke`.
"""

import os
import sys
from pathlib import Path

from local import environment, sam_local
from local.child import ROOT
from local.errors import StackError


def main() -> int:
    """Become the command; its status is sam's. Raises StackError where there is no such event, or nothing is served."""
    event = ROOT / sys.argv[1] if sys.argv[1:] else ROOT
    folder = environment.folder() / "sam-local"
    if not event.is_file():
        raise StackError(
            f"There is no event {event}." if event != ROOT else "No event is named.",
            means="It is the file that the function gets.",
            remedy="name one, for example: make sam-invoke EVENT=events/relay-schedule.json.",
        )
    if not (folder / "env").exists():
        raise StackError(
            f"Nothing is served from {folder}.",
            means="The function would find no database, or a stack is not up yet.",
            remedy=f"start it with `{environment.command('sam-local')}`, in another terminal.",
        )
    command = [*sam_local.command("invoke", folder), function_of(event), "--event", str(event)]
    os.execve(command[0], command, sam_local.variables(folder))  # noqa: S606


def function_of(event: Path) -> str:
    """The logical id of the function that an event is for: its name begins with the function's, perhaps in singular.

    Raises StackError for an event of no function.
    """
    word = event.stem.partition("-")[0]
    for folder in (ROOT / "functions").iterdir():
        if word in {folder.name, folder.name.removesuffix("s")}:
            return f"{folder.name.capitalize()}Function"
    raise StackError(
        f"{event} is for no function.",
        means="An event's name begins with its function's, as in events/relay-schedule.json.",
        remedy="choose one of the files in events/, or call yours so.",
    )
