"""IAM tokens: the same bytes that AWS's own library makes."""

import contextlib
import http.server
import json
import threading
from collections.abc import Iterator
from datetime import UTC, datetime
from typing import Any, Self

import botocore.auth
import botocore.session
import pytest

from charging import errors, iam_token

REGION = "eu-central-1"
VARIABLES = ("AWS_REGION", "AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_SESSION_TOKEN")


class Frozen(datetime):
    """A clock that stands still."""

    @classmethod
    def now(cls, tz: object = None) -> Self:
        assert tz is UTC
        return cls(2026, 12, 1, 9, 30, 5, 123456, tzinfo=UTC)


def botocores(host: str, port: int, user: str) -> str:
    """The token that botocore makes with the environment's credentials."""
    client: Any = botocore.session.Session().create_client("rds", region_name=REGION)
    token: str = client.generate_db_auth_token(DBHostname=host, Port=port, DBUsername=user)
    return token


@pytest.mark.parametrize("session_token", [None, "IQoJb3JpZ2luX2VjEJr//////////wEaDGV1LWNlbnRyYWwtMSJH+/=="])
@pytest.mark.parametrize(
    ("host", "port", "user"),
    [
        ("charges.cluster-c1a2b3d4e5f6.eu-central-1.rds.amazonaws.com", 5432, "charges"),
        ("charges.proxy-c1a2b3d4e5f6.eu-central-1.rds.amazonaws.com", 6543, "app_user"),
        ("db.example.com", 5432, "user with+space/and=signs~"),
        ("db.example.com", 5432, "us\u00e9r"),
    ],
)
def test_a_token_is_that_of_botocore_byte_for_byte(
    monkeypatch: pytest.MonkeyPatch, session_token: str | None, host: str, port: int, user: str
) -> None:
    """At the same moment, with the same credentials, both sign the same URL: RDS accepts one as it does the other."""
    monkeypatch.setattr(iam_token, "datetime", Frozen)
    # botocore keeps the time in a helper of its own, without a zone.
    monkeypatch.setattr(botocore.auth, "get_current_datetime", lambda: Frozen.now(UTC).replace(tzinfo=None))
    access_key, secret_key = "ASIAEXAMPLEEXAMPLEEX", "wJalrXUtnFEMI/K7MDENG+bPxRfiCYEXAMPLEKEY"
    values = dict(zip(VARIABLES, (REGION, access_key, secret_key, session_token), strict=True))
    for name, value in values.items():
        monkeypatch.delenv(name, raising=False)
        if value is not None:
            monkeypatch.setenv(name, value)
    assert iam_token.iam_token(host, port, user) == botocores(host, port, user)


@contextlib.contextmanager
def lambdas_own(answer: bytes) -> Iterator[str]:
    """Where Lambda tells a function that starts from a snapshot its credentials."""

    class Answering(http.server.BaseHTTPRequestHandler):
        def do_GET(self) -> None:
            self.send_response(200 if self.headers["Authorization"] == "of-lambda" else 403)
            self.end_headers()
            self.wfile.write(answer)

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - its name there
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Answering) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/credentials"
        finally:
            server.shutdown()
            thread.join()


def test_a_function_from_a_snapshot_asks_for_its_credentials(monkeypatch: pytest.MonkeyPatch) -> None:
    """They were not there yet when the snapshot was taken, and Lambda keeps them out of the environment for good."""
    monkeypatch.setattr(iam_token, "datetime", Frozen)
    monkeypatch.setattr(botocore.auth, "get_current_datetime", lambda: Frozen.now(UTC).replace(tzinfo=None))
    for name, value in zip(VARIABLES, (REGION, "ASIAEXAMPLE", "wJalrXUtnFEMI", "IQoJb3Jp"), strict=True):
        monkeypatch.setenv(name, value)
    expected = botocores("db.example.com", 5432, "charges")
    for name in VARIABLES[1:]:
        monkeypatch.delenv(name)
    answer = {"AccessKeyId": "ASIAEXAMPLE", "SecretAccessKey": "wJalrXUtnFEMI", "Token": "IQoJb3Jp"}
    with lambdas_own(json.dumps(answer).encode()) as address:
        monkeypatch.setenv("AWS_CONTAINER_CREDENTIALS_FULL_URI", address)
        monkeypatch.setenv("AWS_CONTAINER_AUTHORIZATION_TOKEN", "of-lambda")
        assert iam_token.iam_token("db.example.com", 5432, "charges") == expected


@pytest.mark.parametrize(
    ("answer", "authorization"), [(b"{}", "of-lambda"), (b"no JSON", "of-lambda"), (b'{"AccessKeyId": "x"}', "another")]
)
def test_credentials_that_cannot_be_had_are_a_passing_fault(
    answer: bytes, authorization: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The next request asks again; what was answered is told to nobody."""
    monkeypatch.setenv("AWS_REGION", REGION)
    with lambdas_own(answer) as address:
        monkeypatch.setenv("AWS_CONTAINER_CREDENTIALS_FULL_URI", address)
        monkeypatch.setenv("AWS_CONTAINER_AUTHORIZATION_TOKEN", authorization)
        with pytest.raises(errors.TemporarilyUnavailable, match="credentials could not be read"):
            iam_token.iam_token("db.example.com", 5432, "charges")


@pytest.mark.parametrize("missing", VARIABLES[:3])
def test_missing_credentials_are_named(monkeypatch: pytest.MonkeyPatch, missing: str) -> None:
    """An empty password outside Lambda is a setting to correct, not a login to try."""
    for name in VARIABLES:
        monkeypatch.setenv(name, "x")
    monkeypatch.delenv(missing)
    with pytest.raises(errors.Misconfigured, match=missing):
        iam_token.iam_token("db.example.com", 5432, "charges")
