"""Webhook endpoints: where callers want their events sent, managed by themselves; and what became of the deliveries."""

from collections.abc import Sequence
from dataclasses import dataclass
from datetime import UTC, datetime, timedelta
from typing import Annotated, Literal, get_args
from uuid import UUID

from psycopg.rows import class_row, scalar_row
from pydantic import AfterValidator, Field

from charging import compact, contract, errors, idempotency, outbox, signing, sql
from charging.contract import Call, Command
from charging.database import Database
from charging.destinations import URL_CHARACTERS, destination
from charging.errors import Violation
from charging.idempotency import Outcome, StoredResponse
from charging.identifiers import earliest_uuid, time_ordered_uuid

ENDPOINT = "POST /webhook-endpoints"
TEST_EVENT_TYPE = "WebhookTest"
_EVENT_TYPES = ", ".join(f'"{event_type}"' for event_type in get_args(outbox.EventType))

# Each is a row more in the transaction of every charge of its owner.
ENDPOINTS = 10
# Deliveries on a page, each with up to twenty attempts of a kilobyte at the most: a tenth of what Lambda returns.
DELIVERIES_ON_A_PAGE = 20
# So many rows are made due again within half a second; the statement's own limit is five.
RESENT_AT_ONCE = 5000
# By how much a function's clock, which makes the ids, may be behind the database's, which keeps the time.
CLOCKS_APART = timedelta(minutes=1)

# Of this millennium: others are beyond what Python and Postgres can both count with.
_TIME = r"^2[0-9]{3}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}:[0-9]{2}(\.[0-9]{1,6})?(Z|[+-][0-9]{2}:[0-9]{2})$"


def _distinct(values: list[str]) -> list[str]:
    if len(set(values)) < len(values):
        raise ValueError
    return values


def _a_time(text: str) -> str:
    datetime.fromisoformat(text).astimezone(UTC)
    return text


class EndpointCommand(Command):
    """A new endpoint: its URL and the types of the events that are to be sent there."""

    url: str = Field(
        max_length=URL_CHARACTERS, description="a text, the https URL that events are sent to, with port 443"
    )
    event_types: Annotated[list[outbox.EventType], AfterValidator(_distinct)] = Field(
        alias="eventTypes",
        min_length=1,
        max_length=20,
        description=f"a list of event types, each once: {_EVENT_TYPES}",
    )


class RotateCommand(Command):
    """The secret version that is to be replaced, and for how long it signs beside the new one."""

    secret_version: int = Field(
        alias="secretVersion", ge=1, le=2**31 - 1, description="a JSON integer, the version that is replaced"
    )
    overlap_hours: int = Field(
        alias="overlapHours", default=24, ge=0, le=168, description="a JSON integer from 0 to 168"
    )


class ResendCommand(Command):
    """Which settled deliveries are to be sent again: from a time on, perhaps of one status, perhaps after others."""

    since: Annotated[str, AfterValidator(_a_time)] = Field(
        pattern=_TIME, description='a time with its offset, as in "2026-12-01T09:30:00Z"'
    )
    statuses: Annotated[list[Literal["SENT", "FAILED"]], AfterValidator(_distinct)] = Field(
        default=["SENT", "FAILED"], min_length=1, description='a list of "SENT", "FAILED" or both'
    )
    cursor: Annotated[str | None, Field(pattern=f"^{contract.HEX_GROUPS}$"), AfterValidator(contract.given)] = Field(
        default=None, description="the nextCursor of the answer before"
    )


@dataclass(frozen=True, slots=True)
class Endpoint:
    """An endpoint as its owner sees it."""

    id: UUID
    url: str
    event_types: list[str]
    secret_version: int
    disabled_reason: str | None = None
    previous_signs_until: datetime | None = None
    resumes_at: datetime | None = None

    def members(self) -> dict[str, object]:
        """Returns the endpoint as the API shows it, in the order in which it always shows it."""
        return compact.given(
            {
                "id": str(self.id),
                "url": self.url,
                "eventTypes": self.event_types,
                "secretVersion": self.secret_version,
                "enabled": self.disabled_reason is None,
                "disabledReason": self.disabled_reason,
                "heldUntil": _time(self.resumes_at),
            }
        )


