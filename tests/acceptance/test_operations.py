"""The operations function: an operator's document in, an answer in words out, and no secret in the log."""

import json
from collections.abc import Iterator
from typing import Any
from uuid import UUID

import psycopg
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from charging import errors
from tests.conftest import Connect
from tests.support import deployment, outbox
from tests.support.deployment import Invoke
from tests.support.invocation import database_variables, sample

LIST, INSPECT, REDRIVE, PARK = (sample(f"operations-{command}") for command in ("list", "inspect", "redrive", "park"))
EVENT = UUID(INSPECT["ids"][0])


@pytest.fixture
def operations(
    database_url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> Iterator[Invoke]:
    capsys.readouterr()
    with deployment.instance("operations", database_url, monkeypatch) as invoke:
        yield lambda document: json.loads(json.dumps(invoke(document), allow_nan=False))


@pytest.fixture
def event(connect: Connect) -> UUID:
    """The event of the samples, which waits."""
    connection = connect()
    [event_id] = outbox.write(connection, outbox.payload(EVENT, principal="a principal of ours"))
    connection.execute("UPDATE outbox SET id = %s", [EVENT])
    assert event_id != EVENT
    return EVENT


def test_an_event_is_parked_found_and_redriven(operations: Invoke, event: UUID, connect: Connect) -> None:
    """The samples, one after another: what an operator does on a bad night."""
    connection = connect()
    assert operations(LIST)["summary"] == "Waiting: 1. Parked: 0."
    parked = operations(PARK)
    assert parked["summary"] == "Parked: 1 waiting event."
    assert operations(LIST)["summary"] == "Waiting: 0. Parked: 1."
    [shown] = operations(INSPECT)["events"]
    assert shown["lastError"] == f"Parked by an operator: {PARK['reason']}"
    assert json.loads(shown["payload"])["principal"] == "a principal of ours"
    [action] = shown["actions"]
    assert (action["id"], action["operator"], action["reason"]) == (parked["action"], "ann", PARK["reason"])
    redriven = operations(REDRIVE)
    assert redriven["summary"].startswith(
        "Redriven: 1 parked event, under the same ids, 20 a second, the last one due at"
    )
    row = outbox.row(connection, event)
    assert (row.is_failed, row.is_published, row.attempts) == (False, False, 2)
    assert operations(LIST)["summary"] == "Waiting: 1. Parked: 0."


def test_nothing_is_changed_unless_it_says_so(operations: Invoke, event: UUID, connect: Connect) -> None:
    """Without apply the same documents only tell what they would do, and how to have it done."""
    connection = connect()
    dry = operations(PARK | {"apply": False})
    assert dry["applied"] is False
    assert dry["summary"] == "Dry run, nothing was changed. Would be parked: 1 waiting event."
    assert not outbox.row(connection, event).is_failed
    assert operations(dry["nextDocument"])["applied"] is True
    assert outbox.row(connection, event).is_failed


@pytest.mark.parametrize(
    ("document", "members"),
    [
        (PARK | {"reason": ""}, ["reason"]),
        ({"command": "park", "operator": "ann", "apply": True}, ["", "reason"]),
        (REDRIVE | {"since": "an hour", "perSecond": 0, "typ": "x"}, ["since", "perSecond", "typ"]),
        ({"command": "drop"}, ["command"]),
        ([], [""]),
        (sample("relay-schedule"), ["command"]),
    ],
)
def test_what_is_not_acceptable_is_answered(
    document: object, members: list[str], operations: Invoke, event: UUID, connect: Connect
) -> None:
    """Every violation is listed, it says that nothing was done and what to do, and nothing was done."""
    answer = operations(document)
    assert sorted(violation["member"] for violation in answer["violations"]) == sorted(members)
    assert answer["summary"] == "Nothing was done: the document is not acceptable."
    assert operations(answer["nextDocument"])["commands"].keys() == {"list", "inspect", "redrive", "park", "help"}
    assert outbox.row(connect(), event).attempts == 0


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text(max_size=5),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(max_size=5), inner, max_size=3),
    max_leaves=5,
)
any_text = st.text(st.characters(codec=None), max_size=9)
documents = st.fixed_dictionaries(
    {"command": st.sampled_from(["list", "inspect", "redrive", "park"])},
    optional={
        "operator": any_text,
        "reason": any_text,
        "type": any_text,
        "since": st.sampled_from(["99999d", "0s", "2999-12-31T23:59:59.999999-23:59", "2000-01-01T00:00+23:59"]),
        "until": st.sampled_from(["99999d", "0s", "2999-12-31T23:59:59.999999-23:59", "2000-01-01T00:00+23:59"]),
        "ids": st.lists(st.uuids().map(str), min_size=1, max_size=3),
        "apply": st.booleans(),
        "limit": st.integers(-1, 10_001),
    },
)


