"""Benchmarks: what a percentile and a ratio are, who has which turn, what is kept of a report, and how it is drawn."""

import itertools
import json
import xml.etree.ElementTree as ET
from pathlib import Path

import pytest

from bench import measuring, plotting, reporting
from bench.plotting import Plot
from bench.reporting import Report


@pytest.mark.parametrize(
    ("share", "value"), [(0.5, 10), (0.95, 19), (0.951, 20), (0.99, 20), (1.0, 20), (0.01, 1), (0.05, 1)]
)
def test_a_percentile_is_the_least_value_that_has_its_share_at_or_below_it(share: float, value: float) -> None:
    """Of the numbers from 1 to 20, in whatever order."""
    assert measuring.percentile([float(number) for number in range(20, 0, -1)], share) == value


def test_a_ratio_is_taken_round_by_round() -> None:
    """A machine that is ten times as slow in one round changes neither the ratio nor its spread."""
    found = measuring.ratio([2.0, 40.0, 4.0], [1.0, 20.0, 2.0])
    assert (found.value, found.low, found.high) == (2.0, 2.0, 2.0)


def test_everybody_has_each_round_and_comes_first_in_turn() -> None:
    """Three subjects, three rounds: each begins one."""
    turn = itertools.count(1)
    results = measuring.take_turns(3, dict.fromkeys("abc", lambda: next(turn)))
    assert results == {"a": [1, 6, 8], "b": [2, 4, 9], "c": [3, 5, 7]}


def test_the_latest_figures_are_kept_by_benchmark(tmp_path: Path) -> None:
    """A benchmark renews its own figures, drops those that it has no more, and leaves the others' alone."""

    def report(benchmark: str, **figures: float) -> Report:
        return Report(benchmark, {f"{benchmark}.{name}": value for name, value in figures.items()}, {}, [])

    for each in (report("charge", a=1, b=2), report("relay", a=3), report("charge", a=4)):
        reporting.write(each, tmp_path)
    assert json.loads((tmp_path / "latest.json").read_text()) == {"charge.a": 4, "relay.a": 3}
    assert json.loads((tmp_path / "charge.json").read_text())["figures"] == {"charge.a": 4}


def test_a_target_is_met_at_its_bound() -> None:
    """From either side."""
    assert reporting.at_least(2).is_met_by(2)
    assert not reporting.at_least(2).is_met_by(1.99)
    assert reporting.at_most(2).is_met_by(2)
    assert not reporting.at_most(2).is_met_by(2.01)


def test_a_plot_is_an_svg_with_a_bar_in_proportion_for_each_value(tmp_path: Path) -> None:
    """Kept beside the report, and well-formed whatever characters the names have."""
    plot = Plot("Rates & <more>", {"near": {"ours": 4000.0, "theirs": 1000.0}, "far": {"ours": 1.25}}, "/s")
    reporting.write(Report("charge", {}, {}, [], {"rates": plot}), tmp_path)
    drawn = ET.fromstring((tmp_path / "charge-rates.svg").read_text())  # noqa: S314 - our own
    bars = [bar for bar in drawn.findall("{*}rect") if bar.get("height") == str(plotting.BAR_HEIGHT)]
    widths = [float(bar.attrib["width"]) for bar in bars]
    assert widths == pytest.approx([widths[0], widths[0] / 4, 0.1], abs=0.1)
    assert [bar.get("fill") for bar in bars] == [bars[0].get("fill"), bars[1].get("fill"), bars[0].get("fill")]
    texts = [text.text for text in drawn.findall("{*}text")]
    assert {"Rates & <more>", "near", "far", "ours", "theirs", "4,000/s", "1,000/s", "1.25/s"} == set(texts)
