"""How far the service goes, and what that costs: a model made from what was measured and from AWS's quotas and prices.

docs/scaling.md has its tables, and says what they mean; `make scaling` writes them there. `make bench BENCH=model`
holds it against a machine.
"""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass

from bench import aws
from bench.aws import MILLION, MINUTES, SECONDS
from bench.reporting import Table
from charging.maintenance import SLICE_SECONDS
from charging.topic import ENTRIES_PER_CALL
from tests.packaging.artifacts import TEMPLATE


@dataclass(frozen=True, slots=True)
class Cost:
    """What a charge costs in one stage: processor time of the database and of the function in milliseconds, bytes of
    WAL, and transactions that write, each of which waits for the WAL once.

    The database's time is None where its processes are not this machine's.
    """

    database_ms: float | None
    function_ms: float
    wal_bytes: float
    commits: float


# ---- what was measured: `make bench BENCH=model`; docs/scaling.md says on which machine ----

# What one charge costs, by stage. A replay is in a charge's place; an endpoint adds this to a charge, and then costs a
# webhook.
STAGES: Mapping[str, Cost] = {
    "charge": Cost(database_ms=0.22, function_ms=0.20, wal_bytes=1_840, commits=1.0),
    "relay": Cost(database_ms=0.03, function_ms=0.16, wal_bytes=1_700, commits=0.04),
    "subscriber": Cost(database_ms=0.20, function_ms=0.29, wal_bytes=480, commits=1.0),
    "upkeep": Cost(database_ms=0.02, function_ms=0.01, wal_bytes=430, commits=0.01),
    "replay": Cost(database_ms=0.07, function_ms=0.18, wal_bytes=0, commits=0.0),
    "endpoint": Cost(database_ms=0.20, function_ms=0.10, wal_bytes=940, commits=0.0),
    "webhook": Cost(database_ms=0.45, function_ms=1.90, wal_bytes=1_500, commits=0.45),
}
ALWAYS = ("charge", "relay", "subscriber", "upkeep")
# Bytes of a row with its entries in indexes.
KEPT_BYTES: Mapping[str, float] = {
    "idempotency_keys": 520,
    "outbox": 640,
    "processed_events": 150,
    "charges": 160,
    "outbox_deliveries": 740,
    "delivery_attempts": 150,
}
# The entry in the keys' index, where keys come in no order and pages are therefore two thirds full.
KEY_ENTRY_BYTES = 128

# ---- what is assumed, until an account says otherwise ----

# A vCPU of RDS or Lambda does what a core of the machine did that measured.
# What Lambda bills for a charge: a millisecond of the function's own at its share of a vCPU, a round trip, a commit on
# two disks, and as much again for tracing and for what is slow now and then.
CHARGE_SECONDS = 0.020
# What the subscriber takes for ten messages, each of them a transaction of three round trips and a commit.
BATCH_SECONDS = 0.050
# For how long a transaction that is being committed holds its locks: a round trip, and both disks.
COMMIT_SECONDS = 0.004
# Half of the database's processors are for peaks, for vacuum, and for what nobody thought of; likewise a relay's.
LOADED = 0.5
RELAY_LOADED = 0.7
# Room that dead rows have left, and that is used again.
CHURN = 1.4
# Memory for sessions, and for the pages at the growing ends of tables; and how much of the rest may hold keys.
OTHER_GB = 2.0
MEMORY_LOADED = 0.7
# Functions other than charges: monitor, maintenance, endpoints, operations.
OTHER_CONNECTIONS = 4
LOG_BYTES = 2_000
ANSWER_BYTES = 1_000
ACROSS_BYTES = 3_000  # half of what a charge and its event exchange with the database, which is in one of two zones
STARTS_A_MINUTE = 3.2  # relay, dispatcher and monitor, and maintenance every five
EVENT_BYTES = 1_000
CHECKPOINT_SECONDS = 300  # as RDS has it
PAGE_BYTES = 8192
# A disk makes so many flushes a second; those who commit meanwhile share the next one.
FLUSHES_PER_S = 1_000
# Pages of its own that a charge dirties at the ends of tables and indexes, beside the one of the keys' index.
OTHER_PAGES = 0.3
# A slice of the reconciliation takes so long for each charge in it, of the five seconds that a statement has. Source:
# what is said at charging.maintenance.SLICE_SECONDS.
RECONCILED_SECONDS = 1 / 160_000
STATEMENT_SECONDS = 5.0

