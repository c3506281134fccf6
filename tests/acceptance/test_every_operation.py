"""What is true of every operation under a key, whatever it does. An operation joins by a line in OPERATIONS."""

from collections import Counter
from collections.abc import Mapping
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from typing import Any
from uuid import uuid4

import pytest

from tests.support.invocation import Answer, Event, Instance, call_together, charge_event
from tests.support.ledger import Connection, holding_up, until_blocked

# The event and a command of each; an id in its path is that of a new charge of the caller's.
OPERATIONS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "POST /charges": ("ChargeCreated", {"amountCents": 4900, "currency": "EUR"}),
    "POST /charges/{id}/refunds": ("ChargeRefunded", {"amountCents": 1200}),
}
CALLERS = 4
# What opens a connection.
WARM_UP = charge_event(principal="warm")


@dataclass(frozen=True)
class Operation:
    """An operation as its caller has it: where it is, and what it is asked for."""

    endpoint: str
    path: str
    event_type: str
    command: Mapping[str, Any]

    def request(self, key: str, **changes: object) -> Event:
        """Asks for it under a key, or for another than the usual command."""
        return charge_event(key, {**self.command, **changes}) | {"path": self.path}

    def rows(self, connection: Connection) -> tuple[Any, ...]:
        """How many events and keys of alice's for it are committed."""
        found = connection.execute(
            "SELECT (SELECT count(*) FROM outbox WHERE event_type = %s AND payload::jsonb ->> 'principal' = 'alice'),"
            " (SELECT count(*) FROM idempotency_keys WHERE endpoint = %s AND principal = 'alice')",
            [self.event_type, self.endpoint],
        ).fetchone()
        assert found is not None
        return found


@pytest.fixture(params=OPERATIONS)
def operation(request: pytest.FixtureRequest, api: Instance, database: Connection) -> Operation:
    """Each operation, of which nothing has been asked yet."""
    endpoint, (event_type, command) = request.param, OPERATIONS[request.param]
    path = endpoint.removeprefix("POST ")
    if "{id}" in path:
        path = path.replace("{id}", api.call(charge_event()).json["id"])
    found = Operation(endpoint, path, event_type, command)
    assert found.rows(database) == (0, 0)
    return found


@pytest.fixture
def key() -> str:
    return str(uuid4())


def test_it_is_answered_and_announced_in_one_transaction(
    operation: Operation, key: str, api: Instance, database: Connection
) -> None:
    """201 with what was asked for and where it is; the event says the same, and is committed with the answer."""
    answer = api.call(operation.request(key))
    assert answer.status == 201
    assert answer.headers["location"] == f"{operation.path}/{answer.json['id']}"
    assert answer.json.items() >= operation.command.items()
    [(data, is_one)] = database.execute(
        "SELECT payload::jsonb -> 'data', outbox.xmin::text = idempotency_keys.xmin::text"
        " FROM outbox, idempotency_keys WHERE event_type = %s AND key = %s",
        [operation.event_type, key],
    ).fetchall()
    assert data.items() >= operation.command.items()
    assert answer.json["id"] in data.values()
    assert is_one


def test_a_repetition_is_given_the_first_answer(
    operation: Operation, key: str, api: Instance, database: Connection
) -> None:
    """Status, headers and body, and nothing is done a second time."""
    first = api.call(operation.request(key))
    again = api.call(operation.request(key))
    assert (again.status, again.body) == (first.status, first.body)
    assert again.headers == {**first.headers, "idempotent-replayed": "true"}
    assert operation.rows(database) == (1, 1)


def test_another_command_under_the_key_is_refused(
    operation: Operation, key: str, api: Instance, database: Connection
) -> None:
    """422, and nothing is done."""
    api.call(operation.request(key))
    other = api.call(operation.request(key, amountCents=1))
    assert (other.status, other.code) == (422, "idempotency_key_reused")
    assert operation.rows(database) == (1, 1)


def test_of_twins_one_does_it(operation: Operation, key: str, database_url: str, database: Connection) -> None:
    """Callers with one key at once: one does it, and the others are told to wait, or given its answer."""
    request = operation.request(key)
    told: Counter[tuple[int, bool]] = Counter()
    for [answer] in call_together(database_url, [[WARM_UP, request]] * CALLERS):
        told[answer.status, answer.is_replay] += 1
    assert told.keys() <= {(201, False), (201, True), (409, False)}
    assert told[201, False] == 1
    assert operation.rows(database) == (1, 1)


@pytest.mark.parametrize("at_commit", [False, True], ids=["in the statement", "at the commit"])
def test_a_backend_that_dies_amid_it_leaves_nothing_half_done(
    at_commit: bool, operation: Operation, key: str, api: Instance, database: Connection
) -> None:
    """The same invocation looks again, and does it, once; whoever repeats it is given that."""
    api.call(WARM_UP)
    with ThreadPoolExecutor(1) as caller:
        with holding_up(database, at_commit=at_commit):
            answer = caller.submit(api.call, operation.request(key))
            until_blocked(database)
            database.execute(
                "SELECT pg_terminate_backend(pid) FROM pg_stat_activity"
                " WHERE datname = current_database() AND pid <> pg_backend_pid()"
            )
        first: Answer = answer.result()
    assert (first.status, first.is_replay) == (201, False)
    assert api.call(operation.request(key)).body == first.body
    assert operation.rows(database) == (1, 1)


def test_after_its_time_the_key_is_a_new_one(
    operation: Operation, key: str, api: Instance, database: Connection
) -> None:
    """Also where nobody has removed it yet."""
    first = api.call(operation.request(key))
    database.execute(
        "UPDATE idempotency_keys SET created_at = now() - interval '2 days', expires_at = now() - interval '1 day'"
    )
    second = api.call(operation.request(key))
    assert (second.status, second.is_replay) == (201, False)
    assert second.json["id"] != first.json["id"]
    assert operation.rows(database) == (2, 1)
