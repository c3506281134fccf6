"""What a cold start costs: each handler imported from what is deployed, by an interpreter with nothing in it, and its
first call."""

import importlib
import json
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

from bench import broker, measuring, reporting
from bench.reporting import Report, Table
from local import build
from tests.packaging.artifacts import FUNCTIONS, TEMPLATE, Artifacts, lay_out_runtime
from tests.support.database import Databases
from tests.support.invocation import Event, charge_event, database_variables, sample


@dataclass(frozen=True, slots=True)
class Scale:
    """How many cold starts there are of each kind."""

    rounds: int


FULL = Scale(rounds=15)
QUICK = Scale(rounds=3)

TARGETS = {
    "cold.charges_vs_no_bytecode": reporting.at_most(0.35),
    "cold.charges_vs_packages": reporting.at_most(1.15),
    "cold.charges_mb": reporting.at_most(100),
}

CHARGES = "ChargesFunction"
# What each function is called with first. One that is not among them is only imported.
EVENTS = {
    "RelayFunction": "relay-schedule",
    "SubscriberFunction": "subscriber-sqs",
    "MonitorFunction": "monitor-schedule",
    "MigrateFunction": "migrate",
    "MaintenanceFunction": "maintenance-schedule",
    "OperationsFunction": "operations-list",
}

# Runs in the interpreter that has nothing: what it is told comes in, and what it finds goes out, as JSON.
PROGRAM = """
import sys, time
import json, re, resource
told = json.loads(sys.stdin.read())
sys.path[:0] = told["folders"]

class Context:
    aws_request_id = function_name = function_version = invoked_function_arn = "cold"
    memory_limit_in_mb = 512
    log_group_name = log_stream_name = "cold"
    get_remaining_time_in_millis = staticmethod(lambda: 60_000)

started, worked = time.perf_counter(), time.process_time()
for name in told["modules"]:
    __import__(name)
imported, work = time.perf_counter(), time.process_time() - worked
modules = {name: getattr(module, "__file__", None) for name, module in sys.modules.items()}
if told["event"] is not None:
    output, sys.stdout = sys.stdout, sys.stderr
    answer = sys.modules["handler"].handler(told["event"], Context)
    assert (answer or {}).get("statusCode", 200) < 400, answer
    sys.stdout = output
called = time.perf_counter()
try:
    # Linux counts what was before the exec into ru_maxrss: the process that this one was forked from.
    with open("/proc/self/status") as status:
        peak = int(re.search(r"VmHWM:\\s*(\\d+) kB", status.read())[1]) * 1024
except OSError:
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
print(json.dumps([imported - started, work, called - imported, peak, modules]))
"""


@dataclass(frozen=True, slots=True)
class Start:
    """One cold start. `cpu_seconds` is the processor's part of the import: what a busy machine does not change.
    `modules` is what was loaded by the import, in its order, with the files."""

    import_seconds: float
    cpu_seconds: float
    call_seconds: float | None
    peak_bytes: int
    modules: Mapping[str, str | None]


def run(databases: Databases, scale: Scale) -> Report:
    """Builds what is deployed, and starts it."""
    reporting.progress("build")
    build.build()
    with TemporaryDirectory() as folder:
        copy = Path(folder, "build")
        with build.undisturbed():
            shutil.copytree(build.TEMPLATE.parent, copy)
        return start(Artifacts(copy, build.architecture()), databases, scale)


