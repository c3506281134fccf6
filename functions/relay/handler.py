"""Takes events from the outbox to the topic, started every minute by the scheduler: wiring only."""

from functools import cache
from typing import Any

from aws_lambda_powertools.utilities.typing import LambdaContext

from charging import relay, telemetry
from charging.database import Database
from charging.settings import RelaySettings
from charging.topic import Topic


@cache
def settings() -> RelaySettings:
    """The environment, read at the first run."""
    return RelaySettings.from_environment()


@cache
def database() -> Database:
    """The connection that this instance keeps between runs."""
    return Database(settings())


@cache
def topic() -> Topic:
    """The client and its open connections, kept between runs."""
    return Topic(settings().topic_arn, max_attempts=settings().max_attempts)


def handler(event: dict[str, Any], context: LambdaContext) -> dict[str, Any]:
    """Relays until its time budget ends, and logs and returns what the run came to.

    Only a run that has ended well counts as one: `RelayRuns` is the relay's sign of life. One that has not says, too,
    what it had done by then.
    """
    logger = telemetry.logger("relay")
    try:
        run = relay_events(context)
    except Exception:
        logger.exception("relay_run_failed")
        raise
    summary: dict[str, Any] = {
        "claimed": run.claimed,
        "results": dict(run.results),
        "lease_lost": run.lease_lost,
        "unmarked": run.unmarked,
    }
    if run.error is not None:
        logger.error("relay_run_failed", exc_info=run.error, **summary)
        raise run.error
    telemetry.emit("Count", {"RelayRuns": 1})
    # What the broker refused or could not take is in the rows' last_error.
    went_well = run.claimed == run.results["PUBLISHED"] + run.results["RETURNED"]
    (logger.info if went_well else logger.warning)("relay_run", **summary)
    return summary


def relay_events(context: LambdaContext) -> relay.Sweep:
    """Counts what became of the events."""
    run = relay.run(
        database(),
        topic(),
        budget_seconds=settings().budget_seconds,
        poll_seconds=settings().poll_ms / 1000,
        parked_blocks=settings().parked_head == "block",
        remaining_seconds=lambda: context.get_remaining_time_in_millis() / 1000,
    )
    published, returned = run.results["PUBLISHED"], run.results["RETURNED"]
    counts = {
        "EventsPublished": published,
        "PublishErrors": run.claimed - published - returned,
        "lease_lost": run.lease_lost,
    }
    telemetry.emit("Count", counts, destination=topic().name)
    return run
