"""POST /charges as its callers see it: an event of a gateway's in, an answer out, and what the database then holds."""

import json
import time
from collections.abc import Callable
from concurrent.futures import ThreadPoolExecutor
from datetime import datetime
from typing import Any
from uuid import UUID, uuid4

import pytest

from tests.support.invocation import CHARGES, Answer, Event, Instance, charge_event, sample
from tests.support.ledger import NOTHING, ONCE, Connection, Twin, counts, until_blocked

KEY = UUID("8e03978e-40d5-43e8-bc93-6894a57f9324")

# The best of a few is what the service takes; the rest is what else the machine does. A wait would be longer each time.
TRIES = 5
AT_ONCE_SECONDS = 0.1


@pytest.fixture
def charges(api: Instance) -> Instance:
    """The function, by the name of what it is asked for here."""
    return api


def assert_problem(answer: Answer, status: int, code: str) -> None:
    """The answer is a problem document of that code, complete, and with the advice that its headers repeat."""
    assert (answer.status, answer.code) == (status, code), answer
    assert answer.json.keys() - {"violations"} == {"type", "title", "status", "detail", "code", "retrySameKey"}
    assert answer.json["type"] == f"urn:charging:problem:{code}"
    assert answer.json["status"] == status
    assert answer.json["retrySameKey"] == (status in (409, 503))
    assert ("retry-after" in answer.headers) == (status in (409, 503))
    assert "idempotent-replayed" not in answer.headers


def assert_replay(answer: Answer, first: Answer) -> None:
    """The answer is the first one again, and says so."""
    assert answer.is_replay
    assert not first.is_replay
    assert (answer.status, answer.body) == (first.status, first.body)
    assert {**answer.headers} == {**first.headers, "idempotent-replayed": "true"}


# ---- created --------------------------------------------------------------------------------------------------------


def test_a_new_key_creates_a_charge(charges: Instance, database: Connection) -> None:
    """201 with the charge and its Location; one charge, one event, one key, of one transaction."""
    answer = charges.call(charge_event(KEY, {"amountCents": 4900}))
    charge_id = answer.json["id"]
    assert answer.status == 201
    assert answer.body == f'{{"id":"{charge_id}","amountCents":4900,"currency":"USD"}}'
    assert answer.headers == {"content-type": "application/json", "location": f"/charges/{charge_id}"}
    assert counts(database) == ONCE
    rows = database.execute("SELECT id, principal, amount_cents, currency, reference FROM charges").fetchall()
    assert rows == [(UUID(charge_id), "alice", 4900, "USD", None)]
    transactions = database.execute(
        "SELECT xmin FROM charges UNION SELECT xmin FROM outbox UNION SELECT xmin FROM idempotency_keys"
    ).fetchall()
    assert len(transactions) == 1


def test_a_reference_is_part_of_the_charge(charges: Instance, database: Connection) -> None:
    """It is stored and shown as it was sent, whatever characters it has."""
    reference = 'Rechnung "7" für O\u2019Brien \U0001f600 \\ %s {} \u2028'
    answer = charges.call(charge_event(KEY, {"amountCents": 1, "currency": "EUR", "reference": reference}))
    assert list(answer.json) == ["id", "amountCents", "currency", "reference"]
    assert answer.json["reference"] == reference
    assert database.execute("SELECT reference FROM charges").fetchall() == [(reference,)]
    assert_replay(
        charges.call(charge_event(KEY, {"amountCents": 1, "currency": "EUR", "reference": reference})), answer
    )


def test_the_event_of_a_charge_waits_in_the_outbox(charges: Instance, database: Connection) -> None:
    """A CloudEvents 1.0 object, complete, due at once, under the outbox row's own id."""
    traceparent = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"
    event = charge_event(KEY, {"amountCents": 4900, "reference": "order 1042"}, headers={"TraceParent": traceparent})
    charge_id = charges.call(event).json["id"]
    (row,) = database.execute(
        "SELECT id, event_type, aggregate_id, payload, attempts, published_at, failed_at, next_attempt_at <= now() "
        "FROM outbox"
    ).fetchall()
    event_id, event_type, aggregate_id, payload, *state = row
    assert (event_type, aggregate_id, state) == ("ChargeCreated", UUID(charge_id), [0, None, None, True])
    message = json.loads(payload)
    moment = datetime.fromisoformat(message.pop("time"))
    assert moment == database.execute("SELECT created_at FROM charges").fetchall()[0][0]
    assert message == {
        "specversion": "1.0",
        "id": str(event_id),
        "source": "/charges",
        "type": "ChargeCreated",
        "subject": charge_id,
        "datacontenttype": "application/json",
        "principal": "alice",
        "traceparent": traceparent,
        "data": {"chargeId": charge_id, "amountCents": 4900, "currency": "USD", "reference": "order 1042"},
    }


