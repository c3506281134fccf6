"""The monitor function: the scheduler's event in, the outbox's figures in the log."""

import subprocess
import sys
from collections.abc import Iterator

import psycopg
import pytest

from charging import errors
from tests.conftest import Connect
from tests.support import deliveries, deployment, outbox
from tests.support.deployment import Invoke
from tests.support.invocation import ROOT, sample


@pytest.fixture
def monitor(database_url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Iterator[Invoke]:
    capsys.readouterr()
    with deployment.instance("monitor", database_url, monkeypatch) as invoke:
        yield invoke


def figures(output: str) -> dict[str, float]:
    """All metrics of a run, of which none has a dimension."""
    found: dict[str, float] = {}
    for values, dimensions in deployment.metrics(output):
        assert dimensions == {}
        found |= values
    return found


def test_an_empty_outbox_is_measured_as_zero(monitor: Invoke, capsys: pytest.CaptureFixture[str]) -> None:
    """No figure at all would be an alarm."""
    monitor(sample("monitor-schedule"))
    measured = figures(capsys.readouterr().out)
    outbox_alone = {"OutboxOldestAge", "OutboxPending", "OutboxFailed", "XminAge"}
    assert measured.keys() == outbox_alone | {"WebhookOldestAge", "WebhookEndpointsLost"}
    assert (measured["OutboxOldestAge"], measured["OutboxPending"], measured["OutboxFailed"]) == (0, 0, 0)
    assert (measured["WebhookOldestAge"], measured["WebhookEndpointsLost"]) == (0, 0)


def test_a_dead_relay_shows(monitor: Invoke, connect: Connect, capsys: pytest.CaptureFixture[str]) -> None:
    """A row that nobody has taken for nine days is nine days old, whether or not its attempts go on."""
    connection = connect()
    oldest, parked, _ = outbox.write(connection, count=3)
    connection.execute(
        "UPDATE outbox SET created_at = now() - interval '9 days', attempts = 7,"
        " next_attempt_at = now() + interval '1 minute' WHERE id = %s",
        [oldest],
    )
    connection.execute("UPDATE outbox SET failed_at = now() WHERE id = %s", [parked])
    monitor(sample("monitor-schedule"))
    measured = figures(capsys.readouterr().out)
    assert measured["OutboxOldestAge"] == pytest.approx(9 * 24 * 3600, abs=60)
    assert (measured["OutboxPending"], measured["OutboxFailed"]) == (2, 1)


def test_a_dead_dispatcher_shows(monitor: Invoke, connect: Connect, capsys: pytest.CaptureFixture[str]) -> None:
    """A webhook that could have been sent an hour ago is an hour late."""
    connection = connect()
    deliveries.write(connection, deliveries.register(connection))
    deliveries.let_pass(connection, seconds=3600)
    monitor(sample("monitor-schedule"))
    assert figures(capsys.readouterr().out)["WebhookOldestAge"] == pytest.approx(3600, abs=60)


def test_a_way_out_that_is_gone_shows(monitor: Invoke, connect: Connect, capsys: pytest.CaptureFixture[str]) -> None:
    """What waits for an open breaker has no age. Several, while nobody takes anything, are a figure of their own."""
    connection = connect()
    for _ in range(3):
        deliveries.write(connection, deliveries.register(connection))
    connection.execute("UPDATE webhook_endpoints SET opened_at = now(), resumes_at = now()")
    deliveries.let_pass(connection, seconds=3600)
    monitor(sample("monitor-schedule"))
    measured = figures(capsys.readouterr().out)
    assert (measured["WebhookOldestAge"], measured["WebhookEndpointsLost"]) == (0, 3)


def test_without_a_database_it_fails_and_emits_nothing(
    database_url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The alarm takes a missing figure for a breach; a zero would hide the outage."""
    nowhere = psycopg.conninfo.make_conninfo(database_url, port=1)
    with (
        deployment.instance("monitor", nowhere, monkeypatch) as invoke,
        pytest.raises(errors.TemporarilyUnavailable),
    ):
        invoke(sample("monitor-schedule"))
    output = capsys.readouterr().out
    assert deployment.metrics(output) == []
    [line] = deployment.logs(output)
    assert (line["level"], line["message"]) == ("ERROR", "measurement_failed")


def test_it_does_not_depend_on_the_relay() -> None:
    """It loads neither the relay nor the AWS SDK: what breaks those leaves the measurement alone."""
    program = (
        "import sys, functions.monitor.handler\n"
        "print(*sorted({'charging.relay', 'charging.topic', 'boto3'} & set(sys.modules)))"
    )
    ended = subprocess.run([sys.executable, "-c", program], cwd=ROOT, capture_output=True, text=True, check=True)
    assert ended.stdout.strip() == ""
