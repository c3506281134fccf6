"""SNS with one topic, and a queue that it feeds, behind an endpoint on loopback where a test decides what goes wrong.

A relay reaches it as it reaches SNS, over HTTP: so a call can be refused, time out, or be cut off between its effect
and its answer, and a process of its own can be killed meanwhile. What is accepted goes to moto, which hands it to the
queue. AWS's own quotas are kept here, since moto does not keep them.
"""

import contextlib
import http.server
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from hashlib import md5
from typing import Any, NamedTuple
from urllib.parse import parse_qs
from uuid import UUID, uuid4
from xml.sax.saxutils import escape

import boto3
import pytest
from botocore.exceptions import ClientError
from moto import mock_aws
from mypy_boto3_sns.type_defs import PublishBatchRequestEntryTypeDef

from tests.support.invocation import Event, sample

REGION = "eu-central-1"
ENTRIES = 10
BYTES = 262_144
# A call that is held ends with the test that holds it; this only bounds one that forgot.
HOLD_SECONDS = 60.0


@dataclass(frozen=True, slots=True)
class Entry:
    """One entry of a call, as it came over the wire. An attribute is its type and its value."""

    id: UUID
    message: str
    attributes: Mapping[str, tuple[str, str]]
    group: str | None = None
    deduplication_id: str | None = None

    @property
    def size(self) -> int:
        """What AWS counts: the body and each attribute's name, type and value, in bytes."""
        return len(self.message.encode()) + sum(
            len(name.encode()) + len(kind.encode()) + len(value.encode())
            for name, (kind, value) in self.attributes.items()
        )


class Refusal(NamedTuple):
    """An entry's own failure inside a call that succeeded."""

    code: str
    sender_fault: bool
    message: str = "refused"


class Answer(NamedTuple):
    """A whole answer of the test's own."""

    status: int
    body: str

    @classmethod
    def error(cls, status: int, code: str, message: str = "refused") -> "Answer":
        """A refusal of the whole call, as SNS words it."""
        body = f"<Type>Sender</Type><Code>{code}</Code><Message>{escape(message)}</Message>"
        return cls(status, f"<ErrorResponse><Error>{body}</Error><RequestId>{uuid4()}</RequestId></ErrorResponse>")


# No answer at all: the connection is closed in its place.
HANG_UP = Answer(0, "")


def _everything_is_fine(_: list[Entry]) -> Answer | None:
    return None


type Intercept = Callable[[list[Entry]], Answer | None]


class Hold:
    """An intercept that keeps every call waiting: `reached` is set by the first, and the test sets `let_go`."""

    def __init__(self) -> None:
        self.reached = threading.Event()
        self.let_go = threading.Event()
        # What each call is answered then.
        self.answer: Answer | None = None

    def __call__(self, _: list[Entry]) -> Answer | None:
        self.reached.set()
        self.let_go.wait(HOLD_SECONDS)
        return self.answer


@dataclass(slots=True)
class Faults:
    """What a test wants to go wrong. Nothing, at first."""

    # Called with every call's entries before anything is accepted. An answer that it returns is the call's.
    intercept: Intercept = _everything_is_fine
    # Called once a call's entries are accepted. An answer that it returns is given in place of the broker's own.
    intercept_answer: Intercept = _everything_is_fine
    refused: dict[UUID, Refusal] = field(default_factory=dict)
    # Neither accepted nor mentioned in the answer.
    forgotten: set[UUID] = field(default_factory=set)
    # Whether what is accepted reaches the queue; moto takes several milliseconds a message.
    delivers: bool = True
    # The topic's MaximumMessageSize, where somebody has set it.
    topic_bytes: int | None = None
    # Called with no entries when the topic's attributes are asked for. An answer that it returns is what is answered.
    intercept_question: Intercept = _everything_is_fine


class Message(NamedTuple):
    """What arrived in the queue, once for each time that it was delivered."""

    id: UUID
    body: str
    attributes: Mapping[str, str]


