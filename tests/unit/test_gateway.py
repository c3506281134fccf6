"""The gateway's shapes: one request, however it is delivered, and a principal by the gateway's word alone."""

import base64
import json
from typing import Any

import pytest

from charging import errors, gateway
from charging.gateway import Request, Response
from tests.support.invocation import Context, Event, sample

KEY = "8e03978e-40d5-43e8-bc93-6894a57f9324"
BODY = {"amountCents": 4900, "currency": "EUR", "reference": "order 1042"}
SHAPES = ["charge-rest", "charge-http-api", "charge-load-balancer", "charge-sam-local", "charge-emulator"]
ACCOUNT = "111122223333"


def request(event: Event) -> Request:
    return gateway.request(event, Context())


def key_lines(event: Event) -> list[str]:
    return list(gateway.header_lines(request(event), "idempotency-key"))


def content(event: Event) -> bytes:
    return gateway.body(request(event))


@pytest.mark.parametrize("name", SHAPES)
def test_every_shape_says_the_same_of_a_request(name: str) -> None:
    """Method, path, key, media type and body are found in each gateway's sample event."""
    found = request(sample(name))
    assert (found.method, found.path) == ("POST", "/charges")
    assert gateway.header_lines(found, "idempotency-key") == [KEY]
    assert gateway.header_lines(found, "content-type") == ["application/json"]
    assert json.loads(gateway.body(found)) == BODY


@pytest.mark.parametrize("spelling", ["Idempotency-Key", "idempotency-key", "IDEMPOTENCY-KEY", "iDEMPOTENCY-kEY"])
@pytest.mark.parametrize("maps", ["both", "headers", "multiValueHeaders"])
def test_a_header_is_found_under_any_spelling_in_either_map(spelling: str, maps: str) -> None:
    """Its line is found once, also where both maps have it or the other one is null."""
    headers, lists = {spelling: KEY}, {spelling: [KEY]}
    event = {
        "headers": headers if maps != "multiValueHeaders" else None,
        "multiValueHeaders": lists if maps != "headers" else None,
    }
    assert key_lines(event) == [KEY]


@pytest.mark.parametrize(
    "event",
    [
        {"headers": {"idempotency-key": "two"}, "multiValueHeaders": {"Idempotency-Key": ["one", "two"]}},
        {"headers": None, "multiValueHeaders": {"Idempotency-Key": ["one"], "idempotency-key": ["two"]}},
        {"headers": {"Idempotency-Key": "one", "idempotency-key": "two"}, "multiValueHeaders": None},
    ],
)
def test_no_line_of_a_repeated_header_is_lost(event: Event) -> None:
    """A key sent twice shows as two lines, whichever map and spelling they stand in."""
    assert sorted(key_lines(event)) == ["one", "two"]


@pytest.mark.parametrize("maps", [{}, {"headers": None, "multiValueHeaders": None}, {"headers": {}}, {"headers": []}])
def test_an_event_without_headers_has_none(maps: Event) -> None:
    """Absent, null, empty or no map at all: no lines, and no error."""
    assert key_lines(maps) == []


@pytest.mark.parametrize(
    ("path", "stage", "expected"),
    [
        ("/charges", "prod", "/charges"),
        ("/prod/charges", "prod", "/charges"),
        ("/prod/charges/", "prod", "/charges"),
        ("/charges/", None, "/charges"),
        ("/charges//", None, "/charges"),
        ("/prod", "prod", "/"),
        ("/", None, "/"),
        ("", None, "/"),
        ("/production/charges", "prod", "/production/charges"),
        ("/$default/charges", "$default", "/charges"),
        ("/prod/prod/charges", "prod", "/prod/charges"),
    ],
)
def test_a_path_loses_its_stage_and_trailing_slash_once(path: str, stage: str | None, expected: str) -> None:
    """The stage is a whole first segment or none."""
    event = {"rawPath": path, "requestContext": {"stage": stage}}
    assert request(event).path == expected
    assert request({"path": path, "requestContext": {"stage": stage}}).path == expected


