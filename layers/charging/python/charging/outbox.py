"""The outbox: events on their way from the transaction that wrote them to the broker."""

import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Literal
from uuid import UUID

from psycopg.rows import class_row, scalar_row

from charging import compact, sql
from charging.contract import Call
from charging.database import Database
from charging.identifiers import time_ordered_uuid

SOURCE = "/charges"
# What consumers, callers' webhooks among them, may subscribe to.
EventType = Literal["ChargeCreated", "ChargeRefunded"]
# Read in a tenth of a second, where millions would take longer than the server lets a statement run.
MEASURED_EVENTS = 100_000
# A lease outlives the relay's worst sweep (SWEEP_SECONDS there), since one that ends early sends its events twice.
# It is also how long the events of a relay that died have to wait.
LEASE_SECONDS = 45
# A claim begins so long before the end of the last one. An event is due from when it is written, and committed some
# milliseconds later.
OVERLAP = timedelta(seconds=0.5)
# What came to be due behind that all the same waits until a claim begins at the very beginning, as each one does after
# this time.
FULL_LOOK_SECONDS = 15.0


def event(
    event_type: str, *, subject: UUID, principal: str, data: Mapping[str, Any], traceparent: str | None
) -> dict[str, object]:
    """Returns a new event as the parameters that sql/parts/announce.sql takes.

    `event` is a CloudEvents 1.0 object as JSON, still without its `time`, which the database's clock gives it.
    `principal` is an extension attribute, for consumers that keep accounts by owner; `traceparent` is the
    distributed tracing extension.
    """
    event_id = time_ordered_uuid()
    attributes = {
        "specversion": "1.0",
        "id": str(event_id),
        "source": SOURCE,
        "type": event_type,
        "subject": str(subject),
        "datacontenttype": "application/json",
        "principal": principal,
        "data": data,
    }
    if traceparent is not None:
        attributes["traceparent"] = traceparent
    return {
        "event_id": event_id,
        "event_type": event_type,
        "aggregate_id": subject,
        "event": compact.json(attributes),
    }


def event_of(call: Call[Any], event_type: EventType, *, subject: UUID, data: Mapping[str, Any]) -> dict[str, object]:
    """Returns the event of what a call does, as `event` does."""
    principal, traceparent = call.scope.principal, call.traceparent
    return event(event_type, subject=subject, principal=principal, data=data, traceparent=traceparent)


@dataclass(frozen=True, slots=True)
class ClaimedEvent:
    """An event under a lease. `attempts` is this claim's fencing number; `payload` is what is sent, unchanged.

    `due_at` is when it had come to be due, by the database's clock.
    """

    id: UUID
    event_type: str
    aggregate_id: UUID
    payload: str
    attempts: int
    refusals: int
    due_at: datetime


type Result = Literal["PUBLISHED", "REFUSED", "FAILED", "POSTPONED", "RETURNED"]


@dataclass(frozen=True, slots=True)
class Completion:
    """What became of one claimed event. The results are explained in sql/complete_events.sql."""

    event: ClaimedEvent
    result: Result
    error: str | None = None

    @property
    def refusals(self) -> int:
        """How often the broker has refused the event by now: a figure, and no step, so that it may be written twice."""
        return self.event.refusals + (self.result in {"REFUSED", "FAILED"})


@dataclass(frozen=True, slots=True)
class Measurement:
    """How much waits: the oldest waiting event's age in seconds (0 when none waits), and two counts.

    A count of MEASURED_EVENTS stands for as many or more; the age is then at least that of the oldest untried event.
    `xmin_age` is how many transactions ago the oldest snapshot was taken that is still held by anybody. While it
    grows, no dead row can be removed, and whoever reads the oldest rows first gets slower.
    """

    oldest_age_seconds: float
    pending: int
    failed: int
    xmin_age: int


def claim(
    database: Database, *, limit: int, lease_seconds: float, since: datetime | None = None
) -> Sequence[ClaimedEvent]:
    """Leases up to `limit` due events, those that have been due longest, of those since a moment where one is given.

    No transaction stays open. Raises as `Database.fetch` does. What a lost connection has claimed is due again when its
    lease has ended.
    """
    parameters = {"limit": limit, "lease_seconds": lease_seconds, "since": since}
    return database.fetch(class_row(ClaimedEvent), sql.CLAIM_EVENTS, parameters)


class Claims:
    """The claims of one relay, each of which begins a little before the end of the one before.

    So a claim does not step over what earlier ones have left behind in the index, which nothing removes while somebody
    holds an old snapshot. Where it begins decides nothing but how soon an event is found: one that has come to be due
    further back, because its transaction was committed late or somebody has set it so, waits for the next claim that
    begins at the very beginning. That is the first one, and one every FULL_LOOK_SECONDS. More on it stands in
    docs/decisions/0012-where-a-claim-begins.md.
    """

    def __init__(self, database: Database) -> None:
        self._database = database
        self._since: datetime | None = None
        self._full_look_at = time.monotonic()

    def claim(self, limit: int) -> Sequence[ClaimedEvent]:
        """Leases as `claim` does, for as long as a relay needs."""
        looks_fully = time.monotonic() >= self._full_look_at
        since = None if looks_fully else self._since
        events = claim(self._database, limit=limit, lease_seconds=LEASE_SECONDS, since=since)
        if looks_fully:
            self._full_look_at = time.monotonic() + FULL_LOOK_SECONDS
        if events:
            reached = max(event.due_at for event in events) - OVERLAP
            # A claim that is full has left something behind its end, be that further back than others have been.
            is_full = len(events) == limit
            self._since = reached if is_full or self._since is None else max(self._since, reached)
        return events


def claim_in_order(
    database: Database, *, limit: int, lease_seconds: float, parked_blocks: bool
) -> Sequence[ClaimedEvent]:
    """Leases as `claim` does, at most one event of each aggregate, and that its earliest unpublished one.

    So an event is sent only after all of its aggregate that come before it, by however many relays. With
    `parked_blocks` an event that is parked holds up those after it, until an operator decides; without, it is passed
    over.
    """
    parameters = {"limit": limit, "lease_seconds": lease_seconds, "parked_blocks": parked_blocks}
    return database.fetch(class_row(ClaimedEvent), sql.CLAIM_EVENTS_IN_ORDER, parameters)


def complete(database: Database, completions: Sequence[Completion]) -> int:
    """Writes the results down in one statement and returns how many leases had been lost.

    A lost lease changes nothing: another relay has claimed the event since, and answers for it. Raises as
    `Database.fetch_repeatable` does.
    """
    if not completions:
        return 0
    kept = database.fetch_repeatable(
        scalar_row,
        sql.COMPLETE_EVENTS,
        {
            "ids": [completion.event.id for completion in completions],
            "attempts": [completion.event.attempts for completion in completions],
            "outcomes": [completion.result for completion in completions],
            "refusals": [completion.refusals for completion in completions],
            "errors": [completion.error for completion in completions],
        },
    )
    return len(completions) - len(kept)


def measure(database: Database) -> Measurement:
    """Measures the outbox by the database's clock. Raises TemporarilyUnavailable."""
    return database.fetch_repeatable(class_row(Measurement), sql.MEASURE_OUTBOX, {"bound": MEASURED_EVENTS})[0]
