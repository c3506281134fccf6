"""A deployed handler finds all that it imports in its own archive, its layers, and Lambda's runtime."""

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.packaging.artifacts import FUNCTIONS, ROOT, Artifacts, lay_out_runtime

# One worker builds, and reads what it built; a second would do the same again.
pytestmark = pytest.mark.xdist_group("artifacts")

# What costs half a second at a cold start. (botocore's own __init__ is next to nothing, and Powertools looks at it.)
SLOW = frozenset({"boto3", "botocore.session", "botocore.client", "aws_xray_sdk"})

# The relay calls SNS, and webhooks have a master key.
CALLING_AWS = frozenset({"RelayFunction", "WebhooksFunction", "EndpointsFunction"})

IMPORT = """
import json, sys
sys.path[:0] = json.loads(sys.argv[1])
import handler
assert callable(handler.handler)
print(json.dumps({name: getattr(module, "__file__", None) for name, module in sys.modules.items()}))
"""


@pytest.fixture(scope="session")
def runtime(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder with what Lambda's Python runtime brings along, and nothing else that is installed here."""
    return lay_out_runtime(tmp_path_factory.mktemp("runtime") / "packages")


def imported(artifacts: Artifacts, name: str, runtime: Path) -> dict[str, str | None]:
    """The modules, with their files, that are loaded once the handler is, in an interpreter with nothing installed.

    Its environment is empty: importing reads no variable.
    """
    folders = [artifacts.function(name), *(layer / "python" for layer in artifacts.layers(name)), runtime]
    finished = subprocess.run(
        [sys.executable, "-I", "-S", "-B", "-c", IMPORT, json.dumps([str(folder) for folder in folders])],
        env={},
        capture_output=True,
        text=True,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr
    modules: dict[str, str | None] = json.loads(finished.stdout)
    return modules


def test_every_handler_is_deployed() -> None:
    """Each function of the tree is in the template, and the other way round."""
    handlers = {str(path.parent.relative_to(ROOT)) for path in (ROOT / "functions").glob("*/handler.py")}
    assert {properties["CodeUri"] for properties in FUNCTIONS.values()} == handlers


@pytest.mark.parametrize("name", FUNCTIONS)
def test_handler_imports(name: str, host_artifacts: Artifacts, runtime: Path) -> None:
    """The handler imports from what is deployed, and takes the package from the layer."""
    modules = imported(host_artifacts, name, runtime)
    assert modules["charging"] == str(host_artifacts.layer("ChargingLayer") / "python" / "charging" / "__init__.py")


@pytest.mark.parametrize("name", sorted(FUNCTIONS.keys() - CALLING_AWS))
def test_sdk_and_tracer_are_not_loaded(name: str, host_artifacts: Artifacts, runtime: Path) -> None:
    """Only who calls AWS pays for its SDK, half a second at a cold start; nobody pays for the X-Ray SDK."""
    assert imported(host_artifacts, name, runtime).keys() & SLOW == set()


@pytest.mark.parametrize("name", sorted(CALLING_AWS))
def test_who_calls_aws_loads_the_sdk(name: str, host_artifacts: Artifacts, runtime: Path) -> None:
    """The runtime's SDK is found when it is asked for, so that its absence above says something."""
    assert "boto3" in imported(host_artifacts, name, runtime)
