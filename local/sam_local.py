"""The built functions in Lambda containers, behind an API on this machine: ``python -m local sam_local``.

`sam local start-api` serves them, from the artifacts that sam builds, beside PostgreSQL and a stand-in for SNS in
containers on the same Docker network. All of it is gone when the command ends, the database included. LOCAL_DIR says
where it keeps its files, PORT where the API listens (0: on a free port).
"""

import contextlib
import hashlib
import http
import json
import os
import secrets
import shutil
import signal
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import NoReturn

from local import build, containers, emulator, environment, lock, overlay, sam, sns, stack
from local.child import Child
from local.containers import DATABASE, LAMBDA_IMAGES, OWNER, POSTGRES_PORT, Database
from local.errors import StackError
from local.stopping import Stopped

DEFAULT_PORT = 3000
# The first request makes the image of the layers, and pulls the one that it is made from where it is not there.
FIRST_SECONDS = 600.0
# What sam takes to remove its containers.
STOP_SECONDS = 30.0

# What the template takes from resources that are not made here. It is a secret: nobody else may read it.
VARIABLES = "variables.json"

# Of the caller's environment. No AWS profile is among it: none of its keys may reach a function.
_KEPT = ("HOME", "LANG", "TMPDIR")
_KEPT_PREFIX = "DOCKER_"


def main() -> int:
    """Serve until told to stop; 0 then. Raises StackError where it cannot start or go on."""
    try:
        _run(environment.create() / "sam-local", environment.port(DEFAULT_PORT))
    except Stopped:
        print("Stopped. Containers and network are gone, and so is the database.", flush=True)
        return 0


def command(subcommand: str, folder: Path) -> Sequence[str]:
    """The beginning of a `sam local` command for what is served from the folder."""
    return [
        *(sam.program(), "local", subcommand, "--template", str(folder / "build" / "template.yaml")),
        *("--docker-network", network_of(folder), "--layer-cache-basedir", str(folder / "build" / "layers")),
        *("--env-vars", str(folder / VARIABLES)),
        # An image that is not there is pulled all the same.
        "--skip-pull-image",
    ]


def variables(folder: Path) -> Mapping[str, str]:
    """The environment of such a command."""
    kept = {name: value for name, value in os.environ.items() if name in _KEPT or name.startswith(_KEPT_PREFIX)}
    nobody = {
        "AWS_CONFIG_FILE": os.devnull,
        "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
        "AWS_EC2_METADATA_DISABLED": "true",
        "AWS_DEFAULT_REGION": emulator.REGION,
    }
    return kept | nobody | sam.environment(notes=folder / "sam")


def network_of(folder: Path) -> str:
    """The network's name: the folder's own, so that the next run in it finds what a killed one has left."""
    return f"charges-{hashlib.sha256(str(folder.resolve()).encode()).hexdigest()[:12]}"


def _run(folder: Path, port: int) -> NoReturn:
    begun = time.monotonic()
    folder.mkdir(mode=0o700, exist_ok=True)
    with contextlib.ExitStack() as running:
        held = running.enter_context(lock.held(folder / "lock", "sam-local"))
        api_url, database, process = _serve(running, folder, port, held)
        print(_welcome(folder, api_url, database, time.monotonic() - begun), flush=True)
        environment.write({"API_URL": api_url, "DATABASE_URL": database.url}, folder / "env")
        try:
            _watch(process)
        except Stopped:
            print("\nStopping ...", flush=True)
            raise


def _serve(running: contextlib.ExitStack, folder: Path, port: int, held: int) -> tuple[str, Database, Child]:
    port = emulator.available(port, "sam-local")
    network = running.enter_context(containers.network(network_of(folder)))
    running.enter_context(_emptied(folder))
    if not build.is_current():
        with stack.step("Building the functions and layers with sam build, up to a minute the first time"):
            build.build()
    owner_password, password = secrets.token_urlsafe(24), secrets.token_urlsafe(24)
    with stack.step("Starting PostgreSQL in a container"):
        database = network.serve_database(owner_password)
    with stack.step("Bringing the schema forward"):
        stack.migrate(database.url, password)
    with stack.step("Starting the stand-in for SNS in a container"):
        topic = network.serve_program(Path(sns.__file__), image=LAMBDA_IMAGES[build.architecture()])
    overlay.write(folder / "build", aws=f"http://{topic}:{sns.PORT}")
    _give(database, owner_password, password, folder)
    process = Child(
        # LAZY: a function's container stays for its next invocation. --no-watch: the artifacts are a copy.
        [*command("start-api", folder), "--port", str(port), "--warm-containers", "LAZY", "--no-watch"],
        log=folder / "start-api.log",
        environment=variables(folder),
        stop_by=signal.SIGINT,
        grace=STOP_SECONDS,
        keep=[held],
    )
    running.callback(process.stop)
    api_url = f"http://{emulator.HOST}:{port}"
    with stack.step("Waiting for the first answer, up to a minute the first time"):
        _await_api(api_url, process)
    return api_url, database, process


