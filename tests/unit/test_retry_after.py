"""Retry-After: a number of seconds or a date, within 1 s and 24 h, and nothing else."""

from datetime import UTC, datetime, timedelta

import pytest
from hypothesis import given
from hypothesis import strategies as st

from charging.sender import retry_after_seconds

NOW = datetime(2026, 12, 1, 9, 30, 5, tzinfo=UTC)
DAY = 86_400

moments = st.datetimes(timezones=st.just(UTC)).map(lambda moment: moment.replace(microsecond=0))
DAYS = ["Mon", "Tue", "Wed", "Thu", "Fri", "Sat", "Sun"]
MONTHS = ["Jan", "Feb", "Mar", "Apr", "May", "Jun", "Jul", "Aug", "Sep", "Oct", "Nov", "Dec"]


def http_date(moment: datetime) -> str:
    """The form that is sent today (IMF-fixdate)."""
    day, month = DAYS[moment.weekday()], MONTHS[moment.month - 1]
    return f"{day}, {moment.day:02} {month} {moment.year:04} {moment:%H:%M:%S} GMT"


@given(st.integers(0, 10**30))
def test_seconds_are_honoured_within_the_bounds(seconds: int) -> None:
    """From 1 s to 24 h as they are, and beyond as the nearer bound."""
    assert retry_after_seconds([str(seconds)], NOW) == min(max(seconds, 1), DAY)


@given(moments.filter(lambda moment: moment.year >= 1000))
def test_a_date_is_honoured_within_the_bounds(moment: datetime) -> None:
    """As the seconds until then; one that is past, as one second."""
    seconds = int((moment - NOW).total_seconds())
    assert retry_after_seconds([http_date(moment)], NOW) == min(max(seconds, 1), DAY)


@pytest.mark.parametrize(
    ("line", "seconds"),
    [
        ("Tue, 01 Dec 2026 10:30:05 GMT", 3600),
        ("Tuesday, 01-Dec-26 10:30:05 GMT", 3600),
        ("Tue Dec  1 10:30:05 2026", 3600),
        ("Tue, 01 Dec 2026 09:30:05 GMT", 1),
        ("Thu, 01 Jan 1970 00:00:00 GMT", 1),
        ("Fri, 31 Dec 9999 23:59:59 GMT", DAY),
        ("0", 1),
        ("1", 1),
        ("120", 120),
        ("000120", 120),
        (" 120\t", 120),
        ("86400", DAY),
        ("86401", DAY),
        ("9" * 5000, DAY),
        ("0" * 5000, 1),
    ],
)
def test_every_form_is_read(line: str, seconds: int) -> None:
    """Seconds, and the three forms that a date may have."""
    assert retry_after_seconds([line], NOW) == seconds


@pytest.mark.parametrize(
    "line",
    [
        "",
        " ",
        "-5",
        "+5",
        "1e9",
        "1.5",
        "0x10",
        "abc",
        "5 s",
        "5, 10",
        "5;q=1",
        '"5"',
        "٣",
        "\uff15",
        "²",
        "1_000",
        "inf",
        "nan",
        "None",
        "\u00a05",
        "5\x00",
        "2026-12-01T10:30:05Z",
        "Tue, 32 Dec 2026 10:30:05 GMT",
        "Tue, 01 Dec 2026 25:30:05 GMT",
        "Tue, 01 Dec 99999999999 10:30:05 GMT",
        "Tue, 01 Dec 2026 10:30:05 " + "GMT" * 5000,
        "Tue, 01",
        "Tue",
    ],
)
def test_what_is_malformed_is_ignored(line: str) -> None:
    """A receiver that says nothing sensible is waited for as one that says nothing."""
    assert retry_after_seconds([line], NOW) is None


@pytest.mark.parametrize("lines", [[], ["5", "5"], ["5", "10"], ["5", "abc"], ["", ""]])
def test_there_is_one_line_of_it(lines: list[str]) -> None:
    """With two nobody knows which is meant."""
    assert retry_after_seconds(lines, NOW) is None


fields = st.text(st.characters(max_codepoint=255)) | st.from_regex(
    r"[A-Z][a-z]{2,8}[, ] ?\d{1,12}[ -][A-Z][a-z]{2}[ -]\d{1,12} \d{1,12}:\d{1,4}:\d{1,4} ?[A-Z+-]{0,4}\d{0,12}",
    fullmatch=True,
)


@given(st.lists(fields, max_size=3), st.timedeltas(timedelta(days=-9000), timedelta(days=9000)))
def test_any_header_is_within_the_bounds_or_ignored(lines: list[str], later: timedelta) -> None:
    """Nothing is raised, whatever a receiver says and whenever."""
    seconds = retry_after_seconds(lines, NOW + later)
    assert seconds is None or 1 <= seconds <= DAY
