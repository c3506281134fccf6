"""What operators see: one structured log line at a time, and metrics embedded in the log.

Principals, references and bodies are personal and never logged. An idempotency key may stand in a log line,
so that a caller's question can be answered; no metric and no dimension carries it. So may the name that an operator
gives, who answers for what they do.
"""

import os
import time
from collections.abc import Mapping
from datetime import UTC, datetime
from functools import cache
from typing import TYPE_CHECKING

from charging import compact

if TYPE_CHECKING:
    from aws_lambda_powertools import Logger

# Where the deployment names none: two stacks in one account need two.
NAMESPACE = "Charges"


@cache
def logger(service: str) -> "Logger":
    """Returns the function's logger: JSON lines on standard output."""
    # A charge that succeeds needs none, and so a cold start does not wait for it.
    from aws_lambda_powertools import Logger  # noqa: PLC0415

    return Logger(service=service, utc=True, use_rfc3339=True)


def emit(unit: str, values: Mapping[str, float], **dimensions: str) -> None:
    """Writes the values as one embedded-metrics line. Dimensions are few and bounded: an endpoint, a destination."""
    print(compact.json(_metrics(unit, values, dimensions)))


def tell(service: str, message: str, *, about: Mapping[str, str], **dimensions: str) -> None:
    """Writes one log line that also counts its message, as a metric of that name.

    `about` is for whoever reads the line, and no dimension. This one line is what a charge leaves in the log; a logger
    and a metrics library would take ten times as long over it.
    """
    line = {
        "level": "INFO",
        "message": message,
        "timestamp": datetime.now(UTC).isoformat(timespec="milliseconds"),
        "service": service,
        **about,
    }
    print(compact.json(line | _metrics("Count", {message: 1}, dimensions)))


def _metrics(unit: str, values: Mapping[str, float], dimensions: Mapping[str, str]) -> dict[str, object]:
    """The CloudWatch embedded metric format: what there is to extract, and the values, in one object."""
    directive = {
        "Namespace": os.environ.get("METRICS_NAMESPACE", NAMESPACE),
        "Dimensions": [list(dimensions)],
        "Metrics": [{"Name": name, "Unit": unit} for name in values],
    }
    return {
        "_aws": {"Timestamp": time.time_ns() // 1_000_000, "CloudWatchMetrics": [directive]},
        **dimensions,
        **values,
    }
