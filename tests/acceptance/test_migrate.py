"""The migrate function: invoked by a deployment, it brings the database forward or fails."""

from pathlib import Path

import psycopg
import pytest

from charging import errors
from tests.support import deployment
from tests.support.invocation import ROOT, sample

SCHEMA = ROOT / "schema"
NAMES = sorted(path.name for path in SCHEMA.glob("[0-9]*.sql"))


def test_it_applies_what_is_missing_and_names_it(empty_database_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """On an empty database every file, in order; a second invocation finds nothing to do."""
    with deployment.instance("migrate", empty_database_url, monkeypatch, {}) as invoke:
        assert invoke(sample("migrate")) == {"applied": NAMES}
        assert invoke(sample("migrate")) == {"applied": []}


def test_it_fails_where_it_cannot_go_on(database_url: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A deployment that waits for it must not take a refusal for a success."""
    (tmp_path / "schema").mkdir()
    (tmp_path / "schema" / NAMES[0]).write_bytes((SCHEMA / NAMES[0]).read_bytes() + b"\n")
    monkeypatch.syspath_prepend(tmp_path)
    with (
        deployment.instance("migrate", database_url, monkeypatch, {}) as invoke,
        pytest.raises(errors.MigrationRefused),
    ):
        invoke(sample("migrate"))


def test_it_leaves_no_connection_behind(empty_database_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is invoked once in a deployment: nothing of it stays on the database."""
    with deployment.instance("migrate", empty_database_url, monkeypatch, {}) as invoke:
        invoke(sample("migrate"))
    with psycopg.connect(empty_database_url) as connection:
        row = connection.execute(
            "SELECT count(*) FROM pg_stat_activity"
            " WHERE datname = current_database() AND application_name = 'charging' AND state IS NOT NULL"
        ).fetchone()
    assert row == (0,)
