"""The AWS emulator as a child of this process, on loopback alone.

It keeps its state in memory and its files in a folder of its own, which is emptied before each start. It is killed, not
asked to stop: it would wait for running functions, and the relay runs for a minute. The relay stands being killed.
"""

import contextlib
import dataclasses
import http.client
import os
import shlex
import shutil
import signal
import socket
import stat
import sys
import sysconfig
import time
from collections.abc import Iterator
from pathlib import Path

from local.child import Child
from local.errors import StackError

HOST = "127.0.0.1"
REGION = "us-east-1"
# The emulator believes everyone. The key is its account's number.
ACCESS_KEY_ID = "000000000000"
SECRET_ACCESS_KEY = "test"  # noqa: S105

# It starts in half a second on an idle machine.
START_SECONDS = 60.0

# Nothing else of the caller's environment: no AWS profile, proxy or PYTHONPATH of the caller's may reach a function.
_KEPT = ("PATH", "HOME", "LD_LIBRARY_PATH", "DYLD_LIBRARY_PATH")

_RUN = "import sys; sys.executable = sys.argv.pop(1); from ministack.app import main; main()"


@dataclasses.dataclass(frozen=True, slots=True)
class Emulator:
    """A running emulator. `function_log` gets what functions write, as they write it."""

    port: int
    process: Child
    function_log: Path

    @property
    def url(self) -> str:
        return f"http://{HOST}:{self.port}"


def available(port: int, target: str = "run") -> int:
    """The port, or a free one for 0. Raises StackError where another process listens on it, or this account may not.

    `target` is what make was asked for.
    """
    with socket.socket() as probe:
        # As the emulator will: connections of an earlier run that still linger are no obstacle.
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind((HOST, port))
        except PermissionError as error:
            raise StackError(
                f"Port {port} cannot be listened on from this account: {error.strerror}.",
                means="The API cannot be served there. Most systems keep the ports below 1024 for root.",
                remedy=f"choose a higher port: make {target} PORT=4566 (0 finds a free one).",
            ) from error
        except OSError as error:
            raise StackError(
                f"Port {port} is not free: {error.strerror}.",
                means="The API cannot be served there; another program does that, or another stack of this service.",
                remedy=f"stop that program, or let a free port be found: make {target} PORT=0.",
            ) from error
        chosen: int = probe.getsockname()[1]
        return chosen


@contextlib.contextmanager
def serve(folder: Path, *, port: int, lock: int) -> Iterator[Emulator]:
    """Run the emulator on the port, with its files in the folder.

    It ends with the block or with this process, however that dies, and its functions with it. `lock` is a descriptor
    that it holds open while it lives. Raises StackError where it cannot start.
    """
    folder = folder.resolve()
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    files, log, function_log = folder / "files", folder / "emulator.log", folder / "functions.log"
    shutil.rmtree(files, ignore_errors=True)
    files.mkdir()
    for text in (log, function_log):
        text.write_text("")
    process = Child(
        [sys.executable, "-c", _RUN, str(_interpreter(files, function_log))],
        log=log,
        environment=_environment(files, port),
        stop_by=signal.SIGKILL,
        grace=5.0,
        keep=[lock],
    )
    try:
        _wait_until_ready(process, port)
        yield Emulator(port, process, function_log)
    finally:
        process.stop()
        shutil.rmtree(files, ignore_errors=True)


def _interpreter(files: Path, function_log: Path) -> Path:
    """An interpreter for functions, as a program that takes a script: without packages, and with `local.runtime`."""
    runtime = Path(__file__).with_name("runtime.py")
    command = [sys.executable, "-S", "-E", str(runtime), sysconfig.get_path("purelib"), str(function_log)]
    program = files / "python"
    program.write_text(f'#!/bin/sh\nexec {shlex.join(command)} "$@"\n')
    program.chmod(stat.S_IRWXU)
    return program


def _environment(files: Path, port: int) -> dict[str, str]:
    temporary = files / "tmp"
    temporary.mkdir()
    return {name: os.environ[name] for name in _KEPT if name in os.environ} | {
        "LANG": "C.UTF-8",
        "TZ": "UTC",
        "TMPDIR": str(temporary),
        "BIND_HOST": HOST,
        "GATEWAY_PORT": str(port),
        "MINISTACK_HOST": HOST,
        "MINISTACK_REGION": REGION,
        "AWS_DEFAULT_REGION": REGION,
        "AWS_ACCESS_KEY_ID": ACCESS_KEY_ID,
        "AWS_SECRET_ACCESS_KEY": SECRET_ACCESS_KEY,
        "STATE_DIR": str(files / "state"),
        "S3_DATA_DIR": str(files / "s3"),
        # Both listen on all addresses.
        "IOT_MTLS_ENABLED": "0",
        "SFTP_ENABLED": "0",
        # At its start it removes containers that it takes for its own. It is given no engine to look for them.
        "DOCKER_HOST": f"unix://{files / 'no-docker'}",
    }


def _wait_until_ready(process: Child, port: int) -> None:
    deadline = time.monotonic() + START_SECONDS
    while process.wait(0.02) is None and time.monotonic() < deadline:
        connection = http.client.HTTPConnection(HOST, port, timeout=1.0)
        with contextlib.suppress(OSError, http.client.HTTPException), contextlib.closing(connection):
            connection.request("GET", "/_ministack/ready")
            if connection.getresponse().status == http.HTTPStatus.OK:
                return
    raise StackError(
        f"The emulated AWS did not start:\n{process.said()}",
        means="There is nothing to deploy the functions to.",
        remedy=f"see the reason above and {process.log}.",
    )
