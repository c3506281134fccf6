"""The faults of the demo's story, made for real: a relay that is killed at its worst moment, and a request held up."""

import contextlib
import http
import http.client
import http.server
import os
import subprocess
import sys
import threading
import uuid
from collections.abc import Iterator

import psycopg

from charging import roles
from local import emulator
from local.child import ROOT
from local.emulator import ACCESS_KEY_ID, SECRET_ACCESS_KEY
from local.postgres import DATABASE, HOST
from local.stack import Stack

# More than the one sweep that it is run for.
RELAY_SECONDS = 60


def kill_relay_after_send(up: Stack, *, patience: float) -> int | None:
    """Run a relay as a process of its own and kill it as soon as SNS has accepted its call: its exit status.

    None where it was still running when the patience ended.
    """
    with _killing_proxy(up) as (endpoint, victim):
        victim.append(_start_relay(up, endpoint))
        try:
            return victim[0].wait(patience)
        except subprocess.TimeoutExpired:
            return None


@contextlib.contextmanager
def request_held_up(up: Stack, key: uuid.UUID) -> Iterator[None]:
    """Let a request with the key get as far as storing it, and no further."""
    with psycopg.connect(up.server.url, autocommit=True) as blocker, blocker.transaction(force_rollback=True):
        blocker.execute(
            """
            INSERT INTO idempotency_keys (principal, endpoint, key, fingerprint, status, expires_at)
            VALUES ('local', 'POST /charges', %s, 'v0:demo', 'STARTED', now() + interval '1 minute')
            """,
            [key],
        )
        yield


def _start_relay(up: Stack, endpoint: str) -> subprocess.Popen[bytes]:
    """Start the relay as a process of its own, whose way to SNS leads over `endpoint`."""
    program = "from functions.relay.handler import handler; from local.faults import Context; handler({}, Context())"
    environment = {
        "PATH": os.environ["PATH"],
        "AWS_ENDPOINT_URL": endpoint,
        "AWS_ACCESS_KEY_ID": ACCESS_KEY_ID,
        "AWS_SECRET_ACCESS_KEY": SECRET_ACCESS_KEY,
        "DATABASE_HOST": HOST,
        "DATABASE_PORT": str(up.server.port),
        "DATABASE_NAME": DATABASE,
        "DATABASE_USER": roles.name(DATABASE, "relay"),
        "DATABASE_PASSWORD": up.server.functions_password,
        "TOPIC_ARN": up.deployment.topic_arn,
        "RELAY_BUDGET_SECONDS": "0",
        "RELAY_POLL_MS": "250",
        "RELAY_MAX_ATTEMPTS": "10",
        "RELAY_PARKED_HEAD": "block",
    }
    return subprocess.Popen([sys.executable, "-c", program], cwd=ROOT, env=environment, stdout=subprocess.DEVNULL)


class Context:
    """What the relay asks Lambda for."""

    def get_remaining_time_in_millis(self) -> int:
        """Return enough."""
        return RELAY_SECONDS * 1000


@contextlib.contextmanager
def _killing_proxy(up: Stack) -> Iterator[tuple[str, list[subprocess.Popen[bytes]]]]:
    """Forward calls to the emulated AWS, and kill the victim as soon as the first messages have been accepted."""
    victim: list[subprocess.Popen[bytes]] = []

    class Proxy(http.server.BaseHTTPRequestHandler):
        def do_POST(self) -> None:
            body = self.rfile.read(int(self.headers["Content-Length"]))
            target = http.client.HTTPConnection(emulator.HOST, up.aws.port)
            target.request("POST", self.path, body, dict(self.headers.items()))
            answer = target.getresponse()
            content = answer.read()
            target.close()
            if answer.status == http.HTTPStatus.OK and b"Action=PublishBatch" in body:
                victim[0].kill()
                return
            self.send_response(answer.status)
            self.send_header("Content-Type", answer.headers["Content-Type"])
            self.send_header("Content-Length", str(len(content)))
            self.end_headers()
            self.wfile.write(content)

        def log_message(self, *_: object) -> None:
            """Say nothing: the story is told elsewhere."""

    with http.server.ThreadingHTTPServer((emulator.HOST, 0), Proxy) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://{emulator.HOST}:{server.server_port}", victim
        finally:
            server.shutdown()
            thread.join()
            for process in victim:
                process.kill()
