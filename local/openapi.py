"""The API as an OpenAPI 3.1 document, generated from the code that serves it."""

import json
from pathlib import Path
from uuid import UUID

from charging import compact, errors, idempotency, problem, refunds
from charging.charges import Charge, ChargeCommand
from charging.contract import BODY_BYTES
from charging.idempotency import StoredResponse
from local import openapi_refunds, openapi_webhooks
from local.openapi_parts import (
    HEX_GROUPS,
    KEY_HEADER,
    KEY_IN_QUERY,
    TRACEPARENT_HEADER,
    Json,
    body,
    command,
    created,
    id_in_path,
    key_result,
    problems,
    result,
)

DOCUMENT = Path("docs/openapi.json")

_CHARGE = Charge(UUID("01a22fc4-9395-7a4e-9400-75652bc34a19"), 4900, "USD", "order 7")
_RESPONSE = StoredResponse(
    201, {"Content-Type": "application/json", "Location": f"/charges/{_CHARGE.id}"}, compact.json(_CHARGE.members())
)

_DESCRIPTION = f"""\
Takes a charge or a refund once per idempotency key, shows them and what became of keys, and manages the endpoints to
which their events are sent as webhooks.

A key belongs to the caller and the operation. It is kept for 24 hours from its first use, unless the deployment says
otherwise; after that it is a new key. A repetition under a live key gets the first answer back, byte for byte, with
`Idempotent-Replayed: true`.

The body is JSON (RFC 8259) in UTF-8 without a byte order mark, of at most {BODY_BYTES} bytes. An integer is written as
one: `4900.0` and `4.9e3` are refused, as are unknown and repeated members.

Errors are `application/problem+json` (RFC 9457). `code` is stable; `retrySameKey` says whether to send the same request
with the same key again. API Gateway itself answers 403 to a request without the right to call, and 429 to one too many:
nothing has been charged then.
"""


def document() -> Json:
    """Return the whole document."""
    return {
        "openapi": "3.1.0",
        "info": {"title": "Charging", "version": "1", "description": _DESCRIPTION},
        "servers": [{"url": "/"}],
        "security": [{"sigv4": []}],
        "paths": {
            "/charges": {"post": _create(), "get": _find()},
            "/charges/{charge_id}": {"get": _read()},
            **openapi_refunds.paths(),
            **openapi_webhooks.paths(),
        },
        "components": {
            "securitySchemes": {
                "sigv4": {
                    "type": "apiKey",
                    "in": "header",
                    "name": "Authorization",
                    "description": "AWS Signature Version 4, service execute-api.",
                }
            },
            "headers": {
                "Location": {
                    "description": "The path of what was created.",
                    "required": True,
                    "schema": {
                        "type": "string",
                        "pattern": f"^/(charges|charges/{HEX_GROUPS}/refunds|webhook-endpoints)/{HEX_GROUPS}$",
                    },
                },
                "Idempotent-Replayed": {
                    "description": "Sent with a repetition's answer, and never with a first one.",
                    "schema": {"const": "true"},
                },
                "Retry-After": {
                    "description": "Seconds to wait before the same request is sent again.",
                    "required": True,
                    "schema": {"type": "integer", "minimum": 1},
                },
            },
            "schemas": {
                "ChargeCommand": command(ChargeCommand),
                "Charge": _charge(),
                "KeyResult": key_result("Charge"),
                **openapi_refunds.schemas(),
                **openapi_webhooks.schemas(),
                "Problem": _problem(),
            },
        },
    }


def text() -> str:
    """Return the document as it is committed."""
    return json.dumps(document(), indent=2, ensure_ascii=False) + "\n"


def _create() -> Json:
    return {
        "operationId": "createCharge",
        "summary": "Take a charge, once for its key",
        "parameters": [KEY_HEADER, TRACEPARENT_HEADER],
        "requestBody": {
            "required": True,
            "content": {
                "application/json": {
                    "schema": {"$ref": "#/components/schemas/ChargeCommand"},
                    "examples": {
                        "least": {"value": {"amountCents": 4900}},
                        "all": {"value": {"amountCents": 4900, "currency": "EUR", "reference": "order 7"}},
                    },
                }
            },
        },
        "responses": created(
            "The charge: taken by this request, or replayed for it.",
            "Charge",
            _CHARGE.members(),
            {
                "charge": {"operationId": "readCharge", "parameters": {"charge_id": "$response.body#/id"}},
                "result": {
                    "operationId": "findResult",
                    "parameters": {"idempotencyKey": "$request.header.Idempotency-Key"},
                },
            },
        ),
    }


def _find() -> Json:
    return {
        "operationId": "findResult",
        "summary": "Tell what became of a key of the caller's",
        "parameters": [KEY_IN_QUERY],
        "responses": result("KeyResult", json.loads(idempotency.to_json(_RESPONSE))),
    }


def _read() -> Json:
    return {
        "operationId": "readCharge",
        "summary": "Show a charge of the caller's",
        "parameters": [
            id_in_path("charge_id", str(_CHARGE.id)),
        ],
        "responses": {
            "200": {"description": "The charge.", "content": body("Charge", _CHARGE.members())},
            **problems(errors.Unauthenticated, errors.NoSuchResource, errors.TemporarilyUnavailable),
        },
    }


def _charge() -> Json:
    members = command(ChargeCommand)["properties"]
    return {
        "type": "object",
        "additionalProperties": False,
        "required": ["id", "amountCents", "currency"],
        "properties": {
            "id": {"type": "string", "format": "uuid"},
            "amountCents": members["amountCents"],
            "currency": {name: rule for name, rule in members["currency"].items() if name != "default"},
            "reference": members["reference"],
            "refundedCents": {
                "type": "integer",
                "minimum": 1,
                "description": "What has been refunded, all in all; left out while nothing has been.",
            },
        },
    }


def _problem() -> Json:
    known = [*problem.PROBLEMS.values(), refunds.EXCEEDS_CHARGE, problem.INTERNAL]
    return {
        "type": "object",
        "additionalProperties": False,
        "required": ["type", "title", "status", "detail", "code", "retrySameKey"],
        "properties": {
            "type": {"enum": [problem.TYPE + kind.code for kind in known]},
            "title": {"type": "string"},
            "status": {"enum": sorted({kind.status for kind in known})},
            "detail": {"type": "string"},
            "instance": {
                "type": "string",
                "description": "With a refusal that is the key's result: which one it is.",
            },
            "code": {"enum": [kind.code for kind in known]},
            "retrySameKey": {
                "type": "boolean",
                "description": "Whether to send the same request with the same key again.",
            },
            "violations": {
                "type": "array",
                "description": "With `invalid_request`: everything that is wrong with the body.",
                "items": {
                    "type": "object",
                    "additionalProperties": False,
                    "required": ["member", "reason"],
                    "properties": {
                        "member": {"type": "string", "description": "Empty for the body as a whole."},
                        "reason": {"type": "string"},
                    },
                },
            },
        },
    }


def main() -> int:
    """Write the document."""
    DOCUMENT.write_text(text())
    return 0
