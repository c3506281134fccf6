"""The functions that no caller waits for: a relay's way to its database, and new instances of their handlers."""

import contextlib
import json
import logging
import sys
from collections.abc import Callable, Iterator, Mapping
from importlib import import_module
from typing import Any

import pytest

from charging import telemetry
from charging.database import Database
from charging.settings import DatabaseSettings
from tests.support.invocation import Context, database_variables

# The longest of their timeouts in template.yaml.
TIMEOUT_SECONDS = 300.0

type Invoke = Callable[..., Any]


@contextlib.contextmanager
def database(url: str) -> Iterator[Database]:
    """A function's way to a database, closed at the end."""
    opened = Database(DatabaseSettings.model_validate(database_variables(url)))
    try:
        yield opened
    finally:
        opened.close()


@contextlib.contextmanager
def instance(
    function: str, url: str, monkeypatch: pytest.MonkeyPatch, variables: Mapping[str, str] | None = None
) -> Iterator[Invoke]:
    """Invokes a new instance of a function: it has read nothing yet, and opens a connection of its own."""
    for name, value in {**database_variables(url, function), **(variables or {})}.items():
        monkeypatch.setenv(name, value)
    module = import_module(f"functions.{function}.handler")
    kept = {name: value for name, value in vars(module).items() if hasattr(value, "cache_clear")}
    for cached in kept.values():
        cached.cache_clear()

    def invoke(event: object, *, seconds: float = TIMEOUT_SECONDS) -> Any:
        # A logger writes to what was standard output at its making, in another test.
        telemetry.logger(function)
        for handler in logging.getLogger(function).handlers:
            if isinstance(handler, logging.StreamHandler):
                handler.stream = sys.stdout
        return module.handler(event, Context(seconds))

    try:
        yield invoke
    finally:
        if "database" in kept and kept["database"].cache_info().currsize:
            kept["database"]().close()
        for cached in kept.values():
            cached.cache_clear()


def metrics(output: str) -> list[tuple[dict[str, float], dict[str, str]]]:
    """The values and the dimensions of each embedded-metrics line in a function's output."""
    found = []
    for document in map(json.loads, output.splitlines()):
        if "_aws" in document:
            [described] = document["_aws"]["CloudWatchMetrics"]
            assert described["Namespace"] == "Charges"
            [names] = described["Dimensions"]
            values = {metric["Name"]: document[metric["Name"]] for metric in described["Metrics"]}
            found.append((values, {name: document[name] for name in names}))
    return found


def logs(output: str) -> list[dict[str, Any]]:
    """The log lines in a function's output."""
    return [document for document in map(json.loads, output.splitlines()) if "_aws" not in document]