# ---- replayed -------------------------------------------------------------------------------------------------------


def test_the_same_command_again_replays_the_first_answer(
    charges: Instance, database_url: str, database: Connection
) -> None:
    """Status, headers and body bytes are the first answer's, from any instance, and nothing is charged twice."""
    first = charges.call(charge_event(KEY))
    other = Instance("charges", database_url, CHARGES)
    for instance in (charges, other, charges):
        assert_replay(instance.call(charge_event(KEY)), first)
    other.close()
    assert counts(database) == ONCE


@pytest.mark.parametrize("key", [str(KEY).upper(), f'"{KEY}"', f'"{str(KEY).upper()}"', f"  {KEY}\t"])
def test_another_spelling_of_the_key_is_the_same_key(charges: Instance, database: Connection, key: str) -> None:
    """Letter case, quotes and white space around it make no second charge."""
    first = charges.call(charge_event(KEY))
    assert_replay(charges.call(charge_event(key)), first)
    assert counts(database) == ONCE


def test_another_spelling_of_the_body_is_the_same_command(charges: Instance, database: Connection) -> None:
    """So are member order, white space, escapes and the default currency."""
    first = charges.call(charge_event(KEY, {"amountCents": 4900, "reference": "caf\u00e9"}))
    body = '\r\n{ "reference" : "caf\\u00E9",\t"currency":"\\u0055SD", "amountCents" : 4900 } '
    assert_replay(charges.call(charge_event(KEY, body)), first)
    assert counts(database) == ONCE


# ---- refused: 422 ---------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    "body",
    [
        {"amountCents": 4901},
        {"amountCents": 4900, "currency": "EUR"},
        {"amountCents": 4900, "reference": "x"},
        {"amountCents": 4900, "reference": "USD"},
    ],
)
def test_another_command_under_a_used_key_is_refused(charges: Instance, database: Connection, body: Event) -> None:
    """422, nothing is written, and the first command is still replayed."""
    first = charges.call(charge_event(KEY))
    assert_problem(charges.call(charge_event(KEY, body)), 422, "idempotency_key_reused")
    assert counts(database) == ONCE
    assert_replay(charges.call(charge_event(KEY)), first)


# ---- in flight: 409 -------------------------------------------------------------------------------------------------


def fastest_conflict(instance: Instance) -> float:
    """How long a twin is kept until it is told 409, in seconds."""
    took = []
    for _ in range(TRIES):
        begun = time.monotonic()
        answer = instance.call(charge_event(KEY))
        took.append(time.monotonic() - begun)
        assert_problem(answer, 409, "request_in_flight")
    return min(took)


def test_a_twin_in_flight_is_told_at_once_and_the_key_is_free_after_its_failure(
    charges: Instance, database_url: str, database: Connection
) -> None:
    """409 within milliseconds while the holder's transaction is open; when it rolls back, the next call creates."""
    charges.call(charge_event())  # warm
    with Twin(database_url, KEY):
        assert fastest_conflict(charges) < AT_ONCE_SECONDS
        assert counts(database) == ONCE
    answer = charges.call(charge_event(KEY))
    assert (answer.status, answer.is_replay) == (201, False)
    assert counts(database) == (2, 2, 2)


def test_a_twin_in_flight_is_replayed_after_its_success(
    charges: Instance, database_url: str, database: Connection
) -> None:
    """409 until the holder commits, and its own answer from then on."""
    twin = Twin(database_url, KEY)
    assert_problem(charges.call(charge_event(KEY)), 409, "request_in_flight")
    twin.commit()
    answer = charges.call(charge_event(KEY))
    assert answer.is_replay
    assert answer.body == twin.response.body
    assert counts(database) == ONCE