@pytest.mark.parametrize(
    ("path", "route", "expected"),
    [
        ("/payments/charges", "/charges", "/charges"),
        ("/payments/v1/charges/7/", "/charges/{charge_id}", "/charges/7"),
        ("/charges/charges/charges", "/charges/{charge_id}", "/charges/charges"),
        ("/charges", "/charges", "/charges"),
        ("/payments/v1/charges", "/{proxy+}", "/payments/v1/charges"),
        ("/payments/receipts", "/charges", "/payments/receipts"),
        ("/charges", "/charges/{charge_id}", "/charges"),
        ("/payments/charges", "", "/payments/charges"),
    ],
)
def test_a_path_loses_the_base_path_of_a_domain(path: str, route: str, expected: str) -> None:
    """What the gateway matched with its route is the request's path, whatever a mapping has put before it."""
    assert request({"path": path, "resource": route, "requestContext": {}}).path == expected
    v2 = {"version": "2.0", "rawPath": path, "routeKey": f"GET {route}" if route else "$default", "requestContext": {}}
    assert request(v2).path == expected


def test_a_stage_that_is_named_like_a_path_is_not_taken_from_it() -> None:
    """A REST event's path has no stage in it; its context has the whole path, with the stage."""
    context = {"stage": "charges", "path": "/charges/charges/7"}
    assert request({"path": "/charges/7", "requestContext": context}).path == "/charges/7"


@pytest.mark.parametrize(
    ("fields", "expected"),
    [
        ({"body": "{}"}, b"{}"),
        ({"body": "{}", "isBase64Encoded": False}, b"{}"),
        ({"body": "{}", "isBase64Encoded": None}, b"{}"),
        ({"body": base64.b64encode(b"\xff\x00").decode(), "isBase64Encoded": True}, b"\xff\x00"),
        ({"body": "", "isBase64Encoded": True}, b""),
        ({"body": None, "isBase64Encoded": True}, b""),
        ({"body": None}, b""),
        ({}, b""),
        ({"body": {"amountCents": 1}}, b""),
        ({"body": "\u00e9"}, "\u00e9".encode()),
    ],
)
def test_a_body_is_its_bytes(fields: Event, expected: bytes) -> None:
    """Base64 is undone where the event says so, and only there; no body is an empty one."""
    assert content(fields) == expected


@pytest.mark.parametrize("text", ["e30", "e30=e30=", "e3 0=", "e30=\n", "{}", "e30\u00e9", "====", "\ud800"])
def test_broken_base64_is_an_invalid_request(text: str) -> None:
    """Nothing is guessed from what cannot be decoded."""
    with pytest.raises(errors.InvalidRequest):
        content({"body": text, "isBase64Encoded": True})


@pytest.mark.parametrize(
    ("event", "is_single"),
    [
        ({"version": "2.0"}, True),
        ({"version": "1.0"}, False),
        ({}, False),
        ({"requestContext": {"elb": {}}, "headers": {}}, True),
        ({"requestContext": {"elb": {}}, "multiValueHeaders": {}}, False),
    ],
)
def test_an_answer_has_the_shape_that_its_gateway_reads(event: Event, is_single: bool) -> None:
    """Payload 2.0 and a plain load balancer read single values; REST and a multi-value load balancer read lists."""
    shaped = gateway.shaped(Response(201, {"Location": "/charges/1"}, "{}"), event)
    assert (shaped["statusCode"], shaped["body"]) == (201, "{}")
    if is_single:
        assert shaped["headers"] == {"Location": "/charges/1"}
        assert "multiValueHeaders" not in shaped
    else:
        assert shaped["multiValueHeaders"] == {"Location": ["/charges/1"]}


def principal(**context: Any) -> str:
    return gateway.principal(request({"requestContext": context}))


@pytest.mark.parametrize(
    ("context", "expected"),
    [
        ({"authorizer": {"principalId": "alice"}}, "alice"),
        ({"authorizer": {"claims": {"sub": "user-1", "email": "a@example.com"}}}, "user-1"),
        ({"authorizer": {"jwt": {"claims": {"sub": "user-2"}, "scopes": None}}}, "user-2"),
        ({"authorizer": {"lambda": {"principalId": "bob"}}}, "bob"),
        (
            {"authorizer": {"iam": {"userArn": f"arn:aws:iam::{ACCOUNT}:user/carol"}}},
            f"arn:aws:iam::{ACCOUNT}:user/carol",
        ),
        ({"identity": {"userArn": f"arn:aws:iam::{ACCOUNT}:user/carol"}}, f"arn:aws:iam::{ACCOUNT}:user/carol"),
        ({"identity": {"userArn": f"arn:aws:iam::{ACCOUNT}:root"}}, f"arn:aws:iam::{ACCOUNT}:root"),
        (
            {"identity": {"userArn": f"arn:aws:sts::{ACCOUNT}:federated-user/dave"}},
            f"arn:aws:sts::{ACCOUNT}:federated-user/dave",
        ),
        ({"identity": {"cognitoIdentityId": "eu-central-1:0a1b"}}, "eu-central-1:0a1b"),
    ],
)
def test_the_principal_is_whoever_the_gateway_vouches_for(context: Event, expected: str) -> None:
    """A Lambda, Cognito or JWT authorizer's subject, or the identity that signed the request."""
    assert principal(**context) == expected


