"""One HTTP request, as each gateway tells a function of it."""

import base64
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

from tests.support.invocation import Event, sample


@dataclass(frozen=True, slots=True)
class Request:
    """An HTTP request: its header lines in their order, and who the gateway has found to be calling."""

    method: str
    path: str
    query: dict[str, str]
    headers: list[tuple[str, str]]
    body: bytes | None
    principal: str | None


def rest(request: Request) -> Event:
    """REST API, payload 1.0: header names as they were sent, every line in one map and the last one in the other."""
    event = _rest(sample("charge-rest"), request)
    lines: dict[str, list[str]] = {}
    for name, value in request.headers:
        lines.setdefault(name, []).append(value)
    return event | {"multiValueHeaders": lines, "headers": {name: values[-1] for name, values in lines.items()}}


def rest_lists_alone(request: Request) -> Event:
    """The same with nothing in the map of single values."""
    return rest(request) | {"headers": None}


def emulator(request: Request) -> Event:
    """The local emulator: lower-case names, and the lines of a header joined by commas in both maps."""
    joined = _joined(request)
    return _rest(sample("charge-emulator"), request) | {
        "headers": joined,
        "multiValueHeaders": {name: [value] for name, value in joined.items()},
    }


def sam_local(request: Request) -> Event:
    """`sam local start-api`, with an authorizer before the function."""
    return rest(request) | {
        "requestContext": sample("charge-sam-local")["requestContext"] | {"authorizer": _authorizer(request)}
    }


def http_api(request: Request) -> Event:
    """HTTP API, payload 2.0: lower-case names, lines joined by commas, the stage in the path, the body in base64."""
    event = sample("charge-http-api")
    event["requestContext"]["http"] |= {"method": request.method, "path": f"/prod{request.path}"}
    event["requestContext"]["authorizer"] = (
        {} if request.principal is None else {"jwt": {"claims": {"sub": request.principal}}}
    )
    return event | {
        "rawPath": f"/prod{request.path}",
        "headers": _joined(request),
        "queryStringParameters": request.query,
        "body": None if request.body is None else base64.b64encode(request.body).decode(),
        "isBase64Encoded": request.body is not None,
    }


SHAPES: dict[str, Callable[[Request], Event]] = {
    shape.__name__: shape for shape in (rest, rest_lists_alone, emulator, sam_local, http_api)
}


def _rest(event: Event, request: Request) -> Event:
    event["requestContext"]["authorizer"] = _authorizer(request)
    event["requestContext"].get("identity", {}).update({"userArn": None})
    return event | {
        "httpMethod": request.method,
        "path": request.path,
        "queryStringParameters": request.query or None,
        "multiValueQueryStringParameters": {name: [value] for name, value in request.query.items()} or None,
        **_body(request.body),
    }


def _authorizer(request: Request) -> dict[str, Any] | None:
    return None if request.principal is None else {"principalId": request.principal}


def _body(body: bytes | None) -> Event:
    if body is None:
        return {"body": None, "isBase64Encoded": False}
    try:
        return {"body": body.decode(), "isBase64Encoded": False}
    except UnicodeDecodeError:
        return {"body": base64.b64encode(body).decode(), "isBase64Encoded": True}


def _joined(request: Request) -> dict[str, str]:
    joined: dict[str, str] = {}
    for name, value in request.headers:
        key = name.lower()
        joined[key] = f"{joined[key]},{value}" if key in joined else value
    return joined
