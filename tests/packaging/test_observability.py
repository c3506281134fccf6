"""Alarms, dashboard and saved queries: they watch what there is, and each failure shows somewhere."""

import json
import re
from typing import Any

import pytest

from charging import charges, refunds
from tests.packaging.artifacts import FUNCTIONS, ROOT, TEMPLATE

RESOURCES: dict[str, Any] = TEMPLATE["Resources"]
ALARMS = {name: one["Properties"] for name, one in RESOURCES.items() if one["Type"] == "AWS::CloudWatch::Alarm"}
# What functions, and what those behind the API share, name in their calls of telemetry.emit.
SHARED = ROOT / "layers/charging/python/charging/api.py"
SOURCES = "\n".join(path.read_text() for path in [*(ROOT / "functions").rglob("handler.py"), SHARED])


def metrics(alarm: dict[str, Any]) -> list[dict[str, Any]]:
    """The metrics that an alarm looks at."""
    several = [one["MetricStat"]["Metric"] for one in alarm.get("Metrics", []) if "MetricStat" in one]
    return several or [alarm]


def is_own(metric: dict[str, Any]) -> bool:
    """Whether it is the service's own, and not one of AWS's."""
    return bool(metric["Namespace"] == {"Ref": "MetricsNamespace"})


def widgets() -> list[dict[str, Any]]:
    """The dashboard's, with a number in the place of every variable."""
    text, _ = RESOURCES["Dashboard"]["Properties"]["DashboardBody"]["Fn::Sub"]
    found: list[dict[str, Any]] = json.loads(re.sub(r"\$\{[\w:.]+\}", "0", text))["widgets"]
    return found


@pytest.mark.parametrize("name", ALARMS)
def test_an_alarm_watches_a_metric_of_this_stack(name: str) -> None:
    """The service's own are in the stack's namespace; AWS's name one of its resources."""
    for metric in metrics(ALARMS[name]):
        if is_own(metric):
            assert f'"{metric["MetricName"]}"' in SOURCES
        else:
            assert metric["Namespace"].startswith("AWS/")
            assert metric["Dimensions"]


@pytest.mark.parametrize("name", ALARMS)
def test_an_alarm_tells_somebody_when_it_begins_and_when_it_ends(name: str) -> None:
    """And it says what no figures mean."""
    notified = {"Fn::If": ["HasAlarmTopic", [{"Ref": "AlarmTopicArn"}], {"Ref": "AWS::NoValue"}]}
    assert ALARMS[name]["AlarmActions"] == ALARMS[name]["OKActions"] == notified
    assert "TreatMissingData" in ALARMS[name]


def test_a_silent_monitor_relay_or_maintenance_is_an_alarm() -> None:
    """Their figures show that somebody measures, sends and looks: without them nothing is known to be well."""
    assert ALARMS["OutboxOldestAgeAlarm"]["TreatMissingData"] == "breaching"
    assert ALARMS["RelayAlarm"]["TreatMissingData"] == "breaching"
    assert ALARMS["MaintenanceAlarm"]["TreatMissingData"] == "breaching"


@pytest.mark.parametrize("name", FUNCTIONS)
def test_a_failed_run_leaves_a_message(name: str) -> None:
    """What the scheduler starts nobody waits for: its failure goes to a queue, which has an alarm."""
    events = FUNCTIONS[name].get("Events", {}).values()
    if any(event["Type"] == "ScheduleV2" for event in events):
        failed = FUNCTIONS[name]["EventInvokeConfig"]["DestinationConfig"]["OnFailure"]
        assert failed == {"Type": "SQS", "Destination": {"Fn::GetAtt": ["FailedRuns", "Arn"]}}


def test_every_request_and_every_run_is_traced() -> None:
    """By the service, from the gateway on, and by no SDK in the functions."""
    assert TEMPLATE["Globals"]["Function"]["Tracing"] == "Active"
    assert not any("Tracing" in function for function in FUNCTIONS.values())
    assert RESOURCES["Api"]["Properties"]["TracingEnabled"] is True


def test_a_slow_hundredth_is_an_alarm() -> None:
    """An average, or a median, would not show it."""
    assert (ALARMS["ApiLatencyAlarm"]["MetricName"], ALARMS["ApiLatencyAlarm"]["ExtendedStatistic"]) == (
        "Latency",
        "p99",
    )


def test_every_queue_of_what_failed_has_an_alarm() -> None:
    """A message in one of them is in no other place."""
    watched = json.dumps([metric.get("Dimensions") for alarm in ALARMS.values() for metric in metrics(alarm)])
    for queue in ("DeadLetterQueue", "UndeliveredQueue", "FailedRuns"):
        assert queue in watched


