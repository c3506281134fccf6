"""The statements, one constant for each file beside this one.

A statement is bytes: psycopg takes bytes as a query, so no text that was built at run time can become one. What several
statements share stands in parts/, and a line `\\ir parts/<name>.sql`, which is psql's, puts it in its place; among the
parts it is `\\ir <name>.sql`.
"""

from pathlib import Path


def _statement(name: str) -> bytes:
    return _text(Path(__file__).parent / f"{name}.sql")


def _text(path: Path) -> bytes:
    """Reads a file without its comment lines, which the server need not parse again on every call."""
    lines: list[bytes] = []
    for line in path.read_bytes().splitlines():
        if line.startswith(b"\\ir "):
            lines.append(_text(path.parent / line.decode().removeprefix("\\ir ")))
        elif not line.lstrip().startswith(b"--"):
            lines.append(line)
    return b"\n".join(lines)


CREATE_CHARGE = _statement("create_charge")
AWAIT_TWIN = _statement("await_twin")
READ_CHARGE = _statement("read_charge")
CREATE_REFUND = _statement("create_refund")
READ_REFUND = _statement("read_refund")
READ_STORED_RESPONSE = _statement("read_stored_response")
CLAIM_EVENTS = _statement("claim_events")
CLAIM_EVENTS_IN_ORDER = _statement("claim_events_in_order")
COMPLETE_EVENTS = _statement("complete_events")
MEASURE_OUTBOX = _statement("measure_outbox")
RECORD_DELIVERY = _statement("record_delivery")
ADD_TO_TOTALS = _statement("add_to_totals")
RESOLVE_WINDOW = _statement("resolve_window")
LIST_EVENTS = _statement("list_events")
COUNT_EVENTS = _statement("count_events")
INSPECT_EVENTS = _statement("inspect_events")
AWAIT_OPERATORS = _statement("await_operators")
REDRIVE_EVENTS = _statement("redrive_events")
PARK_EVENTS = _statement("park_events")
PURGE_KEYS = _statement("purge_keys")
PURGE_EVENTS = _statement("purge_events")
PURGE_PROCESSED_EVENTS = _statement("purge_processed_events")
PURGE_DELIVERIES = _statement("purge_deliveries")
PURGE_ENDPOINTS = _statement("purge_endpoints")
START_RECONCILIATION = _statement("start_reconciliation")
RECONCILE_EVENTS = _statement("reconcile_events")
FORGET_MISSING_EVENTS = _statement("forget_missing_events")
FIND_MISSING_EVENTS = _statement("find_missing_events")
FIND_STARTED_KEYS = _statement("find_started_keys")
ENQUEUE_DELIVERIES = _statement("enqueue_deliveries")
CLAIM_DELIVERIES = _statement("claim_deliveries")
CLAIM_PROBES = _statement("claim_probes")
COMPLETE_DELIVERIES = _statement("complete_deliveries")
JUDGE_ENDPOINTS = _statement("judge_endpoints")
ABANDON_DELIVERIES = _statement("abandon_deliveries")
MEASURE_DELIVERIES = _statement("measure_deliveries")
CREATE_ENDPOINT = _statement("create_endpoint")
HAS_ROOM_FOR_ENDPOINT = _statement("has_room_for_endpoint")
LIST_ENDPOINTS = _statement("list_endpoints")
ROTATE_SECRET = _statement("rotate_secret")
DISABLE_ENDPOINT = _statement("disable_endpoint")
ENABLE_ENDPOINT = _statement("enable_endpoint")
DELETE_ENDPOINT = _statement("delete_endpoint")
ENQUEUE_SAMPLE = _statement("enqueue_sample")
LIST_DELIVERIES = _statement("list_deliveries")
RESEND_DELIVERY = _statement("resend_delivery")
RESEND_DELIVERIES = _statement("resend_deliveries")
