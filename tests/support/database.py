"""The real PostgreSQL that tests run on, and a fresh database for each of them.

Where it comes from: the server that DATABASE_URL names (its user must be allowed to create databases and roles); else a
container, where TEST_DATABASE=container says so; else the embedded server.

Every pytest-xdist worker has a server of its own: two start side by side in the time of one, and no test feels another
worker's checkpoints. fsync stays on, as everywhere: it costs 30 ms a test, and what a test says about a commit is then
true of the service's commits.
"""

import contextlib
import itertools
import os
import secrets
import tempfile
from collections.abc import Iterator
from pathlib import Path
from urllib.parse import urlsplit

import psycopg
from psycopg import sql

from charging import migrations, roles
from local import postgres
from tests.support.invocation import database_variables

SCHEMA = Path(__file__).parents[2] / "schema"


class Databases:
    """Makes databases on one server, which its user may create there, and drops them."""

    def __init__(self, admin: psycopg.Connection, url: str) -> None:
        self._admin = admin
        self._url = url
        # Workers share the server that DATABASE_URL names. It is the template's name as well, and so begins the names
        # of the functions' roles, which a copy's grants name.
        self._template = f"charges_test_{secrets.token_hex(4)}"
        self._numbers = itertools.count()
        self._has_template = False

    @contextlib.contextmanager
    def empty(self) -> Iterator[str]:
        """A database with nothing in it, as a URL; dropped afterwards, whoever is still connected."""
        with self._created(sql.SQL("DEFAULT")) as url:
            yield url

    @contextlib.contextmanager
    def migrated(self) -> Iterator[str]:
        """A database with the schema in it and no rows, as a URL; dropped afterwards, whoever is still connected.

        It is copied from one that was migrated once, grants to the functions' roles included. The limits that a
        migration sets on the database are not part of a copy: migrating the copy, where no file is missing, sets them
        again. Nor is who may connect.
        """
        if not self._has_template:
            self._admin.execute(sql.SQL("CREATE DATABASE {}").format(sql.Identifier(self._template)))
            self._has_template = True
            self._migrate(self._named(self._template))
            self._make_roles()
        with self._created(sql.Identifier(self._template)) as url:
            self._migrate(url)
            name = sql.Identifier(urlsplit(url).path[1:])
            self._admin.execute(sql.SQL("REVOKE ALL ON DATABASE {} FROM PUBLIC").format(name))
            self._admin.execute(sql.SQL("GRANT CONNECT ON DATABASE {} TO {}").format(name, self._roles(self._template)))
            yield url

    def close(self) -> None:
        """Drop what is left."""
        if self._has_template:
            self._drop(self._template)

    @contextlib.contextmanager
    def _created(self, template: sql.Composable) -> Iterator[str]:
        name = f"{self._template}_{next(self._numbers)}"
        self._admin.execute(sql.SQL("CREATE DATABASE {} TEMPLATE {}").format(sql.Identifier(name), template))
        try:
            yield self._named(name)
        finally:
            self._drop(name)

    def _drop(self, name: str) -> None:
        # Not WITH (FORCE): it fails where it meets an autovacuum worker, which only a superuser may end. Without it
        # the server sends such a worker away by itself.
        self._admin.execute(
            "SELECT pg_terminate_backend(pid, 10000) FROM pg_stat_activity"
            " WHERE datname = %s AND pg_has_role(usename, 'USAGE')",
            [name],
        )
        self._admin.execute(sql.SQL("DROP DATABASE {}").format(sql.Identifier(name)))
        # The template's, and those that the migrate function made for an empty one.
        self._admin.execute(sql.SQL("DROP ROLE IF EXISTS {}").format(self._roles(name)))

    @staticmethod
    def _roles(database: str) -> sql.Composable:
        return sql.SQL(", ").join(sql.Identifier(roles.name(database, function)) for function in roles.ROLES)

    def _named(self, name: str) -> str:
        return urlsplit(self._url)._replace(path=f"/{name}").geturl()

    def _make_roles(self) -> None:
        """Let each function sign in as itself, with the password that the tests have."""
        with psycopg.connect(self._named(self._template), autocommit=True) as connection:
            roles.provide(connection, password=database_variables(self._url)["DATABASE_PASSWORD"])
            for function in roles.ROLES:
                # So that a test can end a function's session, and see what it does.
                role = sql.Identifier(roles.name(self._template, function))
                connection.execute(sql.SQL("GRANT {} TO CURRENT_USER").format(role))

    def _migrate(self, url: str) -> None:
        with psycopg.connect(url, autocommit=True) as connection:
            migrations.migrate(connection, SCHEMA)


@contextlib.contextmanager
def databases() -> Iterator[Databases]:
    """A server for as long as the block lasts, and what makes databases on it."""
    with _server() as url, psycopg.connect(url, autocommit=True) as admin:
        made = Databases(admin, url)
        try:
            yield made
        finally:
            made.close()


@contextlib.contextmanager
def _server() -> Iterator[str]:
    if url := os.environ.get("DATABASE_URL"):
        yield url
    elif os.environ.get("TEST_DATABASE", "embedded") == "container":
        # Its packages take a second to import, and most runs have no use for them.
        from tests.support import container  # noqa: PLC0415

        with container.serve() as url:
            yield url
    else:
        with tempfile.TemporaryDirectory(prefix="charges-postgres-") as folder, postgres.serve(Path(folder)) as server:
            yield server.url
