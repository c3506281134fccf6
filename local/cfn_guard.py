"""cfn-guard, with the rules that AWS publishes for Control Tower, over what AWS would make of the template.

The rules look at values and not behind conditions. So the template is transformed as SAM does it, and its conditions
and parameters are decided as for the table [prod] of samconfig.toml, and once more with what that one leaves out.
"""

import copy
import json
import logging
import os
import platform
import re
import subprocess
import sys
import tempfile
import tomllib
from collections.abc import Mapping
from pathlib import Path
from typing import Any
from unittest import mock

import yaml
from samtranslator.translator.transform import transform
from samtranslator.yaml_helper import yaml_parse

from local.deploy import ARTIFACTS
from local.emulator import REGION

ROOT = Path(__file__).parents[1]
# Where make puts the package that has both: the program for each system, and the rules.
PACKAGE = ROOT / ".cfn-guard" / "package"
RULES = PACKAGE / "rules" / "control-tower" / "cfn-guard"
ACCEPTED = ROOT / "cfn-guard.yaml"
VARIANTS: tuple[Mapping[str, str], ...] = (
    {},
    {"Database": "aurora", "DatabaseProxy": "true", "NatGateways": "none", "EventOrder": "per-aggregate"},
)
# What it ends with where a rule is not met. Anything else is a fault of its own.
NOT_COMPLIANT = 19
_NONE = {"Ref": "AWS::NoValue"}


class _NoPolicies:
    """SAM's own policy templates, of which this template uses none."""

    def load(self) -> dict[str, str]:
        return {}


def main() -> int:
    """Print what is found and has no reason, and what has one and is found no more; 1 where there is either."""
    # It says what it would report to AWS.
    logging.getLogger("samtranslator").setLevel(logging.ERROR)
    template: dict[str, Any] = yaml_parse((ROOT / "template.yaml").read_text())
    everywhere = {(entry["id"], None) for entry in yaml.safe_load(ACCEPTED.read_text())["skip"]}
    beside = {
        (entry["id"], name)
        for name, resource in template["Resources"].items()
        for entry in resource.get("Metadata", {}).get("cfn-guard", {}).get("skip", [])
    }
    found = {
        (rule, _origin(resource, template))
        for variant in VARIANTS
        for rule, resource in findings(resources(template, variant))
    }
    refused = sorted((rule, name) for rule, name in found - beside if (rule, None) not in everywhere)
    for rule, name in refused:
        print(f"{name} does not meet {rule}: mend it, or say beside it why not.")
    outdated = (beside - found) | (everywhere - {(rule, None) for rule, _ in found - beside})
    for rule, place in sorted(outdated, key=str):
        print(
            f"Nothing needs the exception from {rule} any more {f'beside {place}' if place else f'in {ACCEPTED.name}'}."
        )
    print(f"cfn-guard: {len(found)} findings, {len(refused)} of them without a reason.")
    return int(bool(refused or outdated))


def resources(template: dict[str, Any], parameters: Mapping[str, str]) -> dict[str, Any]:
    """What a stack with these parameters, and for the rest those of the table [prod], is made of, by name."""
    overrides = tomllib.loads((ROOT / "samconfig.toml").read_text())["prod"]["deploy"]["parameters"]
    values = {name: declared["Default"] for name, declared in template["Parameters"].items()}
    values |= dict(override.split("=", 1) for override in overrides["parameter_overrides"])
    values |= parameters
    template = copy.deepcopy(template)
    for resource in template["Resources"].values():
        for location in ARTIFACTS.values():
            if location in resource.get("Properties", {}):
                resource["Properties"][location] = "s3://bucket/key"
    with mock.patch.dict(os.environ, {"AWS_DEFAULT_REGION": REGION}):
        made: dict[str, Any] = transform(template, values, _NoPolicies())
    deciding = _Deciding(made["Conditions"], values)
    return {
        name: deciding.decided(resource)
        for name, resource in made["Resources"].items()
        if "Condition" not in resource or deciding.holds({"Condition": resource["Condition"]})
    }


def findings(made: Mapping[str, Any]) -> set[tuple[str, str]]:
    """The rules that are not met, each with a resource that does not meet it."""
    system = {"Linux": "ubuntu", "Darwin": "macos"}[platform.system()]
    processor = "aarch64" if platform.machine() in {"arm64", "aarch64"} else "x86_64"
    with tempfile.NamedTemporaryFile("w", suffix=".json") as file:
        json.dump({"Resources": made}, file)
        file.flush()
        program = str(PACKAGE / "bin" / system / processor / "cfn-guard")
        finished = subprocess.run(
            [
                *(program, "validate", "--data", file.name, "--rules", str(RULES)),
                *("--structured", "--output-format", "json", "--show-summary", "none"),
            ],
            capture_output=True,
            text=True,
            check=False,
        )
    if finished.returncode not in {0, NOT_COMPLIANT}:
        sys.exit(f"cfn-guard failed: {finished.stderr}")
    return {
        (unmet["Rule"]["name"], resource)
        for report in json.loads(finished.stdout)
        for unmet in report["not_compliant"]
        for resource in re.findall(r"/Resources/(\w+)", json.dumps(unmet))
    }


def _origin(resource: str, template: Mapping[str, Any]) -> str:
    """The resource of the template that SAM has made this one of: its own name begins so."""
    names: list[str] = [name for name in template["Resources"] if resource.startswith(name)]
    return max(names, key=len)


class _Deciding:
    """Conditions and parameters, decided by the parameters' values."""

    def __init__(self, conditions: Mapping[str, Any], values: Mapping[str, Any]) -> None:
        self._conditions = conditions
        self._values = values

    def holds(self, condition: Any) -> bool:
        [(function, operands)] = condition.items()
        match function:
            case "Condition":
                return self.holds(self._conditions[operands])
            case "Fn::Not":
                return not self.holds(operands[0])
            case "Fn::And":
                return all(map(self.holds, operands))
            case "Fn::Or":
                return any(map(self.holds, operands))
            case "Fn::Equals":
                first, second = map(self.decided, operands)
                return str(first) == str(second)
        raise ValueError(f"{function} is in no condition so far.")

    def decided(self, value: Any) -> Any:
        """The same with a value in the place of each parameter and of each choice; what has no value is left out."""
        match value:
            case {"Fn::If": [name, met, unmet]}:
                return self.decided(met if self.holds({"Condition": name}) else unmet)
            case {"Ref": str(name)} if name in self._values:
                return _typed(self._values[name])
            case {"Fn::Join": [str(between), list(parts)]} if all(isinstance(part, str) for part in parts):
                return between.join(parts)
            case dict():
                decided = {name: self.decided(one) for name, one in value.items()}
                return {name: one for name, one in decided.items() if one != _NONE}
            case list():
                return [one for one in map(self.decided, value) if one != _NONE]
            case _:
                return value


def _typed(value: Any) -> Any:
    """CloudFormation takes a number or a truth as text; the rules do not."""
    text = str(value)
    if text in {"true", "false"}:
        return text == "true"
    return int(text) if text.isdecimal() else value
