"""The database's roles: one for each function, with the grants that its statements need and no more, and its limits.

Roles belong to a whole server and not to a database, so a role's name begins with its database's: two stacks on one
server do not meet. The migrations run as the owner of the database, who makes the roles and is none of them.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, LiteralString

import psycopg
from psycopg import sql
from psycopg.errors import InsufficientPrivilege

from charging import errors
from charging.migrations import LIMITS

type Grants = Mapping[LiteralString, Sequence[LiteralString]]


@dataclass(frozen=True, slots=True)
class Role:
    """What a function may do: on each table the privileges, as GRANT words them."""

    grants: Grants
    # Whether it sees what the sessions of other roles hold.
    reads_statistics: bool = False


# What a statement needs that claims a key and stores its result.
_CLAIMS: Sequence[LiteralString] = (
    "SELECT",
    # Not created_at, which is now.
    "INSERT (principal, endpoint, key, fingerprint, status, expires_at)",
    "INSERT (response_status, response_headers, response_body)",
    # A key that has expired is taken over.
    "UPDATE (fingerprint, response_status, response_headers, response_body, created_at, expires_at)",
)

# By the function's folder. docs/security.md has it as a table, which a test compares with what the server says.
#
# Columns are named where a column more would be a power that nobody needs: to change what an event says, to make one
# that counts as published, to date a charge back. FOR UPDATE wants the right to change some column, and gets the one
# whose change would do the least.
ROLES: Mapping[LiteralString, Role] = {
    "charges": Role(
        {
            "charges": [
                "SELECT",
                "INSERT (id, principal, amount_cents, currency, reference)",
                "UPDATE (refunded_cents, refunds)",
            ],
            "refunds": ["SELECT", "INSERT (id, charge_id, number, amount_cents, reference)"],
            "idempotency_keys": _CLAIMS,
            "outbox": ["INSERT (id, event_type, aggregate_id, sequence, payload)"],
            "webhook_endpoints": ["SELECT (id, principal, event_types, deleted_at)"],
            "outbox_deliveries": ["INSERT (endpoint_id, event_id, event_type, aggregate_id, sequence, payload)"],
        }
    ),
    "endpoints": Role(
        {
            "idempotency_keys": _CLAIMS,
            "webhook_endpoints": [
                "SELECT",
                "INSERT (id, principal, number, url, event_types)",
                # Not the URL: whoever could change it would have another's events.
                "UPDATE (secret_version, previous_signs_until, disabled_at, disabled_reason, deleted_at)",
                "UPDATE (failures_in_a_row, opened_at, resumes_at)",
            ],
            "outbox_deliveries": [
                "SELECT",
                "INSERT (endpoint_id, event_id, event_type, aggregate_id, sequence, payload)",
                "UPDATE (status, failures, next_attempt_at, sent_at, failed_at)",
            ],
            "delivery_attempts": ["SELECT"],
        }
    ),
    "relay": Role(
        {
            "outbox": [
                "SELECT",
                "UPDATE (attempts, refusals, next_attempt_at, last_error, published_at, failed_at)",
            ],
        }
    ),
    "webhooks": Role(
        {
            "webhook_endpoints": [
                "SELECT",
                "UPDATE (failures_in_a_row, opened_at, resumes_at, disabled_at, disabled_reason)",
            ],
            "outbox_deliveries": [
                "SELECT",
                "UPDATE (status, attempts, failures, next_attempt_at, last_error, sent_at, failed_at)",
            ],
            "delivery_attempts": [
                "SELECT (endpoint_id, event_id, attempt, duration_ms)",
                "INSERT (endpoint_id, event_id, attempt, duration_ms, status, error, excerpt)",
                "DELETE",
            ],
        }
    ),
    "subscriber": Role(
        {
            "processed_events": ["SELECT (consumer, event_id)", "INSERT (consumer, event_id)"],
            "charge_totals": ["SELECT", "INSERT", "UPDATE (charges, amount_cents, refunds, refunded_cents)"],
        }
    ),
    "monitor": Role(
        {
            "outbox": ["SELECT"],
            "outbox_deliveries": ["SELECT (endpoint_id, event_id, status, next_attempt_at, sent_at)"],
            "webhook_endpoints": ["SELECT (id, disabled_at, deleted_at, opened_at, resumes_at)"],
        },
        reads_statistics=True,
    ),
    "maintenance": Role(
        {
            "charges": ["SELECT (id, created_at)"],
            "refunds": ["SELECT (charge_id, number, created_at)"],
            "idempotency_keys": [
                "SELECT (ctid, endpoint, key, status, created_at, expires_at)",
                "UPDATE (created_at)",
                "DELETE",
            ],
            "outbox": [
                "SELECT (ctid, event_type, aggregate_id, sequence, published_at)",
                "UPDATE (created_at)",
                "DELETE",
            ],
            "processed_events": ["SELECT (ctid, processed_at)", "UPDATE (processed_at)", "DELETE"],
            "outbox_deliveries": ["SELECT (ctid, endpoint_id, status, sent_at)", "UPDATE (created_at)", "DELETE"],
            "webhook_endpoints": ["SELECT (id, deleted_at)", "UPDATE (created_at)", "DELETE"],
            "reconciliation": ["SELECT", "INSERT (checked_until)", "UPDATE (checked_until)"],
            "missing_events": [
                "SELECT",
                "INSERT (aggregate_id, sequence, event_type)",
                "UPDATE (found_at)",
                "DELETE",
            ],
        }
    ),
    "operations": Role(
        {
            "outbox": [
                "SELECT",
                "UPDATE (attempts, refusals, next_attempt_at, last_error, published_at, failed_at)",
            ],
            # What was done cannot be undone, nor be told otherwise.
            "operator_actions": ["SELECT", "INSERT"],
        }
    ),
}

# Either lets a role see the sessions of others. Not every server lets its owner hand on the first, which is the less.
_STATISTICS = ("pg_read_all_stats", "pg_monitor")
# The role by which RDS knows who signs in with an IAM token.
_RDS_IAM = "rds_iam"

# One at a time in a database. The number has no meaning but must never change.
_LOCK = 7_365_016_395


def name(database: str, function: str) -> str:
    """Returns what a function's role is called."""
    return f"{database}_{function}"


