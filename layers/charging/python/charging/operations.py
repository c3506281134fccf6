"""What operators do to the outbox: look at its events, park those that wait, and redrive those that are settled.

An event has three states. It is *waiting* until the topic has taken it; then it is *published*. It is *parked* when the
topic refuses it for good, or when an operator says so, and stays so until an operator redrives it.
"""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta
from typing import Any
from uuid import UUID

import psycopg
from psycopg.rows import class_row

from charging import sql
from charging.database import Database
from charging.identifiers import time_ordered_uuid
from charging.instructions import Inspect, List, Moment, Park, Redrive, Selection, State
from charging.outbox import LEASE_SECONDS

# Far above what an event of this service has. Ten of them, escaped, are within the 6 MB of a function's answer.
PAYLOAD_CHARACTERS = 65_536
INSPECTED_EVENTS = 10
# A person does not need to know by how many it is more, and the server does not need to count them.
COUNTED_EVENTS = 100_000

type _Transaction = psycopg.Connection[tuple[Any, ...]]


@dataclass(frozen=True, slots=True)
class Window:
    """From when, if from any time on, and before when the events came into their state."""

    since: datetime | None
    until: datetime


@dataclass(frozen=True, slots=True)
class Event:
    """An event in short. `due_in_seconds` is None unless it waits.

    `is_followed` tells whether a later event of its aggregate waits too, or, for an event that does not wait, whether
    one was published.
    """

    id: UUID
    event_type: str
    aggregate_id: UUID
    sequence: int
    state: State
    seconds_in_state: float
    age_seconds: float
    due_in_seconds: float | None
    attempts: int
    refusals: int
    last_error: str | None
    is_followed: bool


@dataclass(frozen=True, slots=True)
class Details:
    """The rest of what there is to know of an event. The payload may be cut; `payload_bytes` is its whole size.

    `actions` are what operators did to it, the latest first.
    """

    id: UUID
    payload: str
    payload_bytes: int
    created_at: datetime
    next_attempt_at: datetime
    published_at: datetime | None
    failed_at: datetime | None
    actions: list[dict[str, Any]]


@dataclass(frozen=True, slots=True)
class Count:
    """How many of the selected events have this state and type."""

    state: State
    event_type: str
    number: int


@dataclass(frozen=True, slots=True)
class Redriven:
    """An event that is due again."""

    id: UUID
    next_attempt_at: datetime


@dataclass(frozen=True, slots=True)
class Parked:
    """An event that is parked. Where it `was_claimed`, a relay may have been sending it at that moment."""

    id: UUID
    was_claimed: bool


@dataclass(frozen=True, slots=True)
class Findings:
    """The first of the selected events, and how many there are in all, as far as they were counted.

    `selection` is what was asked for, as JSON, with its window as it was understood: asked for again, it selects no
    event that has come into its state since.
    """

    selection: Mapping[str, Any]
    window: Window
    events: Sequence[Event]
    counts: Sequence[Count]

    @property
    def total(self) -> int:
        """COUNTED_EVENTS stands for as many or more."""
        return sum(count.number for count in self.counts)


@dataclass(frozen=True, slots=True)
class Change[Changed: (Redriven, Parked)]:
    """What was done. `found` has the events as they were before, and the counts of what is left.

    `action` is the id of its record; None where nothing was changed.
    """

    found: Findings
    changed: Sequence[Changed]
    action: UUID | None


def find(database: Database, instruction: List) -> Findings:
    """Finds what waits and what is parked, or what is in the state that was asked for. Raises as `fetch` does."""
    states: list[State] = ["waiting", "parked"] if instruction.state is None else [instruction.state]
    with database.transaction() as transaction:
        return _Selected(transaction, instruction, states).found(instruction.limit)


def inspect(database: Database, instruction: Inspect) -> tuple[Findings, Sequence[Details]]:
    """Finds events in any state, and each one's details. Raises as `fetch` does."""
    with database.transaction() as transaction:
        found = _Selected(transaction, instruction, ["waiting", "parked", "published"]).found(INSPECTED_EVENTS)
        ids = [event.id for event in found.events]
        details = _rows(transaction, Details, sql.INSPECT_EVENTS, {"ids": ids, "characters": PAYLOAD_CHARACTERS})
        # The maintenance may have removed one in between.
        there = {more.id for more in details}
        return replace(found, events=[event for event in found.events if event.id in there]), details


