"""The sender of webhooks: one POST to a URL that somebody else chose, which can do us no harm wherever it points.

The client, httpcore2, speaks HTTP/1.1 over a connection of our making, and follows, decodes, keeps and reads nothing
that it was not asked for. Every byte passes `_Wire`, which knows how long and how much the receiver may still talk.
"""

import contextlib
import ipaddress
import math
import socket
import ssl
import threading
import time
from collections.abc import Callable, Container, Mapping, Sequence
from concurrent.futures import Future
from dataclasses import dataclass
from datetime import UTC, datetime
from email.utils import parsedate_to_datetime
from functools import partial
from pathlib import Path
from typing import Literal, override

import httpcore2

from charging import errors
from charging.destinations import HTTPS_PORT, Address, Destination, destination, is_public

# What a receiver may say: certificates come to some 5 KB, and a page of HTML in place of an answer still fits. Taken
# apart, a head of short lines takes twenty times its bytes, and so is held tighter: at what nginx grants a server.
HANDSHAKE_BYTES = 64 * 1024
HEAD_BYTES = 8 * 1024
BODY_BYTES = 64 * 1024
# What is taken from the socket at once: a TLS record, so that a hundred deliveries hold two megabytes, not more.
BYTES_AT_ONCE = 16 * 1024
EXCERPT_CHARACTERS = 500
# What of a body is kept to make it from: that many characters of four bytes, and as much white space between them.
EXCERPT_BYTES = 4096
# Of the addresses that a name has, in the resolver's order. A delivery is no scan of a network.
ADDRESSES_TRIED = 4
# A resolver gives up after half a minute at worst, three times a usual deadline: more lookups than these are under way
# at once only when DNS itself is down.
LOOKUPS = 256

SUCCESS = range(200, 300)
LEAST_RETRY_AFTER_SECONDS = 1
MOST_RETRY_AFTER_SECONDS = 24 * 60 * 60
# The longest form of an HTTP date has 33 characters.
_DATE_CHARACTERS = 40

type Reason = Literal[
    "url_not_allowed",
    "name_not_resolved",
    "address_not_public",
    "connect_failed",
    "tls_failed",
    "timed_out",
    "connection_lost",
    "protocol_error",
    "answer_too_large",
]
type Resolve = Callable[[str], Sequence[Address]]
type Rule = Callable[[Address], bool]


@dataclass(frozen=True, slots=True)
class Answer:
    """What the receiver said. 2xx alone is success; a redirect is an answer like any other, and not followed.

    `excerpt` is the beginning of the body as one line of text, for a person to read; empty when the body is encoded.
    """

    status: int
    retry_after_seconds: int | None
    excerpt: str
    duration_seconds: float

    @property
    def is_success(self) -> bool:
        """Whether the receiver has taken the webhook."""
        return self.status in SUCCESS


@dataclass(frozen=True, slots=True)
class Failure:
    """Why there is no answer. `reason` is stable; `detail` is for a person, and names no address."""

    reason: Reason
    detail: str
    duration_seconds: float


class _Failed(Exception):
    def __init__(self, reason: Reason, detail: str) -> None:
        super().__init__(reason)
        self.reason = reason
        self.detail = detail


