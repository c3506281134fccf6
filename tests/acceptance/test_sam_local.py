"""The built functions in Lambda containers, behind `sam local`, on a database in a container."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any, NamedTuple
from uuid import UUID, uuid4

import docker  # type: ignore[import-untyped]
import psycopg
import pytest

from local import sam_local
from local.errors import StackError
from local.sam_invoke import function_of
from tests.packaging.artifacts import FUNCTIONS
from tests.support import container
from tests.support.invocation import ROOT
from tests.support.stack import Answer, charge

# One worker runs them all, on one stack.
pytestmark = pytest.mark.xdist_group("sam local")

# The build, the image of the layers, and the first answer, on a machine that is busy with the other tests.
START_SECONDS = 240.0
STOP_SECONDS = 60.0

EVENTS = sorted((ROOT / "events").glob("*.json"))
# What requests are answered other than 201. A local caller has a name from the authorizer of this machine alone, and no
# header gives one; the charge that is to be refunded is nobody's.
ANSWERS = {"charge-load-balancer": 401, "charge-sam-local": 401, "charge-refund": 404}


class Served(NamedTuple):
    """The running command, and where it serves."""

    process: subprocess.Popen[str]
    folder: Path

    @property
    def variables(self) -> dict[str, str]:
        lines = (self.folder / "sam-local" / "env").read_text().splitlines()
        return dict(line.split("=", 1) for line in lines)

    def charge(self, key: UUID, amount: int, principal: str | None = None) -> Answer:
        return charge(self.variables["API_URL"], key, amount, principal)

    def invoke(self, event: str) -> Any:
        """What a function answers to a sample event, in a container of its own."""
        finished = command("sam_invoke", f"events/{event}.json", LOCAL_DIR=str(self.folder))
        assert finished.returncode == 0, finished.stderr
        return json.loads(finished.stdout)

    def query(self, statement: str) -> list[tuple[Any, ...]]:
        with psycopg.connect(self.variables["DATABASE_URL"], autocommit=True) as connection:
            return connection.execute(statement.encode()).fetchall()


def command(*arguments: str, **variables: str) -> subprocess.CompletedProcess[str]:
    """Runs one of the commands to its end."""
    return subprocess.run(
        [sys.executable, "-m", "local", *arguments],
        cwd=ROOT,
        env=os.environ | variables,
        capture_output=True,
        text=True,
        check=False,
    )


@contextlib.contextmanager
def serving(folder: Path) -> Iterator[Served]:
    """The command, started and perhaps not up yet; whatever it leaves is removed."""
    with subprocess.Popen(
        [sys.executable, "-m", "local", "sam_local"],
        cwd=ROOT,
        env=os.environ | {"LOCAL_DIR": str(folder), "PORT": "0"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
    ) as process:
        try:
            yield Served(process, folder)
        finally:
            process.kill()
            wait_until(lambda: left_of(folder) == ([], []), STOP_SECONDS)


@pytest.fixture(scope="module")
def served(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Served]:
    container.require_engine()
    with serving(tmp_path_factory.mktemp("sam")) as served:
        is_up = served.folder / "sam-local" / "env"
        wait_until(lambda: is_up.exists() or served.process.poll() is not None, START_SECONDS)
        if not is_up.exists():
            assert served.process.stdout is not None
            pytest.fail(f"it did not start:\n{served.process.stdout.read()}")
        yield served


def left_of(folder: Path) -> tuple[list[str], list[str]]:
    """The containers and the networks that are there for the stack in the folder."""
    name = sam_local.network_of(folder / "sam-local")
    with contextlib.closing(docker.from_env()) as engine:
        networks = engine.networks.list(names=[name])
        containers = engine.containers.list(all=True, filters={"network": name}, ignore_removed=True)
        named = engine.containers.list(all=True, filters={"name": name}, ignore_removed=True)
        return [one.name for one in [*containers, *named]], [one.name for one in networks]


def wait_until(is_so: Any, seconds: float) -> None:
    deadline = time.monotonic() + seconds
    while not is_so():
        assert time.monotonic() < deadline
        time.sleep(0.05)  # what is awaited is another process's work


def test_without_docker_it_says_what_to_do(tmp_path: Path) -> None:
    """And that there is another way."""
    ended = command("sam_local", LOCAL_DIR=str(tmp_path), PORT="0", DOCKER_HOST=f"unix://{tmp_path}/none")
    assert ended.returncode == 1
    assert "No Docker engine answers" in ended.stderr
    assert "make run" in ended.stderr


def test_an_invocation_says_what_it_lacks(tmp_path: Path) -> None:
    """A name, an event that is there, and a stack that is up."""
    for event, lack in (
        ("", "No event is named"),
        ("events/none.json", "There is no event"),
        ("events/migrate.json", "Nothing is served"),
    ):
        ended = command("sam_invoke", event, LOCAL_DIR=str(tmp_path))
        assert ended.returncode == 1
        assert lack in ended.stderr


def test_each_sample_event_names_its_function(tmp_path: Path) -> None:
    """By its first word; one that names none is refused."""
    assert {function_of(event) for event in EVENTS} == FUNCTIONS.keys()
    with pytest.raises(StackError, match="is for no function"):
        function_of(tmp_path / "charging-schedule.json")


def test_a_charge_is_taken_and_replayed(served: Served) -> None:
    """201 with where it is; again, the same answer, marked; another caller's use of the key is another charge."""
    key = uuid4()
    first, again = served.charge(key, 4900), served.charge(key, 4900)
    assert first.status == 201
    assert (again.status, again.body, again.headers["Location"]) == (201, first.body, first.headers["Location"])
    assert again.headers["Idempotent-Replayed"] == "true"
    assert served.charge(key, 5000).status == 422
    other = served.charge(key, 5000, principal="grace")
    assert other.status == 201
    assert "Idempotent-Replayed" not in other.headers
    assert served.query("SELECT principal, amount_cents FROM charges ORDER BY amount_cents") == [
        ("local", 4900),
        ("grace", 5000),
    ]


