"""What a charge leaves in the log: a count of every outcome, the key for whoever asks, and nothing personal."""

import contextlib
import json
import subprocess
import sys
from datetime import datetime
from typing import Any
from uuid import UUID

import pytest

from tests.conftest import Connect
from tests.support.invocation import CHARGES, ROOT, Event, Instance, charge_event, refund_event, set_limit
from tests.support.ledger import Twin
from tests.support.wire import Wire

KEY = UUID("8e03978e-40d5-43e8-bc93-6894a57f9324")

# Words that are found again wherever they end up.
PRINCIPAL, REFERENCE, MEMBER = "principal-7f3a", "reference-7f3a", "member-7f3a"
BODY = {"amountCents": 13579, "reference": REFERENCE}

# Standard output is the function's log: a process of its own has one of its own.
FUNCTION = """
import json, sys
from tests.support.invocation import CHARGES, Instance
instance = Instance("charges", sys.argv[1], CHARGES)
for event in json.load(sys.stdin):
    print(instance.call(event).status, file=sys.stderr)
"""


def run(database_url: str, *events: Event) -> tuple[list[int], list[dict[str, Any]]]:
    """Sends the events to one instance; returns the statuses and the log's lines, which are all JSON."""
    program = subprocess.run(
        [sys.executable, "-c", FUNCTION, database_url],
        input=json.dumps(events),
        capture_output=True,
        text=True,
        cwd=ROOT,
        check=True,
    )
    return [int(line) for line in program.stderr.split()], [json.loads(line) for line in program.stdout.splitlines()]


def charge(body: object = None, key: UUID | str = KEY) -> Event:
    return charge_event(key, BODY if body is None else body, principal=PRINCIPAL)


def metrics_of(lines: list[dict[str, Any]]) -> list[dict[str, Any]]:
    return [line for line in lines if "_aws" in line]


def test_every_outcome_is_counted_once_by_endpoint(database_url: str) -> None:
    """created, replayed, payload_conflict and in_flight, with the endpoint as the only dimension and nothing else."""
    held = UUID(int=1)
    with Twin(database_url, held, principal=PRINCIPAL):
        statuses, lines = run(database_url, charge(), charge(), charge({"amountCents": 1}), charge(key=held))
    assert statuses == [201, 201, 422, 409]
    metrics = metrics_of(lines)
    for line, name in zip(metrics, ["created", "replayed", "payload_conflict", "in_flight"], strict=True):
        (directive,) = line["_aws"]["CloudWatchMetrics"]
        assert directive["Namespace"] == "Charges"
        assert directive["Dimensions"] == [["endpoint"]]
        assert directive["Metrics"] == [{"Name": name, "Unit": "Count"}]
        assert line["_aws"].keys() == {"Timestamp", "CloudWatchMetrics"}
        assert line["endpoint"] == "POST /charges"
        assert line[name] in (1, 1.0, [1], [1.0])


def test_a_refunds_outcomes_are_counted_by_its_own_endpoint(database_url: str) -> None:
    """A refusal by the rule is a result of its own, and no replay until it is one."""
    with contextlib.closing(Instance("charges", database_url, CHARGES)) as instance:
        path = instance.call(charge({"amountCents": 1000})).headers["location"]
    made, refused = (
        refund_event(path, UUID(int=cents), {"amountCents": cents}, principal=PRINCIPAL) for cents in (600, 500)
    )
    statuses, lines = run(database_url, made, refused, refused)
    assert statuses == [201, 409, 409]
    for line, name in zip(metrics_of(lines), ["created", "refused", "replayed"], strict=True):
        assert line["_aws"]["CloudWatchMetrics"][0]["Metrics"] == [{"Name": name, "Unit": "Count"}]
        assert line["endpoint"] == "POST /charges/{id}/refunds"
        assert line[name] == 1


def test_an_outcome_is_one_line_that_has_the_key_and_no_metric_of_it(database_url: str) -> None:
    """An operator finds a caller's request by its key; a metric for each key would have no end."""
    _, lines = run(database_url, charge(), charge())
    assert [(line["level"], line["message"], line["service"]) for line in lines] == [
        ("INFO", "created", "charges"),
        ("INFO", "replayed", "charges"),
    ]
    for line in lines:
        assert line["idempotency_key"] == str(KEY)
        assert str(KEY) not in json.dumps(line["_aws"])
        assert datetime.fromisoformat(line["timestamp"]).timestamp() * 1000 == pytest.approx(
            line["_aws"]["Timestamp"], abs=1000
        )


def assert_nothing_personal(lines: list[dict[str, Any]]) -> None:
    text = json.dumps(lines, ensure_ascii=False)
    for word in (PRINCIPAL, REFERENCE, MEMBER, "13579"):
        assert word not in text


def test_outcomes_log_nothing_personal(database_url: str) -> None:
    """Neither the principal nor anything of the body is in any line."""
    _, lines = run(database_url, charge(), charge(), charge({"amountCents": 1}))
    assert len(lines) == 3
    assert_nothing_personal(lines)


def test_refusals_log_nothing_that_was_sent(database_url: str) -> None:
    """The reason for a refusal quotes the caller, and so goes to the caller only."""
    events = [
        charge({"amountCents": 13579, MEMBER: REFERENCE}),
        charge(f'{{"amountCents":13579,"reference":"{REFERENCE}"'),
        charge({"amountCents": 13579, "reference": REFERENCE * 5}),
        charge(key=MEMBER),
        charge_event(KEY, BODY, principal=f"{PRINCIPAL}\n"),
        charge() | {"path": f"/{MEMBER}"},
    ]
    statuses, lines = run(database_url, *events)
    assert statuses == [400, 400, 400, 400, 401, 404]
    assert [line["message"] for line in lines][3:] == ["idempotency_key_invalid", "unauthenticated", "not_found"]
    assert_nothing_personal(lines)


@pytest.mark.parametrize("table", ["charges", "outbox", "idempotency_keys"])
def test_a_fault_of_ours_is_logged_without_the_row(database_url: str, connect: Connect, table: str) -> None:
    """The server's message for a refused row quotes it in full; the log has what went wrong, and where."""
    connect().execute(f"ALTER TABLE {table} ADD CONSTRAINT refused_here CHECK (false) NOT VALID")
    statuses, lines = run(database_url, charge())
    assert statuses == [503]
    (line,) = lines
    assert (line["level"], line["message"]) == ("ERROR", "temporarily_unavailable")
    assert "refused_here" in json.dumps(line)
    assert_nothing_personal(lines)


def test_an_outage_is_logged_with_its_reason(database_url: str, connect: Connect) -> None:
    """No connection, a statement that the server ends, a commit whose answer is lost: a warning each, not personal."""
    with Wire(database_url) as wire:
        wire.refuse()
        statuses, lines = run(wire.url, charge())
    operator = connect()
    set_limit(operator, "charges", "statement_timeout", "50ms")
    # However long a process takes to start on a busy machine.
    operator.execute("SET idle_in_transaction_session_timeout = 0")
    operator.execute("SET transaction_timeout = 0")
    with operator.transaction():
        operator.execute("LOCK TABLE outbox IN SHARE MODE")
        more_statuses, more_lines = run(database_url, charge())
    assert statuses + more_statuses == [503, 503]
    for line in lines + more_lines:
        assert (line["level"], line["message"]) == ("WARNING", "temporarily_unavailable")
        assert line["reason"]
    assert_nothing_personal(lines + more_lines)
