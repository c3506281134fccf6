"""What operators may ask for: the grammar of the documents that the operations function takes."""

import re
from collections.abc import Mapping
from datetime import datetime, timedelta
from typing import Annotated, Any, Literal
from uuid import UUID

from pydantic import AfterValidator, BeforeValidator, Field

from charging import contract, errors
from charging.contract import Document
from charging.errors import Violation

type State = Literal["waiting", "parked", "published"]

# A span of time, or an instant. Spans are taken from the database's clock, when the statement runs.
type Moment = timedelta | datetime

_SPAN = re.compile(r"([0-9]{1,5})([smhd])", re.ASCII)
_UNITS = {"s": "seconds", "m": "minutes", "h": "hours", "d": "days"}
_INSTANT = re.compile(
    r"2[0-9]{3}-[0-9]{2}-[0-9]{2}T[0-9]{2}:[0-9]{2}(?::[0-9]{2}(?:\.[0-9]{1,6})?)?(?:Z|[+-][0-9]{2}:[0-9]{2})"
)
# One line with a letter or a digit in it: "..." says nothing.
_WORDS = r"^\P{Cc}*[\p{L}\p{N}]\P{Cc}*$"


def _id(value: object) -> object:
    """Reads an id; an element that is none stays what it is, and is refused as such."""
    return UUID(value) if isinstance(value, str) and contract.ID.fullmatch(value) else value


def _moment(value: object) -> Moment:
    """Reads a span or an instant. Raises ValueError for anything else."""
    if isinstance(value, str):
        if span := _SPAN.fullmatch(value):
            return timedelta(**{_UNITS[span[2]]: int(span[1])})
        if _INSTANT.fullmatch(value):
            return datetime.fromisoformat(value)
    raise ValueError


type _Id = Annotated[UUID, BeforeValidator(_id)]
type _OptionalMoment = Annotated[Moment | None, BeforeValidator(_moment)]

_MOMENT = "an age such as 30s, 15m, 1h, 2d, or an instant with its offset such as 2026-12-01T02:30:00Z"


class Help(Document):
    """Explains the commands."""

    command: Literal["help"]


class Selection(Document):
    """Whose it is, and which events it is about: those that meet every condition given.

    `since` and `until` bound the time at which an event came into its state: was made, parked, published.
    """

    operator: str = Field(
        min_length=1, max_length=128, pattern=_WORDS, description="the name of whoever asks, in 1 to 128 characters"
    )
    ids: Annotated[list[_Id] | None, AfterValidator(contract.given)] = Field(
        default=None,
        min_length=1,
        max_length=1000,
        description="a list of 1 to 1000 ids of events, each a UUID as 8-4-4-4-12",
    )
    event_type: Annotated[str | None, AfterValidator(contract.given)] = Field(
        alias="type",
        default=None,
        pattern=r"^[A-Za-z0-9_.-]{1,128}$",
        description="a type of events, such as ChargeCreated",
    )
    aggregate: Annotated[_Id | None, AfterValidator(contract.given)] = Field(
        default=None, description="the id of what the events are about, such as a charge: a UUID as 8-4-4-4-12"
    )
    since: _OptionalMoment = Field(
        default=None, description=f"the moment from which on they were made, parked or published: {_MOMENT}"
    )
    until: _OptionalMoment = Field(default=None, description=f"the moment before which that was: {_MOMENT}")


SELECTORS = ("ids", "type", "aggregate", "since", "until")


class List(Selection):
    """Counts the events by state and type, and shows the oldest. Without a state: what waits and what is parked."""

    command: Literal["list"]
    state: Annotated[State | None, AfterValidator(contract.given)] = Field(
        default=None, description="one of waiting, parked and published"
    )
    limit: int = Field(default=20, ge=1, le=100, description="a number of events to show, from 1 to 100 (default 20)")


class Inspect(Selection):
    """Shows up to ten events in full, in any state, with their payload and what operators did to them."""

    command: Literal["inspect"]


class _Change(Selection):
    """What changes events, once `apply` says so. Without it nothing is written."""

    apply: bool = Field(default=False, description="true to do it, false to be told what would be done (default false)")
    reason: Annotated[str | None, AfterValidator(contract.given)] = Field(
        default=None,
        min_length=1,
        max_length=500,
        pattern=_WORDS,
        description="a sentence that says why, in 1 to 500 characters",
    )
    # As much as one statement does in a fraction of the five seconds that the server gives it.
    limit: int = Field(
        default=1000,
        ge=1,
        le=10_000,
        description="a number of events to change at most, from 1 to 10000 (default 1000)",
    )


class Redrive(_Change):
    """Has events sent again, under the ids they have, spread over time: parked ones, or on demand published ones."""

    command: Literal["redrive"]
    state: Literal["parked", "published"] = Field(
        default="parked", description="parked or published: which events to send again (default parked)"
    )
    # A tenth of what the subscriber takes: five functions at once, ten messages each, a tenth of a second for ten. So
    # a redrive of any size leaves room for the events of the day.
    per_second: int = Field(
        alias="perSecond",
        default=50,
        ge=1,
        le=1000,
        description="a number of events to become due in a second, from 1 to 1000 (default 50)",
    )


class Park(_Change):
    """Holds waiting events back: the relay does not send them until they are redriven."""

    command: Literal["park"]


type Instruction = Help | List | Inspect | Redrive | Park

INSTRUCTIONS: Mapping[str, type[Instruction]] = {
    "list": List,
    "inspect": Inspect,
    "redrive": Redrive,
    "park": Park,
    "help": Help,
}


def read(document: object) -> Instruction:
    """Returns the instruction in a document, a JSON value. Raises InvalidRequest with everything wrong with it."""
    if not isinstance(document, dict):
        raise errors.InvalidRequest([Violation("", "must be a JSON object with a command")])
    members = {name: value for name, value in document.items() if contract.is_text(name)}
    violations = []
    if len(members) < len(document):
        violations.append(Violation("", "has a member whose name is not Unicode text"))
    command = members.get("command")
    model = INSTRUCTIONS.get(command) if isinstance(command, str) else None
    if model is None:
        violations.append(Violation("command", f"must be one of {', '.join(INSTRUCTIONS)}"))
        raise errors.InvalidRequest(violations)
    return contract.validated(model, members, [*violations, *_lacking(model, members)])


def _lacking(model: type[Instruction], members: Mapping[str, Any]) -> list[Violation]:
    """Lists what is asked for by other members' being there, or not, whatever is wrong with any of them."""
    lacking = []
    if issubclass(model, Inspect | _Change) and not any(name in members for name in SELECTORS):
        # Nobody is to change everything for want of a word.
        lacking.append(Violation("", f"must select events by at least one of {', '.join(SELECTORS)}"))
    if issubclass(model, _Change) and members.get("apply") is True and "reason" not in members:
        lacking.append(Violation("reason", f"is required to apply, as {model.model_fields['reason'].description}"))
    return lacking


def explained() -> dict[str, Any]:
    """Returns what each command does and which members it takes, for a person."""
    return {
        name: {
            "does": " ".join((model.__doc__ or "").split()),
            "takes": {
                field.alias or member: field.description
                for member, field in model.model_fields.items()
                if member != "command"
            },
        }
        for name, model in INSTRUCTIONS.items()
    }
