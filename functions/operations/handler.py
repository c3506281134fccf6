"""Lets operators look at the outbox, and redrive and park its events; invoked by them alone: wiring only."""

from functools import cache
from typing import Any

from aws_lambda_powertools.utilities.typing import LambdaContext

from charging import answers, telemetry
from charging.database import Database
from charging.settings import DatabaseSettings


@cache
def database() -> Database:
    """The connection that this instance keeps between invocations."""
    return Database(DatabaseSettings.from_environment())


def handler(event: object, context: LambdaContext) -> dict[str, Any]:
    """Answers one document, whether or not it is acceptable. Raises, and so fails, for want of the database."""
    logger = telemetry.logger("operations")
    try:
        answer = answers.answer(database(), event)
    except Exception:
        logger.exception("operation_failed")
        raise
    # Who looked at what, or changed it. Neither payloads, which are personal, nor the reason, which may be: the record
    # that `action` names has it.
    told = {name: answer.get(name) for name in ("command", "operator", "applied", "action", "counts")}
    logger.info(
        "operation_refused" if "violations" in answer else "operation",
        extra=told | {"events": [event["id"] for event in answer.get("events", [])]},
    )
    return answer
