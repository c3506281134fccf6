"""POST /charges/{id}/refunds as its callers see it, and what the database then holds."""

import json
from datetime import datetime
from typing import Any
from uuid import UUID, uuid4

import pytest

from tests.support.invocation import Answer, Event, Instance, charge_event, refund_event, sample
from tests.support.ledger import Connection

KEY = UUID("8e03978e-40d5-43e8-bc93-6894a57f9324")
NOT_FOUND = (404, "not_found")


@pytest.fixture
def charge(api: Instance) -> str:
    """The path of a charge of alice's, over 10.00 EUR."""
    created = api.call(charge_event(body={"amountCents": 1000, "currency": "EUR", "reference": "order 7"}))
    return created.headers["location"]


def get(path: str, *, principal: str = "alice", query: dict[str, str] | None = None) -> Event:
    event = charge_event(principal=principal) | {"httpMethod": "GET", "path": path, "resource": None, "body": None}
    return event | {"queryStringParameters": query}


def rows(database: Connection) -> tuple[Any, ...]:
    """How many refunds, events of theirs and keys of theirs there are."""
    found = database.execute(
        """
        SELECT
            (SELECT count(*) FROM refunds),
            (SELECT count(*) FROM outbox WHERE event_type = 'ChargeRefunded'),
            (SELECT count(*) FROM idempotency_keys WHERE endpoint = 'POST /charges/{id}/refunds')
        """
    ).fetchone()
    assert found is not None
    return found


def told(answer: Answer) -> tuple[int, str]:
    return answer.status, answer.code


def test_a_new_key_refunds_a_part_of_the_charge(api: Instance, charge: str, database: Connection) -> None:
    """201 with the refund and its Location, where it can be read; all of it is of one transaction."""
    answer = api.call(refund_event(charge, KEY, {"amountCents": 600, "reference": "damaged"}))
    refund_id, charge_id = answer.json["id"], charge.removeprefix("/charges/")
    assert answer.status == 201
    assert answer.body == (
        f'{{"id":"{refund_id}","chargeId":"{charge_id}","amountCents":600,"currency":"EUR","reference":"damaged"}}'
    )
    assert answer.headers == {"content-type": "application/json", "location": f"{charge}/refunds/{refund_id}"}
    assert api.call(get(answer.headers["location"])).body == answer.body
    assert rows(database) == (1, 1, 1)
    assert database.execute(
        """
        SELECT count(DISTINCT xmin::text) FROM (
            SELECT xmin FROM refunds UNION ALL SELECT xmin FROM charges
            UNION ALL SELECT xmin FROM outbox WHERE event_type = 'ChargeRefunded'
            UNION ALL SELECT xmin FROM idempotency_keys WHERE key = %s
        ) AS written
        """,
        [KEY],
    ).fetchone() == (1,)


def test_a_charge_shows_what_has_been_refunded(api: Instance, charge: str) -> None:
    """Nothing is shown while nothing has been; then all refunds together. What was charged stays as it was."""
    before = api.call(get(charge)).json
    assert "refundedCents" not in before
    for cents in (600, 150):
        api.call(refund_event(charge, body={"amountCents": cents}))
    assert api.call(get(charge)).json == before | {"refundedCents": 750}


def test_the_same_command_again_replays_the_first_answer(api: Instance, charge: str, database: Connection) -> None:
    """Status, headers and body bytes, and nothing is refunded twice."""
    first = api.call(refund_event(charge, KEY))
    again = api.call(refund_event(charge, KEY, '{ "amountCents" : 600 }'))
    assert (again.status, again.body, again.is_replay) == (201, first.body, True)
    assert again.headers == {**first.headers, "idempotent-replayed": "true"}
    assert rows(database) == (1, 1, 1)


def test_the_event_of_a_refund_follows_its_charges(api: Instance, charge: str, database: Connection) -> None:
    """A CloudEvents 1.0 object about the charge, in the next place of its aggregate, for the projection complete."""
    traceparent = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
    charge_id = charge.removeprefix("/charges/")
    refunds = [
        api.call(refund_event(charge, body={"amountCents": cents}, headers={"traceparent": traceparent})).json["id"]
        for cents in (1, 2)
    ]
    found = database.execute(
        "SELECT id, sequence, payload FROM outbox WHERE aggregate_id = %s AND sequence > 1 ORDER BY sequence",
        [charge_id],
    ).fetchall()
    for (event_id, sequence, payload), number, refund_id in zip(found, (1, 2), refunds, strict=True):
        message = json.loads(payload)
        assert datetime.fromisoformat(message.pop("time")).tzinfo is not None
        assert sequence == number + 1
        assert message == {
            "specversion": "1.0",
            "id": str(event_id),
            "source": "/charges",
            "type": "ChargeRefunded",
            "subject": charge_id,
            "datacontenttype": "application/json",
            "principal": "alice",
            "traceparent": traceparent,
            "data": {"chargeId": charge_id, "refundId": refund_id, "amountCents": number, "currency": "EUR"},
        }


