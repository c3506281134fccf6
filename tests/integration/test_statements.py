"""Every statement, as a file and against the real schema."""

import json
import re
from collections import Counter
from collections.abc import Mapping
from dataclasses import fields
from datetime import UTC, datetime, timedelta
from pathlib import Path
from typing import Any
from uuid import UUID

import psycopg
import pytest

from charging import deliveries, operations, sql
from charging.charges import Charge
from charging.deliveries import ClaimedDelivery, Judgement
from charging.endpoints import Delivery, Endpoint
from charging.idempotency import ClaimRow, StoredResponse
from charging.maintenance import MissingEvent, Slice, StartedKey
from charging.outbox import ClaimedEvent, Measurement
from charging.refunds import Refund
from tests.conftest import Connect
from tests.support.invocation import ROOT

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
RESPONSE = {
    "fingerprint": "v1:00",
    "retention_hours": 24,
    "response_status": 201,
    "response_headers": '{"Location":"/charges/1"}',
    "response_body": "{}",
}
EVENT = {"event_id": UUID(int=3), "event_type": "ChargeCreated", "aggregate_id": UUID(int=2), "event": "{}"}
MONEY = {"amount_cents": 4900, "currency": "USD", "reference": None}
OWNED = {"endpoint_id": UUID(int=4), "principal": "alice"}

# Whatever a statement is given, typed as its caller gives it.
PARAMETERS: Mapping[str, Mapping[str, object]] = {
    "CREATE_CHARGE": {**CALLER, **RESPONSE, **EVENT, **MONEY, "charge_id": UUID(int=2)},
    "CREATE_REFUND": {
        **CALLER,
        **RESPONSE,
        **EVENT,
        **MONEY,
        "refusal_status": 409,
        "refusal_headers": "{}",
        "refusal_body": "{}",
        "refund_id": UUID(int=5),
        "charge_id": UUID(int=2),
    },
    "READ_REFUND": {"refund_id": UUID(int=5), "charge_id": UUID(int=2), "principal": "alice"},
    "AWAIT_TWIN": {**CALLER, "wait_ms": 10},
    "READ_CHARGE": {"charge_id": UUID(int=2), "principal": "alice"},
    "READ_STORED_RESPONSE": CALLER,
    "CLAIM_EVENTS": {"limit": 100, "lease_seconds": 30, "since": None},
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
    "ENQUEUE_DELIVERIES": {
        "principal": "alice",
        "event_id": UUID(int=3),
        "event_type": "ChargeCreated",
        "aggregate_id": UUID(int=2),
        "sequence": 1,
        "payload": "{}",
    },
    "CLAIM_DELIVERIES": {
        "slow": True,
        "slow_seconds": 2.0,
        "after": UUID(int=0),
        "limit": 64,
        "share": 8,
        "busy_endpoints": [UUID(int=4)],
        "busy_deliveries": [1],
        "lease_seconds": 60,
    },
    "CLAIM_PROBES": {"limit": 16, "lease_seconds": 60},
    "COMPLETE_DELIVERIES": {
        "endpoint_ids": [UUID(int=4)],
        "event_ids": [UUID(int=3)],
        "attempts": [1],
        "outcomes": ["REFUSED"],
        "delays": [30.0],
        "durations": [12],
        "statuses": [None],
        "errors": ["timed_out"],
        "excerpts": [None],
    },
    "JUDGE_ENDPOINTS": {
        "endpoint_ids": [UUID(int=4)],
        "answered": [False],
        "failures": [1],
        "pauses": [None],
        "gone": [False],
        "probed": [False],
    },
    "ABANDON_DELIVERIES": {"after": UUID(int=0), "limit": 1000},
    "MEASURE_DELIVERIES": {"after": UUID(int=0)},
    "CREATE_ENDPOINT": {
        **CALLER,
        **RESPONSE,
        "endpoint_id": UUID(int=4),
        "url": "https://receiver.test/",
        "event_types": ["ChargeCreated"],
        "limit": 10,
    },
    "HAS_ROOM_FOR_ENDPOINT": {**CALLER, "limit": 10},
    "LIST_ENDPOINTS": {"principal": "alice", "endpoint_id": None},
    "ROTATE_SECRET": {**OWNED, "secret_version": 1, "overlap_hours": 24},
    "DISABLE_ENDPOINT": OWNED,
    "ENABLE_ENDPOINT": OWNED,
    "DELETE_ENDPOINT": OWNED,
    "ENQUEUE_SAMPLE": {**OWNED, "event_id": UUID(int=3), "event_type": "WebhookTest", "event": "{}"},
    "LIST_DELIVERIES": {"endpoint_id": UUID(int=4), "before": None, "limit": 20},
    "RESEND_DELIVERY": {"endpoint_id": UUID(int=4), "event_id": UUID(int=3)},
    "RESEND_DELIVERIES": {
        "endpoint_id": UUID(int=4),
        "from_id": UUID(int=0),
        "since": datetime(2026, 1, 1, tzinfo=UTC),
        "statuses": ["SENT"],
        "limit": 5000,
    },
    "ADD_TO_TOTALS": {
        "principal": "alice",
        "currency": "USD",
        "day": "2026-01-31",
        "charges": 1,
        "amount_cents": 4900,
        "refunds": 0,
        "refunded_cents": 0,
    },
    "PURGE_KEYS": {"limit": 1000},
    "PURGE_EVENTS": {"limit": 1000, "retention_days": 14},
    "PURGE_PROCESSED_EVENTS": {"limit": 1000, "retention_days": 60},
    "PURGE_DELIVERIES": {"limit": 1000, "retention_days": 14},
    "PURGE_ENDPOINTS": {"limit": 1000, "retention_days": 14},
    "START_RECONCILIATION": BOUNDS,
    "RECONCILE_EVENTS": BOUNDS,
    "FORGET_MISSING_EVENTS": {"limit": 1000},
    "FIND_MISSING_EVENTS": {"limit": 1000},
    "FIND_STARTED_KEYS": {"limit": 1000},
}

