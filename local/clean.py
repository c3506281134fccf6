"""Forgetting a stack: ``python -m local clean`` removes what a run keeps in LOCAL_DIR, and nothing else from there.

It needs an interpreter and no package: there may be no environment any more.
"""

import contextlib
import shutil
from pathlib import Path

from local import environment, lock
from local.errors import StackError

# What a run puts there. Everything else in the folder is somebody's own, be it their home. The lock goes last.
EMBEDDED = ("postgres", "emulator", "env", "env.new", "lock")
CONTAINERS = "sam-local"


def main() -> int:
    """Remove it; 0 also where there is nothing. Raises StackError, with nothing removed, while a stack runs there."""
    folder = environment.folder()
    doomed: list[Path] = []
    try:
        with contextlib.ExitStack() as held:
            if (folder / "lock").is_file():
                held.enter_context(lock.held(folder / "lock"))
                if (folder / "postgres").is_dir():
                    # A server may outlive a run that was killed by the seconds that its shutdown takes.
                    held.enter_context(lock.held(folder / "postgres" / "lock"))
                doomed += [folder / name for name in EMBEDDED]
            if (folder / CONTAINERS / "lock").is_file():
                held.enter_context(lock.held(folder / CONTAINERS / "lock"))
                doomed.append(folder / CONTAINERS)
            for path in doomed:
                _remove(path)
    except lock.InUse as error:
        raise StackError(
            f"{folder} is in use by process {error.holder or 'unknown'}.",
            means="A stack runs there. Nothing has been removed.",
            remedy="stop it first (Ctrl-C where it runs).",
        ) from error
    if not doomed:
        print(f"{folder} holds no database of the embedded stack's.")
        return 0
    # It stays where it has something else in it, or is a link.
    with contextlib.suppress(OSError):
        folder.rmdir()
    print(f"The embedded stack's database in {folder} is forgotten.")
    return 0


def _remove(path: Path) -> None:
    with contextlib.suppress(FileNotFoundError):
        if path.is_dir():
            shutil.rmtree(path)
        else:
            path.unlink()
