"""The password of the database's owner, which RDS keeps in Secrets Manager and changes by itself.

For migrations alone. Everything else signs in as a role of its own, with IAM tokens.
"""

import json

import boto3
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError

from charging import errors

# Without a way to Secrets Manager the SDK's own limits would let a deployment wait for minutes.
CONNECT_SECONDS = 5
READ_SECONDS = 5


def password(secret_arn: str) -> str:
    """Reads what the password is now. Raises TemporarilyUnavailable, whose cause names the reason and no secret."""
    client = boto3.client(
        "secretsmanager",
        region_name=secret_arn.split(":")[3],
        config=Config(
            connect_timeout=CONNECT_SECONDS,
            read_timeout=READ_SECONDS,
            retries={"total_max_attempts": 3, "mode": "standard"},
        ),
    )
    try:
        secret = client.get_secret_value(SecretId=secret_arn)["SecretString"]
    except (BotoCoreError, ClientError) as unreadable:
        raise errors.TemporarilyUnavailable("the secret of the database's owner could not be read") from unreadable
    current: str = json.loads(secret)["password"]
    return current