# The longest run of a relay in minutes, each of which starts another.
MOST_RELAYS = int(TEMPLATE["Parameters"]["RelayBudgetSeconds"]["MaxValue"]) // 60

DAY = 24 * 3600
GB = 1024  # in MB, as Lambda counts
RATES = (100, 1_000, 10_000)


def _parameter(name: str) -> float:
    return float(TEMPLATE["Parameters"][name]["Default"])


def total(value: Callable[[Cost], float | None]) -> float:
    """Sums a cost up over the stages that every charge goes through."""
    return sum(value(STAGES[stage]) or 0.0 for stage in ALWAYS)


# ---- what follows ----

DATABASE_SECONDS = total(lambda cost: cost.database_ms) / 1000
WAL_BYTES = total(lambda cost: cost.wal_bytes)
COMMITS = total(lambda cost: cost.commits)
KEY_PAGES_PER_S = KEY_ENTRY_BYTES * DAY / PAGE_BYTES  # of the keys' index, for each charge a second


def images(charges: float, pages: float) -> float:
    """Returns how many page images a charge writes to the WAL: a key goes to any page of the keys' index, and the first
    to come there since the last checkpoint writes it whole. So many charges come between two checkpoints."""
    return pages / charges * -math.expm1(-charges / pages)


# The same at every rate: a day of keys fills as many more pages as there are more keys.
IMAGES = images(CHECKPOINT_SECONDS, KEY_PAGES_PER_S)


# Nine seconds a day.
LEFT_OUT = 1 / 10_000


def instances(rate: float, seconds: float) -> int:
    """Returns how many instances answer so many calls a second but for LEFT_OUT of the time.

    Calls that come by chance keep rate times seconds busy on average (Little), and at a time as many as a Poisson
    distribution says, whatever each of them takes.
    """
    busy = rate * seconds
    rest = 0.0
    for count in range(math.ceil(busy + 10 * math.sqrt(busy)), 0, -1):
        rest += math.exp(count * math.log(busy) - busy - math.lgamma(count + 1))
        if rest > LEFT_OUT:
            return count
    return 1


def throughput(clients: int, think: float, response: float, demand: float, processors: int) -> float:
    """Returns how many calls a second so many clients make who wait for each and then think, all in seconds.

    `response` is what a call takes alone, and `demand` what it takes of a processor. Mean value analysis: a call finds
    before it what others have left there. Several processors are one that is as many times as fast, and a delay
    (Seidmann); what is no processor's time is a delay as well.
    """
    each, queue, calls = demand / processors, 0.0, 0.0
    delay = think + response - each
    for count in range(1, clients + 1):
        taken = each * (1 + queue)
        calls = count / (delay + taken)
        queue = calls * taken
    return calls


def relay_rate(memory_mb: float) -> float:
    """Returns how many events a second one relay publishes: its share of a processor is what ends first."""
    return min(1.0, memory_mb / aws.LAMBDA_MB_PER_VCPU) * 1000 / STAGES["relay"].function_ms


def dispatcher_rate(memory_mb: float) -> float:
    """Returns how many webhooks a second one dispatcher sends, likewise."""
    return min(1.0, memory_mb / aws.LAMBDA_MB_PER_VCPU) * 1000 / STAGES["webhook"].function_ms


