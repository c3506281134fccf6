"""Charges behind API Gateway: wiring only."""

import contextlib
from functools import cache
from typing import TYPE_CHECKING, Any
from uuid import UUID

from charging import api, charges, compact, gateway, idempotency, refunds
from charging.api import Api
from charging.charges import ChargeCommand
from charging.database import Database
from charging.gateway import Request, Response
from charging.idempotency import StoredResponse
from charging.refunds import RefundCommand
from charging.settings import OperationSettings

if TYPE_CHECKING:
    from aws_lambda_powertools.utilities.typing import LambdaContext

API = Api("charges")


@cache
def settings() -> OperationSettings:
    """The environment, read at the first request."""
    return OperationSettings.from_environment()


@cache
def database() -> Database:
    """The connection that this instance keeps between requests."""
    return Database(settings())


def before_snapshot() -> None:
    """Puts the settings and the commands' models into the snapshot that later instances start from, and keeps any
    connection out of it.

    Each of them opens its own. A snapshot of faulty settings fails the deployment.
    """
    settings()
    for model in (ChargeCommand, RefundCommand):
        model.model_rebuild()
    database().close()


with contextlib.suppress(ImportError):  # Lambda's runtime alone has it.
    from snapshot_restore_py import register_before_snapshot

    register_before_snapshot(before_snapshot)


def handler(event: dict[str, Any], context: "LambdaContext") -> dict[str, Any]:
    """Answers one request."""
    return API.answer(event, context)


@API.route("POST /charges")
def create_charge(request: Request) -> Response:
    """Charges."""
    call = api.call(request, charges.ENDPOINT, ChargeCommand, settings())
    return API.outcome(request, call, charges.create(database(), call))


@API.route("GET /charges/{id}")
def read_charge(request: Request, charge_id: UUID) -> Response:
    """Shows the caller one of their own charges."""
    charge = charges.read(database(), gateway.principal(request), charge_id, deadline=api.deadline(request))
    return api.ok(compact.json(charge.members()))


@API.route("GET /charges")
def find_charge(request: Request) -> Response:
    """Tells the caller what became of one of their own keys."""
    scope = api.scope_in_query(request, charges.ENDPOINT)
    return result_of(idempotency.find(database(), scope, deadline=api.deadline(request)))


@API.route("POST /charges/{id}/refunds")
def create_refund(request: Request, charge_id: UUID) -> Response:
    """Refunds a part of one of the caller's own charges."""
    call = api.call(request, refunds.ENDPOINT, RefundCommand, settings())
    return API.outcome(request, call, refunds.create(database(), call, charge_id))


@API.route("GET /charges/{id}/refunds/{id}")
def read_refund(request: Request, charge_id: UUID, refund_id: UUID) -> Response:
    """Shows the caller one refund of one of their own charges."""
    principal, deadline = gateway.principal(request), api.deadline(request)
    return api.ok(compact.json(refunds.read(database(), principal, charge_id, refund_id, deadline=deadline).members()))


@API.route("GET /charges/{id}/refunds")
def find_refund(request: Request, charge_id: UUID) -> Response:
    """Tells the caller what became of one of their own keys, where it was used for this charge."""
    scope = api.scope_in_query(request, refunds.ENDPOINT)
    return result_of(refunds.find(database(), scope, charge_id, deadline=api.deadline(request)))


def result_of(found: StoredResponse | None) -> Response:
    """Says what a repetition under a key would be answered."""
    return api.ok(idempotency.to_json(found))
