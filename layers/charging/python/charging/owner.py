"""The password of the database's owner, which RDS keeps in Secrets Manager and changes by itself.

For migrations alone. Everything else signs in as a role of its own, with IAM tokens.
"""

import json

from charging import vault


def password(secret_arn: str) -> str:
    """Reads what the password is now. Raises TemporarilyUnavailable, whose cause names the reason and no secret."""
    current: str = json.loads(vault.read(secret_arn))["password"]
    return current
