"""The sender against receivers that do all the harm they can, over plain http and over TLS."""

import contextlib
import gzip
import ipaddress
import queue
import select
import socket
import ssl
import struct
import subprocess
import sys
import threading
import time
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from itertools import count
from pathlib import Path

import pytest
import trustme
from cryptography.hazmat.primitives import hashes
from cryptography.hazmat.primitives.ciphers.aead import AESGCM
from cryptography.hazmat.primitives.kdf.hkdf import HKDFExpand

from charging.destinations import Address, is_public
from charging.sender import LOOKUPS, Answer, Failure, Sender, _Failed, _Wire, system_addresses
from charging.webhooks import SLOTS, SLOW_SLOTS
from tests.support.receiver import (
    OK,
    Behaviour,
    Receiver,
    Request,
    answering,
    dawdling,
    endless,
    read_request,
    reset,
    silent,
)

NAME = "receiver.example"
LOOPBACK: Address = ipaddress.ip_address("127.0.0.1")
# Where the receivers of the tests listen.
PORTS = range(443, 65536)
HEADERS = {"Content-Type": "application/json", "webhook-id": "01a22fc4"}
BODY = b'{"amountCents":4900, "reference":"caf\xc3\xa9"}'

# Longer than any answer takes that comes, on a busy machine.
PATIENCE_SECONDS = 30.0
# What a receiver is allowed that takes its time, and by how much the sender may be late on a busy machine.
SHORT_SECONDS = 0.4
LATE_SECONDS = 5.0

REDIRECTS = [301, 302, 303, 307, 308]
METADATA = "http://169.254.169.254/latest/meta-data/iam/security-credentials/"


def admits(address: Address) -> bool:
    """The rule, opened for the address that the tests' receivers have."""
    return is_public(address) or address == LOOPBACK


@contextlib.contextmanager
def unanswering(address: str = "127.0.0.1", port: int = 0) -> Iterator[int]:
    """A port whose queue of connections is full: whatever comes in is dropped, as by a firewall."""
    with contextlib.ExitStack() as opened:
        listener = opened.enter_context(socket.socket())
        listener.bind((address, port))
        listener.listen(0)
        first = opened.enter_context(socket.create_connection(listener.getsockname()))
        assert first.getpeername() == listener.getsockname()
        yield listener.getsockname()[1]


@pytest.fixture(scope="session")
def authority() -> trustme.CA:
    """An authority that no system trusts."""
    return trustme.CA()


