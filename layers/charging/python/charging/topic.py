"""The SNS topic: packs events into calls, has several calls in flight, and reads each entry's own result.

The only module that imports the AWS SDK; the charge's path never loads it.
"""

import json
from collections.abc import Sequence
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from hashlib import sha256
from typing import TYPE_CHECKING, Any
from urllib.parse import urlencode

import boto3
from botocore.config import Config
from botocore.exceptions import BotoCoreError, ClientError
from botocore.parsers import ResponseParserError

from charging.outbox import ClaimedEvent, Completion

if TYPE_CHECKING:
    from mypy_boto3_sns import SNSClient
    from mypy_boto3_sns.type_defs import BatchResultErrorEntryTypeDef, PublishBatchRequestEntryTypeDef

# Quotas of PublishBatch. The size is that of all bodies and attributes of a call together; a topic may have another.
ENTRIES_PER_CALL = 10
BYTES_PER_CALL = 256 * 1024

# A call takes some 10 ms; ten in flight hide that latency, and more would only wait for this function's CPU.
CALLS_IN_FLIGHT = 10
CONNECT_SECONDS = 2
READ_SECONDS = 5
# The worst that one call can take. A call that is refused as a whole is halved, and each half is a call again; but a
# refusal is an answer, and comes in milliseconds.
CALL_SECONDS = CONNECT_SECONDS + READ_SECONDS

# Faults in what was sent: with a whole call, one of its entries; with an entry, that very event, for good.
_MALFORMED = frozenset(
    {
        "BatchRequestTooLong",
        "InvalidParameter",
        "InvalidParameterException",
        "InvalidParameterValue",
        "ParameterValueInvalid",
        "ValidationError",
        "ValidationException",
    }
)
_ERROR_CHARACTERS = 500  # of a broker's message, as kept with the row

# An answer that is not SNS's own, from whatever stands in between, says nothing about the events. The SDK has an error
# for one that is no XML; in one that is, it does not find what it looks for.
_NO_ANSWER = (BotoCoreError, ResponseParserError, LookupError, TypeError, ValueError, AttributeError)


# A call under way, which ends with the results of its events.
type Call = Future[list[Completion]]


