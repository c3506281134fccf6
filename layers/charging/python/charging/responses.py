"""What the functions behind API Gateway share: the time they have, whose key a request has, and what they answer."""

import time
from http import HTTPStatus
from typing import Any

from aws_lambda_powertools.event_handler import APIGatewayRestResolver, Response
from aws_lambda_powertools.utilities.typing import LambdaContext

from charging import contract, errors, gateway, problem, telemetry
from charging.idempotency import Created, InFlight, KeyReused, Outcome, Replayed, Scope, StoredResponse

# Kept back from the function's time for shaping and sending the answer, whatever the database does.
ANSWER_SECONDS = 0.5
# With less than this left a request that met any obstacle would end as unknown: it is not begun.
DATABASE_SECONDS = 1.0

_JSON = "application/json"
_OUTCOMES = {Created: "created", Replayed: "replayed", KeyReused: "payload_conflict", InFlight: "in_flight"}


def deadline(context: LambdaContext) -> float:
    """When the database must have answered. Raises TemporarilyUnavailable when there is no use in asking it."""
    left = context.get_remaining_time_in_millis() / 1000 - ANSWER_SECONDS
    if left < DATABASE_SECONDS:
        raise errors.TemporarilyUnavailable("too little of the function's time is left to begin")
    return time.monotonic() + left


def scope(app: APIGatewayRestResolver, endpoint: str, key: list[str]) -> Scope:
    """Whose key it is; remembered for the log line of a refusal."""
    found = Scope(gateway.principal(app.current_event.raw_event), endpoint, contract.idempotency_key(key))
    app.append_context(scope=found)  # type: ignore[no-untyped-call]
    return found


def ok(body: str, *, status: int = HTTPStatus.OK.value, headers: dict[str, Any] | None = None) -> Response[str]:
    """Answers with what was asked for."""
    return Response(status, content_type=_JSON, body=body, headers=headers)


def of(outcome: Outcome, scope: Scope, *, service: str) -> Response[str]:
    """Counts what became of a request under a key, and says so."""
    name = _OUTCOMES[type(outcome)]
    telemetry.logger(service).info(name, endpoint=scope.endpoint, idempotency_key=str(scope.key))
    telemetry.emit("Count", {name: 1}, endpoint=scope.endpoint)
    match outcome:
        case Created(response):
            return _stored(response)
        case Replayed(response):
            return _stored(response, {"Idempotent-Replayed": "true"})
        case KeyReused() | InFlight():
            return _refusal(problem.of(outcome))


def refuse(app: APIGatewayRestResolver, error: Exception, *, service: str) -> Response[str]:
    """Answers for whatever was raised."""
    refused = problem.of(error)
    logger = telemetry.logger(service)
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
    return _refusal(refused)


def _stored(response: StoredResponse, more: dict[str, str] | None = None) -> Response[str]:
    """Gives a stored response back as it is, with what tells a replay."""
    return Response(response.status, body=response.body, headers={**response.headers, **(more or {})})


def _refusal(refused: problem.Problem) -> Response[str]:
    """Says why not, and what to do."""
    return Response(
        refused.status,
        content_type=problem.CONTENT_TYPE,
        body=problem.document(refused),
        headers=problem.headers(refused),
    )