# What the rows are read into, for the statements whose rows are looked at by more than their number or one value.
ROW_TYPES: Mapping[str, type[Any]] = {
    "CREATE_CHARGE": ClaimRow,
    "READ_CHARGE": Charge,
    "CREATE_REFUND": ClaimRow,
    "READ_REFUND": Refund,
    "CLAIM_EVENTS": ClaimedEvent,
    "CLAIM_EVENTS_IN_ORDER": ClaimedEvent,
    "MEASURE_OUTBOX": Measurement,
    "RESOLVE_WINDOW": operations.Window,
    "LIST_EVENTS": operations.Event,
    "COUNT_EVENTS": operations.Count,
    "INSPECT_EVENTS": operations.Details,
    "REDRIVE_EVENTS": operations.Redriven,
    "PARK_EVENTS": operations.Parked,
    "RECONCILE_EVENTS": Slice,
    "FIND_MISSING_EVENTS": MissingEvent,
    "FIND_STARTED_KEYS": StartedKey,
    "CLAIM_DELIVERIES": ClaimedDelivery,
    "CLAIM_PROBES": ClaimedDelivery,
    "MEASURE_DELIVERIES": deliveries.Measurement,
    "JUDGE_ENDPOINTS": Judgement,
    "CREATE_ENDPOINT": ClaimRow,
    "LIST_ENDPOINTS": Endpoint,
    "LIST_DELIVERIES": Delivery,
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


def test_a_part_is_shared() -> None:
    """What one statement alone needs stands in that statement; and none is named that is not there.

    The guide's statement is one, too.
    """
    folder = Path(sql.__file__).parent
    files = [*folder.rglob("*.sql"), ROOT / "docs" / "add-an-operation.md"]
    named = Counter(re.findall(r"^\\ir (?:parts/)?(\w+\.sql)$", "\n".join(map(Path.read_text, files)), re.MULTILINE))
    assert named.keys() == {path.name for path in folder.glob("parts/*")}
    assert min(named.values()) > 1


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


@pytest.mark.parametrize("name", [name for name, kind in ROW_TYPES.items() if kind is ClaimRow])
def test_the_row_of_a_claim_is_read_in_the_order_of_its_fields(name: str, connect: Connect) -> None:
    """It is built by position."""
    assert columns(connect(), name) == [field.name for field in fields(ClaimRow)]


def test_a_stored_response_is_read_in_the_order_of_its_fields(connect: Connect) -> None:
    """Its columns carry a prefix, so it is built by position."""
    expected = [f"response_{field.name}" for field in fields(StoredResponse)]
    assert columns(connect(), "READ_STORED_RESPONSE") == expected


def test_a_charge_of_a_caller_without_webhooks_asks_the_index_once(connect: Connect) -> None:
    """With ten thousand endpoints of others: they are looked up by the caller, and never read through."""
    operator = connect()
    operator.execute(
        """
        INSERT INTO webhook_endpoints (id, principal, url, event_types)
        SELECT gen_random_uuid(), 'merchant ' || n, 'https://receiver.test/', ARRAY['ChargeCreated']
        FROM generate_series(1, 10000) AS n
        """
    )
    operator.execute("ANALYZE webhook_endpoints")
    [explained] = operator.execute(
        b"EXPLAIN (FORMAT JSON) " + sql.CREATE_CHARGE, PARAMETERS["CREATE_CHARGE"]
    ).fetchall()
    plan = json.dumps(explained[0])
    assert '"Index Name": "webhook_endpoints_of_principal"' in plan
    assert '"Node Type": "Seq Scan"' not in plan
