"""What AWS charges and allows: list prices of us-east-1 in US dollars, and quotas of a new account.

Known in December 2026, and compared with public copies of AWS's pages; its price list was not at hand. docs/deploy.md
and docs/scaling.md are computed from here and from nowhere else.
"""

from collections.abc import Sequence
from dataclasses import dataclass

MILLION = 1_000_000
HOURS = 730  # of a month, as AWS counts
SECONDS = HOURS * 3600
MINUTES = HOURS * 60


@dataclass(frozen=True, slots=True)
class InstanceClass:
    """An RDS instance class: vCPUs that it has all the time, GB of memory, and dollars an hour with a standby."""

    name: str
    vcpus: float
    memory_gb: int
    hourly: float


# https://aws.amazon.com/rds/postgresql/pricing and /rds/instance-types. The first has two vCPUs, a fifth of each
# all the time. Larger ones of a family are multiples of its large.
_SIZES = {"large": 1, "xlarge": 2, "2xlarge": 4, "4xlarge": 8, "8xlarge": 16, "16xlarge": 32}
INSTANCE_CLASSES: Sequence[InstanceClass] = sorted(
    [
        InstanceClass("db.t4g.medium", 0.4, 4, 0.129),
        *(InstanceClass(f"db.m7g.{size}", 2 * large, 8 * large, 0.337 * large) for size, large in _SIZES.items()),
        *(InstanceClass(f"db.r7g.{size}", 2 * large, 16 * large, 0.478 * large) for size, large in _SIZES.items()),
    ],
    key=lambda instance: instance.hourly,
)
# gp3 with a standby.
DISK_GB = 0.23
# https://docs.aws.amazon.com/AmazonRDS/latest/UserGuide/CHAP_Storage.html: what comes with the price of gp3, which from
# 400 GB on is four volumes.
DISK_STRIPED_GB = 400
DISK_IOPS = (3_000, 12_000)
DISK_MB_PER_S = (125, 500)
# LEAST(DBInstanceClassMemory / 9531392, 5000): https://docs.aws.amazon.com/AmazonRDS/latest/UserGuide/CHAP_Limits.html
CONNECTIONS_PER_GB = 100
MOST_CONNECTIONS = 5_000

NAT_HOUR = 0.045
PUBLIC_ADDRESS_HOUR = 0.005
NAT_GB = 0.045

# https://aws.amazon.com/api-gateway/pricing, REST: up to so many million requests a month, dollars a million.
API_TIERS = ((333, 3.50), (1_000, 2.80), (20_000, 2.38), (float("inf"), 1.51))
# https://docs.aws.amazon.com/apigateway/latest/developerguide/limits.html; 2,500 in some regions.
API_REQUESTS_PER_S = 10_000

# https://aws.amazon.com/lambda/pricing, arm64.
LAMBDA_MILLION = 0.20
LAMBDA_GB_SECOND = 0.0000133334
# https://docs.aws.amazon.com/lambda/latest/dg/configuration-memory.html
LAMBDA_MB_PER_VCPU = 1_769
# https://docs.aws.amazon.com/lambda/latest/dg/lambda-concurrency.html: an account's instances, and requests a
# second for each of them.
LAMBDA_CONCURRENCY = 1_000
LAMBDA_REQUESTS_PER_INSTANCE = 10

# https://aws.amazon.com/sns/pricing: a call with up to 64 KB. Deliveries to SQS are free.
SNS_MILLION = 0.50
# https://docs.aws.amazon.com/general/latest/gr/sns.html: messages, batched or not, standard and FIFO together.
SNS_MESSAGES_PER_S = 30_000

# https://aws.amazon.com/sqs/pricing
SQS_MILLION = 0.40

# https://aws.amazon.com/cloudwatch/pricing: Lambda's logs, up to so many GB a month, dollars a GB.
LOG_TIERS = ((10_000, 0.50), (30_000, 0.25), (50_000, 0.10), (float("inf"), 0.05))
METRICS_AND_ALARMS = 12.0  # 0.30 each and 0.10 each, of this stack
DASHBOARD_AND_SECRET = 3.0 + 0.40
SCHEDULE_MILLION = 1.00

# https://aws.amazon.com/ec2/pricing/on-demand: out to the internet, up to so many GB a month, dollars a GB; and between
# zones, both ends together.
OUT_TIERS = ((10_000, 0.09), (50_000, 0.085), (150_000, 0.07), (float("inf"), 0.05))
ZONES_GB = 0.02

# https://aws.amazon.com/xray/pricing: a trace. The first of each second and a twentieth of the others are kept.
XRAY_MILLION = 5.00
XRAY_SHARE = 0.05


def tiered(amount: float, tiers: Sequence[tuple[float, float]]) -> float:
    """Returns what an amount costs where each tier has a price of its own for what falls into it."""
    cost, below = 0.0, 0.0
    for bound, price in tiers:
        cost += max(0.0, min(amount, bound) - below) * price
        below = bound
    return cost
