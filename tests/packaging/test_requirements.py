"""The pinned files are those that the sources ask for."""

import re
import tomllib

import pytest
from packaging.requirements import Requirement

from tests.packaging.artifacts import ROOT

PROJECT = [
    Requirement(line) for line in tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["dependencies"]
]
BUILD = [Requirement(line) for line in tomllib.loads((ROOT / "pyproject.toml").read_text())["build-system"]["requires"]]


def asked(name: str) -> list[Requirement]:
    lines = (ROOT / "requirements" / name).read_text().splitlines()
    return [Requirement(line) for line in lines if line and not line.startswith("#")]


def pinned(path: str) -> dict[str, str]:
    """The release of each package, having made sure that each names at least one hash."""
    releases = {}
    for entry in re.split(r"\n(?=[a-z0-9])", (ROOT / path).read_text())[1:]:
        match = re.match(r"(?P<name>[a-z0-9-]+)==(?P<release>\S+)", entry)
        assert match, entry
        assert "--hash=sha256:" in entry, entry
        releases[match["name"]] = match["release"]
    return releases


@pytest.mark.parametrize(
    ("path", "requirements"),
    [
        ("requirements/dev.txt", [*PROJECT, *BUILD, *asked("dev.in")]),
        ("requirements/sam.txt", asked("sam.in")),
        ("requirements/checkov.txt", asked("checkov.in")),
        ("requirements/guard.txt", asked("guard.in")),
        ("requirements/uv.txt", asked("uv.in")),
        ("layers/dependencies/requirements.txt", PROJECT),
    ],
    ids=["dev", "sam", "checkov", "guard", "uv", "layer"],
)
def test_requirements_are_pinned(path: str, requirements: list[Requirement]) -> None:
    """Each package that a source asks for is pinned at a release that the source admits; otherwise: make lock."""
    releases = pinned(path)
    for requirement in requirements:
        assert requirement.name in releases, requirement
        assert requirement.specifier.contains(releases[requirement.name]), requirement


def test_layer_ships_what_was_tested() -> None:
    """The layer's releases are those of the environment that the tests run in."""
    assert pinned("layers/dependencies/requirements.txt").items() <= pinned("requirements/dev.txt").items()


def test_no_index_is_named() -> None:
    """The pinned files name no index: everyone's own is asked, and the hashes decide."""
    for path in [*(ROOT / "requirements").iterdir(), ROOT / "layers" / "dependencies" / "requirements.txt"]:
        assert not re.search(r"https?://|--(extra-)?index-url|--find-links|file:", path.read_text()), path
