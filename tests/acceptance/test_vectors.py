"""The contract as a table of requests and answers, which others can hold against a service of their own."""

import base64
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest

from tests.support.database import Databases
from tests.support.invocation import CHARGES, Answer, Instance
from tests.support.shapes import SHAPES, Request

VECTORS = sorted((Path(__file__).parents[1] / "vectors").glob("*.json"))

type Json = dict[str, Any]


@pytest.fixture(scope="module")
def charges(database_server: Databases) -> Iterator[tuple[Instance, psycopg.Connection[Any]]]:
    """One warm instance for all vectors, as callers share one; each vector has callers of its own."""
    with database_server.migrated() as url, psycopg.connect(url, autocommit=True) as connection:
        instance = Instance("charges", url, CHARGES)
        yield instance, connection
        instance.close()


@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("vector", VECTORS, ids=lambda path: path.stem)
def test_every_vector_is_answered_as_it_says(
    charges: tuple[Instance, psycopg.Connection[Any]], vector: Path, shape: str
) -> None:
    """Each step is answered as expected in every gateway's shape, and only what was created is stored."""
    instance, connection = charges
    answers: list[Answer] = []
    originals: dict[tuple[str | None, str], Answer] = {}
    steps = json.loads(vector.read_bytes())["steps"]
    for step in steps:
        expected = step["expected"]
        request = _request(step["request"], f"{vector.stem}/{shape}", answers)
        answer = instance.call(SHAPES[shape](request))
        answers.append(answer)

        assert answer.status == expected["status"], answer.body
        assert answer.code == expected.get("code", "")
        if "members" in expected:
            assert sorted({violation["member"] for violation in answer.json["violations"]}) == expected["members"]
        for member, value in expected.get("body", {}).items():
            assert answer.json[member] == value
        if answer.code:
            assert answer.json["status"] == answer.status
        if "replayed" in expected:
            assert answer.is_replay == expected["replayed"]
            place = request.principal, request.path
            original = originals[place] = originals[place] if expected["replayed"] else answer
            assert answer.body == original.body
            assert {**original.headers, "idempotent-replayed": "true"} == {
                **answer.headers,
                "idempotent-replayed": "true",
            }
    counts = connection.execute(
        """
        SELECT (SELECT coalesce(sum(1 + refunds), 0) FROM charges WHERE starts_with(principal, %(callers)s)),
               (SELECT count(*) FROM idempotency_keys WHERE starts_with(principal, %(callers)s)),
               (SELECT count(*) FROM outbox WHERE starts_with(payload::jsonb ->> 'principal', %(callers)s))
        """,
        {"callers": f"{vector.stem}/{shape}/"},
    ).fetchone()
    firsts = [step["expected"]["status"] for step in steps if step["expected"].get("replayed") is False]
    assert counts == (firsts.count(201), len(firsts), firsts.count(201))


def _request(step: Json, callers: str, answers: list[Answer]) -> Request:
    caller = step.get("principal", "caller")
    body = base64.b64decode(step["bodyBase64"]) if "bodyBase64" in step else step.get("body", None)
    path = step["path"]
    if answers:
        path = path.replace("{location}", answers[-1].headers.get("location", ""))
        path = path.replace("{charge}", answers[0].headers.get("location", ""))
    return Request(
        method=step["method"],
        path=path,
        query=step.get("query", {}),
        headers=[(name, value) for name, value in step["headers"]],
        body=body.encode() if isinstance(body, str) else body,
        principal=None if caller is None else f"{callers}/{caller}",
    )
