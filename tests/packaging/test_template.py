"""The template agrees with the code that it deploys, and its figures with one another."""

import importlib

import pytest

from charging.settings import Settings
from tests.packaging.artifacts import FUNCTIONS, TEMPLATE

# https://docs.aws.amazon.com/apigateway/latest/developerguide/limits.html: a REST API's integration timeout.
API_GATEWAY_SECONDS = 29
# https://docs.aws.amazon.com/lambda/latest/dg/services-sqs-configure.html: visibility over function timeout.
VISIBILITY_FACTOR = 6


def own_variables(function: str) -> dict[str, object]:
    variables: dict[str, object] = FUNCTIONS[function].get("Environment", {}).get("Variables", {})
    return variables


def timeout(function: str) -> int:
    seconds: int = FUNCTIONS[function].get("Timeout", TEMPLATE["Globals"]["Function"]["Timeout"])
    return seconds


@pytest.mark.parametrize("name", FUNCTIONS)
def test_variables_are_those_that_settings_read(name: str) -> None:
    """Each function is given just the variables that its settings read: none is missing, none is for nothing."""
    given = {**TEMPLATE["Globals"]["Function"]["Environment"]["Variables"], **own_variables(name)}
    module = importlib.import_module(f"{FUNCTIONS[name]['CodeUri'].replace('/', '.')}.handler")
    [settings] = [kind for kind in vars(module).values() if isinstance(kind, type) and issubclass(kind, Settings)]
    assert given.keys() == settings.variables()
    # Lambda's variables are strings; a bare number is turned into one by CloudFormation, and not by all else.
    assert all(isinstance(value, str | dict) for value in given.values())


def test_charge_ends_before_the_gateway_gives_up() -> None:
    """A caller gets the function's own answer, not the gateway's 504."""
    assert timeout("ChargesFunction") < API_GATEWAY_SECONDS


def test_relay_ends_by_its_budget() -> None:
    """The longest budget leaves a minute for the calls in flight; and the default leaves no gap between two runs."""
    budget = TEMPLATE["Parameters"]["RelayBudgetSeconds"]
    assert budget["MaxValue"] + 60 <= timeout("RelayFunction")
    assert budget["Default"] >= 60


def test_batch_is_not_seen_twice_while_it_is_worked_on() -> None:
    """A message stays invisible for as long as Lambda may take to get it through a throttled function."""
    queue = TEMPLATE["Resources"]["SubscriberQueue"]["Properties"]
    assert queue["VisibilityTimeout"] >= VISIBILITY_FACTOR * timeout("SubscriberFunction")


def test_dead_letters_outlive_the_queue() -> None:
    """A message's age goes with it: a dead-letter queue keeps it for longer than the queue does."""
    queues = {
        name: resource["Properties"]["MessageRetentionPeriod"]
        for name, resource in TEMPLATE["Resources"].items()
        if resource["Type"] == "AWS::SQS::Queue"
    }
    assert queues["SubscriberQueue"] < min(queues["DeadLetterQueue"], queues["UndeliveredQueue"])


def test_nothing_is_public() -> None:
    """Every route takes the API's default authoriser, which is IAM."""
    assert TEMPLATE["Resources"]["Api"]["Properties"]["Auth"]["DefaultAuthorizer"] == "AWS_IAM"
    for properties in FUNCTIONS.values():
        assert "FunctionUrlConfig" not in properties
        for event in properties.get("Events", {}).values():
            assert "Auth" not in event["Properties"]
