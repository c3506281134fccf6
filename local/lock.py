"""One user at a time for a folder, told by a lock that the kernel drops with its last holder."""

import contextlib
import fcntl
import os
import time
from collections.abc import Iterator
from pathlib import Path

from local.errors import StackError

# A run that was killed needs this long at most for its guards to end its children, which hold the lock as well.
PATIENCE_SECONDS = 10.0


class InUse(StackError):
    """Another process has the folder."""

    def __init__(self, folder: Path, holder: str, target: str = "run") -> None:
        super().__init__(
            f"{folder} is in use by process {holder or 'unknown'}.",
            means="A stack runs there already; two in one folder would destroy each other's files.",
            remedy="stop that process (Ctrl-C where it runs), or start another stack beside it, in a folder and on a "
            f"port of its own: make {target} LOCAL_DIR=/another/folder PORT=0.",
        )
        self.holder = holder


@contextlib.contextmanager
def held(path: Path, target: str = "run") -> Iterator[int]:
    """Hold the lock; yields its descriptor, which a child can keep open to hold it too.

    Raises InUse when another process has it, and that process lives or ten seconds have passed. It tells whoever made
    the target how to make it elsewhere.
    """
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT, 0o600)
    try:
        _acquire(descriptor, path, target)
        os.ftruncate(descriptor, 0)
        os.pwrite(descriptor, str(os.getpid()).encode(), 0)
        # No LOCK_UN at the end: it would take the lock from the children too.
        yield descriptor
    finally:
        os.close(descriptor)


def _acquire(descriptor: int, path: Path, target: str) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while True:
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError as error:
            holder = os.pread(descriptor, 32, 0).decode()
            if _lives(holder) or time.monotonic() > deadline:
                raise InUse(path.parent, holder, target) from error
            time.sleep(0.05)
        else:
            return


def _lives(pid: str) -> bool:
    try:
        os.kill(int(pid), 0)
    except (ValueError, ProcessLookupError):
        return False
    except PermissionError:
        return True
    return True
