"""Secrets as Secrets Manager has them at this moment, and never in an error."""

from collections.abc import Iterator

import boto3
import pytest
from moto import mock_aws

from charging import errors, vault

REGION = "eu-central-1"


@pytest.fixture(autouse=True)
def aws(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An account without a secret."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "testing")
    with mock_aws():
        yield


def test_a_secret_is_read_from_the_region_that_its_arn_names() -> None:
    """Whatever region the function thinks it is in."""
    client = boto3.Session().client("secretsmanager", region_name=REGION)
    arn = client.create_secret(Name="key", SecretString="tops3cret")["ARN"]
    assert vault.read(arn) == "tops3cret"


def test_a_secret_that_was_replaced_is_read_with_the_one_before() -> None:
    """The newest first. Put in once more, it has none before it that differs."""
    client = boto3.Session().client("secretsmanager", region_name=REGION)
    arn = client.create_secret(Name="key", SecretString="first")["ARN"]
    assert vault.read_with_previous(arn) == ["first"]
    client.put_secret_value(SecretId=arn, SecretString="second")
    assert vault.read_with_previous(arn) == ["second", "first"]
    client.put_secret_value(SecretId=arn, SecretString="second")
    assert vault.read_with_previous(arn) == ["second"]
    with pytest.raises(errors.TemporarilyUnavailable):
        vault.read_with_previous(f"{arn}-not")


def test_a_secret_that_cannot_be_read_is_a_passing_fault() -> None:
    """A policy or a network that is not there yet; the error names the reason."""
    with pytest.raises(errors.TemporarilyUnavailable, match="could not be read") as refused:
        vault.read(f"arn:aws:secretsmanager:{REGION}:111122223333:secret:none-abcdef")
    assert "ResourceNotFoundException" in str(refused.value.__cause__)