@dataclass(frozen=True, slots=True)
class Delivery:
    """A delivery as the endpoint's owner sees it."""

    event_id: UUID
    event_type: str
    aggregate_id: UUID
    status: str
    next_attempt_at: datetime
    last_error: str | None
    created_at: datetime
    sent_at: datetime | None
    failed_at: datetime | None
    attempts: list[dict[str, object]]

    def members(self) -> dict[str, object]:
        """Returns the delivery as the API shows it."""
        is_open = self.sent_at is None and self.failed_at is None
        return compact.given(
            {
                "eventId": str(self.event_id),
                "eventType": self.event_type,
                "subject": str(self.aggregate_id),
                "status": self.status,
                "createdAt": _time(self.created_at),
                "nextAttemptAt": _time(self.next_attempt_at) if is_open else None,
                "sentAt": _time(self.sent_at),
                "failedAt": _time(self.failed_at),
                "lastError": self.last_error,
                "attempts": [compact.given(attempt) for attempt in self.attempts],
            }
        )


def create(database: Database, call: Call[EndpointCommand], *, allows_loopback: bool) -> Outcome:
    """Creates the endpoint, once for its key; a repetition gets the first answer back, in which there is no secret.

    Raises InvalidRequest for a URL that no webhook is sent to, TooManyEndpoints, and what `idempotency.perform` raises.
    """
    try:
        target = destination(call.command.url, allows_loopback=allows_loopback)
    except errors.UrlNotAllowed as refused:
        raise errors.InvalidRequest([Violation("url", str(refused))]) from None
    endpoint = Endpoint(time_ordered_uuid(), target.url, list(call.command.event_types), secret_version=1)
    scope = call.scope
    room = {"principal": scope.principal, "endpoint": scope.endpoint, "key": scope.key, "limit": ENDPOINTS}
    [has_room] = database.fetch_repeatable(scalar_row, sql.HAS_ROOM_FOR_ENDPOINT, room, deadline=call.deadline)
    if not has_room:
        raise errors.TooManyEndpoints(f"The caller has {ENDPOINTS} endpoints.")
    return idempotency.perform(
        database,
        call,
        sql.CREATE_ENDPOINT,
        # Not as the caller wrote it.
        {"endpoint_id": endpoint.id, "url": endpoint.url, "limit": ENDPOINTS},
        StoredResponse.created(f"/webhook-endpoints/{endpoint.id}", endpoint.members()),
    )


def find_all(database: Database, principal: str, *, deadline: float) -> Sequence[Endpoint]:
    """Returns the principal's endpoints, the oldest first. Raises TemporarilyUnavailable."""
    return _find(database, principal, None, deadline)


def find(database: Database, principal: str, endpoint_id: UUID, *, deadline: float) -> Endpoint:
    """Returns the principal's endpoint. Raises NoSuchResource where it is nobody's or somebody else's, alike."""
    found = _find(database, principal, endpoint_id, deadline)
    if not found:
        raise errors.NoSuchResource("The caller has no webhook endpoint with this id.")
    return found[0]


def secrets(endpoint: Endpoint, master_key: bytes) -> dict[str, object]:
    """Returns the secret that signs, and the one before while that still does."""
    shown: dict[str, object] = {
        "secretVersion": endpoint.secret_version,
        "secret": signing.secret(master_key, endpoint.id, endpoint.secret_version),
    }
    if endpoint.previous_signs_until is not None:
        shown["previousSecret"] = signing.secret(master_key, endpoint.id, endpoint.secret_version - 1)
        shown["previousSecretSignsUntil"] = _time(endpoint.previous_signs_until)
    return shown


def rotate(
    database: Database, principal: str, endpoint_id: UUID, command: RotateCommand, *, deadline: float
) -> Endpoint:
    """Sees to it that the endpoint's secret is another than the version named, and returns the endpoint.

    A repetition finds that done, and so rotates no second time. Raises NoSuchResource.
    """
    parameters = {
        "endpoint_id": endpoint_id,
        "principal": principal,
        "secret_version": command.secret_version,
        "overlap_hours": command.overlap_hours,
    }
    database.fetch_repeatable(scalar_row, sql.ROTATE_SECRET, parameters, deadline=deadline)
    return find(database, principal, endpoint_id, deadline=deadline)


def disable(database: Database, principal: str, endpoint_id: UUID, *, deadline: float) -> Endpoint:
    """Holds the endpoint's deliveries, those to come too, and returns it. Raises NoSuchResource."""
    _change(database, sql.DISABLE_ENDPOINT, principal, endpoint_id, deadline)
    return find(database, principal, endpoint_id, deadline=deadline)


