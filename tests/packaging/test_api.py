"""The API as the template has it: who gets in, what is logged, and that the function is called by its alias."""

import json
import re
from typing import Any

import pytest

from charging import problem
from local import openapi
from local.openapi_parts import GATEWAYS
from tests.packaging.artifacts import FUNCTIONS, ROOT, TEMPLATE

RESOURCES: dict[str, Any] = TEMPLATE["Resources"]
API = RESOURCES["Api"]["Properties"]
OPERATIONS = {
    (method, path): operation
    for path, operations in API["DefinitionBody"]["paths"].items()
    for method, operation in operations.items()
}


def test_every_operation_wants_to_know_its_caller() -> None:
    """No operation is public, and none has a way of its own to know who calls."""
    assert OPERATIONS
    for operation in OPERATIONS.values():
        [security] = operation["security"]
        assert [*security] == ["Caller"]


def test_a_caller_is_known_by_iam_or_by_a_pools_token() -> None:
    """Whichever it is, the gateway has made sure of it before the function hears of the request."""
    assert [*API["DefinitionBody"]["components"]["securitySchemes"]] == ["Caller"]
    condition, token, signature = API["DefinitionBody"]["components"]["securitySchemes"]["Caller"]["Fn::If"]
    assert condition == "TakesTokens"
    assert token["x-amazon-apigateway-authtype"] == "cognito_user_pools"
    assert token["x-amazon-apigateway-authorizer"] == {
        "type": "cognito_user_pools",
        "providerARNs": [{"Ref": "UserPoolArn"}],
    }
    assert signature["x-amazon-apigateway-authtype"] == "awsSigv4"


def test_no_function_is_reached_past_the_api() -> None:
    """Neither by an address of its own nor by an event that names its own authoriser."""
    for properties in FUNCTIONS.values():
        assert "FunctionUrlConfig" not in properties
        for event in properties.get("Events", {}).values():
            assert event["Type"] in {"ScheduleV2", "SQS"}


def test_the_api_calls_the_version_that_is_live() -> None:
    """The unpublished version of charges is what a deployment is about to try. Endpoints have no other."""
    assert RESOURCES["ApiInvocation"]["Properties"]["FunctionName"] == {"Ref": "ChargesFunction.Alias"}
    assert FUNCTIONS["ChargesFunction"]["AutoPublishAlias"] == "live"
    for (_, path), operation in OPERATIONS.items():
        uri = operation["x-amazon-apigateway-integration"]["uri"]["Fn::Sub"]
        called = "EndpointsFunction.Arn}" if path.startswith("/webhook-endpoints") else "ChargesFunction.Arn}:live"
        assert uri.endswith(f"/functions/${{{called}/invocations")


def test_the_api_has_the_operations_that_are_documented() -> None:
    """No more and no fewer, and each with the parameters of its path."""
    documented = {(method, path) for path, operations in openapi.document()["paths"].items() for method in operations}
    assert {*OPERATIONS} == documented
    for (_, path), operation in OPERATIONS.items():
        assert [parameter["name"] for parameter in operation.get("parameters", [])] == re.findall(r"{(\w+)}", path)


def test_no_stage_is_made_before_the_account_lets_it_write_logs() -> None:
    """API Gateway refuses one otherwise, and whether the role was there first would be chance."""
    _, settings, _ = API["AccessLogSetting"]["Fn::If"]
    condition, waits, _ = settings["DestinationArn"]["Fn::If"]
    assert condition == RESOURCES["ApiAccount"]["Condition"]
    assert waits == {"Fn::Select": [0, [{"Fn::GetAtt": ["ApiLogs", "Arn"]}, {"Ref": "ApiAccount"}]]}


def test_no_more_comes_in_than_the_parameters_let_in() -> None:
    """Of all callers together, on every path: a burst starts functions, and each takes a connection."""
    [everything] = API["MethodSettings"]
    assert (everything["ResourcePath"], everything["HttpMethod"]) == ("/*", "*")
    assert everything["ThrottlingRateLimit"] == {"Ref": "ApiRequestsPerSecond"}
    assert everything["ThrottlingBurstLimit"] == {"Ref": "ApiBurst"}


def test_scopes_are_asked_of_tokens_alone() -> None:
    """A signature has none, and API Gateway would not take the definition."""
    assert {"Condition": "TakesTokens"} in TEMPLATE["Conditions"]["AsksForScopes"]["Fn::And"]


@pytest.mark.parametrize(
    "secret", ["body", "querystring", "requestOverride", "path}", "identity", "authorizer", "header", "$context.path"]
)
def test_access_logs_tell_nothing_of_the_caller_or_the_request(secret: str) -> None:
    """A query may hold a key, and a path an id: the log names the resource and the outcome."""
    _, settings, _ = API["AccessLogSetting"]["Fn::If"]
    assert secret not in settings["Format"]
    assert all("DataTraceEnabled" not in method and "LoggingLevel" not in method for method in API["MethodSettings"])


@pytest.mark.parametrize("kind", API["GatewayResponses"])
def test_what_the_gateway_answers_by_itself_is_a_problem_like_the_services_own(kind: str) -> None:
    """The code is on the page and in the API's description, with the status and the advice that it has there."""
    response = API["GatewayResponses"][kind]
    text = response["ResponseTemplates"]["application/json"].replace("$context.error.messageString", '"why"')
    told = json.loads(text)
    assert response["ResponseParameters"]["Headers"]["Content-Type"] == f"'{problem.CONTENT_TYPE}'"
    assert told["type"] == problem.TYPE + told["code"]
    assert f"\n## {told['code']}\n" in (ROOT / "docs" / "problems.md").read_text()
    assert told.get("status") == response.get("StatusCode")
    [own] = [one for one in {*problem.PROBLEMS.values(), *GATEWAYS} if one.code == told["code"]]
    assert (told["title"], told["retrySameKey"]) == (own.title, own.retry_same_key)
    assert told.get("status", own.status) == own.status


def test_whoever_may_have_charged_is_told_to_send_the_same_again() -> None:
    """Also where the gateway gave the function up, or did not ask it: another key could charge twice."""
    for kind, status in (("DEFAULT_5XX", 503), ("THROTTLED", 429)):
        response = API["GatewayResponses"][kind]
        assert response["StatusCode"] == status
        assert "Retry-After" in response["ResponseParameters"]["Headers"]
        assert '"retrySameKey":true' in response["ResponseTemplates"]["application/json"]


def test_nothing_stands_beside_a_domain_of_ones_own() -> None:
    """A firewall or a certificate before the one is no use when the other is open."""
    assert API["DisableExecuteApiEndpoint"]["Fn::If"] == ["HasDomain", True, False]
    assert RESOURCES["ApiDomain"]["Properties"]["SecurityPolicy"] == "TLS_1_2"
