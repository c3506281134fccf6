"""The operations on webhook endpoints, and what they show, for the OpenAPI document."""

from datetime import UTC, datetime
from typing import Any
from uuid import UUID

from charging import endpoints, errors
from charging.contract import Command
from charging.endpoints import Delivery, Endpoint, EndpointCommand, ResendCommand, RotateCommand
from local.openapi_parts import HEX_GROUPS, KEY_HEADER, Json, body, created, id_in_path, problems

_PATH = "/webhook-endpoints"
_ID = UUID("01a22fc4-9395-7a4e-9400-75652bc34a20")
_EVENT = UUID("01a22fc4-9395-7a4e-9400-75652bc34a21")
_AT = datetime(2026, 12, 1, 9, 30, tzinfo=UTC)
_ENDPOINT = Endpoint(_ID, "https://shop.example.com/webhooks", ["ChargeCreated"], secret_version=1)
_SECRETS = endpoints.secrets(_ENDPOINT, b"an example, and no master key of anybody's")
_DELIVERY = Delivery(
    event_id=_EVENT,
    event_type="ChargeCreated",
    aggregate_id=UUID("01a22fc4-9395-7a4e-9400-75652bc34a19"),
    status="RETRY",
    next_attempt_at=_AT,
    last_error="The receiver answered 500",
    created_at=_AT,
    sent_at=None,
    failed_at=None,
    attempts=[
        {"attempt": 1, "endedAt": "2026-12-01T09:30:00.000Z", "durationMs": 120, "status": 500, "excerpt": "oops"}
    ],
)

_ONE = id_in_path("endpoint_id", str(_ID))
_MANAGING = (errors.Unauthenticated, errors.NoSuchResource, errors.TemporarilyUnavailable)
_COMMANDING = (*_MANAGING, errors.InvalidRequest, errors.PayloadTooLarge, errors.UnsupportedMediaType)


def paths() -> Json:
    """Return the operations by path and method."""
    return {
        _PATH: {"post": _create(), "get": _list()},
        f"{_PATH}/{{endpoint_id}}": {
            "get": _shows("readEndpoint", "Show an endpoint of the caller's"),
            "delete": _operation(
                "deleteEndpoint",
                "Delete an endpoint; what is still to be sent to it never will be",
                {"204": {"description": "It is deleted, by this request or an earlier one."}},
            ),
        },
        f"{_PATH}/{{endpoint_id}}/secret": {"get": _secret()},
        f"{_PATH}/{{endpoint_id}}/rotate-secret": {
            "post": _shows(
                "rotateSecret",
                "Replace the version of the secret that is named, unless that is done already",
                RotateCommand,
                {"secretVersion": 1, "overlapHours": 24},
            )
        },
        f"{_PATH}/{{endpoint_id}}/disable": {
            "post": _shows("disableEndpoint", "Hold all deliveries, those to come too")
        },
        f"{_PATH}/{{endpoint_id}}/enable": {
            "post": _shows("enableEndpoint", "Send what was held, and end a pause or an open breaker")
        },
        f"{_PATH}/{{endpoint_id}}/test": {
            "post": _operation(
                "testEndpoint",
                "Send an event of type WebhookTest, one in ten seconds at the most",
                {"202": {"description": "It is on its way.", "content": body("EventId", {"eventId": str(_EVENT)})}},
            )
        },
        f"{_PATH}/{{endpoint_id}}/deliveries": {"get": _deliveries()},
        f"{_PATH}/{{endpoint_id}}/deliveries/{{event_id}}/resend": {
            "post": _operation(
                "resendDelivery",
                "Send one delivery again, whatever became of it, under the same webhook-id",
                {"202": {"description": "It is on its way.", "content": body("Resent", {"resent": 1})}},
                parameters=[_ONE, id_in_path("event_id", str(_EVENT))],
            )
        },
        f"{_PATH}/{{endpoint_id}}/resend": {
            "post": _operation(
                "resendDeliveries",
                "Send the settled deliveries since a time again, as many as one request can take on",
                {
                    "202": {
                        "description": "They are on their way; with `nextCursor` there are more.",
                        "content": body("Resent", {"resent": 12}),
                    }
                },
                ResendCommand,
                {"since": "2026-12-01T09:30:00Z", "statuses": ["FAILED"]},
            )
        },
    }


