"""`make clean`: the stack in LOCAL_DIR is forgotten, unless it runs."""

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from local import clean, lock
from local.child import ROOT
from local.errors import StackError


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """What a run leaves in a folder."""
    folder = tmp_path / "a stack"
    (folder / "postgres" / "data").mkdir(parents=True)
    (folder / "emulator").mkdir()
    for name in ("lock", "postgres/lock", "postgres/data/PG_VERSION", "emulator/functions.log", "env"):
        (folder / name).write_text("")
    monkeypatch.setenv("LOCAL_DIR", str(folder))
    return folder


def test_the_folder_of_a_stack_is_forgotten(folder: Path) -> None:
    """All of it, and a second time is no error."""
    assert clean.main() == 0
    assert not folder.exists()
    assert clean.main() == 0


def test_what_a_run_did_not_put_there_stays(folder: Path) -> None:
    """LOCAL_DIR may be a folder that has other things in it."""
    (folder / "thesis.txt").write_text("")
    assert clean.main() == 0
    assert [path.name for path in folder.iterdir()] == ["thesis.txt"]


def test_what_sam_local_left_is_forgotten(folder: Path) -> None:
    """Its log is no database, and goes as well; where it alone has run, a folder called postgres is somebody's own."""
    (folder / "sam-local").mkdir()
    (folder / "sam-local" / "lock").write_text("")
    (folder / "lock").unlink()
    assert clean.main() == 0
    assert not (folder / "sam-local").exists()
    assert (folder / "postgres" / "data" / "PG_VERSION").exists()


def test_a_folder_without_a_stack_is_not_touched(folder: Path) -> None:
    """Whoever names the wrong folder loses nothing: a run leaves its lock there, and nobody else does."""
    (folder / "lock").unlink()
    assert clean.main() == 0
    assert (folder / "postgres" / "data" / "PG_VERSION").exists()


@pytest.mark.parametrize("name", ["lock", "postgres/lock", "sam-local/lock"])
def test_a_stack_that_runs_is_not_touched(folder: Path, name: str) -> None:
    """The refusal names the process, and nothing is removed. A server may be there still when its run is not."""
    (folder / "sam-local").mkdir()
    (folder / name).write_text("")
    before = sorted(folder.rglob("*"))
    with lock.held(folder / name), pytest.raises(StackError, match=f"in use by process {os.getpid()}"):
        clean.main()
    assert sorted(folder.rglob("*")) == before


def test_make_clean_needs_no_environment_and_heeds_the_refusal(folder: Path, tmp_path: Path) -> None:
    """Without .venv any interpreter serves. While the stack runs, the artifacts stay as well."""
    clone = tmp_path / "clone"
    for name in ("functions", "layers", "tests", "bench", ".aws-sam"):
        (clone / name).mkdir(parents=True)
    shutil.copy(ROOT / "Makefile", clone)
    shutil.copytree(ROOT / "local", clone / "local", ignore=shutil.ignore_patterns("__pycache__"))

    def make_clean() -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            ["make", "clean", f"PYTHON={sys.executable}"],
            cwd=clone,
            env={"PATH": os.environ["PATH"], "LOCAL_DIR": str(folder)},
            capture_output=True,
            text=True,
            check=False,
        )

    with lock.held(folder / "lock"):
        refused = make_clean()
    assert refused.returncode != 0
    assert "Nothing has been removed" in refused.stderr
    assert (folder / "env").exists()
    assert (clone / ".aws-sam").exists()

    done = make_clean()
    assert done.returncode == 0, done.stderr
    assert not folder.exists()
    assert not (clone / ".aws-sam").exists()
    assert not list(clone.rglob("__pycache__"))