def _give(database: Database, owner_password: str, password: str, folder: Path) -> None:
    """Write down the variables of the functions that `sam local` cannot know. Each function takes those that it has."""
    common = {
        "DATABASE_HOST": database.host,
        "DATABASE_PORT": str(POSTGRES_PORT),
        "DATABASE_NAME": DATABASE,
        "DATABASE_PASSWORD": password,
        "TOPIC_ARN": overlay.TOPIC_ARN,
        "WEBHOOK_MASTER_KEY_ARN": overlay.MASTER_KEY_ARN,
        # The relay and the webhooks' dispatcher are invoked by hand: they send what is there, and end.
        "RELAY_BUDGET_SECONDS": "0",
        "WEBHOOKS_BUDGET_SECONDS": "0",
    }
    migrate = {
        "DATABASE_USER": OWNER,
        "DATABASE_PASSWORD": owner_password,
        "DATABASE_ROLES_PASSWORD": password,
    }
    path = folder / VARIABLES
    path.touch(mode=0o600)
    path.write_text(json.dumps({"Parameters": common, "MigrateFunction": migrate}))


@contextlib.contextmanager
def _emptied(folder: Path) -> Iterator[None]:
    """Nothing of an earlier run is in the folder during the block, and after it nothing but the logs: no password."""

    def empty(*kept: str) -> None:
        for path in folder.iterdir():
            if path.name not in {"lock", *kept}:
                shutil.rmtree(path) if path.is_dir() else path.unlink()

    empty()
    try:
        yield
    finally:
        empty("start-api.log")


def _await_api(api_url: str, process: Child) -> None:
    """Wait for the API's first answer: a first charge is then as quick as any."""
    request = urllib.request.Request(f"{api_url}/charges", method="POST")  # noqa: S310 - our own address
    deadline = time.monotonic() + FIRST_SECONDS
    status = None
    while status is None and process.wait(0.1) is None and time.monotonic() < deadline:
        try:
            with urllib.request.urlopen(request, timeout=FIRST_SECONDS) as response:  # noqa: S310
                status = response.status
        except urllib.error.HTTPError as refusal:
            with refusal:
                status = refusal.status
        except urllib.error.URLError:
            continue  # it does not listen yet
    if status != http.HTTPStatus.BAD_REQUEST:
        raise StackError(
            f"The API answers {status} to a charge without a key, where it should answer 400:\n{process.said()}",
            means="sam local does not serve the functions.",
            remedy=f"see the reason above and {process.log}.",
        )


def _watch(process: Child) -> NoReturn:
    """Wait for somebody to stop the run. Raises StackError when sam ends instead."""
    while (status := process.wait(0.5)) is None:
        pass
    raise StackError(
        f"sam local has ended unexpectedly, with status {status}:\n{process.said()}",
        means="The API is not served any more.",
        remedy=f"see {process.log}, and start it again.",
    )


def _welcome(folder: Path, api_url: str, database: Database, seconds: float) -> str:
    # A key of this start's own, so that the first command creates a charge each time.
    key = uuid.uuid4()
    return f"""
Up after {seconds:.1f} s, on 127.0.0.1 alone. Ctrl-C stops it, and forgets the database.

    API_URL       {api_url}
    DATABASE_URL  {database.url}
    both of them  {folder / "env"}
    function log  {folder / "start-api.log"}

Try, in another terminal:

  Take a charge: 201.
    curl -i {api_url}/charges \\
      -H 'Content-Type: application/json' -H 'Idempotency-Key: {key}' -d '{{"amountCents":4900}}'
  Invoke a function in a container of its own, with a sample event: the relay, which publishes the charge's event.
    {environment.command("sam-invoke")} EVENT=events/relay-schedule.json
  See what has been published.
    docker logs {network_of(folder)}-{Path(sns.__file__).stem}
"""
