"""What operators may ask for: a document is read as it is meant, or refused with everything that is wrong with it."""

import json
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from charging import errors, instructions
from charging.instructions import INSTRUCTIONS, SELECTORS, Redrive, Selection

ID = "8e03978e-40d5-43e8-bc93-6894a57f9324"

# As they can come out of a JSON parser, half a surrogate pair included.
texts = st.text(st.characters(codec=None), max_size=20)
json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | texts,
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(texts, inner, max_size=3),
    max_leaves=10,
)
names = st.sampled_from([*SELECTORS, "command", "operator", "state", "limit", "apply", "reason", "perSecond", "other"])

moments = st.builds("{}{}".format, st.integers(0, 99999), st.sampled_from("smhd")) | st.datetimes(
    min_value=datetime(2000, 1, 1),  # noqa: DTZ001 - Hypothesis wants it so
    max_value=datetime(2999, 12, 30),  # noqa: DTZ001
    timezones=st.just(UTC),
).map(lambda at: at.isoformat())
selections = st.fixed_dictionaries(
    {"operator": st.just("ann")},
    optional={
        "ids": st.lists(st.uuids().map(str), min_size=1, max_size=3),
        "type": st.from_regex(r"\A[A-Za-z]{1,20}\Z"),
        "aggregate": st.uuids().map(str),
        "since": moments,
        "until": moments,
    },
)
changes = st.fixed_dictionaries(
    {"apply": st.booleans(), "reason": st.just("as agreed")}, optional={"limit": st.integers(1, 10_000)}
)


def violations(document: object) -> list[tuple[str, str]]:
    """What a document is refused for."""
    with pytest.raises(errors.InvalidRequest) as refused:
        instructions.read(document)
    return [(violation.member, violation.reason) for violation in refused.value.violations]


def members(document: object) -> set[str]:
    """The members that a document is refused for."""
    return {member for member, _ in violations(document)}


def redrive(**more: Any) -> dict[str, Any]:
    """A document that is in order, with something of the test's in it."""
    return {"command": "redrive", "operator": "ann", "type": "ChargeCreated", **more}


@given(json_values | st.dictionaries(names | texts, json_values | st.sampled_from([*INSTRUCTIONS, "1h", "ann", ID])))
def test_any_document_is_read_or_refused(document: object) -> None:
    """Nothing else is ever raised, and a refusal says why, in text that can be written down."""
    try:
        instructions.read(document)
    except errors.InvalidRequest as error:
        refused = error.violations
    else:
        return
    assert refused
    for violation in refused:
        violation.member.encode()
        violation.reason.encode()


@given(selections, changes, st.sampled_from(["redrive", "park"]), st.integers(1, 1000))
def test_a_change_is_read_as_it_is_meant(
    selection: dict[str, Any], change: dict[str, Any], command: str, pace: int
) -> None:
    """With a selector it is accepted, and each member is what was given; without, it is refused, for that alone."""
    document = {"command": command, **selection, **change} | ({"perSecond": pace} if command == "redrive" else {})
    if selection.keys() == {"operator"}:
        assert violations(document) == [
            ("", "must select events by at least one of ids, type, aggregate, since, until")
        ]
        return
    read = instructions.read(json.loads(json.dumps(document)))
    assert isinstance(read, Selection)
    dumped = read.model_dump(mode="json", by_alias=True, exclude_unset=True, exclude={"since", "until"})
    assert dumped == {name: value for name, value in document.items() if name not in {"since", "until"}}
    assert (read.since is None, read.until is None) == ("since" not in document, "until" not in document)


@pytest.mark.parametrize(
    ("text", "moment"),
    [
        ("0s", timedelta(0)),
        ("30s", timedelta(seconds=30)),
        ("15m", timedelta(minutes=15)),
        ("1h", timedelta(hours=1)),
        ("2d", timedelta(days=2)),
        ("99999d", timedelta(days=99999)),
        ("2026-12-01T02:30Z", datetime(2026, 12, 1, 2, 30, tzinfo=UTC)),
        ("2026-12-01T02:30:00Z", datetime(2026, 12, 1, 2, 30, tzinfo=UTC)),
        ("2026-12-01T02:30:00.250+01:00", datetime(2026, 12, 1, 1, 30, 0, 250_000, tzinfo=UTC)),
    ],
)
def test_a_moment_is_a_span_or_an_instant(text: str, moment: timedelta | datetime) -> None:
    """Spans in seconds, minutes, hours and days; instants with their offset."""
    read = instructions.read(redrive(since=text, until=text))
    assert isinstance(read, Redrive)
    assert (read.since, read.until) == (moment, moment)


