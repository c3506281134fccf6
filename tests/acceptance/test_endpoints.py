"""The endpoints function: webhook endpoints managed by their owners, and by nobody else."""

import json
import re
import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from datetime import UTC, datetime, timedelta
from functools import partial
from typing import Any, LiteralString
from unittest import mock
from uuid import UUID, uuid4

import pytest
from psycopg import sql as composing

from charging import deliveries, endpoints, errors, signing
from charging.database import Database
from charging.deliveries import Attempt
from charging.endpoints import DELIVERIES_ON_A_PAGE, ENDPOINTS, EndpointCommand
from charging.idempotency import Created
from tests.conftest import Connect
from tests.support import deliveries as table
from tests.support import deployment
from tests.support.invocation import ENDPOINTS_VARIABLES, Answer, Instance, sample
from tests.support.ledger import PATIENCE_SECONDS, call_of, stored_by_hand, until_blocked
from tests.support.shapes import SHAPES, Request, rest

MASTER_KEY = "m" * 32
KEY = UUID("8e03978e-40d5-43e8-bc93-6894a57f9324")
URL = "https://receiver.test/hook"
COMMAND = {"url": URL, "eventTypes": ["ChargeCreated"]}
NOWHERE = str(UUID(int=0))


@pytest.fixture
def api(database_url: str) -> Iterator["Api"]:
    instance = Instance("endpoints", database_url, ENDPOINTS_VARIABLES)
    with mock.patch("charging.vault.read", return_value=MASTER_KEY):
        yield Api(instance)
    instance.close()


class Api:
    """The function as its callers know it."""

    def __init__(self, instance: Instance) -> None:
        self.instance = instance

    def call(
        self,
        method: str,
        path: str,
        body: object = None,
        *,
        principal: str | None = "alice",
        key: UUID | None = None,
        query: dict[str, str] | None = None,
    ) -> Answer:
        headers = [("Content-Type", "application/json")]
        if key is not None:
            headers.append(("Idempotency-Key", str(key)))
        content = None if body is None else body if isinstance(body, bytes) else json.dumps(body).encode()
        return self.instance.call(rest(Request(method, path, query or {}, headers, content, principal)))

    def create(self, *, principal: str = "alice", **members: object) -> str:
        """Creates an endpoint, and returns its path."""
        answer = self.call("POST", "/webhook-endpoints", {**COMMAND, **members}, key=uuid4(), principal=principal)
        assert answer.status == 201, answer.body
        return answer.headers["location"]


def id_of(path: str) -> UUID:
    return UUID(path.rpartition("/")[2])


