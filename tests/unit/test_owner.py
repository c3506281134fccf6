"""The owner's password: as Secrets Manager has it at this moment, and never in an error."""

import json
from collections.abc import Iterator

import boto3
import pytest
from moto import mock_aws

from charging import errors, owner

REGION = "eu-central-1"


@pytest.fixture(autouse=True)
def aws(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """An account without a secret."""
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "testing")
    with mock_aws():
        yield


def secret(password: str) -> str:
    """What RDS keeps of a user."""
    return json.dumps({"username": "charges", "password": password})


def test_the_password_is_the_current_one() -> None:
    """RDS changes it every week, and a migration takes what there is."""
    client = boto3.Session().client("secretsmanager", region_name=REGION)
    arn = client.create_secret(Name="rds!db-1", SecretString=secret("first"))["ARN"]
    assert owner.password(arn) == "first"
    client.put_secret_value(SecretId=arn, SecretString=secret("second"))
    assert owner.password(arn) == "second"


def test_a_secret_that_cannot_be_read_is_a_passing_fault() -> None:
    """A policy or a network that is not there yet: the deployment fails with a reason that it names."""
    with pytest.raises(errors.TemporarilyUnavailable, match="could not be read"):
        owner.password(f"arn:aws:secretsmanager:{REGION}:111122223333:secret:none-abcdef")