class Sender:
    """Sends from any number of threads; each call ends within `deadline_seconds`, whatever the receiver does.

    `allows_loopback` is for development: receivers on this machine, and plain http to them. `authorities` is a file
    of certificates to trust instead of the system's. `resolve` and `admits` say which addresses a name has, and which
    addresses are good; `ports` are the good ports.
    """

    def __init__(
        self,
        *,
        deadline_seconds: float,
        allows_loopback: bool = False,
        authorities: Path | None = None,
        resolve: Resolve | None = None,
        admits: Rule = is_public,
        ports: Container[int] = (HTTPS_PORT,),
    ) -> None:
        self._deadline_seconds = deadline_seconds
        self._allows_loopback = allows_loopback
        self._tls = ssl.create_default_context(cafile=authorities)
        self._tls.set_alpn_protocols(["http/1.1"])
        self._resolve = resolve or system_addresses
        self._admits = admits
        self._ports = ports
        self._lookups = threading.BoundedSemaphore(LOOKUPS)

    def send(self, url: str, headers: Mapping[str, str], body: bytes) -> Answer | Failure:
        """Makes one POST of exactly these bytes, and returns what came of it.

        Never raises for what the receiver, its name or the network do. An answer of 2xx counts when it is complete:
        one that breaks off or is not done in time is a failure, since nobody knows what else went wrong there. With
        any other status it is the status that counts. A body that is longer than we read is cut, and no failure.
        """
        begun = time.monotonic()
        deadline = begun + self._deadline_seconds
        try:
            target = destination(url, allows_loopback=self._allows_loopback, ports=self._ports)
            status, retry_after, excerpt = self._post(target, headers, body, deadline)
        except errors.UrlNotAllowed as refused:
            return Failure("url_not_allowed", str(refused), time.monotonic() - begun)
        except _Failed as failed:
            return Failure(failed.reason, failed.detail, time.monotonic() - begun)
        return Answer(status, retry_after, excerpt, time.monotonic() - begun)

    def _post(
        self, target: Destination, headers: Mapping[str, str], body: bytes, deadline: float
    ) -> tuple[int, int | None, str]:
        url = httpcore2.URL(scheme=target.scheme, host=target.host, port=target.port, target=target.target)
        own = {
            "Host": target.authority,
            "User-Agent": "charging-webhooks",
            "Accept-Encoding": "identity",
            "Connection": "close",
        }
        with contextlib.closing(_connected(self._addresses(target, deadline), target.port, deadline)) as wire:
            stream = _TlsWire(wire, self._tls, target.host) if target.scheme == "https" else wire
            wire.allow(HEAD_BYTES)
            connection = httpcore2.HTTP11Connection(url.origin, stream)
            try:
                with connection.stream("POST", url, headers=[*own.items(), *headers.items()], content=body) as response:
                    wire.allow(BODY_BYTES)
                    return _read(response)
            except httpcore2.RemoteProtocolError as invalid:
                if wire.has_ended:
                    raise _Failed("connection_lost", "the receiver hung up before its answer was complete") from invalid
                raise _Failed("protocol_error", "the answer is not HTTP/1.1") from invalid

    def _addresses(self, target: Destination, deadline: float) -> Sequence[Address]:
        """Returns every address of the host, each of them good: one that is not refuses them all."""
        addresses = [target.address] if target.address else self._looked_up(target.host, deadline)
        if not addresses:
            raise _Failed("name_not_resolved", "the name has no address")
        if not all(self._is_good(address, target) for address in addresses):
            raise _Failed("address_not_public", "the name has an address that is not public")
        return addresses

    def _is_good(self, address: Address, target: Destination) -> bool:
        if self._allows_loopback and address.is_loopback:
            return True
        return target.scheme == "https" and self._admits(address)

    def _looked_up(self, name: str, deadline: float) -> Sequence[Address]:
        """Looks a name up, in a thread of its own: one that is never answered makes no other name wait.

        Nothing can stop a lookup. Such a thread goes on until its resolver gives up, and nobody waits for it.
        """
        if not self._lookups.acquire(blocking=False):
            raise _Failed("name_not_resolved", "too many names are being looked up and not answered")
        found: Future[Sequence[Address]] = Future()

        def look_up() -> None:
            try:
                found.set_result(self._resolve(name))
            except OSError as failed:
                found.set_exception(failed)
            finally:
                self._lookups.release()

        threading.Thread(target=look_up, name="lookup", daemon=True).start()
        try:
            return found.result(_left(deadline))
        except TimeoutError:
            raise _Failed("timed_out", "the name was not resolved in time") from None
        except OSError as failed:
            raise _Failed("name_not_resolved", failed.strerror or "the name was not resolved") from failed


def system_addresses(name: str) -> Sequence[Address]:
    """Returns the addresses that the system's resolver gives for a name. Raises OSError where it gives none."""
    # As bytes it is not encoded again: the name is in its ASCII form.
    found = socket.getaddrinfo(name.encode("ascii"), None, type=socket.SOCK_STREAM)
    return [ipaddress.ip_address(entry[4][0]) for entry in found]


def retry_after_seconds(lines: Sequence[str], now: datetime) -> int | None:
    """Reads Retry-After, from all the lines of it that an answer has: seconds from now, within 1 s and 24 h.

    None for what is malformed, a fraction and a second line included. Source: RFC 9110, §10.2.3.
    """
    if len(lines) != 1:
        return None
    text = lines[0].strip(" \t")
    if text.isascii() and text.isdigit():
        # Six digits tell that it is over the bound; six thousand are more than `int` will read.
        seconds = int(text.lstrip("0")[:6] or "0")
    elif text[:1].isalpha() and len(text) <= _DATE_CHARACTERS:
        try:
            moment = parsedate_to_datetime(text)
        except (ValueError, OverflowError):
            return None
        # One of the three forms of a date names no zone, and all are in GMT.
        moment = moment.replace(tzinfo=moment.tzinfo or UTC)
        seconds = math.ceil((moment - now).total_seconds())
    else:
        return None
    return min(max(seconds, LEAST_RETRY_AFTER_SECONDS), MOST_RETRY_AFTER_SECONDS)


def _left(deadline: float) -> float:
    left = deadline - time.monotonic()
    if left <= 0:
        raise _Failed("timed_out", "the deadline has passed")
    return left


def _connected(addresses: Sequence[Address], port: int, deadline: float) -> "_Wire":
    """Connects to the first address that accepts it. Each gets an equal share of the time that is left."""
    tried = list(dict.fromkeys(addresses))[:ADDRESSES_TRIED]
    detail = ""
    for count, address in enumerate(tried):
        share = _left(deadline) / (len(tried) - count)
        try:
            # An address and no name: nothing is looked up again.
            return _Wire(socket.create_connection((str(address), port), timeout=share), deadline)
        except OSError as failed:
            detail = failed.strerror or str(failed)
    _left(deadline)
    raise _Failed("connect_failed", detail)


