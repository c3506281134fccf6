"""Both guarantees as a story, told against the real stack with real faults: ``python -m local demo``.

It starts a stack of its own, in a folder that it forgets, so that it gets in nobody's way. Whatever it claims it has
looked up in the database or in the queue; the first claim that does not hold ends it with status 1.
"""

import contextlib
import http.client
import json
import signal
import sys
import tempfile
import time
import urllib.error
import urllib.request
import uuid
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from urllib.parse import urlsplit

import boto3
import psycopg
from psycopg import sql

from local import faults, lock, stack
from local.deploy import drain
from local.emulator import ACCESS_KEY_ID, REGION, SECRET_ACCESS_KEY
from local.stack import Stack
from local.stopping import Stopped

# What is awaited here takes milliseconds, and a function's cold start a second or two.
PATIENCE_SECONDS = 30.0


class BrokenGuaranteeError(Exception):
    """A claim of the story that did not hold."""


@dataclass(frozen=True, slots=True)
class Answer:
    """An answer of the API's. Header names are in lower case."""

    status: int
    headers: dict[str, str]
    body: bytes

    @property
    def code(self) -> str:
        """The code of a problem document."""
        return str(json.loads(self.body)["code"])


def main() -> int:
    """Tell the story; 0 when every guarantee held, 1 when one did not. Raises StackError where no stack starts."""
    print("A stack of the demo's own, with nothing in it yet:\n", flush=True)
    try:
        with tempfile.TemporaryDirectory(prefix="charges-demo-") as name, contextlib.ExitStack() as running:
            folder = Path(name)
            held = running.enter_context(lock.held(folder / "lock"))
            up = running.enter_context(stack.serve(folder, port=0, lock=held, relays=False))
            connection = running.enter_context(psycopg.connect(up.server.url, autocommit=True))
            _tell(up, connection)
    except Stopped:
        print("\nStopped.", flush=True)
        return 0
    except BrokenGuaranteeError as broken:
        print(f"\n  DOES NOT HOLD: {broken}", file=sys.stderr, flush=True)
        return 1
    print("\nEvery guarantee held.", flush=True)
    return 0


def _tell(up: Stack, connection: psycopg.Connection[Any]) -> None:
    _lose_a_response(up, connection)
    _kill_a_relay(up, connection)
    _race_a_twin(up, connection)
    _reuse_a_key(up, connection)
    _refund_too_much(up, connection)


def _lose_a_response(up: Stack, connection: psycopg.Connection[Any]) -> None:
    _say("\n1. The answer is lost", "A client charges 49.00 and hangs up before the answer reaches it.")
    key = uuid.uuid4()
    address = urlsplit(up.deployment.api_url)
    line = http.client.HTTPConnection(str(address.hostname), address.port)
    line.request("POST", f"{address.path}/charges", '{"amountCents":4900}', _headers(key))
    _await("the charge", lambda: _count(connection, "charges") == 1)
    line.close()
    _say("It does not know whether it has charged. So it sends the same request again, with the same key.")
    again = _charge(up, key, 4900)
    made = connection.execute("SELECT '/charges/' || id FROM charges").fetchall()
    _claim("the retry is answered 201, with Idempotent-Replayed: true", _is_replay(again))
    _claim("it names the charge that was made the first time", made == [(again.headers["location"],)])
    _claim("there is one charge, one key and one event", _counts(connection) == (1, 1, 1))


