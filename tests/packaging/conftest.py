"""What `sam build` makes of the template, for each architecture that it can be deployed to."""

import functools
import os
import platform
import subprocess

import pytest

from tests.packaging.artifacts import ROOT, Artifacts

ARCHITECTURES = ("arm64", "x86_64")


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Keeps what reads the artifacts on one worker, which builds them once."""
    for item in items:
        if isinstance(item, pytest.Function) and {"artifacts", "host_artifacts"} & set(item.fixturenames):
            item.add_marker(pytest.mark.xdist_group("packaging"))


@pytest.fixture(scope="session", params=ARCHITECTURES)
def artifacts(request: pytest.FixtureRequest) -> Artifacts:
    """The build for each of the architectures in turn."""
    return build(request.param)


@pytest.fixture(scope="session")
def host_artifacts() -> Artifacts:
    """The build for the architecture of this machine, which can be imported here."""
    return build("arm64" if platform.machine() in {"arm64", "aarch64"} else "x86_64")


@functools.cache
def build(architecture: str) -> Artifacts:
    """Builds as a user does. What did not change since the last time comes from its cache."""
    folder = ROOT / ".aws-sam" / "packaging" / architecture
    finished = subprocess.run(
        [
            *("sam", "build", "--parameter-overrides", f"Architecture={architecture}"),
            *("--build-dir", folder / "build", "--cache-dir", folder / "cache"),
        ],
        cwd=ROOT,
        env=os.environ | {"PATH": f"{ROOT / '.venv-sam' / 'bin'}:{os.environ['PATH']}", "SAM_CLI_TELEMETRY": "0"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr
    return Artifacts(folder / "build", architecture)