def _read(response: httpcore2.Response) -> tuple[int, int | None, str]:
    """Reads a body to its end, or as far as it may go on."""
    body = bytearray()
    is_success = response.status in SUCCESS
    try:
        for part in response.iter_stream():
            body += part[: EXCERPT_BYTES - len(body)]
    except httpcore2.RemoteProtocolError:
        if is_success:
            raise
    except _Failed as failed:
        if is_success and failed.reason != "answer_too_large":
            raise
    lines = [(name.lower(), value.decode("latin-1")) for name, value in response.headers]
    retry_after = [value for name, value in lines if name == b"retry-after"]
    is_encoded = any(value.strip().lower() != "identity" for name, value in lines if name == b"content-encoding")
    excerpt = "" if is_encoded else _excerpt(body)
    return response.status, retry_after_seconds(retry_after, datetime.now(UTC)), excerpt


def _excerpt(body: bytes | bytearray) -> str:
    """Makes one line of a body's beginning, with nothing in it that a terminal or a database would stumble over."""
    line = " ".join(body.decode("utf-8", "replace").split())[:EXCERPT_CHARACTERS]
    return "".join(character if character.isprintable() else "\ufffd" for character in line)


class _Wire(httpcore2.NetworkStream):
    """A connection that ends at its deadline, and from which no more is read than a receiver may say."""

    def __init__(self, end: socket.socket, deadline: float) -> None:
        # The request's head and body are two writes, and the second is not to wait for the first one's receipt.
        end.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
        self._end = end
        self._deadline = deadline
        self._allowed = HANDSHAKE_BYTES
        self.has_ended = False

    def allow(self, count: int) -> None:
        """Lets the receiver say so many bytes from now on."""
        self._allowed = count

    @override
    def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        """Returns what has arrived; nothing at the end."""
        if not self._allowed:
            raise _Failed("answer_too_large", "the receiver goes on and on")
        self._end.settimeout(_left(self._deadline))
        try:
            data = self._end.recv(min(max_bytes, self._allowed, BYTES_AT_ONCE))
        except TimeoutError:
            raise _Failed("timed_out", "the answer was not complete in time") from None
        except OSError as failed:
            raise _Failed("connection_lost", failed.strerror or str(failed)) from failed
        self._allowed -= len(data)
        self.has_ended = not data
        return data

    @override
    def write(self, buffer: bytes, timeout: float | None = None) -> None:
        """Sends it all, or as much as the receiver lets us.

        One that hangs up early may have answered before it did, and reading is how to know.
        """
        rest = memoryview(buffer)
        try:
            while rest:
                self._end.settimeout(_left(self._deadline))
                rest = rest[self._end.send(rest) :]
        except TimeoutError:
            raise _Failed("timed_out", "the receiver did not take the request in time") from None
        except OSError:
            return

    @override
    def close(self) -> None:
        """Ends the connection at once, whatever is still under way."""
        self._end.close()


class _TlsWire(httpcore2.NetworkStream):
    """TLS over a wire, with the receiver's certificate verified against its name.

    A TLS socket of the standard library would do, if a receiver could not keep it busy beyond any deadline: it does
    not look up from records that carry no data as long as another one follows. Here each read is the wire's.
    """

    def __init__(self, wire: _Wire, context: ssl.SSLContext, name: str) -> None:
        self._wire = wire
        self._incoming = ssl.MemoryBIO()
        self._outgoing = ssl.MemoryBIO()
        self._tls = context.wrap_bio(self._incoming, self._outgoing, server_hostname=name)
        try:
            self._step(self._tls.do_handshake)
        except ssl.SSLEOFError:
            raise _Failed("connection_lost", "the receiver hung up during the handshake") from None

    @override
    def read(self, max_bytes: int, timeout: float | None = None) -> bytes:
        """Returns what has arrived; nothing at the end."""
        try:
            data = self._step(partial(self._tls.read, max_bytes))
        except ssl.SSLEOFError:
            # Many hang up without a word. Whether the answer is complete is for HTTP to say.
            data = b""
        self._wire.has_ended = not data
        return data

    @override
    def write(self, buffer: bytes, timeout: float | None = None) -> None:
        """Sends it all, or as much as the receiver lets us."""
        rest = memoryview(buffer)
        while rest:
            rest = rest[self._step(partial(self._tls.write, rest)) :]

    @override
    def close(self) -> None:
        """Ends the connection at once, whatever is still under way."""
        self._wire.close()

    def _step[T](self, step: Callable[[], T]) -> T:
        """Takes one step of TLS, with as much of the wire as it needs."""
        while True:
            try:
                done = step()
            except ssl.SSLWantReadError:
                self._wire.write(self._outgoing.read())
                if data := self._wire.read(BYTES_AT_ONCE):
                    self._incoming.write(data)
                else:
                    self._incoming.write_eof()
            except ssl.SSLEOFError:
                raise
            except ssl.SSLError as failed:
                # Why, for the receiver.
                self._wire.write(self._outgoing.read())
                reason = failed.verify_message if isinstance(failed, ssl.SSLCertVerificationError) else failed.reason
                raise _Failed("tls_failed", reason or "the handshake failed") from failed
            else:
                self._wire.write(self._outgoing.read())
                return done
