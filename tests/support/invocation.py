"""Lambda's side of an invocation: the event, the context, and an instance of a function on a database."""

import copy
import importlib.util
import itertools
import json
import multiprocessing
import os
import time
from collections.abc import Mapping
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from multiprocessing.process import BaseProcess
from multiprocessing.synchronize import Barrier
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock
from uuid import UUID, uuid4

import psycopg
from aws_lambda_powertools.utilities.typing import LambdaContext
from psycopg import conninfo, sql

from charging import roles

ROOT = Path(__file__).parents[2]

# The function that signs in as the database's owner.
OWNER = "migrate"

type Event = dict[str, Any]

# As template.yaml has it.
TIMEOUT_SECONDS = 10.0
# What a function with operations needs beside its database.
CHARGES = {"IDEMPOTENCY_RETENTION_HOURS": "24", "IN_FLIGHT_WAIT_MS": "0"}
# What the relay needs beside its database and its topic. Its runs drain the outbox once.
RELAY = {
    "RELAY_BUDGET_SECONDS": "0",
    "RELAY_POLL_MS": "250",
    "RELAY_MAX_ATTEMPTS": "5",
    "RELAY_PARKED_HEAD": "block",
}
# What webhooks needs beside its database. Its runs take what is due, and may go to receivers on this machine.
WEBHOOKS = {
    "WEBHOOK_MASTER_KEY_ARN": "arn:aws:secretsmanager:eu-central-1:111122223333:secret:WebhookMasterKey-AbCdEf",
    "WEBHOOKS_BUDGET_SECONDS": "0",
    "WEBHOOKS_POLL_MS": "10",
    "LOCAL_WEBHOOKS": "allowed",
}
# And endpoints.
ENDPOINTS_VARIABLES = {
    **CHARGES,
    "WEBHOOK_MASTER_KEY_ARN": "arn:aws:secretsmanager:eu-central-1:111122223333:secret:WebhookMasterKey-AbCdEf",
}

# A process that has not ended by then never will.
PATIENCE_SECONDS = 20.0

_numbers = itertools.count()


class Context(LambdaContext):
    """What Lambda tells a function of the invocation: its time runs down as real time does."""

    def __init__(self, seconds: float = TIMEOUT_SECONDS) -> None:
        self._function_name = "function"
        self._function_version = "$LATEST"
        self._invoked_function_arn = "arn:aws:lambda:eu-central-1:111122223333:function:function"
        self._memory_limit_in_mb = 1024
        self._aws_request_id = str(uuid4())
        self._log_group_name = "/aws/lambda/function"
        self._log_stream_name = "stream"
        self._end = time.monotonic() + seconds

    def get_remaining_time_in_millis(self) -> int:  # type: ignore[override]  # declared static there
        """Negative once it is over, as Lambda's own is for a moment."""
        return int((self._end - time.monotonic()) * 1000)


@dataclass(frozen=True, slots=True)
class Answer:
    """A function's answer, as the gateway reads it. `headers` has lower-case names and one value each."""

    status: int
    headers: Mapping[str, str]
    body: str
    raw: Mapping[str, Any] = field(repr=False)

    @property
    def json(self) -> Any:
        return json.loads(self.body)

    @property
    def code(self) -> str:
        """The code of a problem; empty when the answer is none."""
        return str(self.json["code"]) if self.headers["content-type"] == "application/problem+json" else ""

    @property
    def is_replay(self) -> bool:
        return self.headers.get("idempotent-replayed") == "true"


class Instance:
    """One instance of a function: its module is its own, and so are its settings and its warm connection."""

    def __init__(self, function: str, database_url: str, variables: Mapping[str, str]) -> None:
        path = ROOT / "functions" / function / "handler.py"
        spec = importlib.util.spec_from_file_location(f"{function}_instance_{next(_numbers)}", path)
        assert spec is not None
        assert spec.loader is not None
        self.module: ModuleType = importlib.util.module_from_spec(spec)
        spec.loader.exec_module(self.module)
        with mock.patch.dict(os.environ, {**database_variables(database_url, function), **variables}):
            self.module.settings()

    def invoke(self, event: object, *, seconds: float = TIMEOUT_SECONDS, context: LambdaContext | None = None) -> Any:
        """Hands over the event as Lambda does: as JSON, which the function may do with as it likes."""
        return self.module.handler(copy.deepcopy(event), context or Context(seconds))

    def call(self, event: Event, *, seconds: float = TIMEOUT_SECONDS, context: LambdaContext | None = None) -> Answer:
        """Invokes a function that answers HTTP requests."""
        raw = self.invoke(event, seconds=seconds, context=context)
        json.dumps(raw, allow_nan=False)  # which is how it leaves Lambda
        lines = raw.get("multiValueHeaders", {name: [value] for name, value in raw.get("headers", {}).items()})
        assert all(len(values) == 1 for values in lines.values())
        return Answer(raw["statusCode"], {name.lower(): values[0] for name, values in lines.items()}, raw["body"], raw)

    def close(self) -> None:
        """Ends the instance's connection."""
        self.module.database().close()


