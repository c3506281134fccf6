"""A deployment in the template: the schema first, then a new version, beside the old one until it has proved itself."""

import json
import re
from typing import Any

import pytest

from tests.packaging.artifacts import FUNCTIONS, TEMPLATE

RESOURCES: dict[str, Any] = TEMPLATE["Resources"]
CHARGES = FUNCTIONS["ChargesFunction"]
# Of the function and not of a version of it; and an address that is too long for a description.
OF_NO_VERSION = {"ReservedConcurrency", "GradualDeployment", "DatabaseSecretArn"}


@pytest.mark.parametrize("name", [name for name in FUNCTIONS if name != "MigrateFunction"])
def test_a_function_waits_for_its_schema(name: str) -> None:
    """Where the migration fails no function is touched, and the release before goes on."""
    assert "Migration" in json.dumps(RESOURCES[name].get("DependsOn"))


def test_the_migration_runs_with_every_release() -> None:
    """It is asked again when the migrations or the package have changed, and has the time that its function has."""
    migration = RESOURCES["Migration"]["Properties"]
    assert migration["ServiceToken"] == {"Fn::GetAtt": ["MigrateFunction", "Arn"]}
    assert migration["Schema"] == {"Ref": "SchemaLayer"}
    assert migration["Package"] == {"Ref": "ChargingLayer"}
    assert FUNCTIONS["MigrateFunction"]["Timeout"] < migration["ServiceTimeout"] <= 3600


def test_a_new_release_of_a_layer_is_a_new_version() -> None:
    """Otherwise the alias would stay with the old layer whenever a handler has not changed with it."""
    assert CHARGES["AutoPublishAliasAllProperties"] is True
    for resource in RESOURCES.values():
        if resource["Type"] == "AWS::Serverless::LayerVersion":
            assert resource["Properties"]["PublishLambdaVersion"] is True


def parameters_of(value: Any) -> set[str]:
    """The parameters that a value of the template depends on, by way of its conditions and of the layers too."""
    found: set[str] = set()
    if isinstance(value, dict):
        for name, inner in value.items():
            if name == "Ref":
                found |= parameters_named({inner})
            elif name == "Fn::If":
                found |= parameters_of(TEMPLATE["Conditions"][inner[0]]) | parameters_of(inner[1:])
            elif name == "Condition" and isinstance(inner, str):
                found |= parameters_of(TEMPLATE["Conditions"][inner])
            elif name == "Fn::Sub":
                text, variables = (inner, {}) if isinstance(inner, str) else inner
                found |= parameters_named({*re.findall(r"\$\{(\w+)\}", text)}) | parameters_of(variables)
            else:
                found |= parameters_of(inner)
    elif isinstance(value, list):
        for inner in value:
            found |= parameters_of(inner)
    return found


def parameters_named(names: set[str]) -> set[str]:
    return names & {*TEMPLATE["Parameters"]}


def test_a_changed_parameter_is_a_new_version() -> None:
    """A version keeps what its function was when it was published: what changes it is in the version's description.

    Where a resource is chosen by a parameter, such as the database or a subnet, it is the choice that counts. A layer
    for another processor is another layer.
    """
    unversioned = {
        *("CodeUri", "Description", "Policies", "DeploymentPreference", "LoggingConfig"),
        *("VersionDescription", "AutoPublishAlias", "ReservedConcurrentExecutions"),
    }
    function = {**TEMPLATE["Globals"]["Function"], **CHARGES}
    variables = {**TEMPLATE["Globals"]["Function"]["Environment"]["Variables"], **CHARGES["Environment"]["Variables"]}
    function["Environment"] = variables
    needed = parameters_of({name: value for name, value in function.items() if name not in unversioned})
    described = parameters_of(CHARGES["VersionDescription"])
    # Other subnets of a network that is there already come with the next version: a description has 256 characters.
    assert needed - described - OF_NO_VERSION <= {"Architecture", "VpcSubnetIds"}


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_proxy_that_comes_locks_nobody_out(name: str) -> None:
    """The release before signs in to the database itself until the new one has taken over, and after a rollback."""
    [statement] = [
        statement
        for policy in FUNCTIONS[name]["Policies"]
        if "Fn::If" in policy
        for statement in policy["Fn::If"][1]["Statement"]
    ]
    assert statement["Action"] == "rds-db:connect"
    itself = statement["Resource"][0] if name != "MigrateFunction" else statement["Resource"]
    assert "HasProxy" not in json.dumps(itself)
    rules = RESOURCES["FunctionsGroup"]["Properties"]["SecurityGroupEgress"]
    condition, to_the_database, _ = rules[0]["Fn::If"]
    assert (condition, to_the_database["DestinationSecurityGroupId"]) == ("MakesDatabase", {"Ref": "DatabaseGroup"})
    assert RESOURCES["DatabaseAdmission"]["Properties"]["SourceSecurityGroupId"] == {"Ref": "FunctionsGroup"}


def test_a_versions_description_is_never_too_long() -> None:
    """Lambda takes 256 characters, and would refuse the release of whoever has long names."""
    text, _ = CHARGES["VersionDescription"]["Fn::Sub"]

    def longest(parameter: str) -> int:
        declared = TEMPLATE["Parameters"][parameter]
        if "AllowedValues" in declared:
            return max(len(value) for value in declared["AllowedValues"])
        if "MaxValue" in declared:
            return len(str(declared["MaxValue"]))
        return max(n for n in range(300) if re.fullmatch(declared["AllowedPattern"], "a" * n))

    names = re.findall(r"\$\{(\w+)\}", text)
    filled = sum(longest("DatabaseHost" if name == "Host" else name) for name in names)
    assert len(re.sub(r"\$\{\w+\}", "", text)) + filled <= 256


def test_a_version_goes_once_the_next_one_has_stayed() -> None:
    """A snapshot is paid for as long as its version is kept."""
    assert CHARGES["VersionDeletionPolicy"] == "Delete"


def test_a_new_release_is_tried_on_a_few() -> None:
    """And it is withdrawn by alarms on what callers notice."""
    preference = CHARGES["DeploymentPreference"]
    assert preference["Type"] == "Canary10Percent5Minutes"
    # A version that cannot even start is noticed however few requests there are.
    assert {"Ref": "FunctionErrorsAlarm"} in preference["Alarms"]
    for alarm in preference["Alarms"]:
        assert RESOURCES[alarm["Ref"]]["Type"] == "AWS::CloudWatch::Alarm"
        # The latest that it can tell is within the five minutes.
        properties = RESOURCES[alarm["Ref"]]["Properties"]
        assert properties["Period"] * properties["EvaluationPeriods"] < 300
