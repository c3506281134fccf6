"""How events are packed into calls of PublishBatch, whose quotas are 10 entries and 256 KiB in all."""

from datetime import UTC, datetime
from itertools import pairwise
from uuid import UUID

from hypothesis import given, settings
from hypothesis import strategies as st

from charging.outbox import ClaimedEvent
from charging.topic import _pack

ENTRIES = 10
BYTES = 262_144
NOW = datetime.now(UTC)
# The attributes of an event of type ChargeCreated: eventType and outboxId, each with its name, type and value.
ATTRIBUTES = len("eventTypeStringChargeCreatedoutboxIdString") + 36

# One, two, three and four bytes each, but one character.
characters = st.sampled_from("aé€😀")
sizes = st.one_of(
    st.integers(0, 2_000),
    st.integers(20_000, 70_000),
    st.integers(BYTES - ATTRIBUTES - 3, BYTES - ATTRIBUTES + 3),
)


@st.composite
def claimed(draw: st.DrawFn) -> ClaimedEvent:
    """An event whose payload is about as large as drawn, and exactly so where its characters are bytes."""
    character = draw(characters)
    payload = character * (draw(sizes) // len(character.encode()))
    return ClaimedEvent(UUID(int=draw(st.integers(0, 2**128 - 1))), "ChargeCreated", UUID(int=0), payload, 1, 0, NOW)


def size(event: ClaimedEvent) -> int:
    return len(event.payload.encode()) + ATTRIBUTES


# A machine that is busy makes no property false.
relaxed = settings(deadline=None)

events = st.lists(claimed(), max_size=30, unique_by=lambda event: event.id)


@given(events)
@relaxed
def test_every_event_is_in_one_call_or_set_aside(given_events: list[ClaimedEvent]) -> None:
    """Nothing is lost or doubled, and what is sent keeps its order."""
    calls, oversized = _pack(given_events, BYTES)
    assert [event for call in calls for event in call] == [event for event in given_events if event not in oversized]
    assert all(event in given_events for event in oversized)


@given(events)
@relaxed
def test_no_call_is_over_a_quota(given_events: list[ClaimedEvent]) -> None:
    """A call has 1 to 10 entries, whose bodies and attributes are 256 KiB at most."""
    calls, _ = _pack(given_events, BYTES)
    assert all(1 <= len(call) <= ENTRIES for call in calls)
    assert all(sum(map(size, call)) <= BYTES for call in calls)


@given(events)
@relaxed
def test_only_what_fits_into_no_call_is_set_aside(given_events: list[ClaimedEvent]) -> None:
    """An event is oversized when it alone is over 256 KiB, and not by a byte less."""
    _, oversized = _pack(given_events, BYTES)
    assert oversized == [event for event in given_events if size(event) > BYTES]


@given(events)
@relaxed
def test_no_call_is_begun_while_there_is_room_in_the_one_before(given_events: list[ClaimedEvent]) -> None:
    """The first event of each further call would have burst the call before it: there are no more calls than needed."""
    calls, _ = _pack(given_events, BYTES)
    assert all(
        len(call) == ENTRIES or sum(map(size, call)) + size(following[0]) > BYTES for call, following in pairwise(calls)
    )