def redrive(database: Database, instruction: Redrive) -> Change[Redriven]:
    """Makes events due again, spread over time; they keep their id. Without `apply` nothing is written.

    Raises as `fetch` does.
    """
    return _change(
        database,
        instruction,
        state=instruction.state,
        row=Redriven,
        statement=sql.REDRIVE_EVENTS,
        more={"state": instruction.state, "per_second": instruction.per_second},
    )


def park(database: Database, instruction: Park) -> Change[Parked]:
    """Takes waiting events out of the relay's reach. Without `apply` nothing is written.

    A relay that is sending one at this moment goes on, and can no longer mark it published. Raises as `fetch` does.
    """
    return _change(
        database,
        instruction,
        state="waiting",
        row=Parked,
        statement=sql.PARK_EVENTS,
        more={"lease_seconds": LEASE_SECONDS},
    )


def _change[Changed: (Redriven, Parked)](
    database: Database,
    instruction: Redrive | Park,
    *,
    state: State,
    row: type[Changed],
    statement: bytes,
    more: dict[str, object],
) -> Change[Changed]:
    with database.transaction() as transaction:
        if instruction.apply:
            transaction.execute(sql.AWAIT_OPERATORS)
        selected = _Selected(transaction, instruction, [state])
        events = selected.events(instruction.limit)
        action = time_ordered_uuid()
        changed: Sequence[Changed] = []
        if instruction.apply:
            record = {
                "action_id": action,
                "operator": instruction.operator,
                "reason": instruction.reason,
                "selection": json.dumps(selected.asked),
                "ids": [event.id for event in events],
            }
            changed = _rows(transaction, row, statement, record | more)
        found = Findings(selected.asked, selected.window, events, selected.counts())
        return Change(found, changed, action if changed else None)


class _Selected:
    """The events that an instruction selects, as a transaction sees them."""

    def __init__(self, transaction: _Transaction, instruction: Selection, states: Sequence[State]) -> None:
        self._transaction = transaction
        moments = _moment("since", instruction.since) | _moment("until", instruction.until)
        [self.window] = _rows(transaction, Window, sql.RESOLVE_WINDOW, moments)
        self._conditions = {
            "states": list(states),
            "ids": instruction.ids,
            "event_type": instruction.event_type,
            "aggregate_id": instruction.aggregate,
            "since": self.window.since,
            "until": self.window.until,
        }
        self.asked: dict[str, Any] = instruction.model_dump(
            mode="json", by_alias=True, exclude_unset=True, exclude={"operator", "since", "until", "apply", "reason"}
        )
        if self.window.since is not None:
            self.asked["since"] = instant(self.window.since)
        self.asked["until"] = instant(self.window.until)

    def events(self, limit: int) -> Sequence[Event]:
        return _rows(self._transaction, Event, sql.LIST_EVENTS, self._conditions | {"limit": limit})

    def counts(self) -> Sequence[Count]:
        return _rows(self._transaction, Count, sql.COUNT_EVENTS, self._conditions | {"bound": COUNTED_EVENTS})

    def found(self, limit: int) -> Findings:
        return Findings(self.asked, self.window, self.events(limit), self.counts())


def instant(at: datetime) -> str:
    """Returns the instant as an operator reads it, and may give it back: ISO 8601, in UTC, to the microsecond."""
    return at.astimezone(UTC).isoformat().replace("+00:00", "Z")


def _moment(name: str, moment: Moment | None) -> dict[str, object]:
    is_span = isinstance(moment, timedelta)
    return {name: None if is_span else moment, f"{name}_ago": moment if is_span else None}


def _rows[Row](
    transaction: _Transaction, row: type[Row], statement: bytes, parameters: Mapping[str, object]
) -> Sequence[Row]:
    # Unprepared, and so planned for this very selection. A plan that is kept has to do for any, and reads everything.
    return transaction.cursor(row_factory=class_row(row)).execute(statement, parameters, prepare=False).fetchall()
