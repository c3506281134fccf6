"""The story that `make demo` tells."""

import subprocess
import sys

import pytest

from local.child import ROOT


@pytest.mark.xdist_group("local stack")
def test_the_story_is_told_to_its_end() -> None:
    """Every guarantee it speaks of holds, against a stack and faults of its own, and it says so."""
    told = subprocess.run(
        [sys.executable, "-m", "local", "demo"], cwd=ROOT, capture_output=True, text=True, timeout=240, check=False
    )
    assert (told.returncode, told.stderr) == (0, "")
    assert told.stdout.count("  holds: ") == 19
    assert told.stdout.endswith("\nEvery guarantee held.\n")
