"""The idempotency key: its scope, the response stored under it, and what a call under it comes to.

An operation hands over one statement that claims the key, does the work and stores the response, all or
nothing. This module runs it, over again where the database or the network left the answer open, and reads
its row. The statement is its own second look: whatever a first run committed, the next run finds stored.
"""

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from uuid import UUID

from psycopg.rows import args_row, class_row

from charging import contract, errors, sql
from charging.contract import Command
from charging.database import Database

BODY_BYTES = 8 * 1024
_STORED_HEADERS = frozenset({"Content-Type", "Location"})

# A lost connection, a deadlock or a race with the purge are each rare; four in a row are an outage.
RUNS = 5
# After an error the pause doubles from here, 0.6 s in all: time for a server to get over it, short against the
# caller's patience.
FIRST_PAUSE_SECONDS = 0.02


@dataclass(frozen=True, slots=True)
class Scope:
    """Whose key it is, for which operation."""

    principal: str
    endpoint: str
    key: UUID


@dataclass(frozen=True, slots=True)
class StoredResponse:
    """A response as it is stored, and so as every replay gives it again.

    Raises ValueError, a mistake of ours and not of the caller, for a header that is not on the list or a body
    over 8 KiB: before the commit, since after it the work could not be taken back.
    """

    status: int
    headers: Mapping[str, str]
    body: str

    def __post_init__(self) -> None:
        if not _STORED_HEADERS.issuperset(self.headers):
            raise ValueError(f"only {sorted(_STORED_HEADERS)} may be stored, not {sorted(self.headers)}")
        if len(self.body.encode()) > BODY_BYTES:
            raise ValueError(f"a stored body has at most {BODY_BYTES} bytes")


@dataclass(frozen=True, slots=True)
class Created:
    """The work was done and committed by this call."""

    response: StoredResponse


@dataclass(frozen=True, slots=True)
class Replayed:
    """The same command was completed under this key before; nothing was written."""

    response: StoredResponse


@dataclass(frozen=True, slots=True)
class KeyReused:
    """Another command was completed under this key; nothing was written."""


@dataclass(frozen=True, slots=True)
class InFlight:
    """Another call under this key has not ended yet; nothing was written."""


type Outcome = Created | Replayed | KeyReused | InFlight


@dataclass(frozen=True, slots=True)
class ClaimRow:
    """The row that every claiming statement answers with."""

    created: bool
    held: bool | None
    status: str | None
    fingerprint: str | None
    response_status: int | None
    response_headers: dict[str, str] | None
    response_body: str | None


def perform(
    database: Database,
    statement: bytes,
    parameters: Mapping[str, object],
    command: Command,
    response: StoredResponse,
    *,
    in_flight_wait_seconds: float,
    deadline: float,
) -> Outcome:
    """Runs a claiming statement until its answer is plain, at most five times and not beyond the deadline.

    While a twin is at work it waits for the twin's end, on the database and at most `in_flight_wait_seconds` in
    all. `response` must be unlike any other call's, as one with a new id in it is: it is how a commit of our own,
    whose confirmation was lost, is told from somebody else's.

    Raises TemporarilyUnavailable when nothing was committed by this call, OutcomeUnknown when a run was sent
    and what became of it could not be learnt.
    """
    patience = min(deadline, time.monotonic() + in_flight_wait_seconds)
    sent = False
    outcome: Outcome | None = None
    pause = FIRST_PAUSE_SECONDS
    for _ in range(RUNS):
        try:
            outcome = _outcome(_run(database, statement, parameters, deadline), command, response)
            # After a lost connection the twin may be our own run, which the server has not ended yet.
            wait_ms = int(((deadline if sent else patience) - time.monotonic()) * 1000)
            if isinstance(outcome, InFlight) and wait_ms > 0:
                outcome = _outcome(_run(database, statement, parameters, deadline, wait_ms), command, response)
            if outcome is not None and not (sent and isinstance(outcome, InFlight)):
                return outcome
            continue  # committed or purged since the statement's snapshot
        except errors.Contended:
            pass
        except errors.ConnectionLost:
            sent = True
        except (errors.TemporarilyUnavailable, errors.DatabaseFault) as unavailable:
            if sent:
                raise errors.OutcomeUnknown("the connection was lost, and there was no second look") from unavailable
            raise
        time.sleep(min(pause, max(0.0, deadline - time.monotonic())))
        pause *= 2
    return _unsettled(outcome, sent=sent)


def _run(
    database: Database, statement: bytes, parameters: Mapping[str, object], deadline: float, wait_ms: int = 0
) -> ClaimRow:
    """Runs the statement once; with a wait, as soon as no twin is at work, which must be within that time."""
    if wait_ms:
        waiting = {**parameters, "wait_ms": wait_ms}
        return database.fetch_after(sql.AWAIT_TWIN, class_row(ClaimRow), statement, waiting, deadline=deadline)[0]
    return database.fetch(class_row(ClaimRow), statement, parameters, deadline=deadline)[0]


def _unsettled(last: Outcome | None, *, sent: bool) -> Outcome:
    """Says what is known when every run has left the answer open."""
    if sent:
        raise errors.OutcomeUnknown("the connection was lost, and the transaction on it may still be under way")
    if last is not None:
        return last  # a twin that had not ended when the time was up
    raise errors.TemporarilyUnavailable("the database kept undoing the statement in favour of others")


def find(database: Database, scope: Scope, *, deadline: float) -> StoredResponse | None:
    """Returns what a repetition under this key would be given now; None when nothing was committed or is kept.

    Raises TemporarilyUnavailable.
    """
    rows = database.fetch_repeatable(
        args_row(StoredResponse),
        sql.READ_STORED_RESPONSE,
        {"principal": scope.principal, "endpoint": scope.endpoint, "key": scope.key},
        deadline=deadline,
    )
    return rows[0] if rows else None


def to_json(response: StoredResponse | None) -> str:
    """Returns what is known of a key: its committed response, or that there is none."""
    if response is None:
        return '{"outcome":"not_known"}'
    result = {"status": response.status, "headers": dict(response.headers), "body": json.loads(response.body)}
    return json.dumps({"outcome": "committed", "response": result}, ensure_ascii=False, separators=(",", ":"))


def _outcome(row: ClaimRow, command: Command, response: StoredResponse) -> Outcome | None:
    """Reads one answer; None where only another look can tell."""
    if row.created:
        return Created(response)
    if row.fingerprint is None:
        return None if row.held else InFlight()
    if row.status == "STARTED":
        return InFlight()
    if not contract.is_same_command(command, row.fingerprint):
        return KeyReused()
    if row.response_status is None or row.response_headers is None or row.response_body is None:
        raise AssertionError("a constraint of the table gives every COMPLETED row its response")
    stored = StoredResponse(row.response_status, row.response_headers, row.response_body)
    return Created(stored) if stored.body == response.body else Replayed(stored)
