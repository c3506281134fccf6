"""The relay: takes due events from the outbox to the topic, at least once, until its time is up."""

import time
from collections import Counter
from collections.abc import Callable
from dataclasses import dataclass, field

from charging import outbox
from charging.database import SILENCE_SECONDS, Database
from charging.topic import CALL_SECONDS, CALLS_IN_FLIGHT, ENTRIES_PER_CALL, Topic

# As many as can be in flight at once, so that the last event of a claim is sent as soon as the first.
EVENTS_PER_SWEEP = CALLS_IN_FLIGHT * ENTRIES_PER_CALL
# The worst sweep: the claim and the marking each at the end of the database's patience, a call at the end of SNS's.
SWEEP_SECONDS = CALL_SECONDS + 2 * SILENCE_SECONDS
# A lease outlives the sending and the marking, since one that ends early sends its events twice. It is also how long
# the events of a relay that died have to wait.
LEASE_SECONDS = 30
# While the broker takes nothing at all, a sweep follows only after a pause, so that the backlog is not
# claimed over and over. It doubles from a second to this.
LONGEST_PAUSE_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class Sweep:
    """What one claim came to: how many events had which result, and how many leases had been lost."""

    results: Counter[str] = field(default_factory=Counter)
    lease_lost: int = 0

    @property
    def claimed(self) -> int:
        """The number of events that were claimed."""
        return self.results.total()

    @property
    def made_no_headway(self) -> bool:
        """Whether the broker was asked and took, or judged, not one of the events."""
        return self.claimed > 0 and self.results["POSTPONED"] == self.claimed

    def __add__(self, other: "Sweep") -> "Sweep":
        return Sweep(self.results + other.results, self.lease_lost + other.lease_lost)


def run_once(database: Database, topic: Topic) -> Sweep:
    """Claims the events that have been due longest, sends them, and writes down each one's result.

    No transaction is open while the topic is called. An event is marked published only after the topic has
    accepted that very event; a crash in between sends it again once its lease has ended.

    Raises what `Database.fetch` raises.
    """
    events = outbox.claim(database, limit=EVENTS_PER_SWEEP, lease_seconds=LEASE_SECONDS)
    sweep = Sweep()
    for completions in topic.publish(events):
        lost = outbox.complete(database, completions)
        sweep += Sweep(Counter(completion.result for completion in completions), lost)
    return sweep


def run(
    database: Database,
    topic: Topic,
    *,
    budget_seconds: float,
    poll_seconds: float,
    remaining_seconds: Callable[[], float],
    pause: Callable[[float], None] = time.sleep,
) -> Sweep:
    """Drains the outbox, then polls it until the budget is used up; a budget of 0 drains and returns.

    Stops before a sweep that could outlast `remaining_seconds`, the time until the function is ended. Runs that
    overlap share the work. Returns the sum of all sweeps; raises what `Database.fetch` raises.
    """
    end = time.monotonic() + budget_seconds
    total = Sweep()
    setback = 0.0
    while remaining_seconds() > SWEEP_SECONDS:
        sweep = run_once(database, topic)
        total += sweep
        if sweep.made_no_headway:
            setback = min(max(1.0, 2 * setback), LONGEST_PAUSE_SECONDS)
        else:
            setback = 0.0
            if sweep.claimed == EVENTS_PER_SWEEP:
                continue
        wait = setback or poll_seconds
        if time.monotonic() + wait >= end:
            break
        pause(wait)
    return total
