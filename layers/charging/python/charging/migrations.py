"""Forward-only migrations: numbered SQL files, each applied once, in order, in a transaction of its own.

As a command: `python -m charging.migrations SCHEMA_DIR DATABASE_URL`.
"""

import argparse
import re
import sys
from dataclasses import dataclass
from hashlib import sha256
from pathlib import Path
from typing import Any

import psycopg
from psycopg import sql

from charging import errors

_NAME = re.compile(r"(?P<number>[0-9]{4})_[a-z0-9_]+\.sql")
# Generated from the migrations, for people to read.
_CURRENT = "current.sql"

# One migration run at a time in a database. The number has no meaning but must never change.
_LOCK = 7_365_016_394
# Another run is waited for, since it may be this very deployment's: Lambda may deliver an invocation twice, and the
# deployment is undone by the first that says it failed. A third of the time that the function has.
_PATIENCE = "300s"
# A migration that waits for a table's lock makes every later statement on that table wait behind it.
_LOCK_TIMEOUT = "3s"

# What the server keeps for every connection to this database, and again for each function's role, whatever became of
# the function at its other end: a frozen function must not hold its locks. Each bound ends before the next, all before
# API Gateway's 29 s and the functions' own timeouts.
LIMITS = {
    # What every statement here is written for, whatever the server's default is.
    "default_transaction_isolation": "read committed",
    "lock_timeout": "2s",
    "statement_timeout": "5s",
    "idle_in_transaction_session_timeout": "6s",
    "transaction_timeout": "8s",
    # Without it a statement runs on when the client that waited for it is gone.
    "client_connection_check_interval": "1s",
    # Every statement here is short. One whose cost was overestimated would take longer to compile than to run.
    "jit": "off",
}

_LEDGER = b"""
CREATE TABLE IF NOT EXISTS schema_migrations (
    number     integer     NOT NULL,
    name       text        NOT NULL,
    checksum   text        NOT NULL,
    applied_at timestamptz NOT NULL DEFAULT now(),
    CONSTRAINT schema_migrations_pkey PRIMARY KEY (number)
)
"""


@dataclass(frozen=True, slots=True)
class Migration:
    """One file: its number, its name, its bytes."""

    number: int
    name: str
    content: bytes

    @property
    def checksum(self) -> str:
        """The SHA-256 of the file, in hex."""
        return sha256(self.content).hexdigest()


def migrate(connection: psycopg.Connection[Any], schema: Path) -> list[str]:
    """Brings the database forward to the newest file and returns the names of those applied, oldest first.

    Applies nothing when nothing is missing. `connection` is in autocommit and belongs to the database's owner.
    Raises MigrationRefused when a file that was applied has changed or is gone, when the numbers have a gap, or
    when another run is still at work after five minutes; and psycopg's error when a file fails, with that file rolled
    back and those before it kept.
    """
    files = _files(schema)
    # The bounds below are for the functions; an index over a large table takes what it takes.
    connection.execute("SET statement_timeout = 0")
    connection.execute("SET transaction_timeout = 0")
    connection.execute(sql.SQL("SET lock_timeout = {}").format(_PATIENCE))
    try:
        connection.execute("SELECT pg_advisory_lock(%s)", [_LOCK])
    except psycopg.errors.LockNotAvailable:
        raise errors.MigrationRefused(
            "Another migration is at work on this database. Wait for it, then look again."
        ) from None
    try:
        connection.execute(sql.SQL("SET lock_timeout = {}").format(_LOCK_TIMEOUT))
        connection.execute(_LEDGER)
        missing = files[_applied(connection, files) :]
        for migration in missing:
            with connection.transaction():
                # Unprepared, whatever the connection is set to: a prepared statement holds a single command.
                connection.execute(migration.content, prepare=False)
                connection.execute(
                    "INSERT INTO schema_migrations (number, name, checksum) VALUES (%s, %s, %s)",
                    [migration.number, migration.name, migration.checksum],
                )
        _configure(connection)
        return [migration.name for migration in missing]
    finally:
        if not connection.closed:
            connection.execute("SELECT pg_advisory_unlock(%s)", [_LOCK])


def _files(schema: Path) -> list[Migration]:
    found = []
    for path in sorted(schema.glob("*.sql")):
        if name := _NAME.fullmatch(path.name):
            found.append(Migration(int(name["number"]), path.name, path.read_bytes()))
        elif path.name != _CURRENT:
            # Passed over, it would be missed only when the service needs what it creates.
            raise errors.MigrationRefused(f"{path} is not named as a migration is, such as 0001_charges.sql.")
    if [migration.number for migration in found] != list(range(1, len(found) + 1)) or not found:
        raise errors.MigrationRefused(
            f"The migrations in {schema} are not numbered 0001, 0002 and so on without a gap: "
            f"{', '.join(migration.name for migration in found) or 'there are none'}."
        )
    return found


def _applied(connection: psycopg.Connection[Any], files: list[Migration]) -> int:
    """Returns how many files have been applied, having made sure that they are these very files."""
    ledger = connection.execute("SELECT number, name, checksum FROM schema_migrations ORDER BY number").fetchall()
    for (number, name, checksum), migration in zip(ledger, files, strict=False):
        if (number, checksum) != (migration.number, migration.checksum):
            raise errors.MigrationRefused(
                f"{name} was applied to this database, and {migration.name} is not the same file any more. "
                "A migration that has been applied must not change: write a new one instead."
            )
    if len(ledger) > len(files):
        raise errors.SchemaIsAhead(
            f"The database has {ledger[-1][1]}, which this release does not know. Deploy a release that does."
        )
    return len(ledger)


def _configure(connection: psycopg.Connection[Any]) -> None:
    database = sql.Identifier(connection.info.dbname)
    for name, value in LIMITS.items():
        connection.execute(
            sql.SQL("ALTER DATABASE {} SET {} = {}").format(database, sql.Identifier(name), sql.Literal(value))
        )


def main() -> int:
    """Brings a database forward to the newest migration."""
    parser = argparse.ArgumentParser(prog="python -m charging.migrations", description=main.__doc__)
    parser.add_argument("schema_dir", type=Path, help="the folder with the numbered SQL files")
    parser.add_argument("database_url", help="postgresql://…, as the database's owner")
    arguments = parser.parse_args()
    try:
        with psycopg.connect(arguments.database_url, autocommit=True) as connection:
            applied = migrate(connection, arguments.schema_dir)
    except (errors.MigrationRefused, psycopg.Error) as refused:
        print(f"migrations: {refused}", file=sys.stderr)
        return 1
    print("\n".join(f"applied {name}" for name in applied) or "nothing to apply: the database is up to date")
    return 0


if __name__ == "__main__":
    sys.exit(main())
