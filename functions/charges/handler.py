"""Charges behind API Gateway: wiring only."""

import contextlib
from functools import cache
from typing import Any

from aws_lambda_powertools.event_handler import APIGatewayRestResolver, Response
from aws_lambda_powertools.utilities.typing import LambdaContext

from charging import charges, contract, errors, gateway, idempotency, responses
from charging.contract import ChargeCommand
from charging.database import Database
from charging.idempotency import Scope
from charging.settings import ChargesSettings

app = APIGatewayRestResolver()


@cache
def settings() -> ChargesSettings:
    """The environment, read at the first request."""
    return ChargesSettings.from_environment()


@cache
def database() -> Database:
    """The connection that this instance keeps between requests."""
    return Database(settings())


def before_snapshot() -> None:
    """Puts the settings into the snapshot that later instances start from, and keeps any connection out of it.

    Each of them opens its own. A snapshot of faulty settings fails the deployment.
    """
    settings()
    database().close()


with contextlib.suppress(ImportError):  # Lambda's runtime alone has it.
    from snapshot_restore_py import register_before_snapshot

    register_before_snapshot(before_snapshot)


def handler(event: dict[str, Any], context: LambdaContext) -> dict[str, Any]:
    """Answers one request, in whichever of the gateway's shapes it comes."""
    return gateway.response_for(event, app.resolve(gateway.rest_event(event), context))


@app.post("/charges")
def create_charge() -> Response[str]:
    """Reads the request into a command and charges it."""
    request = app.current_event.raw_event
    scope = scope_of(gateway.header_lines(request, "Idempotency-Key"))
    contract.require_json(gateway.header_lines(request, "Content-Type"))
    command = contract.parse(ChargeCommand, gateway.body(request))
    outcome = charges.create(
        database(),
        scope,
        command,
        retention_hours=settings().retention_hours,
        in_flight_wait_seconds=settings().in_flight_wait_ms / 1000,
        traceparent=contract.traceparent(gateway.header_lines(request, "traceparent")),
        deadline=responses.deadline(app.lambda_context),
    )
    return responses.of(outcome, scope, service="charges")


@app.get("/charges/<charge_id>")
def read_charge(charge_id: str) -> Response[str]:
    """Shows the caller one of their own charges."""
    principal = gateway.principal(app.current_event.raw_event)
    found = contract.resource_id(charge_id)
    charge = charges.read(database(), principal, found, deadline=responses.deadline(app.lambda_context))
    return responses.ok(charge.to_json())


@app.get("/charges")
def find_result() -> Response[str]:
    """Tells the caller what became of one of their own keys."""
    scope = scope_of(gateway.query_values(app.current_event.raw_event, "idempotencyKey"))
    response = idempotency.find(database(), scope, deadline=responses.deadline(app.lambda_context))
    return responses.ok(idempotency.to_json(response))


def scope_of(key: list[str]) -> Scope:
    """Whose key it is."""
    return responses.scope(app, charges.ENDPOINT, key)


def refuse(error: Exception) -> Response[str]:
    """Answers for whatever was raised."""
    return responses.refuse(app, error, service="charges")


app.exception_handler(Exception)(refuse)
app.not_found(lambda _: refuse(errors.NoSuchResource()))
