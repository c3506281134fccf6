"""The HTTP contract's grammar: the Idempotency-Key, the command in the body, and the call that they make up."""

import json
import re
from collections.abc import Sequence
from dataclasses import dataclass
from hashlib import sha256
from typing import Annotated, Any
from uuid import UUID

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from charging import compact, errors
from charging.errors import Violation

BODY_BYTES = 16 * 1024  # fifty times what a command needs; the bound keeps parsing under a millisecond

HEX_GROUPS = r"[0-9A-Fa-f]{8}-[0-9A-Fa-f]{4}-[0-9A-Fa-f]{4}-[0-9A-Fa-f]{4}-[0-9A-Fa-f]{12}"
ID = re.compile(HEX_GROUPS)
ID_SEGMENT = re.compile(rf"(?<=/){HEX_GROUPS}(?=/|$)")
_KEY = re.compile(rf'{HEX_GROUPS}|"{HEX_GROUPS}"')
_MEDIA_TYPE = re.compile(r'application/json(?:[ \t]*;[ \t]*charset=(?:utf-8|"utf-8"))?', re.IGNORECASE)
_TRACEPARENT = re.compile(r"(?!ff)[0-9a-f]{2}-(?!0{32})[0-9a-f]{32}-(?!0{16})[0-9a-f]{16}-[0-9a-f]{2}")
_OPTIONAL_WHITE_SPACE = " \t"  # RFC 9110, OWS; str.strip() alone would take Unicode's too

# As many digits as an amount's bound has, and one more: what is cut off a longer number cannot bring it back
# within the bound. Python refuses to convert more than 4,300 digits, and converting takes quadratic time.
_TELLING_DIGITS = 13


def idempotency_key(lines: Sequence[str]) -> UUID:
    """Returns the one key in the header's lines: a UUID as 8-4-4-4-12, bare or as an RFC 8941 string.

    Raises KeyMissing without a line, and KeyInvalid for more than one or for anything else in it. `uuid.UUID`
    alone would take braces, URNs, and hyphens anywhere.
    """
    if not lines:
        raise errors.KeyMissing("The request has no Idempotency-Key header.")
    if len(lines) > 1:
        raise errors.KeyInvalid("The request has more than one Idempotency-Key header.")
    text = lines[0].strip(_OPTIONAL_WHITE_SPACE)
    if not _KEY.fullmatch(text):
        raise errors.KeyInvalid(
            "The Idempotency-Key is not a UUID in the form 8-4-4-4-12, bare or in double quotes, and nothing else."
        )
    return UUID(text.strip('"'))


def resource_id(text: str) -> UUID:
    """Returns the id in a path. Raises NoSuchResource for what cannot be one."""
    if not ID.fullmatch(text):
        raise errors.NoSuchResource("The path's last segment is not an id.")
    return UUID(text)


def require_json(lines: Sequence[str]) -> None:
    """Accepts `application/json`, in UTF-8 where a charset is named. Raises UnsupportedMediaType."""
    if len(lines) != 1 or not _MEDIA_TYPE.fullmatch(lines[0].strip(_OPTIONAL_WHITE_SPACE)):
        raise errors.UnsupportedMediaType("The body's Content-Type is not application/json in UTF-8.")


def traceparent(lines: Sequence[str]) -> str | None:
    """Returns the caller's trace context (W3C Trace Context, §3.2), or None where there is none that is well formed."""
    return lines[0] if len(lines) == 1 and _TRACEPARENT.fullmatch(lines[0]) else None


class Document(BaseModel):
    """What somebody sends, validated. Each field's description completes the sentence "it must be …"."""

    # Built at first use, since most instances of a function are asked for one of its operations only.
    model_config = ConfigDict(frozen=True, strict=True, extra="forbid", defer_build=True)


# By these names an operation's statement is given what is not of its command.
_TAKEN = {
    *("principal", "endpoint", "key", "fingerprint", "retention_hours", "wait_ms"),
    *("response_status", "response_headers", "response_body", "refusal_status", "refusal_headers", "refusal_body"),
    *("event", "event_id", "event_type", "aggregate_id"),
}


class Command(Document):
    """What a caller asks for. Its fields are given to a statement by their names.

    Raises TypeError, where it is defined, for a field that would be hidden by what else the statement is given.
    """

    @classmethod
    def __pydantic_init_subclass__(cls, **_: Any) -> None:
        if hidden := _TAKEN & cls.model_fields.keys():
            raise TypeError(
                f"{cls.__name__} needs other names for {sorted(hidden)}, which its statement is given anyway"
            )


def given[T](value: T | None) -> T | None:
    """An optional member is left out, never null."""
    if value is None:
        raise ValueError
    return value


# Members that several commands have.
AmountCents = Annotated[int, Field(ge=1, le=999_999_999_999, description="a JSON integer from 1 to 999999999999")]
Currency = Annotated[str, Field(pattern="^[A-Z]{3}$", description="three upper-case letters")]
Reference = Annotated[
    str | None,
    # In this order, so that it is the text that has these bounds.
    Field(
        min_length=1,
        max_length=64,
        # What neither Postgres nor SNS takes in a text.
        pattern="^[^\\x00\\uFFFE\\uFFFF]*$",
        description="a text of 1 to 64 characters, none of them NUL, U+FFFE or U+FFFF",
    ),
    AfterValidator(given),
]


