"""The whole service on this machine, as one command that ends on Ctrl-C: ``python -m local.run``.

PostgreSQL, the emulated AWS, and in it the very template that is deployed, with the artifacts that sam builds.
LOCAL_DIR says where it keeps everything, PORT where the emulated AWS listens (0: on a free port).
"""

import contextlib
import http
import os
import shlex
import sys
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import NoReturn

import psycopg

from charging import errors, migrations
from local import build, deploy, emulator, environment, lock, postgres, stopping
from local.child import ROOT, Child
from local.deploy import Stack
from local.emulator import Emulator
from local.errors import StackError
from local.postgres import Server
from local.stopping import Stopped

DEFAULT_PORT = 4566
# Two functions start cold in this time, which takes a second or two.
WARM_SECONDS = 60.0


def main() -> int:
    """Run until told to stop; 0 then, and 1 where it could not start or go on."""
    stopping.listen()
    try:
        _run(environment.folder(), _port())
    except Stopped:
        _say("Stopped. The database is kept; `make clean` forgets it.")
        return 0
    except (StackError, OSError) as error:
        print(f"\n{error}", file=sys.stderr, flush=True)
        return 1


def _port() -> int:
    given = os.environ.get("PORT") or str(DEFAULT_PORT)
    if not given.isdecimal() or int(given) > 65535:  # noqa: PLR2004 - the largest port there is
        raise StackError(
            f"PORT is {given!r}.", means="It is not a port.", remedy="give a number up to 65535; 0 finds a free port."
        )
    return int(given)


def _run(folder: Path, port: int) -> NoReturn:
    begun = time.monotonic()
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    with contextlib.ExitStack() as running:
        held = running.enter_context(lock.held(folder / "lock"))
        environment.remove()
        running.callback(environment.remove)
        port = emulator.available(port)  # before anything that takes time
        if not build.is_current():
            with _step("Building the functions and layers (sam build)"):
                build.build()
        with _step("Starting PostgreSQL"):
            server = running.enter_context(postgres.serve(folder / "postgres"))
        with _step("Bringing the schema forward"):
            _migrate(server)
        with _step("Starting the emulated AWS"):
            aws = running.enter_context(emulator.serve(folder / "emulator", port=port, lock=held))
        with _step("Deploying template.yaml"):
            stack = deploy.deploy(aws, server)
        with _step("Waiting for the first answer"):
            _warm_up(server, stack)
        _say(_welcome(server, aws, stack, time.monotonic() - begun))
        # Last of all: whoever waits for this file finds everything ready.
        environment.write(_variables(server, aws, stack))
        try:
            _watch({"PostgreSQL": server.process, "The emulated AWS": aws.process})
        except Stopped:
            _say("\nStopping ...")
            # First, so that nobody goes by it meanwhile.
            environment.remove()
            with contextlib.suppress(OSError):
                deploy.drain(aws, stack)
            raise


@contextlib.contextmanager
def _step(name: str) -> Iterator[None]:
    print(f"{name} ...", end="", flush=True)
    begun = time.monotonic()
    try:
        yield
    except BaseException:
        _say("")
        raise
    _say(f" {time.monotonic() - begun:.1f} s")


def _migrate(server: Server) -> None:
    try:
        with psycopg.connect(server.url, autocommit=True) as connection:
            migrations.migrate(connection, ROOT / "schema")
    except (errors.MigrationRefused, psycopg.Error) as error:
        raise StackError(
            f"The schema could not be brought forward: {error}",
            means="The database that was kept does not fit these sources.",
            remedy="see the reason above; `make clean` starts with an empty database.",
        ) from error


def _warm_up(server: Server, stack: Stack) -> None:
    """Wait for the API's first answer and for the relay: a first charge and its event are then as quick as any."""
    request = urllib.request.Request(f"{stack.api_url}/charges", method="POST")  # noqa: S310 - our own address
    try:
        with urllib.request.urlopen(request, timeout=WARM_SECONDS) as response:  # noqa: S310
            status = response.status
    except urllib.error.HTTPError as refusal:
        with refusal:
            status = refusal.status
    if status != http.HTTPStatus.BAD_REQUEST:
        raise StackError(
            f"The API answers {status} to a charge without a key, where it should answer 400.",
            means="The functions are deployed and do not work.",
            remedy="see the functions' log and the emulator's, in the folder emulator of LOCAL_DIR.",
        )
    deadline = time.monotonic() + WARM_SECONDS
    with psycopg.connect(server.url, autocommit=True) as connection:
        relay = "SELECT 1 FROM pg_stat_activity WHERE usename = current_user AND pid <> pg_backend_pid()"
        while connection.execute(relay).fetchone() is None:
            if time.monotonic() > deadline:
                raise StackError(
                    "The relay does not connect to the database.",
                    means="Charges are taken, and their events would stay in the outbox.",
                    remedy="see the functions' log and the emulator's, in the folder emulator of LOCAL_DIR.",
                )
            time.sleep(0.05)


def _variables(server: Server, aws: Emulator, stack: Stack) -> dict[str, str]:
    return {
        "API_URL": stack.api_url,
        "DATABASE_URL": server.url,
        "AWS_ENDPOINT_URL": aws.url,
        "AWS_REGION": emulator.REGION,
        "AWS_ACCESS_KEY_ID": emulator.ACCESS_KEY_ID,
        "AWS_SECRET_ACCESS_KEY": emulator.SECRET_ACCESS_KEY,
        "TOPIC_ARN": stack.topic_arn,
        "QUEUE_URL": stack.queue_url,
    }


def _welcome(server: Server, aws: Emulator, stack: Stack, seconds: float) -> str:
    given = os.environ.get("LOCAL_DIR")
    events = f"make events LOCAL_DIR={shlex.quote(given)}" if given else "make events"
    # A key of this start's own, so that the first command creates a charge each time.
    key = uuid.uuid4()
    return f"""
Up after {seconds:.1f} s, on 127.0.0.1 alone. Ctrl-C stops it.

    API_URL       {stack.api_url}
    DATABASE_URL  {server.url}
    QUEUE_URL     {stack.queue_url}
    all of them   {environment.path()}
    function log  {aws.function_log}

Try, in another terminal:

  Take a charge: 201.
    curl -i {stack.api_url}/charges \\
      -H 'Content-Type: application/json' -H 'Idempotency-Key: {key}' -d '{{"amountCents":4900}}'
  Send it again: the first answer comes back, with Idempotent-Replayed: true. Another amount under the same key: 422.
    curl -i {stack.api_url}/charges \\
      -H 'Content-Type: application/json' -H 'Idempotency-Key: {key}' -d '{{"amountCents":4900}}'
  See the event of the charge, and of each one to come.
    {events}
"""


def _watch(children: Mapping[str, Child]) -> NoReturn:
    """Wait for somebody to stop the run. Raises StackError when one of the children ends instead."""
    while True:
        for name, child in children.items():
            status = child.wait(0.5)
            if status is not None:
                raise StackError(
                    f"{name} has ended unexpectedly, with status {status}:\n{child.said()}",
                    means="The embedded stack cannot go on.",
                    remedy=f"see {child.log}, and start it again: the database is kept.",
                )


def _say(text: str) -> None:
    print(text, flush=True)


if __name__ == "__main__":
    sys.exit(main())