def test_another_command_under_a_key_in_flight_is_409_and_422_from_the_commit_on(
    charges: Instance, database_url: str, database: Connection
) -> None:
    """An uncommitted fingerprint cannot be seen yet."""
    twin = Twin(database_url, KEY)
    assert_problem(charges.call(charge_event(KEY, {"amountCents": 1})), 409, "request_in_flight")
    twin.commit()
    assert_problem(charges.call(charge_event(KEY, {"amountCents": 1})), 422, "idempotency_key_reused")
    assert counts(database) == ONCE


def test_a_key_in_flight_is_in_flight_for_nobody_else(charges: Instance, database_url: str) -> None:
    """Neither another principal with that key nor another key of the same principal waits or is refused."""
    with Twin(database_url, KEY):
        assert charges.call(charge_event(KEY, principal="bob")).status == 201
        assert charges.call(charge_event()).status == 201


def patient(database_url: str, wait_ms: int) -> Instance:
    return Instance("charges", database_url, {**CHARGES, "IN_FLIGHT_WAIT_MS": str(wait_ms)})


@pytest.mark.parametrize("ending", ["commit", "roll_back"])
def test_a_patient_twin_gets_the_holders_result(database_url: str, database: Connection, ending: str) -> None:
    """Where a wait is allowed, it ends with the holder: in a replay after its commit, in a charge after its failure."""
    instance = patient(database_url, 4000)
    twin = Twin(database_url, KEY)
    with ThreadPoolExecutor(1) as caller:
        call = caller.submit(instance.call, charge_event(KEY))
        until_blocked(database)
        getattr(twin, ending)()
        answer = call.result()
    assert answer.status == 201
    assert answer.is_replay == (ending == "commit")
    assert (answer.body == twin.response.body) == (ending == "commit")
    assert counts(database) == ONCE
    instance.close()


def test_a_patient_twin_waits_no_longer_than_it_may(database_url: str, database: Connection) -> None:
    """409 when the bound is reached and the holder is still at work, and neither before nor much later."""
    instance = patient(database_url, 200)
    instance.call(charge_event())  # warm
    with Twin(database_url, KEY):
        assert 0.2 <= fastest_conflict(instance) < 0.2 + AT_ONCE_SECONDS
    instance.close()
    assert counts(database) == ONCE


# ---- refused: nothing is stored -------------------------------------------------------------------------------------


def headers(**lines: str | None) -> Callable[[Event], Event]:
    """Sets or, with None, removes headers."""

    def change(event: Event) -> Event:
        for name, value in lines.items():
            header = name.replace("_", "-")
            event["headers"].pop(header, None)
            event["multiValueHeaders"].pop(header, None)
            if value is not None:
                event["headers"][header] = value
                event["multiValueHeaders"][header] = [value]
        return event

    return change


def fields(**values: Any) -> Callable[[Event], Event]:
    return lambda event: {**event, **values}


def key_on_two_lines(event: Event) -> Event:
    event["multiValueHeaders"]["Idempotency-Key"] *= 2
    return event


def nobody(event: Event) -> Event:
    event["requestContext"] |= {"authorizer": None, "identity": {}}
    return event


REFUSALS: dict[str, tuple[Callable[[Event], Event], int, str]] = {
    "no key": (headers(Idempotency_Key=None), 400, "idempotency_key_missing"),
    "null header maps": (fields(headers=None, multiValueHeaders=None), 400, "idempotency_key_missing"),
    "malformed key": (headers(Idempotency_Key="42"), 400, "idempotency_key_invalid"),
    "key on two lines": (key_on_two_lines, 400, "idempotency_key_invalid"),
    "keys joined by a comma": (headers(Idempotency_Key=f"{KEY},{KEY}"), 400, "idempotency_key_invalid"),
    "no amount": (fields(body="{}"), 400, "invalid_request"),
    "no body": (fields(body=None), 400, "invalid_request"),
    "no JSON": (fields(body="{"), 400, "invalid_request"),
    "unknown member": (fields(body='{"amountCents":1,"x":1}'), 400, "invalid_request"),
    "broken base64": (fields(body="{}", isBase64Encoded=True), 400, "invalid_request"),
    "nesting": (fields(body="[" * 16_000), 400, "invalid_request"),
    "number of 5,000 digits": (fields(body='{"amountCents":' + "9" * 5_000 + "}"), 400, "invalid_request"),
    "lone surrogate": (fields(body='{"amountCents":1,"reference":"\ud83d"}'), 400, "invalid_request"),
    "no principal": (nobody, 401, "unauthenticated"),
    "another path": (fields(path="/refunds"), 404, "not_found"),
    "another method": (fields(httpMethod="PUT"), 404, "not_found"),
    "too large": (fields(body='{"amountCents":1}'.ljust(16 * 1024 + 1)), 413, "payload_too_large"),
    "media type": (headers(Content_Type="text/plain"), 415, "unsupported_media_type"),
    "no media type": (headers(Content_Type=None), 415, "unsupported_media_type"),
}


