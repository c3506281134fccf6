"""How fast an outbox drains: the relay beside the textbook's, and beside the SNS client with nothing around it."""

import contextlib
import os
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from datetime import UTC, datetime
from functools import partial
from hashlib import sha256
from typing import TYPE_CHECKING, Any
from unittest import mock
from uuid import uuid4

import boto3
import psycopg
from botocore.config import Config

from bench import broker, events, function, measuring, reporting, rivals
from bench.measuring import Spread
from bench.plotting import Plot
from bench.reporting import Report, Table
from charging.outbox import ClaimedEvent
from charging.topic import CALLS_IN_FLIGHT, ENTRIES_PER_CALL, Topic
from tests.support.database import Databases

if TYPE_CHECKING:
    from mypy_boto3_sns import SNSClient
    from mypy_boto3_sns.type_defs import PublishBatchRequestEntryTypeDef

type Connection = psycopg.Connection[tuple[Any, ...]]


@dataclass(frozen=True, slots=True)
class Scale:
    """How long SNS takes for a call, 0 and 10 among it; how many events the relay drains in a round, and how many calls
    the bare client makes; how many rounds there are; and how many events are due when the memory is looked at."""

    latencies_ms: tuple[int, ...]
    drained: int
    calls: int
    rounds: int
    due: int


FULL = Scale(latencies_ms=(0, 10, 50), drained=2_000, calls=100, rounds=7, due=100_000)
QUICK = Scale(latencies_ms=(0, 10, 50), drained=300, calls=20, rounds=3, due=2_000)

TARGETS = {
    "relay.vs_textbook_10ms": reporting.at_least(20),
    "relay.vs_floor_0ms": reporting.at_least(0.8),
    "relay.vs_floor_10ms": reporting.at_least(0.8),
    "relay.peak_mb": reporting.at_most(200),
}

# What the textbook takes at a time.
TEXTBOOK_EVENTS = 50


def run(databases: Databases, scale: Scale) -> Report:
    """Lets the relay and its rivals take turns at brokers near and far, and then drains one large backlog."""
    with databases.migrated() as url, contextlib.ExitStack() as stack:
        others = stack.enter_context(psycopg.connect(url, autocommit=True))
        events.lift_limits(others)
        subjects: dict[tuple[str, int], Callable[[], float]] = {}
        for latency in scale.latencies_ms:
            address = stack.enter_context(broker.serve(latency_seconds=latency / 1000))
            relay = stack.enter_context(function.relay(url, address))
            client = _client(address)
            subjects["relay", latency] = partial(_drain, others, relay, scale.drained)
            subjects["textbook", latency] = partial(_drain_by_the_textbook, others, client)
            subjects["one thread", latency] = partial(_publish, client, scale.calls, 1)
            subjects["ten threads", latency] = partial(_publish, client, scale.calls, CALLS_IN_FLIGHT)
            _drain(others, relay, ENTRIES_PER_CALL)
        reporting.progress("rates")
        rates = _Rates(measuring.take_turns(scale.rounds, subjects))
        reporting.progress("the client's own cost")
        costs = measuring.take_turns(scale.rounds, _clients(stack.enter_context(broker.serve()), scale.calls))
        reporting.progress(f"{scale.due:,} due events")
        relay = stack.enter_context(function.relay(url, stack.enter_context(broker.serve())))
        events.write(others, events.PILED_UP, scale.due)
        drained = relay.run()
    _check(drained, scale.due)
    peak = drained.peak_bytes / 1e6
    return Report(
        "relay",
        {
            "relay.vs_textbook_10ms": rates.ratio("relay", 10, "textbook", 10).value,
            "relay.vs_floor_0ms": rates.ratio("relay", 0, "one thread", 0).value,
            "relay.vs_floor_10ms": rates.ratio("relay", 10, "ten threads", 10).value,
            "relay.rows_per_s_0ms": measuring.percentile(rates.rounds["relay", 0], 0.5),
            "relay.peak_mb": peak,
        },
        TARGETS,
        [
            Table(
                "Events a second, by the time that SNS takes for a call",
                ["SNS takes", "relay", "textbook", "relay to it"],
                [
                    [
                        f"{latency} ms",
                        rates.shown("relay", latency),
                        rates.shown("textbook", latency),
                        reporting.spread(rates.ratio("relay", latency, "textbook", latency)),
                    ]
                    for latency in scale.latencies_ms
                ],
            ),
            Table(
                "The same beside the client alone, with batches that are ready",
                ["SNS takes", "client, one thread", "relay to it", "client, ten threads", "relay to it"],
                [
                    [
                        f"{latency} ms",
                        rates.shown("one thread", latency),
                        reporting.spread(rates.ratio("relay", latency, "one thread", latency)),
                        rates.shown("ten threads", latency),
                        reporting.spread(rates.ratio("relay", latency, "ten threads", latency)),
                    ]
                    for latency in scale.latencies_ms
                ],
                "The floor is one thread where SNS takes no time, and ten where it takes some.",
            ),
            Table(
                f"What a call with {ENTRIES_PER_CALL} events costs the processor in the SNS client",
                ["client", "a call", "to boto3's"],
                [
                    [
                        name,
                        reporting.milliseconds(measuring.percentile(taken, 0.5)),
                        reporting.times(measuring.ratio(taken, costs["boto3's"]).value),
                    ]
                    for name, taken in costs.items()
                ],
            ),
            Table(
                f"One run over {scale.due:,} due events",
                ["took", "most memory"],
                [[f"{drained.seconds:.1f} s", f"{peak:.0f} MB"]],
            ),
        ],
        {
            "rates": Plot(
                "Events to SNS",
                {
                    f"SNS takes {latency} ms": {
                        name: measuring.percentile(rates.rounds[name, latency], 0.5)
                        for name in ("relay", "textbook", "one thread", "ten threads")
                    }
                    for latency in scale.latencies_ms
                },
                "/s",
            )
        },
    )


