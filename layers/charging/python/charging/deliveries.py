"""Webhook deliveries: events on their way from the transaction that wrote them to the receivers that want them."""

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from http import HTTPStatus
from typing import Any, Literal
from uuid import UUID

import psycopg
from psycopg.pq import TransactionStatus
from psycopg.rows import class_row, scalar_row

from charging import errors, sql
from charging.database import Database

# Eight attempts, each four times as far from the last: 30 seconds, 2, 8 and 32 minutes, 2, 8.5 and 34 hours, which is
# 45.5 hours in all and outlasts a night, a weekend's worth of which the breaker holds. The spread keeps deliveries that
# failed together from coming back together.
MAX_FAILURES = 8
FIRST_DELAY_SECONDS = 30.0
DELAY_FACTOR = 4.0
DELAY_SPREAD = 0.1
# A receiver that takes longer is slow. One that takes the event in, to work on it later, takes a tenth of it.
SLOW_SECONDS = 2.0
# What a receiver is given that asks for time and does not say how much.
PAUSE_SECONDS = 60.0

# What a receiver says that cannot take any delivery for the moment; and one that never will again.
_PAUSES = (HTTPStatus.TOO_MANY_REQUESTS, HTTPStatus.SERVICE_UNAVAILABLE)
_GONE = HTTPStatus.GONE

# Below every endpoint's id: a walk through the endpoints begins there.
BEFORE_ALL = UUID(int=0)


@dataclass(frozen=True, slots=True)
class ClaimedDelivery:
    """A delivery under a lease, and where it goes.

    `attempts` is this claim's fencing number; `failures` counts the attempts held against it; `payload` is what is
    sent, unchanged. The secrets that sign it have the endpoint's version and, with `previous_signs`, the one before. A
    *probe* is what an open breaker lets through.
    """

    endpoint_id: UUID
    event_id: UUID
    payload: str
    attempts: int
    failures: int
    url: str
    secret_version: int
    previous_signs: bool
    is_probe: bool


type Result = Literal["SENT", "REFUSED", "FAILED", "POSTPONED"]


@dataclass(frozen=True, slots=True)
class Attempt:
    """How one attempt ended: with the receiver's status, or with the error for which there is none.

    `retry_after_seconds` is how long the receiver asks to be left alone, within 1 second to 24 hours; `excerpt` is how
    its answer's body begins.
    """

    delivery: ClaimedDelivery
    duration_ms: int
    status: int | None = None
    error: str | None = None
    excerpt: str | None = None
    retry_after_seconds: float | None = None

    @property
    def result(self) -> Result:
        """What becomes of the delivery. The results are explained in sql/complete_deliveries.sql."""
        if self.status is not None and 200 <= self.status < 300:  # noqa: PLR2004 - success has one class
            return "SENT"
        if self.is_gone or self.pause_seconds is not None:
            return "POSTPONED"
        return "REFUSED" if self.delivery.failures + 1 < MAX_FAILURES else "FAILED"

    @property
    def is_gone(self) -> bool:
        """Whether the receiver says that it will never be there again."""
        return self.status == _GONE

    @property
    def pause_seconds(self) -> float | None:
        """For how long the whole endpoint is left alone; None where it is not."""
        if self.status not in _PAUSES:
            return None
        return PAUSE_SECONDS if self.retry_after_seconds is None else float(self.retry_after_seconds)

    @property
    def delay_seconds(self) -> float:
        """After how long the delivery is due again, unless its endpoint is held."""
        if self.result != "REFUSED":
            return 0.0
        delay = FIRST_DELAY_SECONDS * DELAY_FACTOR**self.delivery.failures
        # Not sooner than the receiver asks, and not sooner than the schedule: eight refusals are to outlast an outage.
        delay *= random.uniform(1 - DELAY_SPREAD, 1 + DELAY_SPREAD)  # noqa: S311
        # A float in any case: an array of both kinds of numbers is none that the database is given.
        return max(delay, float(self.retry_after_seconds or 0))


