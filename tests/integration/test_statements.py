"""Every statement, as a file and against the real schema."""

from collections.abc import Mapping
from dataclasses import fields
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from uuid import UUID

import psycopg
import pytest

from charging import operations, sql
from charging.charges import Charge
from charging.idempotency import ClaimRow, StoredResponse
from charging.maintenance import ChargeWithoutOutbox, Slice, StartedKey
from charging.outbox import ClaimedEvent, Measurement
from tests.conftest import Connect

STATEMENTS: Mapping[str, bytes] = {
    name: value for name, value in vars(sql).items() if name.isupper() and isinstance(value, bytes)
}

BOUNDS = {"retention_days": 14, "settled_seconds": 60, "slice_seconds": 600}
CALLER = {"principal": "alice", "endpoint": "POST /charges", "key": UUID(int=1)}
SELECTION = {
    "states": ["waiting", "parked"],
    "ids": [UUID(int=3)],
    "event_type": None,
    "aggregate_id": None,
    "since": None,
    "until": datetime(2026, 1, 31, tzinfo=UTC),
}
ACTION = {"action_id": UUID(int=4), "operator": "ann", "reason": "as agreed", "selection": "{}", "ids": [UUID(int=3)]}

# Whatever a statement is given, typed as its caller gives it.
PARAMETERS: Mapping[str, Mapping[str, object]] = {
    "CREATE_CHARGE": {
        **CALLER,
        "fingerprint": "v1:00",
        "retention_hours": 24,
        "response_status": 201,
        "response_headers": '{"Location":"/charges/1"}',
        "response_body": "{}",
        "charge_id": UUID(int=2),
        "amount_cents": 4900,
        "currency": "USD",
        "reference": None,
        "event_id": UUID(int=3),
        "event_type": "ChargeCreated",
        "event": "{}",
    },
    "AWAIT_TWIN": {**CALLER, "wait_ms": 10},
    "READ_CHARGE": {"charge_id": UUID(int=2), "principal": "alice"},
    "READ_STORED_RESPONSE": CALLER,
    "CLAIM_EVENTS": {"limit": 100, "lease_seconds": 30},
    "CLAIM_EVENTS_IN_ORDER": {"limit": 100, "lease_seconds": 30, "parked_blocks": True},
    "COMPLETE_EVENTS": {
        "ids": [UUID(int=3)],
        "attempts": [1],
        "outcomes": ["PUBLISHED"],
        "refusals": [0],
        "errors": [None],
    },
    "MEASURE_OUTBOX": {"bound": 100},
    "RESOLVE_WINDOW": {"since": None, "since_ago": timedelta(hours=1), "until": None, "until_ago": None},
    "LIST_EVENTS": {**SELECTION, "limit": 10},
    "COUNT_EVENTS": {**SELECTION, "bound": 100},
    "INSPECT_EVENTS": {"ids": [UUID(int=3)], "characters": 100},
    "AWAIT_OPERATORS": {},
    "REDRIVE_EVENTS": {**ACTION, "state": "parked", "per_second": 50},
    "PARK_EVENTS": {**ACTION, "lease_seconds": 30},
    "RECORD_DELIVERY": {"consumer": "charge_totals", "event_id": UUID(int=3)},
    "ADD_TO_TOTALS": {"principal": "alice", "currency": "USD", "day": "2026-01-31", "amount_cents": 4900},
    "PURGE_KEYS": {"limit": 1000},
    "PURGE_EVENTS": {"limit": 1000, "retention_days": 14},
    "PURGE_PROCESSED_EVENTS": {"limit": 1000, "retention_days": 60},
    "START_RECONCILIATION": BOUNDS,
    "RECONCILE_CHARGES": BOUNDS,
    "FORGET_ANNOUNCED_CHARGES": {"limit": 1000},
    "FIND_CHARGES_WITHOUT_OUTBOX": {"limit": 1000},
    "FIND_STARTED_KEYS": {"limit": 1000},
}

# What the rows are read into, for the statements whose rows are looked at by more than their number or one value.
ROW_TYPES: Mapping[str, type[Any]] = {
    "CREATE_CHARGE": ClaimRow,
    "READ_CHARGE": Charge,
    "CLAIM_EVENTS": ClaimedEvent,
    "CLAIM_EVENTS_IN_ORDER": ClaimedEvent,
    "MEASURE_OUTBOX": Measurement,
    "RESOLVE_WINDOW": operations.Window,
    "LIST_EVENTS": operations.Event,
    "COUNT_EVENTS": operations.Count,
    "INSPECT_EVENTS": operations.Details,
    "REDRIVE_EVENTS": operations.Redriven,
    "PARK_EVENTS": operations.Parked,
    "RECONCILE_CHARGES": Slice,
    "FIND_CHARGES_WITHOUT_OUTBOX": ChargeWithoutOutbox,
    "FIND_STARTED_KEYS": StartedKey,
}


def columns(connection: psycopg.Connection[Any], name: str) -> list[str]:
    """The names of what a statement answers, having run it."""
    with connection.transaction(force_rollback=True):
        cursor = connection.execute(STATEMENTS[name], PARAMETERS[name])
        return [column.name for column in cursor.description or ()]


def test_each_file_is_one_constant() -> None:
    """No statement lies about unused, and a file's name says which constant it is."""
    files = {path.stem.upper() for path in Path(sql.__file__).parent.glob("*.sql")}
    assert files == set(STATEMENTS)


@pytest.mark.parametrize("name", STATEMENTS)
def test_a_statement_runs_on_the_real_schema(name: str, connect: Connect) -> None:
    """The server accepts it with what its caller passes, as one prepared statement."""
    connection = connect()
    connection.prepare_threshold = 0
    columns(connection, name)
    assert connection.execute("SELECT count(*) FROM pg_prepared_statements").fetchone() >= (1,)  # type: ignore[operator]


@pytest.mark.parametrize("name", ROW_TYPES)
def test_columns_are_the_fields_of_the_row_type(name: str, connect: Connect) -> None:
    """Neither names a value that the other lacks."""
    assert set(columns(connect(), name)) == {field.name for field in fields(ROW_TYPES[name])}


def test_a_stored_response_is_read_in_the_order_of_its_fields(connect: Connect) -> None:
    """Its columns carry a prefix, so it is built by position."""
    expected = [f"response_{field.name}" for field in fields(StoredResponse)]
    assert columns(connect(), "READ_STORED_RESPONSE") == expected