@dataclass(frozen=True, slots=True)
class _Rates:
    """Events a second, a value a round, by who sends them and by the broker's latency in milliseconds."""

    rounds: Mapping[tuple[str, int], list[float]]

    def ratio(self, name: str, latency: int, other: str, other_latency: int) -> Spread:
        return measuring.ratio(self.rounds[name, latency], self.rounds[other, other_latency])

    def shown(self, name: str, latency: int) -> str:
        return f"{measuring.percentile(self.rounds[name, latency], 0.5):.0f}/s"


def _client(address: str, **options: Any) -> "SNSClient":
    with mock.patch.dict(os.environ, broker.variables(address)):
        return boto3.client("sns", config=Config(max_pool_connections=CALLS_IN_FLIGHT, **options))


def _clients(address: str, calls: int) -> dict[str, Callable[[], float]]:
    """Returns what measures the processor's seconds of a call, for the SDK's client and each step to the relay's."""
    with mock.patch.dict(os.environ, broker.variables(address)):
        topic = Topic(broker.TOPIC_ARN, max_attempts=1)

    def send() -> None:
        call, _ = topic.send([_event() for _ in range(ENTRIES_PER_CALL)])
        call.pop().result()

    clients: dict[str, Callable[[], None]] = {
        "boto3's": partial(_publish_one, _client(address)),
        "without checks": partial(_publish_one, _client(address, parameter_validation=False)),
        "and with a fixed name": partial(
            _publish_one, _client(address, parameter_validation=False, user_agent="charging-relay")
        ),
        "and encoding once: the relay's": send,
    }

    def cost(client: Callable[[], None]) -> float:
        begun = time.process_time()
        for _ in range(calls):
            client()
        return (time.process_time() - begun) / calls

    for client in clients.values():
        client()  # connects
    return {name: partial(cost, client) for name, client in clients.items()}


def _publish_one(client: "SNSClient") -> None:
    client.publish_batch(
        TopicArn=broker.TOPIC_ARN, PublishBatchRequestEntries=[_entry() for _ in range(ENTRIES_PER_CALL)]
    )


def _event() -> ClaimedEvent:
    """An event of which the relay makes such an entry as `_entry` does."""
    entry = _entry()
    return ClaimedEvent(uuid4(), "ChargeCreated", uuid4(), entry["Message"], 1, 0, datetime.now(UTC))


def _drain(others: Connection, relay: function.Scheduled, count: int) -> float:
    events.write(others, events.CHARGED, count)
    run = relay.run()
    _check(run, count)
    return count / run.seconds


def _check(run: function.Run, count: int) -> None:
    if run.summary["results"]["PUBLISHED"] != count:
        raise AssertionError("a run without a budget publishes all that is due")


def _drain_by_the_textbook(others: Connection, client: "SNSClient") -> float:
    events.write(others, events.CHARGED, TEXTBOOK_EVENTS)
    seconds = measuring.seconds(
        lambda: rivals.relay_by_the_textbook(others, client, broker.TOPIC_ARN, limit=TEXTBOOK_EVENTS)
    )
    return TEXTBOOK_EVENTS / seconds


def _publish(client: "SNSClient", calls: int, threads: int) -> float:
    """Returns how many events a second the client sends in batches that are ready, from so many threads."""
    batches = [[_entry() for _ in range(ENTRIES_PER_CALL)] for _ in range(calls)]

    def send(batch: "Sequence[PublishBatchRequestEntryTypeDef]") -> None:
        client.publish_batch(TopicArn=broker.TOPIC_ARN, PublishBatchRequestEntries=batch)

    def send_all() -> None:
        if threads == 1:
            for batch in batches:
                send(batch)
        else:
            with ThreadPoolExecutor(threads) as pool:
                list(pool.map(send, batches))

    return calls * ENTRIES_PER_CALL / measuring.seconds(send_all)


def _entry() -> "PublishBatchRequestEntryTypeDef":
    """An entry as the relay makes it, with a payload of the usual size."""
    name = str(uuid4())
    return {
        "Id": name,
        "Message": f'{{"id":"{name}","data":{{"amountCents":4900,"currency":"USD","reference":"{"x" * 300}"}}}}',
        "MessageAttributes": {
            "eventType": {"DataType": "String", "StringValue": "ChargeCreated"},
            "outboxId": {"DataType": "String", "StringValue": name},
        },
        "MessageGroupId": sha256(name.encode()).hexdigest(),
    }
