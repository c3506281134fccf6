"""The dispatcher: takes due deliveries to their receivers, at least once, and lets no receiver hold up another."""

import time
from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import FIRST_COMPLETED, Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from uuid import UUID

from charging import deliveries, errors, signing, telemetry
from charging.database import SILENCE_SECONDS, Database
from charging.deliveries import SLOW_SECONDS, Attempt, ClaimedDelivery, Transition
from charging.sender import Failure, Sender

# What a receiver has for its answer, from the look-up of its name to the last byte. It is to take the event in, and to
# work on it afterwards.
SEND_SECONDS = 15.0
# The worst case from a claim to what is written down of it, each statement at the end of the database's patience.
SWEEP_SECONDS = SEND_SECONDS + 2 * SILENCE_SECONDS
# A lease outlives that, since one that ends early sends its delivery twice. It is also how long the deliveries of a
# dispatcher that died have to wait.
LEASE_SECONDS = 60

# A send is mostly waiting, but for its first moments. More than these at once would wait for this function's share of a
# processor, above all for TLS.
SLOTS = 64
# What only waits, for a receiver that is known to be slow or turns out to be, has slots of its own: however many slow
# receivers there are, they leave the quick ones theirs. More would take more than 10 MB, with the worst answers.
SLOW_SLOTS = 32
# An endpoint may have an eighth of what is free: up to eight slots, and fewer as others fill them, down to one. So many
# slow receivers together still leave slots for the next.
SHARE = 8
# Probes mostly run into their deadline. They have half of the slow slots at the most, and are looked for once a
# second.
PROBE_SLOTS = SLOW_SLOTS // 2
PROBE_POLL_SECONDS = 1.0
# When an attempt has ended, those that end so soon after it are waited for: they are written down together, and their
# slots are filled together. Else most would have statements of their own, which cost the database more than the charge
# did. One that is under way alone ends when it ends; else a slot is empty for that much longer, of the tens of
# milliseconds that a delivery takes.
GATHER_SECONDS = 0.005
# Deliveries to deleted endpoints that one statement gives up, in some ten milliseconds.
ABANDONED_AT_ONCE = 1000

_ERROR_CHARACTERS = 500


@dataclass(frozen=True, slots=True)
class Sweep:
    """Some attempts that have ended, and what was written down of them.

    `error` is why that could not be done, and the deliveries are then sent again when their leases have ended; without
    attempts it is why nothing could be claimed. `abandoned` counts deliveries that were given up because their
    endpoint is there no more.
    """

    attempts: Sequence[Attempt] = ()
    lease_lost: int = 0
    transitions: Sequence[Transition] = ()
    abandoned: int = 0
    error: errors.ChargingError | None = None


class Courier:
    """Makes one attempt: signs the delivery with every secret that is live, and sends it.

    With more than one master key, of which the first is the one in use, each secret is one under either. Raises
    Misconfigured for a key that is too short, before a delivery is claimed.
    """

    def __init__(self, sender: Sender, master_keys: Sequence[bytes]) -> None:
        for master_key in master_keys:
            signing.check(master_key)
        self._sender = sender
        self._master_keys = master_keys

    def deliver(self, delivery: ClaimedDelivery) -> Attempt:
        """Sends the delivery's payload, unchanged, under a fresh timestamp. Never raises for what a receiver does."""
        body = delivery.payload.encode()
        versions = [delivery.secret_version, *([delivery.secret_version - 1] if delivery.previous_signs else [])]
        secrets = [
            signing.secret(master_key, delivery.endpoint_id, version)
            for master_key in self._master_keys
            for version in versions
        ]
        signed = signing.headers(str(delivery.event_id), int(time.time()), body, secrets)
        answer = self._sender.send(delivery.url, {"Content-Type": "application/json", **signed}, body)
        duration_ms = round(answer.duration_seconds * 1000)
        if isinstance(answer, Failure):
            return Attempt(delivery, duration_ms, error=f"{answer.reason}: {answer.detail}"[:_ERROR_CHARACTERS])
        return Attempt(
            delivery,
            duration_ms,
            status=answer.status,
            excerpt=answer.excerpt or None,
            retry_after_seconds=answer.retry_after_seconds,
        )


