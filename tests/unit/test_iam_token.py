"""IAM tokens: the same bytes that AWS's own library makes."""

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


@pytest.mark.parametrize("missing", VARIABLES[:3])
def test_missing_credentials_are_named(monkeypatch: pytest.MonkeyPatch, missing: str) -> None:
    """An empty password outside Lambda is a setting to correct, not a login to try."""
    for name in VARIABLES:
        monkeypatch.setenv(name, "x")
    monkeypatch.delenv(missing)
    with pytest.raises(errors.Misconfigured, match=missing):
        iam_token.iam_token("db.example.com", 5432, "charges")