def test_a_busy_writer_is_not_averaged_with_its_standby() -> None:
    """A cluster's figure is its instances' together: half of the writer's, where the standby has nothing to do."""
    of_the_cluster = {"Fn::If": ["MakesCluster", {"Name": "Role", "Value": "WRITER"}, {"Ref": "AWS::NoValue"}]}
    assert of_the_cluster in ALARMS["DatabaseCpuAlarm"]["Dimensions"]
    # Where no one instance is named, it is the one that is worst off.
    for name in ("DatabaseConnectionsAlarm", "DatabaseCpuAlarm"):
        assert ALARMS[name]["Statistic"] == "Maximum" or of_the_cluster in ALARMS[name]["Dimensions"]
    drawn = [metric for widget in widgets() for metric in widget["properties"]["metrics"] if metric[0] == "AWS/RDS"]
    assert drawn
    assert all(metric[-1]["stat"] == "Maximum" for metric in drawn)


def test_the_dashboard_reads_from_left_to_right() -> None:
    """Its widgets are numbered in the order of a request's way, and none covers another."""
    titles = [widget["properties"]["title"] for widget in widgets()]
    assert [int(title.split()[0]) for title in titles] == [*range(1, len(titles) + 1)]
    places = [(widget["y"], widget["x"]) for widget in widgets()]
    assert places == sorted(set(places))
    assert all(widget["x"] + widget["width"] <= 24 for widget in widgets())


def test_what_is_counted_by_endpoint_is_watched_and_drawn_for_charges_and_for_refunds() -> None:
    """Under the very names by which the service counts."""
    watched = {
        dimension["Value"]
        for metric in metrics(ALARMS["ConflictsAlarm"])
        for dimension in metric["Dimensions"]
        if dimension["Name"] == "endpoint"
    }
    drawn = {metric[3] for widget in widgets() for metric in widget["properties"]["metrics"] if metric[2] == "endpoint"}
    assert watched == drawn == {charges.ENDPOINT, refunds.ENDPOINT}


def test_the_dashboard_shows_the_service_metrics_under_their_names() -> None:
    """What it draws of the service itself the service measures."""
    own = {metric[1] for widget in widgets() for metric in widget["properties"]["metrics"] if metric[0] == "0"}
    assert own
    for name in own:
        assert f'"{name}"' in SOURCES


def test_the_page_lists_what_is_measured() -> None:
    """Each of the service's own metrics, and nothing that is none."""
    page = (ROOT / "docs" / "operations.md").read_text().partition("\n## What is measured\n")[2]
    listed = {name for row in re.findall(r"(?m)^\| (`.+?`) \|", page) for name in re.findall(r"`(\w+)`", row)}
    handlers = [path.read_text() for path in (ROOT / "functions").rglob("handler.py")]
    measuring = "".join(handler for handler in handlers if "telemetry.emit(" in handler)
    measured = {*re.findall(r'"([A-Z][a-z]+[A-Z]\w+)"', measuring)}
    watched = {metric["MetricName"] for alarm in ALARMS.values() for metric in metrics(alarm) if is_own(metric)}
    drawn = {metric[1] for widget in widgets() for metric in widget["properties"]["metrics"] if metric[0] == "0"}
    assert listed >= measured | watched | drawn
    assert all(f'"{name}"' in SOURCES for name in listed)


@pytest.mark.parametrize(
    "name", [name for name, one in RESOURCES.items() if one["Type"] == "AWS::Logs::QueryDefinition"]
)
def test_a_saved_query_is_of_this_stacks_logs(name: str) -> None:
    """By their groups, and under a name that no other stack's has."""
    properties = RESOURCES[name]["Properties"]
    assert properties["Name"]["Fn::Sub"].startswith("${AWS::StackName}/")
    for group in properties["LogGroupNames"]:
        assert RESOURCES[group["Ref"]]["Type"] == "AWS::Logs::LogGroup"


# What Logs Insights makes of a line of Lambda's, and what the logger and X-Ray put into each of a function's own.
DISCOVERED = {"timestamp", "message", "type", "duration", "initDuration", "maxMemoryUsed"}
OF_EVERY_LINE = {"level", "message", "service", "exception_name", "exception", "xray_trace_id"}
WORDS = {
    *("fields", "filter", "sort", "desc", "limit", "stats", "by", "as", "in", "and", "or", "like", "bin"),
    *("coalesce", "count", "pct", "max", "ispresent"),
}


@pytest.mark.parametrize(
    "name", [name for name, one in RESOURCES.items() if one["Type"] == "AWS::Logs::QueryDefinition"]
)
def test_a_saved_query_asks_for_fields_that_lines_have(name: str) -> None:
    """A misspelt one would be an empty column, and a filter on it an empty answer."""
    query = re.sub(r"#.*|\"[^\"]*\"|/.+/", "", RESOURCES[name]["Properties"]["QueryString"])
    assert {*re.findall(r"@(\w+)", query)} <= DISCOVERED
    named = {*re.findall(r"(?<![@.\w])[a-z]\w*", query)} - WORDS - {*re.findall(r" as (\w+)", query)}
    for field in named - OF_EVERY_LINE - {"m"}:
        assert re.search(rf'"{field}"|\b{field}=', SOURCES), field


def test_every_functions_errors_are_found() -> None:
    """The first query to run asks all of them."""
    groups = {properties["LoggingConfig"]["LogGroup"]["Ref"] for properties in FUNCTIONS.values()}
    assert {group["Ref"] for group in RESOURCES["ErrorsQuery"]["Properties"]["LogGroupNames"]} == groups
