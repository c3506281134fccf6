"""Migrations: each file once, in order, whole or not at all."""

import re
import subprocess
import sys
import threading
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from contextlib import ExitStack
from dataclasses import dataclass
from pathlib import Path

import psycopg
import pytest

from charging import errors, migrations
from charging.migrations import migrate
from local import schema as generated
from tests.conftest import Connect
from tests.support.database import SCHEMA
from tests.support.ledger import until_blocked
from tests.support.outbox import Connection

SECONDS = 10.0
NAMES = sorted(path.name for path in SCHEMA.glob("[0-9]*.sql"))


@pytest.fixture
def connect_empty(empty_database_url: str) -> Iterator[Connect]:
    """Opens connections to a database that no migration has touched."""
    with ExitStack() as opened:
        yield lambda: opened.enter_context(psycopg.connect(empty_database_url, autocommit=True))


@pytest.fixture
def folder(tmp_path: Path) -> Callable[..., Path]:
    """A schema folder with the files given by name, which replace what was there."""

    def write(**files: str) -> Path:
        for path in tmp_path.iterdir():
            path.unlink()
        for name, content in files.items():
            (tmp_path / f"{name.removeprefix('m')}.sql").write_text(content)
        return tmp_path

    return write


ONE = "CREATE TABLE one (id int); CREATE TABLE uno (id int);"
TWO = "ALTER TABLE one ADD COLUMN name text;"


def ledger(connection: Connection) -> list[str]:
    return [name for (name,) in connection.execute("SELECT name FROM schema_migrations ORDER BY number").fetchall()]


def relations(connection: Connection) -> set[str]:
    """Every table that is there, the ledger excepted."""
    rows = connection.execute("SELECT relname FROM pg_stat_user_tables").fetchall()
    return {name for (name,) in rows} - {"schema_migrations"}


@dataclass(frozen=True, slots=True)
class UnderWay:
    """A run that has begun, what it applies, and how to let it go on."""

    schema: Path
    let_go: Callable[[], object]


def test_an_empty_database_gets_every_file(connect_empty: Connect) -> None:
    """In order, and each is entered in the ledger."""
    connection = connect_empty()
    assert migrate(connection, SCHEMA) == NAMES
    assert ledger(connection) == NAMES
    created = re.findall(r"^CREATE TABLE (\w+)", (SCHEMA / "current.sql").read_text(), re.MULTILINE)
    assert relations(connection) == set(created) - {"schema_migrations"}
    assert "charges" in created


def test_a_second_run_has_nothing_to_do(connect: Connect) -> None:
    """Neither a table nor the ledger changes."""
    connection = connect()
    before = connection.execute("SELECT * FROM schema_migrations ORDER BY number").fetchall()
    assert migrate(connection, SCHEMA) == []
    assert connection.execute("SELECT * FROM schema_migrations ORDER BY number").fetchall() == before


def test_only_what_is_missing_is_applied(connect_empty: Connect, folder: Callable[..., Path]) -> None:
    """A release with one more file applies that one."""
    connection = connect_empty()
    assert migrate(connection, folder(m0001_one=ONE)) == ["0001_one.sql"]
    assert migrate(connection, folder(m0001_one=ONE, m0002_two=TWO)) == ["0002_two.sql"]
    assert ledger(connection) == ["0001_one.sql", "0002_two.sql"]


def test_a_file_that_has_changed_is_refused(connect_empty: Connect, folder: Callable[..., Path]) -> None:
    """Not even a comment may change once it was applied; nothing behind it is applied either."""
    connection = connect_empty()
    migrate(connection, folder(m0001_one=ONE))
    with pytest.raises(errors.MigrationRefused, match="0001_one"):
        migrate(connection, folder(m0001_one=ONE + " -- a comment", m0002_two=TWO))
    assert ledger(connection) == ["0001_one.sql"]


@pytest.mark.parametrize(
    "names",
    [
        pytest.param([], id="none"),
        pytest.param(["m0002_two"], id="no first"),
        pytest.param(["m0001_one", "m0003_three"], id="a gap"),
        pytest.param(["m0001_one", "m0001_uno"], id="a number twice"),
    ],
)
def test_files_that_are_not_numbered_without_a_gap_are_refused(
    names: list[str], connect_empty: Connect, folder: Callable[..., Path]
) -> None:
    """Nothing is applied, and no ledger begun."""
    connection = connect_empty()
    with pytest.raises(errors.MigrationRefused, match="numbered"):
        migrate(connection, folder(**dict.fromkeys(names, "SELECT 1")))
    assert connection.execute("SELECT to_regclass('schema_migrations')").fetchone() == (None,)