def provide(connection: psycopg.Connection[Any], *, password: str | None) -> None:
    """Makes the roles that are missing, and gives each what it lacks; all of it or nothing.

    With a `password` the roles sign in with it; without one, on RDS, with IAM tokens. Nothing is taken from a role: the
    release that is still serving may need it.

    `connection` is in autocommit and belongs to the database's owner. Raises RolesRefused where the owner may not do
    this.
    """
    try:
        with connection.transaction():
            _provide(connection, password)
    except InsufficientPrivilege as refused:
        raise errors.RolesRefused(
            f"The functions' roles cannot be made: {refused.diag.message_primary}. The owner of the database needs "
            "CREATEROLE, and on RDS also ADMIN OPTION on rds_iam; docs/deploy.md has the statements."
        ) from refused


def _provide(connection: psycopg.Connection[Any], password: str | None) -> None:
    connection.execute("SELECT pg_advisory_xact_lock(%s)", [_LOCK])
    database = connection.info.dbname
    names = {function: name(database, function) for function in ROLES}
    there = connection.execute("SELECT rolname FROM pg_roles WHERE rolname = ANY(%s)", [list(names.values())])
    for missing in sorted({*names.values()} - {role for (role,) in there}):
        connection.execute(sql.SQL("CREATE ROLE {} LOGIN").format(sql.Identifier(missing)))
    # Of what everybody may do with a database nothing is left: roles of other databases have no business here.
    connection.execute(sql.SQL("REVOKE ALL ON DATABASE {} FROM PUBLIC").format(sql.Identifier(database)))
    for function, role in ROLES.items():
        identifier = sql.Identifier(names[function])
        connection.execute(sql.SQL("GRANT CONNECT ON DATABASE {} TO {}").format(sql.Identifier(database), identifier))
        connection.execute(sql.SQL("GRANT USAGE ON SCHEMA public TO {}").format(identifier))
        for table, privileges in role.grants.items():
            for privilege in privileges:
                statement = sql.SQL("GRANT {} ON {} TO {}")
                connection.execute(statement.format(sql.SQL(privilege), sql.Identifier(table), identifier))
        for setting, value in LIMITS.items():
            statement = sql.SQL("ALTER ROLE {} SET {} = {}")
            connection.execute(statement.format(identifier, sql.Identifier(setting), sql.Literal(value)))
        _let_sign_in(connection, names[function], password)
        if role.reads_statistics:
            _show_statistics(connection, names[function])


def _let_sign_in(connection: psycopg.Connection[Any], role: str, password: str | None) -> None:
    identifier = sql.Identifier(role)
    is_rds = connection.execute("SELECT 1 FROM pg_roles WHERE rolname = %s", [_RDS_IAM]).fetchone() is not None
    if password is not None:
        # Hashed here: the server would write the statement to its log with the password in it.
        hashed = connection.pgconn.encrypt_password(password.encode(), role.encode(), b"scram-sha-256").decode()
        connection.execute(sql.SQL("ALTER ROLE {} PASSWORD {}").format(identifier, sql.Literal(hashed)))
    if is_rds:
        # Who is in it signs in with tokens alone.
        change = "GRANT {} TO {}" if password is None else "REVOKE {} FROM {}"
        connection.execute(sql.SQL(change).format(sql.Identifier(_RDS_IAM), identifier))


def _show_statistics(connection: psycopg.Connection[Any], role: str) -> None:
    # Asked, and not looked up beforehand: RDS lets its master user grant more than the catalogue says.
    for statistics in _STATISTICS:
        try:
            with connection.transaction():
                connection.execute(sql.SQL("GRANT {} TO {}").format(sql.Identifier(statistics), sql.Identifier(role)))
        except InsufficientPrivilege:
            continue
        return