@dataclass(frozen=True, slots=True)
class Scope:
    """Whose key it is, for which operation."""

    principal: str
    endpoint: str
    key: UUID


@dataclass(frozen=True, slots=True)
class Call[C: Command]:
    """A command under a key, and what performing it is bound by. `deadline` is in `time.monotonic()` seconds."""

    scope: Scope
    command: C
    traceparent: str | None
    retention_hours: int
    in_flight_wait_seconds: float
    deadline: float


def parse[C: Command](model: type[C], body: bytes) -> C:
    """Returns the command in the body: one JSON object (RFC 8259) in UTF-8, without a byte order mark.

    Raises PayloadTooLarge over 16 KiB, and InvalidRequest with every violation for anything that is not
    such an object: also for duplicate members, NaN, lone surrogates, NUL, and nesting without an end.
    """
    if len(body) > BODY_BYTES:
        raise errors.PayloadTooLarge(f"The body is longer than {BODY_BYTES} bytes.")
    document, violations = _document(body)
    return validated(model, document, violations)


def validated[D: Document](model: type[D], document: dict[str, Any], violations: Sequence[Violation] = ()) -> D:
    """Returns what is in a JSON object that has been parsed. `violations` were found on the way there.

    Raises InvalidRequest with those and with every one that the model finds.
    """
    try:
        command = model.model_validate(document)
    except ValidationError as invalid:
        faults = invalid.errors(include_url=False, include_input=False, include_context=False)
        found = [_violation(model, str(fault["loc"][0]), fault["type"]) for fault in faults]
        # Each bad element of a list is a fault, and all of them break one rule.
        raise errors.InvalidRequest([*violations, *dict.fromkeys(found)]) from None
    if violations:
        raise errors.InvalidRequest(violations)
    return command


def _document(body: bytes) -> tuple[dict[str, Any], list[Violation]]:
    """Parses the body's one object, and lists what Python's parser lets pass though JSON does not.

    Raises InvalidRequest where there is no object to look into.
    """
    violations: list[Violation] = []

    def members(pairs: list[tuple[str, Any]]) -> dict[str, Any]:
        found: dict[str, Any] = {}
        for name, value in pairs:
            if not is_text(name):
                violations.append(Violation("", "has a member whose name is not Unicode text"))
            elif name in found:
                violations.append(Violation(name, "must be given once"))
            else:
                found[name] = value
        return found

    def constant(name: str) -> None:
        violations.append(Violation("", f"must not use {name}, which is no JSON value"))

    try:
        document = json.loads(
            _text(body),
            object_pairs_hook=members,
            parse_constant=constant,
            parse_int=lambda digits: int(digits[:_TELLING_DIGITS]),
        )
    except json.JSONDecodeError as unreadable:
        raise _no_object(f"must be JSON: {unreadable.msg} at character {unreadable.pos}") from None
    except RecursionError:
        raise _no_object("must not be nested so deeply") from None
    if not isinstance(document, dict):
        raise _no_object("must be a JSON object")
    return document, violations


def _text(body: bytes) -> str:
    try:
        text = body.decode()
    except UnicodeDecodeError as undecodable:
        raise _no_object(f"must be UTF-8, and is not from byte {undecodable.start} on") from None
    if text.startswith("\ufeff"):
        raise _no_object("must not start with a byte order mark")
    return text


def _no_object(reason: str) -> errors.InvalidRequest:
    return errors.InvalidRequest([Violation("", reason)])


def is_text(value: str) -> bool:
    """Tells whether a string can be written in UTF-8; one with half of a surrogate pair cannot."""
    try:
        value.encode()
    except UnicodeEncodeError:
        return False
    return True


def _violation(model: type[Document], member: str, kind: str) -> Violation:
    if kind == "extra_forbidden":
        return Violation(member, "is not a member of this command")
    rule = next(field.description for name, field in model.model_fields.items() if member in (name, field.alias))
    return Violation(member, f"is required, as {rule}" if kind == "missing" else f"must be {rule}")


def fingerprint(command: Command, target: UUID | None = None) -> str:
    """Returns what two requests share if and only if they are the same command: `v1:` and a SHA-256 in hex.

    It is taken over the validated command, defaults filled in, members sorted, without white space, and over the
    resource that the command is for, where its path names one. A member that was not given and has no default is left
    out, so a release that adds an optional one changes nothing for the requests that do not use it.
    """
    members = command.model_dump(by_alias=True, exclude_none=True)
    if target is not None:
        members[""] = str(target)  # a name that no member has
    return f"v1:{sha256(compact.canonical_json(members).encode()).hexdigest()}"


def is_same(fingerprint: str, stored: str) -> bool:
    """Tells whether a fingerprint that was stored is that of the same command.

    Raises OutcomeUnknown for one in a version that this release cannot compute: a newer release stored it and, while
    both serve, will answer for it.
    """
    version, _, _ = stored.partition(":")
    if version != "v1":
        raise errors.OutcomeUnknown(f"the stored fingerprint has the unknown version {version}")
    return stored == fingerprint