def test_a_database_that_is_ahead_is_refused(connect_empty: Connect, folder: Callable[..., Path]) -> None:
    """An older release does not take a newer one's schema for its own."""
    connection = connect_empty()
    migrate(connection, folder(m0001_one=ONE, m0002_two=TWO))
    with pytest.raises(errors.MigrationRefused, match="0002_two"):
        migrate(connection, folder(m0001_one=ONE))


def test_a_file_that_fails_leaves_nothing_of_it(connect_empty: Connect, folder: Callable[..., Path]) -> None:
    """Those before it are kept, those behind it not begun; once mended, it and they are applied."""
    connection = connect_empty()
    broken = "CREATE TABLE two (id int); SELECT 1 / 0;"
    with pytest.raises(psycopg.errors.DivisionByZero):
        migrate(connection, folder(m0001_one=ONE, m0002_two=broken, m0003_three="CREATE TABLE three ();"))
    assert (ledger(connection), relations(connection)) == (["0001_one.sql"], {"one", "uno"})
    mended = folder(m0001_one=ONE, m0002_two="CREATE TABLE two (id int);", m0003_three="CREATE TABLE three ();")
    assert migrate(connection, mended) == ["0002_two.sql", "0003_three.sql"]


def test_a_file_that_cannot_be_entered_leaves_nothing_of_it(
    connect_empty: Connect, folder: Callable[..., Path]
) -> None:
    """A file and its entry in the ledger are one: else the next run would begin it again on top of itself."""
    connection = connect_empty()
    taken = "INSERT INTO schema_migrations (number, name, checksum) VALUES (2, 'another', 'entry');"
    with pytest.raises(psycopg.errors.UniqueViolation):
        migrate(connection, folder(m0001_one=ONE, m0002_two=f"CREATE TABLE two (id int); {taken}"))
    assert (ledger(connection), relations(connection)) == (["0001_one.sql"], {"one", "uno"})


@pytest.fixture
def under_way(connect_empty: Connect, folder: Callable[..., Path]) -> Iterator[UnderWay]:
    """A run that is held up in its second file until the test lets it go."""
    first, holder = connect_empty(), connect_empty()
    schema = folder(m0001_one=ONE, m0002_two=f"SELECT pg_advisory_xact_lock(1); {TWO}")
    holder.execute("SELECT pg_advisory_lock(1)")
    with ThreadPoolExecutor(1) as thread:
        run = thread.submit(migrate, first, schema)
        until_blocked(holder)
        yield UnderWay(schema, lambda: holder.execute("SELECT pg_advisory_unlock(1)"))
        holder.execute("SELECT pg_advisory_unlock_all()")
        assert run.result(SECONDS) == ["0001_one.sql", "0002_two.sql"] == ledger(holder)


def test_a_second_run_at_the_same_time_waits(connect_empty: Connect, under_way: UnderWay) -> None:
    """And has nothing left to do: a deployment whose request was delivered twice has not failed."""
    observer = connect_empty()
    with ThreadPoolExecutor(1) as thread:
        second = thread.submit(migrate, connect_empty(), under_way.schema)
        until_blocked(observer, waiting=2)
        under_way.let_go()
        assert second.result(SECONDS) == []


