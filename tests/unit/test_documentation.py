"""What the documentation shows: a client, against a server that fails in every way, layers, and guarantees."""

import http.server
import importlib
import re
import threading
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from urllib.error import HTTPError
from uuid import UUID

import pytest

ROOT = Path(__file__).parents[2]
PAGES = [*ROOT.glob("*.md"), *(ROOT / "docs").rglob("*.md")]
PAGE = ROOT / "docs" / "problems.md"
GUARANTEES = ROOT / "docs" / "guarantees.md"
KEY = UUID("8e03978e-40d5-43e8-bc93-6894a57f9324")

CHARGED = b'{"id":"1"}'
# Status, promised length of the body, and what of it is sent.
ANSWERS = {
    "created": (201, len(CHARGED), CHARGED),
    "created, cut off": (201, len(CHARGED), CHARGED[:5]),
    "a proxy's page": (502, 6, b"<html>"),
    "in flight": (409, 21, b'{"retrySameKey":true}'),
    "refused": (422, 22, b'{"retrySameKey":false}'),
}


class Service(http.server.ThreadingHTTPServer):
    """Answers as it is told, one after another, and keeps the keys that it was sent."""

    def __init__(self, answers: list[str]) -> None:
        super().__init__(("127.0.0.1", 0), _Handler)
        self.answers = answers
        self.keys: list[str] = []


class _Handler(http.server.BaseHTTPRequestHandler):
    server: Service

    def do_POST(self) -> None:
        self.rfile.read(int(self.headers["Content-Length"]))
        self.server.keys.append(self.headers["Idempotency-Key"])
        answer = self.server.answers.pop(0)
        if answer == "nothing":
            self.close_connection = True
            return
        status, length, body = ANSWERS[answer]
        self.send_response(status)
        self.send_header("Content-Length", str(length))
        self.send_header("Retry-After", "1")
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, *_: object) -> None:
        """Says nothing."""


@pytest.fixture
def charge() -> Callable[..., Any]:
    """The function on the page, which is in no hurry here."""
    [source] = re.findall(r"```python\n(.*?)```", PAGE.read_text(), re.DOTALL)
    names: dict[str, Any] = {}
    exec(source.replace("time.sleep(", "abs("), names)  # noqa: S102 - our own page
    found: Callable[..., Any] = names["charge"]
    return found


@pytest.fixture
def service() -> Iterator[Service]:
    with Service([]) as server:
        thread = threading.Thread(target=server.serve_forever)
        thread.start()
        yield server
        server.shutdown()
        thread.join()


def test_the_client_goes_on_with_the_same_key_until_it_is_answered(
    charge: Callable[..., Any], service: Service
) -> None:
    """No answer, half of one, somebody else's, and a request in flight all lead to the same request again."""
    service.answers = ["nothing", "created, cut off", "a proxy's page", "in flight", "created"]
    assert charge(f"http://127.0.0.1:{service.server_port}", {"amountCents": 4900}, KEY) == {"id": "1"}
    assert service.keys == [str(KEY)] * 5


def test_the_client_does_not_repeat_what_will_not_help(charge: Callable[..., Any], service: Service) -> None:
    """A refusal is the caller's to mend."""
    service.answers = ["refused", "created"]
    with pytest.raises(HTTPError) as refused:
        charge(f"http://127.0.0.1:{service.server_port}", {"amountCents": 4900}, KEY)
    refused.value.close()
    assert refused.value.code == 422
    assert len(service.keys) == 1


def test_the_layers_on_the_page_are_those_that_hold() -> None:
    """A module that is added, or moves, shows on the page."""
    contracts = tomllib.loads((ROOT / "pyproject.toml").read_text())["tool"]["importlinter"]["contracts"]
    [layers] = [contract["layers"] for contract in contracts if contract["type"] == "layers"]
    assert "```\n{}\n```".format("\n".join(layers)) in (ROOT / "docs" / "architecture.md").read_text()


@pytest.mark.parametrize("page", PAGES, ids=lambda page: page.name)
def test_each_link_leads_somewhere(page: Path) -> None:
    """To a file that is there, and to a heading in it."""
    for target in re.findall(r"\]\((?!https?:)([^)\s]+)\)", prose(page)):
        file, _, heading = target.partition("#")
        linked = page.parent / file if file else page
        assert linked.exists(), target
        assert not heading or heading in headings(linked), target


def prose(page: Path) -> str:
    """A page without its examples."""
    return re.sub(r"(?ms)^```.*?^```", "", page.read_text())


def headings(page: Path) -> set[str]:
    """A page's headings as links name them."""
    found = re.findall(r"(?m)^#+ (.+)$", prose(page))
    return {re.sub(r"[^\w\- ]", "", heading.lower()).replace(" ", "-") for heading in found}


def test_what_is_guaranteed_is_somewhere_and_proven() -> None:
    """Each line of the page names what there is: a module or what is in it, a file, a resource, and a test."""
    rows = [line.strip("| ").split(" | ") for line in GUARANTEES.read_text().splitlines() if line.startswith("| ")]
    promised = [row for row in rows if row != ["guarantee", "where", "test"]]
    assert promised
    for guarantee, where, test in promised:
        for place in where.split(", "):
            assert is_there(place.strip("`")), f"{place}: {guarantee}"
        path, name = test.strip("`").split("::")
        assert re.search(rf"^ *def {name}\(", (ROOT / "tests" / path).read_text(), re.MULTILINE), test


def is_there(place: str) -> bool:
    """Whether there is such a file, a resource or parameter of the template, or a module of ours that has it."""
    package = ROOT / "layers" / "charging" / "python" / "charging"
    if "/" in place or place.endswith(".yaml"):
        return (ROOT / place).is_file() or (package / place).is_file()
    if place[0].isupper():
        return re.search(rf"^  {place}:$", (ROOT / "template.yaml").read_text(), re.MULTILINE) is not None
    module, _, attribute = place.partition(".")
    return (package / f"{module}.py").is_file() and (
        not attribute or hasattr(importlib.import_module(f"charging.{module}"), attribute)
    )
