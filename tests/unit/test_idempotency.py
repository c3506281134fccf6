"""What may be stored under a key, and so be replayed to whoever has it."""

import pytest

from charging.idempotency import BODY_BYTES, StoredResponse

HEADERS = {"Content-Type": "application/json", "Location": "/charges/1"}


def test_a_response_within_its_bounds_is_kept_as_it_is() -> None:
    """8 KiB of UTF-8 and the two headers: all that a replay needs."""
    response = StoredResponse(201, HEADERS, "\u00e9" * (BODY_BYTES // 2))
    assert (response.status, response.headers, response.body) == (201, HEADERS, "\u00e9" * (BODY_BYTES // 2))


def test_a_response_over_its_bound_is_refused_before_anything_is_sent() -> None:
    """After the commit it would be too late: the work would be done, and could not be answered for. Bytes count."""
    with pytest.raises(ValueError, match="at most 8192 bytes"):
        StoredResponse(201, HEADERS, "\u00e9" * (BODY_BYTES // 2) + "x")


@pytest.mark.parametrize("name", ["Set-Cookie", "Date", "X-Amzn-Trace-Id", "location", "Idempotent-Replayed"])
def test_a_header_that_is_one_callers_own_is_not_stored(name: str) -> None:
    """Cookies, dates and trace ids belong to one answer; only what describes the result is replayed."""
    with pytest.raises(ValueError, match="may be stored"):
        StoredResponse(201, HEADERS | {name: "x"}, "{}")