class TestCreate:
    """Once for its key, as a charge is."""

    def test_an_endpoint_is_created(self, api: Api) -> None:
        """201 with where it is and what it is; there it is found."""
        answer = api.call("POST", "/webhook-endpoints", COMMAND, key=KEY)
        assert answer.status == 201
        path = answer.headers["location"]
        assert answer.json == {
            "id": str(id_of(path)),
            "url": URL,
            "eventTypes": ["ChargeCreated"],
            "secretVersion": 1,
            "enabled": True,
        }
        assert api.call("GET", path).json == answer.json
        assert api.call("GET", "/webhook-endpoints").json == {"endpoints": [answer.json]}

    def test_a_repetition_is_the_first_answer(self, api: Api) -> None:
        """Byte for byte, and no second endpoint."""
        first, second = (api.call("POST", "/webhook-endpoints", COMMAND, key=KEY) for _ in range(2))
        assert (first.status, first.is_replay) == (201, False)
        assert (second.status, second.is_replay, second.body) == (201, True, first.body)
        assert second.headers["location"] == first.headers["location"]
        assert len(api.call("GET", "/webhook-endpoints").json["endpoints"]) == 1

    def test_the_key_belongs_to_the_command_and_to_the_caller(self, api: Api) -> None:
        """Another URL under it is refused; another caller's key is another key."""
        api.call("POST", "/webhook-endpoints", COMMAND, key=KEY)
        other = COMMAND | {"url": "https://receiver.test/other"}
        assert api.call("POST", "/webhook-endpoints", other, key=KEY).code == "idempotency_key_reused"
        answer = api.call("POST", "/webhook-endpoints", other, key=KEY, principal="bob")
        assert (answer.status, answer.is_replay) == (201, False)

    def test_nothing_that_is_stored_holds_a_secret(self, api: Api, connect: Connect) -> None:
        """Neither the endpoint's row nor the response that a replay gives again, nor anything else in the database."""
        path = api.create()
        secret = api.call("GET", f"{path}/secret").json["secret"]
        api.call("POST", f"{path}/rotate-secret", {"secretVersion": 1})
        api.call("POST", f"{path}/test")
        connection = connect()
        tables = connection.execute("SELECT tablename FROM pg_tables WHERE schemaname = 'public'").fetchall()
        written = set()
        for (name,) in tables:
            for (row,) in connection.execute(
                composing.SQL("SELECT t::text FROM {} AS t").format(composing.Identifier(name))
            ):
                written.add(name)
                assert secret.removeprefix("whsec_") not in row
                assert "whsec_" not in row
        assert written >= {"webhook_endpoints", "idempotency_keys", "outbox_deliveries"}

    @pytest.mark.parametrize(
        ("members", "at_fault"),
        [
            ({"url": "http://receiver.test/"}, "url"),
            ({"url": "https://user:pass@receiver.test/"}, "url"),
            ({"url": "https://127.0.0.1/"}, "url"),
            ({"url": "https://169.254.169.254/latest/meta-data"}, "url"),
            ({"url": "https://[::1]/"}, "url"),
            ({"url": "http://127.0.0.1:8080/"}, "url"),
            ({"url": "https://receiver.test/" + "a" * 2048}, "url"),
            ({"url": 7}, "url"),
            ({"url": ""}, "url"),
            ({"eventTypes": []}, "eventTypes"),
            ({"eventTypes": ["ChargeCreated", "ChargeCreated"]}, "eventTypes"),
            ({"eventTypes": ["SomethingElse"]}, "eventTypes"),
            ({"eventTypes": "ChargeCreated"}, "eventTypes"),
            ({"eventTypes": [None] * 500}, "eventTypes"),
            ({"more": 1}, "more"),
        ],
    )
    def test_what_no_webhook_can_be_sent_to_is_refused(self, members: dict[str, Any], at_fault: str, api: Api) -> None:
        """400, naming the member at fault once; nothing is stored, and the key is good for the corrected command."""
        answer = api.call("POST", "/webhook-endpoints", COMMAND | members, key=KEY)
        assert answer.code == "invalid_request"
        assert [violation["member"] for violation in answer.json["violations"]] == [at_fault]
        assert api.call("POST", "/webhook-endpoints", COMMAND, key=KEY).status == 201

    def test_a_url_is_kept_in_its_one_spelling(self, api: Api) -> None:
        """As the sender will read it."""
        path = api.create(url="HTTPS://Receiver.TEST:443/a b".replace(" ", "%20"))
        assert api.call("GET", path).json["url"] == "https://receiver.test/a%20b"

    def test_a_key_is_needed(self, api: Api) -> None:
        """Without one a lost answer would leave an endpoint that nobody knows of."""
        assert api.call("POST", "/webhook-endpoints", COMMAND).code == "idempotency_key_missing"

    def test_a_caller_has_so_many_and_no_more(self, api: Api) -> None:
        """The eleventh is refused, the tenth's replay is not; others have their own, and a deleted one makes room."""
        *_, path = [api.create() for _ in range(ENDPOINTS - 1)]
        api.call("POST", "/webhook-endpoints", COMMAND, key=KEY)
        answer = api.call("POST", "/webhook-endpoints", COMMAND, key=uuid4())
        assert (answer.status, answer.code) == (422, "too_many_endpoints")
        assert api.call("POST", "/webhook-endpoints", COMMAND, key=KEY).is_replay
        api.create(principal="bob")
        api.call("DELETE", path)
        api.create()

    def test_creations_that_race_make_no_more_than_there_may_be(self, database_url: str, connect: Connect) -> None:
        """Eight callers, as one principal, at once, with one place left: one endpoint, and nobody is told otherwise."""
        connection = connect()
        for _ in range(ENDPOINTS - 1):
            table.register(connection)
        with ThreadPoolExecutor(8) as callers:
            statuses = list(callers.map(create_apart, [database_url] * 8))
        assert statuses.count("created") == 1
        assert set(statuses) <= {"created", "InFlight", "TooManyEndpoints", "TemporarilyUnavailable"}
        assert connection.execute("SELECT count(*) FROM webhook_endpoints").fetchone() == (ENDPOINTS,)

    def test_one_that_is_committed_after_the_count_counts(self, database_url: str, connect: Connect) -> None:
        """A creation that began before another one's commit, and so did not see it, takes no place beyond the last."""
        other = connect()
        write = (
            "INSERT INTO webhook_endpoints (id, principal, number, url, event_types) "
            "SELECT gen_random_uuid(), 'alice', number, 'https://receiver.test/', ARRAY['ChargeCreated'] "
            "FROM generate_series(%s::int, %s) AS number"
        )
        other.execute(write, [1, ENDPOINTS - 1])
        with ThreadPoolExecutor(1) as caller:
            with other.transaction():
                other.execute(write, [ENDPOINTS, ENDPOINTS])
                creation = caller.submit(create_apart, database_url, in_step=False)
                until_blocked(connect())
            assert creation.result(timeout=20) == "TemporarilyUnavailable"
        assert other.execute("SELECT count(*) FROM webhook_endpoints").fetchone() == (ENDPOINTS,)

    def test_none_takes_a_place_beyond_the_last(self, database_url: str, connect: Connect) -> None:
        """Nor one that began before others were created and deleted, in whichever order that was."""
        other, key = connect(), uuid4()
        with (
            deployment.database(database_url) as slow,
            deployment.database(database_url) as quick,
            ThreadPoolExecutor(1) as caller,
        ):
            _, second, *_ = [create(quick) for _ in range(ENDPOINTS - 1)]
            with other.transaction(force_rollback=True):
                stored_by_hand(other, key, endpoint=endpoints.ENDPOINT)
                creation = caller.submit(create, slow, key)
                until_blocked(connect())
                last = create(quick)
                for deleted in (second, last):
                    endpoints.delete(quick, "alice", deleted, deadline=time.monotonic() + PATIENCE_SECONDS)
                    create(quick)
            with pytest.raises(errors.TemporarilyUnavailable):
                creation.result(PATIENCE_SECONDS)
            assert len(endpoints.find_all(quick, "alice", deadline=time.monotonic() + PATIENCE_SECONDS)) == ENDPOINTS


