"""Measures side by side: what is compared takes turns in short rounds, so that whatever else the machine does slows
all of it alike, and a ratio says more than the times that it is made of."""

import math
import statistics
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Spread:
    """A value, and the quartiles of what it was in the single rounds."""

    value: float
    low: float
    high: float


def percentile(values: Sequence[float], share: float) -> float:
    """Returns the smallest of the values that is not below this share of them."""
    return sorted(values)[math.ceil(share * len(values)) - 1]


def take_turns[N, T](rounds: int, subjects: Mapping[N, Callable[[], T]]) -> dict[N, list[T]]:
    """Lets each subject measure something once a round, and returns the results, one a round.

    Each round begins with another subject, so that none always comes first after whatever has just ended.
    """
    names = list(subjects)
    results: dict[N, list[T]] = {name: [] for name in names}
    for turn in range(rounds):
        shift = turn % len(names)
        for name in names[shift:] + names[:shift]:
            results[name].append(subjects[name]())
    return results


def ratio(values: Sequence[float], others: Sequence[float]) -> Spread:
    """Compares two subjects round by round, since neighbours in time had the same machine: the median of the ratios."""
    ratios = [value / other for value, other in zip(values, others, strict=True)]
    return Spread(statistics.median(ratios), percentile(ratios, 0.25), percentile(ratios, 0.75))


def seconds(call: Callable[[], object]) -> float:
    """Returns how long one call takes."""
    begun = time.perf_counter()
    call()
    return time.perf_counter() - begun