@pytest.mark.parametrize(("change", "status", "code"), REFUSALS.values(), ids=REFUSALS.keys())
def test_a_refusal_stores_nothing_and_leaves_the_key_free(
    charges: Instance, database: Connection, change: Callable[[Event], Event], status: int, code: str
) -> None:
    """Each refusal has its own code and leaves no row; the corrected request with the same key is created."""
    assert_problem(charges.call(change(charge_event(KEY))), status, code)
    assert counts(database) == NOTHING
    assert charges.call(charge_event(KEY)).status == 201


def test_an_invalid_body_is_told_everything_that_is_wrong_with_it(charges: Instance) -> None:
    """Each violation names its member and its reason."""
    answer = charges.call(charge_event(KEY, '{"amountCents":0,"currency":"usd","tip":1}'))
    assert_problem(answer, 400, "invalid_request")
    assert {one["member"] for one in answer.json["violations"]} == {"amountCents", "currency", "tip"}
    assert all(one["reason"] for one in answer.json["violations"])


def test_who_is_unknown_is_refused_first(charges: Instance) -> None:
    """A stranger learns nothing about keys and bodies."""
    assert_problem(charges.call(nobody(charge_event("42", "{"))), 401, "unauthenticated")


# ---- scope ----------------------------------------------------------------------------------------------------------


def test_principals_share_no_keys(charges: Instance, database: Connection) -> None:
    """Interleaved in one warm process, each gets its own charge, its own replays and its own 422s under one key."""
    amounts = {"alice": 100, "bob": 200, "alice ": 300, "Alice": 400}
    first = {who: charges.call(charge_event(KEY, {"amountCents": amounts[who]}, principal=who)) for who in amounts}
    assert len({answer.json["id"] for answer in first.values()}) == len(amounts)
    for who in [*amounts, *reversed(amounts)]:
        assert_replay(charges.call(charge_event(KEY, {"amountCents": amounts[who]}, principal=who)), first[who])
        assert_problem(
            charges.call(charge_event(KEY, {"amountCents": 999}, principal=who)), 422, "idempotency_key_reused"
        )
    assert counts(database) == (4, 4, 4)


def test_a_retry_under_a_new_session_is_the_same_caller(charges: Instance, database: Connection) -> None:
    """An assumed role's session name changes with every set of credentials, and is no part of the principal."""
    event = sample("charge-rest")
    first = charges.call(event)
    assert first.status == 201
    event["requestContext"]["identity"]["userArn"] = "arn:aws:sts::111122223333:assumed-role/checkout/another"
    assert_replay(charges.call(event), first)
    assert database.execute("SELECT principal FROM charges").fetchall() == [
        ("arn:aws:sts::111122223333:assumed-role/checkout",)
    ]


def test_a_key_of_another_endpoint_is_another_key(charges: Instance, database: Connection) -> None:
    """What is stored for some other operation is never this one's answer."""
    charges.call(charge_event(KEY))
    database.execute("UPDATE idempotency_keys SET endpoint = 'POST /refunds'")
    answer = charges.call(charge_event(KEY))
    assert (answer.status, answer.is_replay) == (201, False)
    assert counts(database) == (2, 2, 2)


# ---- reading --------------------------------------------------------------------------------------------------------


def reading(path: str, principal: str, **query: str) -> Event:
    event = charge_event(principal=principal)
    lists = {name: [value] for name, value in query.items()}
    return event | {
        "httpMethod": "GET",
        "path": path,
        "body": None,
        "queryStringParameters": query or None,
        "multiValueQueryStringParameters": lists or None,
    }


