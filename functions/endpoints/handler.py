"""Webhook endpoints behind API Gateway: wiring only.

A function of its own: it reads the master key of the secrets, for which the charge's path needs neither the right nor
the AWS SDK.
"""

from functools import cache
from http import HTTPStatus
from typing import TYPE_CHECKING, Any
from uuid import UUID

from charging import api, compact, contract, endpoints, errors, gateway, telemetry, vault
from charging.api import Api
from charging.database import Database
from charging.endpoints import Endpoint, EndpointCommand, ResendCommand, RotateCommand
from charging.gateway import Request, Response
from charging.settings import EndpointsSettings, allows_loopback

if TYPE_CHECKING:
    from aws_lambda_powertools.utilities.typing import LambdaContext

API = Api("endpoints")


@cache
def settings() -> EndpointsSettings:
    """The environment, read at the first request."""
    return EndpointsSettings.from_environment()


@cache
def database() -> Database:
    """The connection that this instance keeps between requests."""
    return Database(settings())


def master_key() -> bytes:
    """The master key of the secrets, read whenever a secret is asked for: it may have been replaced since."""
    return vault.read(settings().master_key_arn).encode()


def handler(event: dict[str, Any], context: "LambdaContext") -> dict[str, Any]:
    """Answers one request."""
    return API.answer(event, context)


@API.route("POST /webhook-endpoints")
def create_endpoint(request: Request) -> Response:
    """Creates an endpoint, once for its key."""
    call = api.call(request, endpoints.ENDPOINT, EndpointCommand, settings())
    return API.outcome(request, call, endpoints.create(database(), call, allows_loopback=allows_loopback()))


@API.route("GET /webhook-endpoints")
def list_endpoints(request: Request) -> Response:
    """Shows the caller their endpoints."""
    found = endpoints.find_all(database(), gateway.principal(request), deadline=api.deadline(request))
    return shown({"endpoints": [endpoint.members() for endpoint in found]})


@API.route("GET /webhook-endpoints/{id}")
def read_endpoint(request: Request, endpoint_id: UUID) -> Response:
    """Shows the caller one of their endpoints."""
    return shown(endpoint_of(request, endpoint_id).members())


@API.route("DELETE /webhook-endpoints/{id}")
def delete_endpoint(request: Request, endpoint_id: UUID) -> Response:
    """Deletes one of the caller's endpoints."""
    endpoints.delete(database(), gateway.principal(request), endpoint_id, deadline=api.deadline(request))
    tell("deleted", endpoint_id)
    return Response(HTTPStatus.NO_CONTENT.value, {}, "")


@API.route("GET /webhook-endpoints/{id}/secret")
def read_secret(request: Request, endpoint_id: UUID) -> Response:
    """Shows the caller the secret of one of their endpoints. Nothing that is stored ever holds one."""
    secrets = endpoints.secrets(endpoint_of(request, endpoint_id), master_key())
    return api.ok(compact.json(secrets), headers={"Cache-Control": "no-store"})


@API.route("POST /webhook-endpoints/{id}/rotate-secret")
def rotate_secret(request: Request, endpoint_id: UUID) -> Response:
    """Replaces the secret of one of the caller's endpoints."""
    principal, command = gateway.principal(request), api.command(request, RotateCommand)
    rotated = endpoints.rotate(database(), principal, endpoint_id, command, deadline=api.deadline(request))
    tell("secret_rotated", endpoint_id)
    return shown(rotated.members())


@API.route("POST /webhook-endpoints/{id}/disable")
def disable_endpoint(request: Request, endpoint_id: UUID) -> Response:
    """Holds the deliveries of one of the caller's endpoints."""
    endpoint = endpoints.disable(database(), gateway.principal(request), endpoint_id, deadline=api.deadline(request))
    tell("disabled_by_owner", endpoint_id)
    return shown(endpoint.members())


@API.route("POST /webhook-endpoints/{id}/enable")
def enable_endpoint(request: Request, endpoint_id: UUID) -> Response:
    """Lets the deliveries of one of the caller's endpoints go."""
    endpoint = endpoints.enable(database(), gateway.principal(request), endpoint_id, deadline=api.deadline(request))
    tell("enabled", endpoint_id)
    return shown(endpoint.members())


@API.route("POST /webhook-endpoints/{id}/test")
def test_endpoint(request: Request, endpoint_id: UUID) -> Response:
    """Has a test event sent to one of the caller's endpoints."""
    event_id = endpoints.test(database(), gateway.principal(request), endpoint_id, deadline=api.deadline(request))
    return shown({"eventId": str(event_id)}, HTTPStatus.ACCEPTED)


@API.route("GET /webhook-endpoints/{id}/deliveries")
def list_deliveries(request: Request, endpoint_id: UUID) -> Response:
    """Shows the caller a page of the deliveries of one of their endpoints."""
    principal, before = gateway.principal(request), cursor(request)
    deadline = api.deadline(request)
    return shown(endpoints.find_deliveries(database(), principal, endpoint_id, before=before, deadline=deadline))


@API.route("POST /webhook-endpoints/{id}/deliveries/{id}/resend")
def resend_delivery(request: Request, endpoint_id: UUID, event_id: UUID) -> Response:
    """Has one delivery sent again."""
    endpoints.resend(database(), gateway.principal(request), endpoint_id, event_id, deadline=api.deadline(request))
    return shown({"resent": 1}, HTTPStatus.ACCEPTED)


@API.route("POST /webhook-endpoints/{id}/resend")
def resend_deliveries(request: Request, endpoint_id: UUID) -> Response:
    """Has the deliveries since a time sent again."""
    principal, command = gateway.principal(request), api.command(request, ResendCommand)
    resent = endpoints.resend_since(database(), principal, endpoint_id, command, deadline=api.deadline(request))
    return shown(resent, HTTPStatus.ACCEPTED)


def tell(change: str, endpoint_id: UUID) -> None:
    """Notes what an owner has done to an endpoint, beside what the dispatcher does to it."""
    telemetry.logger("endpoints").info("webhook_endpoint_changed", change=change, endpoint_id=str(endpoint_id))


def endpoint_of(request: Request, endpoint_id: UUID) -> Endpoint:
    """The caller's endpoint."""
    return endpoints.find(database(), gateway.principal(request), endpoint_id, deadline=api.deadline(request))


def cursor(request: Request) -> UUID | None:
    """Where the page begins; None for the first one. Raises InvalidRequest for what no page has said."""
    values = gateway.query_values(request, "cursor")
    if not values:
        return None
    try:
        [value] = values
        return contract.resource_id(value)
    except (ValueError, errors.NoSuchResource):
        raise errors.InvalidRequest(
            [errors.Violation("cursor", "must be the nextCursor of the page before, once")]
        ) from None


def shown(members: dict[str, object], status: HTTPStatus = HTTPStatus.OK) -> Response:
    """Answers with what the API shows."""
    return api.ok(compact.json(members), status=status)
