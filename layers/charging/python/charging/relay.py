"""The relay: takes due events from the outbox to the topic, at least once, until its time is up."""

import time
from collections import Counter
from collections.abc import Callable, Sequence
from concurrent.futures import FIRST_COMPLETED, wait
from dataclasses import dataclass, field, replace

from charging import errors, outbox
from charging.database import SILENCE_SECONDS, Database
from charging.outbox import LEASE_SECONDS, ClaimedEvent, Completion
from charging.topic import CALL_SECONDS, CALLS_IN_FLIGHT, ENTRIES_PER_CALL, Call, Topic

# As many as can be in flight at once, so that the last event of a claim is sent as soon as the first.
EVENTS_PER_SWEEP = CALLS_IN_FLIGHT * ENTRIES_PER_CALL
# At full speed more is claimed when so many calls have ended: the others keep the broker busy meanwhile.
CALLS_PER_CLAIM = CALLS_IN_FLIGHT // 2
# The worst that a claim can come to: the claim at the end of the database's patience, the question after the topic's
# limit and then the calls at the end of SNS's, and the marking twice at the end of the database's. At full speed other
# calls' marking and the next claim come in between: a database that answers each at its very last moment has events
# sent twice, and none lost.
SWEEP_SECONDS = 2 * CALL_SECONDS + 3 * SILENCE_SECONDS
# While the broker takes nothing at all, a sweep follows only after a pause. It doubles from a second to this.
LONGEST_PAUSE_SECONDS = 10.0


@dataclass(frozen=True, slots=True)
class Sweep:
    """What a claim, or a sum of them, came to: how many events had which result, and how many leases had been lost.

    `unmarked` counts those whose result could not be written down: they are sent again when their lease has ended.
    `error` is why, or why there was no claim; of a sum it is the first.
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
            self.error or other.error,
        )


type Claim = Callable[[int], Sequence[ClaimedEvent]]


def run_once(database: Database, topic: Topic, *, limit: int = EVENTS_PER_SWEEP, parked_blocks: bool = True) -> Sweep:
    """Claims up to `limit` events, those that have been due longest, sends them, and writes their results down.

    No transaction is open while the topic is called. An event is marked published only after the topic has
    accepted that very event; a crash in between sends it again once its lease has ended. Never raises for what the
    database does: that is in the result, and one call's events are marked whatever becomes of another's. A mistake of
    ours in one call is raised when the others have ended and their results are written down.
    """
    return _sweep(database, topic, _claims(database, topic, parked_blocks=parked_blocks), limit, lambda: False)


def _claims(database: Database, topic: Topic, *, parked_blocks: bool) -> Claim:
    if topic.is_ordered:
        return lambda limit: outbox.claim_in_order(
            database, limit=limit, lease_seconds=LEASE_SECONDS, parked_blocks=parked_blocks
        )
    return outbox.Claims(database).claim


def _sweep(database: Database, topic: Topic, claim: Claim, limit: int, goes_on: Callable[[], bool]) -> Sweep:
    """Keeps the promise of `run_once`, and at full speed goes on as long as enough is due, all goes well, and `goes_on`
    says so: the places of calls that have ended are filled while others are under way, so that the broker waits neither
    for the database nor for the slowest call. Never is more claimed and not marked than one claim's worth.
    """
    sweep = Sweep()
    calls: set[Call] = set()
    mistakes: list[BaseException] = []
    is_full = False
    room = limit
    while room or calls:
        if room:
            try:
                events = claim(room)
            except errors.ChargingError as failed:
                sweep, events = sweep + Sweep(error=failed), []
            # Under way before anything is written down, which may take its time: the lease is running.
            begun, completions = topic.send(events, calls=CALLS_IN_FLIGHT - len(calls))
            calls |= begun
            is_full = len(events) == room
        else:
            ended, calls = wait(calls, return_when=FIRST_COMPLETED)
            mistakes += [mistake for call in ended if (mistake := call.exception())]
            completions = [completion for call in ended if not call.exception() for completion in call.result()]
        sweep += _mark(database, completions)
        places = CALLS_IN_FLIGHT - len(calls)
        goes_well = is_full and not (mistakes or sweep.error or sweep.results["POSTPONED"])
        is_fast = limit == EVENTS_PER_SWEEP and places >= CALLS_PER_CLAIM
        room = places * ENTRIES_PER_CALL if goes_well and is_fast and goes_on() else 0
    if mistakes:
        raise mistakes[0]
    return sweep


def _mark(database: Database, completions: Sequence[Completion]) -> Sweep:
    results = Counter[str](completion.result for completion in completions)
    try:
        return Sweep(results, lease_lost=outbox.complete(database, completions))
    except errors.ChargingError as failed:
        return Sweep(results, unmarked=len(completions), error=failed)


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
    claim = _claims(database, topic, parked_blocks=parked_blocks)
    total = Sweep()
    limit = ENTRIES_PER_CALL
    setback = 0.0

    def is_time_left() -> bool:
        return remaining_seconds() > SWEEP_SECONDS and (not budget_seconds or time.monotonic() < end)

    while is_time_left():
        sweep = _sweep(database, topic, claim, limit, is_time_left)
        total = replace(total + sweep, error=sweep.error)
        if isinstance(sweep.error, errors.TemporarilyUnavailable | errors.DatabaseFault):
            return total
        is_full = sweep.claimed >= limit
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
