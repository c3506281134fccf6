"""Metrics: embedded in one log line, with the dimensions that were asked for and no other."""

import json
from typing import Any

import pytest

from charging import telemetry


def emitted(capsys: pytest.CaptureFixture[str]) -> dict[str, Any]:
    (line,) = capsys.readouterr().out.splitlines()
    metrics: dict[str, Any] = json.loads(line)
    return metrics


def test_metrics_are_one_line_in_the_embedded_format(capsys: pytest.CaptureFixture[str]) -> None:
    """CloudWatch reads the namespace, the dimension, the names and units from it, and the values beside them."""
    telemetry.emit("Count", {"created": 1}, endpoint="POST /charges")
    line = emitted(capsys)
    (directive,) = line["_aws"]["CloudWatchMetrics"]
    assert directive["Namespace"] == "Charges"
    assert directive["Dimensions"] == [["endpoint"]]
    assert directive["Metrics"] == [{"Name": "created", "Unit": "Count"}]
    assert line["endpoint"] == "POST /charges"
    assert line["created"] in (1, [1])


def test_no_dimension_comes_from_the_environment(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A service name that a deployment sets would make every metric another one than the alarm watches."""
    monkeypatch.setenv("POWERTOOLS_SERVICE_NAME", "charges-blue")
    telemetry.emit("Seconds", {"OutboxOldestAge": 0.0})
    (directive,) = emitted(capsys)["_aws"]["CloudWatchMetrics"]
    assert directive["Namespace"] == "Charges"
    assert directive["Dimensions"] in ([[]], [])


def test_one_emission_leaves_nothing_to_the_next(capsys: pytest.CaptureFixture[str]) -> None:
    """Neither values nor dimensions are kept."""
    telemetry.emit("Count", {"created": 1}, endpoint="POST /charges")
    emitted(capsys)
    telemetry.emit("Count", {"OutboxPending": 0, "OutboxFailed": 2})
    line = emitted(capsys)
    assert {metric["Name"] for metric in line["_aws"]["CloudWatchMetrics"][0]["Metrics"]} == {
        "OutboxPending",
        "OutboxFailed",
    }
    assert not {"created", "endpoint"} & line.keys()


def test_a_second_stack_has_a_namespace_of_its_own(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Under one name the outbox of one stack would be the other's alarm."""
    monkeypatch.setenv("METRICS_NAMESPACE", "ChargesOfTests")
    telemetry.emit("Seconds", {"OutboxOldestAge": 0.0})
    (directive,) = emitted(capsys)["_aws"]["CloudWatchMetrics"]
    assert directive["Namespace"] == "ChargesOfTests"
