"""The one table from what went wrong to its problem document (RFC 9457)."""

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass, replace
from uuid import UUID

from charging import compact, errors
from charging.idempotency import InFlight, KeyReused, StoredResponse

CONTENT_TYPE = "application/problem+json"
# Each code is a heading of docs/problems.md.
TYPE = "urn:charging:problem:"


@dataclass(frozen=True, slots=True)
class Problem:
    """A kind of problem. `code` is stable. `retry_after` is in seconds; None sends no such header."""

    status: int
    code: str
    title: str
    detail: str
    retry_same_key: bool
    retry_after: int | None = None
    violations: tuple[errors.Violation, ...] = ()


_UNAVAILABLE = Problem(
    503,
    "temporarily_unavailable",
    "The service cannot answer at the moment",
    "This request did nothing; an earlier one with the same key may have. Wait as long as Retry-After says and send "
    "the same request with the same key again.",
    retry_same_key=True,
    retry_after=1,
)

PROBLEMS: Mapping[type[Exception | KeyReused | InFlight], Problem] = {
    errors.KeyMissing: Problem(
        400,
        "idempotency_key_missing",
        "The Idempotency-Key header is missing",
        "Send an Idempotency-Key header (to look a key up: the parameter idempotencyKey): a UUID that you make once "
        "for each thing that you create and keep for its retries.",
        retry_same_key=False,
    ),
    errors.KeyInvalid: Problem(
        400,
        "idempotency_key_invalid",
        "The Idempotency-Key header is malformed",
        "Send one Idempotency-Key header with a UUID in the form 8-4-4-4-12, bare or in double quotes.",
        retry_same_key=False,
    ),
    errors.InvalidRequest: Problem(
        400,
        "invalid_request",
        "The request is not acceptable",
        "Correct what `violations` lists; the same key may be sent again with the corrected body.",
        retry_same_key=False,
    ),
    errors.Unauthenticated: Problem(
        401,
        "unauthenticated",
        "The caller is not authenticated",
        "Sign the request, or send the credentials that this API's authorizer asks for.",
        retry_same_key=False,
    ),
    errors.NoSuchResource: Problem(
        404,
        "not_found",
        "There is nothing here",
        "Check the method, the path, and that what its ids name is your own.",
        retry_same_key=False,
    ),
    InFlight: Problem(
        409,
        "request_in_flight",
        "A request with this key is being processed",
        "Wait as long as Retry-After says and send the same request with the same key again.",
        retry_same_key=True,
        retry_after=1,
    ),
    errors.PayloadTooLarge: Problem(
        413,
        "payload_too_large",
        "The body is too large",
        "Send at most 16 KiB.",
        retry_same_key=False,
    ),
    errors.UnsupportedMediaType: Problem(
        415,
        "unsupported_media_type",
        "The body is not declared as JSON",
        "Send Content-Type: application/json; the only charset is UTF-8.",
        retry_same_key=False,
    ),
    KeyReused: Problem(
        422,
        "idempotency_key_reused",
        "The key belongs to another command",
        "This key was used for a different body. Use a new key for a new purpose, or send the first body again.",
        retry_same_key=False,
    ),
    errors.TooManyEndpoints: Problem(
        422,
        "too_many_endpoints",
        "The caller has all the webhook endpoints there can be",
        "Delete one that is not used any more. The same key may be sent again then.",
        retry_same_key=False,
    ),
    errors.TemporarilyUnavailable: _UNAVAILABLE,
    # To the caller the same: a schema that a deployment has not brought yet, say, is there a minute later.
    errors.DatabaseFault: _UNAVAILABLE,
    errors.OutcomeUnknown: Problem(
        503,
        "outcome_unknown",
        "Whether the request took effect is not known",
        "It took effect or it did not, once at the most. Wait as long as Retry-After says and send the same request "
        "with the same key again: that is safe, and its answer tells.",
        retry_same_key=True,
        retry_after=2,
    ),
}

INTERNAL = Problem(
    500,
    "internal_error",
    "The service has a fault",
    "This should not happen and has been logged. The same request with the same key may be sent again.",
    retry_same_key=True,
)


def of(cause: Exception | KeyReused | InFlight) -> Problem:
    """Returns the problem that an error or an outcome is to the caller; a fault of ours where none is meant."""
    problem = PROBLEMS.get(type(cause), INTERNAL)
    if isinstance(cause, errors.InvalidRequest):
        return replace(problem, violations=cause.violations)
    return problem


def document(problem: Problem, **occurrence: str) -> str:
    """Returns the problem as application/problem+json, with what is to be said of this occurrence alone."""
    # In ASCII: a violation may name a member in characters that UTF-8 has no bytes for.
    return json.dumps(
        compact.given(
            {
                "type": TYPE + problem.code,
                "title": problem.title,
                "status": problem.status,
                "detail": problem.detail,
                **occurrence,
                "code": problem.code,
                "retrySameKey": problem.retry_same_key,
                "violations": [asdict(violation) for violation in problem.violations] or None,
            }
        )
    )


def result(problem: Problem, instance: UUID, **occurrence: str) -> StoredResponse:
    """Returns the problem as the result of an operation, which is stored and replayed as any other.

    `instance` tells this occurrence from any other.
    """
    body = document(problem, instance=f"urn:uuid:{instance}", **occurrence)
    return StoredResponse(problem.status, {"Content-Type": CONTENT_TYPE}, body)


def headers(problem: Problem) -> dict[str, str]:
    """Returns the headers that go with the problem, besides its Content-Type."""
    return {} if problem.retry_after is None else {"Retry-After": str(problem.retry_after)}
