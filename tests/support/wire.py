"""A proxy between a client and Postgres that reads the protocol along, and spoils the connection when it is told to."""

import contextlib
import enum
import socket
import struct
import threading
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Self

from psycopg import conninfo

# Protocol, "SSLRequest" and "GSSENCRequest": requests without a type byte that come before the start-up message.
_SSL_REQUEST, _GSS_REQUEST = 80877103, 80877104
_CHUNK = 64 * 1024


class Sender(enum.Enum):
    """Who sent a message."""

    CLIENT = "client"
    SERVER = "server"


@dataclass(frozen=True, slots=True)
class Message:
    """One protocol message. `kind` is its type byte, such as B for Bind or Z for ReadyForQuery; empty at start-up."""

    sender: Sender
    kind: str
    content: bytes


class Verdict(enum.Enum):
    """What the proxy does with a message."""

    PASS = enum.auto()
    DROP = enum.auto()
    """Swallow it, and go on with the next."""
    CUT = enum.auto()
    """Swallow it and reset the connection, on both sides."""


type Judge = Callable[[Message], Verdict]


class Wire:
    """A listening proxy on loopback. `judge` is asked about every message, in order, and may block."""

    def __init__(self, upstream_url: str) -> None:
        parts = conninfo.conninfo_to_dict(upstream_url)
        self._upstream = (str(parts["host"]), int(parts.get("port") or 5432))
        self._listener = socket.create_server(("127.0.0.1", 0), backlog=128)
        self.url = conninfo.make_conninfo(upstream_url, host="127.0.0.1", port=self._listener.getsockname()[1])
        self.messages: list[Message] = []
        self.connections = 0
        self.judge: Judge = lambda _: Verdict.PASS
        self._sockets: list[socket.socket] = []
        self._carriers: list[threading.Thread] = []
        self._from_servers: list[threading.Thread] = []
        self._acceptor = _started(self._accept)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        self.refuse()
        self.judge = lambda _: Verdict.PASS
        self._acceptor.join()
        self.cut()

    def refuse(self) -> None:
        """From now on nobody answers at the port."""
        # Closing alone would leave a thread in accept().
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._listener.close()

    def cut(self) -> None:
        """Resets every connection that there is, on both sides, and returns once the peers have been told.

        A socket that a thread reads from is closed, and its reset sent, when that thread has let go of it. A peer that
        connects again at once has nothing to do with it.
        """
        carriers = list(self._carriers)
        for end in list(self._sockets):
            _reset(end)
        for carrier in carriers:
            carrier.join()

    def until_told(self) -> None:
        """Returns once clients have been told of the end of their server processes, all of which have ended."""
        for carrier in list(self._from_servers):
            carrier.join()

    def kinds(self, sender: Sender) -> str:
        """The type bytes of all that was sent, in order."""
        return "".join(message.kind for message in self.messages if message.sender is sender)

    def _accept(self) -> None:
        while True:
            try:
                client, _ = self._listener.accept()
            except OSError:
                return
            self.connections += 1
            server = socket.create_connection(self._upstream)
            for end in (client, server):
                end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                self._sockets.append(end)
            self._carriers.append(_started(self._carry, Sender.CLIENT, client, server))
            self._from_servers.append(_started(self._carry, Sender.SERVER, server, client))
            self._carriers.append(self._from_servers[-1])

    def _carry(self, sender: Sender, source: socket.socket, target: socket.socket) -> None:
        try:
            if sender is Sender.CLIENT and not self._start(source, target):
                return
            for message, raw in _messages(sender, source):
                self.messages.append(message)
                verdict = self.judge(message)
                if verdict is Verdict.CUT:
                    _reset(source)
                    _reset(target)
                    return
                if verdict is Verdict.PASS:
                    target.sendall(raw)
        except OSError:
            pass  # the other direction has cut the connection
        with contextlib.suppress(OSError):
            target.shutdown(socket.SHUT_WR)

    def _start(self, client: socket.socket, server: socket.socket) -> bool:
        """Passes the start-up message on, having declined encryption, which could not be read along."""
        while True:
            length = _read(client, 4)
            if not length:
                return False
            content = _read(client, struct.unpack("!i", length)[0] - 4)
            if len(content) == 4 and struct.unpack("!i", content)[0] in (_SSL_REQUEST, _GSS_REQUEST):
                client.sendall(b"N")
                continue
            message = Message(Sender.CLIENT, "", content)
            self.messages.append(message)
            verdict = self.judge(message)
            if verdict is Verdict.CUT:
                _reset(client)
                _reset(server)
                return False
            if verdict is Verdict.PASS:
                server.sendall(length + content)
            return True


def _started(target: Callable[..., None], *arguments: object) -> threading.Thread:
    thread = threading.Thread(target=target, args=arguments, daemon=True)
    thread.start()
    return thread


def _messages(sender: Sender, source: socket.socket) -> Iterator[tuple[Message, bytes]]:
    while header := _read(source, 5):
        content = _read(source, struct.unpack("!xi", header)[0] - 4)
        yield Message(sender, chr(header[0]), content), header + content


def _read(source: socket.socket, count: int) -> bytes:
    """Exactly that many bytes, or none where the connection has ended."""
    read = bytearray()
    while len(read) < count:
        chunk = source.recv(min(_CHUNK, count - len(read)))
        if not chunk:
            return b""
        read += chunk
    return bytes(read)


def _reset(end: socket.socket) -> None:
    """Ends a connection as a crash does: its peer gets a reset, and a thread that reads from it is let go."""
    with contextlib.suppress(OSError):
        end.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, struct.pack("ii", 1, 0))
        end.shutdown(socket.SHUT_RD)
    end.close()


def lose_answer(after: str) -> Judge:
    """Lets one statement through, takes its whole answer away and cuts the connection; nothing is spoilt after that.

    `after` is the client's message that begins what is to be spoilt, such as B. Postgres sends its answer at the
    end of the transaction, so what was committed is committed by then.
    """
    armed = False
    spent = False

    def judge(message: Message) -> Verdict:
        nonlocal armed, spent
        if spent:
            return Verdict.PASS
        if message.sender is Sender.CLIENT:
            armed = armed or message.kind == after
            return Verdict.PASS
        if not armed:
            return Verdict.PASS
        if message.kind == "Z":
            spent = True
            return Verdict.CUT
        return Verdict.DROP

    return judge


def cut_before(kind: str) -> Judge:
    """Cuts the connection instead of passing the client's next message of a kind on; nothing is spoilt after that."""
    spent = False

    def judge(message: Message) -> Verdict:
        nonlocal spent
        if not spent and message.sender is Sender.CLIENT and message.kind == kind:
            spent = True
            return Verdict.CUT
        return Verdict.PASS

    return judge


def silent(senders: Sequence[Sender]) -> Judge:
    """Keeps the connection open and swallows whatever the senders say."""
    return lambda message: Verdict.DROP if message.sender in senders else Verdict.PASS
