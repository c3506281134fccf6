"""Measures the outbox every minute, apart from the relay, so that a relay that is stuck or dead shows: wiring only."""

from dataclasses import asdict
from functools import cache
from typing import Any

from aws_lambda_powertools.utilities.typing import LambdaContext

from charging import outbox, telemetry
from charging.database import Database
from charging.settings import DatabaseSettings


@cache
def database() -> Database:
    """The connection that this instance keeps between runs."""
    return Database(DatabaseSettings.from_environment())


def handler(event: dict[str, Any], context: LambdaContext) -> dict[str, Any]:
    """Emits OutboxOldestAge, OutboxPending, OutboxFailed and XminAge; without a database it fails and emits none."""
    try:
        measured = outbox.measure(database())
    except Exception:
        telemetry.logger("monitor").exception("measurement_failed")
        raise
    telemetry.emit("Seconds", {"OutboxOldestAge": measured.oldest_age_seconds})
    counts = {"OutboxPending": measured.pending, "OutboxFailed": measured.failed, "XminAge": measured.xmin_age}
    telemetry.emit("Count", counts)
    return asdict(measured)
