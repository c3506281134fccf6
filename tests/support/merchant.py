"""Merchants' receivers on loopback, one server for all: what each answers is a matter of its path."""

import contextlib
import http.server
import threading
import time
from collections import Counter
from collections.abc import Iterator
from dataclasses import dataclass, field

PATIENCE_SECONDS = 30.0


@dataclass(slots=True)
class Behaviour:
    """How a receiver answers: at once, or when it is let go; with the next of its statuses, the last one for ever."""

    statuses: list[int] = field(default_factory=lambda: [200])
    headers: dict[str, str] = field(default_factory=dict)
    body: bytes = b""
    held_until: threading.Event | None = None
    seconds: float = 0.0


@dataclass(frozen=True, slots=True)
class Request:
    """A request that came. Header names are in lower case. `at` is by time.monotonic()."""

    path: str
    headers: dict[str, str]
    body: bytes
    at: float


class Merchants(http.server.ThreadingHTTPServer):
    """Receivers, each at a path of its own, which answer 200 unless they are told otherwise."""

    daemon_threads = True
    request_queue_size = 128

    def __init__(self) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.requests: list[Request] = []
        self.behaviours: dict[str, Behaviour] = {}
        self.under_way: Counter[str] = Counter()
        self.most_under_way: Counter[str] = Counter()
        self.has_come = threading.Condition()

    def url(self, path: str) -> str:
        """Where a receiver is."""
        return f"http://127.0.0.1:{self.server_port}{path}"

    def behave(self, path: str, *statuses: int, **how: object) -> Behaviour:
        """Tells a receiver how to answer from now on."""
        self.behaviours[path] = Behaviour(list(statuses) or [200], **how)  # type: ignore[arg-type]
        return self.behaviours[path]

    def received(self, path: str) -> list[Request]:
        """What has come to one of them."""
        return [request for request in self.requests if request.path == path]

    def wait_for(self, path: str, count: int = 1) -> None:
        """Waits until so many requests have come to one of them."""
        with self.has_come:
            assert self.has_come.wait_for(lambda: len(self.received(path)) >= count, PATIENCE_SECONDS)

    def handle_error(self, *_: object) -> None:
        """A sender that hangs up is no matter."""


class _Handler(http.server.BaseHTTPRequestHandler):
    server: Merchants

    def do_POST(self) -> None:
        body = self.rfile.read(int(self.headers["Content-Length"]))
        headers = {name.lower(): value for name, value in self.headers.items()}
        with self.server.has_come:
            self.server.requests.append(Request(self.path, headers, body, time.monotonic()))
            behaviour = self.server.behaviours.get(self.path, Behaviour())
            status = behaviour.statuses[0]
            if len(behaviour.statuses) > 1:
                behaviour.statuses.pop(0)
            self.server.under_way[self.path] += 1
            most = max(self.server.most_under_way[self.path], self.server.under_way[self.path])
            self.server.most_under_way[self.path] = most
            self.server.has_come.notify_all()
        if behaviour.held_until is not None:
            behaviour.held_until.wait(PATIENCE_SECONDS)
        if behaviour.seconds:
            time.sleep(behaviour.seconds)  # a receiver that works on the event before it answers
        with self.server.has_come:
            self.server.under_way[self.path] -= 1
        self.send_response(status)
        for name, value in behaviour.headers.items():
            self.send_header(name, value)
        self.send_header("Content-Length", str(len(behaviour.body)))
        self.end_headers()
        self.wfile.write(behaviour.body)

    def log_message(self, *_: object) -> None:
        """Says nothing."""


@contextlib.contextmanager
def serve() -> Iterator[Merchants]:
    """Receivers for as long as the block lasts."""
    merchants = Merchants()
    thread = threading.Thread(target=merchants.serve_forever, kwargs={"poll_interval": 0.01}, daemon=True)
    thread.start()
    try:
        yield merchants
    finally:
        for behaviour in merchants.behaviours.values():
            if behaviour.held_until is not None:
                behaviour.held_until.set()
        merchants.shutdown()
        merchants.server_close()
        thread.join()
