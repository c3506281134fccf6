"""docs/add-an-operation.md, built as it stands: a copy of the repository gets the page's lines, and then its tests."""

import os
import re
import shutil
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.acceptance import test_every_operation
from tests.support.invocation import ROOT

PAGE = (ROOT / "docs" / "add-an-operation.md").read_text()
# What a reader is promised.
MOST_LINES = 60

# The copy is made once.
pytestmark = pytest.mark.xdist_group("guide")

# Name and language; a file's further blocks stand under its name, too.
_BLOCK = re.compile(
    r"^(?:\*\*(?P<name>\S+)\*\*|```(?P<language>sql|python|diff)\n(?P<text>.*?)^```)$", re.MULTILINE | re.DOTALL
)


def blocks() -> Iterator[tuple[str, str, str]]:
    """The page's blocks: the file that each is for, its language, and its text."""
    name = ""
    for found in _BLOCK.finditer(PAGE):
        if found["name"]:
            name = found["name"].replace("\\", "")
        else:
            yield name, found["language"], found["text"]


def changed(before: str, difference: str) -> str:
    """A file's text after a difference that has no line numbers, and whose place is plain."""
    lines = difference.splitlines(keepends=True)
    old, new = ("".join(line[1:] or "\n" for line in lines if line[0] not in skipped) for skipped in ("+", "-"))
    assert before.count(old) == 1, old
    return before.replace(old, new)


@pytest.fixture(scope="module")
def repository(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of what the page is about, with the page's lines in it."""
    copy = tmp_path_factory.mktemp("guide") / "repository"
    for folder in ("docs", "events", "functions", "layers/charging", "local", "schema", "tests"):
        shutil.copytree(ROOT / folder, copy / folder, ignore=shutil.ignore_patterns("__pycache__"))
    for file in ("pyproject.toml", "template.yaml"):
        shutil.copy(ROOT / file, copy / file)
    number = len([*copy.glob("schema/0*.sql")]) + 1
    for name, language, text in blocks():
        path = copy / name.replace("NNNN", f"{number:04}")
        path.write_text(changed(path.read_text(), text) if language == "diff" else text)
    run(copy, "-m", "local", "openapi")
    return copy


def run(repository: Path, *arguments: str, **variables: str) -> str:
    """Runs a module of this interpreter in the copy, whose own package goes before the installed one."""
    path = str(repository / "layers" / "charging" / "python")
    done = subprocess.run(
        [sys.executable, *arguments],
        cwd=repository,
        env={**os.environ, "PYTHONPATH": path, **variables},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        check=False,
    )
    assert done.returncode == 0, done.stdout
    return done.stdout


def test_it_takes_as_few_lines_as_it_says() -> None:
    """Each line that is not blank counts, also in tests and in what is changed. The page says how many."""
    lines = [
        line.removeprefix("+").strip()
        for _, language, text in blocks()
        for line in text.splitlines()
        if language != "diff" or line.startswith("+")
    ]
    written = len([line for line in lines if line])
    assert written < MOST_LINES
    assert f"It takes the {written} lines on this page" in PAGE


def test_it_keeps_the_promises_of_every_operation(repository: Path, database_url: str) -> None:
    """Its tests pass, races and a lost backend among them; and what the role, the page and the gateway say is so."""
    told = run(
        repository,
        *("-m", "pytest", "-p", "no:xdist", "-p", "no:cacheprovider", "--verbose"),
        *("-k", "payout or a_part_is or its_own_statements_and or page_says or are_documented or layers_on"),
        "tests/acceptance/test_every_operation.py",
        "tests/integration/test_statements.py",
        "tests/integration/test_roles.py",
        "tests/packaging/test_api.py",
        "tests/unit/test_documentation.py",
        # Its own server would take as long as the tests.
        DATABASE_URL=database_url,
    )
    for name in vars(test_every_operation):
        if name.startswith("test_"):
            assert re.search(rf"::{name}\[.*POST /payouts.*\] PASSED", told), name


def test_it_is_good_code(repository: Path) -> None:
    """As the linter, the formatter, the type checker and the rules of imports have it."""
    files = sorted({name for name, _, _ in blocks() if name.endswith(".py")})
    run(repository, "-m", "ruff", "check", "--no-cache", *files)
    run(repository, "-m", "ruff", "format", "--no-cache", "--check", *files)
    run(repository, "-c", "from importlinter.cli import lint_imports_command as lint; lint()", "--no-cache")
    known = ROOT / ".mypy_cache"
    if known.is_dir():  # which takes it from 20 s to five: other packages are the same
        shutil.copytree(known, repository / ".mypy_cache")
    run(repository, "-m", "mypy", "layers/charging/python/charging/payouts.py", "functions/charges/handler.py")
