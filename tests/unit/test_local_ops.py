"""The operator's command line: what is typed is a document of the function's, and what it says to type is one too."""

import shlex
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from charging import errors, instructions
from local import ops

ID = "8e03978e-40d5-43e8-bc93-6894a57f9324"

documents = st.fixed_dictionaries(
    {"command": st.sampled_from(["redrive", "park"]), "apply": st.just(True), "reason": st.text(min_size=1)},
    optional={
        "ids": st.lists(st.uuids().map(str), min_size=1, max_size=3),
        "type": st.from_regex(r"\A[A-Za-z0-9_.-]{1,20}\Z").filter(lambda text: not text.startswith("-")),
        "aggregate": st.uuids().map(str),
        "since": st.just("2026-12-01T02:30:00.000001Z"),
        "until": st.just("1h"),
        "limit": st.integers(1, 10_000),
    },
)


def typed(words: str) -> dict[str, Any]:
    """The document for what stands between the quotes of ARGS, without who typed it."""
    document = ops.document(shlex.split(words))
    assert document.pop("operator")
    return document


@pytest.mark.parametrize(
    ("words", "document"),
    [
        ("list", {"command": "list"}),
        ("list --state published --limit 5", {"command": "list", "state": "published", "limit": 5}),
        ("list --limit 0", {"command": "list", "limit": 0}),
        (f"inspect {ID}", {"command": "inspect", "ids": [ID]}),
        ("redrive --type ChargeCreated --since 1h", {"command": "redrive", "type": "ChargeCreated", "since": "1h"}),
        (
            f"redrive {ID} {ID} --apply --reason 'the topic is back' --per-second 5",
            {"command": "redrive", "ids": [ID, ID], "apply": True, "reason": "the topic is back", "perSecond": 5},
        ),
        (f"park --aggregate {ID} --until 15m", {"command": "park", "aggregate": ID, "until": "15m"}),
    ],
)
def test_what_is_typed_is_a_document(words: str, document: dict[str, Any]) -> None:
    """What is not typed is left to the function's defaults."""
    assert typed(words) == document


def test_who_types_is_who_is_logged_in(monkeypatch: pytest.MonkeyPatch) -> None:
    """Unless they say otherwise."""
    monkeypatch.setenv("LOGNAME", "grace")
    assert ops.document(["list"])["operator"] == "grace"
    assert ops.document(["list", "--operator", "ada"])["operator"] == "ada"


@given(documents)
def test_what_it_says_to_type_is_the_document(document: dict[str, Any]) -> None:
    """Word for word; a reason that a shell or make would spoil is left to be said again, and refused until it is."""
    _, _, words = ops.command({**document, "operator": "ann"}).partition("ARGS=")
    [inner] = shlex.split(words)
    assert not set(inner) & set("$`\\!;&|<>")
    read = typed(inner)
    if read["reason"] == "...":
        with pytest.raises(errors.InvalidRequest) as refused:
            instructions.read({**read, "type": "ChargeCreated", "operator": "ann"})
        assert [violation.member for violation in refused.value.violations] == ["reason"]
        read["reason"] = document["reason"]
    assert read == document


def test_a_dry_run_leads_to_a_command_that_lacks_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    """And names the folder of the stack, where that is not the usual one."""
    monkeypatch.setenv("LOCAL_DIR", "other")
    document = {"command": "park", "ids": [ID], "operator": "ann", "apply": True}
    assert ops.command(document) == f"""make ops LOCAL_DIR=other ARGS='park {ID} --apply --reason "..."'"""


@pytest.mark.parametrize("words", [["delete"], ["list", "--apply"], ["redrive", "--limit", "many"], []])
def test_what_is_no_command_ends_with_its_usage(words: list[str], capsys: pytest.CaptureFixture[str]) -> None:
    """Status 2, before anything is asked for."""
    with pytest.raises(SystemExit) as ended:
        ops.document(words)
    assert ended.value.code == 2
    assert "usage: make ops ARGS=" in capsys.readouterr().err


def test_alone_it_explains_itself(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> None:
    """Also where no stack runs. Every command is named, with an example, and what does not happen by itself."""
    monkeypatch.setattr("sys.argv", ["ops"])
    assert ops.main() == 0
    said = capsys.readouterr().out
    for command in ("list", "inspect", "redrive", "park"):
        assert f"make ops ARGS='{command}" in said
    assert "Nothing is changed without --apply." in said


@pytest.mark.parametrize("command", ["list", "inspect", "redrive", "park"])
def test_each_command_explains_its_options(command: str, capsys: pytest.CaptureFixture[str]) -> None:
    """Each with the rule that the function goes by."""
    with pytest.raises(SystemExit) as ended:
        ops.document([command, "--help"])
    assert ended.value.code == 0
    said = " ".join(capsys.readouterr().out.split())
    for member, rule in instructions.explained()[command]["takes"].items():
        if member not in {"ids", "apply"}:
            assert rule in said
