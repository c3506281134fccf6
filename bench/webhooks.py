"""How fast webhooks leave: the dispatcher beside the textbook's loop, and beside the sender with nothing around it."""

import contextlib
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any
from uuid import uuid4

import psycopg
import trustme

from bench import broker, events, function, measuring, reporting, rivals
from bench.measuring import Spread
from bench.plotting import Plot
from bench.reporting import Report, Table
from charging import signing
from charging.sender import Answer, Sender
from charging.webhooks import SEND_SECONDS, SHARE, SLOTS
from tests.support import deliveries
from tests.support.database import Databases

type Connection = psycopg.Connection[tuple[Any, ...]]


@dataclass(frozen=True, slots=True)
class Scale:
    """How long receivers take for an answer, 0 and 50 ms among it; how many deliveries the dispatcher and the sender
    alone make in a round, and the textbook; how many rounds there are; and how many are due when the memory is looked
    at."""

    latencies_ms: tuple[int, ...]
    sent: int
    one_by_one: int
    rounds: int
    due: int


FULL = Scale(latencies_ms=(0, 50), sent=1_000, one_by_one=40, rounds=7, due=10_000)
QUICK = Scale(latencies_ms=(0, 50), sent=300, one_by_one=10, rounds=3, due=1_000)

TARGETS = {
    "webhooks.vs_floor_0ms": reporting.at_least(0.8),
    "webhooks.vs_floor_50ms": reporting.at_least(0.8),
    "webhooks.peak_mb": reporting.at_most(200),
}

# One endpoint has its share of the slots; many have them all.
ENDPOINTS = {"one": 1, "many": SLOTS}
IN_FLIGHT = {"one": SHARE, "many": SLOTS}

# As many bytes as a webhook's, and signed by nobody: who sends them has made them before.
_HEADERS = {
    "Content-Type": "application/json",
    **signing.headers(str(uuid4()), 0, b"", [signing.secret(b"k" * signing.MASTER_KEY_BYTES, uuid4(), 1)]),
}

# Due since now, spread evenly over the endpoints.
_DUE = b"""
    INSERT INTO outbox_deliveries (endpoint_id, event_id, event_type, aggregate_id, sequence, payload)
    SELECT endpoints.id, made.event_id, 'ChargeCreated', made.charge_id, 1,
        json_build_object(
            'specversion', '1.0', 'id', made.event_id, 'source', '/charges', 'type', 'ChargeCreated',
            'subject', made.charge_id, 'datacontenttype', 'application/json', 'principal', 'bench',
            'data', json_build_object('chargeId', made.charge_id, 'amountCents', 4900, 'currency', 'USD'),
            'time', now()
        )::text
    FROM (
        SELECT number, uuidv7() AS event_id, uuidv7() AS charge_id
        FROM generate_series(0, %(count)s::int - 1) AS number
    ) AS made
    JOIN unnest(%(endpoints)s::uuid[]) WITH ORDINALITY AS endpoints (id, place)
        ON endpoints.place = made.number %% cardinality(%(endpoints)s::uuid[]) + 1
"""


