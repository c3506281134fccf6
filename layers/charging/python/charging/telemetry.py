"""What operators see: one structured log line at a time, and metrics embedded in the log.

Principals, references and bodies are personal and never logged. An idempotency key may stand in a log line,
so that a caller's question can be answered; no metric carries it. So may the name that an operator gives, who answers
for what they do.
"""

import os
from collections.abc import Mapping
from functools import cache

from aws_lambda_powertools import Logger
from aws_lambda_powertools.metrics.provider.cloudwatch_emf.cloudwatch import AmazonCloudWatchEMFProvider

# Where the deployment names none, with the library's own variable: two stacks in one account need two.
NAMESPACE = "Charges"


@cache
def logger(service: str) -> Logger:
    """Returns the function's logger: JSON lines on standard output."""
    return Logger(service=service, utc=True, use_rfc3339=True)


def emit(unit: str, values: Mapping[str, float], **dimensions: str) -> None:
    """Writes the values as one embedded-metrics line. Dimensions are few and bounded: an endpoint, a destination."""
    metrics = AmazonCloudWatchEMFProvider(namespace=os.environ.get("POWERTOOLS_METRICS_NAMESPACE", NAMESPACE))
    # Where POWERTOOLS_SERVICE_NAME is set, it would make each metric another one than its alarm watches.
    metrics.service = ""
    for dimension, bounded in dimensions.items():
        metrics.add_dimension(dimension, bounded)
    for name, value in values.items():
        metrics.add_metric(name, unit, value)
    metrics.flush_metrics()
