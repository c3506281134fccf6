"""The template agrees with the code that it deploys, and its figures with one another."""

import importlib
import json
import re

import pytest

from charging.maintenance import RESERVE_SECONDS
from charging.settings import LOOPBACK, REDELIVERY_DAYS, Settings
from charging.webhooks import SWEEP_SECONDS
from tests.packaging.artifacts import FUNCTIONS, ROOT, TEMPLATE

# https://docs.aws.amazon.com/apigateway/latest/developerguide/limits.html: a REST API's integration timeout.
API_GATEWAY_SECONDS = 29
# https://docs.aws.amazon.com/lambda/latest/dg/services-sqs-configure.html: visibility over function timeout.
VISIBILITY_FACTOR = 6


# What no settings hold: the namespace of all metrics, and what a library reads by itself.
NO_SETTINGS = {"METRICS_NAMESPACE", "PYDANTIC_DISABLE_PLUGINS"}


def own_variables(function: str) -> dict[str, object]:
    variables: dict[str, object] = FUNCTIONS[function].get("Environment", {}).get("Variables", {})
    return variables


def timeout(function: str) -> int:
    seconds: int = FUNCTIONS[function].get("Timeout", TEMPLATE["Globals"]["Function"]["Timeout"])
    return seconds


def schedule(function: str) -> str:
    [event] = FUNCTIONS[function]["Events"].values()
    expression: str = event["Properties"]["ScheduleExpression"]
    return expression


@pytest.mark.parametrize("name", FUNCTIONS)
def test_variables_are_those_that_settings_read(name: str) -> None:
    """Each function is given just the variables that its settings read: none is missing, none is for nothing."""
    given = {**TEMPLATE["Globals"]["Function"]["Environment"]["Variables"], **own_variables(name)}
    module = importlib.import_module(f"{FUNCTIONS[name]['CodeUri'].replace('/', '.')}.handler")
    [settings] = [kind for kind in vars(module).values() if isinstance(kind, type) and issubclass(kind, Settings)]
    assert given.keys() - NO_SETTINGS == settings.variables()
    # Lambda's variables are strings; a bare number is turned into one by CloudFormation, and not by all else.
    assert all(isinstance(value, str | dict) for value in given.values())


def test_whoever_is_guided_gets_through_by_accepting_what_is_offered() -> None:
    """Each parameter has a default; none is hidden, for which SAM offers nothing and takes no empty answer."""
    for name, declared in TEMPLATE["Parameters"].items():
        assert "Default" in declared, name
        assert "NoEcho" not in declared, name


def test_each_parameter_is_asked_for_in_its_group_and_changes_something() -> None:
    """One that nothing refers to would be turned in vain."""
    groups = TEMPLATE["Metadata"]["AWS::CloudFormation::Interface"]["ParameterGroups"]
    assert sorted(name for group in groups for name in group["Parameters"]) == sorted(TEMPLATE["Parameters"])
    used = references([TEMPLATE[part] for part in ("Conditions", "Globals", "Resources", "Outputs")])
    assert TEMPLATE["Parameters"].keys() <= used


def test_charge_ends_before_the_gateway_gives_up() -> None:
    """A caller gets the function's own answer, not the gateway's 504."""
    assert timeout("ChargesFunction") < API_GATEWAY_SECONDS


def test_relay_ends_by_its_budget() -> None:
    """The longest budget leaves a minute for the calls in flight; and the default leaves no gap between two runs."""
    budget = TEMPLATE["Parameters"]["RelayBudgetSeconds"]
    assert schedule("RelayFunction") == "rate(1 minute)"
    assert budget["MaxValue"] + 60 <= timeout("RelayFunction")
    assert budget["Default"] >= 60


def test_outbox_that_nobody_measures_is_an_alarm() -> None:
    """A minute without a figure is no news, and a few are; and the figure is the monitor's, which has no dimension."""
    alarm = TEMPLATE["Resources"]["OutboxOldestAgeAlarm"]["Properties"]
    assert (alarm["Namespace"], alarm["MetricName"]) == ({"Ref": "MetricsNamespace"}, "OutboxOldestAge")
    assert "Dimensions" not in alarm
    assert alarm["TreatMissingData"] == "breaching"
    assert 60 < alarm["Period"] * alarm["EvaluationPeriods"] <= 300
    assert schedule("MonitorFunction") == "rate(1 minute)"
    # Events arrive in well under a second; a minute is what a relay that has died takes to be started again.
    assert (alarm["Statistic"], alarm["Threshold"]) == ("Maximum", 60)


