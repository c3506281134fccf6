"""A Docker network, and containers on it, that never outlive this process: ``python -m local.containers NETWORK``.

That program is the janitor. It waits for the end of its input, whose other end this process holds and writes nothing
to. When it is closed, in good order or by a sudden death, the janitor removes every container on the network, whoever
started it, and then the network.
"""

import contextlib
import dataclasses
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import docker  # type: ignore[import-untyped]
import psycopg
from docker.errors import APIError, DockerException, NotFound  # type: ignore[import-untyped]

from local.child import ROOT
from local.errors import StackError

HOST = "127.0.0.1"
# Where functions run, by what the template calls the processor: https://gallery.ecr.aws/lambda/python.
LAMBDA_IMAGES = {name: f"public.ecr.aws/lambda/python:3.13-{name}" for name in ("x86_64", "arm64")}
POSTGRES_IMAGE = "postgres:18-alpine"
POSTGRES_PORT = 5432
DATABASE = "charges"
# Each is the role and the database that the image makes.
OWNER = DATABASE

# A server starts in two seconds; on a busy machine it may take many more.
START_SECONDS = 120.0
# Containers are killed. What takes time is the engine.
REMOVE_SECONDS = 60.0


@dataclasses.dataclass(frozen=True, slots=True)
class Database:
    """PostgreSQL in a container: `host` is its name for containers on the network, `url` is for this machine."""

    host: str
    url: str


class Network:
    """A network on which containers find one another by their names."""

    def __init__(self, engine: Any, name: str) -> None:
        self._engine = engine
        self.name = name

    def serve_database(self, password: str) -> Database:
        """Start PostgreSQL, which forgets everything when it ends, and wait until it answers.

        It listens on the network, and on a free port of this machine's loopback. Raises StackError where it does not
        start.
        """
        container = self._run(
            POSTGRES_IMAGE,
            "database",
            environment={"POSTGRES_USER": OWNER, "POSTGRES_DB": DATABASE, "POSTGRES_PASSWORD": password},
            ports={f"{POSTGRES_PORT}/tcp": (HOST, None)},
            tmpfs={"/var/lib/postgresql": ""},
        )
        container.reload()
        port = container.ports[f"{POSTGRES_PORT}/tcp"][0]["HostPort"]
        url = f"postgresql://{OWNER}:{password}@{HOST}:{port}/{DATABASE}"
        self._await(container, url)
        return Database(container.name, url)

    def serve_program(self, program: Path, *, image: str) -> str:
        """Run a Python program of one file, and give the name by which containers reach it."""
        mount = {str(program): {"bind": f"/{program.name}", "mode": "ro"}}
        started = self._run(
            image, program.stem, volumes=mount, entrypoint=["/var/lang/bin/python3.13"], command=[f"/{program.name}"]
        )
        return str(started.name)

    def _run(self, image: str, name: str, **options: Any) -> Any:
        try:
            return self._engine.containers.run(
                image, name=f"{self.name}-{name}", network=self.name, detach=True, **options
            )
        except DockerException as error:
            raise StackError(
                f"No container could be started from {image}: {error}",
                means="The functions would have nothing to talk to.",
                remedy=f"see the reason above; where the image is what is missing, try: docker pull {image}.",
            ) from error

    @staticmethod
    def _await(container: Any, url: str) -> None:
        deadline = time.monotonic() + START_SECONDS
        while True:
            # The engine takes connections to the port before the server does, and cuts them off.
            with contextlib.suppress(psycopg.OperationalError), psycopg.connect(url, connect_timeout=2):
                return
            container.reload()
            if container.status != "running" or time.monotonic() > deadline:
                said = container.logs(tail=12).decode(errors="replace")
                raise StackError(
                    f"PostgreSQL did not start in its container, which is {container.status}:\n{said}",
                    means="Charges have no database.",
                    remedy="see the reason above.",
                )
            time.sleep(0.05)


@contextlib.contextmanager
def network(name: str) -> Iterator[Network]:
    """Make a network, and remove it and every container on it at the block's end, or when this process dies.

    What an earlier network of that name left is removed first. Raises StackError where no Docker engine answers.
    """
    try:
        engine = docker.from_env()
        engine.ping()
    except DockerException as error:
        raise StackError(
            f"No Docker engine answers: {error}",
            means="There is nothing to run the functions' containers.",
            remedy="start Docker; or use `make run`, which needs none.",
        ) from error
    with contextlib.closing(engine):
        remove(name)
        # In a session of its own: Ctrl-C in a terminal is for the foreground group.
        janitor = subprocess.Popen(
            [sys.executable, "-m", "local.containers", name], cwd=ROOT, stdin=subprocess.PIPE, start_new_session=True
        )
        try:
            _create(engine, name)
            yield Network(engine, name)
        finally:
            # With nothing written, this closes its input and waits for its end.
            janitor.communicate()


def _create(engine: Any, name: str) -> None:
    try:
        engine.networks.create(name)
    except DockerException as error:
        raise StackError(
            f"No Docker network could be made: {error}",
            means="The containers would not find one another.",
            remedy="see the reason above; `docker network prune` removes networks that nobody uses.",
        ) from error


def remove(name: str) -> None:
    """Remove the network, and the containers on it with what they kept. Nothing happens where there is none."""
    with contextlib.closing(docker.from_env()) as engine:
        deadline = time.monotonic() + REMOVE_SECONDS
        while found := [one for one in engine.networks.list(names=[name]) if one.name == name]:
            try:
                for container in engine.containers.list(all=True, filters={"network": name}, ignore_removed=True):
                    # SAM removes its own containers, perhaps at this moment.
                    with contextlib.suppress(NotFound):
                        container.remove(force=True, v=True)
                found[0].remove()
            except APIError:
                # Another removal is under way, or another container has come.
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.1)


def main(name: str) -> int:
    """Wait for the end of the input, and remove the network."""
    sys.stdin.read()
    remove(name)
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