def run(
    database: Database,
    deliver: Callable[[ClaimedDelivery], Attempt],
    *,
    budget_seconds: float,
    poll_seconds: float,
    remaining_seconds: Callable[[], float],
) -> Iterator[Sweep]:
    """Sends what is due and then what becomes due, until the budget is used up; a budget of 0 drains and returns.

    Yields what the attempts came to as they end: a slot is filled again at once, so that no delivery waits for the end
    of another one's. No transaction is open while `deliver` runs, in threads. Claims nothing any more when
    `remaining_seconds`, the time until the function is ended, could be too short for it, or the database is away; what
    is under way still ends and is written down. Runs that overlap share the work.

    Raises TemporarilyUnavailable or DatabaseFault at the end where that is what kept it from claiming.
    """
    dispatcher = _Dispatcher(database, deliver)
    end = time.monotonic() + budget_seconds
    outage: errors.ChargingError | None = None
    is_abandoning = True
    is_claiming = remaining_seconds() > SWEEP_SECONDS
    with dispatcher.threads:
        while is_claiming or dispatcher.under_way:
            found = 0
            if is_claiming:
                try:
                    probed = dispatcher.probe()
                    if probed:
                        yield Sweep(transitions=[Transition(endpoint_id, "half_opened") for endpoint_id in probed])
                    found = len(probed) + dispatcher.fill()
                    if is_abandoning:
                        abandoned = deliveries.abandon(database, limit=ABANDONED_AT_ONCE)
                        is_abandoning = abandoned == ABANDONED_AT_ONCE
                        yield Sweep(abandoned=abandoned)
                except (errors.ConnectionLost, errors.Contended) as missed:
                    yield Sweep(error=missed)
                except errors.ChargingError as failed:
                    outage = failed
            ended = dispatcher.wait(poll_seconds if outage is None else None)
            if ended:
                yield from _completed(database, ended)
            is_claiming = (
                outage is None
                and remaining_seconds() > SWEEP_SECONDS
                and (time.monotonic() < end or (budget_seconds == 0 and bool(found or ended or dispatcher.under_way)))
            )
    if outage is not None:
        raise outage


def _completed(database: Database, attempts: Sequence[Attempt]) -> Iterator[Sweep]:
    try:
        completion = deliveries.complete(database, attempts)
    except errors.ChargingError as failed:
        if isinstance(failed, errors.DatabaseFault) and len(attempts) > 1:
            # One that cannot be written down must not take the others with it.
            for attempt in attempts:
                yield from _completed(database, [attempt])
        else:
            yield Sweep(attempts, error=failed)
    else:
        yield Sweep(attempts, completion.lease_lost, completion.transitions)


@dataclass(frozen=True, slots=True)
class _UnderWay:
    delivery: ClaimedDelivery
    begun: float
    was_slow: bool

    @property
    def is_late(self) -> bool:
        """Whether it takes longer than a quick receiver does."""
        return time.monotonic() - self.begun > SLOW_SECONDS

    @property
    def is_slow(self) -> bool:
        """Whether it is in a slow slot: from the beginning, or since it is late."""
        return self.was_slow or self.is_late


