"""The consumer that docs/events.md shows does what the page says."""

import json
import re
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any
from uuid import UUID, uuid4

import psycopg
import pytest

from charging.identifiers import time_ordered_uuid
from tests.support import outbox
from tests.support.ledger import until_blocked

PAGE = (Path(__file__).parents[2] / "docs" / "events.md").read_text()
SECTION = PAGE.partition("## A consumer of your own")[2]

type Handler = Callable[[dict[str, Any], None], dict[str, Any]]


@pytest.fixture
def connection(empty_database_url: str, monkeypatch: pytest.MonkeyPatch) -> Iterator[outbox.Connection]:
    """A database with the page's tables and nothing else."""
    monkeypatch.setenv("DATABASE_URL", empty_database_url)
    [tables] = re.findall(r"```sql\n(.*?)```", SECTION, re.DOTALL)
    with psycopg.connect(empty_database_url, autocommit=True) as opened:
        opened.execute(tables.encode())
        yield opened


@pytest.fixture
def instance() -> Iterator[Callable[[], Handler]]:
    """Starts functions with the page's code, each with a connection of its own."""
    [source] = re.findall(r"```python\n(.*?)```", SECTION, re.DOTALL)
    started: list[dict[str, Any]] = []

    def start() -> Handler:
        names: dict[str, Any] = {}
        exec(source, names)  # noqa: S102 - our own page
        started.append(names)
        found: Handler = names["handler"]
        return found

    yield start
    for names in started:
        if names["connection"] is not None:
            names["connection"].close()


def record(body: str) -> dict[str, Any]:
    return {"messageId": str(uuid4()), "body": body}


def ledger(connection: outbox.Connection) -> list[tuple[Any, ...]]:
    return connection.execute("SELECT charge_id, amount_cents, currency FROM ledger").fetchall()


def test_an_event_takes_effect_once(connection: outbox.Connection, instance: Callable[[], Handler]) -> None:
    """Twice in a batch, and once more in a later one."""
    handler = instance()
    body = outbox.payload(time_ordered_uuid())
    for _ in range(2):
        assert handler({"Records": [record(body), record(body)]}, None) == {"batchItemFailures": []}
    assert ledger(connection) == [(UUID(json.loads(body)["data"]["chargeId"]), 4900, "USD")]


def test_a_type_that_it_does_not_know_is_none_of_its_business(
    connection: outbox.Connection, instance: Callable[[], Handler]
) -> None:
    """It neither comes back, where it would end among the dead letters, nor is taken for a charge."""
    body = outbox.payload(time_ordered_uuid(), event_type="ChargeRefunded")
    assert instance()({"Records": [record(body)]}, None) == {"batchItemFailures": []}
    assert ledger(connection) == []


def test_a_message_that_fails_comes_back_alone(
    connection: outbox.Connection, instance: Callable[[], Handler], capsys: pytest.CaptureFixture[str]
) -> None:
    """Neither its id nor half of its effect is kept, so that it counts when it comes again."""
    handler = instance()
    good, bad = outbox.payload(time_ordered_uuid()), outbox.payload(time_ordered_uuid(), currency="USD")
    spoilt = json.loads(bad)
    del spoilt["data"]["currency"]
    records = [record(json.dumps(spoilt)), record(good)]
    assert handler({"Records": records}, None) == {"batchItemFailures": [{"itemIdentifier": records[0]["messageId"]}]}
    assert "KeyError" in capsys.readouterr().err
    assert handler({"Records": [record(bad)]}, None) == {"batchItemFailures": []}
    assert len(ledger(connection)) == 2


def test_two_deliveries_at_once_take_effect_once(
    connection: outbox.Connection, empty_database_url: str, instance: Callable[[], Handler]
) -> None:
    """The second waits for the first, whose transaction is still open, and then has nothing to do."""
    body = outbox.payload(time_ordered_uuid())
    event = json.loads(body)
    answers: list[dict[str, Any]] = []
    handler = instance()
    second = threading.Thread(target=lambda: answers.append(handler({"Records": [record(body)]}, None)))
    with psycopg.connect(empty_database_url) as first:
        first.execute("INSERT INTO processed_events (consumer, event_id) VALUES ('ledger', %s)", [event["id"]])
        second.start()
        until_blocked(connection)
    second.join()
    assert answers == [{"batchItemFailures": []}]
    assert ledger(connection) == []
