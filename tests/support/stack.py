"""The embedded stack as its users meet it: a command, a file that says where things are, HTTP, SQS and SQL."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any
from uuid import UUID

import boto3
import psycopg

ROOT = Path(__file__).parents[2]
# A first build downloads the wheels of the dependency layer.
START_SECONDS = 240.0
STOP_SECONDS = 30.0


@dataclass(frozen=True)
class Answer:
    """What came back over HTTP."""

    status: int
    headers: Mapping[str, str]
    body: bytes


def charge(api_url: str, key: UUID, amount: int = 4900, principal: str | None = None) -> Answer:
    """Sends a charge; `principal` is the local caller's name."""
    return _send(f"{api_url}/charges", key, amount, principal)


def _send(url: str, key: UUID, amount: int, principal: str | None = None) -> Answer:
    headers = {"Content-Type": "application/json", "Idempotency-Key": str(key)}
    if principal is not None:
        headers["X-Local-Principal"] = principal
    body = json.dumps({"amountCents": amount}).encode()
    request = urllib.request.Request(url, body, headers)  # noqa: S310 - our own
    try:
        with urllib.request.urlopen(request, timeout=STOP_SECONDS) as response:  # noqa: S310
            return Answer(response.status, dict(response.headers), response.read())
    except urllib.error.HTTPError as refusal:
        with refusal:
            return Answer(refusal.code, dict(refusal.headers), refusal.read())


class Stack:
    """A running stack."""

    def __init__(self, process: subprocess.Popen[str], folder: Path) -> None:
        self.process = process
        self.folder = folder
        self.variables = dict(line.split("=", 1) for line in (folder / "env").read_text().splitlines())

    def charge(self, key: UUID, amount: int = 4900, principal: str | None = None) -> Answer:
        return charge(self.variables["API_URL"], key, amount, principal)

    def refund(self, location: str, key: UUID, amount: int) -> Answer:
        """Refunds a part of the charge at that location."""
        return _send(f"{self.variables['API_URL']}{location}/refunds", key, amount)

    def event(self, charge: str, seconds: float) -> dict[str, Any] | None:
        """The event of that charge, once it is in the queue for a person; None when it is not within the time."""
        deadline = time.monotonic() + seconds
        while time.monotonic() < deadline:
            received = self._sqs.receive_message(
                QueueUrl=self.variables["QUEUE_URL"], MaxNumberOfMessages=10, WaitTimeSeconds=1
            )
            for message in received.get("Messages", []):
                self._sqs.delete_message(QueueUrl=self.variables["QUEUE_URL"], ReceiptHandle=message["ReceiptHandle"])
                event: dict[str, Any] = json.loads(message["Body"])
                if event["subject"] == charge:
                    return event
        return None

    def query(self, statement: str) -> list[tuple[Any, ...]]:
        with psycopg.connect(self.variables["DATABASE_URL"], autocommit=True) as connection:
            return connection.execute(statement.encode()).fetchall()

    def execute(self, statement: str) -> None:
        with psycopg.connect(self.variables["DATABASE_URL"], autocommit=True) as connection:
            connection.execute(statement.encode())

    @cached_property
    def _sqs(self) -> Any:
        return boto3.client(
            "sqs",
            endpoint_url=self.variables["AWS_ENDPOINT_URL"],
            region_name=self.variables["AWS_REGION"],
            aws_access_key_id=self.variables["AWS_ACCESS_KEY_ID"],
            aws_secret_access_key=self.variables["AWS_SECRET_ACCESS_KEY"],
        )


@contextlib.contextmanager
def running(folder: Path, parameters: str = "") -> Iterator[Stack]:
    """Start the stack in the folder; whatever state the block leaves it in, none of its processes stays."""
    environment = os.environ | {"LOCAL_DIR": str(folder), "PORT": "0", "PARAMETERS": parameters}
    with subprocess.Popen(
        [sys.executable, "-m", "local", "run"],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            _wait_for(folder / "env", process)
            yield Stack(process, folder)
        finally:
            process.send_signal(signal.SIGKILL)
    wait_until_gone(folder)


def _wait_for(path: Path, process: subprocess.Popen[str]) -> None:
    deadline = time.monotonic() + START_SECONDS
    while not path.exists():
        with contextlib.suppress(subprocess.TimeoutExpired):
            process.wait(0.1)
            assert process.stdout is not None
            raise AssertionError(f"the stack did not start:\n{process.stdout.read()}")
        assert time.monotonic() < deadline, "the stack is not up"


def wait_until_gone(folder: Path) -> None:
    """Wait until no process names the folder in its command line, as every one of the stack's does but the first."""
    deadline = time.monotonic() + STOP_SECONDS
    while left := processes(folder):
        assert time.monotonic() < deadline, f"still there: {left}"


def processes(folder: Path) -> dict[int, str]:
    """The processes of the stack in the folder, by number."""
    listed = subprocess.run(["ps", "-A", "-ww", "-o", "pid=,args="], check=True, capture_output=True, text=True).stdout
    return {int(line.split()[0]): line for line in listed.splitlines() if str(folder) in line}