def create(database: Database, key: UUID | None = None) -> UUID:
    """Creates an endpoint of alice's over a function's connection, and returns its id."""
    command = EndpointCommand.model_validate(COMMAND)
    outcome = endpoints.create(database, call_of(endpoints.ENDPOINT, key or uuid4(), command), allows_loopback=False)
    assert isinstance(outcome, Created)
    return id_of(outcome.response.headers["Location"])


_together = threading.Barrier(8)


def create_apart(database_url: str, *, in_step: bool = True) -> str:
    """Creates an endpoint over a connection of its own, in step with seven others, and says what came of it."""
    with deployment.database(database_url) as database:
        endpoints.find_all(database, "alice", deadline=time.monotonic() + 10)
        if in_step:
            _together.wait(20)
        try:
            outcome = endpoints.create(
                database,
                call_of(endpoints.ENDPOINT, uuid4(), endpoints.EndpointCommand.model_validate(COMMAND)),
                allows_loopback=False,
            )
        except errors.ChargingError as refused:
            return type(refused).__name__
        return "created" if isinstance(outcome, Created) else type(outcome).__name__


OPERATIONS = [
    ("GET", "", None),
    ("DELETE", "", None),
    ("GET", "/secret", None),
    ("POST", "/rotate-secret", {"secretVersion": 1}),
    ("POST", "/disable", None),
    ("POST", "/enable", None),
    ("POST", "/test", None),
    ("GET", "/deliveries", None),
    ("POST", f"/deliveries/{NOWHERE}/resend", None),
    ("POST", "/resend", {"since": "2026-01-01T00:00:00Z"}),
]


