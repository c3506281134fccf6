"""The file that tells other programs where the running stack is."""

from pathlib import Path

import pytest

from local import environment
from local.errors import StackError


@pytest.fixture(autouse=True)
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("LOCAL_DIR", str(tmp_path))
    return tmp_path


def test_what_is_written_is_read(folder: Path) -> None:
    """Lines NAME=value, as a shell sources them; a value may hold an equals sign. Nobody else reads the password."""
    values = {"API_URL": "http://127.0.0.1:1/x", "DATABASE_URL": "postgresql://u:p@h:1/d?a=b"}
    environment.write(values)
    assert environment.read() == values
    assert (folder / "env").read_text() == "API_URL=http://127.0.0.1:1/x\nDATABASE_URL=postgresql://u:p@h:1/d?a=b\n"
    assert (folder / "env").stat().st_mode & 0o777 == 0o600
    assert [path.name for path in folder.iterdir()] == ["env"]


def test_without_a_running_stack_the_reader_says_what_to_do() -> None:
    """Also after a second removal: a start removes what a killed run has left, if anything."""
    environment.write({"API_URL": "x"})
    environment.remove()
    environment.remove()
    with pytest.raises(StackError, match="make run"):
        environment.read()
