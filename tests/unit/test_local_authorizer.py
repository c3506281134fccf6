"""Who the caller is, on this machine alone."""

from typing import Any

import pytest

from local import authorizer

METHOD = "arn:aws:execute-api:us-east-1:000000000000:abc/prod/POST/charges"


def authorized(headers: dict[str, str] | None) -> dict[str, Any]:
    return authorizer.handler({"type": "REQUEST", "methodArn": METHOD, "headers": headers}, None)


@pytest.mark.parametrize("name", ["X-Local-Principal", "x-local-principal", "X-LOCAL-PRINCIPAL"])
def test_the_header_names_the_caller(name: str) -> None:
    """In any letter case, as with every header."""
    assert authorized({name: "ada", "Accept": "*/*"})["principalId"] == "ada"


@pytest.mark.parametrize("headers", [None, {}, {"X-Local-Principal": ""}])
def test_a_caller_without_a_name_is_local(headers: dict[str, str] | None) -> None:
    """A first curl needs no header."""
    assert authorized(headers)["principalId"] == "local"


def test_everyone_may_call_the_method_that_was_asked_for() -> None:
    """It says who, and leaves whether to nobody."""
    (statement,) = authorized({})["policyDocument"]["Statement"]
    assert statement == {"Effect": "Allow", "Action": "execute-api:Invoke", "Resource": METHOD}