class TestOwnership:
    """An endpoint is its owner's."""

    @pytest.mark.parametrize(("method", "below", "body"), OPERATIONS)
    def test_another_callers_endpoint_is_not_there(
        self, method: str, below: str, body: object, api: Api, connect: Connect
    ) -> None:
        """404 for every operation, as for one that never was, and nothing happens to it."""
        path = api.create()
        before = connect().execute("SELECT w::text FROM webhook_endpoints AS w").fetchall()
        for stranger in (path, f"/webhook-endpoints/{NOWHERE}"):
            answer = api.call(method, stranger + below, body, principal="bob")
            assert (answer.status, answer.code) == (404, "not_found")
        assert connect().execute("SELECT w::text FROM webhook_endpoints AS w").fetchall() == before
        assert api.call("GET", "/webhook-endpoints", principal="bob").json == {"endpoints": []}

    @pytest.mark.parametrize(("method", "below", "body"), [*OPERATIONS, ("GET", None, None), ("POST", None, COMMAND)])
    def test_without_a_principal_there_is_no_answer(
        self, method: str, below: str | None, body: object, api: Api
    ) -> None:
        """401, whatever is asked for."""
        path = "/webhook-endpoints" if below is None else f"/webhook-endpoints/{NOWHERE}{below}"
        assert api.call(method, path, body, principal=None, key=KEY).code == "unauthenticated"

    @pytest.mark.parametrize(("method", "below", "body"), OPERATIONS)
    @pytest.mark.parametrize("name", ["x", "1" * 36, "..", "%00", NOWHERE[:-1]])
    def test_what_is_no_id_is_not_there(self, name: str, method: str, below: str, body: object, api: Api) -> None:
        """404, without a question to the database."""
        assert api.call(method, f"/webhook-endpoints/{name}{below}", body).status == 404


class TestSecret:
    """Shown on request, and replaced without a gap."""

    def test_it_is_the_one_that_signs(self, api: Api) -> None:
        """And nothing on the way may keep it."""
        path = api.create()
        answer = api.call("GET", f"{path}/secret")
        assert answer.json == {"secretVersion": 1, "secret": signing.secret(MASTER_KEY.encode(), id_of(path), 1)}
        assert answer.headers["cache-control"] == "no-store"

    def test_a_rotation_shows_both_while_they_overlap(self, api: Api, connect: Connect) -> None:
        """The new one, and the old one with when it ends; afterwards the new one alone."""
        path = api.create()
        assert api.call("POST", f"{path}/rotate-secret", {"secretVersion": 1}).json["secretVersion"] == 2
        shown = api.call("GET", f"{path}/secret").json
        assert shown["secret"] == signing.secret(MASTER_KEY.encode(), id_of(path), 2)
        assert shown["previousSecret"] == signing.secret(MASTER_KEY.encode(), id_of(path), 1)
        ends = datetime.fromisoformat(shown["previousSecretSignsUntil"]) - datetime.now(UTC)
        assert timedelta(hours=23, minutes=59) < ends < timedelta(hours=24, minutes=1)
        table.let_pass(connect(), seconds=24 * 3600)
        assert api.call("GET", f"{path}/secret").json.keys() == {"secretVersion", "secret"}

    def test_a_rotation_that_is_repeated_rotates_once(self, api: Api) -> None:
        """A client that has had no answer asks again, and does not lose the secret that its receiver still has."""
        path = api.create()
        answers = [api.call("POST", f"{path}/rotate-secret", {"secretVersion": 1}) for _ in range(3)]
        assert [answer.json["secretVersion"] for answer in answers] == [2, 2, 2]
        assert api.call("POST", f"{path}/rotate-secret", {"secretVersion": 2}).json["secretVersion"] == 3

    def test_a_secret_that_has_leaked_ends_at_once(self, api: Api) -> None:
        """Without an overlap."""
        path = api.create()
        api.call("POST", f"{path}/rotate-secret", {"secretVersion": 1, "overlapHours": 0})
        assert api.call("GET", f"{path}/secret").json.keys() == {"secretVersion", "secret"}

    @pytest.mark.parametrize(
        "body", [{}, {"secretVersion": 0}, {"secretVersion": 2**31}, {"secretVersion": 1, "overlapHours": 169}, []]
    )
    def test_a_rotation_says_what_it_replaces(self, body: object, api: Api) -> None:
        """400 where it does not."""
        assert api.call("POST", f"{api.create()}/rotate-secret", body).code == "invalid_request"

    def test_no_log_line_holds_a_secret(self, api: Api, capsys: pytest.CaptureFixture[str]) -> None:
        """Nor the principal, nor the URL."""
        path = api.create()
        secret = api.call("GET", f"{path}/secret").json["secret"]
        output = capsys.readouterr().out
        for private in (secret, "alice", "receiver.test", MASTER_KEY):
            assert private not in output


