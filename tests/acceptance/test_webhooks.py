"""The webhooks function: the scheduler's event in, requests at the receivers, figures and transitions in the log."""

import json
import ssl
from collections.abc import Iterator
from unittest import mock
from uuid import uuid4

import psycopg
import pytest
import trustme
from standardwebhooks.webhooks import Webhook, WebhookVerificationError

from charging import errors, signing
from charging.database import Database
from charging.idempotency import Created, Refused
from charging.webhooks import SWEEP_SECONDS
from tests.conftest import Connect
from tests.support import deliveries as table
from tests.support import deployment, ledger, merchant
from tests.support.deployment import Invoke
from tests.support.invocation import WEBHOOKS, database_variables, sample
from tests.support.merchant import Merchants
from tests.support.receiver import Receiver, silent

MASTER_KEY = "m" * 32
NOTHING_CHANGED = dict.fromkeys(
    [
        "WebhookPaused", "WebhookOpened", "WebhookHalfOpened", "WebhookReopened", "WebhookClosed", "WebhookDisabled",
    ],
    0,
)  # fmt: skip


@pytest.fixture
def merchants() -> Iterator[Merchants]:
    with merchant.serve() as running:
        yield running


@pytest.fixture
def dispatcher(
    database_url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Iterator[Invoke]:
    capsys.readouterr()
    with (
        mock.patch("charging.vault.read_with_previous", return_value=[MASTER_KEY]),
        deployment.instance("webhooks", database_url, monkeypatch, WEBHOOKS) as invoke,
    ):
        yield invoke


def figures(output: str) -> dict[str, float]:
    """All metrics of a run, of which none has a dimension."""
    found: dict[str, float] = {}
    for values, dimensions in deployment.metrics(output):
        assert dimensions == {}
        found |= values
    return found


def test_a_charge_arrives_at_its_merchants_receiver(
    dispatcher: Invoke, connect: Connect, database_url: str, merchants: Merchants
) -> None:
    """From the charge's own statement to the receiver: the event that the topic gets too, once for each endpoint."""
    connection = connect()
    for path in ("/a", "/b"):
        table.register(connection, url=merchants.url(path))
    database = Database(ledger.settings(database_url))
    assert isinstance(ledger.charge(database, uuid4()), Created)
    database.close()
    assert dispatcher(sample("webhooks-schedule"))["SENT"] == 2
    [payload] = connection.execute("SELECT payload FROM outbox").fetchone() or ()
    for path in ("/a", "/b"):
        assert [request.body for request in merchants.received(path)] == [payload.encode()]


def test_a_refund_arrives_where_refunds_are_wanted(
    dispatcher: Invoke, connect: Connect, database_url: str, merchants: Merchants
) -> None:
    """Beside its charge's event or alone, as each endpoint has asked for; a refusal arrives nowhere."""
    connection = connect()
    for path, types in (("/all", ["ChargeCreated", "ChargeRefunded"]), ("/refunds", ["ChargeRefunded"])):
        table.register(connection, url=merchants.url(path), event_types=types)
    with deployment.database(database_url) as database:
        charge_id = ledger.charged(database, amount_cents=1000)
        assert isinstance(ledger.refund(database, uuid4(), charge_id, 600), Created)
        assert isinstance(ledger.refund(database, uuid4(), charge_id, 600), Refused)
    assert dispatcher(sample("webhooks-schedule"))["SENT"] == 3
    created, refunded = (
        payload.encode() for (payload,) in connection.execute("SELECT payload FROM outbox ORDER BY sequence").fetchall()
    )
    assert sorted(request.body for request in merchants.received("/all")) == sorted([created, refunded])
    assert [request.body for request in merchants.received("/refunds")] == [refunded]
    assert json.loads(refunded)["type"] == "ChargeRefunded"


def test_a_run_counts_what_became_of_its_attempts(
    dispatcher: Invoke, connect: Connect, merchants: Merchants, capsys: pytest.CaptureFixture[str]
) -> None:
    """Without a dimension: an endpoint is nothing bounded."""
    connection = connect()
    for path, status in (("/ok", 200), ("/broken", 500), ("/busy", 429), ("/gone", 410)):
        merchants.behave(path, status)
        table.write(connection, table.register(connection, url=merchants.url(path)))
    [last] = [table.register(connection, url=merchants.url("/broken"))]
    table.write(connection, last)
    connection.execute("UPDATE outbox_deliveries SET failures = 7 WHERE endpoint_id = %s", [last])
    dispatcher(sample("webhooks-schedule"))
    assert figures(capsys.readouterr().out) == {
        "WebhookDelivered": 1,
        "WebhookErrors": 4,
        "WebhookFailed": 1,
        **NOTHING_CHANGED,
        "WebhookPaused": 1,
        "WebhookDisabled": 1,
    }


def test_a_run_without_work_counts_nothing_and_says_so(dispatcher: Invoke, capsys: pytest.CaptureFixture[str]) -> None:
    """Zeros show that the dispatcher is alive."""
    dispatcher(sample("webhooks-schedule"))
    output = capsys.readouterr().out
    assert figures(output) == {"WebhookDelivered": 0, "WebhookErrors": 0, "WebhookFailed": 0, **NOTHING_CHANGED}
    [line] = deployment.logs(output)
    assert (line["level"], line["message"]) == ("INFO", "webhooks_run")


def test_every_transition_is_logged_and_counted(
    dispatcher: Invoke, connect: Connect, merchants: Merchants, capsys: pytest.CaptureFixture[str]
) -> None:
    """Opened, half-opened, reopened, closed; each names its endpoint, and none its owner, its URL or a secret."""
    connection = connect()
    endpoint = table.register(connection, url=merchants.url("/a"))
    merchants.behave("/a", 500)
    changes: list[str] = []
    counted: dict[str, float] = {}
    for status, passed in ((500, 0), (500, 40), (200, 100)):
        merchants.behave("/a", status)
        table.write(connection, endpoint, count=5)
        table.let_pass(connection, seconds=passed)
        dispatcher(sample("webhooks-schedule"))
        output = capsys.readouterr().out
        for name, value in figures(output).items():
            counted[name] = counted.get(name, 0) + value
        lines = [line for line in deployment.logs(output) if line["message"] == "webhook_endpoint_changed"]
        assert {line["endpoint_id"] for line in lines} == {str(endpoint)}
        changes += [line["change"] for line in lines]
        for private in ("alice", "127.0.0.1", "whsec_", MASTER_KEY):
            assert private not in output
    assert changes == ["opened", "half_opened", "reopened", "half_opened", "closed"]
    assert [counted[f"Webhook{name}"] for name in ("Opened", "HalfOpened", "Reopened", "Closed")] == [1, 2, 1, 1]


def test_a_delivery_that_is_given_up_is_named(
    dispatcher: Invoke, connect: Connect, merchants: Merchants, capsys: pytest.CaptureFixture[str]
) -> None:
    """So that an operator who is alarmed finds it, and its endpoint."""
    connection = connect()
    endpoint = table.register(connection, url=merchants.url("/a"))
    [event_id] = table.write(connection, endpoint)
    connection.execute("UPDATE outbox_deliveries SET failures = 7")
    merchants.behave("/a", 500)
    dispatcher(sample("webhooks-schedule"))
    [line] = [line for line in deployment.logs(capsys.readouterr().out) if line["message"] == "webhook_failed"]
    assert (line["endpoint_id"], line["event_id"], line["status"]) == (str(endpoint), str(event_id), 500)


def test_why_it_was_given_up_is_told_without_saying_where(
    dispatcher: Invoke, connect: Connect, capsys: pytest.CaptureFixture[str]
) -> None:
    """A certificate's fault names the host: its owner reads that, and the log has the reason alone."""
    connection = connect()
    tls = ssl.create_default_context(ssl.Purpose.CLIENT_AUTH)
    trustme.CA().issue_cert("elsewhere.test").configure_cert(tls)
    with Receiver(silent, tls=tls) as receiver:
        endpoint = table.register(connection, url=f"https://localhost:{receiver.port}/")
        table.write(connection, endpoint)
        connection.execute("UPDATE outbox_deliveries SET failures = 7")
        dispatcher(sample("webhooks-schedule"))
    [line] = [line for line in deployment.logs(capsys.readouterr().out) if line["message"] == "webhook_failed"]
    assert line["reason"] == "tls_failed"
    assert (table.row(connection, endpoint).last_error or "").startswith("tls_failed: ")


def test_a_run_without_a_database_fails_once_and_at_once(
    database_url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """One error is logged, with no password in it, and the run is over although its budget is not."""
    nowhere = psycopg.conninfo.make_conninfo(database_url, port=1)
    with (
        mock.patch("charging.vault.read_with_previous", return_value=[MASTER_KEY]),
        deployment.instance("webhooks", nowhere, monkeypatch, WEBHOOKS | {"WEBHOOKS_BUDGET_SECONDS": "60"}) as invoke,
        pytest.raises(errors.TemporarilyUnavailable),
    ):
        invoke(sample("webhooks-schedule"))
    output = capsys.readouterr().out
    [line] = deployment.logs(output)
    assert (line["level"], line["message"]) == ("ERROR", "webhooks_run_failed")
    assert database_variables(database_url)["DATABASE_PASSWORD"] not in output


def test_without_the_master_key_nothing_is_claimed(
    database_url: str, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    """No attempt is used up for want of a signature."""
    connection = connect()
    endpoint = table.register(connection)
    table.write(connection, endpoint)
    with (
        mock.patch("charging.vault.read_with_previous", side_effect=errors.TemporarilyUnavailable("no key")),
        deployment.instance("webhooks", database_url, monkeypatch, WEBHOOKS) as invoke,
        pytest.raises(errors.TemporarilyUnavailable),
    ):
        invoke(sample("webhooks-schedule"))
    assert table.row(connection, endpoint).attempts == 0


def test_a_master_key_that_was_replaced_signs_beside_the_new_one(
    database_url: str, connect: Connect, merchants: Merchants, monkeypatch: pytest.MonkeyPatch
) -> None:
    """From the next run of a warm instance on, a receiver that has either secret accepts; once the old key is gone,
    the new one's alone."""
    connection = connect()
    endpoint = table.register(connection, url=merchants.url("/a"))
    old, new = (signing.secret(key.encode(), endpoint, 1) for key in (MASTER_KEY, "n" * 32))
    keys = [[MASTER_KEY], ["n" * 32, MASTER_KEY], ["n" * 32]]
    with (
        mock.patch("charging.vault.read_with_previous", side_effect=keys),
        deployment.instance("webhooks", database_url, monkeypatch, WEBHOOKS) as invoke,
    ):
        for _ in keys:
            table.write(connection, endpoint)
            invoke(sample("webhooks-schedule"))
    accepted = [
        [secret for secret in (old, new) if is_accepted(secret, request)] for request in merchants.received("/a")
    ]
    assert accepted == [[old], [old, new], [new]]


def is_accepted(secret: str, request: merchant.Request) -> bool:
    """By the reference library."""
    try:
        Webhook(secret).verify(request.body, request.headers)
    except WebhookVerificationError:
        return False
    return True


def test_a_master_key_that_is_too_short_ends_the_run(
    database_url: str, connect: Connect, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Before it costs any delivery an attempt."""
    connection = connect()
    endpoint = table.register(connection)
    table.write(connection, endpoint)
    with (
        mock.patch("charging.vault.read_with_previous", return_value=["n" * 31]),
        deployment.instance("webhooks", database_url, monkeypatch, WEBHOOKS) as invoke,
        pytest.raises(errors.Misconfigured),
    ):
        invoke(sample("webhooks-schedule"))
    assert table.row(connection, endpoint).attempts == 0


def test_an_invocation_that_is_about_to_end_claims_nothing(dispatcher: Invoke, connect: Connect) -> None:
    """The time that Lambda says is left decides, before the budget does."""
    connection = connect()
    endpoint = table.register(connection)
    table.write(connection, endpoint)
    dispatcher(sample("webhooks-schedule"), seconds=SWEEP_SECONDS - 1)
    assert table.row(connection, endpoint).attempts == 0


def test_a_deployed_function_sends_nothing_to_its_own_machine(
    database_url: str, connect: Connect, merchants: Merchants, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Without the variable that no template has, a loopback URL in the table is refused, not called."""
    connection = connect()
    endpoint = table.register(connection, url=merchants.url("/a"))
    table.write(connection, endpoint)
    variables = {name: value for name, value in WEBHOOKS.items() if name != "LOCAL_WEBHOOKS"}
    with (
        mock.patch("charging.vault.read_with_previous", return_value=[MASTER_KEY]),
        deployment.instance("webhooks", database_url, monkeypatch, variables) as invoke,
    ):
        invoke(sample("webhooks-schedule"))
    assert merchants.requests == []
    assert (table.row(connection, endpoint).last_error or "").startswith("url_not_allowed: ")


def test_a_receiver_that_is_killed_gets_it_again(dispatcher: Invoke, connect: Connect, merchants: Merchants) -> None:
    """Nobody listens: the delivery waits for its next attempt, and goes when somebody does."""
    connection = connect()
    with merchant.serve() as other:
        url = other.url("/a")
    endpoint = table.register(connection, url=url)
    table.write(connection, endpoint)
    dispatcher(sample("webhooks-schedule"))
    row = table.row(connection, endpoint)
    assert (row.status, row.failures) == ("RETRY", 1)
    assert (row.last_error or "").startswith("connect_failed: ")
    connection.execute("UPDATE webhook_endpoints SET url = %s", [merchants.url("/a")])
    table.let_pass(connection, seconds=60)
    dispatcher(sample("webhooks-schedule"))
    assert table.row(connection, endpoint).status == "SENT"