@dataclass(frozen=True, slots=True)
class Plan:
    """What is set for so many charges a second, and how it is divided among stacks of a database each."""

    rate: float
    stacks: int = 1
    outbox_days: int = 14
    processed_days: int = 60

    @property
    def share(self) -> float:
        """Charges a second of one stack."""
        return self.rate / self.stacks

    @property
    def months(self) -> float:
        """Charges a month of all stacks, in millions."""
        return self.rate * SECONDS / MILLION

    @property
    def charges_instances(self) -> int:
        return instances(self.share, CHARGE_SECONDS)

    @property
    def subscribers(self) -> int:
        """Half again as many as are busy, and no fewer than are deployed."""
        return max(
            int(_parameter("SubscriberConcurrency")), math.ceil(1.5 * self.share * BATCH_SECONDS / ENTRIES_PER_CALL)
        )

    @property
    def relay_mb(self) -> int:
        """As deployed, and where that takes more relays than can run at a time, what makes the fastest ones."""
        deployed = int(_parameter("RelayMemoryMb"))
        return deployed if self.share <= MOST_RELAYS * RELAY_LOADED * relay_rate(deployed) else aws.LAMBDA_MB_PER_VCPU

    @property
    def relays(self) -> int:
        return max(1, math.ceil(self.share / (RELAY_LOADED * relay_rate(self.relay_mb))))

    @property
    def relay_budget_seconds(self) -> float:
        """A run a minute, so that twice the seconds are twice the relays. One has some more, and leaves no gap."""
        return max(_parameter("RelayBudgetSeconds"), 60.0 * self.relays)

    @property
    def connections(self) -> int:
        return self.charges_instances + self.subscribers + self.relays + 1 + OTHER_CONNECTIONS

    @property
    def cores(self) -> float:
        """Busy processors of one database."""
        return self.share * DATABASE_SECONDS

    @property
    def index_gb(self) -> float:
        """The keys' index, all of which is in use at any time."""
        return self.share * DAY * KEY_ENTRY_BYTES * CHURN / 1e9

    @property
    def database(self) -> aws.InstanceClass:
        """The cheapest class that has the processors, the memory and the connections."""
        memory = OTHER_GB + self.index_gb / MEMORY_LOADED
        return next(
            instance
            for instance in aws.INSTANCE_CLASSES
            if instance.vcpus * LOADED >= self.cores and instance.memory_gb >= memory
        )

    @property
    def retained_gb(self) -> float:
        """What stops growing."""
        days = {"idempotency_keys": 1, "outbox": self.outbox_days, "processed_events": self.processed_days}
        return sum(self.share * DAY * KEPT_BYTES[table] * kept for table, kept in days.items()) * CHURN / 1e9

    @property
    def grown_gb(self) -> float:
        """By how much charges grow in a month."""
        return self.share * SECONDS * KEPT_BYTES["charges"] / 1e9

    @property
    def disk_gb(self) -> int:
        """Room for all that is retained and for the first month's charges, in steps of 50 GB."""
        return 50 * max(1, math.ceil((self.retained_gb + self.grown_gb) / 50))

    @property
    def written_mb_per_s(self) -> float:
        """WAL with its page images, and the pages themselves."""
        pages = (IMAGES + OTHER_PAGES) * PAGE_BYTES
        return self.share * (WAL_BYTES + IMAGES * PAGE_BYTES + pages) / 1e6

    @property
    def iops(self) -> float:
        """Flushes, of which many commits share one, and pages."""
        return min(self.share * COMMITS, FLUSHES_PER_S) + self.share * (IMAGES + OTHER_PAGES)

    def month(self) -> dict[str, float]:
        """Returns the lines of a month's bill, all stacks together."""
        charges = self.months
        batch = min(ENTRIES_PER_CALL, max(1.0, self.share / 10))
        traces = min(self.rate, self.stacks + (self.rate - self.stacks) * aws.XRAY_SHARE) if self.rate else 0.0
        second_a_minute = aws.LAMBDA_GB_SECOND * MINUTES
        return {
            "RDS": self.stacks * self.database.hourly * aws.HOURS,
            "disk": self.stacks * self.disk_gb * aws.DISK_GB,
            "NAT gateway": self.stacks * (aws.NAT_HOUR + aws.PUBLIC_ADDRESS_HOUR) * aws.HOURS
            + charges * EVENT_BYTES / 1000 * aws.NAT_GB,
            "API Gateway": aws.tiered(charges, aws.API_TIERS),
            "charges": charges * aws.LAMBDA_MILLION + charges * MILLION * CHARGE_SECONDS * aws.LAMBDA_GB_SECOND,
            "relay": self.stacks * self.relay_budget_seconds * second_a_minute * self.relay_mb / GB,
            "webhooks": self.stacks
            * _parameter("WebhooksBudgetSeconds")
            * second_a_minute
            * _parameter("WebhooksMemoryMb")
            / GB,
            "subscriber": charges / batch * aws.LAMBDA_MILLION
            + charges * MILLION / batch * (0.010 + BATCH_SECONDS * 0.8 * (batch - 1) / 9) * 0.5 * aws.LAMBDA_GB_SECOND,
            "SNS": charges / batch * aws.SNS_MILLION,
            "SQS": charges * (1 + 2 / batch) * aws.SQS_MILLION,
            "logs": aws.tiered(charges * LOG_BYTES / 1000, aws.LOG_TIERS),
            "metrics, alarms": self.stacks * aws.METRICS_AND_ALARMS,
            "dashboard, secret, schedules": self.stacks
            * (aws.DASHBOARD_AND_SECRET + STARTS_A_MINUTE * MINUTES / MILLION * aws.SCHEDULE_MILLION),
            "X-Ray": traces * SECONDS / MILLION * aws.XRAY_MILLION,
            "data out, and between zones": aws.tiered(charges * ANSWER_BYTES / 1000, aws.OUT_TIERS)
            + charges * ACROSS_BYTES / 1000 * aws.ZONES_GB,
        }