def database_variables(url: str, function: str = OWNER) -> dict[str, str]:
    """The environment that leads a function, signed in as its own role, to one of the tests' databases."""
    parts = conninfo.conninfo_to_dict(url)
    # Copies of one database have its grants, and so its roles: see Databases.migrated.
    template = str(parts["dbname"]).rpartition("_")[0]
    return {
        "DATABASE_HOST": str(parts["host"]),
        "DATABASE_PORT": str(parts.get("port", 5432)),
        "DATABASE_NAME": str(parts["dbname"]),
        "DATABASE_USER": str(parts["user"]) if function == OWNER else roles.name(template, function),
        # A server that trusts its caller needs none, but an empty one would ask for an IAM token.
        "DATABASE_PASSWORD": str(parts.get("password") or "trusted"),
    }


def set_limit(connection: psycopg.Connection[Any], function: str, setting: str, value: str) -> None:
    """Let the server keep another limit for a function in this test's database, from its next connection on."""
    template = connection.info.dbname.rpartition("_")[0]
    connection.execute(
        sql.SQL("ALTER ROLE {} IN DATABASE {} SET {} = {}").format(
            sql.Identifier(roles.name(template, function)),
            sql.Identifier(connection.info.dbname),
            sql.Identifier(setting),
            sql.Literal(value),
        )
    )


def sample(name: str) -> Event:
    """One of the events in events/, to change at will."""
    event: Event = json.loads((ROOT / "events" / f"{name}.json").read_bytes())
    return event


def charge_event(
    key: UUID | str | None = None,
    body: object = None,
    *,
    principal: str | None = "alice",
    headers: Mapping[str, str] | None = None,
) -> Event:
    """A REST event for POST /charges. A body that is no text is sent as JSON; the key None is a fresh one."""
    event = sample("charge-rest")
    content = {"amountCents": 4900} if body is None else body
    event["body"] = content if isinstance(content, str) else json.dumps(content)
    lines = {
        "Content-Type": "application/json",
        "Idempotency-Key": str(uuid4() if key is None else key),
        **(headers or {}),
    }
    event["headers"] = lines
    event["multiValueHeaders"] = {name: [value] for name, value in lines.items()}
    event["requestContext"]["identity"]["userArn"] = None
    event["requestContext"]["authorizer"] = None if principal is None else {"principalId": principal}
    return event


def refund_event(charge: str, key: UUID | str | None = None, body: object = None, **options: Any) -> Event:
    """A REST event for a refund of the charge at a path."""
    event = charge_event(key, {"amountCents": 600} if body is None else body, **options)
    return event | {"path": f"{charge}/refunds", "resource": "/charges/{charge_id}/refunds"}


# Children are copies of one process that has the functions' imports behind it: fifty start in a second or two.
PROCESSES = multiprocessing.get_context("forkserver")
PROCESSES.set_forkserver_preload(["functions.charges.handler", "functions.relay.handler", "tests.support.process"])


def _serve(database_url: str, rounds: list[Event], together: Barrier, answers: Connection) -> None:
    instance = Instance("charges", database_url, CHARGES)
    instance.call(rounds[0])  # opens the connection
    for event in rounds[1:]:
        together.wait()
        answers.send(instance.call(event))
    together.wait()


def call_together(database_url: str, callers: list[list[Event]]) -> list[list[Answer]]:
    """Lets callers, each a process with an instance of its own, send their events in step, and returns each one's
    answers. A caller's first event only warms it up."""
    together = PROCESSES.Barrier(len(callers))
    running: list[tuple[BaseProcess, Connection]] = []
    try:
        for rounds in callers:
            receiver, sender = PROCESSES.Pipe(duplex=False)
            arguments = (database_url, rounds, together, sender)
            process: BaseProcess = PROCESSES.Process(target=_serve, args=arguments, daemon=True)
            process.start()
            sender.close()
            running.append((process, receiver))
        return [[receiver.recv() for _ in rounds[1:]] for (_, receiver), rounds in zip(running, callers, strict=True)]
    finally:
        for process, receiver in running:
            process.join(PATIENCE_SECONDS)
            process.kill()
            process.join()
            receiver.close()