class TestState:
    """Disabled, enabled, deleted."""

    def test_a_disabled_endpoint_says_so(self, api: Api) -> None:
        """And once enabled, it does not. Each may be repeated."""
        path = api.create()
        for _ in range(2):
            answer = api.call("POST", f"{path}/disable").json
            assert (answer["enabled"], answer["disabledReason"]) == (False, "owner")
        for _ in range(2):
            answer = api.call("POST", f"{path}/enable").json
            assert answer["enabled"]
            assert "disabledReason" not in answer

    def test_what_occurs_while_it_is_disabled_is_sent_once_it_is_enabled(
        self, api: Api, connect: Connect, database_url: str
    ) -> None:
        """Nothing vanishes."""
        path = api.create()
        api.call("POST", f"{path}/disable")
        connection = connect()
        table.write(connection, id_of(path), count=3)
        with deployment.database(database_url) as database:
            claim = partial(
                deliveries.claim, database, slow=False, after=UUID(int=0), limit=64, share=8, busy={}, lease_seconds=60
            )
            assert claim() == []
            api.call("POST", f"{path}/enable")
            assert len(claim()) == 3

    def test_a_receiver_that_is_back_need_not_wait(self, api: Api, connect: Connect) -> None:
        """Enabling lifts a pause and closes the breaker."""
        path = api.create()
        connection = connect()
        connection.execute(
            "UPDATE webhook_endpoints SET opened_at = now(), failures_in_a_row = 9, resumes_at = now() + interval '1 h'"
        )
        assert "heldUntil" in api.call("GET", path).json
        assert "heldUntil" not in api.call("POST", f"{path}/enable").json
        state = table.state(connection, id_of(path))
        assert (state.is_open, state.failures_in_a_row) == (False, 0)

    def test_a_deleted_endpoint_is_there_no_more(self, api: Api) -> None:
        """204, and again 204 for a client that has had no answer; then it is found nowhere."""
        path = api.create()
        for _ in range(2):
            answer = api.call("DELETE", path)
            assert (answer.status, answer.body) == (204, "")
        assert api.call("GET", path).status == 404
        assert api.call("POST", f"{path}/enable").status == 404
        assert api.call("GET", "/webhook-endpoints").json == {"endpoints": []}