IDLE = Plan(0)
PLANS: Mapping[str, Plan] = {
    "100/s": Plan(100),
    "1,000/s": Plan(1_000),
    "10,000/s in ten": Plan(10_000, stacks=10, outbox_days=7, processed_days=35),
    "10,000/s in one": Plan(10_000, outbox_days=7, processed_days=35),
}


@dataclass(frozen=True, slots=True)
class Limit:
    """Where a part of a stack as it is deployed by default ends: at so many charges a second, and why."""

    part: str
    why: str
    rate: float
    then: str


def limits() -> list[Limit]:
    """Returns the limits of a stack with the parameters' defaults, in a region of the first rank."""
    small = aws.INSTANCE_CLASSES[0]
    subscribers = int(_parameter("SubscriberConcurrency"))
    connections = small.memory_gb * aws.CONNECTIONS_PER_GB - subscribers - 2 - OTHER_CONNECTIONS
    memory_bytes = (small.memory_gb - OTHER_GB) * MEMORY_LOADED * 1e9
    disk_gb = float(TEMPLATE["Resources"]["DatabaseInstance"]["Properties"]["MaxAllocatedStorage"])
    one = Plan(1)
    rows = [
        Limit(
            "API Gateway, the stage",
            f"`ApiRequestsPerSecond` = {_parameter('ApiRequestsPerSecond'):.0f}",
            _parameter("ApiRequestsPerSecond"),
            "raise it, up to the account's quota",
        ),
        Limit(
            "API Gateway, the account",
            f"quota, {aws.API_REQUESTS_PER_S:,} requests a second; 2,500 in some regions",
            aws.API_REQUESTS_PER_S,
            "ask for more",
        ),
        Limit(
            "Lambda, requests",
            f"quota, {aws.LAMBDA_REQUESTS_PER_INSTANCE} a second for each of {aws.LAMBDA_CONCURRENCY:,} instances",
            aws.LAMBDA_REQUESTS_PER_INSTANCE * aws.LAMBDA_CONCURRENCY,
            "ask for more concurrency",
        ),
        Limit(
            "database, connections",
            f"{connections} are left for charges, {CHARGE_SECONDS * 1000:.0f} ms each",
            _rate_of(connections),
            "more memory, or `DatabaseProxy`; `ReservedConcurrency` bounds them",
        ),
        Limit(
            "database, processor",
            f"{small.name}: {small.vcpus} vCPU all the time, and {DATABASE_SECONDS * 1000:.2f} ms a charge",
            small.vcpus / DATABASE_SECONDS,
            "`DatabaseInstanceClass`",
        ),
        Limit(
            "database, memory",
            f"{small.name}: {memory_bytes / 1e9:.1f} GB for the index of a day's keys",
            memory_bytes / (one.index_gb * 1e9),
            "`DatabaseInstanceClass`, or a shorter `IdempotencyRetentionHours`",
        ),
        Limit(
            "disk, IOPS",
            f"gp3 under {aws.DISK_STRIPED_GB} GB: {aws.DISK_IOPS[0]:,}",
            (aws.DISK_IOPS[0] - FLUSHES_PER_S) / (IMAGES + OTHER_PAGES),
            f"{aws.DISK_STRIPED_GB} GB and more have {aws.DISK_IOPS[1]:,}",
        ),
        Limit(
            "disk, room",
            f"it grows to {disk_gb:,.0f} GB; all that is retained, and three months' charges",
            disk_gb / (one.retained_gb + 3 * one.grown_gb),
            "`OutboxRetentionDays`, `ProcessedEventsRetentionDays`; an archive of old charges",
        ),
        Limit(
            "relay",
            f"one with {_parameter('RelayMemoryMb'):.0f} MB, {STAGES['relay'].function_ms:.2f} ms of a vCPU an event",
            relay_rate(_parameter("RelayMemoryMb")),
            "`RelayBudgetSeconds`, 60 for each relay, up to four; `RelayMemoryMb`",
        ),
        Limit(
            "SNS",
            f"quota, {aws.SNS_MESSAGES_PER_S:,} messages a second; 9,000 in us-west-2 and eu-west-1, 1,500 in eight"
            " regions, 300 in the others",
            aws.SNS_MESSAGES_PER_S,
            "ask for more, **before the first day** in a region with 300",
        ),
        Limit(
            "subscriber",
            f"`SubscriberConcurrency` = {subscribers}, batches of {ENTRIES_PER_CALL} in {BATCH_SECONDS * 1000:.0f} ms",
            subscribers * ENTRIES_PER_CALL / BATCH_SECONDS,
            "`SubscriberConcurrency`",
        ),
        Limit(
            "subscriber, one principal",
            f"its row of the day's total is locked for {COMMIT_SECONDS * 1000:.0f} ms an event",
            1 / COMMIT_SECONDS,
            "a subscriber that adds a batch up first",
        ),
        Limit(
            "webhooks, to one endpoint each",
            f"one with {_parameter('WebhooksMemoryMb'):.0f} MB, {STAGES['webhook'].function_ms:.1f} ms of a vCPU each",
            dispatcher_rate(_parameter("WebhooksMemoryMb")),
            "`WebhooksBudgetSeconds`, 60 for each dispatcher, up to four; `WebhooksMemoryMb`",
        ),
        Limit(
            "maintenance, reconciliation",
            f"a slice of {SLICE_SECONDS} s of charges in a statement's {STATEMENT_SECONDS:.0f} s",
            STATEMENT_SECONDS / RECONCILED_SECONDS / SLICE_SECONDS,
            "nothing: it is above what the API lets through",
        ),
    ]
    return sorted(rows, key=lambda row: row.rate)