def test_the_relay_publishes_from_its_container(served: Served) -> None:
    """What a charge wrote is accepted by the stand-in for SNS, as it was written, and marked."""
    assert served.charge(uuid4(), 4711).status == 201
    answer = served.invoke("relay-schedule")
    assert answer["results"] == {"PUBLISHED": answer["claimed"]}
    assert served.query("SELECT count(*) FROM outbox WHERE published_at IS NULL") == [(0,)]
    with contextlib.closing(docker.from_env()) as engine:
        topic = engine.containers.get(f"{sam_local.network_of(served.folder / 'sam-local')}-sns")
        published = [json.loads(line) for line in topic.logs().splitlines()]
    assert [event["data"]["amountCents"] for event in published].count(4711) == 1
    assert {event["type"] for event in published} == {"ChargeCreated"}


@pytest.mark.parametrize("event", [path.stem for path in EVENTS])
def test_each_sample_event_is_handled(event: str, served: Served) -> None:
    """Its function takes it as it is, from the built artifact, and fails at nothing."""
    answer = served.invoke(event)
    assert "errorMessage" not in answer
    if "statusCode" in answer:
        assert answer["statusCode"] == ANSWERS.get(event, 201)
    assert not answer.get("batchItemFailures")


def test_it_stops_when_told_and_leaves_nothing(served: Served) -> None:
    """SIGINT, as Ctrl-C: exit status 0; no container, no network, no password. The stack above is gone after it."""
    assert len(left_of(served.folder)[0]) > 2
    served.process.send_signal(signal.SIGINT)
    assert served.process.wait(STOP_SECONDS) == 0
    assert left_of(served.folder) == ([], [])
    assert {path.name for path in (served.folder / "sam-local").iterdir()} == {"lock", "start-api.log"}


def test_a_killed_run_leaves_nothing(tmp_path: Path) -> None:
    """SIGKILL gives the command no chance to remove anything, and still its container and its network go."""
    container.require_engine()
    with serving(tmp_path) as served:
        wait_until(lambda: left_of(tmp_path)[0], START_SECONDS)
        served.process.kill()
        wait_until(lambda: left_of(tmp_path) == ([], []), STOP_SECONDS)
