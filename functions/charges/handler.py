"""Charges behind API Gateway: wiring only."""

import contextlib
import time
from functools import cache
from http import HTTPStatus
from typing import Any

from aws_lambda_powertools.event_handler import APIGatewayRestResolver, Response
from aws_lambda_powertools.utilities.typing import LambdaContext

from charging import charges, contract, errors, gateway, idempotency, problem, telemetry
from charging.contract import ChargeCommand
from charging.database import Database
from charging.idempotency import Created, InFlight, KeyReused, Outcome, Replayed, Scope, StoredResponse
from charging.settings import ChargesSettings

# Kept back from the function's time for shaping and sending the answer, whatever the database does.
ANSWER_SECONDS = 0.5
# With less than this left a charge that met any obstacle would end as unknown: it is not begun.
DATABASE_SECONDS = 1.0

JSON = "application/json"

OUTCOMES = {Created: "created", Replayed: "replayed", KeyReused: "payload_conflict", InFlight: "in_flight"}

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
    scope = scope_of(request, gateway.header_lines(request, "Idempotency-Key"))
    contract.require_json(gateway.header_lines(request, "Content-Type"))
    command = contract.parse(ChargeCommand, gateway.body(request))
    outcome = charges.create(
        database(),
        scope,
        command,
        retention_hours=settings().retention_hours,
        in_flight_wait_seconds=settings().in_flight_wait_ms / 1000,
        traceparent=contract.traceparent(gateway.header_lines(request, "traceparent")),
        deadline=deadline(),
    )
    return answer(outcome, scope)


@app.get("/charges/<charge_id>")
def read_charge(charge_id: str) -> Response[str]:
    """Shows the caller one of their own charges."""
    principal = gateway.principal(app.current_event.raw_event)
    charge = charges.read(database(), principal, contract.resource_id(charge_id), deadline=deadline())
    return Response(HTTPStatus.OK.value, content_type=JSON, body=charge.to_json())


@app.get("/charges")
def find_result() -> Response[str]:
    """Tells the caller what became of one of their own keys."""
    request = app.current_event.raw_event
    scope = scope_of(request, gateway.query_values(request, "idempotencyKey"))
    response = idempotency.find(database(), scope, deadline=deadline())
    return Response(HTTPStatus.OK.value, content_type=JSON, body=idempotency.to_json(response))


def scope_of(request: dict[str, Any], key: list[str]) -> Scope:
    """Whose key it is; remembered for the log line of a refusal."""
    scope = Scope(gateway.principal(request), charges.ENDPOINT, contract.idempotency_key(key))
    app.append_context(scope=scope)  # type: ignore[no-untyped-call]
    return scope


def deadline() -> float:
    """When the database must have answered. Raises TemporarilyUnavailable when there is no use in asking it."""
    left = app.lambda_context.get_remaining_time_in_millis() / 1000 - ANSWER_SECONDS
    if left < DATABASE_SECONDS:
        raise errors.TemporarilyUnavailable("too little of the function's time is left to begin")
    return time.monotonic() + left


def answer(outcome: Outcome, scope: Scope) -> Response[str]:
    """Counts what became of the request and says so."""
    name = OUTCOMES[type(outcome)]
    telemetry.logger("charges").info(name, endpoint=scope.endpoint, idempotency_key=str(scope.key))
    telemetry.emit("Count", {name: 1}, endpoint=scope.endpoint)
    match outcome:
        case Created(response):
            return stored(response)
        case Replayed(response):
            return stored(response, {"Idempotent-Replayed": "true"})
        case KeyReused() | InFlight():
            return refusal(problem.of(outcome))


def stored(response: StoredResponse, more: dict[str, str] | None = None) -> Response[str]:
    """Gives a stored response back as it is, with what tells a replay."""
    return Response(response.status, body=response.body, headers={**response.headers, **(more or {})})


def refusal(refused: problem.Problem) -> Response[str]:
    """Says why not, and what to do."""
    return Response(
        refused.status,
        content_type=problem.CONTENT_TYPE,
        body=problem.document(refused),
        headers=problem.headers(refused),
    )


def refuse(error: Exception) -> Response[str]:
    """Answers for whatever was raised."""
    refused = problem.of(error)
    logger = telemetry.logger("charges")
    scope: Scope | None = app.context.get("scope")
    found: dict[str, object] = {
        "request_id": app.lambda_context.aws_request_id,
        "idempotency_key": str(scope.key) if scope else None,
    }
    if refused.status == HTTPStatus.INTERNAL_SERVER_ERROR or isinstance(error, errors.DatabaseFault):
        logger.error(refused.code, exc_info=error, extra=found)
    elif refused.status == HTTPStatus.SERVICE_UNAVAILABLE:
        why = {"reason": str(error), "cause": str(error.__cause__)}
        logger.warning(refused.code, extra=found | why)
    else:
        logger.info(refused.code, extra=found)  # without the reason, which quotes what the caller sent
    return refusal(refused)


app.exception_handler(Exception)(refuse)
app.not_found(lambda _: refuse(errors.NoSuchResource()))
