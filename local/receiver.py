"""A receiver of webhooks on loopback that says what arrives, and whether the signature is right.

What it does, a merchant's receiver does too: it verifies by the reference library, and deduplicates on `webhook-id`.
"""

import contextlib
import http.server
import json
import threading
import urllib.request
import uuid
from collections.abc import Callable, Iterator
from typing import Any, get_args

from standardwebhooks import Webhook, WebhookVerificationError

from charging import outbox

# What tells the receivers of earlier runs from a developer's own.
PATH = "/embedded-receiver"
# All of them, so that an operation of tomorrow is seen here as well.
EVENT_TYPES = list(get_args(outbox.EventType))
# A function starts cold in this time, which takes a second or two.
START_SECONDS = 60.0
# Far more than a webhook has. Whatever is longer was not sent by this stack.
BODY_BYTES = 64 * 1024


class _Receiver(http.server.ThreadingHTTPServer):
    daemon_threads = True

    def __init__(self, say: Callable[[str], None]) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.say = say
        self.webhook: Webhook | None = None
        self.seen: set[str] = set()


class _Handler(http.server.BaseHTTPRequestHandler):
    server: _Receiver

    def do_POST(self) -> None:
        body = self.rfile.read(min(int(self.headers.get("Content-Length", 0)), BODY_BYTES))
        status, said = self._judge(body)
        self.server.say(said)
        self.send_response(status)
        self.send_header("Content-Length", "0")
        self.end_headers()

    def _judge(self, body: bytes) -> tuple[http.HTTPStatus, str]:
        message_id = self.headers.get("webhook-id", "")
        if self.server.webhook is None:
            return http.HTTPStatus.SERVICE_UNAVAILABLE, "Webhook refused: the receiver has no secret yet."
        try:
            self.server.webhook.verify(body, {name.lower(): value for name, value in self.headers.items()})
        except WebhookVerificationError as invalid:
            return http.HTTPStatus.UNAUTHORIZED, f"Webhook {message_id} refused: {invalid}"
        if message_id in self.server.seen:
            return http.HTTPStatus.OK, f"Webhook {message_id} came again, and changed nothing."
        self.server.seen.add(message_id)
        text = json.dumps(json.loads(body), ensure_ascii=True)
        return http.HTTPStatus.OK, f"Webhook {message_id}, signature verified: {text}"

    def log_message(self, *_: object) -> None:
        """Says nothing of its own."""


@contextlib.contextmanager
def serve(api_url: str, say: Callable[[str], None]) -> Iterator[str]:
    """Receive webhooks while the block lasts, for the caller `local`; the endpoint's path in the API.

    The endpoints of earlier receivers are deleted: nobody listens there any more.
    """
    with _Receiver(say) as receiver:
        thread = threading.Thread(target=receiver.serve_forever, kwargs={"poll_interval": 0.1}, daemon=True)
        thread.start()
        try:
            for endpoint in _call(api_url, "GET", "/webhook-endpoints")["endpoints"]:
                if endpoint["url"].endswith(PATH):
                    _call(api_url, "DELETE", f"/webhook-endpoints/{endpoint['id']}")
            wanted = {"url": f"http://127.0.0.1:{receiver.server_port}{PATH}", "eventTypes": EVENT_TYPES}
            endpoint = _call(api_url, "POST", "/webhook-endpoints", wanted)
            path = f"/webhook-endpoints/{endpoint['id']}"
            receiver.webhook = Webhook(_call(api_url, "GET", f"{path}/secret")["secret"])
            yield path
        finally:
            receiver.shutdown()
            thread.join()


def _call(api_url: str, method: str, path: str, body: dict[str, Any] | None = None) -> Any:
    headers = {"Content-Type": "application/json", "Idempotency-Key": str(uuid.uuid4())}
    content = None if body is None else json.dumps(body).encode()
    request = urllib.request.Request(f"{api_url}{path}", content, headers, method=method)  # noqa: S310 - our own address
    with urllib.request.urlopen(request, timeout=START_SECONDS) as response:  # noqa: S310
        answer = response.read()
    return json.loads(answer) if answer else None
