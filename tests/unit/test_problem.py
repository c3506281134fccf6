"""Problem documents: every refusal has one, it says what to do, and it tells nothing of the inside."""

import json
import re
from pathlib import Path
from typing import Any

import pytest

from charging import errors, problem
from charging.idempotency import InFlight, KeyReused
from charging.problem import Problem
from charging.refunds import EXCEEDS_CHARGE

DOCUMENTATION = Path(__file__).parents[2] / "docs" / "problems.md"
TEMPLATE = Path(__file__).parents[2] / "template.yaml"
# Two errors may be one problem to the caller.
ALL = list({one.code: one for one in [*problem.PROBLEMS.values(), EXCEEDS_CHARGE, problem.INTERNAL]}.values())
CODES = [one.code for one in ALL]

# The contract's table: code, status, whether the same request with the same key is worth sending again.
CONTRACT = {
    "idempotency_key_missing": (400, False),
    "idempotency_key_invalid": (400, False),
    "invalid_request": (400, False),
    "unauthenticated": (401, False),
    "not_found": (404, False),
    "request_in_flight": (409, True),
    "refund_exceeds_charge": (409, False),
    "payload_too_large": (413, False),
    "unsupported_media_type": (415, False),
    "idempotency_key_reused": (422, False),
    "too_many_endpoints": (422, False),
    "temporarily_unavailable": (503, True),
    "outcome_unknown": (503, True),
    "internal_error": (500, True),
}


def test_codes_statuses_and_advice_are_those_of_the_contract() -> None:
    """Clients branch on these; none is added, dropped or changed by accident."""
    assert {one.code: (one.status, one.retry_same_key) for one in ALL} == CONTRACT
    assert len(set(CODES)) == len(CODES)


@pytest.mark.parametrize("one", ALL, ids=CODES)
def test_a_problem_has_the_members_of_rfc_9457_and_ours(one: Problem) -> None:
    """Every document has all six, of the right types, and its type ends in its code."""
    document = json.loads(problem.document(one))
    assert document == {
        "type": f"urn:charging:problem:{one.code}",
        "title": one.title,
        "status": one.status,
        "detail": one.detail,
        "code": one.code,
        "retrySameKey": one.retry_same_key,
    }
    assert one.title
    assert one.detail


@pytest.mark.parametrize("one", ALL, ids=CODES)
def test_whoever_is_told_to_wait_is_told_how_long(one: Problem) -> None:
    """Retry-After is in whole seconds; a refusal that waiting cannot cure has none."""
    headers = problem.headers(one)
    if one.status == 503 or one is problem.PROBLEMS[InFlight]:
        assert re.fullmatch(r"[1-9][0-9]*", headers["Retry-After"])
    else:
        assert headers == {}


@pytest.mark.parametrize("code", CODES)
def test_every_code_has_its_heading_in_the_documentation(code: str) -> None:
    """A client's developer finds each code as a heading, once."""
    headings = re.findall(r"^## `?([a-z_]+)`?$", DOCUMENTATION.read_text(), re.MULTILINE)
    assert headings.count(code) == 1


def test_the_documentation_has_the_codes_that_can_be_answered_and_no_other() -> None:
    """What is documented can happen: in the service, or in the gateway before it by its template."""
    headings = re.findall(r"^## ([a-z_]+)$", DOCUMENTATION.read_text(), re.MULTILINE)
    by_the_gateway = re.findall(r'"code":"([a-z_]+)"', TEMPLATE.read_text())
    assert set(headings) == {*CODES, *by_the_gateway}


def leaves(kind: type[Any]) -> list[type[Any]]:
    below = kind.__subclasses__()
    return [leaf for child in below for leaf in leaves(child)] if below else [kind]


@pytest.mark.parametrize("kind", leaves(errors.Refused), ids=lambda kind: kind.__name__)
def test_every_refusal_is_the_callers_business(kind: type[errors.Refused]) -> None:
    """A new kind of refusal without an entry in the table would come out as a fault of ours."""
    cause = errors.InvalidRequest([]) if kind is errors.InvalidRequest else kind("why")
    assert 400 <= problem.of(cause).status < 500


@pytest.mark.parametrize(
    "cause", [InFlight(), KeyReused(), errors.TemporarilyUnavailable(""), errors.OutcomeUnknown("")]
)
def test_an_outcome_is_no_fault(cause: Any) -> None:
    """Nor is an outage: only what nobody meant to happen is a 500."""
    assert problem.of(cause) is not problem.INTERNAL


SECRET = 'relation "charges" does not exist at db.internal:5432'


@pytest.mark.parametrize(
    "cause",
    [
        ValueError(SECRET),
        errors.DatabaseFault(SECRET),
        errors.TemporarilyUnavailable(SECRET),
        errors.OutcomeUnknown(SECRET),
        errors.Misconfigured(SECRET),
        errors.KeyInvalid(SECRET),
        errors.Unauthenticated(SECRET),
    ],
    ids=lambda cause: type(cause).__name__,
)
def test_no_errors_text_reaches_the_caller(cause: Exception) -> None:
    """What an error says is for the log: it may name tables, hosts, or what the caller sent."""
    assert SECRET not in problem.document(problem.of(cause))
    assert "charges does not" not in problem.document(problem.of(cause))


def test_violations_are_listed_each_with_its_member_and_reason() -> None:
    """Also where a member's name could not be written in UTF-8."""
    cause = errors.InvalidRequest(
        [errors.Violation("amountCents", "must be more"), errors.Violation("\ud800", "is odd")]
    )
    document = problem.document(problem.of(cause))
    assert json.loads(document.encode())["violations"] == [
        {"member": "amountCents", "reason": "must be more"},
        {"member": "\ud800", "reason": "is odd"},
    ]
