"""What an attempt's end means: for its delivery, for its endpoint, and for when the next one is made."""

from uuid import UUID

import pytest
from hypothesis import given
from hypothesis import strategies as st

from charging.deliveries import MAX_FAILURES, PAUSE_SECONDS, Attempt, ClaimedDelivery

SECOND, DAY = 1, 86_400
MINUTE, HOUR = 60, 3600


def delivery(failures: int = 0) -> ClaimedDelivery:
    return ClaimedDelivery(
        endpoint_id=UUID(int=1),
        event_id=UUID(int=2),
        payload="{}",
        attempts=failures + 1,
        failures=failures,
        url="https://receiver.test/",
        secret_version=1,
        previous_signs=False,
        is_probe=False,
    )


def attempt(status: int | None, *, failures: int = 0, retry_after: float | None = None) -> Attempt:
    error = None if status is not None else "timed_out: no answer"
    return Attempt(delivery(failures), 10, status=status, error=error, retry_after_seconds=retry_after)


@pytest.mark.parametrize("status", range(200, 300))
def test_2xx_is_success(status: int) -> None:
    """Whatever is between 200 and 299, and the last attempt too."""
    assert attempt(status).result == "SENT"
    assert attempt(status, failures=MAX_FAILURES - 1).result == "SENT"


@pytest.mark.parametrize(
    "status", [100, 101, 199, 300, 301, 302, 303, 304, 307, 308, 400, 401, 404, 422, 500, 502, 599]
)
def test_nothing_else_is(status: int) -> None:
    """A redirect is a failure, and so is what the receiver takes for the sender's fault."""
    assert attempt(status).result == "REFUSED"


def test_no_answer_is_a_failure() -> None:
    """A receiver that cannot be reached is as one that answers 500."""
    assert attempt(None).result == "REFUSED"


@pytest.mark.parametrize("status", [500, None])
def test_the_eighth_failure_is_the_last(status: int | None) -> None:
    """Seven failures leave one attempt, and that one's failure none."""
    assert attempt(status, failures=MAX_FAILURES - 2).result == "REFUSED"
    assert attempt(status, failures=MAX_FAILURES - 1).result == "FAILED"


@pytest.mark.parametrize("status", [410, 429, 503])
def test_an_endpoint_that_takes_nothing_costs_no_delivery_its_life(status: int) -> None:
    """Not even the last attempt is used up: the endpoint is held, and the delivery goes when it is let go."""
    ended = attempt(status, failures=MAX_FAILURES - 1)
    assert ended.result == "POSTPONED"
    assert ended.delay_seconds == 0
    assert ended.is_gone == (status == 410)


@pytest.mark.parametrize("status", [429, 503])
def test_a_pause_is_as_long_as_the_receiver_asks(status: int) -> None:
    """And a minute where it does not say."""
    assert attempt(status, retry_after=7).pause_seconds == 7
    assert attempt(status).pause_seconds == PAUSE_SECONDS


@pytest.mark.parametrize("status", [200, 410, 500, 502, 504, None])
def test_no_other_answer_pauses(status: int | None) -> None:
    """A receiver that asks for time with another status speaks of this delivery alone."""
    assert attempt(status, retry_after=7 if status else None).pause_seconds is None


@pytest.mark.parametrize(
    ("failures", "seconds"),
    [
        (0, 30),
        (1, 2 * MINUTE),
        (2, 8 * MINUTE),
        (3, 32 * MINUTE),
        (4, 128 * MINUTE),
        (5, 512 * MINUTE),
        (6, 2048 * MINUTE),
    ],
)
def test_each_attempt_is_four_times_as_far_from_the_last(failures: int, seconds: float) -> None:
    """30 seconds to 34 hours, a tenth more or less, and not always the same."""
    delays = [attempt(500, failures=failures).delay_seconds for _ in range(200)]
    assert all(0.9 * seconds <= delay <= 1.1 * seconds for delay in delays)
    assert max(delays) - min(delays) > 0.1 * seconds


def test_eight_attempts_take_about_45_hours() -> None:
    """The sum of the seven delays."""
    total = sum(attempt(500, failures=failures).delay_seconds for failures in range(MAX_FAILURES - 1))
    assert 40 * HOUR < total < 51 * HOUR


@given(
    failures=st.integers(0, MAX_FAILURES - 2),
    retry_after=st.none() | st.floats(SECOND, DAY),
    status=st.sampled_from([None, 301, 400, 500]),
)
def test_a_delay_is_never_shorter_than_the_schedule_or_than_asked_for(
    failures: int, retry_after: float | None, status: int | None
) -> None:
    """A receiver can ask for more time, and cannot use its deliveries' eight attempts up within seconds."""
    delay = attempt(status, failures=failures, retry_after=retry_after).delay_seconds
    scheduled = 30 * 4**failures
    assert delay >= 0.9 * scheduled
    assert delay >= (retry_after or 0)
    assert delay <= max(1.1 * scheduled, retry_after or 0)
