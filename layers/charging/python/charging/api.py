"""The functions behind API Gateway: from an event to its route, and from what came of it to the answer."""

import contextlib
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from http import HTTPStatus
from typing import TYPE_CHECKING, Any, Concatenate
from uuid import UUID

from charging import contract, errors, gateway, problem, telemetry
from charging.contract import Call, Command, Scope
from charging.gateway import Event, Request, Response
from charging.idempotency import Created, InFlight, KeyReused, Outcome, Refused, Replayed
from charging.problem import Problem
from charging.settings import OperationSettings

if TYPE_CHECKING:  # a type alone, and not worth its import to a cold start
    from aws_lambda_powertools.utilities.typing import LambdaContext

# What answers one kind of request. It is given the ids in the path, in their order there.
type Route = Callable[Concatenate[Request, ...], Response]

# Kept back from the function's time for shaping and sending the answer, whatever the database does.
ANSWER_SECONDS = 0.5
# With less than this left a request that met any obstacle would end as unknown: it is not begun.
DATABASE_SECONDS = 1.0

_OUTCOMES = {
    Created: "created",
    Refused: "refused",
    Replayed: "replayed",
    KeyReused: "payload_conflict",
    InFlight: "in_flight",
}


@dataclass(frozen=True, slots=True)
class Api:
    """A function's routes, each by its method and its path, in which `{id}` stands for an id."""

    service: str
    _routes: dict[str, Route] = field(default_factory=dict, init=False)

    def route[R: Route](self, request_line: str) -> Callable[[R], R]:
        """Has the decorated function answer such requests."""

        def registered(route: R) -> R:
            self._routes[request_line] = route
            return route

        return registered

    def answer(self, event: Event, context: "LambdaContext") -> Event:
        """Answers one request, in whichever of the gateway's shapes it comes. Never raises."""
        request = gateway.request(event, context)
        try:
            route, ids = self._found(request)
            response = route(request, *ids)
        except Exception as error:  # noqa: BLE001 - whatever it is, the caller gets an answer and the log the rest
            response = self._refused(request, error)
        return gateway.shaped(response, event)

    def outcome(self, request: Request, call: Call[Any], outcome: Outcome) -> Response:
        """Counts what became of a request's call under its key, and says so."""
        telemetry.tell(
            self.service,
            _OUTCOMES[type(outcome)],
            about={"request_id": request.context.aws_request_id, "idempotency_key": str(call.scope.key)},
            endpoint=call.scope.endpoint,
        )
        match outcome:
            case Created(stored) | Refused(stored):
                return Response(stored.status, stored.headers, stored.body)
            case Replayed(stored):
                return Response(stored.status, {**stored.headers, "Idempotent-Replayed": "true"}, stored.body)
            case KeyReused() | InFlight():
                return _problem(problem.of(outcome))

    def _found(self, request: Request) -> tuple[Route, list[UUID]]:
        """Returns the request's route and the ids in its path. Raises NoSuchResource."""
        ids: list[str] = contract.ID_SEGMENT.findall(request.path)
        pattern = contract.ID_SEGMENT.sub("{id}", request.path) if ids else request.path
        route = self._routes.get(f"{request.method} {pattern}")
        # The path may have "{id}" written in it.
        if route is None or pattern.count("{id}") != len(ids):
            raise errors.NoSuchResource("No operation has this method and path.")
        return route, [UUID(text) for text in ids]

    def _refused(self, request: Request, error: Exception) -> Response:
        """Answers for whatever was raised."""
        refused = problem.of(error)
        logger = telemetry.logger(self.service)
        found: dict[str, object] = {
            "request_id": request.context.aws_request_id,
            "idempotency_key": _key_for_the_log(request),
        }
        if refused.status == HTTPStatus.INTERNAL_SERVER_ERROR or isinstance(error, errors.DatabaseFault):
            logger.error(refused.code, exc_info=error, extra=found)
        elif refused.status == HTTPStatus.SERVICE_UNAVAILABLE:
            why = {"reason": str(error), "cause": str(error.__cause__)}
            logger.warning(refused.code, extra=found | why)
        else:
            logger.info(refused.code, extra=found)  # without the reason, which quotes what the caller sent
        return _problem(refused)


def call[C: Command](request: Request, endpoint: str, model: type[C], settings: OperationSettings) -> Call[C]:
    """Reads a request for an operation under a key.

    Raises Unauthenticated, what `contract` refuses the key or the body for, and TemporarilyUnavailable where too little
    time is left.
    """
    principal = gateway.principal(request)
    scope = Scope(principal, endpoint, contract.idempotency_key(gateway.header_lines(request, "idempotency-key")))
    return Call(
        scope,
        command(request, model),
        traceparent=contract.traceparent(gateway.header_lines(request, "traceparent")),
        retention_hours=settings.retention_hours,
        in_flight_wait_seconds=settings.in_flight_wait_ms / 1000,
        deadline=deadline(request),
    )


def command[C: Command](request: Request, model: type[C]) -> C:
    """Returns the command in the body. Raises UnsupportedMediaType and what `contract.parse` raises."""
    contract.require_json(gateway.header_lines(request, "content-type"))
    return contract.parse(model, gateway.body(request))


def scope_in_query(request: Request, endpoint: str) -> Scope:
    """Returns the scope of the key that a caller asks about. Raises Unauthenticated, KeyMissing and KeyInvalid."""
    principal = gateway.principal(request)
    return Scope(principal, endpoint, contract.idempotency_key(gateway.query_values(request, "idempotencyKey")))


def deadline(request: Request) -> float:
    """When the database must have answered. Raises TemporarilyUnavailable when there is no use in asking it."""
    left = request.context.get_remaining_time_in_millis() / 1000 - ANSWER_SECONDS
    if left < DATABASE_SECONDS:
        raise errors.TemporarilyUnavailable("too little of the function's time is left to begin")
    return time.monotonic() + left


def ok(body: str, *, status: HTTPStatus = HTTPStatus.OK, headers: Mapping[str, str] | None = None) -> Response:
    """Answers with what was asked for."""
    return Response(status.value, {"Content-Type": "application/json", **(headers or {})}, body)


def _problem(refused: Problem) -> Response:
    """Says why not, and what to do."""
    return Response(
        refused.status, {"Content-Type": problem.CONTENT_TYPE, **problem.headers(refused)}, problem.document(refused)
    )


def _key_for_the_log(request: Request) -> str | None:
    """The key by which an operator finds the request, where it has a well-formed one and a caller."""
    lines = [*gateway.header_lines(request, "idempotency-key"), *gateway.query_values(request, "idempotencyKey")]
    with contextlib.suppress(errors.Refused):
        gateway.principal(request)
        return str(contract.idempotency_key(lines))
    return None
