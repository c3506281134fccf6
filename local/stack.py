"""The embedded stack, from nothing to its first answer: PostgreSQL, the emulated AWS, and in it the built template."""

import contextlib
import dataclasses
import http
import time
import urllib.error
import urllib.request
from collections.abc import Iterator, Mapping
from pathlib import Path
from types import MappingProxyType

import psycopg

from charging import errors, migrations, roles
from local import build, deploy, emulator, environment, postgres, stopping
from local.child import ROOT
from local.deploy import Deployment
from local.emulator import Emulator
from local.errors import StackError
from local.postgres import DATABASE, Server

# Two functions start cold in this time, which takes a second or two.
WARM_SECONDS = 60.0


@dataclasses.dataclass(frozen=True, slots=True)
class Stack:
    """A stack that is up: its server, its emulator, and where the deployed service is in it."""

    server: Server
    aws: Emulator
    deployment: Deployment


@contextlib.contextmanager
def serve(
    folder: Path, *, port: int, lock: int, relays: bool = True, parameters: Mapping[str, str] = MappingProxyType({})
) -> Iterator[Stack]:
    """Start a stack in the folder, telling of each step, and stop it at the block's end.

    `lock` is the descriptor of the folder's lock, which the emulator holds too. With `relays` false the relay and the
    webhooks' dispatcher run when they are invoked and at no other time. `parameters` go to the template. Raises
    StackError where the stack cannot start.
    """
    with contextlib.ExitStack() as running:
        port = emulator.available(port)  # before anything that takes time
        if not build.is_current():
            with step("Building the functions and layers with sam build, up to a minute the first time"):
                build.build()
        with step("Starting PostgreSQL"):
            server = running.enter_context(postgres.serve(folder / "postgres"))
        with step("Bringing the schema forward"):
            migrate(server.url, server.functions_password)
        with step("Starting the emulated AWS"):
            aws = running.enter_context(emulator.serve(folder / "emulator", port=port, lock=lock))
        with step("Deploying template.yaml"):
            deployment = deploy.deploy(aws, server, relays=relays, parameters=parameters)
        with step("Waiting for the first answer"):
            _await_api(deployment)
            if relays:
                _await_senders(server)
        yield Stack(server, aws, deployment)


@contextlib.contextmanager
def step(name: str) -> Iterator[None]:
    """Tell of a step of the start, and how long it took."""
    print(f"{name} ...", end="", flush=True)
    begun = time.monotonic()
    try:
        yield
    except BaseException:
        print(flush=True)
        raise
    print(f" {time.monotonic() - begun:.1f} s", flush=True)


def migrate(url: str, functions_password: str) -> None:
    """Bring a database forward, as its owner, and let the functions' roles sign in with the password.

    Raises StackError where it was made by other sources than these.
    """
    try:
        with stopping.deferred(), psycopg.connect(url, autocommit=True) as connection:
            migrations.migrate(connection, ROOT / "schema")
            roles.provide(connection, password=functions_password)
    except (errors.MigrationRefused, errors.RolesRefused, psycopg.Error) as error:
        raise StackError(
            f"The schema could not be brought forward: {error}",
            means="The database that was kept does not fit these sources.",
            remedy=f"see the reason above; `{environment.command('clean')}` starts with an empty database.",
        ) from error


def _await_api(deployment: Deployment) -> None:
    """Wait for the API's first answer: a first charge is then as quick as any."""
    request = urllib.request.Request(f"{deployment.api_url}/charges", method="POST")  # noqa: S310 - our own address
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


def _await_senders(server: Server) -> None:
    """Wait until the relay and the dispatcher ask for events: a first event is then as quick as any."""
    deadline = time.monotonic() + WARM_SECONDS
    with psycopg.connect(server.url, autocommit=True) as connection:
        senders = [roles.name(DATABASE, function) for function in ("relay", "webhooks")]
        connected = "SELECT count(DISTINCT usename) FROM pg_stat_activity WHERE usename = ANY (%s)"
        while connection.execute(connected, [senders]).fetchone() != (len(senders),):
            if time.monotonic() > deadline:
                raise StackError(
                    "The relay or the webhooks' dispatcher does not connect to the database.",
                    means="Charges are taken, and their events would stay where they are.",
                    remedy="see the functions' log and the emulator's, in the folder emulator of LOCAL_DIR.",
                )
            time.sleep(0.05)
