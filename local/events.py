"""The events that arrive in the running stack's queue, for a person: ``python -m local.events``, until Ctrl-C."""

import json
import sys
from typing import NoReturn

import boto3
import botocore.exceptions

from local import environment, stopping
from local.errors import StackError
from local.stopping import Stopped


def main() -> int:
    """Print each message, and delete it. 0 when stopped by Ctrl-C, 1 where no stack answers."""
    stopping.listen()
    try:
        _follow()
    except Stopped:
        return 0
    except StackError as error:
        print(error, file=sys.stderr)
        return 1
    except botocore.exceptions.BotoCoreError as error:
        print(f"The embedded stack does not answer any more: {error}", file=sys.stderr)
        return 1


def _follow() -> NoReturn:
    stack = environment.read()
    sqs = boto3.client(
        "sqs",
        endpoint_url=stack["AWS_ENDPOINT_URL"],
        region_name=stack["AWS_REGION"],
        aws_access_key_id=stack["AWS_ACCESS_KEY_ID"],
        aws_secret_access_key=stack["AWS_SECRET_ACCESS_KEY"],
    )
    queue = stack["QUEUE_URL"]
    print("Events, as they arrive (Ctrl-C ends this):", flush=True)
    while True:
        received = sqs.receive_message(
            QueueUrl=queue, MaxNumberOfMessages=10, WaitTimeSeconds=20, MessageAttributeNames=["All"]
        )
        for message in received.get("Messages", []):
            attributes = {name: value["StringValue"] for name, value in message.get("MessageAttributes", {}).items()}
            print(f"\n{json.dumps(attributes)}\n{_legible(message['Body'])}", flush=True)
            sqs.delete_message(QueueUrl=queue, ReceiptHandle=message["ReceiptHandle"])


def _legible(body: str) -> str:
    try:
        return json.dumps(json.loads(body), indent=2)
    except ValueError:
        return body


if __name__ == "__main__":
    sys.exit(main())