def schemas() -> Json:
    """Return what the operations take and show."""
    text: Json = {"type": "string"}
    number: Json = {"type": "integer", "minimum": 0}
    identifier: Json = {"type": "string", "format": "uuid"}
    at: Json = {"type": "string", "format": "date-time"}
    cursor: Json = {"type": "string", "pattern": f"^{HEX_GROUPS}$"}
    types: Json = {"type": "array", "items": text}
    attempt = _object(
        {"attempt": number, "endedAt": at, "durationMs": number, "status": number, "error": text, "excerpt": text},
        optional={"status", "error", "excerpt"},
    )
    return {
        "EndpointCommand": _command(EndpointCommand),
        "RotateCommand": _command(RotateCommand),
        "ResendCommand": _command(ResendCommand),
        "Endpoint": _object(
            {
                "id": identifier,
                "url": text,
                "eventTypes": types,
                "secretVersion": {"type": "integer", "minimum": 1},
                "enabled": {"type": "boolean"},
                "disabledReason": {
                    "enum": ["owner", "gone"],
                    "description": "`owner`: disabled through this API. `gone`: the receiver answered 410.",
                },
                "heldUntil": at | {"description": "Nothing is sent before, since the receiver asks for time or fails."},
            },
            optional={"disabledReason", "heldUntil"},
        ),
        "Endpoints": _object({"endpoints": {"type": "array", "items": {"$ref": "#/components/schemas/Endpoint"}}}),
        "Secrets": _object(
            {
                "secretVersion": {"type": "integer", "minimum": 1},
                "secret": text | {"pattern": "^whsec_"},
                "previousSecret": text | {"pattern": "^whsec_"},
                "previousSecretSignsUntil": at,
            },
            optional={"previousSecret", "previousSecretSignsUntil"},
        ),
        "EventId": _object({"eventId": identifier}),
        "Resent": _object({"resent": number, "nextCursor": cursor}, optional={"nextCursor"}),
        "Delivery": _object(
            {
                "eventId": identifier,
                "eventType": text,
                "subject": identifier,
                "status": {"enum": ["PENDING", "CLAIMED", "RETRY", "SENT", "FAILED"]},
                "createdAt": at,
                "nextAttemptAt": at,
                "sentAt": at,
                "failedAt": at,
                "lastError": text,
                "attempts": {"type": "array", "items": attempt, "description": "The last twenty."},
            },
            optional={"nextAttemptAt", "sentAt", "failedAt", "lastError"},
        ),
        "Deliveries": _object(
            {
                "deliveries": {"type": "array", "items": {"$ref": "#/components/schemas/Delivery"}},
                "nextCursor": cursor,
            },
            optional={"nextCursor"},
        ),
    }


def _create() -> Json:
    return {
        "operationId": "createEndpoint",
        "summary": "Create a webhook endpoint, once for its key",
        "parameters": [KEY_HEADER],
        "requestBody": _request(EndpointCommand, {"url": _ENDPOINT.url, "eventTypes": _ENDPOINT.event_types}),
        "responses": created(
            "The endpoint: created by this request, or replayed for it. Its secret is shown apart.",
            "Endpoint",
            _ENDPOINT.members(),
            {
                "endpoint": {"operationId": "readEndpoint", "parameters": {"endpoint_id": "$response.body#/id"}},
                "secret": {"operationId": "readSecret", "parameters": {"endpoint_id": "$response.body#/id"}},
            },
            errors.TooManyEndpoints,
        ),
    }


def _list() -> Json:
    return {
        "operationId": "listEndpoints",
        "summary": "Show the caller's endpoints",
        "responses": {
            "200": {"description": "All of them.", "content": body("Endpoints", {"endpoints": [_ENDPOINT.members()]})},
            **problems(errors.Unauthenticated, errors.TemporarilyUnavailable),
        },
    }


def _secret() -> Json:
    return _operation(
        "readSecret",
        "Show the secret that signs, and the one before while that still does",
        {"200": {"description": "Keep it as you keep a password.", "content": body("Secrets", _SECRETS)}},
    )


def _deliveries() -> Json:
    page = {"deliveries": [_DELIVERY.members()]}
    cursor = {
        "name": "cursor",
        "in": "query",
        "description": "The `nextCursor` of the page before.",
        "schema": {"type": "string", "pattern": f"^{HEX_GROUPS}$"},
    }
    answer = {"200": {"description": "A page, the youngest first.", "content": body("Deliveries", page)}}
    operation = _operation("listDeliveries", "Show an endpoint's deliveries", answer, parameters=[_ONE, cursor])
    operation["responses"] |= problems(*_MANAGING, errors.InvalidRequest)
    return operation


def _shows(name: str, summary: str, command: type[Command] | None = None, example: object = None) -> Json:
    answer: Json = {"200": {"description": "The endpoint.", "content": body("Endpoint", _ENDPOINT.members())}}
    return _operation(name, summary, answer, command, example)


def _operation(
    name: str,
    summary: str,
    answer: Json,
    command: type[Command] | None = None,
    example: object = None,
    *,
    parameters: list[Json] | None = None,
) -> Json:
    """Return an operation on one endpoint, with a command in its body or without."""
    operation: Json = {
        "operationId": name,
        "summary": summary,
        "parameters": parameters or [_ONE],
        "responses": answer | problems(*(_MANAGING if command is None else _COMMANDING)),
    }
    if command is not None:
        operation["requestBody"] = _request(command, example)
    return operation


def _request(command: type[Command], example: object) -> Json:
    return {"required": True, "content": body(command.__name__, example)}


def _command(command: type[Command]) -> Json:
    schema = command.model_json_schema(by_alias=True)
    for name, member in schema["properties"].items():
        member.pop("title")
        member["description"] = f"It is {member['description']}."
        if "anyOf" in member:
            # Left out or a text; pydantic's None is how the code says that it was left out.
            schema["properties"][name] = member.pop("anyOf")[0] | {"description": member["description"]}
        if member.get("type") == "array":
            member["uniqueItems"] = True
    return schema


def _object(properties: dict[str, Any], *, optional: frozenset[str] | set[str] = frozenset()) -> Json:
    return {
        "type": "object",
        "additionalProperties": False,
        "required": [name for name in properties if name not in optional],
        "properties": properties,
    }
