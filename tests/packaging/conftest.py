"""What `sam build` makes of the template, for each architecture that it can be deployed to."""

import fcntl
import functools
import os
import platform
import shutil
import subprocess
from collections.abc import Callable

import pytest

from tests.packaging.artifacts import ROOT, Artifacts

ARCHITECTURES = ("arm64", "x86_64")

type Build = Callable[[str], Artifacts]


@pytest.fixture(scope="session")
def build(tmp_path_factory: pytest.TempPathFactory) -> Build:
    """Builds for an architecture, once, and hands out a copy that no other run of the tests builds over."""

    @functools.cache
    def built(architecture: str) -> Artifacts:
        folder = ROOT / ".aws-sam" / "packaging" / architecture
        copy = tmp_path_factory.mktemp("artifacts") / architecture
        folder.mkdir(parents=True, exist_ok=True)
        with (folder / "lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            # What did not change since the last time comes from its cache.
            sam_build(architecture, "--build-dir", folder / "build", "--cache-dir", folder / "cache")
            shutil.copytree(folder / "build", copy)
        return Artifacts(copy, architecture)

    return built


@pytest.fixture(scope="session", params=ARCHITECTURES)
def artifacts(request: pytest.FixtureRequest, build: Build) -> Artifacts:
    """The build for each of the architectures in turn."""
    return build(request.param)


@pytest.fixture(scope="session")
def host_artifacts(build: Build) -> Artifacts:
    """The build for the architecture of this machine, which can be imported here."""
    return build("arm64" if platform.machine() in {"arm64", "aarch64"} else "x86_64")


def sam_build(architecture: str, *options: str | os.PathLike[str]) -> None:
    finished = subprocess.run(
        ["sam", "build", "--parameter-overrides", f"Architecture={architecture}", *options],
        cwd=ROOT,
        env=os.environ | {"PATH": f"{ROOT / '.venv-sam' / 'bin'}:{os.environ['PATH']}", "SAM_CLI_TELEMETRY": "0"},
        capture_output=True,
        text=True,
        check=False,
    )
    assert finished.returncode == 0, finished.stderr