class Broker:
    """The topic and its queue.

    `calls` holds the entries of each call that reached the endpoint, oldest first; `accepted` the ids of the entries
    that the broker took, once for each time.

    With `is_ordered` both are FIFO.
    """

    def __init__(self, *, is_ordered: bool = False) -> None:
        self.faults = Faults()
        self.calls: list[list[Entry]] = []
        self.accepted: list[UUID] = []
        self.questions = 0  # after the topic's attributes
        self._one_at_a_time = threading.Lock()
        self._sns = boto3.client("sns", region_name=REGION)
        self._sqs = boto3.client("sqs", region_name=REGION)
        suffix = ".fifo" if is_ordered else ""
        self.topic_arn = self._sns.create_topic(
            Name=f"charge-events{suffix}", Attributes={"FifoTopic": "true"} if is_ordered else {}
        )["TopicArn"]
        self._queue_url = self._sqs.create_queue(
            QueueName=f"totals{suffix}", Attributes={"FifoQueue": "true"} if is_ordered else {}
        )["QueueUrl"]
        queue_arn = self._sqs.get_queue_attributes(QueueUrl=self._queue_url, AttributeNames=["QueueArn"])
        self._sns.subscribe(
            TopicArn=self.topic_arn,
            Protocol="sqs",
            Endpoint=queue_arn["Attributes"]["QueueArn"],
            Attributes={"RawMessageDelivery": "true"},
        )
        self._port = 0
        self._server: http.server.ThreadingHTTPServer | None = None
        self.start()

    @property
    def endpoint_url(self) -> str:
        """Where the topic is reached, also while nobody listens there."""
        return f"http://127.0.0.1:{self._port}"

    @property
    def variables(self) -> dict[str, str]:
        """The environment that leads a function to the topic, in whatever process."""
        return {
            "TOPIC_ARN": self.topic_arn,
            "AWS_ENDPOINT_URL_SNS": self.endpoint_url,
            "AWS_ACCESS_KEY_ID": "nobody",
            "AWS_SECRET_ACCESS_KEY": "nothing",
        }

    @property
    def sent(self) -> list[UUID]:
        """The ids of all entries that reached the endpoint, in the order of their calls."""
        return [entry.id for call in self.calls for entry in call]

    def start(self) -> None:
        """Listens, on the same port as before."""
        broker = self

        class Server(http.server.ThreadingHTTPServer):
            # Four relays with ten calls each; a connection that finds no room is tried again only after a second.
            request_queue_size = 128

        class Endpoint(http.server.BaseHTTPRequestHandler):
            # An answer leaves at once, and not when the other side has acknowledged the half of it.
            wbufsize = -1
            disable_nagle_algorithm = True

            def do_POST(self) -> None:
                answer = broker.answer(self.rfile.read(int(self.headers["Content-Length"])))
                if answer is HANG_UP:
                    return
                # Whoever asked may be dead by now.
                with contextlib.suppress(ConnectionError):
                    content = answer.body.encode()
                    self.send_response(answer.status)
                    self.send_header("Content-Type", "text/xml")
                    self.send_header("Content-Length", str(len(content)))
                    self.end_headers()
                    self.wfile.write(content)

            def log_message(self, format: str, *args: object) -> None:  # noqa: A002
                pass

        self._server = Server(("127.0.0.1", self._port), Endpoint)
        self._port = self._server.server_port
        threading.Thread(target=self._server.serve_forever, kwargs={"poll_interval": 0.02}, daemon=True).start()

    def stop(self) -> None:
        """Stops listening: connections are refused."""
        if self._server is not None:
            self._server.shutdown()
            self._server.server_close()
            self._server = None

    def answer(self, request: bytes) -> Answer:
        """Answers as SNS does."""
        fields = {name: values[0] for name, values in parse_qs(request.decode(), keep_blank_values=True).items()}
        if fields["Action"] == "GetTopicAttributes":
            self.questions += 1
            return self.faults.intercept_question([]) or _attributes(self.topic_arn, self.faults.topic_bytes)
        return self._answer_batch(_entries(fields))

    def _answer_batch(self, entries: list[Entry]) -> Answer:
        """Publishes what the faults let through."""
        with self._one_at_a_time:
            self.calls.append(entries)
        if (answer := self.faults.intercept(entries)) is not None:
            return answer
        if sum(entry.size for entry in entries) > (self.faults.topic_bytes or BYTES):
            return Answer.error(400, "BatchRequestTooLong")
        if len(entries) > ENTRIES:
            return Answer.error(400, "TooManyEntriesInBatchRequest")
        faults = self.faults
        withheld = faults.forgotten | faults.refused.keys()
        try:
            with self._one_at_a_time:
                accepted = self._publish([entry for entry in entries if entry.id not in withheld])
                self.accepted += map(UUID, accepted)
        except ClientError as refused:
            return Answer.error(400, refused.response["Error"]["Code"], refused.response["Error"]["Message"])
        if (answer := faults.intercept_answer(entries)) is not None:
            return answer
        return _result(
            accepted, {entry.id: faults.refused[entry.id] for entry in entries if entry.id in faults.refused}
        )

    def _publish(self, entries: list[Entry]) -> dict[str, str]:
        if not entries or not self.faults.delivers:
            return {str(entry.id): str(uuid4()) for entry in entries}
        requests = [_request(entry) for entry in entries]
        answer = self._sns.publish_batch(TopicArn=self.topic_arn, PublishBatchRequestEntries=requests)
        return {entry["Id"]: entry["MessageId"] for entry in answer["Successful"]}

    def receive(self) -> list[Message]:
        """Takes everything out of the queue."""
        return [
            Message(
                UUID(raw["MessageId"]),
                raw["Body"],
                {name: value["StringValue"] for name, value in raw.get("MessageAttributes", {}).items()},
            )
            for raw in self._take()
        ]

    def _take(self) -> Iterator[Any]:
        while messages := self._sqs.receive_message(
            QueueUrl=self._queue_url, MaxNumberOfMessages=10, MessageAttributeNames=["All"]
        ).get("Messages"):
            for message in messages:
                self._sqs.delete_message(QueueUrl=self._queue_url, ReceiptHandle=message["ReceiptHandle"])
                yield message


