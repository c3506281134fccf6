"""The maintenance function: the scheduler's event in, tables kept to their retention, findings in the log."""

import os
import re
import subprocess
import sys
from collections.abc import Iterator
from typing import Any
from uuid import UUID

import psycopg
import pytest

from charging import errors
from charging.maintenance import BATCH, RESERVE_SECONDS
from functions.maintenance.handler import NAMED
from tests.conftest import Connect
from tests.support import deployment, history
from tests.support.deployment import Invoke
from tests.support.history import DAY, HOUR, Connection
from tests.support.invocation import ROOT, database_variables, sample
from tests.support.ledger import charged, holding_up, refund, until, until_blocked

OPERATIONS = ROOT / "docs" / "operations.md"
RETENTION = {"OUTBOX_RETENTION_DAYS": "14", "PROCESSED_EVENTS_RETENTION_DAYS": "60"}

# A run as Lambda does it, in a process that can be killed.
RUN = """
from functions.maintenance.handler import handler
from tests.support.invocation import Context, sample
handler(sample("maintenance-schedule"), Context(120))
"""


@pytest.fixture
def maintain(
    database_url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Iterator[Invoke]:
    """A warm instance, in a database that had no charges at its first run."""
    with deployment.instance("maintenance", database_url, monkeypatch, RETENTION) as invoke:
        invoke(sample("maintenance-schedule"))
        capsys.readouterr()
        yield invoke


def figures(output: str) -> dict[str, float]:
    """The metrics of a run, of which none has a dimension."""
    [(values, dimensions)] = deployment.metrics(output)
    assert dimensions == {}
    return values


def reopen(connection: Connection) -> None:
    """Lets the reconciliation go back over two hours."""
    connection.execute("UPDATE reconciliation SET checked_until = checked_until - interval '2 hours'")


def test_a_run_keeps_the_tables_to_their_retention(
    maintain: Invoke, connect: Connect, capsys: pytest.CaptureFixture[str]
) -> None:
    """It says how much it removed: in its answer, in one line of the log, and as metrics."""
    connection = connect()
    history.keys(connection, 3, over_for=HOUR)
    history.keys(connection, 1, over_for=-HOUR)
    history.events(connection, 4, published=14 * DAY)
    history.events(connection, 1, published=14 * DAY - HOUR)
    history.notes(connection, 5, processed=60 * DAY)
    history.notes(connection, 1, processed=60 * DAY - HOUR)
    summary = {
        "counts": {"keys": 3, "events": 4, "processed_events": 5},
        "missing_events": 0,
        "started_keys": 0,
        "is_finished": True,
    }
    assert maintain(sample("maintenance-schedule")) == summary
    output = capsys.readouterr().out
    [line] = deployment.logs(output)
    assert (line["level"], line["message"]) == ("INFO", "maintenance_run")
    assert line.items() >= summary.items()
    assert figures(output) == {
        "MaintenanceRuns": 1,
        "ChargesWithoutOutbox": 0,
        "StartedKeys": 0,
        "KeysPurged": 3,
        "EventsPurged": 4,
        "ProcessedEventsPurged": 5,
        "DeliveriesPurged": 0,
    }
    remaining = (
        "SELECT (SELECT count(*) FROM idempotency_keys), (SELECT count(*) FROM outbox),"
        " (SELECT count(*) FROM processed_events)"
    )
    assert connection.execute(remaining).fetchone() == (1, 1, 1)


def test_a_run_without_work_counts_zeros(maintain: Invoke, capsys: pytest.CaptureFixture[str]) -> None:
    """A figure that is missing is an alarm."""
    maintain(sample("maintenance-schedule"))
    values = figures(capsys.readouterr().out)
    assert values.pop("MaintenanceRuns") == 1
    assert set(values.values()) == {0}


def test_the_retentions_are_those_of_the_deployment(
    database_url: str, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Each its own."""
    connection = connect()
    history.events(connection, 1, published=3 * DAY)
    history.notes(connection, 1, processed=31 * DAY)
    environment = {"OUTBOX_RETENTION_DAYS": "2", "PROCESSED_EVENTS_RETENTION_DAYS": "30"}
    with deployment.instance("maintenance", database_url, monkeypatch, environment) as maintain:
        assert maintain(sample("maintenance-schedule"))["counts"] == {"events": 1, "processed_events": 1}


def test_each_missing_event_is_named_until_it_is_there(
    maintain: Invoke, connect: Connect, capsys: pytest.CaptureFixture[str]
) -> None:
    """A charge's own and a refund's, by its place and nothing else, run after run."""
    connection = connect()
    one, other = sorted(history.charges(connection, 2, made=HOUR))
    history.announce(connection, other)
    place = history.refund(connection, other, made=HOUR)
    reopen(connection)
    for _ in range(2):
        assert maintain(sample("maintenance-schedule"))["missing_events"] == 2
        output = capsys.readouterr().out
        assert figures(output)["ChargesWithoutOutbox"] == 2
        named = [line for line in deployment.logs(output) if line["message"] == "event_missing"]
        members = ("level", "event_type", "aggregate_id", "sequence")
        assert [tuple(line[member] for member in members) for line in named] == [
            ("ERROR", "ChargeCreated", str(one), 1),
            ("ERROR", "ChargeRefunded", str(other), 2),
        ]
        assert "alice" not in output
    history.announce(connection, one)
    history.announce(connection, other, place=place, published=HOUR)
    assert maintain(sample("maintenance-schedule"))["missing_events"] == 0


@pytest.mark.parametrize("place", [1, 2])
def test_the_runbook_writes_the_event_that_is_missing(
    place: int, maintain: Invoke, connect: Connect, database_url: str
) -> None:
    """docs/operations.md: it says what the event of the charge or refund said, under a new id, and ends the finding."""
    connection = connect()
    with deployment.database(database_url) as database:
        charge_id = charged(database, amount_cents=1250)
        refund(database, UUID(int=2), charge_id, 250)
    event = "DELETE FROM outbox WHERE sequence = %s RETURNING payload::jsonb - 'id', aggregate_id, event_type"
    lost = connection.execute(event, [place]).fetchall()
    for table in ("charges", "refunds"):
        connection.execute(f"UPDATE {table} SET created_at = created_at - interval '1 hour'")
    reopen(connection)
    assert maintain(sample("maintenance-schedule"))["missing_events"] == 1
    for table in ("charges", "refunds"):
        connection.execute(f"UPDATE {table} SET created_at = created_at + interval '1 hour'")

    [mending] = re.findall(r"```sql\n(INSERT INTO outbox.*?)```", OPERATIONS.read_text(), re.DOTALL)
    mending = re.sub(r"[0-9a-f]{8}(-[0-9a-f]{4}){3}-[0-9a-f]{12}", str(charge_id), mending)
    connection.execute(mending.replace("AND sequence = 1;", f"AND sequence = {place};"))
    assert maintain(sample("maintenance-schedule"))["missing_events"] == 0
    assert connection.execute(event, [place]).fetchall() == lost


def test_each_started_key_is_named_and_left_alone(
    maintain: Invoke, connect: Connect, capsys: pytest.CaptureFixture[str]
) -> None:
    """However old it is. By endpoint and key, the oldest first, and without whose it is."""
    connection = connect()
    keys = history.keys(connection, 2, over_for=100 * DAY, status="STARTED")
    for _ in range(2):
        assert maintain(sample("maintenance-schedule"))["started_keys"] == 2
        output = capsys.readouterr().out
        assert figures(output)["StartedKeys"] == 2
        named = [line for line in deployment.logs(output) if line["message"] == "started_key"]
        assert [(line["level"], line["endpoint"], line["idempotency_key"]) for line in named] == [
            ("ERROR", "POST /charges", str(key)) for key in reversed(keys)
        ]
        assert "created_at" in named[0]
        assert "alice" not in output


def test_the_log_names_no_more_than_one_can_read(
    maintain: Invoke, connect: Connect, capsys: pytest.CaptureFixture[str]
) -> None:
    """The figures tell of the rest."""
    connection = connect()
    history.keys(connection, NAMED + 5, over_for=HOUR, status="STARTED")
    history.charges(connection, NAMED + 5, made=HOUR)
    reopen(connection)
    maintain(sample("maintenance-schedule"))
    output = capsys.readouterr().out
    values = figures(output)
    assert (values["StartedKeys"], values["ChargesWithoutOutbox"]) == (NAMED + 5, NAMED + 5)
    assert len(deployment.logs(output)) == 2 * NAMED + 1


def test_a_run_that_has_not_come_to_its_end_is_not_counted(
    maintain: Invoke, connect: Connect, capsys: pytest.CaptureFixture[str]
) -> None:
    """It begins nothing that it might not end, tells what is known already, and the alarm sees that work was left."""
    connection = connect()
    history.keys(connection, 1, over_for=HOUR)
    history.keys(connection, 1, over_for=HOUR, status="STARTED")
    run = maintain(sample("maintenance-schedule"), seconds=RESERVE_SECONDS - 1)
    assert (run["is_finished"], run["counts"]) == (False, {})
    values = figures(capsys.readouterr().out)
    assert (values["MaintenanceRuns"], values["StartedKeys"]) == (0, 1)
    assert maintain(sample("maintenance-schedule"))["counts"] == {"keys": 1}


def assert_one_error(output: str, password: str) -> None:
    """A failure is one line, has no figures, and no secret."""
    [line] = deployment.logs(output)
    assert (line["level"], line["message"]) == ("ERROR", "maintenance_run_failed")
    assert deployment.metrics(output) == []
    assert password not in output


def test_a_run_without_a_database_fails_once_and_at_once(
    database_url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One error is logged, and nothing is measured: the alarm takes that for a breach."""
    nowhere = psycopg.conninfo.make_conninfo(database_url, port=1)
    with (
        deployment.instance("maintenance", nowhere, monkeypatch, RETENTION) as maintain,
        pytest.raises(errors.TemporarilyUnavailable),
    ):
        maintain(sample("maintenance-schedule"))
    assert_one_error(capsys.readouterr().out, database_variables(database_url)["DATABASE_PASSWORD"])


def test_a_run_that_failed_in_part_says_what_it_did(
    maintain: Invoke, connect: Connect, capsys: pytest.CaptureFixture[str]
) -> None:
    """One error, with all that was done and found; and the run is not counted."""
    connection, holder = connect(), connect()
    history.keys(connection, 3, over_for=HOUR)
    with holder.transaction():
        holder.execute("LOCK TABLE reconciliation")
        with pytest.raises(errors.Contended):
            maintain(sample("maintenance-schedule"))
    output = capsys.readouterr().out
    [line] = deployment.logs(output)
    assert (line["level"], line["message"], line["counts"]) == ("ERROR", "maintenance_run_failed", {"keys": 3})
    assert line["exception_name"] == "Contended"
    assert (figures(output)["MaintenanceRuns"], figures(output)["KeysPurged"]) == (0, 3)


def test_a_dedupe_window_that_is_too_short_removes_nothing(
    database_url: str, connect: Connect, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """A deployment that would forget events before their last redelivery fails in every run, and says why."""
    connection = connect()
    history.notes(connection, 1, processed=100 * DAY)
    short = RETENTION | {"PROCESSED_EVENTS_RETENTION_DAYS": "41"}
    with (
        deployment.instance("maintenance", database_url, monkeypatch, short) as maintain,
        pytest.raises(
            errors.Misconfigured, match=r"PROCESSED_EVENTS_RETENTION_DAYS.*OUTBOX_RETENTION_DAYS and 28 days"
        ),
    ):
        maintain(sample("maintenance-schedule"))
    assert_one_error(capsys.readouterr().out, database_variables(database_url)["DATABASE_PASSWORD"])
    assert connection.execute("SELECT count(*) FROM processed_events").fetchone() == (1,)


def test_an_instance_survives_a_run_that_failed(maintain: Invoke, connect: Connect) -> None:
    """The next run on the same warm instance finds the database that is back, and does its work."""
    connection = connect()
    connection.execute(
        "SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity"
        " WHERE datname = current_database() AND application_name = 'charging'"
    )
    history.keys(connection, 1, over_for=HOUR)
    assert maintain(sample("maintenance-schedule"))["counts"] == {"keys": 1}


def test_a_run_that_is_killed_loses_nothing(maintain: Invoke, connect: Connect, database_url: str) -> None:
    """SIGKILL in the middle of a batch: the server undoes it, those before it are done, and the next run goes on."""
    connection, holder = connect(), connect()
    keys = history.keys(connection, 2 * BATCH, over_for=HOUR)
    others = history.keys(connection, 1, over_for=-HOUR)
    in_the_second_batch = keys[BATCH // 2]

    def left() -> list[Any]:
        return connection.execute("SELECT key FROM idempotency_keys").fetchall()

    environment = {**os.environ, **database_variables(database_url), **RETENTION}
    with holding_up(
        holder, at_commit=False, event="DELETE ON idempotency_keys", rows=f"OLD.key = '{in_the_second_batch}'"
    ):
        with subprocess.Popen(
            [sys.executable, "-c", RUN], cwd=ROOT, env=environment, stdout=subprocess.DEVNULL
        ) as process:
            try:
                until_blocked(connection)
            finally:
                process.kill()
        assert len(left()) == BATCH + len(others)
        # The server notices that nobody waits for its answer.
        until_blocked(connection, waiting=0)
    until(lambda: len(left()) == BATCH + len(others))
    assert maintain(sample("maintenance-schedule"))["counts"] == {"keys": BATCH}
    assert left() == [(key,) for key in others]
