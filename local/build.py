"""The functions and layers as `sam build` makes them, for this machine's processor; built when their sources changed.

They go to a folder beside sam's usual one: that one may hold a build for the processor that is deployed to.
"""

import contextlib
import fcntl
import hashlib
import os
import platform
import signal
from collections.abc import Iterator
from pathlib import Path

from local import sam
from local.child import ROOT, Child
from local.errors import StackError

ARTIFACTS = ROOT / ".aws-sam" / "local"
TEMPLATE = ARTIFACTS / "build" / "template.yaml"
SOURCES = ("template.yaml", "samconfig.toml", "functions", "layers", "schema")

# A build takes 15 s here once the wheels are at hand; downloading them can take minutes.
BUILD_SECONDS = 900.0


def architecture() -> str:
    """What the template calls this machine's processor."""
    return "arm64" if platform.machine() in {"arm64", "aarch64"} else "x86_64"


def is_current() -> bool:
    """Whether the artifacts are those of the sources as they stand."""
    return TEMPLATE.exists() and _stamp().exists() and _stamp().read_text() == _digest()


def build() -> None:
    """Build all of the template. Raises StackError with what sam said where that fails.

    Builds of several processes happen one after another, and the later ones find nothing to do.
    """
    with undisturbed():
        if is_current():
            return
        digest = _digest()  # Of the sources before: a change meanwhile asks for another build.
        _stamp().unlink(missing_ok=True)
        _run_sam()
        _stamp().write_text(digest)


@contextlib.contextmanager
def undisturbed() -> Iterator[None]:
    """Keep other processes from building anew while the block uses the artifacts."""
    ARTIFACTS.mkdir(parents=True, exist_ok=True)
    with (ARTIFACTS / "lock").open("w") as lock:
        fcntl.flock(lock, fcntl.LOCK_EX)
        yield


def _run_sam() -> None:
    log = ARTIFACTS / "build.log"
    log.unlink(missing_ok=True)
    process = Child(
        [
            *(sam.program(), "build", "--cached", "--parallel", "--template-file", str(ROOT / "template.yaml")),
            *("--build-dir", str(TEMPLATE.parent), "--cache-dir", str(ARTIFACTS / "cache")),
            *("--parameter-overrides", f"Architecture={architecture()}"),
        ],
        log=log,
        environment=os.environ | sam.environment(notes=ARTIFACTS / "sam"),
        stop_by=signal.SIGTERM,
        grace=2.0,
    )
    try:
        status = process.wait(BUILD_SECONDS)
    finally:
        process.stop()
    if status != 0:
        raise StackError(
            f"sam build failed:\n{process.said(30)}",
            means="There is nothing to deploy.",
            remedy=f"see the reason above and {log}.",
        )


def _stamp() -> Path:
    return ARTIFACTS / "sources.sha256"


def _digest() -> str:
    digest = hashlib.sha256(architecture().encode())
    for name in SOURCES:
        source = ROOT / name
        for path in sorted(source.rglob("*")) if source.is_dir() else [source]:
            if path.is_file() and "__pycache__" not in path.parts:
                content = path.read_bytes()
                # Lengths, so that two trees cannot be told apart by where one file ends and the next begins.
                digest.update(f"{path.relative_to(ROOT)}\0{len(content)}\0".encode())
                digest.update(content)
    return digest.hexdigest()