class TestDeliveries:
    """What became of them, and sending them again."""

    def test_a_test_event_is_sent(self, api: Api, connect: Connect) -> None:
        """To this endpoint, whatever it wants; asked for twice in a moment, once."""
        path = api.create()
        answers = [api.call("POST", f"{path}/test") for _ in range(2)]
        assert {answer.status for answer in answers} == {202}
        connection = connect()
        written = connection.execute("SELECT event_id, event_type, payload FROM outbox_deliveries").fetchall()
        assert 1 <= len(written) <= 2, "one for each ten seconds"
        assert {UUID(answer.json["eventId"]) for answer in answers} == {row[0] for row in written}
        event = json.loads(written[0][2])
        assert (event["type"], event["subject"]) == ("WebhookTest", str(id_of(path)))
        assert re.fullmatch(r"\d{4}-\d\d-\d\dT\d\d:\d\d:\d\d\.\d{6}Z", event["time"])

    def test_a_delivery_is_shown_with_its_attempts(self, api: Api, connect: Connect, database_url: str) -> None:
        """What was answered, how long it took, and when the next attempt is."""
        path = api.create()
        [event_id] = table.write(connect(), id_of(path))
        with deployment.database(database_url) as database:
            [claimed] = deliveries.claim(
                database, slow=False, after=UUID(int=0), limit=1, share=1, busy={}, lease_seconds=60
            )
            deliveries.complete(database, [Attempt(claimed, 12, status=500, excerpt="no such order")])
        [shown] = api.call("GET", f"{path}/deliveries").json["deliveries"]
        [attempt] = shown.pop("attempts")
        assert attempt.pop("endedAt").endswith("Z")
        assert attempt == {"attempt": 1, "durationMs": 12, "status": 500, "excerpt": "no such order"}
        assert shown.keys() == {
            "eventId", "eventType", "subject", "status", "createdAt", "nextAttemptAt", "lastError",
        }  # fmt: skip
        assert (shown["eventId"], shown["status"]) == (str(event_id), "RETRY")

    def test_deliveries_come_in_pages_the_youngest_first(self, api: Api, connect: Connect) -> None:
        """Each once, also while new ones are written, and only the endpoint's own."""
        path = api.create()
        ids = table.write(connect(), id_of(path), count=2 * DELIVERIES_ON_A_PAGE + 1)
        table.write(connect(), id_of(api.create()))
        seen: list[str] = []
        query: dict[str, str] = {}
        while True:
            page = api.call("GET", f"{path}/deliveries", query=query).json
            seen += [delivery["eventId"] for delivery in page["deliveries"]]
            table.write(connect(), id_of(path))
            if "nextCursor" not in page:
                break
            query = {"cursor": page["nextCursor"]}
        assert seen == [str(event_id) for event_id in sorted(ids, reverse=True)]

    @pytest.mark.parametrize("cursor", ["", "x", "1", NOWHERE + " "])
    def test_a_cursor_is_what_a_page_has_said(self, cursor: str, api: Api) -> None:
        """400 for anything else."""
        answer = api.call("GET", f"{api.create()}/deliveries", query={"cursor": cursor})
        assert answer.code == "invalid_request"
        assert [violation["member"] for violation in answer.json["violations"]] == ["cursor"]

    @pytest.mark.parametrize("status", ["SENT", "FAILED", "RETRY", "PENDING"])
    def test_one_is_sent_again(self, status: str, api: Api, connect: Connect) -> None:
        """At once, with all of its attempts before it, under the id that it has."""
        path = api.create()
        connection = connect()
        [event_id, other] = table.write(connection, id_of(path), count=2)
        settle(connection, event_id, status)
        settle(connection, other, "FAILED")
        answer = api.call("POST", f"{path}/deliveries/{event_id}/resend")
        assert (answer.status, answer.json) == (202, {"resent": 1})
        rows = {row.event_id: row for row in table.rows(connection)}
        assert (rows[event_id].status, rows[event_id].failures) == ("PENDING", 0)
        assert rows[event_id].due_in_seconds <= 0
        assert rows[other].status == "FAILED"

    def test_one_that_is_under_way_is_left_to_its_dispatcher(self, api: Api, connect: Connect) -> None:
        """It is being sent; a second dispatcher would send it twice."""
        path = api.create()
        connection = connect()
        [event_id] = table.write(connection, id_of(path))
        connection.execute("UPDATE outbox_deliveries SET status = 'CLAIMED', attempts = 1")
        assert api.call("POST", f"{path}/deliveries/{event_id}/resend").status == 202
        assert table.row(connection, id_of(path)).status == "CLAIMED"

    @pytest.mark.parametrize(
        ("before", "meanwhile", "left"),
        [
            ("CLAIMED", "UPDATE outbox_deliveries SET status = 'SENT', sent_at = now()", ["PENDING"]),
            ("PENDING", "UPDATE outbox_deliveries SET status = 'CLAIMED', attempts = 1", ["CLAIMED"]),
            ("SENT", "DELETE FROM outbox_deliveries", []),
        ],
    )
    def test_what_becomes_of_one_at_the_same_moment_counts(
        self, before: str, meanwhile: LiteralString, left: list[str], api: Api, connect: Connect
    ) -> None:
        """Whatever the statement's snapshot says: nobody is promised what will not be sent."""
        path = api.create()
        connection, other = connect(), connect()
        [event_id] = table.write(connection, id_of(path))
        settle(connection, event_id, before)
        with ThreadPoolExecutor(1) as caller:
            with other.transaction():
                other.execute(meanwhile)
                call = caller.submit(api.call, "POST", f"{path}/deliveries/{event_id}/resend")
                until_blocked(connection)
            assert call.result(PATIENCE_SECONDS).status == (202 if left else 404)
        assert [row.status for row in table.rows(connection)] == left

    def test_what_is_not_there_cannot_be_sent_again(self, api: Api, connect: Connect) -> None:
        """404 for another endpoint's delivery too."""
        path, other = api.create(), api.create()
        [event_id] = table.write(connect(), id_of(other))
        assert api.call("POST", f"{path}/deliveries/{event_id}/resend").status == 404

    @pytest.mark.parametrize(
        ("chosen", "expected"), [({}, 4), ({"statuses": ["FAILED"]}, 2), ({"statuses": ["SENT", "FAILED"]}, 4)]
    )
    def test_all_since_a_time_are_sent_again(
        self, chosen: dict[str, object], expected: int, api: Api, connect: Connect
    ) -> None:
        """Those that are settled, of this endpoint alone, by when they were written."""
        path = api.create()
        connection = connect()
        for endpoint in (path, api.create()):
            for age_hours in (0, 1, 3, 5):
                for status in ("SENT", "FAILED", "RETRY"):
                    write_old(connection, id_of(endpoint), status, age_hours)
        since = (datetime.now(UTC) - timedelta(hours=2)).isoformat()
        answer = api.call("POST", f"{path}/resend", {"since": since, **chosen})
        assert (answer.status, answer.json) == (202, {"resent": expected})
        resent = [row for row in table.rows(connection) if row.status == "PENDING"]
        assert {row.endpoint_id for row in resent} == {id_of(path)}
        assert len(resent) == expected

    def test_very_many_are_sent_again_in_turns(
        self, api: Api, connect: Connect, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Each answer says where the next one goes on; each delivery is taken once, also when it is sent meanwhile."""
        monkeypatch.setattr("charging.endpoints.RESENT_AT_ONCE", 3)
        path = api.create()
        connection = connect()
        for _ in range(7):
            write_old(connection, id_of(path), "SENT", 1)
        command: dict[str, object] = {"since": (datetime.now(UTC) - timedelta(hours=2)).isoformat()}
        resent = []
        while True:
            answer = api.call("POST", f"{path}/resend", command).json
            resent.append(answer["resent"])
            connection.execute("UPDATE outbox_deliveries SET status = 'SENT', sent_at = now() WHERE status = 'PENDING'")
            if "nextCursor" not in answer:
                break
            command["cursor"] = answer["nextCursor"]
        assert resent == [3, 3, 1]

    @pytest.mark.parametrize(
        "body",
        [
            {},
            {"since": "yesterday"},
            {"since": "2026-01-01"},
            {"since": "2026-01-01T00:00:00"},
            {"since": "2026-13-01T00:00:00Z"},
            {"since": "0001-01-01T00:00:00+23:59"},
            {"since": "2026-01-01T00:00:00+99:00"},
            {"since": "9999-12-31T23:59:59-23:59"},
            {"since": 1},
            {"since": "2026-01-01T00:00:00Z", "statuses": []},
            {"since": "2026-01-01T00:00:00Z", "statuses": ["PENDING"]},
            {"since": "2026-01-01T00:00:00Z", "cursor": "x"},
            {"since": "2026-01-01T00:00:00Z", "cursor": None},
        ],
    )
    def test_what_is_to_be_sent_again_is_named(self, body: object, api: Api) -> None:
        """400 where it is not, and never a 500."""
        assert api.call("POST", f"{api.create()}/resend", body).code == "invalid_request"


def settle(connection: table.Connection, event_id: UUID, status: str) -> None:
    connection.execute(
        """
        UPDATE outbox_deliveries
        SET status = %(status)s, failures = 5, next_attempt_at = now() + interval '1 hour',
            sent_at = CASE WHEN %(status)s = 'SENT' THEN now() END,
            failed_at = CASE WHEN %(status)s = 'FAILED' THEN now() END
        WHERE event_id = %(event_id)s
        """,
        {"status": status, "event_id": event_id},
    )


def write_old(connection: table.Connection, endpoint_id: UUID, status: str, age_hours: int) -> None:
    """Writes a delivery as it would be there had it been written so many hours ago."""
    [event_id] = table.write(connection, endpoint_id)
    settle(connection, event_id, status)
    aged = UUID(int=event_id.int - (age_hours * 3_600_000 << 80))
    connection.execute(
        "UPDATE outbox_deliveries SET event_id = %s, created_at = created_at - make_interval(hours => %s)"
        " WHERE event_id = %s",
        [aged, age_hours, event_id],
    )


def test_the_sample_event_creates_an_endpoint(api: Api) -> None:
    """As it stands in events/."""
    assert api.instance.call(sample("endpoints-rest")).status == 201


@pytest.mark.parametrize("shape", SHAPES)
def test_every_gateway_shape_is_served(shape: str, api: Api) -> None:
    """As for charges: creation, a list, a deletion without a body."""
    headers = [("Content-Type", "application/json"), ("Idempotency-Key", str(uuid4()))]
    request = Request("POST", "/webhook-endpoints", {}, headers, json.dumps(COMMAND).encode(), "alice")
    answer = api.instance.call(SHAPES[shape](request))
    assert answer.status == 201
    path = answer.headers["location"]
    assert api.instance.call(SHAPES[shape](Request("GET", path, {}, [], None, "alice"))).json == answer.json
    assert api.instance.call(SHAPES[shape](Request("DELETE", path, {}, [], None, "alice"))).status == 204


def test_a_master_key_that_cannot_be_read_is_an_outage(database_url: str) -> None:
    """503, and the next request asks again."""
    instance = Instance("endpoints", database_url, ENDPOINTS_VARIABLES)
    api = Api(instance)
    path = api.create()
    assert api.call("GET", f"{path}/secret").code == "temporarily_unavailable"
    with mock.patch("charging.vault.read", return_value=MASTER_KEY):
        assert api.call("GET", f"{path}/secret").status == 200
    instance.close()


def test_a_master_key_that_is_replaced_gives_new_secrets_at_once(api: Api) -> None:
    """Also in an instance that has shown one before."""
    path = api.create()
    before = api.call("GET", f"{path}/secret").json["secret"]
    with mock.patch("charging.vault.read", return_value="n" * 32):
        assert api.call("GET", f"{path}/secret").json["secret"] != before


def test_what_owners_do_to_an_endpoint_is_logged(api: Api, caplog: pytest.LogCaptureFixture) -> None:
    """Each change names the endpoint, and neither its owner nor a secret."""
    caplog.set_level("INFO", "endpoints")
    path = api.create()
    for method, operation, body in (
        ("POST", "/disable", None),
        ("POST", "/enable", None),
        ("POST", "/rotate-secret", {"secretVersion": 1}),
        ("DELETE", "", None),
    ):
        assert api.call(method, f"{path}{operation}", body).status < 300
    changes = [vars(record) for record in caplog.records if record.getMessage() == "webhook_endpoint_changed"]
    assert [line["change"] for line in changes] == ["disabled_by_owner", "enabled", "secret_rotated", "deleted"]
    assert {line["endpoint_id"] for line in changes} == {path.removeprefix("/webhook-endpoints/")}
    assert "alice" not in str(changes)
    assert "whsec_" not in str(changes)