class Topic:
    """One SNS topic. `max_attempts` bounds how often an event that the broker refuses is offered again.

    A refusal that may be the topic's own fault, a key that is disabled for example, is held against an event only when
    the topic has accepted some other event, in the same call or since the refusal before.

    `is_ordered` tells a FIFO topic, where an event's group is its aggregate. On a standard topic the group is the
    event's principal, which SQS queues take for fairness: a principal with many events delays nobody else's.
    """

    def __init__(self, arn: str, *, max_attempts: int) -> None:
        self.arn = arn
        self.name = arn.rpartition(":")[2]
        self.is_ordered = arn.endswith(".fifo")
        self._max_attempts = max_attempts
        # No retries below us: the row's own schedule is the retry, and a call then has a known worst case.
        self._client: SNSClient = boto3.client(
            "sns",
            region_name=arn.split(":")[3],
            config=Config(
                connect_timeout=CONNECT_SECONDS,
                read_timeout=READ_SECONDS,
                retries={"total_max_attempts": 1},
                max_pool_connections=CALLS_IN_FLIGHT,
                tcp_keepalive=True,
                # Each is a tenth of what a call costs: to check the types of its 140 values, all of them texts that
                # were made here, and to put together anew which SDK, system and features send it.
                parameter_validation=False,
                user_agent="charging-relay",
            ),
        )
        self._client.meta.events.register("before-call.sns.PublishBatch", _encode_once)
        self._has_accepted = False
        self._bytes_per_call: int | None = None
        self._threads = ThreadPoolExecutor(CALLS_IN_FLIGHT, thread_name_prefix="publish")

    def send(
        self, events: Sequence[ClaimedEvent], *, calls: int = CALLS_IN_FLIGHT
    ) -> tuple[set[Call], list[Completion]]:
        """Starts as many calls as it is told to at most, and returns them, with the results of what is in none of them.

        Every event has exactly one result, here or when its call ends. No call waits for another, and none raises for
        what the broker or the network do: that is a result too.
        """
        if not events:
            return set(), []
        is_known = self._bytes_per_call is not None
        limit = self._limit()
        packed, oversized = _pack(events, limit or BYTES_PER_CALL)
        if oversized and is_known:
            # Somebody may have raised it since: that is how an operator mends an event that is too large.
            self._bytes_per_call = None
            limit = self._limit()
            packed, oversized = _pack(events, limit or BYTES_PER_CALL)
        begun = {self._threads.submit(self._send, call) for call in packed[:calls]}
        unsent = [self._too_large(event, limit) for event in oversized]
        unsent += [Completion(event, "RETURNED") for call in packed[calls:] for event in call]
        return begun, unsent

    def _limit(self) -> int | None:
        """Returns the topic's own limit for a call in bytes, which is kept; None as long as it cannot be learnt."""
        if self._bytes_per_call is None:
            try:
                attributes = self._client.get_topic_attributes(TopicArn=self.arn)["Attributes"]
                # SNS mentions it only where somebody has set it.
                self._bytes_per_call = int(attributes.get("MaximumMessageSize", BYTES_PER_CALL))
            except (ClientError, *_NO_ANSWER):
                return None
        return self._bytes_per_call

    @staticmethod
    def _too_large(event: ClaimedEvent, limit: int | None) -> Completion:
        if limit is None:
            return Completion(
                event, "POSTPONED", "The event needs a topic with a raised size, and the topic's could not be read."
            )
        return Completion(event, "FAILED", f"The event is larger than the {limit} bytes that the topic accepts.")

    def _send(self, events: Sequence[ClaimedEvent]) -> list[Completion]:
        completions, suspects = self._offer(events)
        accepts = any(completion.result == "PUBLISHED" for completion in completions)
        if not accepts and (len(suspects) > 1 or not self._has_accepted):
            # A topic that refuses everything is misconfigured, and that is not the events' fault.
            suspects = [replace(suspect, result="POSTPONED") for suspect in suspects]
        if accepts or suspects:
            self._has_accepted = accepts and not suspects  # one acceptance speaks against one refusal
        return completions + suspects

    def _offer(self, events: Sequence[ClaimedEvent]) -> tuple[list[Completion], list[Completion]]:
        """Makes one call; when it is refused as a whole for what is in it, one for each half, and so on.

        Returns the results that are certain, and apart from them the refusals that may not be their events' fault.
        """
        entries = [self._entry(event) for event in events]
        try:
            answer = self._client.publish_batch(TopicArn=self.arn, PublishBatchRequestEntries=entries)
        except ClientError as refused:
            told = refused.response.get("Error", {})
            code = str(told.get("Code", "Unknown"))
            error = _error(code, told.get("Message", ""))
            if code not in _MALFORMED:
                return [Completion(event, "POSTPONED", error) for event in events], []
            if len(events) == 1:
                return [], [Completion(events[0], "FAILED", error)]
            half = len(events) // 2
            first, second = self._offer(events[:half]), self._offer(events[half:])
            return first[0] + second[0], first[1] + second[1]
        except _NO_ANSWER as unreachable:
            return [Completion(event, "POSTPONED", _error(type(unreachable).__name__, "")) for event in events], []
        accepted = {entry.get("Id") for entry in answer.get("Successful", [])}
        refusals = {entry.get("Id"): entry for entry in answer.get("Failed", [])}
        certain, suspects = [], []
        for event in events:
            refusal = refusals.get(str(event.id))
            if str(event.id) in accepted:
                certain.append(Completion(event, "PUBLISHED"))
            elif refusal is None:
                certain.append(Completion(event, "POSTPONED", "SNS gave no result for this entry."))
            # To SNS throttling is the sender's fault, too.
            elif not refusal.get("SenderFault") or "Throttl" in refusal.get("Code", ""):
                certain.append(Completion(event, "POSTPONED", _reason(refusal)))
            else:
                is_last = refusal.get("Code") in _MALFORMED or event.refusals + 1 >= self._max_attempts
                suspects.append(Completion(event, "FAILED" if is_last else "REFUSED", _reason(refusal)))
        return certain, suspects

    def _entry(self, event: ClaimedEvent) -> "PublishBatchRequestEntryTypeDef":
        entry: PublishBatchRequestEntryTypeDef = {
            "Id": str(event.id),
            "Message": event.payload,
            "MessageAttributes": {
                "eventType": {"DataType": "String", "StringValue": event.event_type},
                "outboxId": {"DataType": "String", "StringValue": str(event.id)},
            },
        }
        if self.is_ordered:
            entry["MessageGroupId"] = str(event.aggregate_id)
            entry["MessageDeduplicationId"] = str(event.id)
        elif group := _fair_group(event.payload):
            entry["MessageGroupId"] = group
        return entry


def _encode_once(params: dict[str, Any], **_: object) -> None:
    """Gives the SDK the bytes of a call's form, which it would otherwise make twice: to sign them and to send them.

    That is a third of what a call costs. Where another release makes no form of a call, it is left alone.
    """
    if isinstance(params["body"], dict):
        params["body"] = urlencode(params["body"]).encode()


def _size(event: ClaimedEvent) -> int:
    """Counts what SNS counts: the body, and each attribute's name, type and value."""
    attributes = len("eventType" + "String" + event.event_type) + len("outboxId" + "String") + len(str(event.id))
    return len(event.payload.encode()) + attributes


def _fair_group(payload: str) -> str | None:
    """Returns what stands for the event's principal, in the alphabet and length that SNS wants of a group.

    None for an event that names no principal: whoever wrote it, it is not for the relay to hold it up.
    """
    try:
        principal = json.loads(payload)["principal"]
    except (ValueError, KeyError, TypeError, RecursionError):
        return None
    return sha256(json.dumps(principal).encode()).hexdigest()


def _pack(events: Sequence[ClaimedEvent], limit: int) -> tuple[list[list[ClaimedEvent]], list[ClaimedEvent]]:
    """Fills calls up to the quotas, in the events' order, and sets those aside that fit into none."""
    calls: list[list[ClaimedEvent]] = []
    oversized: list[ClaimedEvent] = []
    room = 0
    for event in events:
        size = _size(event)
        if size > limit:
            oversized.append(event)
            continue
        if not calls or len(calls[-1]) == ENTRIES_PER_CALL or size > room:
            calls.append([])
            room = limit
        calls[-1].append(event)
        room -= size
    return calls, oversized


def _reason(refusal: "BatchResultErrorEntryTypeDef") -> str:
    return _error(refusal.get("Code", "Unknown"), refusal.get("Message", ""))


def _error(code: str, message: str) -> str:
    return f"{code}: {message}".rstrip(": ")[:_ERROR_CHARACTERS]
