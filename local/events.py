"""The events that arrive in the running stack's queue, for a person: ``python -m local events``, until Ctrl-C."""

import contextlib
import io
import json
import sys

import boto3
from botocore import exceptions
from botocore.config import Config

from local import environment
from local.errors import StackError

WAIT_SECONDS = 20
# A stack that has stopped is not waited for: no second attempt. What answers does so right after the wait.
CONFIG = Config(retries={"total_max_attempts": 1}, connect_timeout=5, read_timeout=WAIT_SECONDS + 10)

# Nothing listens any more, or the emulated AWS of a later stack does, which has other queues.
GONE = (exceptions.HTTPClientError, exceptions.ClientError)


def main() -> int:
    """Print each message, and delete it; 0 when the stack has stopped. Raises StackError where none answers."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        # A terminal that lacks a character, or a message that has half a one, must not end it.
        sys.stdout.reconfigure(errors="backslashreplace")
    stack = environment.read()
    sqs = boto3.client(
        "sqs",
        endpoint_url=stack["AWS_ENDPOINT_URL"],
        region_name=stack["AWS_REGION"],
        aws_access_key_id=stack["AWS_ACCESS_KEY_ID"],
        aws_secret_access_key=stack["AWS_SECRET_ACCESS_KEY"],
        config=CONFIG,
    )
    queue = stack["QUEUE_URL"]
    try:
        sqs.get_queue_attributes(QueueUrl=queue)
    except GONE as error:
        raise StackError(
            f"The embedded stack that {environment.path()} tells of does not answer: {error}",
            means="It was killed, and the file is left over.",
            remedy=f"start it again with `{environment.command('run')}`, in another terminal.",
        ) from error
    print("Events, as they arrive (Ctrl-C ends this):", flush=True)
    with contextlib.suppress(*GONE):
        while True:
            received = sqs.receive_message(
                QueueUrl=queue, MaxNumberOfMessages=10, WaitTimeSeconds=WAIT_SECONDS, MessageAttributeNames=["All"]
            )
            for message in received.get("Messages", []):
                attributes = {name: one["StringValue"] for name, one in message.get("MessageAttributes", {}).items()}
                print(f"\nmessage attributes: {_json(attributes)}\n{_legible(message['Body'])}", flush=True)
                sqs.delete_message(QueueUrl=queue, ReceiptHandle=message["ReceiptHandle"])
    print("\nThe embedded stack has stopped.", flush=True)
    return 0


def _legible(body: str) -> str:
    try:
        return _json(json.loads(body), indent=2)
    except ValueError:
        return body


def _json(content: object, indent: int | None = None) -> str:
    return json.dumps(content, indent=indent, ensure_ascii=False)
