"""Webhook endpoints behind API Gateway: wiring only.

A function of its own: it reads the master key of the secrets, for which the charge's path needs neither the right nor
the AWS SDK.
"""

from functools import cache
from http import HTTPStatus
from typing import Any
from uuid import UUID

from aws_lambda_powertools.event_handler import APIGatewayRestResolver, Response
from aws_lambda_powertools.utilities.typing import LambdaContext

from charging import contract, endpoints, errors, gateway, responses, vault
from charging.contract import Command
from charging.database import Database
from charging.endpoints import Endpoint, EndpointCommand, ResendCommand, RotateCommand
from charging.settings import EndpointsSettings, allows_loopback

PATH = "/webhook-endpoints"
ONE = f"{PATH}/<endpoint_id>"

app = APIGatewayRestResolver()


@cache
def settings() -> EndpointsSettings:
    """The environment, read at the first request."""
    return EndpointsSettings.from_environment()


@cache
def database() -> Database:
    """The connection that this instance keeps between requests."""
    return Database(settings())


@cache
def master_key() -> bytes:
    """The master key of the secrets, read when a secret is asked for."""
    return vault.read(settings().master_key_arn).encode()


def handler(event: dict[str, Any], context: LambdaContext) -> dict[str, Any]:
    """Answers one request, in whichever of the gateway's shapes it comes."""
    return gateway.response_for(event, app.resolve(gateway.rest_event(event), context))


@app.post(PATH)
def create_endpoint() -> Response[str]:
    """Creates an endpoint, once for its key."""
    request = app.current_event.raw_event
    scope = responses.scope(app, endpoints.ENDPOINT, gateway.header_lines(request, "Idempotency-Key"))
    outcome = endpoints.create(
        database(),
        scope,
        command_of(EndpointCommand),
        retention_hours=settings().retention_hours,
        allows_loopback=allows_loopback(),
        deadline=deadline(),
    )
    return responses.of(outcome, scope, service="endpoints")


@app.get(PATH)
def list_endpoints() -> Response[str]:
    """Shows the caller their endpoints."""
    found = endpoints.find_all(database(), principal(), deadline=deadline())
    return shown({"endpoints": [endpoint.members() for endpoint in found]})


@app.get(ONE)
def read_endpoint(endpoint_id: str) -> Response[str]:
    """Shows the caller one of their endpoints."""
    return shown(endpoint_of(endpoint_id).members())


@app.delete(ONE)
def delete_endpoint(endpoint_id: str) -> Response[str]:
    """Deletes one of the caller's endpoints."""
    endpoints.delete(database(), principal(), contract.resource_id(endpoint_id), deadline=deadline())
    return Response(HTTPStatus.NO_CONTENT.value, body="")


@app.get(f"{ONE}/secret")
def read_secret(endpoint_id: str) -> Response[str]:
    """Shows the caller the secret of one of their endpoints. Nothing that is stored ever holds one."""
    secrets = endpoints.secrets(endpoint_of(endpoint_id), master_key())
    return responses.ok(endpoints.to_json(secrets), headers={"Cache-Control": "no-store"})


@app.post(f"{ONE}/rotate-secret")
def rotate_secret(endpoint_id: str) -> Response[str]:
    """Replaces the secret of one of the caller's endpoints."""
    caller, found, command = principal(), contract.resource_id(endpoint_id), command_of(RotateCommand)
    return shown(endpoints.rotate(database(), caller, found, command, deadline=deadline()).members())


@app.post(f"{ONE}/disable")
def disable_endpoint(endpoint_id: str) -> Response[str]:
    """Holds the deliveries of one of the caller's endpoints."""
    found = contract.resource_id(endpoint_id)
    return shown(endpoints.disable(database(), principal(), found, deadline=deadline()).members())


@app.post(f"{ONE}/enable")
def enable_endpoint(endpoint_id: str) -> Response[str]:
    """Lets the deliveries of one of the caller's endpoints go."""
    found = contract.resource_id(endpoint_id)
    return shown(endpoints.enable(database(), principal(), found, deadline=deadline()).members())


@app.post(f"{ONE}/test")
def test_endpoint(endpoint_id: str) -> Response[str]:
    """Has a test event sent to one of the caller's endpoints."""
    found = contract.resource_id(endpoint_id)
    event_id = endpoints.test(database(), principal(), found, deadline=deadline())
    return shown({"eventId": str(event_id)}, HTTPStatus.ACCEPTED)


@app.get(f"{ONE}/deliveries")
def list_deliveries(endpoint_id: str) -> Response[str]:
    """Shows the caller a page of the deliveries of one of their endpoints."""
    caller, found = principal(), contract.resource_id(endpoint_id)
    before = cursor(gateway.query_values(app.current_event.raw_event, "cursor"))
    return shown(endpoints.find_deliveries(database(), caller, found, before=before, deadline=deadline()))


@app.post(f"{ONE}/deliveries/<event_id>/resend")
def resend_delivery(endpoint_id: str, event_id: str) -> Response[str]:
    """Has one delivery sent again."""
    caller, found = principal(), contract.resource_id(endpoint_id)
    endpoints.resend(database(), caller, found, contract.resource_id(event_id), deadline=deadline())
    return shown({"resent": 1}, HTTPStatus.ACCEPTED)


@app.post(f"{ONE}/resend")
def resend_deliveries(endpoint_id: str) -> Response[str]:
    """Has the deliveries since a time sent again."""
    caller, found, command = principal(), contract.resource_id(endpoint_id), command_of(ResendCommand)
    return shown(endpoints.resend_since(database(), caller, found, command, deadline=deadline()), HTTPStatus.ACCEPTED)


def principal() -> str:
    """Who is calling."""
    return gateway.principal(app.current_event.raw_event)


def deadline() -> float:
    """When the database must have answered."""
    return responses.deadline(app.lambda_context)


def endpoint_of(endpoint_id: str) -> Endpoint:
    """The caller's endpoint."""
    return endpoints.find(database(), principal(), contract.resource_id(endpoint_id), deadline=deadline())


def command_of[C: Command](model: type[C]) -> C:
    """The command in the body."""
    request = app.current_event.raw_event
    contract.require_json(gateway.header_lines(request, "Content-Type"))
    return contract.parse(model, gateway.body(request))


def cursor(values: list[str]) -> UUID | None:
    """Where the page begins; None for the first one. Raises InvalidRequest for what no page has said."""
    if not values:
        return None
    try:
        [value] = values
        return contract.resource_id(value)
    except (ValueError, errors.NoSuchResource):
        raise errors.InvalidRequest(
            [errors.Violation("cursor", "must be the nextCursor of the page before, once")]
        ) from None


def shown(members: dict[str, object], status: HTTPStatus = HTTPStatus.OK) -> Response[str]:
    """Answers with what the API shows."""
    return responses.ok(endpoints.to_json(members), status=status.value)


def refuse(error: Exception) -> Response[str]:
    """Answers for whatever was raised."""
    return responses.refuse(app, error, service="endpoints")


app.exception_handler(Exception)(refuse)
app.not_found(lambda _: refuse(errors.NoSuchResource()))