@pytest.mark.parametrize(
    "text",
    [
        "", "h", "1", "1 h", "-1h", "+1h", "1.5h", "1H", "1w", "1h30m", "100000d", "\u0661h", "1h\n", "now",
        "2026-12-01", "2026-12-01T02:30", "2026-12-01T02:30:00", "2026-12-01 02:30:00Z", "2026-02-30T02:30Z",
        "2026-12-01T24:30Z", "2026-W01-1T00:00Z", "1926-12-01T02:30Z", "2026-12-01T02:30:00.1234567Z", "20261201T0230Z",
        None, 3600, True, ["1h"], {"hours": 1},
    ],
)  # fmt: skip
def test_no_other_moment_is_understood(text: object) -> None:
    """What would have to be guessed at, an instant without its offset above all, is refused."""
    assert members(redrive(since=text)) == {"since"}


def test_everything_wrong_is_said_at_once() -> None:
    """Also what is missing for the sake of another member, whatever else is wrong."""
    document = {
        "command": "redrive",
        "operator": "",
        "ids": ["1", "2"],
        "type": "a b",
        "aggregate": "x",
        "since": "soon",
        "until": "later",
        "state": "waiting",
        "limit": 0,
        "perSecond": 1001,
        "apply": True,
        "aply": True,
        "\ud800": 1,
    }
    expected = [
        "",
        "reason",
        "operator",
        "ids",
        "type",
        "aggregate",
        "since",
        "until",
        "state",
        "limit",
        "perSecond",
        "aply",
    ]
    assert sorted(member for member, _ in violations(document)) == sorted(expected)


@pytest.mark.parametrize("member", [*SELECTORS, "reason", "state", "limit", "perSecond", "apply"])
def test_null_is_no_way_to_leave_a_member_out(member: str) -> None:
    """A document that a program made with a hole in it must not select more than was meant."""
    assert members(redrive() | {member: None}) == {member}


@pytest.mark.parametrize("reason", ["", " ", "...", "a\nb", "a\0", "x" * 501, "\ud800"])
def test_a_reason_says_something_on_one_line(reason: str) -> None:
    """It is kept for good, and read by others."""
    assert members(redrive(apply=True, reason=reason)) == {"reason"}


def test_to_apply_takes_a_reason_and_to_look_does_not() -> None:
    """A dry run is asked for without ceremony."""
    instructions.read(redrive())
    instructions.read(redrive(apply=False))
    assert members(redrive(apply=True)) == {"reason"}


@pytest.mark.parametrize(
    ("command", "member"),
    [
        ("list", "apply"), ("list", "reason"), ("list", "perSecond"), ("inspect", "state"), ("inspect", "limit"),
        ("park", "state"), ("park", "perSecond"), ("help", "operator"),
    ],
)  # fmt: skip
def test_a_command_takes_its_own_members_alone(command: str, member: str) -> None:
    """A member that would have no effect is a misunderstanding."""
    document = {"command": command, "operator": "ann", "type": "ChargeCreated"}
    assert (member, "is not a member of this command") in violations(document | {member: "x"})


@pytest.mark.parametrize(
    "document", [None, [], "list", 1, {}, {"command": "delete"}, {"command": []}, {"Command": "list"}]
)
def test_what_is_no_command_is_refused(document: object) -> None:
    """The scheduler's event, say, or nothing at all."""
    assert members(document) <= {"", "command"}


def test_every_member_is_explained() -> None:
    """Help has a rule for each, and says what each command does."""
    explained = instructions.explained()
    assert explained.keys() == INSTRUCTIONS.keys()
    for command in explained.values():
        assert command["does"]
        assert all(command["takes"].values())