def _rate_of(most: int) -> float:
    """Returns for how many charges a second so many instances are enough."""
    return next(rate for rate in range(50_000, 0, -500) if instances(rate, CHARGE_SECONDS) <= most)


def tables() -> dict[str, Table]:
    """Returns the tables that stand in docs/scaling.md, and the bill in docs/deploy.md, by name."""
    return {
        "stages": _stages(),
        "kept": _kept(),
        "limits": Table(
            "Where a stack with default parameters ends",
            ["part", "limit", "charges a second", "what to turn"],
            [[row.part, row.why, f"{_rounded(row.rate):,}", row.then] for row in limits()],
        ),
        "plans": _plans(),
        "month": _bill(list(PLANS), PLANS.values()),
        "bill": _bill(["idle", "1/s", "100/s"], [IDLE, Plan(1), Plan(100)]),
    }


def _rounded(value: float) -> int:
    """Two digits, since no more are known."""
    return int(float(f"{value:.2g}"))


def _stages() -> Table:
    calls = {"relay": f"1 SNS call for {ENTRIES_PER_CALL}", "subscriber": f"1 Lambda call for {ENTRIES_PER_CALL}"}
    calls |= {"charge": "1 API call, 1 Lambda call", "replay": "1 API call, 1 Lambda call", "webhook": "1 request out"}

    def row(name: str, cost: Cost) -> list[str]:
        return [
            name,
            f"{cost.database_ms:.2f} ms",
            f"{cost.wal_bytes:,.0f} B",
            f"{cost.commits:.2f}",
            f"{cost.function_ms:.2f} ms",
            calls.get(name, ""),
        ]

    together = Cost(DATABASE_SECONDS * 1000, total(lambda cost: cost.function_ms), WAL_BYTES, COMMITS)
    return Table(
        "What one charge costs",
        ["stage", "database, processor", "WAL", "commits", "function, processor", "AWS"],
        [
            *(row(stage, STAGES[stage]) for stage in ALWAYS),
            row("**together**", together),
            *(row(stage, STAGES[stage]) for stage in STAGES if stage not in ALWAYS),
        ],
    )


