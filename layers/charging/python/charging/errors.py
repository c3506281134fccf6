"""What can go wrong, named once; what it is called over HTTP is the business of `problem`.

ChargingError
├── Refused                     the request is at fault; nothing was stored
│   ├── Unauthenticated         no principal in the gateway's request context
│   ├── KeyMissing              no Idempotency-Key
│   ├── KeyInvalid              an Idempotency-Key outside the grammar, or more than one
│   ├── UnsupportedMediaType    the body is not declared as JSON
│   ├── PayloadTooLarge         the body is over its bound
│   ├── InvalidRequest          the body is no acceptable command; carries every violation
│   ├── TooManyEndpoints        the caller has as many webhook endpoints as anybody may have
│   └── NoSuchResource          the path and method name nothing here
├── TemporarilyUnavailable      nothing was committed; the same request may be sent again
├── OutcomeUnknown              the statement was sent and its outcome could not be learnt
├── ConnectionLost              the connection ended after a statement was sent on it
├── Contended                   the database undid the statement, and may well not do so the next time
├── DatabaseFault               the database refused a statement of ours: a bug or a schema that does not fit
├── UrlNotAllowed               a URL that no webhook is sent to
├── InvalidEvent                a message that no retry can make readable
├── MigrationRefused            the schema cannot be brought forward as asked
│   └── SchemaIsAhead           a later release has brought it further than this one knows
├── RolesRefused                the functions' roles in the database cannot be made
└── Misconfigured               the environment lacks or spoils a setting
"""

from collections.abc import Sequence
from dataclasses import dataclass


class ChargingError(Exception):
    """Every error that this package raises on purpose."""


class Refused(ChargingError):
    """The request cannot be accepted as it stands, and nothing has been stored for it."""


class Unauthenticated(Refused):
    """The gateway vouches for nobody."""


class KeyMissing(Refused):
    """The request carries no idempotency key."""


class KeyInvalid(Refused):
    """The request carries something that is not one idempotency key."""


class UnsupportedMediaType(Refused):
    """The body is declared as something else than JSON in UTF-8, or not declared at all."""


class PayloadTooLarge(Refused):
    """The body is longer than any command needs."""


class TooManyEndpoints(Refused):
    """The caller has as many webhook endpoints as anybody may have."""


class NoSuchResource(Refused):
    """No operation lives at this method and path."""


@dataclass(frozen=True, slots=True)
class Violation:
    """One reason why a body is refused: the member (empty for the body as a whole) and what is wrong with it."""

    member: str
    reason: str


class InvalidRequest(Refused):
    """The body is not an acceptable command; `violations` lists everything wrong with it."""

    def __init__(self, violations: Sequence[Violation]) -> None:
        super().__init__("; ".join(f"{violation.member or 'body'}: {violation.reason}" for violation in violations))
        self.violations = tuple(violations)


class TemporarilyUnavailable(ChargingError):
    """The database could not be reached or could not answer in time, and nothing was committed."""


class OutcomeUnknown(ChargingError):
    """A statement was sent; whether it was committed could not be learnt before the deadline."""


class ConnectionLost(ChargingError):
    """The connection ended, or fell silent, after a statement had been sent on it."""


class Contended(ChargingError):
    """Nothing was committed: a serialization failure, a deadlock, a lock timeout, a row that was committed after the
    statement's snapshot and has its place in a unique index, or a prepared form out of date.
    """


class DatabaseFault(ChargingError):
    """The database refused a statement for what it is; nothing was committed. A bug, or a schema that does not fit."""


class UrlNotAllowed(ChargingError):
    """A URL that no webhook is sent to; the message says what it must be instead, and can follow the member's name."""


class InvalidEvent(ChargingError):
    """A message that is not one of this service's events; delivering it again cannot help."""


class MigrationRefused(ChargingError):
    """The migrations at hand do not continue what the database has, or another run is at work."""


class SchemaIsAhead(MigrationRefused):
    """The database has migrations that are not at hand: a later release has been here."""


class RolesRefused(ChargingError):
    """The owner of the database may not make the functions' roles, or not give them what they need."""


class Misconfigured(ChargingError):
    """Settings are missing or unusable; the message names each of them."""
