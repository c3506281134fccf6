"""The events that arrive in the running stack's queue, for a person: ``python -m local events``, until Ctrl-C."""

import contextlib
import io
import json
import sys

from local import environment, running

WAIT_SECONDS = 20


def main() -> int:
    """Print each message, and delete it; 0 when the stack has stopped. Raises StackError where none answers."""
    if isinstance(sys.stdout, io.TextIOWrapper):
        # A terminal that lacks a character, or a message that has half a one, must not end it.
        sys.stdout.reconfigure(errors="backslashreplace")
    stack = environment.read()
    # What answers does so right after the wait.
    sqs = running.client(stack, "sqs", answer_seconds=WAIT_SECONDS + 10)
    queue = stack["QUEUE_URL"]
    try:
        sqs.get_queue_attributes(QueueUrl=queue)
    except running.GONE as error:
        raise running.lost(error) from error
    print("Events, as they arrive (Ctrl-C ends this):", flush=True)
    with contextlib.suppress(*running.GONE):
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