@pytest.fixture(scope="session")
def authorities(authority: trustme.CA, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The file in which it is trusted."""
    file = tmp_path_factory.mktemp("authorities") / "authority.pem"
    authority.cert_pem.write_to_path(str(file))
    return file


def certified(certificate: trustme.LeafCert) -> ssl.SSLContext:
    """A server's side of TLS, with this certificate."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    certificate.configure_cert(context)
    return context


@dataclass(frozen=True, slots=True)
class Way:
    """How the receivers of a test are reached, and a sender that may reach them."""

    scheme: str
    authority: trustme.CA
    authorities: Path

    def receiver(self, behaviour: Behaviour) -> Receiver:
        """A receiver at the end of this way."""
        return Receiver(behaviour, tls=certified(self.authority.issue_cert(NAME)) if self.scheme == "https" else None)

    def send(self, receiver: Receiver, *, seconds: float = PATIENCE_SECONDS, body: bytes = BODY) -> Answer | Failure:
        """Sends to it what there is to send."""
        if self.scheme == "http":
            plain = Sender(deadline_seconds=seconds, allows_loopback=True)
            return plain.send(f"http://127.0.0.1:{receiver.port}/hook?a=b", HEADERS, body)
        secure = Sender(
            deadline_seconds=seconds,
            authorities=self.authorities,
            resolve=lambda _: [LOOPBACK],
            admits=admits,
            ports=PORTS,
        )
        return secure.send(f"https://{NAME}:{receiver.port}/hook?a=b", HEADERS, body)


@pytest.fixture(params=["http", "https"])
def way(request: pytest.FixtureRequest, authority: trustme.CA, authorities: Path) -> Way:
    return Way(request.param, authority, authorities)


@pytest.fixture
def secure(authority: trustme.CA, authorities: Path) -> Way:
    return Way("https", authority, authorities)


def reason(outcome: Answer | Failure) -> str:
    """Why there is no answer."""
    assert isinstance(outcome, Failure), outcome
    return outcome.reason


def answer(outcome: Answer | Failure) -> Answer:
    """The answer that there is."""
    assert isinstance(outcome, Answer), outcome
    return outcome


def assert_in_time(outcome: Answer | Failure) -> None:
    """The sender has waited as long as it may, and no longer."""
    assert SHORT_SECONDS <= outcome.duration_seconds < SHORT_SECONDS + LATE_SECONDS


# ---- what is sent -------------------------------------------------------------------------------------------------


def test_the_request_is_one_post_of_the_given_bytes(way: Way) -> None:
    """With the name in Host, and with nothing that nobody asked for: no cookie, no encoding, no second request."""
    received: queue.Queue[Request] = queue.Queue()

    def behave(end: socket.socket) -> None:
        received.put(read_request(end))
        end.sendall(OK)

    with way.receiver(behave) as receiver:
        outcome = answer(way.send(receiver))
    assert (outcome.status, outcome.is_success, outcome.retry_after_seconds, outcome.excerpt) == (200, True, None, "ok")
    request = received.get_nowait()
    host = f"{'127.0.0.1' if way.scheme == 'http' else NAME}:{receiver.port}"
    assert request.line == "POST /hook?a=b HTTP/1.1"
    assert request.body == BODY
    assert dict(request.headers) == {
        "host": host,
        "user-agent": "charging-webhooks",
        "accept-encoding": "identity",
        "connection": "close",
        "content-type": "application/json",
        "webhook-id": "01a22fc4",
        "content-length": str(len(BODY)),
    }
    assert len(dict(request.headers)) == len(request.headers)
    assert receiver.connections == 1
    assert received.empty()


def test_a_large_body_arrives_whole(way: Way) -> None:
    """Also one that no socket and no TLS record takes at once."""
    body = bytes(range(256)) * 8192
    received: queue.Queue[Request] = queue.Queue()

    def behave(end: socket.socket) -> None:
        received.put(read_request(end))
        end.sendall(OK)

    with way.receiver(behave) as receiver:
        assert answer(way.send(receiver, body=body)).is_success
    assert received.get_nowait().body == body


def test_the_environment_is_not_asked(way: Way, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither for a proxy nor for passwords: nothing listens where it points."""
    for name in ("http_proxy", "https_proxy", "all_proxy"):
        monkeypatch.setenv(name, "http://127.0.0.1:9")
        monkeypatch.setenv(name.upper(), "http://127.0.0.1:9")
    with way.receiver(answering(OK)) as receiver:
        assert answer(way.send(receiver)).is_success


# ---- statuses and redirects ---------------------------------------------------------------------------------------


@pytest.mark.parametrize("status", [200, 201, 202, 204, 299])
def test_2xx_is_success(way: Way, status: int) -> None:
    """Any of them, whatever its name."""
    with way.receiver(answering(f"HTTP/1.1 {status} Fine\r\nContent-Length: 0\r\n\r\n".encode())) as receiver:
        outcome = answer(way.send(receiver))
    assert (outcome.status, outcome.is_success) == (status, True)


@pytest.mark.parametrize("status", [300, 304, 400, 401, 404, 410, 429, 500, 503, 599])
def test_any_other_status_is_an_answer_and_no_success(way: Way, status: int) -> None:
    """The status is told, for whoever decides what follows from it."""
    with way.receiver(answering(f"HTTP/1.1 {status} No\r\nContent-Length: 0\r\n\r\n".encode())) as receiver:
        outcome = answer(way.send(receiver))
    assert (outcome.status, outcome.is_success) == (status, False)


@pytest.mark.parametrize("status", REDIRECTS)
@pytest.mark.parametrize("location", [METADATA, "/elsewhere", "//localhost/", "file:///etc/passwd", ""])
def test_no_redirect_is_followed(way: Way, status: int, location: str) -> None:
    """Of whatever kind, to whatever place: it is an answer that is no success, after one request."""
    head = f"HTTP/1.1 {status} Go\r\nLocation: {location}\r\nRefresh: 0; url={METADATA}\r\nContent-Length: 0\r\n\r\n"
    with way.receiver(answering(head.encode())) as receiver:
        outcome = answer(way.send(receiver))
    assert (outcome.status, outcome.is_success) == (status, False)
    assert receiver.connections == 1


# ---- time ---------------------------------------------------------------------------------------------------------

SLOW: dict[str, Behaviour] = {
    "nothing is read": silent,
    "nothing is said": dawdling(b""),
    "a status line, byte by byte": dawdling(b"HTTP/1.1 200 O", b"K"),
    "a header, byte by byte": dawdling(b"HTTP/1.1 200 OK\r\nX: ", b"y"),
    "headers, byte by byte": dawdling(b"HTTP/1.1 200 OK\r\n", b"X: y\r\n"),
    "100 Continue, byte by byte": dawdling(b"", b"HTTP/1.1 100 Continue\r\n\r\n"),
    "a body, byte by byte": dawdling(b"HTTP/1.1 200 OK\r\nContent-Length: 9999\r\n\r\n", b"y"),
    "a chunk, byte by byte": dawdling(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", b"1\r\ny\r\n"),
    "a body without end, byte by byte": dawdling(b"HTTP/1.0 200 OK\r\n\r\n", b"y"),
    "half a body": dawdling(b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nhalf"),
}


@pytest.mark.parametrize("case", SLOW)
def test_one_deadline_covers_everything(way: Way, case: str) -> None:
    """However a receiver spreads what it says, it is over when the deadline is."""
    with way.receiver(SLOW[case]) as receiver:
        outcome = way.send(receiver, seconds=SHORT_SECONDS)
    assert reason(outcome) == "timed_out"
    assert_in_time(outcome)


def test_the_deadline_covers_the_request(way: Way) -> None:
    """A receiver that does not take the body is left when the time is over."""
    over = threading.Event()
    # Far more than the buffers on both sides hold.
    with way.receiver(lambda _: over.wait()) as receiver:
        outcome = way.send(receiver, seconds=SHORT_SECONDS, body=bytes(64_000_000))
        over.set()
    assert reason(outcome) == "timed_out"
    assert_in_time(outcome)


def test_the_deadline_covers_the_handshake(secure: Way) -> None:
    """A receiver that takes the connection and speaks no TLS is left when the time is over."""
    with Receiver(silent) as receiver:
        outcome = secure.send(receiver, seconds=SHORT_SECONDS)
    assert reason(outcome) == "timed_out"
    assert_in_time(outcome)


def test_the_deadline_covers_the_resolver() -> None:
    """A name that is not resolved in time is left, although nothing can stop the lookup."""
    over = threading.Event()
    slow = Sender(deadline_seconds=SHORT_SECONDS, resolve=lambda _: [LOOPBACK] if over.wait() else [])
    try:
        outcome = slow.send(f"https://{NAME}/", HEADERS, BODY)
    finally:
        over.set()
    assert reason(outcome) == "timed_out"
    assert_in_time(outcome)


def test_the_deadline_covers_connecting(way: Way) -> None:
    """A receiver whose host drops what comes in is left when the time is over."""
    with unanswering() as port:
        plain = Sender(deadline_seconds=SHORT_SECONDS, allows_loopback=True)
        outcome = plain.send(f"{way.scheme}://127.0.0.1:{port}/", HEADERS, BODY)
    assert reason(outcome) == "timed_out"
    assert_in_time(outcome)


@pytest.mark.parametrize("status", [410, 429, 503])
def test_a_refusal_counts_without_its_body(way: Way, status: int) -> None:
    """A status that is no success, and when to come back, are known as soon as the head is read."""
    head = f"HTTP/1.1 {status} No\r\nRetry-After: 120\r\nContent-Length: 100\r\n\r\nnot yet".encode()
    for behaviour in (dawdling(head), dawdling(head, b"."), answering(head)):
        with way.receiver(behaviour) as receiver:
            outcome = answer(way.send(receiver, seconds=SHORT_SECONDS))
        assert (outcome.status, outcome.retry_after_seconds) == (status, 120)
        assert outcome.excerpt.rstrip(".") == "not yet"
        assert outcome.duration_seconds < SHORT_SECONDS + LATE_SECONDS


# ---- size ---------------------------------------------------------------------------------------------------------

# A page of zeros that unpacks to a thousand times its size, over and over.
BOMB = gzip.compress(bytes(64_000_000))
ENDLESS_BODIES: dict[str, Behaviour] = {
    "of a length": endless(b"HTTP/1.1 200 OK\r\nContent-Length: 999999999999\r\n\r\n", b"y"),
    "of no length": endless(b"HTTP/1.1 200 OK\r\n\r\n", b"y"),
    "of HTTP/1.0": endless(b"HTTP/1.0 200 OK\r\n\r\n", b"y"),
    "in chunks": endless(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n", b"1\r\ny\r\n"),
    "in one chunk": endless(b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\nffffffffffff\r\n", b"y"),
    "gzip bomb": endless(b"HTTP/1.1 200 OK\r\nContent-Encoding: gzip\r\n\r\n", BOMB),
    "deflate in disguise": endless(b"HTTP/1.1 200 OK\r\nContent-Encoding: identity, deflate\r\n\r\n", b"y"),
}
ENDLESS_HEADS: dict[str, Behaviour] = {
    "status line": endless(b"HTTP/1.1 200 ", b"y"),
    "header line": endless(b"HTTP/1.1 200 OK\r\nX: ", b"y"),
    "header lines": endless(b"HTTP/1.1 200 OK\r\n", b"X: y\r\n"),
    "folded header": endless(b"HTTP/1.1 200 OK\r\nX: y\r\n", b" y\r\n"),
    "header name": endless(b"HTTP/1.1 200 OK\r\n", b"X"),
    "100 Continue": endless(b"", b"HTTP/1.1 100 Continue\r\n\r\n"),
    "103 Early Hints": endless(b"", b"HTTP/1.1 103 Early Hints\r\nLink: </a>\r\n\r\n"),
}


@pytest.mark.parametrize("case", ENDLESS_BODIES)
def test_an_endless_body_is_cut(way: Way, case: str) -> None:
    """The status has been read, and it was we who stopped: a success is one."""
    with way.receiver(ENDLESS_BODIES[case]) as receiver:
        outcome = answer(way.send(receiver))
    assert (outcome.status, outcome.is_success) == (200, True)
    assert outcome.excerpt == ("" if "gzip" in case or "deflate" in case else "y" * 500)


@pytest.mark.parametrize("case", ENDLESS_HEADS)
def test_an_endless_head_is_no_answer(way: Way, case: str) -> None:
    """Nobody knows what the status would have been, or it is not the last one."""
    with way.receiver(ENDLESS_HEADS[case]) as receiver:
        assert reason(way.send(receiver)) == "answer_too_large"


def test_chunks_and_trailers_without_end_are_cut(way: Way) -> None:
    """A chunk's extension and a trailer carry nothing, and count."""
    head = b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n"
    for behaviour in (endless(head + b"1;", b"y"), endless(head + b"0\r\n", b"X: y\r\n")):
        with way.receiver(behaviour) as receiver:
            assert answer(way.send(receiver)).is_success


def test_a_head_has_a_bound_of_its_own(way: Way) -> None:
    """One of 7 KB is read, one of 9 KB is not, though a body may be longer."""
    for size, is_read in ((7_000, True), (9_000, False)):
        head = b"HTTP/1.1 200 OK\r\nContent-Length: 30000\r\nX: " + b"y" * size + b"\r\n\r\n"
        with way.receiver(answering(head, bytes(30_000))) as receiver:
            outcome = way.send(receiver)
        assert answer(outcome).is_success if is_read else reason(outcome) == "answer_too_large"


def flooding(keys: Path) -> Behaviour:
    """Sends records of TLS 1.3 that are full of session tickets, faster than any client takes them apart.

    OpenSSL makes them too slowly, so they are made here, with the connection's own keys (RFC 8446, §4.6.1 and §5.2).
    """

    def expanded(secret: bytes, label: bytes, length: int, algorithm: hashes.HashAlgorithm) -> bytes:
        label = b"tls13 " + label
        return HKDFExpand(algorithm, length, struct.pack("!HB", length, len(label)) + label + b"\0").derive(secret)

    def behave(end: socket.socket) -> None:
        lines = [line.split() for line in keys.read_text().splitlines()]
        secret = next(bytes.fromhex(line[2]) for line in lines if line[0] == "SERVER_TRAFFIC_SECRET_0")
        algorithm = hashes.SHA256() if len(secret) == 32 else hashes.SHA384()
        cipher = AESGCM(expanded(secret, b"key", 16 if len(secret) == 32 else 32, algorithm))
        iv = int.from_bytes(expanded(secret, b"iv", 12, algorithm))
        # Valid for an hour: lifetime, obfuscation, nonce, ticket, no extensions.
        ticket = struct.pack("!IIBHcH", 3600, 1, 0, 1, b"t", 0)
        handshake = b"\x04" + len(ticket).to_bytes(3) + ticket
        content = handshake * (16_000 // len(handshake)) + b"\x16"
        head = b"\x17\x03\x03" + (len(content) + 16).to_bytes(2)
        for number in count():
            socket.socket.sendall(end, head + cipher.encrypt((iv ^ number).to_bytes(12), content, head))

    return behave


def test_records_without_data_are_cut(authority: trustme.CA, secure: Way, tmp_path: Path) -> None:
    """Tickets without end say nothing, and count. A TLS socket would read them for as long as another one follows."""
    tls = certified(authority.issue_cert(NAME))
    tls.minimum_version = ssl.TLSVersion.TLSv1_3
    tls.num_tickets = 0
    tls.keylog_filename = str(tmp_path / "keys")
    with Receiver(flooding(tmp_path / "keys"), tls=tls) as receiver:
        assert reason(secure.send(receiver)) == "answer_too_large"


def test_not_one_byte_more_is_read() -> None:
    """What a receiver has sent beyond the bound is still in the socket."""
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_connection(listener.getsockname()) as there:
        here, _ = listener.accept()
        with here:
            wire = _Wire(here, time.monotonic() + PATIENCE_SECONDS)
            wire.allow(65_536)
            pump = threading.Thread(target=there.sendall, args=(bytes(65_536) + b"more",))
            pump.start()
            read = 0
            while read < 65_536:
                data = wire.read(1_000_000)
                assert 0 < len(data) <= 16_384
                read += len(data)
            assert read == 65_536
            with pytest.raises(_Failed, match="answer_too_large"):
                wire.read(1)
            pump.join()
            assert here.recv(100) == b"more"


@pytest.mark.parametrize(
    ("body", "excerpt"),
    [
        (b"", ""),
        (b"ok", "ok"),
        (b"  <p>\r\n\tNot\xc2\xa0found\n</p> ", "<p> Not found </p>"),
        ("straße €😀".encode(), "straße €😀"),
        (b"\xff\xfe", "\ufffd\ufffd"),
        (b"a\x00b\x1b[31mc\x7f", "a\ufffdb\ufffd[31mc\ufffd"),
        ("\u202etxt.exe\ue000".encode(), "\ufffdtxt.exe\ufffd"),
        (b"y" * 501, "y" * 500),
        ("€".encode() * 501, "€" * 500),
    ],
)
def test_an_excerpt_is_a_line_to_read(way: Way, body: bytes, excerpt: str) -> None:
    """With its first 500 characters, and none that a terminal obeys or a database refuses."""
    head = f"HTTP/1.1 404 Not Found\r\nContent-Length: {len(body)}\r\n\r\n".encode()
    with way.receiver(answering(head, body)) as receiver:
        assert answer(way.send(receiver)).excerpt == excerpt


# ---- what is no answer --------------------------------------------------------------------------------------------

GARBAGE: dict[str, bytes] = {
    "another protocol": b"220 mail.example ESMTP\r\n\r\n",
    "binary": b"\x00\x01\x02\x03\r\n\r\n",
    "no version": b"HTTP 200 OK\r\n\r\n",
    "no status": b"HTTP/1.1 OK\r\n\r\n",
    "short status": b"HTTP/1.1 20 OK\r\n\r\n",
    "long status": b"HTTP/1.1 2000 OK\r\n\r\n",
    "negative status": b"HTTP/1.1 -200 OK\r\n\r\n",
    "status below 100": b"HTTP/1.1 099 OK\r\n\r\n",
    "upgrade": b"HTTP/1.1 101 Switching Protocols\r\nUpgrade: websocket\r\nConnection: upgrade\r\n\r\n",
    "empty status line": b"\r\n\r\n",
    "header without a colon": b"HTTP/1.1 200 OK\r\nX\r\n\r\n",
    "header with a NUL": b"HTTP/1.1 200 OK\r\nX: \x00\r\n\r\n",
    "space before the colon": b"HTTP/1.1 200 OK\r\nX : y\r\n\r\n",
    "folded first header": b"HTTP/1.1 200 OK\r\n X: y\r\n\r\n",
    "two lengths": b"HTTP/1.1 200 OK\r\nContent-Length: 1\r\nContent-Length: 2\r\n\r\nok",
    "negative length": b"HTTP/1.1 200 OK\r\nContent-Length: -1\r\n\r\nok",
    "length in words": b"HTTP/1.1 200 OK\r\nContent-Length: two\r\n\r\nok",
    "huge length": b"HTTP/1.1 200 OK\r\nContent-Length: " + b"9" * 5000 + b"\r\n\r\nok",
    "unknown transfer coding": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: gzip, chunked\r\n\r\n0\r\n\r\n",
    "chunked twice": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n\r\n0\r\n\r\n",
    "no size of a chunk": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n\r\nok",
    "negative size of a chunk": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n-1\r\nok\r\n",
    "size of a chunk in words": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\ntwo\r\nok\r\n",
    "huge size of a chunk": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n" + b"f" * 500 + b"\r\nok\r\n",
    "chunk longer than its size": b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1\r\nok\r\n0\r\n\r\n",
}


@pytest.mark.parametrize("case", GARBAGE)
def test_what_is_not_http_is_no_answer(way: Way, case: str) -> None:
    """It is neither guessed at nor raised."""
    # The receiver stays, so that it is what it said that decides.
    with way.receiver(dawdling(GARBAGE[case])) as receiver:
        assert reason(way.send(receiver)) == "protocol_error"


@pytest.mark.parametrize(
    "said",
    [
        b"HTTP/1.0 200 OK\r\n\r\nok",
        b"HTTP/1.0 200 OK\r\nContent-Length: 2\r\n\r\nok",
        b"HTTP/1.1 200 OK\r\n\r\nok",
        b"HTTP/1.1 200\r\nContent-Length: 2\r\n\r\nok",
        b"HTTP/1.1 200 OK\nContent-Length: 2\n\nok",
        b"HTTP/1.1 200 OK\r\nConnection: keep-alive\r\nContent-Length: 2\r\n\r\nok",
        b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n1;x=y\r\no\r\n1\r\nk\r\n0\r\nX: y\r\n\r\n",
        b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\n\r\n" + OK,
        OK + b"HTTP/1.1 500 Once more\r\n\r\n",
    ],
)
def test_an_old_or_odd_answer_is_one(way: Way, said: bytes) -> None:
    """Receivers are as they are: old versions, no lengths, hints first, and words after the last one."""
    with way.receiver(answering(said)) as receiver:
        outcome = answer(way.send(receiver))
    assert (outcome.status, outcome.excerpt) == (200, "ok")


def test_an_answer_may_come_before_the_request_is_read(way: Way) -> None:
    """A receiver that refuses at the first byte is heard."""

    def behave(end: socket.socket) -> None:
        end.sendall(b"HTTP/1.1 413 Content Too Large\r\nContent-Length: 0\r\n\r\n")
        silent(end)

    with way.receiver(behave) as receiver:
        assert answer(way.send(receiver)).status == 413


def test_a_receiver_that_hung_up_is_heard_to_the_end() -> None:
    """What cannot be sent any more is no failure, as long as there is an answer to be read."""
    with socket.create_server(("127.0.0.1", 0)) as listener, socket.create_connection(listener.getsockname()) as here:
        there, _ = listener.accept()
        here.sendall(b"request")
        there.sendall(b"answer")
        reset(there)
        poll = select.poll()
        poll.register(here, select.POLLHUP)
        assert poll.poll(PATIENCE_SECONDS * 1000)
        wire = _Wire(here, time.monotonic() + PATIENCE_SECONDS)
        wire.write(b"the rest of the request")
        assert wire.read(100) == b"answer"


# ---- lost connections ---------------------------------------------------------------------------------------------

STAGES = [
    b"",
    b"HTTP/1.1 2",
    b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n",
    b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\n",
    b"HTTP/1.1 200 OK\r\nContent-Length: 10\r\n\r\nhalf",
    b"HTTP/1.1 200 OK\r\nTransfer-Encoding: chunked\r\n\r\n4\r\nhalf\r\n",
    b"HTTP/1.1 100 Continue\r\n\r\n",
]


@pytest.mark.parametrize("said", STAGES)
@pytest.mark.parametrize("ending", ["closed", "reset"])
def test_a_connection_that_is_lost_is_no_answer(way: Way, said: bytes, ending: str) -> None:
    """At whatever byte, in whichever manner: a receiver that broke off may not have taken the webhook."""

    def behave(end: socket.socket) -> None:
        read_request(end)
        end.sendall(said)
        if ending == "reset":
            reset(end)

    with way.receiver(behave) as receiver:
        assert reason(way.send(receiver)) == "connection_lost"


@pytest.mark.parametrize(
    ("ending", "bytes_read"), [("closed", 0), ("closed", 1), ("closed", 100), ("reset", 1), ("reset", 100)]
)
def test_a_connection_that_is_lost_before_the_request_is_no_answer(secure: Way, bytes_read: int, ending: str) -> None:
    """At once, or in the middle of the handshake."""

    def behave(end: socket.socket) -> None:
        read = 0
        while read < bytes_read:
            read += len(end.recv(bytes_read - read))
        if ending == "reset":
            reset(end)

    with Receiver(behave) as receiver:
        assert reason(secure.send(receiver)) == "connection_lost"


def test_a_connection_that_is_reset_at_once_is_no_answer(secure: Way) -> None:
    """Whether it stood for a moment is a matter of luck."""
    with Receiver(reset) as receiver:
        assert reason(secure.send(receiver)) in {"connect_failed", "connection_lost"}


def test_nobody_listening_is_told(way: Way) -> None:
    """As what it is, at once."""
    with Receiver(silent) as receiver:
        pass
    outcome = way.send(receiver)
    assert reason(outcome) == "connect_failed"


# ---- TLS ----------------------------------------------------------------------------------------------------------


def test_the_receiver_is_asked_for_by_its_name(authority: trustme.CA, secure: Way) -> None:
    """The address is pinned, and the name is still what the receiver hears; and that HTTP/1.1 is what we speak."""
    heard: list[str | None] = []
    tls = certified(authority.issue_cert(NAME))
    tls.set_alpn_protocols(["h2", "http/1.1"])
    tls.sni_callback = lambda _, name, __: heard.append(name)

    def behave(end: socket.socket) -> None:
        assert isinstance(end, ssl.SSLSocket)
        heard.append(end.selected_alpn_protocol())
        answering(OK)(end)

    with Receiver(behave, tls=tls) as receiver:
        assert answer(secure.send(receiver)).is_success
    assert heard == [NAME, "http/1.1"]


def speaks_ipv6() -> bool:
    """Whether this machine has a loopback address of IPv6; containers often have none."""
    with contextlib.suppress(OSError), socket.create_server(("::1", 0), family=socket.AF_INET6):
        return True
    return False


@pytest.mark.parametrize(
    ("address", "another"),
    [
        ("127.0.0.1", "127.0.0.2"),
        pytest.param("::1", "::2", marks=pytest.mark.skipif(not speaks_ipv6(), reason="no IPv6 on this machine")),
    ],
)
def test_an_address_is_verified_as_one(authority: trustme.CA, authorities: Path, address: str, another: str) -> None:
    """A URL without a name is held against the certificate's addresses."""
    local = Sender(deadline_seconds=PATIENCE_SECONDS, allows_loopback=True, authorities=authorities)
    host = f"[{address}]" if ":" in address else address
    for named in (address, another):
        with Receiver(answering(OK), tls=certified(authority.issue_cert(named)), address=address) as receiver:
            outcome = local.send(f"https://{host}:{receiver.port}/", HEADERS, BODY)
        assert isinstance(outcome, Answer) is (named == address)


@pytest.mark.parametrize("case", ["expired", "not yet valid", "another name", "a parent's name", "another authority"])
def test_a_certificate_that_is_not_good_is_refused(authority: trustme.CA, secure: Way, case: str) -> None:
    """Before a byte of the request is sent, and with the reason for the one who has to renew it."""
    now = datetime.now(UTC)
    certificate, detail = {
        "expired": (authority.issue_cert(NAME, not_after=now - timedelta(days=1)), "expired"),
        "not yet valid": (authority.issue_cert(NAME, not_before=now + timedelta(days=1)), "not yet valid"),
        "another name": (authority.issue_cert("another.example"), "Hostname mismatch"),
        "a parent's name": (authority.issue_cert("*.receiver.example"), "Hostname mismatch"),
        "another authority": (trustme.CA().issue_cert(NAME), "unable to get local issuer"),
    }[case]
    heard: list[bytes] = []
    with Receiver(lambda end: heard.append(end.recv(1)), tls=certified(certificate)) as receiver:
        outcome = secure.send(receiver)
    assert reason(outcome) == "tls_failed"
    assert isinstance(outcome, Failure)
    assert detail in outcome.detail
    assert heard == []


def test_the_receiver_hears_why_its_certificate_is_refused(secure: Way) -> None:
    """Its own log says so, too."""
    tls = certified(trustme.CA().issue_cert(NAME))
    heard: queue.Queue[str] = queue.Queue()

    def behave(end: socket.socket) -> None:
        with pytest.raises(ssl.SSLError) as refused:
            tls.wrap_socket(end, server_side=True)
        heard.put(refused.value.reason)

    with Receiver(behave) as receiver:
        assert reason(secure.send(receiver)) == "tls_failed"
        assert "UNKNOWN_CA" in heard.get(timeout=PATIENCE_SECONDS)


def test_the_system_trusts_no_authority_of_ours(authority: trustme.CA) -> None:
    """Without a file of its own the sender verifies against the system's authorities, and so refuses ours."""
    default = Sender(deadline_seconds=PATIENCE_SECONDS, resolve=lambda _: [LOOPBACK], admits=admits, ports=PORTS)
    with Receiver(answering(OK), tls=certified(authority.issue_cert(NAME))) as receiver:
        assert reason(default.send(f"https://{NAME}:{receiver.port}/", HEADERS, BODY)) == "tls_failed"


@pytest.mark.parametrize("said", [OK, b"SSH-2.0-OpenSSH_9.6\r\n", bytes(100)])
def test_plain_text_on_a_tls_port_is_refused(secure: Way, said: bytes) -> None:
    """A receiver that speaks no TLS hears nothing of the request."""

    def behave(end: socket.socket) -> None:
        end.sendall(said)
        silent(end)

    with Receiver(behave) as receiver:
        assert reason(secure.send(receiver)) == "tls_failed"


def test_old_tls_is_refused(authority: trustme.CA, secure: Way) -> None:
    """Nothing below TLS 1.2."""
    tls = certified(authority.issue_cert(NAME))
    tls.set_ciphers("ALL:@SECLEVEL=0")
    with pytest.warns(DeprecationWarning, match="TLSv1_1"):
        tls.minimum_version = ssl.TLSVersion.TLSv1_1
    with pytest.warns(DeprecationWarning, match="TLSv1_1"):
        tls.maximum_version = ssl.TLSVersion.TLSv1_1
    with Receiver(answering(OK), tls=tls) as receiver:
        assert reason(secure.send(receiver)) == "tls_failed"


def test_a_receiver_that_wants_our_certificate_is_told_apart(authority: trustme.CA, secure: Way) -> None:
    """It refuses after our side of the handshake is over, in place of an answer."""
    tls = certified(authority.issue_cert(NAME))
    tls.verify_mode = ssl.CERT_REQUIRED
    authority.configure_trust(tls)
    with Receiver(answering(OK), tls=tls) as receiver:
        assert reason(secure.send(receiver)) == "tls_failed"


# ---- names and addresses ------------------------------------------------------------------------------------------


class Resolver:
    """Gives one list of addresses after another, and the last one from then on."""

    def __init__(self, *answers: Sequence[str]) -> None:
        self.asked: list[str] = []
        self._answers = list(answers)

    def __call__(self, name: str) -> Sequence[Address]:
        self.asked.append(name)
        answers = self._answers.pop(0) if len(self._answers) > 1 else self._answers[0]
        return [ipaddress.ip_address(address) for address in answers]


def test_a_name_is_resolved_once_and_its_address_pinned(
    authority: trustme.CA, authorities: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A name that is public first and private at the next look gets the connection to what was looked at."""
    looked_up: list[object] = []
    system = socket.getaddrinfo

    def getaddrinfo(host: str, *arguments: object, **named: object) -> object:
        looked_up.append(host)
        return system(host, *arguments, **named)  # type: ignore[arg-type]  # passed on as they are

    resolver = Resolver(["127.0.0.1"], ["127.0.0.2"])
    pinned = Sender(
        deadline_seconds=PATIENCE_SECONDS, authorities=authorities, resolve=resolver, admits=admits, ports=PORTS
    )
    certificate = authority.issue_cert(NAME)
    with (
        Receiver(answering(OK), tls=certified(certificate)) as public,
        Receiver(answering(OK), tls=certified(certificate), address="127.0.0.2", port=public.port) as private,
    ):
        monkeypatch.setattr(socket, "getaddrinfo", getaddrinfo)
        url = f"https://{NAME}:{public.port}/"
        assert answer(pinned.send(url, HEADERS, BODY)).is_success
        assert resolver.asked == [NAME]
        assert reason(pinned.send(url, HEADERS, BODY)) == "address_not_public"
    assert (public.connections, private.connections) == (1, 0)
    # What the connection itself asks the system for is an address already.
    assert set(looked_up) == {"127.0.0.1"}


@pytest.mark.parametrize(
    "addresses",
    [
        ["127.0.0.1", "10.0.0.1"],
        ["10.0.0.1", "127.0.0.1"],
        ["127.0.0.1", "127.0.0.1", "127.0.0.1", "127.0.0.1", "127.0.0.1", "169.254.169.254"],
        ["127.0.0.1", "::1"],
        ["127.0.0.1", "::ffff:127.0.0.1"],
        ["127.0.0.1", "64:ff9b::a9fe:a9fe"],
        ["fd00:ec2::254"],
        ["fe80::1%lo"],
        ["100.64.0.1"],
    ],
)
def test_one_bad_address_refuses_them_all(authority: trustme.CA, authorities: Path, addresses: list[str]) -> None:
    """Whichever place it has, and however good the others are: there is no connection."""
    mixed = Sender(
        deadline_seconds=PATIENCE_SECONDS,
        authorities=authorities,
        resolve=Resolver(addresses),
        admits=admits,
        ports=PORTS,
    )
    with Receiver(answering(OK), tls=certified(authority.issue_cert(NAME))) as receiver:
        outcome = mixed.send(f"https://{NAME}:{receiver.port}/", HEADERS, BODY)
    assert reason(outcome) == "address_not_public"
    assert isinstance(outcome, Failure)
    assert not any(address in outcome.detail for address in addresses)
    assert receiver.connections == 0


def test_the_next_address_is_tried_when_one_does_not_answer(authority: trustme.CA, authorities: Path) -> None:
    """One that refuses, and one that is silent, each cost no more than their share of the time."""
    resolver = Resolver(["127.0.0.3", "127.0.0.2", "127.0.0.1"])
    patient = Sender(
        deadline_seconds=PATIENCE_SECONDS,
        authorities=authorities,
        resolve=resolver,
        admits=lambda address: address.is_loopback,
        ports=PORTS,
    )
    # Half of it goes to the one that is silent.
    hasty = Sender(
        deadline_seconds=4,
        authorities=authorities,
        resolve=resolver,
        admits=lambda address: address.is_loopback,
        ports=PORTS,
    )
    tls = certified(authority.issue_cert(NAME))
    with Receiver(answering(OK), tls=tls) as receiver:
        assert answer(patient.send(f"https://{NAME}:{receiver.port}/", HEADERS, BODY)).is_success
        with unanswering("127.0.0.2", receiver.port):
            outcome = hasty.send(f"https://{NAME}:{receiver.port}/", HEADERS, BODY)
            assert outcome.duration_seconds > SHORT_SECONDS
            assert answer(outcome).is_success


def test_an_address_that_is_given_twice_is_tried_once(authority: trustme.CA, authorities: Path) -> None:
    """A resolver that repeats itself leaves room for the others."""
    often = Sender(
        deadline_seconds=PATIENCE_SECONDS,
        authorities=authorities,
        resolve=Resolver([*["127.0.0.2"] * 4, "127.0.0.1"]),
        admits=lambda address: address.is_loopback,
        ports=PORTS,
    )
    with Receiver(answering(OK), tls=certified(authority.issue_cert(NAME))) as receiver:
        assert answer(often.send(f"https://{NAME}:{receiver.port}/", HEADERS, BODY)).is_success


def test_a_name_is_no_way_to_scan_a_network(authorities: Path) -> None:
    """Of a thousand addresses four are tried."""
    many = Sender(
        deadline_seconds=PATIENCE_SECONDS,
        authorities=authorities,
        resolve=Resolver([f"127.0.{number // 250}.{number % 250 + 1}" for number in range(1000)]),
        admits=lambda address: address.is_loopback,
        ports=PORTS,
    )
    with Receiver(answering(OK), address="127.0.0.5") as fifth:
        outcome = many.send(f"https://{NAME}:{fifth.port}/", HEADERS, BODY)
    assert reason(outcome) == "connect_failed"
    assert fifth.connections == 0


@pytest.mark.parametrize("answers", [[], None])
def test_a_name_without_an_address_is_told(answers: list[str] | None) -> None:
    """Whether the resolver says so, or fails."""

    def resolve(_: str) -> Sequence[Address]:
        if answers is None:
            raise socket.gaierror(socket.EAI_NONAME, "Name or service not known")
        return []

    nowhere = Sender(deadline_seconds=PATIENCE_SECONDS, resolve=resolve)
    assert reason(nowhere.send(f"https://{NAME}/", HEADERS, BODY)) == "name_not_resolved"


def test_the_systems_resolver_is_asked() -> None:
    """And what it says of this machine's own name is refused, unless this is development."""
    addresses = system_addresses("localhost")
    assert addresses
    assert all(address.is_loopback for address in addresses)
    with pytest.raises(OSError, match=r".+"):
        system_addresses("no-such-name.invalid")
    with Receiver(answering(OK)) as receiver:
        default = Sender(deadline_seconds=PATIENCE_SECONDS, ports=PORTS)
        assert reason(default.send(f"https://localhost:{receiver.port}/", HEADERS, BODY)) == "address_not_public"
        assert reason(default.send(f"http://localhost:{receiver.port}/", HEADERS, BODY)) == "url_not_allowed"
        assert receiver.connections == 0
        local = Sender(deadline_seconds=PATIENCE_SECONDS, allows_loopback=True)
        assert answer(local.send(f"http://localhost:{receiver.port}/", HEADERS, BODY)).is_success


def test_plain_http_goes_to_loopback_alone() -> None:
    """Not even development sends in the clear to what a name of this machine may be made to mean."""
    local = Sender(deadline_seconds=PATIENCE_SECONDS, allows_loopback=True, resolve=Resolver(["1.1.1.1"]))
    assert reason(local.send("http://localhost:8080/", HEADERS, BODY)) == "address_not_public"


@pytest.mark.parametrize("url", ["https://127.0.0.1/", "https://2130706433/", "http://receiver.example/", "nonsense"])
def test_a_url_that_is_not_allowed_is_not_tried(url: str) -> None:
    """It is neither resolved nor connected to."""
    resolver = Resolver(["127.0.0.1"])
    assert reason(Sender(deadline_seconds=1, resolve=resolver).send(url, HEADERS, BODY)) == "url_not_allowed"
    assert resolver.asked == []


# ---- many at once -------------------------------------------------------------------------------------------------


def test_names_that_are_never_answered_delay_no_other(authority: trustme.CA, authorities: Path) -> None:
    """With as many lookups hanging as may hang, but one, the next name is looked up at once.

    With one more, a name is refused at once; and none is once they are over.
    """
    over = threading.Event()
    asked = threading.Semaphore(0)

    def resolve(name: str) -> Sequence[Address]:
        if name == NAME:
            return [LOOPBACK]
        asked.release()
        over.wait()
        return []

    busy = Sender(
        deadline_seconds=PATIENCE_SECONDS, authorities=authorities, resolve=resolve, admits=admits, ports=PORTS
    )
    with (
        Receiver(answering(OK), tls=certified(authority.issue_cert(NAME))) as receiver,
        ThreadPoolExecutor(LOOKUPS) as callers,
        contextlib.ExitStack() as released,
    ):
        released.callback(over.set)

        def hang(count: int) -> None:
            for _ in range(count):
                callers.submit(busy.send, "https://silent.example/", HEADERS, BODY)
            for _ in range(count):
                assert asked.acquire(timeout=PATIENCE_SECONDS)

        def send() -> Answer | Failure:
            return busy.send(f"https://{NAME}:{receiver.port}/", HEADERS, BODY)

        hang(LOOKUPS - 1)
        assert answer(send()).is_success
        hang(1)
        assert reason(send()) == "name_not_resolved"
        over.set()
        callers.shutdown()
        assert answer(send()).is_success


def test_receivers_that_dawdle_delay_no_other(way: Way) -> None:
    """Fifty deliveries at once: forty-nine take all the time there is, and the one that could be done is done."""
    done = threading.Event()

    def waits(end: socket.socket) -> None:
        read_request(end)
        done.wait()

    with way.receiver(waits) as slow, way.receiver(answering(OK)) as healthy, ThreadPoolExecutor(50) as callers:
        held = [callers.submit(way.send, slow) for _ in range(49)]
        outcome = callers.submit(way.send, healthy)
        assert answer(outcome.result(PATIENCE_SECONDS)).is_success
        assert not any(one.done() for one in held)
        done.set()
        assert {reason(one.result()) for one in held} == {"connection_lost"}


# As many header lines as a head can have, beside what TLS itself says.
FULL = b"X:\r\n" * 1800
# Sends to each URL in turn, as often at once as a dispatcher has slots, and says by how many KB the most memory that it
# ever had has grown.
MEASURE = """
import re, sys
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from charging.sender import Sender
from charging.webhooks import SLOTS, SLOW_SLOTS

def peak():
    return int(re.search(r"VmHWM:\\s+(\\d+)", Path("/proc/self/status").read_text())[1])

sender = Sender(deadline_seconds=60, allows_loopback=True, authorities=Path(sys.argv[1]))
with ThreadPoolExecutor(SLOTS + SLOW_SLOTS) as callers:
    post = lambda url: sender.send(url, {}, b"{}")
    quiet, *hostile = sys.argv[2:]
    # By then threads, TLS and the client have taken what they need.
    assert all(outcome.status == 200 for outcome in callers.map(post, [quiet] * 500))
    begun = peak()
    outcomes = [str(outcome) for url in hostile for outcome in callers.map(post, [url] * (SLOTS + SLOW_SLOTS))]
print(peak() - begun, sum("Answer(status=200" in outcome for outcome in outcomes))
"""


@pytest.mark.skipif(not sys.platform.startswith("linux"), reason="reads the kernel's count of a process's memory")
@pytest.mark.parametrize(
    ("kinds", "successes", "most_kb"),
    [
        (ENDLESS_BODIES.values(), len(ENDLESS_BODIES), 10_000),
        # Taken apart, a head is twenty times as large.
        ([answering(b"HTTP/1.1 200 OK\r\nContent-Length: 0\r\n", FULL, b"\r\n"), *ENDLESS_HEADS.values()], 1, 15_000),
    ],
    ids=["bodies", "heads"],
)
def test_no_answer_takes_memory(
    kinds: Sequence[Behaviour], successes: int, most_kb: int, authority: trustme.CA, authorities: Path
) -> None:
    """A gzip bomb and endless bodies of every kind in all of a dispatcher's slots at once: under 10 MB more. Endless
    heads, and heads of as many lines as there can be, take little more."""
    tls = certified(authority.issue_cert("127.0.0.1"))
    with contextlib.ExitStack() as running:
        ports = [running.enter_context(Receiver(kind, tls=tls)).port for kind in (answering(OK), *kinds)]
        urls = [f"https://127.0.0.1:{port}/" for port in ports]
        measured = subprocess.run(
            [sys.executable, "-c", MEASURE, str(authorities), *urls], capture_output=True, text=True, check=False
        )
    assert measured.returncode == 0, measured.stderr
    growth, successful = map(int, measured.stdout.split())
    assert successful == (SLOTS + SLOW_SLOTS) * successes
    assert growth < most_kb, f"{growth} KB"
    print(f"\n{growth} KB more")
