"""One warm connection to Postgres: opened at first use, bounded by a deadline, replaced when it is lost."""

import select
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from functools import cached_property
from typing import Any

import psycopg
from psycopg.abc import PQGen
from psycopg.rows import BaseRowFactory

from charging import errors
from charging.certificates import roots_for
from charging.iam_token import iam_token
from charging.settings import DatabaseSettings

type Parameters = Mapping[str, object]

# A database that does not answer a connection request within 2 s will not serve the charge behind it in time.
# psycopg, as libpq, knows no shorter limit, and takes 1 s for 2.
CONNECT_SECONDS = 2
# Without a keepalive a warm connection whose peer has vanished would be trusted for two hours.
KEEPALIVE_SECONDS = 10
KEEPALIVE_INTERVAL_SECONDS = 5
KEEPALIVES = 2
UNACKNOWLEDGED_MILLISECONDS = 5_000

# The server lets no transaction run longer than 8 s. One that says nothing for longer than this is gone, though its
# end of the connection may still stand.
SILENCE_SECONDS = 10.0

# What the server says when it has undone a statement for a reason that lies in the moment. Class 08 and the 57P codes
# also end the connection; 25006 is a former primary that has become a standby.
_CONTENDED = (psycopg.errors.SerializationFailure, psycopg.errors.DeadlockDetected, psycopg.errors.LockNotAvailable)
# The unique index by which those that race are told apart who could not see one another: what violates it was committed
# after the statement's snapshot. To violate any other is a mistake, and would be one again.
_RACED = "webhook_endpoints_of_principal"
# A statement that was prepared before a migration, or that a proxy has forgotten: a new connection prepares it anew.
_STALE = (psycopg.errors.FeatureNotSupported, psycopg.errors.InvalidSqlStatementName)
_UNAVAILABLE_CLASSES = ("08", "53", "57", "58")
_READ_ONLY = "25006"


class _Connection(psycopg.Connection[tuple[Any, ...]]):
    """A connection that waits for the server until its deadline and not longer.

    Its own cursor remembers how the parameters of its last statement are sent, and functions mostly run one statement.
    """

    deadline: float | None = None

    @cached_property
    def own_cursor(self) -> psycopg.Cursor[Any]:
        return self.cursor()

    def wait[T](self, gen: PQGen[T], interval: float = 0.1, timeout: float | None = None) -> T:
        if self.deadline is not None:
            left = max(0.0, self.deadline - time.monotonic())
            timeout = left if timeout is None else min(left, timeout)
        return super().wait(gen, interval, timeout)


def connect(settings: DatabaseSettings) -> _Connection:
    """Opens a connection in autocommit. Raises TemporarilyUnavailable when there is none within two seconds.

    Without a password in the settings the server is RDS, and gets an IAM token.
    """
    password = settings.password.get_secret_value()
    try:
        return _Connection.connect(
            host=settings.host,
            port=settings.port,
            dbname=settings.name,
            user=settings.user,
            password=password or iam_token(settings.host, settings.port, settings.user),
            # A token is a secret: it goes to the server that is meant, or nowhere.
            sslmode="prefer" if password else "verify-full",
            sslrootcert=None if password else str(roots_for(settings.host)),
            connect_timeout=CONNECT_SECONDS,
            application_name="charging",
            autocommit=True,
            # Prepare at the first execution: it costs the connection one round trip, once, and saves every
            # later call the planning. Not behind RDS Proxy, where it would pin the connection to this function.
            prepare_threshold=None if ".proxy-" in settings.host else 0,
            keepalives_idle=KEEPALIVE_SECONDS,
            keepalives_interval=KEEPALIVE_INTERVAL_SECONDS,
            keepalives_count=KEEPALIVES,
            tcp_user_timeout=UNACKNOWLEDGED_MILLISECONDS,
        )
    except psycopg.OperationalError as failed:
        raise errors.TemporarilyUnavailable("no connection to the database could be opened") from failed


