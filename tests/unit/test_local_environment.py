"""The file that tells other programs where the running stack is."""

from pathlib import Path

import pytest

from local import environment, lock, running
from local.errors import StackError


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LOCAL_DIR", str(tmp_path))
    return tmp_path


def test_what_is_written_is_read(folder: Path) -> None:
    """Lines NAME=value, as a shell sources them; a value may hold an equals sign. Nobody else reads the password."""
    values = {"API_URL": "http://127.0.0.1:1/x", "DATABASE_URL": "postgresql://u:p@h:1/d?a=b"}
    environment.write(values, environment.path())
    assert environment.read() == values
    assert (folder / "env").read_text() == "API_URL=http://127.0.0.1:1/x\nDATABASE_URL=postgresql://u:p@h:1/d?a=b\n"
    assert (folder / "env").stat().st_mode & 0o777 == 0o600
    assert [path.name for path in folder.iterdir()] == ["env"]


def test_without_a_running_stack_the_reader_says_what_to_do() -> None:
    """Also after a second removal: a start removes what a killed run has left, if anything."""
    environment.write({"API_URL": "x"}, environment.path())
    environment.remove()
    environment.remove()
    with pytest.raises(StackError, match="make run"):
        environment.read()


def test_a_reader_that_wants_the_emulated_aws_is_told_that_sam_local_has_none() -> None:
    """Its file has the same name, and LOCAL_DIR may lead there."""
    environment.write({"API_URL": "x", "DATABASE_URL": "y"}, environment.path())
    with pytest.raises(StackError, match="make sam-invoke"):
        running.client(environment.read(), "sqs", answer_seconds=1)


def test_who_is_refused_a_folder_is_told_how_to_do_it_elsewhere(folder: Path) -> None:
    """By the target that was made, since another would start something else."""
    with lock.held(folder / "lock"):
        with pytest.raises(StackError, match="make sam-local LOCAL_DIR="), lock.held(folder / "lock", "sam-local"):
            pass
        with pytest.raises(StackError, match="make run LOCAL_DIR="), lock.held(folder / "lock"):
            pass


def test_the_folder_is_made(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With those that lead to it, for its owner alone; one that is there is taken as it is."""
    monkeypatch.setenv("LOCAL_DIR", str(folder / "one" / "two"))
    assert environment.create() == folder / "one" / "two"
    assert environment.create().stat().st_mode & 0o777 == 0o700
    assert list(environment.create().iterdir()) == []


@pytest.mark.parametrize("name", ["a file", "a file/below", "too long" * 40])
def test_a_folder_that_cannot_be_made_is_refused(folder: Path, monkeypatch: pytest.MonkeyPatch, name: str) -> None:
    """With what it means and what to do; and nobody finds a running stack there."""
    (folder / "a file").write_text("")
    monkeypatch.setenv("LOCAL_DIR", str(folder / name))
    with pytest.raises(StackError, match="make run LOCAL_DIR="):
        environment.create()
    with pytest.raises(StackError, match="make run"):
        environment.read()


def test_a_command_is_for_the_folder_that_was_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Typed as it is told, it means this very stack."""
    monkeypatch.setenv("LOCAL_DIR", "/a folder")
    assert environment.command("clean") == "make clean LOCAL_DIR='/a folder'"
    monkeypatch.delenv("LOCAL_DIR")
    assert environment.command("clean") == "make clean"


def test_the_port_that_is_asked_for(monkeypatch: pytest.MonkeyPatch) -> None:
    """A number, or the command's own where none is given; anything else is refused with what to give."""
    monkeypatch.delenv("PORT", raising=False)
    assert environment.port(3000) == 3000
    monkeypatch.setenv("PORT", "0")
    assert environment.port(3000) == 0
    for wrong in ("65536", "-1", "http", "3000 "):
        monkeypatch.setenv("PORT", wrong)
        with pytest.raises(StackError, match="0 finds a free port"):
            environment.port(3000)


def test_parameters_are_words_with_values(monkeypatch: pytest.MonkeyPatch) -> None:
    """As a shell splits them; a value may be empty or hold an equals sign."""
    monkeypatch.setenv("PARAMETERS", "InFlightWaitMs=2000 EventOrder='per-aggregate' A= B=c=d")
    assert environment.parameters() == {"InFlightWaitMs": "2000", "EventOrder": "per-aggregate", "A": "", "B": "c=d"}
    monkeypatch.delenv("PARAMETERS")
    assert environment.parameters() == {}


def test_a_parameter_without_a_value_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    """What to write instead is said."""
    monkeypatch.setenv("PARAMETERS", "EventOrder A=b")
    with pytest.raises(StackError, match=r"EventOrder, which.*\n.*\n.*make run PARAMETERS="):
        environment.parameters()
