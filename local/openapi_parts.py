"""What operations of every kind are described with: bodies, keys and problems."""

import json
from collections.abc import Iterable
from typing import Any

from charging import errors, problem
from charging.contract import Command
from charging.idempotency import InFlight, KeyReused
from charging.problem import Problem

type Json = dict[str, Any]
type Cause = type[Exception | InFlight | KeyReused]

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


KEY_IN_QUERY: Json = {
    "name": "idempotencyKey",
    "in": "query",
    "required": True,
    "schema": {"type": "string", "pattern": f'^(?:{HEX_GROUPS}|"{HEX_GROUPS}")$'},
    "example": KEY,
}
TRACEPARENT_HEADER: Json = {
    "name": "traceparent",
    "in": "header",
    "description": "W3C Trace Context; carried in the event.",
    "schema": {"type": "string"},
}


# What API Gateway answers by itself to any request, as template.yaml has it.
GATEWAYS = (
    Problem(
        403,
        "forbidden",
        "The gateway refuses the request",
        "User is not authorized to access this resource",
        retry_same_key=False,
    ),
    Problem(
        429,
        "too_many_requests",
        "Too many requests",
        "This request did nothing. Wait as long as Retry-After says and send it again, with the same key.",
        retry_same_key=True,
        retry_after=1,
    ),
)


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


def command(model: type[Command]) -> Json:
    """Return the schema of a command."""
    schema = model.model_json_schema(by_alias=True)
    for name, member in schema["properties"].items():
        del member["title"]
        # Left out or a value; pydantic's None is how the code says that it was left out.
        kind = member["anyOf"][0] if "anyOf" in member else member
        schema["properties"][name] = kind | {"description": f"It is {member['description']}."}
    return schema


def operation(operation_id: str, summary: str, model: type[Command], *path: Json) -> Json:
    """Return an operation under a key that answers with its command's members and an id, with the path's parameters."""
    taken = command(model)
    answered = {
        **taken,
        "description": "What was created.",
        "required": ["id", *taken["required"]],
        "properties": {"id": {"type": "string", "format": "uuid"}, **taken["properties"]},
    }
    return {
        "operationId": operation_id,
        "summary": summary,
        "parameters": [*path, KEY_HEADER, TRACEPARENT_HEADER],
        "requestBody": {"required": True, "content": {"application/json": {"schema": taken}}},
        "responses": _created(
            "Created by this request, or replayed for it.", {"application/json": {"schema": answered}}
        ),
    }


def key_result(schema: str) -> Json:
    """Return the schema of what is known of a key whose operation answers with a schema's object, or with a refusal."""
    return {
        "type": "object",
        "additionalProperties": False,
        "required": ["outcome"],
        "properties": {
            "outcome": {"enum": ["committed", "not_known"]},
            "response": {
                "type": "object",
                "additionalProperties": False,
                "required": ["status", "headers", "body"],
                "properties": {
                    "status": {"type": "integer"},
                    "headers": {"type": "object", "additionalProperties": {"type": "string"}},
                    "body": {"$ref": f"#/components/schemas/{schema}"},
                },
            },
        },
    }


def result(schema: str, example: object, *refusals: Cause) -> Json:
    """Return the responses of an operation that tells what became of a key, with its own refusals."""
    return {
        "200": {
            "description": (
                "`committed`, with the response that a repetition would get; or `not_known`: nothing has been "
                "committed under the key, or it is no longer kept. A request may be under way."
            ),
            "content": body(schema, example),
        },
        **problems(
            errors.KeyMissing, errors.KeyInvalid, errors.Unauthenticated, errors.TemporarilyUnavailable, *refusals
        ),
    }


def created(description: str, schema: str, example: object, links: Json, *refusals: Cause | Problem) -> Json:
    """Return the responses of an operation under a key, with its own refusals among the problems."""
    responses = _created(description, body(schema, example), *refusals)
    responses["201"]["links"] = links
    return responses


def _created(description: str, content: Json, *refusals: Cause | Problem) -> Json:
    return {
        "201": {
            "description": description,
            "headers": {
                "Location": {"$ref": "#/components/headers/Location"},
                "Idempotent-Replayed": {"$ref": "#/components/headers/Idempotent-Replayed"},
            },
            "content": content,
        },
        **problems(
            errors.KeyMissing,
            errors.KeyInvalid,
            errors.InvalidRequest,
            errors.Unauthenticated,
            InFlight,
            errors.PayloadTooLarge,
            errors.UnsupportedMediaType,
            KeyReused,
            errors.TemporarilyUnavailable,
            errors.OutcomeUnknown,
            *refusals,
        ),
    }


def problems(*causes: Cause | Problem) -> Json:
    """Return one response for each status, with an example for each of its problems."""
    by_status: dict[int, list[Problem]] = {}
    kinds = (cause if isinstance(cause, Problem) else problem.PROBLEMS[cause] for cause in causes)
    for found in (*kinds, *GATEWAYS, problem.INTERNAL):
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
