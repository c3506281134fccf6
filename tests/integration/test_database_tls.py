"""A token goes to the server that is meant: over TLS, by the name that was asked for, from the right roots."""

import contextlib
import socket
import ssl
import struct
import threading
from collections.abc import Iterator
from pathlib import Path

import pytest
import trustme

from charging import database, errors
from charging.settings import DatabaseSettings

SSL_REQUEST = struct.pack("!II", 8, 80877103)
NAME = "localhost"


class Listener:
    """A server that answers the request for TLS, and keeps what it is told once the connection is secure."""

    def __init__(self, tls: ssl.SSLContext | None) -> None:
        self._tls = tls
        self._listener = socket.create_server(("127.0.0.1", 0))
        self.port: int = self._listener.getsockname()[1]
        self.heard: list[bytes] = []
        self._thread = threading.Thread(target=self._serve, daemon=True)
        self._thread.start()

    def close(self) -> None:
        """Answers nobody from now on, and has heard all that there was to hear."""
        with contextlib.suppress(OSError):
            self._listener.shutdown(socket.SHUT_RDWR)
        self._thread.join()
        self._listener.close()

    def _serve(self) -> None:
        with contextlib.suppress(OSError):
            while True:
                self._answer(self._listener.accept()[0])

    def _answer(self, connection: socket.socket) -> None:
        with connection, contextlib.suppress(OSError):
            connection.settimeout(10)
            assert connection.recv(8) == SSL_REQUEST
            connection.sendall(b"S" if self._tls else b"N")
            with self._tls.wrap_socket(connection, server_side=True) if self._tls else connection as secure:
                if heard := secure.recv(4096):
                    self.heard.append(heard)


@pytest.fixture
def authority() -> trustme.CA:
    return trustme.CA()


@pytest.fixture(autouse=True)
def roots(authority: trustme.CA, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The authority stands for that of RDS, and the credentials for a function's."""
    file = tmp_path / "roots.pem"
    authority.cert_pem.write_to_path(str(file))
    monkeypatch.setattr(database, "roots_for", lambda _: file)
    for variable in ("AWS_REGION", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(variable, "x")


@contextlib.contextmanager
def listening(certificate: trustme.LeafCert | None) -> Iterator[Listener]:
    """A server with this certificate, or one that knows no TLS."""
    tls = None
    if certificate is not None:
        tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        certificate.configure_cert(tls)
    listener = Listener(tls)
    try:
        yield listener
    finally:
        listener.close()


def connect(port: int) -> None:
    """Tries to, with a token. None of these servers lets anybody in."""
    values = {"DATABASE_HOST": NAME, "DATABASE_PORT": port, "DATABASE_NAME": "charges", "DATABASE_USER": "charges"}
    with pytest.raises(errors.TemporarilyUnavailable):
        database.connect(DatabaseSettings.model_validate({**values, "DATABASE_PASSWORD": ""}))


def test_the_right_server_is_spoken_to(authority: trustme.CA) -> None:
    """Its certificate is for the name, from the roots: the client says who it is, and so would go on."""
    with listening(authority.issue_cert(NAME)) as server:
        connect(server.port)
    assert any(b"user\0charges" in heard for heard in server.heard)


def test_a_server_from_another_authority_hears_nothing() -> None:
    """Whoever sits between with a certificate of their own learns neither the token nor the name."""
    with listening(trustme.CA().issue_cert(NAME)) as server:
        connect(server.port)
    assert server.heard == []


def test_a_server_of_another_name_hears_nothing(authority: trustme.CA) -> None:
    """Any customer of RDS has a certificate from the same roots: the name tells whose server it is."""
    with listening(authority.issue_cert("somebody-else.example")) as server:
        connect(server.port)
    assert server.heard == []


def test_a_server_without_tls_hears_nothing() -> None:
    """There is no falling back to the open."""
    with listening(None) as server:
        connect(server.port)
    assert server.heard == []
