"""The outbox: events on their way from the transaction that wrote them to the broker."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, Literal
from uuid import UUID

from psycopg.rows import class_row, scalar_row

from charging import sql
from charging.database import Database

SOURCE = "/charges"
# Read in a tenth of a second, where millions would take longer than the server lets a statement run.
MEASURED_EVENTS = 100_000


def event(
    event_id: UUID, event_type: str, *, subject: UUID, principal: str, data: Mapping[str, Any], traceparent: str | None
) -> str:
    """Returns a CloudEvents 1.0 object as JSON, still without its `time`, which the database's clock gives it.

    `principal` is an extension attribute, for consumers that keep accounts by owner; `traceparent` is the
    distributed tracing extension.
    """
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
    return json.dumps(attributes, ensure_ascii=False, separators=(",", ":"))


@dataclass(frozen=True, slots=True)
class ClaimedEvent:
    """An event under a lease. `attempts` is this claim's fencing number; `payload` is what is sent, unchanged."""

    id: UUID
    event_type: str
    aggregate_id: UUID
    payload: str
    attempts: int
    refusals: int


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
    grows, no dead row can be removed, and claiming gets slower.
    """

    oldest_age_seconds: float
    pending: int
    failed: int
    xmin_age: int


def claim(database: Database, *, limit: int, lease_seconds: float) -> Sequence[ClaimedEvent]:
    """Leases up to `limit` due events, those that have been due longest. No transaction stays open.

    Raises as `Database.fetch` does. What a lost connection has claimed is due again when its lease has ended.
    """
    return database.fetch(class_row(ClaimedEvent), sql.CLAIM_EVENTS, {"limit": limit, "lease_seconds": lease_seconds})


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