class Database:
    """The function's way to its database: a single connection in autocommit, one caller at a time.

    Deadlines are `time.monotonic()` seconds; None waits a little longer than the server's own limits let a
    transaction run.
    """

    def __init__(self, settings: DatabaseSettings) -> None:
        self._settings = settings
        self._connection: _Connection | None = None

    def fetch[R](
        self, row: BaseRowFactory[R], statement: bytes, parameters: Parameters, *, deadline: float | None = None
    ) -> Sequence[R]:
        """Runs one statement in a transaction of its own, in one round trip, and returns its rows.

        Raises TemporarilyUnavailable when nothing was or will be committed, Contended when the server rolled
        back for the sake of another transaction, and ConnectionLost when the outcome cannot be known.
        """
        connection = self._ready(deadline)
        connection.deadline = _end(deadline)
        try:
            connection.own_cursor.row_factory = row
            return connection.own_cursor.execute(statement, parameters).fetchall()
        except psycopg.Error as failed:
            raise self._translated(connection, failed) from None

    def fetch_after[R](
        self,
        first: bytes,
        row: BaseRowFactory[R],
        statement: bytes,
        parameters: Parameters,
        *,
        deadline: float,
    ) -> Sequence[R]:
        """Runs two statements with the same parameters in one transaction and one round trip: the second's rows.

        Nothing of the second is done when the first fails, and no lock of the first outlives the two, whatever
        becomes of this function meanwhile. Raises as `fetch` does.
        """
        connection = self._ready(deadline)
        connection.deadline = _end(deadline)
        try:
            cursor = connection.cursor(row_factory=row)
            # In autocommit the server takes what is sent between two synchronisations for one transaction.
            with connection.pipeline():
                connection.execute(first, parameters)
                cursor.execute(statement, parameters)
            return cursor.fetchall()
        except psycopg.Error as failed:
            raise self._translated(connection, failed) from None

    def fetch_repeatable[R](
        self, row: BaseRowFactory[R], statement: bytes, parameters: Parameters, *, deadline: float | None = None
    ) -> Sequence[R]:
        """Runs one statement that comes to the same when it is run twice, and so is simply run once more.

        Raises TemporarilyUnavailable when the second run has no answer either, and DatabaseFault as `fetch` does.
        """
        try:
            return self.fetch(row, statement, parameters, deadline=deadline)
        except (errors.ConnectionLost, errors.Contended):
            pass
        try:
            return self.fetch(row, statement, parameters, deadline=deadline)
        except (errors.ConnectionLost, errors.Contended) as again:
            raise errors.TemporarilyUnavailable("the database failed to answer twice") from again

    @contextmanager
    def transaction(self) -> Iterator[psycopg.Connection[tuple[Any, ...]]]:
        """Opens a transaction for several statements: committed at the block's end, rolled back by an exception.

        Raises as `fetch` does.
        """
        connection = self._ready(None)
        connection.deadline = _end(None)
        try:
            with connection.transaction():
                yield connection
        except psycopg.Error as failed:
            raise self._translated(connection, failed) from None

    def close(self) -> None:
        """Closes the connection if there is one; the next use opens another."""
        if self._connection is not None:
            self._connection.close()
            self._connection = None

    def _ready(self, deadline: float | None) -> _Connection:
        """Returns a connection that was alive a moment ago."""
        if self._connection is not None and not _is_quiet(self._connection):
            self.close()
        if self._connection is None:
            if deadline is not None and deadline - time.monotonic() < CONNECT_SECONDS:
                raise errors.TemporarilyUnavailable("too little time is left to open a connection")
            self._connection = connect(self._settings)
            # Looking a name up, and trying each of its addresses, may have taken longer than one try.
            if deadline is not None and time.monotonic() > deadline:
                raise errors.TemporarilyUnavailable("no time is left on the connection that was opened")
        return self._connection

    def _translated(self, connection: _Connection, failed: psycopg.Error) -> errors.ChargingError:
        """Turns psycopg's error into one of this package's, and drops a connection that is of no more use.

        It is named by its code alone: the server's own words may quote the row, which must not be logged.
        """
        state = failed.sqlstate
        if isinstance(failed, _CONTENDED) or failed.diag.constraint_name == _RACED:
            return errors.Contended(f"the database answered {state}")
        if isinstance(failed, _STALE):
            self.close()
            return errors.Contended("the statement's prepared form is out of date")
        if connection.closed or connection.info.transaction_status != psycopg.pq.TransactionStatus.IDLE:
            self.close()
            return errors.ConnectionLost(f"the connection ended while a statement was under way ({state})")
        if state is not None and (state[:2] in _UNAVAILABLE_CLASSES or state == _READ_ONLY):
            self.close()
            return errors.TemporarilyUnavailable(f"the database answered {state}")
        return errors.DatabaseFault(f"the database answered {state}: {_refused(failed)}")


def _end(deadline: float | None) -> float:
    return time.monotonic() + SILENCE_SECONDS if deadline is None else deadline


def _refused(failed: psycopg.Error) -> str:
    """Says what a statement was refused for, in names of the schema's."""
    names = (failed.diag.schema_name, failed.diag.table_name, failed.diag.column_name, failed.diag.constraint_name)
    return f"{type(failed).__name__} {'.'.join(name for name in names if name)}".rstrip()


def _is_quiet(connection: _Connection) -> bool:
    """Tells whether an idle connection is still worth using.

    A server that ends an idle connection sends its reason and closes. Both make the socket readable, while
    nothing makes it so on a healthy idle connection. Looking costs no round trip, and means that a loss before
    the statement is known to be one.
    """
    if connection.closed:
        return False
    poll = select.poll()
    poll.register(connection.fileno(), select.POLLIN)
    return not poll.poll(0)
