"""The migrate function: invoked by a deployment, it brings the database forward or fails."""

import contextlib
import http.server
import json
import threading
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import psycopg
import pytest

from charging import errors, roles
from tests.support import deployment
from tests.support.invocation import ROOT, sample

SCHEMA = ROOT / "schema"
NAMES = sorted(path.name for path in SCHEMA.glob("[0-9]*.sql"))
OWN = {"DATABASE_ROLES_PASSWORD": "secret"}


def test_it_applies_what_is_missing_and_names_it(empty_database_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On an empty database every file, in order; a second invocation finds nothing to do."""
    with deployment.instance("migrate", empty_database_url, monkeypatch, OWN) as invoke:
        assert invoke(sample("migrate")) == {"applied": NAMES}
        assert invoke(sample("migrate")) == {"applied": []}


def test_it_lets_the_functions_in(empty_database_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Each signs in as itself afterwards, with the password that the deployment gives the functions."""
    with deployment.instance("migrate", empty_database_url, monkeypatch, OWN) as invoke:
        invoke(sample("migrate"))
    database = psycopg.conninfo.conninfo_to_dict(empty_database_url)["dbname"]
    for function in roles.ROLES:
        role = roles.name(str(database), function)
        with psycopg.connect(empty_database_url, user=role, password=OWN["DATABASE_ROLES_PASSWORD"]) as connection:
            assert connection.info.user == role


def test_it_fails_where_it_cannot_go_on(database_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A deployment that waits for it must not take a refusal for a success."""
    (tmp_path / "schema").mkdir()
    (tmp_path / "schema" / NAMES[0]).write_bytes((SCHEMA / NAMES[0]).read_bytes() + b"\n")
    monkeypatch.syspath_prepend(tmp_path)
    with (
        deployment.instance("migrate", database_url, monkeypatch, OWN) as invoke,
        pytest.raises(errors.MigrationRefused),
    ):
        invoke(sample("migrate"))


def test_it_leaves_no_connection_behind(empty_database_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is invoked once in a deployment: nothing of it stays on the database."""
    with deployment.instance("migrate", empty_database_url, monkeypatch, OWN) as invoke:
        invoke(sample("migrate"))
    with psycopg.connect(empty_database_url) as connection:
        row = connection.execute(
            "SELECT count(*) FROM pg_stat_activity"
            " WHERE datname = current_database() AND application_name = 'charging' AND state IS NOT NULL"
        ).fetchone()
    assert row == (0,)


# ---- asked by CloudFormation ----------------------------------------------------------------------------------------


@contextlib.contextmanager
def cloudformation() -> Iterator[tuple[str, list[dict[str, Any]]]]:
    """Where a stack waits for answers, and those that came."""
    answers: list[dict[str, Any]] = []

    class Waiting(http.server.BaseHTTPRequestHandler):
        def do_PUT(self) -> None:
            # The address is signed for a request that names no type.
            assert self.headers["Content-Type"] == ""
            answers.append(json.loads(self.rfile.read(int(self.headers["Content-Length"]))))
            self.send_response(200)
            self.end_headers()

        def log_message(self, format: str, *args: object) -> None:  # noqa: A002 - its name there
            pass

    with http.server.ThreadingHTTPServer(("127.0.0.1", 0), Waiting) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        try:
            yield f"http://127.0.0.1:{server.server_port}/answer", answers
        finally:
            server.shutdown()
            thread.join()


NAMES_OF_THE_RESOURCE = {"StackId": "stack", "RequestId": "request", "LogicalResourceId": "Migration"}


def asked(request: str, url: str) -> dict[str, Any]:
    """What CloudFormation sends for the resource, as far as it is read."""
    return {"RequestType": request, "ResponseURL": url, **NAMES_OF_THE_RESOURCE}


@pytest.fixture
def later_release(database_url: str) -> str:
    """A database that a later release has been to."""
    with psycopg.connect(database_url, autocommit=True) as connection:
        connection.execute(
            "INSERT INTO schema_migrations (number, name, checksum) VALUES (%s, 'of_a_later_release.sql', 'x')",
            [len(NAMES) + 1],
        )
    return database_url


@pytest.mark.parametrize("request_type", ["Create", "Update"])
def test_a_stack_is_told_that_its_schema_is_there(
    request_type: str, empty_database_url: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The functions of the release come after this answer. It has one name for good, so that nothing is replaced."""
    with (
        cloudformation() as (url, answers),
        deployment.instance("migrate", empty_database_url, monkeypatch, OWN) as invoke,
    ):
        invoke(asked(request_type, url))
    assert answers == [{"Status": "SUCCESS", "Reason": "", "PhysicalResourceId": "schema", **NAMES_OF_THE_RESOURCE}]
    with psycopg.connect(empty_database_url) as connection:
        applied = connection.execute("SELECT name FROM schema_migrations ORDER BY number").fetchall()
    assert applied == [(name,) for name in NAMES]


def test_a_stack_is_told_why_its_schema_is_not_there(
    database_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It rolls back, and the release before goes on serving. What a row holds is not told."""
    (tmp_path / "schema").mkdir()
    for name in NAMES:
        (tmp_path / "schema" / name).write_bytes((SCHEMA / name).read_bytes())
    (tmp_path / "schema" / f"{len(NAMES) + 1:04}_broken.sql").write_text("SELECT 'of a caller'::uuid")
    monkeypatch.syspath_prepend(tmp_path)
    with cloudformation() as (url, answers), deployment.instance("migrate", database_url, monkeypatch, OWN) as invoke:
        invoke(asked("Update", url))
    [answer] = answers
    assert answer["Status"] == "FAILED"
    assert "SQLSTATE 22P02" in answer["Reason"]
    assert "of a caller" not in answer["Reason"]


def test_a_stack_that_rolls_back_is_not_held_up_by_the_later_schema(
    later_release: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The release before works on it. A refusal here would leave the stack stuck between two releases."""
    with cloudformation() as (url, answers), deployment.instance("migrate", later_release, monkeypatch, OWN) as invoke:
        invoke(asked("Update", url))
    assert answers[0]["Status"] == "SUCCESS"


def test_an_operator_is_told_of_a_later_schema(later_release: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Who asks for migrations by hand learns that this release has none to add."""
    with (
        deployment.instance("migrate", later_release, monkeypatch, OWN) as invoke,
        pytest.raises(errors.SchemaIsAhead, match="of_a_later_release"),
    ):
        invoke(sample("migrate"))


def test_a_stack_that_goes_takes_no_schema_with_it(database_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Deleting it is answered and touches nothing, not even a database that has gone before."""
    with cloudformation() as (url, answers), deployment.instance("migrate", database_url, monkeypatch, OWN) as invoke:
        monkeypatch.setenv("DATABASE_PORT", "1")
        invoke(asked("Delete", url))
    assert answers[0]["Status"] == "SUCCESS"


def test_a_stack_is_told_of_a_database_that_does_not_answer(database_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It need not wait until its own time is over."""
    with cloudformation() as (url, answers), deployment.instance("migrate", database_url, monkeypatch, OWN) as invoke:
        monkeypatch.setenv("DATABASE_PORT", "1")
        invoke(asked("Create", url))
    assert answers[0]["Status"] == "FAILED"
    assert "no connection to the database" in answers[0]["Reason"]
