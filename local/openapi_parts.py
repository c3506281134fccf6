"""What operations of every kind are described with: bodies, keys and problems."""

import json
from collections.abc import Iterable
from typing import Any

from charging import problem
from charging.idempotency import InFlight, KeyReused
from charging.problem import Problem

type Json = dict[str, Any]

KEY = "8e03978e-40d5-43e8-bc93-6894a57f9324"
HEX_GROUPS = "[0-9A-Fa-f]{8}-[0-9A-Fa-f]{4}-[0-9A-Fa-f]{4}-[0-9A-Fa-f]{4}-[0-9A-Fa-f]{12}"
KEY_HEADER: Json = {
    "name": "Idempotency-Key",
    "in": "header",
    "required": True,
    "description": "A UUID in the form 8-4-4-4-12, bare or as an RFC 8941 string; both are the same key.",
    "schema": {"type": "string", "pattern": f'^(?:{HEX_GROUPS}|"{HEX_GROUPS}")$'},
    "example": KEY,
}


def id_in_path(name: str, example: str) -> Json:
    """Return the parameter that is an id in the path."""
    return {
        "name": name,
        "in": "path",
        "required": True,
        "schema": {"type": "string", "format": "uuid", "pattern": f"^{HEX_GROUPS}$"},
        "example": example,
    }


def body(schema: str, example: object) -> Json:
    """Return a JSON body of one of the schemas."""
    return {"application/json": {"schema": {"$ref": f"#/components/schemas/{schema}"}, "example": example}}


def problems(*causes: type[Exception] | type[InFlight] | type[KeyReused]) -> Json:
    """Return one response for each status, with an example for each of its problems."""
    by_status: dict[int, list[Problem]] = {}
    for found in (*(problem.PROBLEMS[cause] for cause in causes), problem.INTERNAL):
        by_status.setdefault(found.status, []).append(found)
    return {str(status): _problem_response(kinds) for status, kinds in sorted(by_status.items())}


def _problem_response(kinds: Iterable[Problem]) -> Json:
    kinds = list(kinds)
    response: Json = {
        "description": "; or ".join(f"{kind.title} (`{kind.code}`)" for kind in kinds) + ".",
        "content": {
            problem.CONTENT_TYPE: {
                "schema": {"$ref": "#/components/schemas/Problem"},
                "examples": {kind.code: {"value": json.loads(problem.document(kind))} for kind in kinds},
            }
        },
    }
    if all(problem.headers(kind) for kind in kinds):
        response["headers"] = {"Retry-After": {"$ref": "#/components/headers/Retry-After"}}
    return response