def _kill_a_relay(up: Stack, connection: psycopg.Connection[Any]) -> None:
    _say(
        "\n2. The relay is killed between the send and the mark",
        "A relay takes the event of that charge from the outbox and sends it to SNS. SNS accepts it; and before the",
        "relay can write that down, it is killed with SIGKILL.",
    )
    status = faults.kill_relay_after_send(up, patience=PATIENCE_SECONDS)
    _claim("the relay is dead", status == -signal.SIGKILL)
    first = _receive(up)
    _claim("the message is in the queue", len(first) == 1)
    _claim(
        "the database does not know that it was sent, and holds it under the dead relay's lease",
        _rows(connection, "SELECT attempts FROM outbox WHERE published_at IS NULL AND next_attempt_at > now()")
        == [(1,)],
    )
    _say("The lease would end by itself after 45 seconds. To save the time, the demo ends it now; another relay runs.")
    connection.execute("UPDATE outbox SET next_attempt_at = now() WHERE published_at IS NULL")
    _relay(up)
    second = _receive(up)
    _claim("the event was not lost: it came again, and with the same id", [m["id"] for m in second] == [first[0]["id"]])
    _claim(
        "now it is marked published",
        _rows(connection, "SELECT count(*) FROM outbox WHERE published_at IS NULL") == [(0,)],
    )
    _await("the subscriber", lambda: _count(connection, "processed_events") == 1)
    _await("the second delivery, with the subscriber,", lambda: drain(up.aws, up.deployment))
    totals = _rows(connection, "SELECT charges, amount_cents FROM charge_totals")
    _claim("the subscriber was sent it twice and counted it once: 1 charge, 49.00", totals == [(1, 4900)])


def _race_a_twin(up: Stack, connection: psycopg.Connection[Any]) -> None:
    _say(
        "\n3. A twin arrives while the first request is at work",
        "A charge of 20.00 is held up half-way: another transaction sits on its key. Meanwhile its twin arrives.",
    )
    key = uuid.uuid4()
    with ThreadPoolExecutor(2) as clients:
        _warm_up_two(up, connection, clients)
        with faults.request_held_up(up, key):
            first = clients.submit(_charge, up, key, 2000)
            _await("the first request", lambda: _waiting(connection) == 1)
            began = time.monotonic()
            twin = _charge(up, key, 2000)
            took = time.monotonic() - began
        made = first.result()
    _claim(
        f"the twin was told at once (after {took:.2f} s): 409 request_in_flight",
        (twin.status, twin.code) == (409, "request_in_flight"),
    )
    _claim(
        "the first request, let go, was answered 201",
        made.status == http.HTTPStatus.CREATED and "idempotent-replayed" not in made.headers,
    )
    again = _charge(up, key, 2000)
    _claim(
        "the twin, sent again, gets the first one's answer, byte for byte",
        _is_replay(again) and again.body == made.body,
    )
    _claim("there are two charges in all, two keys and two events", _counts(connection) == (2, 2, 2))


def _reuse_a_key(up: Stack, connection: psycopg.Connection[Any]) -> None:
    _say("\n4. A key is used for another purchase", "The client charges 75.00 under the key of the charge of 20.00.")
    key = connection.execute("SELECT key FROM idempotency_keys ORDER BY created_at DESC LIMIT 1").fetchone()
    reused = _charge(up, key[0] if key else uuid.uuid4(), 7500)
    _claim("it is refused: 422 idempotency_key_reused", (reused.status, reused.code) == (422, "idempotency_key_reused"))
    _claim("nothing was charged", _counts(connection) == (2, 2, 2))


def _refund_too_much(up: Stack, connection: psycopg.Connection[Any]) -> None:
    _say(
        "\n5. More is refunded than was charged",
        "Of the charge of 20.00 the client refunds 12.00, and 12.00 once more.",
    )
    [(path,)] = _rows(connection, "SELECT '/charges/' || id || '/refunds' FROM charges WHERE amount_cents = 2000")
    key = uuid.uuid4()
    made, refused = (_post(up, path, each, 1200) for each in (uuid.uuid4(), key))
    _claim("the first refund is made: 201", made.status == http.HTTPStatus.CREATED)
    _claim(
        "the second is refused: 409 refund_exceeds_charge",
        (refused.status, refused.code) == (409, "refund_exceeds_charge"),
    )
    again = _post(up, path, key, 1200)
    _claim("sent again it is refused again, byte for byte: that is its result", again.body == refused.body)
    left = _rows(connection, "SELECT amount_cents - refunded_cents FROM charges WHERE refunds = 1")
    _claim(
        "8.00 of the charge are left, and the one refund has its event",
        (left, _count(connection, "outbox")) == ([(800,)], 3),
    )