@pytest.mark.parametrize("partition", ["aws", "aws-cn", "aws-us-gov"])
@pytest.mark.parametrize("where", ["identity", "iam"])
def test_an_assumed_role_is_one_caller_in_all_its_sessions(partition: str, where: str) -> None:
    """A retry arrives under a new session name. Roles are still told apart, and so are accounts."""

    def caller(account: str, role: str, session: str) -> str:
        arn = {"userArn": f"arn:{partition}:sts::{account}:assumed-role/{role}/{session}"}
        return principal(**({"identity": arn} if where == "identity" else {"authorizer": {"iam": arn}}))

    assert caller(ACCOUNT, "checkout", "one") == caller(ACCOUNT, "checkout", "i-0a@x=,.")
    assert caller(ACCOUNT, "checkout", "one") == f"arn:{partition}:sts::{ACCOUNT}:assumed-role/checkout"
    assert caller(ACCOUNT, "checkout", "one") != caller(ACCOUNT, "refunds", "one")
    assert caller(ACCOUNT, "checkout", "one") != caller("444455556666", "checkout", "one")


def test_cognito_users_of_one_role_are_different_callers() -> None:
    """An identity pool gives all its users the same role, and often the same session name."""
    role = f"arn:aws:sts::{ACCOUNT}:assumed-role/pool/CognitoIdentityCredentials"
    rest = {
        principal(identity={"cognitoIdentityId": f"eu-central-1:{user}", "userArn": role}) for user in ("one", "two")
    }
    http = {
        principal(authorizer={"iam": {"cognitoIdentity": {"identityId": f"eu-central-1:{user}"}, "userArn": role}})
        for user in ("one", "two")
    }
    assert rest == http == {"eu-central-1:one", "eu-central-1:two"}


def test_an_authorizer_is_believed_before_the_identity() -> None:
    """Where both speak, the authorizer has seen the credentials and decided."""
    arn = f"arn:aws:iam::{ACCOUNT}:user/carol"
    assert principal(authorizer={"principalId": "alice"}, identity={"userArn": arn}) == "alice"


@pytest.mark.parametrize(
    "context",
    [
        {},
        {"authorizer": None, "identity": None},
        {"authorizer": {}, "identity": {}},
        {"authorizer": {"principalId": ""}},
        {"authorizer": {"principalId": None}},
        {"authorizer": {"principalId": 42}},
        {"authorizer": {"principalId": ["alice"]}},
        {"authorizer": "alice"},
        {"authorizer": {"claims": "alice"}},
        {"authorizer": {"claims": {"email": "a@example.com", "username": "alice"}}},
        {"authorizer": {"jwt": {"claims": None}}},
        {"identity": {"sourceIp": "198.51.100.7", "apiKey": "k", "accountId": ACCOUNT, "user": "u", "caller": "c"}},
        {"authorizer": {"principalId": "a\0b"}},
        {"authorizer": {"principalId": "a\nb"}},
        {"authorizer": {"principalId": "\ud800"}},
        {"authorizer": {"principalId": "x" * 1025}},
        {"authorizer": {"principalId": "\u00e9" * 513}},
    ],
)
def test_without_a_principal_there_is_no_request(context: Event) -> None:
    """There is no anonymous caller, no guess, and no name that could not be stored."""
    with pytest.raises(errors.Unauthenticated):
        principal(**context)


def test_headers_query_and_body_name_nobody() -> None:
    """A caller writes these, so they vouch for nothing; a load balancer's identity headers are among them."""
    names = ("X-Local-Principal", "X-Principal", "Authorization", "x-amzn-oidc-identity", "principalId", "principal")
    event = sample("charge-load-balancer")
    event["headers"] |= dict.fromkeys(names, "mallory")
    event["multiValueHeaders"] = {name: ["mallory"] for name in names}
    event["queryStringParameters"] = dict.fromkeys(names, "mallory")
    event["body"] = json.dumps(dict.fromkeys(names, "mallory"))
    event["principalId"] = event["identity"] = "mallory"
    event["authorizer"] = {"principalId": "mallory"}
    with pytest.raises(errors.Unauthenticated):
        gateway.principal(request(event))
