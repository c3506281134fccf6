"""The relay: takes due events from the outbox to the topic, at least once, until its time is up."""

import time
from collections import Counter
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace

from charging import errors, outbox
from charging.database import SILENCE_SECONDS, Database
from charging.outbox import ClaimedEvent
from charging.topic import CALL_SECONDS, CALLS_IN_FLIGHT, ENTRIES_PER_CALL, Topic

# As many as can be in flight at once, so that the last event of a claim is sent as soon as the first.
EVENTS_PER_SWEEP = CALLS_IN_FLIGHT * ENTRIES_PER_CALL
# The worst sweep: the claim at the end of the database's patience, the question after the topic's limit and then the
# calls at the end of SNS's, and the marking twice at the end of the database's.
SWEEP_SECONDS = 2 * CALL_SECONDS + 3 * SILENCE_SECONDS
# A lease outlives the worst sweep, since one that ends early sends its events twice. It is also how long the events of
# a relay that died have to wait.
LEASE_SECONDS = 45
# While the broker takes nothing at all, a sweep follows only after a pause. It doubles from a second to this.
LONGEST_PAUSE_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class Sweep:
    """What a claim, or a sum of them, came to: how many events had which result, and how many leases had been lost.

    `unmarked` counts those whose result could not be written down: they are sent again when their lease has ended.
    `error` is why, or why there was no claim; of a sum it is the last sweep's.
    """

    results: Counter[str] = field(default_factory=Counter)
    lease_lost: int = 0
    unmarked: int = 0
    error: errors.ChargingError | None = None

    @property
    def claimed(self) -> int:
        """The number of events that were claimed."""
        return self.results.total()

    @property
    def made_no_headway(self) -> bool:
        """Whether nothing could be asked of the database, or the broker took, or judged, not one of the events."""
        return self.error is not None or (self.claimed > 0 and self.results["POSTPONED"] == self.claimed)

    def __add__(self, other: "Sweep") -> "Sweep":
        return Sweep(
            self.results + other.results,
            self.lease_lost + other.lease_lost,
            self.unmarked + other.unmarked,
            other.error,
        )


def run_once(database: Database, topic: Topic, *, limit: int = EVENTS_PER_SWEEP, parked_blocks: bool = True) -> Sweep:
    """Claims up to `limit` events, those that have been due longest, sends them, and writes their results down.

    No transaction is open while the topic is called. An event is marked published only after the topic has
    accepted that very event; a crash in between sends it again once its lease has ended. Never raises for what the
    database does: that is in the result, and one call's events are marked whatever becomes of another's.
    """
    try:
        events = _claim(database, topic, limit, parked_blocks=parked_blocks)
    except errors.ChargingError as failed:
        return Sweep(error=failed)
    sweep = Sweep()
    error: errors.ChargingError | None = None
    for completions in topic.publish(events):
        results = Counter[str](completion.result for completion in completions)
        try:
            sweep += Sweep(results, lease_lost=outbox.complete(database, completions))
        except errors.ChargingError as failed:
            sweep += Sweep(results, unmarked=len(completions))
            error = failed
    return replace(sweep, error=error)


def _claim(database: Database, topic: Topic, limit: int, *, parked_blocks: bool) -> Sequence[ClaimedEvent]:
    if topic.is_ordered:
        return outbox.claim_in_order(database, limit=limit, lease_seconds=LEASE_SECONDS, parked_blocks=parked_blocks)
    return outbox.claim(database, limit=limit, lease_seconds=LEASE_SECONDS)


def run(
    database: Database,
    topic: Topic,
    *,
    budget_seconds: float,
    poll_seconds: float,
    parked_blocks: bool = True,
    remaining_seconds: Callable[[], float],
    pause: Callable[[float], None] = time.sleep,
) -> Sweep:
    """Drains the outbox and then polls it, until the budget is used up; a budget of 0 drains it, and returns.

    Begins with what fills one call and doubles it with every sweep that goes well; one in which something had to be
    postponed halves it. So what an outage has piled up reaches a broker that has just come back at the pace that the
    broker bears, and while it is away a single call asks after it.

    Stops before a sweep that could outlast `remaining_seconds`, the time until the function is ended, and when there
    is no database. Runs that overlap share the work. Returns the sum of all sweeps, whose `error` is what ended the
    run, where something did.
    """
    end = time.monotonic() + budget_seconds
    total = Sweep()
    limit = ENTRIES_PER_CALL
    setback = 0.0
    while remaining_seconds() > SWEEP_SECONDS and (not budget_seconds or time.monotonic() < end):
        sweep = run_once(database, topic, limit=limit, parked_blocks=parked_blocks)
        total += sweep
        if isinstance(sweep.error, errors.TemporarilyUnavailable | errors.DatabaseFault):
            return total
        is_full = sweep.claimed == limit
        if sweep.results["POSTPONED"]:
            limit = max(ENTRIES_PER_CALL, limit // 2)
        elif sweep.results["PUBLISHED"]:
            limit = min(EVENTS_PER_SWEEP, 2 * limit)
        if sweep.made_no_headway:
            setback = min(max(1.0, 2 * setback), LONGEST_PAUSE_SECONDS)
        else:
            setback = 0.0
            # In order, what was published may have made room for what comes after it.
            if is_full or (topic.is_ordered and sweep.results["PUBLISHED"]):
                continue
        wait = setback or poll_seconds
        if time.monotonic() + wait >= end:
            return total
        pause(wait)
    return total