def test_more_than_is_left_is_refused_and_that_is_the_result(api: Instance, charge: str, database: Connection) -> None:
    """409, with no advice to try again; stored, and replayed byte for byte. No refund, no event."""
    api.call(refund_event(charge))
    first, again = (api.call(refund_event(charge, KEY, {"amountCents": 401})) for _ in range(2))
    assert told(first) == (409, "refund_exceeds_charge")
    assert first.json["retrySameKey"] is False
    assert "retry-after" not in first.headers
    assert (again.status, again.body, again.is_replay) == (409, first.body, True)
    assert again.headers == {**first.headers, "idempotent-replayed": "true"}
    assert rows(database) == (1, 1, 2)
    assert api.call(get(charge)).json["refundedCents"] == 600


def test_a_refusal_stays_the_result_when_the_charge_has_changed(
    api: Instance, charge: str, database: Connection
) -> None:
    """What would fit by now is another command's business: this key has had its answer."""
    api.call(refund_event(charge))
    refused = api.call(refund_event(charge, KEY, {"amountCents": 401}))
    database.execute("UPDATE charges SET refunded_cents = 0, refunds = 0")
    again = api.call(refund_event(charge, KEY, {"amountCents": 401}))
    assert (told(again), again.body, again.is_replay) == (told(refused), refused.body, True)
    assert rows(database) == (1, 1, 2)


def test_a_success_stays_the_result_when_the_charge_is_used_up(api: Instance, charge: str) -> None:
    """A retry of what was made is not refused for what it has made itself, or for what came after it."""
    first = api.call(refund_event(charge, KEY, {"amountCents": 1000}))
    assert told(api.call(refund_event(charge, body={"amountCents": 1}))) == (409, "refund_exceeds_charge")
    again = api.call(refund_event(charge, KEY, {"amountCents": 1000}))
    assert (again.status, again.body, again.is_replay) == (201, first.body, True)


def test_a_key_belongs_to_refunds_as_another_one_to_charges(api: Instance, charge: str) -> None:
    """The same key on another operation is another key, and its result is asked for where it was used."""
    refunded = api.call(refund_event(charge, KEY))
    charged = api.call(charge_event(KEY))
    assert (refunded.status, charged.status) == (201, 201)
    asked = {"idempotencyKey": str(KEY)}
    assert api.call(get(f"{charge}/refunds", query=asked)).json["response"]["body"] == refunded.json
    assert api.call(get("/charges", query=asked)).json["response"]["body"] == charged.json


@pytest.mark.parametrize("cents", [600, 1001], ids=["made", "refused"])
def test_a_key_is_known_for_the_charge_that_it_was_used_for(api: Instance, charge: str, cents: int) -> None:
    """For another charge of the same caller's it is not known, be its result a refund or a refusal."""
    other = api.call(charge_event(body={"amountCents": 1000})).headers["location"]
    given = api.call(refund_event(charge, KEY, {"amountCents": cents}))
    asked = {"idempotencyKey": str(KEY)}
    found = api.call(get(f"{charge.upper().replace('CHARGES', 'charges')}/refunds", query=asked)).json
    assert (found["outcome"], found["response"]["body"]) == ("committed", given.json)
    for path in (other, f"/charges/{uuid4()}"):
        assert api.call(get(f"{path}/refunds", query=asked)).json == {"outcome": "not_known"}


def test_another_command_under_the_key_is_refused(api: Instance, charge: str, database: Connection) -> None:
    """Another amount, another reference, or the same body for another charge."""
    other = api.call(charge_event(body={"amountCents": 1000})).headers["location"]
    api.call(refund_event(charge, KEY))
    for event in (
        refund_event(charge, KEY, {"amountCents": 601}),
        refund_event(charge, KEY, {"amountCents": 600, "reference": "x"}),
        refund_event(other, KEY),
    ):
        assert told(api.call(event)) == (422, "idempotency_key_reused")
    assert rows(database) == (1, 1, 1)


