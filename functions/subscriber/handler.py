"""Keeps the totals from the events in its queue, each event once: wiring only."""

from functools import cache
from typing import Any

from aws_lambda_powertools.utilities.batch import (
    BatchProcessor,
    EventType,
    SqsFifoPartialProcessor,
    process_partial_response,
)
from aws_lambda_powertools.utilities.batch.types import PartialItemFailureResponse
from aws_lambda_powertools.utilities.data_classes.sqs_event import SQSRecord
from aws_lambda_powertools.utilities.typing import LambdaContext

from charging import telemetry, totals
from charging.database import Database
from charging.settings import DatabaseSettings


@cache
def database() -> Database:
    """The connection that this instance keeps between batches."""
    return Database(DatabaseSettings.from_environment())


def handler(event: dict[str, Any], context: LambdaContext) -> PartialItemFailureResponse:
    """Applies each message in a transaction of its own, and names those that failed, so that only they come back.

    From a FIFO queue also those that follow a failed one in its group, which would otherwise overtake it.
    """
    is_ordered = event["Records"][0]["eventSourceARN"].endswith(".fifo")
    processor = SqsFifoPartialProcessor(skip_group_on_error=True) if is_ordered else BatchProcessor(EventType.SQS)
    # It would raise for a batch without a survivor, and the whole batch would come back all the same.
    processor.raise_on_entire_batch_failure = False
    return process_partial_response(event, apply, processor, context)


def apply(record: SQSRecord) -> None:
    """Applies one message; raises for one that has to come back, or that belongs in the dead-letter queue."""
    logger = telemetry.logger("subscriber")
    try:
        event = totals.read(record.body)
        is_new = totals.apply(database(), event)
    except Exception:
        logger.exception("event_failed", message_id=record.message_id)
        raise
    logger.info("event_applied" if is_new else "event_repeated", outbox_id=str(event.id))
