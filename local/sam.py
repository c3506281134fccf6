"""The SAM CLI: where it is, and what it finds around it."""

import os
import shutil
from pathlib import Path

from local.child import ROOT
from local.errors import StackError

# Its own environment comes first: sam wants exactly python3.13 on PATH, which is in there.
_PATH = os.pathsep.join([str(ROOT / ".venv-sam" / "bin"), os.environ.get("PATH", "")])


def program() -> str:
    """The path of the program. Raises StackError where it is not installed."""
    found = shutil.which("sam", path=_PATH)
    if found is None:
        raise StackError(
            "The SAM CLI is not installed.",
            means="The functions cannot be built.",
            remedy="use `make run`, which installs it, or put `sam` on PATH.",
        )
    return found


def environment(*, notes: Path) -> dict[str, str]:
    """The variables that it needs. What it writes down for itself goes to the folder `notes`."""
    return {"PATH": _PATH, "SAM_CLI_TELEMETRY": "0", "__SAM_CLI_APP_DIR": str(notes)}