def _request(entry: Entry) -> PublishBatchRequestEntryTypeDef:
    request: PublishBatchRequestEntryTypeDef = {
        "Id": str(entry.id),
        "Message": entry.message,
        "MessageAttributes": {
            name: {"DataType": kind, "StringValue": value} for name, (kind, value) in entry.attributes.items()
        },
    }
    if entry.group is not None:
        request["MessageGroupId"] = entry.group
    if entry.deduplication_id is not None:
        request["MessageDeduplicationId"] = entry.deduplication_id
    return request


@contextlib.contextmanager
def serve(monkeypatch: pytest.MonkeyPatch, *, is_ordered: bool = False) -> Iterator[Broker]:
    """Runs a broker for as long as the block lasts, where every SNS client made meanwhile finds it."""
    with mock_aws(config={"core": {"mock_credentials": True, "passthrough": {"urls": [r"http://127\.0\.0\.1:.*"]}}}):
        broker = Broker(is_ordered=is_ordered)
        monkeypatch.setenv("AWS_ENDPOINT_URL_SNS", broker.endpoint_url)
        try:
            yield broker
        finally:
            broker.stop()


def subscriber_event(messages: Iterable[Message]) -> Event:
    """The event with which Lambda hands messages to the subscriber."""
    event = sample("subscriber-sqs")
    [record] = event["Records"]
    event["Records"] = [
        record
        | {
            "attributes": dict(record["attributes"]),
            "messageId": str(message.id),
            "body": message.body,
            "md5OfBody": md5(message.body.encode(), usedforsecurity=False).hexdigest(),
            "messageAttributes": {
                name: {"stringValue": value, "stringListValues": [], "binaryListValues": [], "dataType": "String"}
                for name, value in message.attributes.items()
            },
        }
        for message in messages
    ]
    return event


def _attributes(topic_arn: str, maximum: int | None) -> Answer:
    given = {"TopicArn": topic_arn} | ({} if maximum is None else {"MaximumMessageSize": str(maximum)})
    entries = "".join(f"<entry><key>{name}</key><value>{value}</value></entry>" for name, value in given.items())
    return Answer(
        200,
        '<GetTopicAttributesResponse xmlns="http://sns.amazonaws.com/doc/2010-03-31/"><GetTopicAttributesResult>'
        f"<Attributes>{entries}</Attributes></GetTopicAttributesResult>"
        f"<ResponseMetadata><RequestId>{uuid4()}</RequestId></ResponseMetadata></GetTopicAttributesResponse>",
    )


def _entries(fields: Mapping[str, str]) -> list[Entry]:
    assert fields["Action"] == "PublishBatch"
    entries: list[Entry] = []
    while (entry := f"PublishBatchRequestEntries.member.{len(entries) + 1}") + ".Id" in fields:
        attributes: dict[str, tuple[str, str]] = {}
        while (attribute := f"{entry}.MessageAttributes.entry.{len(attributes) + 1}") + ".Name" in fields:
            attributes[fields[attribute + ".Name"]] = (
                fields[attribute + ".Value.DataType"],
                fields[attribute + ".Value.StringValue"],
            )
        entries.append(
            Entry(
                UUID(fields[entry + ".Id"]),
                fields[entry + ".Message"],
                attributes,
                fields.get(entry + ".MessageGroupId"),
                fields.get(entry + ".MessageDeduplicationId"),
            )
        )
    return entries


def _result(accepted: Mapping[str, str], refused: Mapping[UUID, Refusal]) -> Answer:
    successful = "".join(
        f"<member><Id>{name}</Id><MessageId>{message_id}</MessageId></member>" for name, message_id in accepted.items()
    )
    failed = "".join(
        f"<member><Id>{name}</Id><Code>{refusal.code}</Code><Message>{escape(refusal.message)}</Message>"
        f"<SenderFault>{str(refusal.sender_fault).lower()}</SenderFault></member>"
        for name, refusal in refused.items()
    )
    return Answer(
        200,
        '<PublishBatchResponse xmlns="http://sns.amazonaws.com/doc/2010-03-31/"><PublishBatchResult>'
        f"<Successful>{successful}</Successful><Failed>{failed}</Failed></PublishBatchResult>"
        f"<ResponseMetadata><RequestId>{uuid4()}</RequestId></ResponseMetadata></PublishBatchResponse>",
    )