def test_maintenance_ends_before_its_next_run() -> None:
    """It has time to work and to end by itself, well before it is started again."""
    assert schedule("MaintenanceFunction") == "rate(5 minutes)"
    assert 2 * RESERVE_SECONDS < timeout("MaintenanceFunction") < 5 * 60 / 2


def test_a_seen_event_is_remembered_for_longer_than_it_can_come_again() -> None:
    """By default; and whatever the outbox keeps, there is a value that is long enough."""
    parameters = TEMPLATE["Parameters"]
    outbox, processed = parameters["OutboxRetentionDays"], parameters["ProcessedEventsRetentionDays"]
    for bound in ("Default", "MinValue", "MaxValue"):
        assert processed[bound] >= outbox[bound] + REDELIVERY_DAYS, bound
    queues = [
        resource["Properties"]["MessageRetentionPeriod"]
        for resource in TEMPLATE["Resources"].values()
        if resource["Type"] == "AWS::SQS::Queue"
    ]
    assert 2 * max(queues) <= REDELIVERY_DAYS * 24 * 3600


def test_dispatcher_ends_by_its_budget() -> None:
    """The longest budget leaves time for what is under way at its end; and the default leaves no gap between runs."""
    budget = TEMPLATE["Parameters"]["WebhooksBudgetSeconds"]
    assert schedule("WebhooksFunction") == "rate(1 minute)"
    assert budget["MaxValue"] + SWEEP_SECONDS <= timeout("WebhooksFunction")
    assert budget["Default"] >= 60


def test_endpoints_end_before_the_gateway_gives_up() -> None:
    """Also when the master key has to be read first."""
    assert timeout("EndpointsFunction") < API_GATEWAY_SECONDS


def test_no_deployment_lets_webhooks_go_to_its_own_machine() -> None:
    """The variable that allows it stands nowhere in the template."""
    assert LOOPBACK not in (ROOT / "template.yaml").read_text()


def test_the_master_key_is_kept_and_is_for_those_who_sign_or_show() -> None:
    """Without it no receiver could verify anything, so it outlives its stack; the charge never sees it."""
    key = TEMPLATE["Resources"]["WebhookMasterKey"]
    assert key["DeletionPolicy"] == key["UpdateReplacePolicy"] == "Retain"
    users = {name for name, properties in FUNCTIONS.items() if "WebhookMasterKey" in str(properties)}
    assert users == {"EndpointsFunction", "WebhooksFunction"}


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


def references(value: object) -> set[str]:
    """The logical ids that a part of the template refers to."""
    if isinstance(value, dict):
        named = {str(value[name]) for name in ("Ref", "DependsOn") if isinstance(value.get(name), str)}
        if isinstance(place := value.get("Fn::GetAtt"), list):
            named.add(place[0])
        if (text := value.get("Fn::Sub")) is not None:
            named |= set(re.findall(r"\$\{(\w+)", text if isinstance(text, str) else text[0]))
        return named.union(*(references(inner) for inner in value.values()))
    if isinstance(value, list):
        return set().union(*(references(inner) for inner in value))
    return set()


def test_operators_alone_invoke_operations() -> None:
    """No API, schedule, queue or address leads to it, nothing in the template may invoke it, or is made to know it."""
    operations = FUNCTIONS["OperationsFunction"]
    assert not {"Events", "FunctionUrlConfig", "AutoPublishAlias"} & operations.keys()
    knowing = {name for name, resource in TEMPLATE["Resources"].items() if "OperationsFunction" in references(resource)}
    assert knowing == set()
    for properties in FUNCTIONS.values():
        assert "lambda:" not in json.dumps(properties.get("Policies", []))
    permissions = [
        one["Properties"] for one in TEMPLATE["Resources"].values() if one["Type"] == "AWS::Lambda::Permission"
    ]
    assert [permission["FunctionName"] for permission in permissions] == [
        {"Ref": "ChargesFunction.Alias"},
        {"Ref": "EndpointsFunction"},
    ]


def test_operations_may_use_the_database_and_nothing_else() -> None:
    """What an operator does is done in the outbox; the relay does the rest."""
    assert re.findall(r"'Action': (.+?),", str(FUNCTIONS["OperationsFunction"]["Policies"])) == ["'rds-db:connect'"]