def _kept() -> Table:
    lasting = {"idempotency_keys": 1, "outbox": 14, "processed_events": 60}

    def row(table: str, days: float, kept: str) -> list[str]:
        churn = 1.0 if table == "charges" else CHURN
        sizes = [rate * DAY * days * KEPT_BYTES[table] * churn / 1e9 for rate in RATES]
        return [table, f"{KEPT_BYTES[table]:.0f} B", kept, *(f"{size:,.0f} GB" for size in sizes)]

    return Table(
        "What stays on the disk",
        ["table", "a row", "kept for", *(f"{rate:,}/s" for rate in RATES)],
        [
            *(row(table, days, f"{days} days" if days > 1 else "24 hours") for table, days in lasting.items()),
            row("charges", aws.HOURS / 24, "ever; a month of them"),
        ],
    )


def _plans() -> Table:
    plans = PLANS.values()

    def row(name: str, cell: Callable[[Plan], object]) -> list[str]:
        return [name, *(str(cell(plan)) for plan in plans)]

    return Table(
        "What to set",
        ["", *PLANS],
        [
            row("stacks, each with a database", lambda plan: plan.stacks),
            row("`ApiRequestsPerSecond`, of a stack", lambda plan: f"{min(2 * plan.share, 10_000):,.0f}"),
            row("instances of charges: busy, at most", _busy),
            row("`ReservedConcurrency`", lambda plan: 2 * plan.charges_instances),
            row("connections, of which RDS allows", lambda plan: f"{plan.connections} of {_allowed(plan):,}"),
            row("`DatabaseInstanceClass`", lambda plan: f"{plan.database.name}, {plan.database.memory_gb} GB"),
            row("its processors, busy", lambda plan: f"{plan.cores:.2f} of {plan.database.vcpus:.0f}"),
            row("index of the day's keys, in memory", lambda plan: f"{plan.index_gb:,.1f} GB"),
            row("`DatabaseStorageGb`", lambda plan: f"{plan.disk_gb:,}"),
            row("and by how much it grows a month", lambda plan: f"{plan.grown_gb:,.0f} GB"),
            row(
                "disk, IOPS of what it has",
                lambda plan: f"{_rounded(plan.iops):,} of {_striped(plan, aws.DISK_IOPS):,}",
            ),
            row(
                "disk, MB/s of what it has",
                lambda plan: f"{plan.written_mb_per_s:.0f} of {_striped(plan, aws.DISK_MB_PER_S)}",
            ),
            row(
                "`OutboxRetentionDays`, `ProcessedEventsRetentionDays`",
                lambda plan: f"{plan.outbox_days}, {plan.processed_days}",
            ),
            row("relays, and `RelayMemoryMb`", lambda plan: f"{plan.relays}, {plan.relay_mb:,}"),
            row("`RelayBudgetSeconds`", lambda plan: f"{plan.relay_budget_seconds:.0f}"),
            row("`SubscriberConcurrency`", lambda plan: plan.subscribers),
        ],
    )


def _busy(plan: Plan) -> str:
    return f"{plan.share * CHARGE_SECONDS:.0f}, {plan.charges_instances}"


def _allowed(plan: Plan) -> int:
    return min(plan.database.memory_gb * aws.CONNECTIONS_PER_GB, aws.MOST_CONNECTIONS)


def _striped(plan: Plan, provided: tuple[int, int]) -> int:
    return provided[plan.disk_gb >= aws.DISK_STRIPED_GB]


def _bill(names: Sequence[str], plans: Iterable[Plan]) -> Table:
    months = [plan.month() for plan in plans]
    totals = [sum(month.values()) for month in months]
    lines = [[line, *(dollars(month[line]) for month in months)] for line in months[0]]
    return Table(
        "A month in US dollars",
        ["", *names],
        [*lines, ["**together**", *(f"**{dollars(amount)}**" for amount in totals)]],
    )


def dollars(amount: float) -> str:
    """Whole ones, and halves up."""
    return f"{math.floor(amount + 0.5):,}"
