"""What a function finds around it in the emulator: Lambda's runtime, not this environment."""

import json
import subprocess
import sys
import sysconfig
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "functions.log"


def run(worker: str, log: Path) -> subprocess.CompletedProcess[str]:
    program = log.with_name("worker.py")
    program.write_text(worker)
    return subprocess.run(
        [
            *(sys.executable, "-S", "-E", str(ROOT / "local" / "runtime.py")),
            *(sysconfig.get_path("purelib"), str(log), str(program)),
        ],
        check=True,
        capture_output=True,
        text=True,
    )


def test_a_function_finds_the_sdk_and_nothing_else_of_ours(log: Path) -> None:
    """A package missing from a layer is missing here, as it would be in Lambda."""
    worker = """
import importlib.util, json
names = ["boto3", "botocore", "psycopg", "pydantic", "charging", "ministack", "local", "postgres", "pytest"]
print(json.dumps([name for name in names if importlib.util.find_spec(name)]))
"""
    assert json.loads(run(worker, log).stdout) == ["boto3", "botocore"]


def test_a_layers_own_copy_is_preferred(log: Path) -> None:
    """As in Lambda, where /opt/python comes before the runtime's packages."""
    own = log.with_name("layer")
    own.mkdir()
    (own / "six.py").write_text("whose = 'ours'")
    worker = f"import sys; sys.path.insert(0, {str(own)!r}); import six; print(six.whose)"
    assert run(worker, log).stdout == "ours\n"


def test_the_log_has_each_line_at_once(log: Path) -> None:
    """Whole lines go to the file while the function runs, and all of it to the emulator."""
    worker = f"""
import sys
print("one", file=sys.stderr)
print("half", end="", file=sys.stderr)
print(repr(open({str(log)!r}).read()))
"""
    finished = run(worker, log)
    assert finished.stdout == "'one\\n'\n"
    assert finished.stderr == "one\nhalf"


def test_a_handlers_exception_is_logged(log: Path) -> None:
    """The emulator's worker formats it for the caller only; in Lambda it stands in the log."""
    worker = """
import traceback
try:
    raise ValueError("lost")
except ValueError:
    traceback.format_exc()
"""
    run(worker, log)
    assert log.read_text().splitlines()[-1] == "ValueError: lost"