def test_a_charge_is_shown_to_its_owner_alone(charges: Instance) -> None:
    """The owner reads what was answered at its creation; to everybody else it does not exist."""
    first = charges.call(charge_event(KEY))
    location = first.headers["location"]
    shown = charges.call(reading(location, "alice"))
    assert (shown.status, shown.body) == (200, first.body)
    assert_problem(charges.call(reading(location, "bob")), 404, "not_found")
    assert_problem(charges.call(reading(f"/charges/{uuid4()}", "alice")), 404, "not_found")
    assert_problem(charges.call(reading("/charges/42", "alice")), 404, "not_found")


def test_a_key_tells_its_owner_what_became_of_it(charges: Instance) -> None:
    """The committed answer, or that none is known; another principal's key is not known."""
    first = charges.call(charge_event(KEY))
    found = charges.call(reading("/charges", "alice", idempotencyKey=str(KEY))).json
    assert found["outcome"] == "committed"
    assert found["response"]["body"] == first.json
    for who, key in (("bob", KEY), ("alice", uuid4())):
        assert charges.call(reading("/charges", who, idempotencyKey=str(key))).json == {"outcome": "not_known"}


# ---- gateways -------------------------------------------------------------------------------------------------------


@pytest.mark.parametrize(
    ("name", "status"),
    [
        ("charge-rest", 201),
        ("charge-http-api", 201),
        ("charge-emulator", 201),
        ("charge-sam-local", 401),
        ("charge-load-balancer", 401),
    ],
)
def test_every_gateways_sample_is_answered_in_its_shape(
    charges: Instance, database: Connection, name: str, status: int
) -> None:
    """A gateway that vouches for a caller gets a charge; one that cannot gets 401, whatever its headers claim."""
    event = sample(name)
    answer = charges.call(event)
    assert answer.status == status
    lists = event.get("version") != "2.0" and name != "charge-load-balancer"
    assert ("multiValueHeaders" in answer.raw) == lists
    assert ("headers" in answer.raw) == (not lists)
    assert counts(database) == (ONCE if status == 201 else NOTHING)


def test_the_shapes_are_one_api(charges: Instance, database: Connection) -> None:
    """A key that was used through one gateway is replayed through every other, for the same principal."""
    events = [sample("charge-rest"), sample("charge-http-api"), sample("charge-emulator")]
    events[2]["multiValueHeaders"] = None
    for event in events:
        event["requestContext"]["authorizer"] = {"principalId": "alice"}
    answers = [charges.call(event) for event in events]
    assert [answer.is_replay for answer in answers] == [False, True, True]
    assert len({answer.body for answer in answers}) == 1
    assert counts(database) == ONCE


# ---- retention ------------------------------------------------------------------------------------------------------


def age(database: Connection, interval: str) -> None:
    """Makes every key older, in the database: its clock is the one that decides."""
    database.execute(
        "UPDATE idempotency_keys SET created_at = created_at - %s::interval, expires_at = expires_at - %s::interval",
        [interval, interval],
    )


def test_a_key_is_kept_for_the_hours_of_the_setting(database_url: str, database: Connection) -> None:
    """From its first use on, and a replay does not prolong it."""
    instance = Instance("charges", database_url, {**CHARGES, "IDEMPOTENCY_RETENTION_HOURS": "36"})
    instance.call(charge_event(KEY))
    kept = "SELECT expires_at - created_at = interval '36 hours', expires_at FROM idempotency_keys"
    before = database.execute(kept).fetchall()
    assert before[0][0] is True
    assert instance.call(charge_event(KEY)).is_replay
    assert database.execute(kept).fetchall() == before
    instance.close()


def test_a_key_is_replayed_until_24_hours_have_passed(charges: Instance, database: Connection) -> None:
    """A minute before the end it is still the old key, for the same command and for another one."""
    first = charges.call(charge_event(KEY))
    age(database, "23:59")
    assert_replay(charges.call(charge_event(KEY)), first)
    assert_problem(charges.call(charge_event(KEY, {"amountCents": 1})), 422, "idempotency_key_reused")
    assert counts(database) == ONCE


