"""Keeps the tables to their retention and looks for what should not be there, started by the scheduler: wiring only."""

from functools import cache
from typing import Any

from aws_lambda_powertools.utilities.typing import LambdaContext

from charging import maintenance, telemetry
from charging.database import Database
from charging.settings import MaintenanceSettings

# Of each kind of finding so many are named in the log. An operator asks the database for the rest.
NAMED = 20


@cache
def settings() -> MaintenanceSettings:
    """The environment, read at the first run."""
    return MaintenanceSettings.from_environment()


@cache
def database() -> Database:
    """The connection that this instance keeps between runs."""
    return Database(settings())


def handler(event: dict[str, Any], context: LambdaContext) -> dict[str, Any]:
    """Does what is to be done, names what it found, and counts, logs and returns what the run came to.

    Only a run that has come to the end of its work counts as one: `MaintenanceRuns` is the sign that it keeps up.
    """
    logger = telemetry.logger("maintenance")
    try:
        run = maintenance.run(
            database(),
            outbox_retention_days=settings().outbox_retention_days,
            processed_events_retention_days=settings().processed_events_retention_days,
            remaining_seconds=lambda: context.get_remaining_time_in_millis() / 1000,
        )
    except Exception:
        logger.exception("maintenance_run_failed")
        raise
    for missing in run.missing_events[:NAMED]:
        logger.error(
            "event_missing",
            event_type=missing.event_type,
            aggregate_id=str(missing.aggregate_id),
            sequence=missing.sequence,
            found_at=missing.found_at.isoformat(),
        )
    for started in run.started_keys[:NAMED]:
        created = started.created_at.isoformat()
        logger.error("started_key", endpoint=started.endpoint, idempotency_key=str(started.key), created_at=created)
    telemetry.emit(
        "Count",
        {
            "MaintenanceRuns": int(run.is_finished),
            "ChargesWithoutOutbox": len(run.missing_events),
            "StartedKeys": len(run.started_keys),
            "KeysPurged": run.counts["keys"],
            "EventsPurged": run.counts["events"],
            "ProcessedEventsPurged": run.counts["processed_events"],
            "DeliveriesPurged": run.counts["deliveries"],
        },
    )
    summary: dict[str, Any] = {
        "counts": dict(run.counts),
        "missing_events": len(run.missing_events),
        "started_keys": len(run.started_keys),
        "is_finished": run.is_finished,
    }
    if run.error is not None:
        logger.error("maintenance_run_failed", exc_info=run.error, **summary)
        raise run.error
    logger.info("maintenance_run", **summary)
    return summary