type Change = Literal["paused", "opened", "half_opened", "reopened", "closed", "disabled"]


@dataclass(frozen=True, slots=True)
class Transition:
    """A change in what an endpoint is sent.

    It is *paused* as long as its receiver asks. After five failures in a row its breaker is *opened*: nothing is sent
    but a probe now and then, while which it is *half-opened*, and after which *closed* or *reopened*. It is *disabled*
    when its receiver says that it has gone.
    """

    endpoint_id: UUID
    change: Change


@dataclass(frozen=True, slots=True)
class Judgement:
    """An endpoint's state before and after some attempts."""

    endpoint_id: UUID
    was_open: bool
    is_open: bool
    was_disabled: bool
    is_disabled: bool
    was_probed: bool
    pause_seconds: float | None

    @property
    def transitions(self) -> list[Transition]:
        """What has changed."""
        changes: dict[Change, bool] = {
            "disabled": self.is_disabled and not self.was_disabled,
            "opened": self.is_open and not self.was_open,
            "reopened": self.is_open and self.was_probed,
            "closed": self.was_open and not self.is_open,
            "paused": self.pause_seconds is not None,
        }
        return [Transition(self.endpoint_id, change) for change, has_happened in changes.items() if has_happened]


@dataclass(frozen=True, slots=True)
class Completion:
    """What was written down: how many leases had been lost, and what has changed for endpoints."""

    lease_lost: int = 0
    transitions: tuple[Transition, ...] = ()


@dataclass(frozen=True, slots=True)
class Measurement:
    """For how many seconds the oldest delivery has been due that nothing holds back, 0 when none is; and how many
    endpoints' breakers have opened since any receiver took a delivery."""

    oldest_age_seconds: float
    lost_endpoints: int


@dataclass(frozen=True, slots=True)
class _Verdict:
    """What some attempts say of their endpoint. The members are explained in sql/judge_endpoints.sql."""

    answered: bool = False
    failures: int = 0
    pause_seconds: float | None = None
    gone: bool = False
    probed: bool = False

    def after(self, attempt: Attempt) -> "_Verdict":
        probed = self.probed or attempt.delivery.is_probe
        if attempt.result == "SENT":
            return replace(self, answered=True, probed=probed)
        pauses = [pause for pause in (self.pause_seconds, attempt.pause_seconds) if pause is not None]
        return replace(
            self,
            failures=self.failures + 1,
            pause_seconds=max(pauses, default=None),
            gone=self.gone or attempt.is_gone,
            probed=probed,
        )


def enqueue(
    transaction: psycopg.Connection[Any],
    principal: str,
    *,
    event_type: str,
    event_id: UUID,
    aggregate_id: UUID,
    sequence: int,
    payload: str,
) -> int:
    """Writes an event's deliveries, one for each of the principal's endpoints that want it, and returns how many.

    Call it inside the transaction that writes the event: both are committed or neither. `event_id` is a
    `time_ordered_uuid`. Raises ValueError, a mistake of ours, outside a transaction, where the deliveries would be
    committed whatever became of the event.
    """
    if transaction.info.transaction_status != TransactionStatus.INTRANS:
        raise ValueError("deliveries are enqueued inside the transaction of their event, and none is open")
    return transaction.execute(
        sql.ENQUEUE_DELIVERIES,
        {
            "principal": principal,
            "event_type": event_type,
            "event_id": event_id,
            "aggregate_id": aggregate_id,
            "sequence": sequence,
            "payload": payload,
        },
    ).rowcount


