"""The OpenAPI document: generated from the code, complete, and true of the handler."""

import itertools
import json
from collections.abc import Iterator
from typing import Any

import pytest
import schemathesis
from hypothesis import HealthCheck, assume, given, settings
from schemathesis import Case, GenerationMode
from schemathesis.schemas import BaseSchema

from charging import problem
from local import openapi
from tests.support.database import Databases
from tests.support.invocation import CHARGES, ENDPOINTS_VARIABLES, Answer, Event, Instance
from tests.support.wsgi import application

EXAMPLES = 60

OPERATIONS = [
    (path, method, mode)
    for path, methods in openapi.document()["paths"].items()
    for method, operation in methods.items()
    for mode in GenerationMode
    # What takes nothing cannot be asked wrongly.
    if mode is GenerationMode.POSITIVE or operation.keys() & {"parameters", "requestBody"}
]
# What no schema can say of a member, a request that is meant to be right gets right.
RIGHT = {"url": "https://receiver.test/hook", "since": "2026-12-01T09:30:00Z"}
# How wrong requests may be answered. 413 is among it, since a text can be so much too long that the body is, too.
CHECKS = {"negative_data_rejection": {"expected-statuses": ["400", "404", "413", "415", "422"]}}


@pytest.fixture(scope="module")
def api(database_server: Databases) -> Iterator[BaseSchema]:
    with database_server.migrated() as url:
        charges, endpoints = Instance("charges", url, CHARGES), Instance("endpoints", url, ENDPOINTS_VARIABLES)
        document = openapi.document()
        del document["security"]  # the gateway's part, which stands before the function
        schema = schemathesis.openapi.from_dict(document, config=schemathesis.Config.from_dict({"checks": CHECKS}))
        # Each request has a caller of its own: a key used twice would rightly be refused.
        callers = (f"caller {number}" for number in itertools.count())

        def call(event: Event) -> Answer:
            return (endpoints if event["path"].startswith("/webhook-endpoints") else charges).call(event)

        schema.app = application(call, callers)
        yield schema
        for instance in (charges, endpoints):
            instance.close()


@pytest.mark.parametrize(("path", "method", "mode"), OPERATIONS, ids=str)
def test_the_handler_is_what_the_document_says(api: BaseSchema, path: str, method: str, mode: GenerationMode) -> None:
    """Whatever the document allows or forbids, the answer is one that it describes, and never a server error."""

    @settings(max_examples=EXAMPLES, deadline=None, suppress_health_check=list(HealthCheck))
    @given(case=api[path][method].as_strategy(generation_mode=mode))
    def check(case: Case[Any]) -> None:
        if mode is GenerationMode.POSITIVE and isinstance(case.body, dict):
            # To JSON Schema 3111.0 is an integer. The contract takes it for none, and no schema can say so.
            assume(not any(isinstance(member, float) for member in case.body.values()))
            case.body.update({name: value for name, value in RIGHT.items() if name in case.body})
        case.call_and_validate()

    check()


def test_the_committed_document_is_the_generated_one() -> None:
    """A change of the contract shows as a change of the document."""
    assert openapi.DOCUMENT.read_text() == openapi.text(), "run `make openapi`"


def test_the_template_has_the_generated_paths() -> None:
    """The gateway lets through what is documented."""
    assert openapi.TEMPLATE.read_text() == openapi.template(), "run `make openapi`"


def test_every_problem_is_in_the_document() -> None:
    """No code can be answered that a consumer could not have read of."""
    described = json.dumps(openapi.document()["paths"])
    for kind in [*problem.PROBLEMS.values(), problem.INTERNAL]:
        assert f'"{problem.TYPE}{kind.code}"' in described
