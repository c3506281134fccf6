"""API Gateway's shapes: what an event says of the request, whoever sent it, and who the gateway vouches for.

Takes REST (payload 1.0), HTTP API (payload 2.0) and load balancer events, and turns each into one kind of request, so
that behind this module there is one shape only.
"""

import base64
import binascii
import re
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any

from charging import errors

if TYPE_CHECKING:  # a type alone, and not worth its import to a cold start
    from aws_lambda_powertools.utilities.typing import LambdaContext

type Event = dict[str, Any]

# The database bounds it too. IAM's longest ARN has some 620 characters.
PRINCIPAL_BYTES = 1024

_ASSUMED_ROLE = re.compile(r"(arn:[^:]+:sts::[0-9]{12}:assumed-role/[^/]+)/.*", re.DOTALL)


@dataclass(frozen=True, slots=True)
class Request:
    """One request: its path is without stage and trailing slash, its header names are in lower case.

    `event` is what it was read from, for what is asked of it later; `context` knows how much time is left.
    """

    method: str
    path: str
    headers: Mapping[str, Sequence[str]]
    event: Event
    context: "LambdaContext"


@dataclass(frozen=True, slots=True)
class Response:
    """What is answered, before it takes the shape that the gateway reads."""

    status: int
    headers: Mapping[str, str]
    body: str


def request(event: Event, context: "LambdaContext") -> Request:
    """Returns the request in an event; one for an unknown path where no request can be read."""
    gateway = _mapping(event.get("requestContext"))
    method = _text(event.get("httpMethod")) or _text(_mapping(gateway.get("http")).get("method"))
    return Request(method, _path(event, gateway), _header_lines(event), event, context)


def shaped(response: Response, event: Event) -> Event:
    """Returns the response in the shape that the event's sender reads.

    REST and load balancers with multi-value headers take header lists; payload 2.0 and plain load balancers take
    single values, and no header of ours has more than one.
    """
    answer: Event = {"statusCode": response.status, "body": response.body, "isBase64Encoded": False}
    if event.get("version") == "2.0" or ("elb" in _mapping(event.get("requestContext")) and "headers" in event):
        return answer | {"headers": dict(response.headers)}
    return answer | {"multiValueHeaders": {name: [value] for name, value in response.headers.items()}}


def header_lines(request: Request, name: str) -> Sequence[str]:
    """Returns every line of a header, named in lower case; none when it was not sent."""
    return request.headers.get(name, ())


def query_values(request: Request, name: str) -> Sequence[str]:
    """Returns every value of a query parameter; none when it was not sent."""
    values = _mapping(request.event.get("multiValueQueryStringParameters")).get(name)
    if not isinstance(values, list):
        values = [_mapping(request.event.get("queryStringParameters")).get(name)]
    return [value for value in values if isinstance(value, str)]


def body(request: Request) -> bytes:
    """Returns the body's bytes; empty when there is none. Raises InvalidRequest for what is not really base64."""
    content = request.event.get("body")
    if not isinstance(content, str):
        return b""
    if request.event.get("isBase64Encoded") is True:
        try:
            return base64.b64decode(content, validate=True)
        except (binascii.Error, ValueError):
            raise errors.InvalidRequest([errors.Violation("", "must be base64, as its event says it is")]) from None
    # Half a surrogate pair becomes bytes that are not UTF-8, and is refused as such where the body is parsed.
    return content.encode("utf-8", "surrogatepass")


def principal(request: Request) -> str:
    """Returns who is calling, by the gateway's word alone: never by a header, a query or the body.

    An authorizer's verdict comes first, then the IAM identity. A Cognito identity stands before the role that
    it shares with every other user of its pool. An assumed role is itself without the session's name, since a
    retry arrives under a new one. Raises Unauthenticated where the gateway names nobody.
    """
    context = _mapping(request.event.get("requestContext"))
    authorizer = _mapping(context.get("authorizer"))
    identity = _mapping(context.get("identity"))
    iam = _mapping(authorizer.get("iam"))
    candidates = (
        authorizer.get("principalId"),
        _mapping(authorizer.get("claims")).get("sub"),
        _mapping(_mapping(authorizer.get("jwt")).get("claims")).get("sub"),
        _mapping(authorizer.get("lambda")).get("principalId"),
        _mapping(iam.get("cognitoIdentity")).get("identityId"),
        iam.get("userArn"),
        identity.get("cognitoIdentityId"),
        identity.get("userArn"),
    )
    for candidate in candidates:
        if isinstance(candidate, str) and candidate:
            return _normalised(candidate)
    raise errors.Unauthenticated("The gateway's request context names no principal.")


def _normalised(name: str) -> str:
    if assumed := _ASSUMED_ROLE.fullmatch(name):
        name = assumed[1]
    if not name.isprintable() or len(name.encode()) > PRINCIPAL_BYTES:
        raise errors.Unauthenticated("The principal that the gateway names cannot be one.")
    return name


def _header_lines(event: Event) -> dict[str, list[str]]:
    """Collects each header's lines, under any spelling of its name, from the map that has them all."""
    lines: dict[str, list[str]] = {}
    for name, values in _mapping(event.get("multiValueHeaders")).items():
        if isinstance(values, list) and (texts := [value for value in values if isinstance(value, str)]):
            lines.setdefault(name.lower(), []).extend(texts)
    several = frozenset(lines)
    for name, value in _mapping(event.get("headers")).items():
        if isinstance(value, str) and (lower := name.lower()) not in several:
            lines.setdefault(lower, []).append(value)
    return lines


def _path(event: Event, context: Mapping[str, Any]) -> str:
    """Reads the path without what stands before it: the stage, or the base path of a domain of one's own."""
    path = _text(event.get("rawPath")) or _text(event.get("path"))
    if routed := _routed(path, event):
        return routed
    whole = _text(_mapping(context.get("http")).get("path")) or _text(context.get("path")) or path
    stage = _text(context.get("stage"))
    if stage and path == whole and f"{path}/".startswith(f"/{stage}/"):
        path = path.removeprefix(f"/{stage}")
    return path.rstrip("/") or "/"


def _routed(path: str, event: Event) -> str:
    """Returns the end of the path that the gateway has matched with the route that it names; empty where there is none.

    A segment in braces matches any one segment. A greedy one, {proxy+}, says nothing of where the path begins.
    """
    route = _text(event.get("resource")) or _text(event.get("routeKey")).partition(" ")[2]
    if route == path and "{" not in route:
        return path
    pattern = route.strip("/").split("/")
    segments = path.strip("/").split("/")[-len(pattern) :]
    matches = len(segments) == len(pattern) and all(
        segment if wanted.startswith("{") else segment == wanted
        for wanted, segment in zip(pattern, segments, strict=True)
    )
    return "/" + "/".join(segments) if matches and route and "+" not in route else ""


def _mapping(value: object) -> dict[str, Any]:
    return value if isinstance(value, dict) else {}


def _text(value: object) -> str:
    return value if isinstance(value, str) else ""
