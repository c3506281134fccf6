"""Takes deliveries to their receivers, started every minute by the scheduler: wiring only."""

from collections import Counter
from collections.abc import Mapping
from functools import cache
from typing import Any

from aws_lambda_powertools.utilities.typing import LambdaContext

from charging import telemetry, vault, webhooks
from charging.database import Database
from charging.sender import Sender
from charging.settings import WebhooksSettings, allows_loopback
from charging.webhooks import Courier, Sweep

# Metrics by the transitions that they count.
TRANSITIONS = {
    "paused": "WebhookPaused",
    "opened": "WebhookOpened",
    "half_opened": "WebhookHalfOpened",
    "reopened": "WebhookReopened",
    "closed": "WebhookClosed",
    "disabled": "WebhookDisabled",
}


@cache
def settings() -> WebhooksSettings:
    """The environment, read at the first run."""
    return WebhooksSettings.from_environment()


@cache
def database() -> Database:
    """The connection that this instance keeps between runs."""
    return Database(settings())


@cache
def sender() -> Sender:
    """The sender, kept between runs."""
    return Sender(deadline_seconds=webhooks.SEND_SECONDS, allows_loopback=allows_loopback())


def courier() -> Courier:
    """The sender with the master keys as they are at this run: one that is replaced signs no longer than it has to."""
    return Courier(sender(), [key.encode() for key in vault.read_with_previous(settings().master_key_arn)])


def handler(event: dict[str, Any], context: LambdaContext) -> dict[str, Any]:
    """Delivers until its time budget ends, and counts, logs and returns what the run came to."""
    counts: Counter[str] = Counter()
    try:
        for sweep in webhooks.run(
            database(),
            courier().deliver,
            budget_seconds=settings().budget_seconds,
            poll_seconds=settings().poll_ms / 1000,
            remaining_seconds=lambda: context.get_remaining_time_in_millis() / 1000,
        ):
            counts.update(tell(sweep))
    except Exception:
        telemetry.logger("webhooks").exception("webhooks_run_failed")
        raise
    finally:
        telemetry.emit("Count", metrics(counts))
    summary: dict[str, Any] = dict(counts)
    telemetry.logger("webhooks").info("webhooks_run", **summary)
    return summary


def tell(sweep: Sweep) -> Counter[str]:
    """Logs what somebody may have to act on, and returns how often everything happened."""
    logger = telemetry.logger("webhooks")
    counts: Counter[str] = Counter(attempt.result for attempt in sweep.attempts)
    for attempt in sweep.attempts:
        if attempt.result == "FAILED":
            logger.warning(
                "webhook_failed",
                endpoint_id=str(attempt.delivery.endpoint_id),
                event_id=str(attempt.delivery.event_id),
                status=attempt.status,
                # Not what follows it: a certificate's fault names the host.
                reason=attempt.error and attempt.error.partition(":")[0],
            )
    for transition in sweep.transitions:
        logger.info("webhook_endpoint_changed", change=transition.change, endpoint_id=str(transition.endpoint_id))
        counts[transition.change] += 1
    if sweep.error is not None:
        logger.warning("webhooks_not_written_down", reason=str(sweep.error))
    if sweep.abandoned:
        logger.info("webhooks_abandoned", deliveries=sweep.abandoned)
    counts["abandoned"] += sweep.abandoned
    counts["lease_lost"] += sweep.lease_lost
    counts["unmarked"] += len(sweep.attempts) if sweep.error else 0
    return counts


def metrics(counts: Counter[str]) -> Mapping[str, float]:
    """What is counted for alarms, zeros too."""
    return {
        "WebhookDelivered": counts["SENT"],
        "WebhookErrors": counts["REFUSED"] + counts["FAILED"] + counts["POSTPONED"],
        "WebhookFailed": counts["FAILED"],
    } | {metric: counts[name] for name, metric in TRANSITIONS.items()}