def _say(*lines: str) -> None:
    for line in lines:
        print(line, flush=True)


def _claim(claim: str, holds: bool) -> None:
    if not holds:
        raise BrokenGuaranteeError(claim)
    print(f"  holds: {claim}", flush=True)


def _await(what: str, condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + PATIENCE_SECONDS
    while not condition():
        if time.monotonic() > deadline:
            raise BrokenGuaranteeError(f"{what} gets there within {PATIENCE_SECONDS:.0f} s")
        time.sleep(0.02)


def _headers(key: uuid.UUID) -> dict[str, str]:
    return {"Content-Type": "application/json", "Idempotency-Key": str(key)}


def _charge(up: Stack, key: uuid.UUID, amount_cents: int) -> Answer:
    return _post(up, "/charges", key, amount_cents)


def _post(up: Stack, path: str, key: uuid.UUID, amount_cents: int) -> Answer:
    body = json.dumps({"amountCents": amount_cents}).encode()
    request = urllib.request.Request(f"{up.deployment.api_url}{path}", body, _headers(key), method="POST")  # noqa: S310
    try:
        response = urllib.request.urlopen(request, timeout=PATIENCE_SECONDS)  # noqa: S310 - our own address
    except urllib.error.HTTPError as problem:
        response = problem
    with response:
        return Answer(response.status, {name.lower(): text for name, text in response.headers.items()}, response.read())


def _is_replay(answer: Answer) -> bool:
    return answer.status == http.HTTPStatus.CREATED and answer.headers.get("idempotent-replayed") == "true"


def _rows(connection: psycopg.Connection[Any], query: Any) -> list[tuple[Any, ...]]:
    return connection.execute(query).fetchall()


def _count(connection: psycopg.Connection[Any], table: str) -> int:
    count: int = _rows(connection, sql.SQL("SELECT count(*) FROM {}").format(sql.Identifier(table)))[0][0]
    return count


def _counts(connection: psycopg.Connection[Any]) -> tuple[int, int, int]:
    return _count(connection, "charges"), _count(connection, "idempotency_keys"), _count(connection, "outbox")


def _waiting(connection: psycopg.Connection[Any]) -> int:
    """How many sessions wait for a lock."""
    count: int = _rows(connection, "SELECT count(*) FROM pg_stat_activity WHERE wait_event_type = 'Lock'")[0][0]
    return count


def _warm_up_two(up: Stack, connection: psycopg.Connection[Any], clients: ThreadPoolExecutor) -> None:
    """See to it that two instances of the function are warm: a cold start would only be in the story's way."""
    url = f"{up.deployment.api_url}/charges?idempotencyKey={uuid.uuid4()}"
    # An instance has one connection, and this is what it was asked last.
    instances = "SELECT count(*) > 1 FROM pg_stat_activity WHERE query LIKE 'SELECT response_status%'"

    def look_up_twice() -> bool:
        for answer in clients.map(lambda _: urllib.request.urlopen(url, timeout=PATIENCE_SECONDS), range(2)):  # noqa: S310
            answer.close()
        return _rows(connection, instances) == [(True,)]

    _await("a second instance", look_up_twice)


def _client(up: Stack, service: Any) -> Any:
    session = boto3.Session(ACCESS_KEY_ID, SECRET_ACCESS_KEY, region_name=REGION)
    return session.client(service, endpoint_url=up.aws.url)


def _receive(up: Stack) -> list[dict[str, Any]]:
    """Take the events that are in the queue for a person, waiting for the first."""
    sqs = _client(up, "sqs")
    queue = up.deployment.queue_url
    received = sqs.receive_message(QueueUrl=queue, MaxNumberOfMessages=10, WaitTimeSeconds=10).get("Messages", [])
    for message in received:
        sqs.delete_message(QueueUrl=queue, ReceiptHandle=message["ReceiptHandle"])
    return [json.loads(message["Body"]) for message in received]


def _relay(up: Stack) -> None:
    """Run the deployed relay once."""
    _client(up, "lambda").invoke(FunctionName=up.deployment.relay_function)