def start(artifacts: Artifacts, databases: Databases, scale: Scale) -> Report:
    """Starts every function of the artifacts cold, and charges also without bytecode and without our own code."""
    # Lambda's runtime brings the SDK with its bytecode, so here it has to have some.
    importlib.import_module("boto3").client("sns", region_name=broker.REGION)
    with TemporaryDirectory() as folder, databases.migrated() as url, broker.serve() as address:
        bare = Artifacts(Path(folder, "bare"), artifacts.architecture)
        shutil.copytree(artifacts.folder, bare.folder, ignore=shutil.ignore_patterns("__pycache__"))
        # A first call of the relay's that drains, and does not poll until its budget ends.
        variables = database_variables(url) | broker.variables(address) | {"RELAY_BUDGET_SECONDS": "0"}
        place = _Place(lay_out_runtime(Path(folder, "runtime")), variables)
        packages = place.packages(artifacts, CHARGES)
        reporting.progress("cold starts")
        starts = measuring.take_turns(
            scale.rounds,
            {name: partial(place.start, artifacts, name) for name in FUNCTIONS}
            | {
                "without bytecode": partial(place.start, bare, CHARGES),
                "its packages alone": partial(place.start, artifacts, CHARGES, packages),
            },
        )
    seconds = {name: [each.cpu_seconds for each in rounds] for name, rounds in starts.items()}
    charges_peak = _median([each.peak_bytes for each in starts[CHARGES]]) / 1e6
    no_bytecode = measuring.ratio(seconds[CHARGES], seconds["without bytecode"])
    alone = measuring.ratio(seconds[CHARGES], seconds["its packages alone"])
    return Report(
        "cold",
        {
            "cold.charges_vs_no_bytecode": no_bytecode.value,
            "cold.charges_vs_packages": alone.value,
            "cold.charges_mb": charges_peak,
            "cold.charges_import_ms": _median([each.import_seconds for each in starts[CHARGES]]) * 1000,
        },
        TARGETS,
        [
            Table(
                "A cold start of each function",
                ["function", "import", "of the processor", "modules", "first call", "most memory"],
                [[name, *_cells(rounds)] for name, rounds in starts.items() if name in FUNCTIONS],
                "Without the interpreter's own start. A first call connects to the database.",
            ),
            Table(
                "The import of charges, compared by the processor's time",
                ["with", "import", "as deployed to it"],
                [
                    ["without bytecode", _shown(seconds["without bytecode"]), reporting.spread(no_bytecode)],
                    [
                        f"its {len(packages)} third-party modules alone",
                        _shown(seconds["its packages alone"]),
                        reporting.spread(alone),
                    ],
                ],
            ),
        ],
    )


def _cells(starts: Sequence[Start]) -> list[str]:
    calls = [each.call_seconds for each in starts if each.call_seconds is not None]
    return [
        _shown([each.import_seconds for each in starts]),
        _shown([each.cpu_seconds for each in starts]),
        str(len(starts[0].modules)),
        _shown(calls) if calls else "",
        f"{_median([each.peak_bytes for each in starts]) / 1e6:.0f} MB",
    ]


def _median(values: Sequence[float]) -> float:
    return measuring.percentile(values, 0.5)


def _shown(seconds: Sequence[float]) -> str:
    return f"{_median(seconds) * 1000:.0f} ms"


@dataclass(frozen=True, slots=True)
class _Place:
    """What is around a function: what the runtime brings, and where its database and its topic are."""

    runtime: Path
    variables: Mapping[str, str]

    def start(self, artifacts: Artifacts, name: str, modules: Sequence[str] = ("handler",)) -> Start:
        """Starts a function cold; with other modules than its handler it is not called."""
        folders = [artifacts.function(name), *(layer / "python" for layer in artifacts.layers(name)), self.runtime]
        event = _event(name) if modules == ("handler",) else None
        finished = subprocess.run(
            [sys.executable, "-I", "-S", "-B", "-c", PROGRAM],
            input=json.dumps({"folders": [str(folder) for folder in folders], "modules": modules, "event": event}),
            env={**_settings(name), **self.variables},
            capture_output=True,
            text=True,
            check=False,
        )
        if finished.returncode:
            raise AssertionError(f"{name} does not start:\n{finished.stderr}")
        importing, work, calling, peak, loaded = json.loads(finished.stdout)
        return Start(importing, work, calling if event is not None else None, peak, loaded)

    def packages(self, artifacts: Artifacts, name: str) -> list[str]:
        """The third-party modules that a function's import loads, in their order."""
        layer = str(artifacts.layer("DependenciesLayer"))
        loaded = self.start(artifacts, name).modules
        return [module for module, file in loaded.items() if file is not None and file.startswith(layer)]


def _event(name: str) -> Event | None:
    if name == CHARGES:
        return charge_event()
    return sample(EVENTS[name]) if name in EVENTS else None


def _settings(name: str) -> dict[str, str]:
    """The variables that the template gives to a function: a text, a parameter's default, or else nothing."""
    known = {
        parameter: str(given["Default"]) for parameter, given in TEMPLATE["Parameters"].items() if "Default" in given
    }
    known["Topic"] = broker.TOPIC_ARN
    given: dict[str, Any] = FUNCTIONS[name].get("Environment", {}).get("Variables", {})
    return {
        variable: value if isinstance(value, str) else known.get(value.get("Ref"), "")
        for variable, value in given.items()
    }