def run(databases: Databases, scale: Scale) -> Report:
    """Lets the dispatcher and its rivals take turns at receivers near and far, and then sends one large backlog."""
    with contextlib.ExitStack() as stack:
        authorities, certificate = certified(Path(stack.enter_context(TemporaryDirectory())))
        subjects: dict[tuple[str, int], Callable[[], float]] = {}
        for latency in scale.latencies_ms:
            address = stack.enter_context(broker.serve(latency_seconds=latency / 1000, certificate=certificate))
            url = f"{address}/webhooks"
            sender = Sender(deadline_seconds=SEND_SECONDS, allows_loopback=True, authorities=authorities)
            post = partial(_post, sender, url)
            for name, endpoints in ENDPOINTS.items():
                room = stack.enter_context(_room(databases, url, endpoints))
                dispatcher = stack.enter_context(function.webhooks(room.database, address, authorities))
                # A lone endpoint's receiver that takes its time is waited for by few, and so is sent fewer.
                sent = max(1, scale.sent * IN_FLIGHT[name] // SLOTS) if latency else scale.sent
                subjects[name, latency] = partial(_dispatch, room, dispatcher, sent)
                subjects[f"floor of {name}", latency] = partial(_send, post, sent, IN_FLIGHT[name])
                _dispatch(room, dispatcher, 1)
            room = stack.enter_context(_room(databases, url, 1))
            subjects["textbook", latency] = partial(_deliver_by_the_textbook, room, post, scale.one_by_one)
        reporting.progress("rates")
        rates = _Rates(measuring.take_turns(scale.rounds, subjects))
        reporting.progress(f"{scale.due:,} due deliveries")
        address = stack.enter_context(broker.serve(certificate=certificate))
        room = stack.enter_context(_room(databases, f"{address}/webhooks", ENDPOINTS["many"]))
        backlog = _drained(room, stack.enter_context(function.webhooks(room.database, address, authorities)), scale.due)
    peak = backlog.peak_bytes / 1e6
    return Report(
        "webhooks",
        {
            **{f"webhooks.per_s_{latency}ms": rates.median("many", latency) for latency in scale.latencies_ms},
            **{f"webhooks.one_per_s_{latency}ms": rates.median("one", latency) for latency in scale.latencies_ms},
            **{
                f"webhooks.vs_{name}_{latency}ms": rates.ratio("many", other, latency).value
                for name, other in (("floor", "floor of many"), ("textbook", "textbook"))
                for latency in scale.latencies_ms
            },
            "webhooks.peak_mb": peak,
        },
        TARGETS,
        [
            Table(
                f"Deliveries a second to {ENDPOINTS['many']} endpoints, by the time that a receiver takes to answer",
                ["receiver takes", "dispatcher", "textbook", "dispatcher to it"],
                [
                    [
                        f"{latency} ms",
                        rates.shown("many", latency),
                        rates.shown("textbook", latency),
                        reporting.spread(rates.ratio("many", "textbook", latency)),
                    ]
                    for latency in scale.latencies_ms
                ],
            ),
            Table(
                "The same beside the sender alone, from as many threads as the dispatcher has attempts under way",
                ["receiver takes", "endpoints", "under way", "dispatcher", "sender", "dispatcher to it"],
                [
                    [
                        f"{latency} ms",
                        str(endpoints),
                        str(IN_FLIGHT[name]),
                        rates.shown(name, latency),
                        rates.shown(f"floor of {name}", latency),
                        reporting.spread(rates.ratio(name, f"floor of {name}", latency)),
                    ]
                    for latency in scale.latencies_ms
                    for name, endpoints in ENDPOINTS.items()
                ],
                f"At one endpoint at most {SHARE} are under way, and that many arrive in the time that it takes.",
            ),
            Table(
                f"One run over {scale.due:,} due deliveries",
                ["took", "most memory"],
                [[f"{backlog.seconds:.1f} s", f"{peak:.0f} MB"]],
            ),
        ],
        {
            "rates": Plot(
                f"Webhooks to {ENDPOINTS['many']} endpoints",
                {
                    f"receiver takes {latency} ms": {
                        name: rates.median(subject, latency)
                        for name, subject in (
                            ("dispatcher", "many"),
                            ("textbook", "textbook"),
                            ("sender alone", "floor of many"),
                        )
                    }
                    for latency in scale.latencies_ms
                },
                "/s",
            )
        },
    )


@dataclass(frozen=True, slots=True)
class _Rates:
    """Deliveries a second, a value a round, by who sends them and by the receiver's latency in milliseconds."""

    rounds: Mapping[tuple[str, int], list[float]]

    def ratio(self, name: str, other: str, latency: int) -> Spread:
        return measuring.ratio(self.rounds[name, latency], self.rounds[other, latency])

    def median(self, name: str, latency: int) -> float:
        return measuring.percentile(self.rounds[name, latency], 0.5)

    def shown(self, name: str, latency: int) -> str:
        return f"{self.median(name, latency):.0f}/s"


@dataclass(frozen=True, slots=True)
class _Room:
    """A database with endpoints in it, and whoever else works on it."""

    database: str
    others: Connection
    endpoints: list[Any]


@contextlib.contextmanager
def _room(databases: Databases, url: str, endpoints: int) -> Iterator[_Room]:
    with databases.migrated() as database, psycopg.connect(database, autocommit=True) as others:
        events.lift_limits(others)
        yield _Room(database, others, [deliveries.register(others, url=url) for _ in range(endpoints)])


def certified(folder: Path) -> tuple[Path, Path]:
    """Makes an authority, and a certificate of the receiver's with its key, as files."""
    authority = trustme.CA()
    authorities, certificate = folder / "authorities.pem", folder / "receiver.pem"
    authority.cert_pem.write_to_path(authorities)
    authority.issue_cert(broker.RECEIVER).private_key_and_cert_chain_pem.write_to_path(certificate)
    return authorities, certificate


def _dispatch(room: _Room, dispatcher: function.Scheduled, count: int) -> float:
    """Returns how many deliveries a second the dispatcher makes, from its start until the last is written down. A run
    then pauses, and looks once more for what is due."""
    begun = _drained(room, dispatcher, count).begun
    row = room.others.execute("SELECT extract(EPOCH FROM max(sent_at))::float8 FROM outbox_deliveries").fetchone()
    return count / (row[0] - begun) if row else 0.0


def _drained(room: _Room, dispatcher: function.Scheduled, count: int) -> function.Run:
    room.others.execute(_DUE, {"count": count, "endpoints": room.endpoints})
    run = dispatcher.run()
    _check(run.summary["SENT"], count)
    return run


def _deliver_by_the_textbook(room: _Room, post: Callable[[bytes], bool], count: int) -> float:
    room.others.execute(_DUE, {"count": count, "endpoints": room.endpoints})
    return count / measuring.seconds(
        lambda: _check(rivals.deliver_by_the_textbook(room.others, post, limit=count), count)
    )


def _send(post: Callable[[bytes], bool], count: int, threads: int) -> float:
    """Returns how many webhooks a second the sender makes of a body that is ready, from so many threads."""
    body = f'{{"id":"{uuid4()}","data":{{"amountCents":4900,"currency":"USD","reference":"{"x" * 300}"}}}}'.encode()
    with ThreadPoolExecutor(threads) as pool:
        return count / measuring.seconds(lambda: _check(sum(pool.map(post, [body] * count)), count))


def _post(sender: Sender, url: str, body: bytes) -> bool:
    """Sends a body with a webhook's headers, and tells whether it arrived."""
    answer = sender.send(url, _HEADERS, body)
    return isinstance(answer, Answer) and answer.is_success


def _check(sent: int, count: int) -> None:
    if sent != count:
        raise AssertionError("a receiver that is there takes every webhook")