class _Dispatcher:
    """The slots of one run, and what is in them."""

    def __init__(self, database: Database, deliver: Callable[[ClaimedDelivery], Attempt]) -> None:
        self.threads = ThreadPoolExecutor(SLOTS + SLOW_SLOTS, thread_name_prefix="deliver")
        self.under_way: dict[Future[Attempt], _UnderWay] = {}
        self._database = database
        self._deliver = deliver
        self._next_probes = 0.0
        self._after = {False: deliveries.BEFORE_ALL, True: deliveries.BEFORE_ALL}

    def probe(self) -> list[UUID]:
        """Claims probes of open endpoints, once a second, and returns the endpoints."""
        probes = sum(one.delivery.is_probe for one in self.under_way.values())
        free = min(self._free(slow=True), PROBE_SLOTS - probes)
        if free <= 0 or time.monotonic() < self._next_probes:
            return []
        self._next_probes = time.monotonic() + PROBE_POLL_SECONDS
        claimed = deliveries.claim_probes(self._database, limit=free, lease_seconds=LEASE_SECONDS)
        self._start(claimed, slow=True)
        return [delivery.endpoint_id for delivery in claimed]

    def fill(self) -> int:
        """Claims for the slots that are free, of either kind, and returns how many were claimed."""
        return self._fill(slow=False) + self._fill(slow=True)

    def _fill(self, *, slow: bool) -> int:
        """Claims at first one for each endpoint, and then for each that has more its part of what is free, as long as
        an endpoint's share allows."""
        found, share, larger = 0, 0, 1
        while larger > share:
            share = larger
            found += self._go_round(share, slow=slow)
            behind = sum(count >= share for count in self._busy().values())
            if behind == 0:
                break  # nothing waits, not even behind a share
            free = self._free(slow=slow)
            larger = min(share + max(1, free // behind), SHARE, free // SHARE)
        return found

    def wait(self, seconds: float | None) -> list[Attempt]:
        """Waits for an attempt to end, and returns all that end soon after, too; none when the time is up before."""
        if not self.under_way:
            time.sleep(seconds or 0)
            return []
        ended, _ = wait(self.under_way, seconds, FIRST_COMPLETED)
        if ended:
            ended, _ = wait(self.under_way, GATHER_SECONDS)
        for future in ended:
            del self.under_way[future]
        return [future.result() for future in ended]

    def _go_round(self, share: int, *, slow: bool) -> int:
        """Claims up to a share of each endpoint, going on after the endpoint at which the slots were full before."""
        found = 0
        while (free := self._free(slow=slow)) > 0:
            busy = self._busy()
            if not slow:
                # Nothing more of those that turn out to be slow, until an attempt has ended and says how slow.
                busy |= {one.delivery.endpoint_id: SHARE for one in self.under_way.values() if one.is_late}
            claimed = deliveries.claim(
                self._database,
                slow=slow,
                after=self._after[slow],
                limit=free,
                share=share,
                busy=busy,
                lease_seconds=LEASE_SECONDS,
            )
            self._start(claimed, slow=slow)
            found += len(claimed)
            began, self._after[slow] = self._after[slow], deliveries.BEFORE_ALL
            if len(claimed) == free:
                self._after[slow] = max(delivery.endpoint_id for delivery in claimed)
            elif began == deliveries.BEFORE_ALL:
                break
        return found

    def _free(self, *, slow: bool) -> int:
        """How many slots of a kind are free. What turned out to be slow may have taken more than there are of those."""
        taken = sum(one.is_slow == slow for one in self.under_way.values())
        return min((SLOW_SLOTS if slow else SLOTS) - taken, SLOTS + SLOW_SLOTS - len(self.under_way))

    def _busy(self) -> Counter[UUID]:
        return Counter(one.delivery.endpoint_id for one in self.under_way.values())

    def _attempt(self, delivery: ClaimedDelivery) -> Attempt:
        try:
            return self._deliver(delivery)
        except Exception as fault:  # noqa: BLE001 - a fault of ours in one delivery must not take the others with it
            telemetry.logger("webhooks").exception("webhook_attempt_crashed", event_id=str(delivery.event_id))
            return Attempt(delivery, 0, error=f"internal_error: {type(fault).__name__}")

    def _start(self, claimed: Sequence[ClaimedDelivery], *, slow: bool) -> None:
        for delivery in claimed:
            self.under_way[self.threads.submit(self._attempt, delivery)] = _UnderWay(delivery, time.monotonic(), slow)
