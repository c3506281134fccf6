"""Measures what waits to be sent, every minute and apart from what sends it, so that it shows when that is dead.

Wiring only.
"""

from dataclasses import asdict
from functools import cache
from typing import Any

from aws_lambda_powertools.utilities.typing import LambdaContext

from charging import deliveries, outbox, telemetry
from charging.database import Database
from charging.settings import DatabaseSettings


@cache
def database() -> Database:
    """The connection that this instance keeps between runs."""
    return Database(DatabaseSettings.from_environment())


def handler(event: dict[str, Any], context: LambdaContext) -> dict[str, Any]:
    """Emits the ages of outbox and webhooks, and what is counted of either; without a database it fails."""
    try:
        measured = outbox.measure(database())
        webhooks = deliveries.measure(database())
    except Exception:
        telemetry.logger("monitor").exception("measurement_failed")
        raise
    ages = {"OutboxOldestAge": measured.oldest_age_seconds, "WebhookOldestAge": webhooks.oldest_age_seconds}
    telemetry.emit("Seconds", ages)
    counts = {
        "OutboxPending": measured.pending,
        "OutboxFailed": measured.failed,
        "XminAge": measured.xmin_age,
        "WebhookEndpointsLost": webhooks.lost_endpoints,
    }
    telemetry.emit("Count", counts)
    return {"outbox": asdict(measured), "webhooks": asdict(webhooks)}
