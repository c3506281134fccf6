"""The running stack, as another command finds it: where it says it is, and whether it is still there."""

from collections.abc import Mapping
from typing import Any

import boto3
from botocore import exceptions
from botocore.config import Config

from local import environment
from local.errors import StackError

# Nothing listens any more, or the emulated AWS of a later stack does, which has other resources.
GONE = (exceptions.HTTPClientError, exceptions.ClientError)


def client(stack: Mapping[str, str], service: Any, *, answer_seconds: float) -> Any:
    """A client of the stack's emulated AWS, where any answer takes less than so many seconds.

    A stack that has stopped is not waited for: there is no second attempt. Raises StackError where the file is that of
    `make sam-local`, which has no emulated AWS.
    """
    if "AWS_ENDPOINT_URL" not in stack:
        raise StackError(
            f"{environment.path()} tells of no stack of `make run`.",
            means="What is served there is `make sam-local`, which has no queue; its functions are invoked one by one.",
            remedy="give the LOCAL_DIR of `make run`, or none; for `make sam-local` there is `make sam-invoke`.",
        )
    return boto3.client(
        service,
        endpoint_url=stack["AWS_ENDPOINT_URL"],
        region_name=stack["AWS_REGION"],
        aws_access_key_id=stack["AWS_ACCESS_KEY_ID"],
        aws_secret_access_key=stack["AWS_SECRET_ACCESS_KEY"],
        config=Config(retries={"total_max_attempts": 1}, connect_timeout=5, read_timeout=answer_seconds),
    )


def lost(error: Exception) -> StackError:
    """What to tell the person when the stack does not answer."""
    return StackError(
        f"The embedded stack that {environment.path()} tells of does not answer: {error}",
        means="It was killed, and the file is left over.",
        remedy=f"start it again with `{environment.command('run')}`, in another terminal.",
    )