@pytest.mark.parametrize("amount", [4900, 1])
def test_at_24_hours_a_key_is_new(charges: Instance, database: Connection, amount: int) -> None:
    """No purge is needed. The new charge, of whatever command, is what the key stands for from then on."""
    old = charges.call(charge_event(KEY))
    age(database, "24:00")
    new = charges.call(charge_event(KEY, {"amountCents": amount}))
    assert (new.status, new.is_replay) == (201, False)
    assert new.json["id"] != old.json["id"]
    assert counts(database) == (2, 2, 1)
    assert_replay(charges.call(charge_event(KEY, {"amountCents": amount})), new)
    assert_problem(charges.call(charge_event(KEY, {"amountCents": 7})), 422, "idempotency_key_reused")
    assert database.execute(
        "SELECT expires_at - created_at = interval '24 hours' FROM idempotency_keys"
    ).fetchall() == [(True,)]


def test_a_takeover_leaves_the_same_key_of_others_alone(charges: Instance, database: Connection) -> None:
    """Only the caller's own expired key, at this endpoint, is made new: those of another principal and of another
    endpoint stay as they were."""
    for who in ("alice", "bob"):
        charges.call(charge_event(KEY, principal=who))
    database.execute("UPDATE idempotency_keys SET endpoint = 'POST /refunds' WHERE principal = 'bob'")
    charges.call(charge_event(KEY, principal="bob"))
    database.execute(
        "INSERT INTO idempotency_keys SELECT 'alice', 'POST /refunds', key, fingerprint, status, response_status,"
        " response_headers, response_body, created_at, expires_at FROM idempotency_keys WHERE principal = 'alice'"
    )
    age(database, "25:00")
    others = "SELECT * FROM idempotency_keys WHERE (principal, endpoint) <> ('alice', 'POST /charges') ORDER BY 1, 2"
    before = database.execute(others).fetchall()
    assert len(before) == 3
    answer = charges.call(charge_event(KEY))
    assert (answer.status, answer.is_replay) == (201, False)
    assert database.execute(others).fetchall() == before
    assert counts(database) == (4, 4, 4)


def test_an_expired_key_is_in_flight_while_it_is_taken_over(
    charges: Instance, database_url: str, database: Connection
) -> None:
    """Of two callers one takes it over; the other gets 409, and after a failed takeover the key is free."""
    charges.call(charge_event(KEY))
    age(database, "25:00")
    with Twin(database_url, KEY):
        assert_problem(charges.call(charge_event(KEY)), 409, "request_in_flight")
    assert not charges.call(charge_event(KEY)).is_replay
    assert counts(database) == (2, 2, 1)


@pytest.mark.parametrize("interval", ["0", "24:00", "90 days"])
def test_a_started_key_is_never_taken_over(charges: Instance, database: Connection, interval: str) -> None:
    """Only an operator knows what became of its work: 409 for ever, for any command, and the row is untouched."""
    database.execute(
        "INSERT INTO idempotency_keys (principal, endpoint, key, fingerprint, status, expires_at) "
        "VALUES ('alice', 'POST /charges', %s, 'v1:0', 'STARTED', now() + interval '24 hours')",
        [KEY],
    )
    age(database, interval)
    before = database.execute("SELECT xmin, xmax, * FROM idempotency_keys").fetchall()
    for amount in (4900, 1):
        assert_problem(charges.call(charge_event(KEY, {"amountCents": amount})), 409, "request_in_flight")
    assert database.execute("SELECT xmin, xmax, * FROM idempotency_keys").fetchall() == before
    assert counts(database) == (0, 0, 1)


# ---- faults of ours -------------------------------------------------------------------------------------------------


def test_a_schema_that_does_not_fit_tells_the_caller_nothing(charges: Instance, database: Connection) -> None:
    """The answer names no table, and once the fault is repaired the same key is created."""
    database.execute("ALTER TABLE outbox RENAME TO elsewhere")
    answer = charges.call(charge_event(KEY))
    assert_problem(answer, 503, "temporarily_unavailable")
    assert "outbox" not in answer.body
    database.execute("ALTER TABLE elsewhere RENAME TO outbox")
    assert charges.call(charge_event(KEY)).status == 201
    assert counts(database) == ONCE
