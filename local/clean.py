"""Forgetting a stack: ``python -m local clean`` removes what a run keeps in LOCAL_DIR, and nothing else from there.

It needs an interpreter and no package: there may be no environment any more.
"""

import contextlib
import shutil
from pathlib import Path

from local import environment, lock
from local.errors import StackError

# What a run puts there. Everything else in the folder is somebody's own, be it their home. The lock goes last.
FOLDERS = ("postgres", "emulator")
FILES = ("env", "env.new", "lock")


def main() -> int:
    """Remove it; 0 also where there is nothing. Raises StackError, with nothing removed, while a stack runs there."""
    folder = environment.folder()
    if not (folder / "lock").is_file():
        print(f"{folder} holds no database of the embedded stack's.")
        return 0
    try:
        with contextlib.ExitStack() as held:
            held.enter_context(lock.held(folder / "lock"))
            if (folder / "postgres").is_dir():
                # A server may outlive a run that was killed by the seconds that its shutdown takes.
                held.enter_context(lock.held(folder / "postgres" / "lock"))
            _remove(folder)
    except lock.InUse as error:
        raise StackError(
            f"{folder} is in use by process {error.holder or 'unknown'}.",
            means="The embedded stack runs there. Nothing has been removed.",
            remedy="stop it first (Ctrl-C where it runs).",
        ) from error
    print(f"The embedded stack's database in {folder} is forgotten.")
    return 0


def _remove(folder: Path) -> None:
    for name in FOLDERS:
        with contextlib.suppress(FileNotFoundError):
            shutil.rmtree(folder / name)
    for name in FILES:
        (folder / name).unlink(missing_ok=True)
    # It stays where it has something else in it, or is a link.
    with contextlib.suppress(OSError):
        folder.rmdir()