def enable(database: Database, principal: str, endpoint_id: UUID, *, deadline: float) -> Endpoint:
    """Lets the endpoint's deliveries go at once, whatever held them, and returns it. Raises NoSuchResource."""
    _change(database, sql.ENABLE_ENDPOINT, principal, endpoint_id, deadline)
    return find(database, principal, endpoint_id, deadline=deadline)


def delete(database: Database, principal: str, endpoint_id: UUID, *, deadline: float) -> None:
    """Deletes the endpoint; what is still to be sent there never will be. Raises NoSuchResource."""
    if not _change(database, sql.DELETE_ENDPOINT, principal, endpoint_id, deadline):
        raise errors.NoSuchResource("The caller has no webhook endpoint with this id.")


def test(database: Database, principal: str, endpoint_id: UUID, *, deadline: float) -> UUID:
    """Has a test event sent to the endpoint, and returns its id, the same for ten seconds. Raises NoSuchResource."""
    event = outbox.event(
        TEST_EVENT_TYPE,
        subject=endpoint_id,
        principal=principal,
        data={"endpointId": str(endpoint_id)},
        traceparent=None,
    )
    parameters = {"endpoint_id": endpoint_id, "principal": principal, **event}
    # The first run may have waited for another one's test, which its snapshot does not see: the second one does.
    for _ in range(2):
        if found := database.fetch_repeatable(scalar_row, sql.ENQUEUE_SAMPLE, parameters, deadline=deadline):
            written: UUID = found[0]
            return written
    raise errors.NoSuchResource("The caller has no webhook endpoint with this id.")


def find_deliveries(
    database: Database, principal: str, endpoint_id: UUID, *, before: UUID | None, deadline: float
) -> dict[str, object]:
    """Returns a page of the endpoint's deliveries, the youngest first, and where the next page begins.

    Raises NoSuchResource.
    """
    find(database, principal, endpoint_id, deadline=deadline)
    found = database.fetch_repeatable(
        class_row(Delivery),
        sql.LIST_DELIVERIES,
        {"endpoint_id": endpoint_id, "before": before, "limit": DELIVERIES_ON_A_PAGE},
        deadline=deadline,
    )
    page: dict[str, object] = {"deliveries": [delivery.members() for delivery in found]}
    if len(found) == DELIVERIES_ON_A_PAGE:
        page["nextCursor"] = str(found[-1].event_id)
    return page


def resend(database: Database, principal: str, endpoint_id: UUID, event_id: UUID, *, deadline: float) -> None:
    """Has one delivery sent again, whatever became of it, with all of its attempts. Raises NoSuchResource."""
    find(database, principal, endpoint_id, deadline=deadline)
    parameters = {"endpoint_id": endpoint_id, "event_id": event_id}
    if not database.fetch_repeatable(scalar_row, sql.RESEND_DELIVERY, parameters, deadline=deadline):
        raise errors.NoSuchResource("The endpoint has no delivery of an event with this id.")


def resend_since(
    database: Database, principal: str, endpoint_id: UUID, command: ResendCommand, *, deadline: float
) -> dict[str, object]:
    """Has settled deliveries sent again, at most five thousand, and returns how many and where to go on.

    Raises NoSuchResource.
    """
    find(database, principal, endpoint_id, deadline=deadline)
    since = datetime.fromisoformat(command.since)
    parameters = {
        "endpoint_id": endpoint_id,
        "from_id": command.cursor or earliest_uuid(since - CLOCKS_APART),
        "since": since,
        "statuses": command.statuses,
        "limit": RESENT_AT_ONCE,
    }
    resent: Sequence[UUID] = database.fetch_repeatable(scalar_row, sql.RESEND_DELIVERIES, parameters, deadline=deadline)
    answer: dict[str, object] = {"resent": len(resent)}
    if len(resent) == RESENT_AT_ONCE:
        answer["nextCursor"] = str(max(resent))
    return answer


def _find(database: Database, principal: str, endpoint_id: UUID | None, deadline: float) -> Sequence[Endpoint]:
    parameters = {"principal": principal, "endpoint_id": endpoint_id}
    return database.fetch_repeatable(class_row(Endpoint), sql.LIST_ENDPOINTS, parameters, deadline=deadline)


def _change(database: Database, statement: bytes, principal: str, endpoint_id: UUID, deadline: float) -> bool:
    parameters = {"endpoint_id": endpoint_id, "principal": principal}
    return bool(database.fetch_repeatable(scalar_row, statement, parameters, deadline=deadline))


def _time(at: datetime | None) -> str | None:
    return None if at is None else at.astimezone(UTC).isoformat(timespec="milliseconds").replace("+00:00", "Z")
