"""Least privilege: every statement of every role in the transformed template, with a reason for each that is wide.

What is here is what an account would have: the roles that SAM makes, and the policies that it adds, among them.
"""

import functools
import json
import os
from collections.abc import Iterator
from typing import Any, NamedTuple
from unittest import mock

import pytest
from samtranslator.translator.transform import transform

from tests.packaging.artifacts import FUNCTIONS, ROOT, parse

# AWS's own policies, which are AWS's to keep narrow, each with what it is for.
OF_AWS = {
    "AWSLambdaBasicExecutionRole": "writes the function's log",
    "AWSLambdaVPCAccessExecutionRole": "keeps the function's network interface",
    "AWSLambdaSQSQueueExecutionRole": "takes messages off the subscriber's queue",
    "AWSXrayWriteOnlyAccess": "writes the function's traces",
    "AWSCodeDeployRoleForLambda": "moves the alias",
    "AmazonRDSEnhancedMonitoringRole": "writes the database's measurements",
    "AmazonAPIGatewayPushToCloudWatchLogs": "writes the API's access logs",
}
# Policies with a wildcard in a resource that they allow something on, and why there is no narrower one.
WIDE = {
    "S3Endpoint.PolicyDocument": "CloudFormation's buckets for answers are AWS's own, one for each region",
    "DatabaseProxyRole.sign-in": "the functions' roles, whose names begin alike: each signs in to the proxy as itself",
    "SecretsManagerEndpoint.PolicyDocument": "of this account alone; who may read which is in each function's role",
}


class Statement(NamedTuple):
    """One statement of a policy, and whose it is."""

    owner: str
    effect: str
    actions: list[str]
    resources: list[Any]
    principal: Any


@functools.cache
def transformed() -> dict[str, Any]:
    """The resources that AWS makes of the template with everything that its parameters can turn on."""

    class NoPolicies:
        def load(self) -> dict[str, str]:
            return {}

    template = parse(ROOT / "template.yaml")
    for resource in template["Resources"].values():
        for location in ("CodeUri", "ContentUri"):
            if location in resource.get("Properties", {}):
                resource["Properties"][location] = "s3://bucket/key"
    with mock.patch.dict(os.environ, {"AWS_DEFAULT_REGION": "eu-central-1"}):
        resources: dict[str, Any] = transform(template, {}, NoPolicies())["Resources"]
    return resources


def documents() -> Iterator[tuple[str, dict[str, Any]]]:
    """Every policy document, of roles and of resources, by where it stands."""
    for name, resource in transformed().items():
        properties = resource.get("Properties", {})
        for field in ("PolicyDocument", "AssumeRolePolicyDocument"):
            if field in properties:
                yield f"{name}.{field}", properties[field]
        for inline in properties.get("Policies", []) if resource["Type"] == "AWS::IAM::Role" else []:
            policy = inline["Fn::If"][1] if "Fn::If" in inline else inline
            yield f"{name}.{policy['PolicyName']}", policy["PolicyDocument"]


def listed(value: Any) -> list[Any]:
    return value if isinstance(value, list) else [value]


def statements() -> list[Statement]:
    """All of them."""
    return [
        Statement(
            owner,
            statement["Effect"],
            listed(statement.get("Action", [])),
            listed(statement.get("Resource", [])),
            statement.get("Principal"),
        )
        for owner, document in documents()
        for statement in listed(document["Statement"])
    ]


STATEMENTS = statements()
ALLOWING = [statement for statement in STATEMENTS if statement.effect == "Allow"]


def test_there_is_something_to_look_at() -> None:
    """The roles of the functions, with the policies that the template gives them, and those that SAM adds."""
    owners = {statement.owner for statement in STATEMENTS}
    assert {"RelayFunctionRole.AssumeRolePolicyDocument", "S3Endpoint.PolicyDocument"} <= owners
    assert any(owner.startswith("RelayFunctionRole.RelayFunctionRolePolicy") for owner in owners)


@pytest.mark.parametrize("statement", ALLOWING, ids=lambda statement: statement.owner)
def test_no_action_is_a_wildcard(statement: Statement) -> None:
    """Neither a whole service nor a family of actions: what comes to AWS tomorrow is not allowed today."""
    assert statement.actions
    assert not [action for action in statement.actions if "*" in action]


@pytest.mark.parametrize("statement", ALLOWING, ids=lambda statement: statement.owner)
def test_a_wide_resource_has_its_reason(statement: Statement) -> None:
    """A resource is one of this stack, by name; one that is not is in WIDE, with the reason."""
    wide = [resource for resource in statement.resources if "*" in json.dumps(resource)]
    if wide and statement.owner not in WIDE:
        pytest.fail(
            f"{statement.owner} allows {statement.actions} on {wide}: name the resource, or say why not, in WIDE"
        )


def test_no_statement_excepts_instead_of_naming() -> None:
    """NotAction and NotResource allow what nobody has thought of."""
    for owner, document in documents():
        for statement in listed(document["Statement"]):
            if statement["Effect"] == "Allow":
                assert not {"NotAction", "NotResource", "NotPrincipal"} & statement.keys(), owner


def test_a_role_is_for_one_service_of_aws() -> None:
    """No account, no user and nobody else takes it on."""
    for statement in STATEMENTS:
        if statement.owner.endswith(".AssumeRolePolicyDocument"):
            assert [*statement.principal] == ["Service"], statement.owner
            assert len(listed(statement.principal["Service"])) == 1, statement.owner


def test_policies_of_aws_are_those_that_are_known() -> None:
    """A wide one, such as AWSLambda_FullAccess, would come in as a single name."""
    attached = [
        arn
        for resource in transformed().values()
        if resource["Type"] == "AWS::IAM::Role"
        for arn in resource["Properties"].get("ManagedPolicyArns", [])
    ]
    names = {json.dumps(arn).rpartition("/")[2].rstrip('"}]') for arn in attached if "policy/" in json.dumps(arn)}
    assert names <= OF_AWS.keys()
    own = [arn for arn in attached if "policy/" not in json.dumps(arn)]
    assert all("Policy" in json.dumps(arn) for arn in own)


def test_no_function_may_do_to_iam_or_to_functions() -> None:
    """A function that is taken over cannot give itself more, nor call another past its callers."""
    of_functions = {
        statement.owner.partition(".")[0]
        for statement in STATEMENTS
        if statement.owner.endswith(".AssumeRolePolicyDocument")
        and listed(statement.principal["Service"]) == ["lambda.amazonaws.com"]
    }
    assert len(of_functions) == len(FUNCTIONS)
    for statement in ALLOWING:
        role, _, document = statement.owner.partition(".")
        if role in of_functions and document != "AssumeRolePolicyDocument":
            services = {action.partition(":")[0] for action in statement.actions}
            assert services <= {"rds-db", "secretsmanager", "sns", "sqs"}, statement.owner


def test_every_wide_resource_that_has_a_reason_is_there() -> None:
    """A reason for what is gone would excuse what comes next."""
    assert WIDE.keys() <= {statement.owner for statement in ALLOWING}