def test_anothers_charge_is_not_there_and_leaves_nothing(api: Instance, charge: str, database: Connection) -> None:
    """404 for a charge of somebody else's as for none, and the key is free for what the caller does mean."""
    missing = f"/charges/{uuid4()}"
    assert told(api.call(refund_event(charge, KEY, principal="mallory"))) == NOT_FOUND
    assert told(api.call(refund_event(missing, KEY))) == NOT_FOUND
    assert rows(database) == (0, 0, 0)
    assert api.call(refund_event(charge, KEY)).status == 201


def test_the_sample_refunds_a_charge_that_has_to_be_there(api: Instance, database: Connection) -> None:
    """As it stands in events/ it is for a charge that nobody has made: 404. With that charge, 201."""
    assert told(api.call(sample("charge-refund"))) == NOT_FOUND
    api.call(sample("charge-rest"))
    database.execute("UPDATE charges SET id = %s", [sample("charge-refund")["pathParameters"]["charge_id"]])
    answer = api.call(sample("charge-refund"))
    assert (answer.status, answer.json["amountCents"], answer.json["currency"]) == (201, 1200, "EUR")


def test_a_refund_is_shown_to_its_owner_alone(api: Instance, charge: str) -> None:
    """Not to another principal, and not under another charge."""
    location = api.call(refund_event(charge)).headers["location"]
    other = api.call(charge_event()).headers["location"]
    assert told(api.call(get(location, principal="mallory"))) == NOT_FOUND
    assert told(api.call(get(location.replace(charge, other)))) == NOT_FOUND
    assert told(api.call(get(f"{charge}/refunds/{uuid4()}"))) == NOT_FOUND


@pytest.mark.parametrize(
    ("body", "member"),
    [
        ({"amountCents": 0}, "amountCents"),
        ({"amountCents": -1}, "amountCents"),
        ({"amountCents": "600"}, "amountCents"),
        ({"amountCents": True}, "amountCents"),
        ({}, "amountCents"),
        ({"amountCents": 600, "currency": "EUR"}, "currency"),
        ({"amountCents": 600, "reference": ""}, "reference"),
        ({"amountCents": 600, "chargeId": str(KEY)}, "chargeId"),
    ],
)
def test_what_is_no_refund_is_refused_before_anything_is_asked(
    api: Instance, charge: str, database: Connection, body: object, member: str
) -> None:
    """400 with the member named; nothing is stored, and a corrected body may use the key."""
    answer = api.call(refund_event(charge, KEY, body))
    assert told(answer) == (400, "invalid_request")
    assert [violation["member"] for violation in answer.json["violations"]] == [member]
    assert rows(database) == (0, 0, 0)
    assert api.call(refund_event(charge, KEY)).status == 201


def test_without_a_principal_there_is_no_refund(api: Instance, charge: str, database: Connection) -> None:
    """A gateway that vouches for nobody gets 401, and nothing is looked up."""
    assert told(api.call(refund_event(charge, KEY, principal=None))) == (401, "unauthenticated")
    assert rows(database) == (0, 0, 0)


@pytest.mark.parametrize(
    "charge_id", ["{id}", "{charge_id}", "42", "%00", str(KEY)[:-1], f"{{{KEY}}}", f"urn:uuid:{KEY}"]
)
def test_a_path_without_an_id_leads_nowhere(api: Instance, charge_id: str) -> None:
    """Only an id in the form 8-4-4-4-12 can be one."""
    assert told(api.call(refund_event(f"/charges/{charge_id}"))) == NOT_FOUND
    assert told(api.call(get(f"/charges/{charge_id}"))) == NOT_FOUND
    assert told(api.call(get(f"/charges/{KEY}/refunds/{charge_id}"))) == NOT_FOUND


def test_only_the_owners_endpoints_are_told(api: Instance, charge: str, database: Connection) -> None:
    """A delivery for each that wants refunds, written with the refund: none for a stranger's, none for a refusal."""
    endpoints = {}
    for principal, types in (("alice", ["ChargeRefunded"]), ("alice", ["ChargeCreated"]), ("bob", ["ChargeRefunded"])):
        row = database.execute(
            "INSERT INTO webhook_endpoints (id, principal, url, event_types) "
            "VALUES (gen_random_uuid(), %s, 'https://example.com/', %s) RETURNING id",
            [principal, types],
        ).fetchone()
        assert row is not None
        endpoints[principal, types[0]] = row[0]
    api.call(refund_event(charge))
    api.call(refund_event(charge))  # more than is left
    assert database.execute("SELECT endpoint_id, event_type, sequence FROM outbox_deliveries").fetchall() == [
        (endpoints["alice", "ChargeRefunded"], "ChargeRefunded", 2)
    ]
