"""RDS IAM authentication tokens, made without an AWS library.

A token is the URL of a `connect` call, presigned with Signature Version 4, without its scheme. Importing
botocore for it alone would cost every cold start some 350 ms.
Source: https://docs.aws.amazon.com/IAM/latest/UserGuide/reference_sigv-create-signed-request.html
"""

import hmac
import json
import os
from dataclasses import dataclass
from datetime import UTC, datetime
from hashlib import sha256
from urllib.parse import quote

from charging import errors

LIFETIME_SECONDS = 900  # RDS accepts no longer one; it is checked when a connection is opened, not afterwards.

# On this very machine, where an answer takes a millisecond.
_CREDENTIALS_SECONDS = 1


@dataclass(frozen=True, slots=True)
class _Credentials:
    access_key: str
    secret_key: str
    session_token: str | None


def iam_token(host: str, port: int, user: str) -> str:
    """Returns a token that lets `user` log in at `host` within the next 15 minutes, in place of a password.

    Signs with the function's own credentials, as Lambda gives them. Raises Misconfigured where there are none, and
    TemporarilyUnavailable where they cannot be had at the moment.
    """
    try:
        region = os.environ["AWS_REGION"]
        credentials = _credentials()
    except KeyError as missing:
        raise errors.Misconfigured(
            f"IAM authentication was chosen (DATABASE_PASSWORD is empty), but {missing} is not in the environment."
        ) from None

    moment = f"{datetime.now(UTC):%Y%m%dT%H%M%SZ}"
    date = moment[:8]
    scope = f"{date}/{region}/rds-db/aws4_request"
    parameters = {
        "Action": "connect",
        "DBUser": user,
        "X-Amz-Algorithm": "AWS4-HMAC-SHA256",
        "X-Amz-Credential": f"{credentials.access_key}/{scope}",
        "X-Amz-Date": moment,
        "X-Amz-Expires": str(LIFETIME_SECONDS),
        "X-Amz-SignedHeaders": "host",
    }
    if credentials.session_token:
        parameters["X-Amz-Security-Token"] = credentials.session_token
    pairs = [f"{name}={quote(value, safe='-_.~')}" for name, value in parameters.items()]
    canonical = "&".join(sorted(pairs))

    no_body = sha256(b"").hexdigest()
    request = f"GET\n/\n{canonical}\nhost:{host}:{port}\n\nhost\n{no_body}"
    to_sign = f"AWS4-HMAC-SHA256\n{moment}\n{scope}\n{sha256(request.encode()).hexdigest()}"
    key = f"AWS4{credentials.secret_key}".encode()
    for part in (date, region, "rds-db", "aws4_request"):
        key = hmac.digest(key, part.encode(), "sha256")
    signature = hmac.digest(key, to_sign.encode(), "sha256").hex()
    # Signed in sorted order, sent in the order in which AWS's own libraries send it.
    return f"{host}:{port}/?{'&'.join(pairs)}&X-Amz-Signature={signature}"


def _credentials() -> _Credentials:
    """Returns what Lambda has put in the environment, or, in a function that starts from a snapshot, what it tells.

    Source: https://docs.aws.amazon.com/lambda/latest/dg/snapstart-activate.html#snapstart-credentials
    """
    address = os.environ.get("AWS_CONTAINER_CREDENTIALS_FULL_URI")
    if address is None:
        return _Credentials(
            os.environ["AWS_ACCESS_KEY_ID"],
            os.environ["AWS_SECRET_ACCESS_KEY"],
            os.environ.get("AWS_SESSION_TOKEN"),
        )
    # Here, since it takes a cold start without a snapshot longer than the token itself does.
    import urllib.request  # noqa: PLC0415

    authorization = {"Authorization": os.environ["AWS_CONTAINER_AUTHORIZATION_TOKEN"]}
    request = urllib.request.Request(address, headers=authorization)  # noqa: S310 - Lambda's own address
    try:
        with urllib.request.urlopen(request, timeout=_CREDENTIALS_SECONDS) as response:  # noqa: S310
            found = json.load(response)
        return _Credentials(found["AccessKeyId"], found["SecretAccessKey"], found["Token"])
    except (OSError, ValueError, KeyError):
        # Not the cause itself, which may quote what was answered.
        raise errors.TemporarilyUnavailable("the function's credentials could not be read") from None
