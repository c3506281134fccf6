"""A function that Lambda starts from a snapshot: it has its settings from before, and a connection of its own."""

import os
import subprocess
import sys
from collections.abc import Callable
from types import ModuleType

import psycopg
import pytest

from charging import errors
from tests.support.invocation import CHARGES, ROOT, Instance, charge_event, database_variables
from tests.support.ledger import until

type Hook = Callable[[], None]


@pytest.fixture
def hooks(monkeypatch: pytest.MonkeyPatch) -> list[Hook]:
    """What a module has asked Lambda's runtime to call before it takes a snapshot."""
    registered: list[Hook] = []
    runtime = ModuleType("snapshot_restore_py")
    monkeypatch.setattr(runtime, "register_before_snapshot", registered.append, raising=False)
    monkeypatch.setitem(sys.modules, "snapshot_restore_py", runtime)
    return registered


def connections(url: str) -> int:
    """How many the function has open."""
    with psycopg.connect(url) as connection:
        row = connection.execute(
            "SELECT count(*) FROM pg_stat_activity"
            " WHERE datname = current_database() AND application_name = 'charging' AND state IS NOT NULL"
        ).fetchone()
    assert row is not None
    return int(row[0])


def test_no_connection_is_in_a_snapshot(hooks: list[Hook], database_url: str) -> None:
    """It would be shared by every instance that starts from it. Each opens its own at its first request."""
    charges = Instance("charges", database_url, CHARGES)
    assert charges.call(charge_event()).status == 201
    assert connections(database_url) == 1
    [before_snapshot] = hooks
    before_snapshot()
    until(lambda: connections(database_url) == 0)
    assert charges.call(charge_event()).status == 201
    charges.close()


def test_a_snapshot_has_what_requests_are_read_with(database_url: str) -> None:
    """Otherwise each instance that starts from it would build the same models at its first requests. Looked at in a
    process of its own, where no test has built them."""
    program = """
from functions.charges import handler
models = [handler.ChargeCommand, handler.RefundCommand]
before = [model.__pydantic_complete__ for model in models]
handler.before_snapshot()
print(before, [model.__pydantic_complete__ for model in models])
"""
    ran = subprocess.run(
        [sys.executable, "-c", program],
        env={**os.environ, **database_variables(database_url), **CHARGES},
        cwd=ROOT,
        capture_output=True,
        text=True,
        check=True,
    )
    assert ran.stdout == "[False, False] [True, True]\n"


def test_faulty_settings_fail_the_snapshot(
    hooks: list[Hook], database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """And so the deployment, and not every request after it."""
    charges = Instance("charges", database_url, CHARGES)
    charges.module.settings.cache_clear()
    for name in database_variables(database_url):
        monkeypatch.delenv(name, raising=False)
    with pytest.raises(errors.Misconfigured):
        hooks[0]()