def test_a_second_run_does_not_wait_for_ever(
    connect_empty: Connect, under_way: UnderWay, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It changes nothing; the first one ends as if alone."""
    monkeypatch.setattr("charging.migrations._PATIENCE", "100ms")
    with pytest.raises(errors.MigrationRefused, match="at work"):
        migrate(connect_empty(), under_way.schema)


def test_a_run_that_is_cut_off_can_be_repeated(connect_empty: Connect, folder: Callable[..., Path]) -> None:
    """The session ends in the middle of a file: nothing of that file is left, and no lock."""
    first, second, observer = connect_empty(), connect_empty(), connect_empty()
    schema = folder(m0001_one=ONE, m0002_two=f"{TWO} SELECT pg_advisory_xact_lock(1);")

    def run() -> None:
        with pytest.raises(psycopg.OperationalError):
            migrate(first, schema)

    with observer.transaction():
        observer.execute("SELECT pg_advisory_xact_lock(1)")
        runner = threading.Thread(target=run)
        runner.start()
        until_blocked(observer)
        observer.execute("SELECT pg_terminate_backend(%s, 5000)", [first.info.backend_pid])
        runner.join()
    assert ledger(observer) == ["0001_one.sql"]
    assert migrate(second, schema) == ["0002_two.sql"]


def test_a_file_does_not_wait_long_for_a_table(
    connect_empty: Connect, folder: Callable[..., Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """While it waits, every statement on that table waits behind it: it gives up, and can be tried again."""
    monkeypatch.setattr(migrations, "_LOCK_TIMEOUT", "300ms")
    connection, user = connect_empty(), connect_empty()
    migrate(connection, folder(m0001_one=ONE))
    schema = folder(m0001_one=ONE, m0002_two=TWO)
    with user.transaction():
        user.execute("SELECT * FROM one")
        with pytest.raises(psycopg.errors.LockNotAvailable):
            migrate(connection, schema)
        assert ledger(user) == ["0001_one.sql"]
    assert migrate(connection, schema) == ["0002_two.sql"]


def test_a_file_may_take_longer_than_a_statement_of_the_service(
    connect_empty: Connect, folder: Callable[..., Path]
) -> None:
    """An index over a large table takes what it takes, on a database that bounds everybody else."""
    migrate(connect_empty(), folder(m0001_one=ONE))
    later = connect_empty()
    assert later.execute("SHOW statement_timeout").fetchone() != ("0",)
    bounds = "SELECT current_setting('statement_timeout'), current_setting('transaction_timeout')"
    migrate(later, folder(m0001_one=ONE, m0002_two=f"CREATE TABLE bounds (statement, transaction) AS {bounds};"))
    assert later.execute("SELECT statement, transaction FROM bounds").fetchone() == ("0", "0")


def test_every_new_connection_is_bounded(connect: Connect) -> None:
    """Each bound ends before the next, and the last before API Gateway gives up on the caller after 29 seconds."""
    milliseconds: dict[str, int] = dict(
        connect()
        .execute("SELECT name, setting::int FROM pg_settings WHERE unit = 'ms' AND name ~ 'timeout$|^client_conn'")
        .fetchall()
    )
    assert (
        0
        < milliseconds["lock_timeout"]
        < milliseconds["statement_timeout"]
        < milliseconds["idle_in_transaction_session_timeout"]
        < milliseconds["transaction_timeout"]
        < 29_000
    )
    assert 0 < milliseconds["client_connection_check_interval"] <= 1_000


def test_no_statement_is_compiled(connect: Connect) -> None:
    """An estimate that is far too high, as of a slice of a very large table, costs nothing but that."""
    assert connect().execute("SHOW jit").fetchone() == ("off",)


@pytest.mark.parametrize("name", ["2_two", "0002-two", "0002_Two", "two"])
def test_a_misnamed_file_is_refused(name: str, connect_empty: Connect, folder: Callable[..., Path]) -> None:
    """Passing over it in silence would deploy a release without its table."""
    connection = connect_empty()
    schema = folder(m0001_one=ONE)
    (schema / f"{name}.sql").write_text(TWO)
    with pytest.raises(errors.MigrationRefused, match=name):
        migrate(connection, schema)
    assert relations(connection) == set()


def test_other_files_are_none_of_its_business(connect_empty: Connect, folder: Callable[..., Path]) -> None:
    """The generated schema, or a note, may stand beside the migrations."""
    schema = folder(m0001_one=ONE, current="CREATE TABLE current ();")
    (schema / "README.md").touch()
    assert migrate(connect_empty(), schema) == ["0001_one.sql"]


def test_the_generated_schema_is_what_the_migrations_come_to(database_url: str) -> None:
    """schema/current.sql can be read in their place. Where it cannot, `make schema` writes it anew."""
    assert generated.dump(database_url) == generated.CURRENT.read_text()


def run_command(*arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "charging.migrations", *arguments], capture_output=True, text=True, check=False
    )


def test_the_command_says_what_it_applied(empty_database_url: str) -> None:
    """A line for each file, and that there is nothing to do when there is nothing."""
    first = run_command(str(SCHEMA), empty_database_url)
    assert (first.returncode, first.stdout.splitlines()) == (0, [f"applied {name}" for name in NAMES])
    second = run_command(str(SCHEMA), empty_database_url)
    assert (second.returncode, second.stdout.strip()) == (0, "nothing to apply: the database is up to date")


def test_the_command_fails_with_the_reason_alone(empty_database_url: str, folder: Callable[..., Path]) -> None:
    """No stack trace for what an operator can read, whether it was refused or the server objected."""
    for schema in (folder(), folder(m0001_one="SELECT 1 / 0")):
        ended = run_command(str(schema), empty_database_url)
        assert ended.returncode == 1
        assert ended.stderr.startswith("migrations: ")
        assert "Traceback" not in ended.stderr


def test_what_was_found_before_stays_found(connect_empty: Connect, folder: Callable[..., Path]) -> None:
    """A charge that the release before had found without an event is on the list that took its list's place."""
    connection = connect_empty()
    before = {f"m{name.removesuffix('.sql')}": (SCHEMA / name).read_text() for name in NAMES if name < "0009"}
    migrate(connection, folder(**before))
    found = connection.execute(
        "INSERT INTO charges_without_outbox (charge_id) VALUES (gen_random_uuid()) RETURNING charge_id, found_at"
    ).fetchall()
    migrate(connection, SCHEMA)
    listed = "SELECT aggregate_id, found_at, event_type, sequence FROM missing_events"
    assert connection.execute(listed).fetchall() == [(*row, "ChargeCreated", 1) for row in found]
