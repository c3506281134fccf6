"""The whole service on this machine, as one command that ends on Ctrl-C: ``python -m local run``.

PostgreSQL, the emulated AWS, and in it the very template that is deployed, with the artifacts that sam builds.
LOCAL_DIR says where it keeps everything, PORT where the emulated AWS listens (0: on a free port), and PARAMETERS what
the template's parameters are, other than by default.
"""

import contextlib
import select
import sys
import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import NoReturn

from botocore.exceptions import BotoCoreError

from local import deploy, emulator, environment, lock, receiver, stack
from local.child import Child
from local.errors import StackError
from local.stack import Stack
from local.stopping import Stopped

DEFAULT_PORT = 4566


def main() -> int:
    """Run until told to stop; 0 then. Raises StackError where it cannot start or go on."""
    try:
        _run(environment.create(), environment.port(DEFAULT_PORT), environment.parameters())
    except Stopped:
        _say(f"Stopped. The database is kept; `{environment.command('clean')}` forgets it.")
        return 0


def _run(folder: Path, port: int, parameters: Mapping[str, str]) -> NoReturn:
    begun = time.monotonic()
    with contextlib.ExitStack() as running:
        held = running.enter_context(lock.held(folder / "lock"))
        environment.remove()
        running.callback(environment.remove)
        up = running.enter_context(stack.serve(folder, port=port, lock=held, parameters=parameters))
        endpoint = running.enter_context(receiver.serve(up.deployment.api_url, _mention))
        _say(_welcome(up, endpoint, time.monotonic() - begun))
        # Last of all: whoever waits for this file finds everything ready.
        environment.write(_variables(up), environment.path())
        try:
            _watch({"PostgreSQL": up.server.process, "The emulated AWS": up.aws.process})
        except Stopped:
            _say("\nStopping ...")
            # First, so that nobody goes by it meanwhile.
            environment.remove()
            with contextlib.suppress(OSError, BotoCoreError):
                if not deploy.drain(up.aws, up.deployment):
                    _say("The subscriber has not taken all of its messages. The emulated AWS forgets the rest.")
            raise


def _variables(up: Stack) -> dict[str, str]:
    return {
        "API_URL": up.deployment.api_url,
        "DATABASE_URL": up.server.url,
        "AWS_ENDPOINT_URL": up.aws.url,
        "AWS_REGION": emulator.REGION,
        "AWS_ACCESS_KEY_ID": emulator.ACCESS_KEY_ID,
        "AWS_SECRET_ACCESS_KEY": emulator.SECRET_ACCESS_KEY,
        "TOPIC_ARN": up.deployment.topic_arn,
        "QUEUE_URL": up.deployment.queue_url,
    }


def _welcome(up: Stack, endpoint: str, seconds: float) -> str:
    # A key of this start's own, so that the first command creates a charge each time.
    key = uuid.uuid4()
    return f"""
Up after {seconds:.1f} s, on 127.0.0.1 alone. Ctrl-C stops it.

    API_URL       {up.deployment.api_url}
    DATABASE_URL  {up.server.url}
    QUEUE_URL     {up.deployment.queue_url}
    all of them   {environment.path()}
    function log  {up.aws.function_log}

Try, in another terminal:

  Take a charge: 201.
    curl -i {up.deployment.api_url}/charges \\
      -H 'Content-Type: application/json' -H 'Idempotency-Key: {key}' -d '{{"amountCents":4900}}'
  Send it again: the first answer comes back, with Idempotent-Replayed: true. Another amount under the same key: 422.
    curl -i {up.deployment.api_url}/charges \\
      -H 'Content-Type: application/json' -H 'Idempotency-Key: {key}' -d '{{"amountCents":4900}}'
  See the event of the charge, and of each one to come.
    {environment.command("events")}
  See what became of its webhook, which arrives right here, at a receiver that belongs to this terminal.
    curl {up.deployment.api_url}{endpoint}/deliveries
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


def _mention(text: str) -> None:
    """Say it unless nobody reads: a pipe that is full would hold up whoever waits for what comes after."""
    if select.select([], [sys.stdout], [], 0)[1]:
        _say(text)
