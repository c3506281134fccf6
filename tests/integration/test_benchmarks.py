"""Each benchmark runs, once and at the smallest scale, so that none of them rots. What it finds is not looked at."""

import math
from pathlib import Path
from types import ModuleType

import pytest

from bench import backlog, charge, latency, model, relay, reporting, webhooks
from bench.reporting import Report
from tests.support.database import Databases

SMALLEST = {
    charge: charge.Scale(rounds=1, calls=1, counted=1, processes=(1,), seconds=1, repeats=1),
    relay: relay.Scale(latencies_ms=(0, 10), drained=20, calls=1, rounds=1, due=20),
    backlog: backlog.Scale(due=200, published=200, under_snapshot=(100,), sweeps=1),
    latency: latency.Scale(idle_seconds=0.1, events=2),
    webhooks: webhooks.Scale(latencies_ms=(0, 50), sent=20, one_by_one=1, rounds=1, due=20),
    model: model.Scale(
        charges=20, clients=(1, 2), seconds=1, tries=1, keys=1_000, added=10, drained=(20, 20), arrivals=20_000
    ),
}

# What others read from latest.json, beside what has a target.
FIGURES = {
    charge: set(),
    relay: {"relay.rows_per_s_0ms"},
    backlog: set(),
    latency: set(),
    model: {f"model.{name}_error" for name in ("saturation", "drain", "images", "instances")},
    webhooks: {f"webhooks.{name}_{ms}ms" for name in ("per_s", "one_per_s", "vs_textbook") for ms in (0, 50)},
}


@pytest.mark.parametrize("benchmark", SMALLEST, ids=lambda module: module.__name__)
def test_a_benchmark_runs(
    benchmark: ModuleType, database_server: Databases, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """It finds a figure for each target, and what it finds can be shown and kept."""
    report: Report = benchmark.run(database_server, SMALLEST[benchmark])
    assert report.figures.keys() >= FIGURES[benchmark] | report.targets.keys()
    assert all(value is None or math.isfinite(value) for value in report.figures.values())
    reporting.write(report, tmp_path)
    reporting.show(report)
    shown = capsys.readouterr().out
    assert all(name in shown for name in report.figures)
