"""Secrets in Secrets Manager, which are in no variable of a function, no template and no dump of the database.

Beside `topic` the only module that imports the AWS SDK. The charge's path loads neither.
"""

import boto3
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError

from charging import errors

# A caller, a minute's run or a deployment waits for it. Without a way to Secrets Manager the SDK's own limits would let
# them wait for minutes.
CONNECT_SECONDS = 2
READ_SECONDS = 3
ATTEMPTS = 3


def read(secret_arn: str) -> str:
    """Reads a secret as it is now. Raises TemporarilyUnavailable, whose cause names the reason and no secret."""
    return _read(secret_arn, "AWSCURRENT")


def read_with_previous(secret_arn: str) -> list[str]:
    """Reads a secret as it is now and, where it was ever replaced, as it was before. Raises as `read` does."""
    current = read(secret_arn)
    try:
        previous = _read(secret_arn, "AWSPREVIOUS")
    except errors.TemporarilyUnavailable as refused:
        unreadable = refused.__cause__
        if isinstance(unreadable, ClientError) and unreadable.response["Error"]["Code"] == "ResourceNotFoundException":
            return [current]
        raise
    return list(dict.fromkeys([current, previous]))


def _read(secret_arn: str, stage: str) -> str:
    client = boto3.client(
        "secretsmanager",
        region_name=secret_arn.split(":")[3],
        config=Config(
            connect_timeout=CONNECT_SECONDS,
            read_timeout=READ_SECONDS,
            retries={"total_max_attempts": ATTEMPTS, "mode": "standard"},
        ),
    )
    try:
        secret: str = client.get_secret_value(SecretId=secret_arn, VersionStage=stage)["SecretString"]
    except (BotoCoreError, ClientError) as unreadable:
        raise errors.TemporarilyUnavailable("a secret could not be read from Secrets Manager") from unreadable
    return secret