@settings(max_examples=200, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(documents | json_values)
def test_no_document_makes_it_fail(operations: Invoke, document: object) -> None:
    """Whatever is sent is answered, in JSON, and says in words what was done."""
    answer = operations(document)
    assert answer["summary"]
    assert answer["next"]


def test_the_log_says_who_did_what_and_nothing_personal(
    operations: Invoke, event: UUID, capsys: pytest.CaptureFixture[str]
) -> None:
    """One line for each: the operator, the command, the events and the record; no payload, reason or principal."""
    changed = operations(PARK)
    operations(INSPECT)
    operations({"command": "drop", "a principal of ours": 1})
    output = capsys.readouterr().out
    first, second, third = deployment.logs(output)
    assert (first["command"], first["operator"], first["applied"]) == ("park", "ann", True)
    assert first["action"] == changed["action"]
    assert first["events"] == second["events"] == [str(event)]
    assert third["message"] == "operation_refused"
    assert deployment.metrics(output) == []
    for secret in ("a principal of ours", PARK["reason"], "4900"):
        assert secret not in output


def test_without_a_database_it_fails_and_says_so(
    database_url: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """An operator must not take an error for an answer: the invocation fails, with one line in the log."""
    nowhere = psycopg.conninfo.make_conninfo(database_url, port=1)
    with (
        deployment.instance("operations", nowhere, monkeypatch) as invoke,
        pytest.raises(errors.TemporarilyUnavailable),
    ):
        invoke(LIST)
    output = capsys.readouterr().out
    [line] = deployment.logs(output)
    assert (line["level"], line["message"]) == ("ERROR", "operation_failed")
    assert database_variables(database_url)["DATABASE_PASSWORD"] not in output


def test_a_fault_of_the_database_names_no_row(
    operations: Invoke, event: UUID, connect: Connect, capsys: pytest.CaptureFixture[str]
) -> None:
    """The server's own words may quote what it refuses, and must not reach the log."""
    connect().execute(
        "ALTER TABLE operator_actions ADD CONSTRAINT nobody CHECK (reason <> 'The ledger cannot read this one.')"
    )
    with pytest.raises(errors.DatabaseFault):
        operations(PARK)
    output = capsys.readouterr().out
    assert "operator_actions" in output
    assert PARK["reason"] not in output
    assert not outbox.row(connect(), event).is_failed


def test_an_instance_survives_a_lost_connection(operations: Invoke, connect: Connect) -> None:
    """The next document on the same warm instance is answered."""
    operations(LIST)
    connect().execute(
        "SELECT pg_terminate_backend(pid, 5000) FROM pg_stat_activity"
        " WHERE datname = current_database() AND application_name = 'charging'"
    )
    assert operations(LIST)["summary"] == "Waiting: 0. Parked: 0."


def test_samples_are_what_they_are_named_for() -> None:
    """Each has its command; those that change something say so, as an example to copy from."""
    samples: list[dict[str, Any]] = [LIST, INSPECT, REDRIVE, PARK]
    assert [document["command"] for document in samples] == ["list", "inspect", "redrive", "park"]
    assert [document.get("apply", False) for document in samples] == [False, False, True, True]
