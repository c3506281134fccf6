"""The benchmark of cold starts runs, once, so that it does not rot. What it finds is not looked at."""

import pytest

from bench import cold
from tests.packaging.artifacts import Artifacts
from tests.support.database import Databases

# One worker builds, and reads what it built; a second would do the same again.
pytestmark = pytest.mark.xdist_group("artifacts")


def test_every_function_starts_cold(host_artifacts: Artifacts, database_server: Databases) -> None:
    """Each is imported by a bare interpreter and answers its first call, and there is a figure for each target."""
    report = cold.start(host_artifacts, database_server, cold.Scale(rounds=1))
    assert report.figures.keys() >= report.targets.keys()