def claim(
    database: Database,
    *,
    slow: bool,
    after: UUID,
    limit: int,
    share: int,
    busy: Mapping[UUID, int],
    lease_seconds: float,
) -> Sequence[ClaimedDelivery]:
    """Leases up to `limit` due deliveries of the endpoints beyond `after`, in the order of the endpoints' ids.

    Of slow endpoints alone, or of the others. No endpoint gets more than its share, from which what it is `busy` with
    is taken off. No transaction stays open.
    """
    parameters = {
        "slow": slow,
        "slow_seconds": SLOW_SECONDS,
        "after": after,
        "limit": limit,
        "share": share,
        "busy_endpoints": list(busy),
        "busy_deliveries": list(busy.values()),
        "lease_seconds": lease_seconds,
    }
    return database.fetch(class_row(ClaimedDelivery), sql.CLAIM_DELIVERIES, parameters)


def claim_probes(database: Database, *, limit: int, lease_seconds: float) -> Sequence[ClaimedDelivery]:
    """Leases one due delivery of each open endpoint whose time for a probe has come, up to `limit`."""
    parameters = {"limit": limit, "lease_seconds": lease_seconds}
    return database.fetch(class_row(ClaimedDelivery), sql.CLAIM_PROBES, parameters)


def complete(database: Database, attempts: Sequence[Attempt]) -> Completion:
    """Writes down how attempts ended and what that says of their endpoints, in one transaction.

    A lost lease changes nothing: another dispatcher has claimed the delivery since, and answers for it. Raises what
    `Database.transaction` raises; a connection that is lost, or a lock that is not to be had, only the second time.
    """
    try:
        return _complete(database, attempts)
    except (errors.ConnectionLost, errors.Contended):
        # The first run may have been committed. The second one then finds nothing that is still to be done.
        return _complete(database, attempts)


def _complete(database: Database, attempts: Sequence[Attempt]) -> Completion:
    with database.transaction() as transaction:
        completed = transaction.execute(
            sql.COMPLETE_DELIVERIES,
            {
                "endpoint_ids": [attempt.delivery.endpoint_id for attempt in attempts],
                "event_ids": [attempt.delivery.event_id for attempt in attempts],
                "attempts": [attempt.delivery.attempts for attempt in attempts],
                "outcomes": [attempt.result for attempt in attempts],
                "delays": [attempt.delay_seconds for attempt in attempts],
                "durations": [attempt.duration_ms for attempt in attempts],
                "statuses": [attempt.status for attempt in attempts],
                "errors": [attempt.error for attempt in attempts],
                "excerpts": [attempt.excerpt for attempt in attempts],
            },
        ).fetchall()
        new = {(endpoint_id, event_id) for endpoint_id, event_id, is_new in completed if is_new}
        verdicts: dict[UUID, _Verdict] = {}
        for attempt in attempts:
            delivery = attempt.delivery
            if (delivery.endpoint_id, delivery.event_id) in new:
                verdicts[delivery.endpoint_id] = verdicts.get(delivery.endpoint_id, _Verdict()).after(attempt)
        judgements = (
            transaction.cursor(row_factory=class_row(Judgement))
            .execute(
                sql.JUDGE_ENDPOINTS,
                {
                    "endpoint_ids": list(verdicts),
                    "answered": [verdict.answered for verdict in verdicts.values()],
                    "failures": [verdict.failures for verdict in verdicts.values()],
                    "pauses": [verdict.pause_seconds for verdict in verdicts.values()],
                    "gone": [verdict.gone for verdict in verdicts.values()],
                    "probed": [verdict.probed for verdict in verdicts.values()],
                },
            )
            .fetchall()
        )
    transitions = tuple(transition for judgement in judgements for transition in judgement.transitions)
    return Completion(len(attempts) - len(completed), transitions)


def abandon(database: Database, *, limit: int) -> int:
    """Gives up at most `limit` deliveries whose endpoints are there no more, and returns how many they were."""
    return len(database.fetch(scalar_row, sql.ABANDON_DELIVERIES, {"after": BEFORE_ALL, "limit": limit}))


def measure(database: Database) -> Measurement:
    """Measures the deliveries by the database's clock. Raises TemporarilyUnavailable."""
    return database.fetch_repeatable(class_row(Measurement), sql.MEASURE_DELIVERIES, {"after": BEFORE_ALL})[0]
