"""The idempotency key: its scope, the response stored under it, and what a call under it comes to.

An operation hands over one statement that claims the key, does the work and stores the response, all or
nothing. This module runs it, over again where the database or the network left the answer open, and reads
its row. The statement is its own second look: whatever a first run committed, the next run finds stored.
"""

import json
import time
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Self
from uuid import UUID

from psycopg.rows import args_row

from charging import compact, contract, errors, sql
from charging.contract import Call, Command, Scope
from charging.database import Database

BODY_BYTES = 8 * 1024
_STORED_HEADERS = frozenset({"Content-Type", "Location"})

# A lost connection, a deadlock or a race with the purge are each rare; four in a row are an outage.
RUNS = 5
# After an answer that leaves it open the pause doubles from here, 0.6 s in all: time for a server to get over it, short
# against the caller's patience.
FIRST_PAUSE_SECONDS = 0.02
# As long as the server lets a statement wait for another transaction's lock.
LOCK_SECONDS = 2.0


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

    @classmethod
    def created(cls, location: str, members: Mapping[str, object]) -> Self:
        """The answer to a request that has created what is at this path."""
        return cls(201, {"Content-Type": "application/json", "Location": location}, compact.json(members))


@dataclass(frozen=True, slots=True)
class Created:
    """The work was done and committed by this call."""

    response: StoredResponse


@dataclass(frozen=True, slots=True)
class Refused:
    """A rule of the operation forbids the work. That is its result, committed by this call."""

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


type Outcome = Created | Refused | Replayed | KeyReused | InFlight


@dataclass(frozen=True, slots=True)
class ClaimRow:
    """The row that every claiming statement answers with, as sql/parts/answer.sql explains it."""

    committed_status: int | None
    held: bool | None
    status: str | None
    fingerprint: str | None
    response_status: int | None
    response_headers: dict[str, str] | None
    response_body: str | None


# By position, as the driver has them: by name they take as long as all else that it does for one row.
_CLAIM_ROW = args_row(ClaimRow)


def perform[C: Command](
    database: Database,
    call: Call[C],
    statement: bytes,
    parameters: Mapping[str, object],
    response: StoredResponse,
    *,
    refusal: StoredResponse | None = None,
    target: UUID | None = None,
) -> Outcome:
    """Runs a claiming statement until its answer is plain, at most five times and not beyond the call's deadline.

    `parameters` are the operation's own; those of the command, the key and the response are added to them. `target` is
    the resource that the command is for, where there is one: for another the same body is another command.

    Where the statement can come to a `refusal`, its status is another than that of the `response`. Each must be unlike
    any other call's, as one with a new id in it is: that is how a commit of our own, whose confirmation was lost, is
    told from somebody else's.

    While a twin is at work it waits for the twin's end, on the database and at most the call's `in_flight_wait_seconds`
    in all. Raises TemporarilyUnavailable when nothing was committed by this call, OutcomeUnknown when a run was sent
    and what became of it could not be learnt.
    """
    fingerprint = contract.fingerprint(call.command, target)
    given = {
        **call.command.model_dump(),
        "principal": call.scope.principal,
        "endpoint": call.scope.endpoint,
        "key": call.scope.key,
        "fingerprint": fingerprint,
        "retention_hours": call.retention_hours,
        **parameters,
        **_columns("response", response),
    }
    results: dict[int, Created | Refused] = {response.status: Created(response)}
    if refusal is not None:
        given |= _columns("refusal", refusal)
        results[refusal.status] = Refused(refusal)
    patience = min(call.deadline, time.monotonic() + call.in_flight_wait_seconds)
    sent = False
    outcome: Outcome | None = None
    pause = FIRST_PAUSE_SECONDS
    for _ in range(RUNS):
        try:
            outcome = _outcome(_run(database, statement, given, call.deadline), fingerprint, results)
            # After a lost connection the twin may be our own run, which the server has not ended yet.
            wait_ms = int(((call.deadline if sent else patience) - time.monotonic()) * 1000)
            if isinstance(outcome, InFlight) and wait_ms > 0:
                row = _run(database, statement, given, call.deadline, wait_ms)
                outcome = _outcome(row, fingerprint, results)
            if outcome is not None and not (sent and isinstance(outcome, InFlight)):
                return outcome
        except errors.Contended:
            if call.deadline - time.monotonic() < pause + LOCK_SECONDS:
                break  # another wait for the same lock would outlast the call, which could then not tell its outcome
        except errors.ConnectionLost:
            sent = True
        except (errors.TemporarilyUnavailable, errors.DatabaseFault) as unavailable:
            if sent:
                raise errors.OutcomeUnknown("the connection was lost, and there was no second look") from unavailable
            raise
        time.sleep(min(pause, max(0.0, call.deadline - time.monotonic())))
        pause *= 2
    return _unsettled(outcome, sent=sent)


def _columns(kind: str, response: StoredResponse) -> dict[str, object]:
    """A response as a statement takes it."""
    return {
        f"{kind}_status": response.status,
        f"{kind}_headers": compact.json(response.headers),
        f"{kind}_body": response.body,
    }


def _run(
    database: Database, statement: bytes, parameters: Mapping[str, object], deadline: float, wait_ms: int = 0
) -> ClaimRow:
    """Runs the statement once; with a wait, as soon as no twin is at work, which must be within that time."""
    if wait_ms:
        waiting = {**parameters, "wait_ms": wait_ms}
        return database.fetch_after(sql.AWAIT_TWIN, _CLAIM_ROW, statement, waiting, deadline=deadline)[0]
    return database.fetch(_CLAIM_ROW, statement, parameters, deadline=deadline)[0]


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
    return compact.json({"outcome": "committed", "response": result})


def _outcome(row: ClaimRow, fingerprint: str, results: Mapping[int, Created | Refused]) -> Outcome | None:
    """Reads one answer; None where only another look can tell, since somebody has been there after its snapshot.

    `results` are what this call may have come to, by status.
    """
    if row.committed_status is not None:
        return results[row.committed_status]
    if row.fingerprint is None:
        return None if row.held else InFlight()
    if row.status == "STARTED":
        return InFlight()
    if not contract.is_same(fingerprint, row.fingerprint):
        return KeyReused()
    if row.response_status is None or row.response_headers is None or row.response_body is None:
        raise AssertionError("a constraint of the table gives every COMPLETED row its response")
    stored = StoredResponse(row.response_status, row.response_headers, row.response_body)
    ours = results.get(stored.status)
    return ours if ours is not None and ours.response.body == stored.body else Replayed(stored)
