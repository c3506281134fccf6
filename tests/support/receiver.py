"""A receiver of webhooks on loopback that treats each connection as a test says: well, or as badly as it can."""

import contextlib
import select
import socket
import ssl
import struct
import threading
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from itertools import cycle
from typing import Self

# How long a receiver that dawdles waits between two bytes. Nothing depends on its length.
PACE_SECONDS = 0.02
CHUNK = 64 * 1024

OK = b"HTTP/1.1 200 OK\r\nContent-Length: 2\r\n\r\nok"

type Behaviour = Callable[[socket.socket], object]


@dataclass(frozen=True, slots=True)
class Request:
    """What was received: the request line, the headers with their names in lower case, and the body."""

    line: str
    headers: tuple[tuple[str, str], ...]
    body: bytes

    def values(self, name: str) -> list[str]:
        """Every line of a header."""
        return [value for known, value in self.headers if known == name]


class Receiver:
    """Listens on loopback, over TLS where a context is given, and treats each connection in a thread of its own.

    A behaviour may go on for ever: it ends when the sender hangs up, or with the receiver.
    """

    def __init__(
        self, behaviour: Behaviour, *, tls: ssl.SSLContext | None = None, address: str = "127.0.0.1", port: int = 0
    ) -> None:
        self._behaviour = behaviour
        self._tls = tls
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        self._listener = socket.create_server((address, port), family=family, backlog=128)
        self.port: int = self._listener.getsockname()[1]
        self.connections = 0
        self._ends: list[socket.socket] = []
        self._threads: list[threading.Thread] = []
        self._acceptor = threading.Thread(target=self._accept, daemon=True)
        self._acceptor.start()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        # Closing alone would leave a thread in accept().
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()
        self._acceptor.join()
        for end in self._ends:
            with contextlib.suppress(OSError):
                # The socket's own: a TLS socket's would first let go of its state, under the thread that uses it.
                socket.socket.shutdown(end, socket.SHUT_RDWR)
        for thread in self._threads:
            thread.join()

    def _accept(self) -> None:
        while True:
            try:
                end, _ = self._listener.accept()
            except OSError:
                return
            self.connections += 1
            if self._tls:
                end = self._tls.wrap_socket(end, server_side=True, do_handshake_on_connect=False)
            self._ends.append(end)
            thread = threading.Thread(target=self._treat, args=(end,), daemon=True)
            self._threads.append(thread)
            thread.start()

    def _treat(self, end: socket.socket) -> None:
        # The sender hangs up on whom it has heard enough of.
        with end, contextlib.suppress(OSError):
            if isinstance(end, ssl.SSLSocket):
                end.do_handshake()
            self._behaviour(end)


def read_request(end: socket.socket) -> Request:
    """Reads a request to its end."""
    received = b""
    while b"\r\n\r\n" not in received:
        received += _some(end)
    head, _, body = received.partition(b"\r\n\r\n")
    line, *fields = head.decode("ascii").split("\r\n")
    headers = tuple((name.lower(), value.strip()) for name, _, value in (field.partition(":") for field in fields))
    length = int(dict(headers).get("content-length", "0"))
    while len(body) < length:
        body += _some(end)
    return Request(line, headers, body)


def answering(*parts: bytes) -> Behaviour:
    """Reads the request, answers with these bytes, and hangs up."""

    def behave(end: socket.socket) -> None:
        read_request(end)
        for part in parts:
            end.sendall(part)

    return behave


def endless(head: bytes, *repeated: bytes) -> Behaviour:
    """Answers with the head, and from then on with the rest, over and over, as fast as it is taken."""
    block = b"".join(repeated)
    block *= max(1, CHUNK // len(block))

    def behave(end: socket.socket) -> None:
        read_request(end)
        end.sendall(head)
        while True:
            end.sendall(block)

    return behave


def dawdling(head: bytes, rest: Iterable[int] = b"") -> Behaviour:
    """Answers with the head, then with one byte after another, slowly and for ever; without any, with silence."""

    def behave(end: socket.socket) -> None:
        read_request(end)
        end.sendall(head)
        for byte in _slowly(end, cycle(rest)):
            end.sendall(bytes([byte]))
        _wait(end)

    return behave


def reset(end: socket.socket) -> None:
    """Ends a connection as a crash does: its peer gets a reset."""
    end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
    end.close()


def silent(end: socket.socket) -> None:
    """Reads and says nothing."""
    _wait(end)


def _some(end: socket.socket) -> bytes:
    data = end.recv(CHUNK)
    if not data:
        raise ConnectionAbortedError
    return data


def _slowly(end: socket.socket, bytes_: Iterator[int]) -> Iterator[int]:
    for byte in bytes_:
        if select.select([end], [], [], PACE_SECONDS)[0]:
            return
        yield byte


def _wait(end: socket.socket) -> None:
    """Waits until the sender hangs up."""
    while end.recv(CHUNK):
        pass
