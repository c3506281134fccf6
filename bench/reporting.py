"""What a benchmark has found: tables for a reader, figures under flat names for a program, targets for both."""

import importlib.metadata
import json
import os
import platform
import sys
import time
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Literal

from bench import plotting
from bench.measuring import Spread
from bench.plotting import Plot

_begun = time.monotonic()


@dataclass(frozen=True, slots=True)
class Target:
    """What a figure should come to."""

    sense: Literal["at least", "at most"]
    bound: float

    def is_met_by(self, value: float) -> bool:
        """Tells whether the figure is good enough."""
        return value >= self.bound if self.sense == "at least" else value <= self.bound


@dataclass(frozen=True, slots=True)
class Table:
    """Rows of text under a title. `note` says what a reader has to know of it."""

    title: str
    columns: Sequence[str]
    rows: Sequence[Sequence[str]]
    note: str = ""


def machine() -> dict[str, str]:
    """What a reader must know of the machine, and nothing that would name it."""
    return {
        "cores": str(os.cpu_count()),
        "processor": platform.machine(),
        "python": platform.python_version(),
        **{name: importlib.metadata.version(name) for name in ("psycopg", "pydantic", "boto3")},
    }


@dataclass(frozen=True, slots=True)
class Report:
    """A benchmark's outcome. A figure that is None could not be measured on this machine. Plots have short names."""

    benchmark: str
    figures: Mapping[str, float | None]
    targets: Mapping[str, Target]
    tables: Sequence[Table]
    plots: Mapping[str, Plot] = field(default_factory=dict)
    machine: Mapping[str, str] = field(default_factory=machine)


def at_least(bound: float) -> Target:
    """A target from below."""
    return Target("at least", bound)


def at_most(bound: float) -> Target:
    """A target from above."""
    return Target("at most", bound)


def progress(what: str) -> None:
    """Says on standard error how far the work is."""
    print(f"{time.monotonic() - _begun:7.1f} s  {what}", file=sys.stderr, flush=True)


def show(report: Report) -> None:
    """Prints the tables, and each target beside what was found."""
    print(f"\n{report.benchmark}   ({', '.join(f'{name} {value}' for name, value in report.machine.items())})")
    for table in [*report.tables, _verdicts(report)]:
        print(f"\n  {table.title}")
        cells = [table.columns, *table.rows]
        widths = [max(len(row[column]) for row in cells) for column in range(len(table.columns))]
        for row in cells:
            first, *others = [
                cell.rjust(width) if column else cell.ljust(width)
                for column, (cell, width) in enumerate(zip(row, widths, strict=True))
            ]
            print("    " + "  ".join([first, *others]).rstrip())
        if table.note:
            print(f"    {table.note}")
    sys.stdout.flush()


def _verdicts(report: Report) -> Table:
    rows = []
    for name, value in report.figures.items():
        target = report.targets.get(name)
        if value is None:
            verdict = "not measured here"
        elif target is None:
            verdict = ""
        else:
            verdict = "met" if target.is_met_by(value) else "MISSED"
        wanted = "" if target is None else f"{target.sense} {target.bound:g}"
        rows.append([name, "-" if value is None else f"{value:.4g}", wanted, verdict])
    return Table("Figures", ["name", "found", "target", ""], rows)


def write(report: Report, folder: Path) -> None:
    """Keeps the report and its plots in the folder, and its figures in latest.json beside those of other benchmarks."""
    folder.mkdir(parents=True, exist_ok=True)
    content = {"finished_at": datetime.now(UTC).isoformat(timespec="seconds"), **asdict(report)}
    (folder / f"{report.benchmark}.json").write_text(json.dumps(content, indent=2) + "\n")
    for name, plot in report.plots.items():
        (folder / f"{report.benchmark}-{name}.svg").write_text(plotting.svg(plot))
    latest = folder / "latest.json"
    known = json.loads(latest.read_text()) if latest.exists() else {}
    # A figure that this benchmark had under a name which it no longer gives would never be renewed.
    kept = {name: value for name, value in known.items() if not name.startswith(f"{report.benchmark}.")}
    latest.write_text(json.dumps(dict(sorted({**kept, **report.figures}.items())), indent=2) + "\n")


def times(value: float) -> str:
    """A ratio, as the tables show it."""
    return f"{value:.2f} x"


def spread(value: Spread) -> str:
    """A ratio, and between which values the middle half of its rounds lies."""
    return f"{value.value:.2f} x ({value.low:.2f} to {value.high:.2f})"


def milliseconds(value: float) -> str:
    """A time given in seconds, as the tables show it."""
    return f"{value * 1000:.2f} ms"
