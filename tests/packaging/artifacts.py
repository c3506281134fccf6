"""Finds one's way in the template, and in the folder that `sam build` makes of it."""

import importlib.util
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from pathlib import Path
from typing import Any

from samtranslator.yaml_helper import yaml_parse

from local.runtime import BROUGHT_ALONG

ROOT = Path(__file__).parents[2]


def parse(path: Path) -> dict[str, Any]:
    """A template, its intrinsics in their long form."""
    parsed: dict[str, Any] = yaml_parse(path.read_text())
    return parsed


TEMPLATE = parse(ROOT / "template.yaml")
# The properties of each function, by its logical id.
FUNCTIONS: dict[str, dict[str, Any]] = {
    name: resource["Properties"]
    for name, resource in TEMPLATE["Resources"].items()
    if resource["Type"] == "AWS::Serverless::Function"
}


@dataclass(frozen=True)
class Artifacts:
    """A built template, and the folders that it names."""

    folder: Path
    architecture: str

    @cached_property
    def template(self) -> dict[str, Any]:
        """The built template, which names the artifacts."""
        return parse(self.folder / "template.yaml")

    def function(self, name: str) -> Path:
        """What becomes /var/task."""
        return self._artifact(name, "CodeUri")

    def layer(self, name: str) -> Path:
        """What becomes a part of /opt."""
        return self._artifact(name, "ContentUri")

    def layers(self, function: str) -> list[Path]:
        """The layers that a function is deployed with."""
        common = self.template["Globals"]["Function"]["Layers"]
        own = self.template["Resources"][function]["Properties"].get("Layers", [])
        return [self.layer(layer["Ref"]) for layer in [*common, *own]]

    def files(self, suffix: str = "") -> Iterator[Path]:
        """Every file of every artifact, by the end of its name."""
        for resource in self.template["Resources"].values():
            for location in ("CodeUri", "ContentUri"):
                if location in resource.get("Properties", {}):
                    folder = self.folder / resource["Properties"][location]
                    yield from (path for path in folder.rglob("*") if path.is_file() and path.name.endswith(suffix))

    def _artifact(self, name: str, location: str) -> Path:
        return self.folder / str(self.template["Resources"][name]["Properties"][location])


def lay_out_runtime(folder: Path) -> Path:
    """Makes the folder, with what Lambda's Python runtime brings along and nothing else that is installed here."""
    folder.mkdir()
    for name in BROUGHT_ALONG:
        found = importlib.util.find_spec(name)
        assert found is not None, name
        assert found.origin is not None, name
        origin = Path(found.origin)
        origin = origin.parent if origin.name == "__init__.py" else origin
        (folder / origin.name).symlink_to(origin)
    return folder
