"""Refunds in the OpenAPI document."""

import json
from uuid import UUID

from charging import errors, idempotency
from charging.idempotency import StoredResponse
from charging.refunds import EXCEEDS_CHARGE, Refund, RefundCommand
from local.openapi_parts import (
    KEY_IN_QUERY,
    Json,
    body,
    command,
    created,
    id_in_path,
    key_result,
    operation,
    problems,
    result,
)

_REFUND = Refund(
    UUID("01a22fd1-07b5-7c11-8f0a-1d2e3f405162"),
    UUID("01a22fc4-9395-7a4e-9400-75652bc34a19"),
    1200,
    "USD",
    "damaged",
)
_RESPONSE = StoredResponse.created(f"/charges/{_REFUND.charge_id}/refunds/{_REFUND.id}", _REFUND.members())
_CHARGE_ID = id_in_path("charge_id", str(_REFUND.charge_id))


def paths() -> Json:
    """Return the paths."""
    return {
        "/charges/{charge_id}/refunds": {"post": _create(), "get": _find()},
        "/charges/{charge_id}/refunds/{refund_id}": {"get": _read()},
    }


def schemas() -> Json:
    """Return the schemas that the paths use."""
    members = command(RefundCommand)["properties"]
    return {
        "RefundCommand": command(RefundCommand),
        "Refund": {
            "type": "object",
            "additionalProperties": False,
            "required": ["id", "chargeId", "amountCents", "currency"],
            "properties": {
                "id": {"type": "string", "format": "uuid"},
                "chargeId": {"type": "string", "format": "uuid"},
                "amountCents": members["amountCents"],
                "currency": {"type": "string", "pattern": "^[A-Z]{3}$", "description": "The charge's."},
                "reference": members["reference"],
            },
        },
        "RefundResult": {"anyOf": [{"$ref": "#/components/schemas/Refund"}, {"$ref": "#/components/schemas/Problem"}]},
        "RefundKeyResult": key_result("RefundResult"),
    }


def _create() -> Json:
    return {
        **operation("createRefund", "Refund a part of a charge, once for its key", RefundCommand, _CHARGE_ID),
        "description": (
            "All refunds of a charge together come to its amount at the most. That there is not so much left is a "
            "result, which a repetition under the key gets again."
        ),
        "requestBody": {
            "required": True,
            "content": {
                "application/json": {
                    "schema": {"$ref": "#/components/schemas/RefundCommand"},
                    "examples": {
                        "least": {"value": {"amountCents": 1200}},
                        "all": {"value": {"amountCents": 1200, "reference": "damaged"}},
                    },
                }
            },
        },
        "responses": created(
            "The refund: made by this request, or replayed for it.",
            "Refund",
            _REFUND.members(),
            {
                "refund": {
                    "operationId": "readRefund",
                    "parameters": {"charge_id": "$request.path.charge_id", "refund_id": "$response.body#/id"},
                },
                "result": {
                    "operationId": "findRefundResult",
                    "parameters": {
                        "charge_id": "$request.path.charge_id",
                        "idempotencyKey": "$request.header.Idempotency-Key",
                    },
                },
            },
            errors.NoSuchResource,
            EXCEEDS_CHARGE,
        ),
    }


def _find() -> Json:
    return {
        "operationId": "findRefundResult",
        "summary": "Tell what became of a key that the caller used for a refund of this charge",
        "parameters": [_CHARGE_ID, KEY_IN_QUERY],
        "responses": result("RefundKeyResult", json.loads(idempotency.to_json(_RESPONSE)), errors.NoSuchResource),
    }


def _read() -> Json:
    return {
        "operationId": "readRefund",
        "summary": "Show a refund of the caller's",
        "parameters": [_CHARGE_ID, id_in_path("refund_id", str(_REFUND.id))],
        "responses": {
            "200": {"description": "The refund.", "content": body("Refund", _REFUND.members())},
            **problems(errors.Unauthenticated, errors.NoSuchResource, errors.TemporarilyUnavailable),
        },
    }
