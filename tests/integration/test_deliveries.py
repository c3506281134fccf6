"""Deliveries in the database: written once, claimed fairly, completed by whoever holds the lease."""

import itertools
import json
import threading
import time
from collections import Counter
from collections.abc import Iterator, Mapping
from concurrent.futures import ThreadPoolExecutor
from typing import Any
from uuid import UUID, uuid4

import psycopg
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from psycopg import sql as composing

from charging import deliveries, errors, maintenance, sql
from charging.database import Database
from charging.deliveries import MAX_FAILURES, SLOW_SECONDS, Attempt, ClaimedDelivery, Completion
from charging.identifiers import time_ordered_uuid
from tests.conftest import Connect
from tests.support import deliveries as table
from tests.support import deployment
from tests.support.wire import Judge, Message, Sender, Verdict, Wire, silent

LEASE_SECONDS = 60.0
BEFORE_ALL = UUID(int=0)
HOURS = 3600


@pytest.fixture
def database(database_url: str) -> Iterator[Database]:
    """A dispatcher's connection."""
    with deployment.database(database_url) as opened:
        yield opened


def claim(
    database: Database,
    *,
    slow: bool = False,
    after: UUID = BEFORE_ALL,
    limit: int = 64,
    share: int = 8,
    busy: Mapping[UUID, int] | None = None,
) -> list[ClaimedDelivery]:
    return list(
        deliveries.claim(
            database, slow=slow, after=after, limit=limit, share=share, busy=busy or {}, lease_seconds=LEASE_SECONDS
        )
    )


def claim_one(database: Database) -> ClaimedDelivery:
    [delivery] = claim(database)
    return delivery


def probe(database: Database, limit: int = 16) -> list[ClaimedDelivery]:
    return list(deliveries.claim_probes(database, limit=limit, lease_seconds=LEASE_SECONDS))


def end(database: Database, *claimed: ClaimedDelivery, status: int | None = 200, **more: Any) -> Completion:
    """Completes deliveries as their receiver's answer has it."""
    error = "timed_out: no answer" if status is None else None
    attempts = [Attempt(delivery, 12, status=status, error=error, **more) for delivery in claimed]
    return deliveries.complete(database, attempts)


def changes(completion: Completion) -> list[str]:
    return [transition.change for transition in completion.transitions]


def enqueue(connection: table.Connection, principal: str = "alice", **changed: object) -> int:
    event: dict[str, Any] = {
        "event_type": "ChargeCreated",
        "event_id": time_ordered_uuid(),
        "aggregate_id": uuid4(),
        "sequence": 1,
        "payload": "{}",
        **changed,
    }
    return deliveries.enqueue(connection, principal, **event)


class TestEnqueue:
    """Which endpoints get a row, and when."""

    def test_each_endpoint_of_the_principal_that_wants_the_type_gets_one(self, connect: Connect) -> None:
        """Nobody else's endpoint does, and none that wants other types."""
        connection = connect()
        wanting = {table.register(connection), table.register(connection)}
        table.register(connection, event_types=["SomethingElse"])
        table.register(connection, principal="bob")
        with connection.transaction():
            assert enqueue(connection, payload='{"a":1}') == 2
        assert {row.endpoint_id for row in table.rows(connection)} == wanting
        assert {(row.status, row.attempts) for row in table.rows(connection)} == {("PENDING", 0)}

    def test_a_disabled_endpoint_gets_one_and_a_deleted_one_does_not(self, connect: Connect) -> None:
        """What occurs while an endpoint is disabled is held for it."""
        connection = connect()
        disabled, deleted = table.register(connection), table.register(connection)
        connection.execute(
            "UPDATE webhook_endpoints SET disabled_at = now(), disabled_reason = 'owner' WHERE id = %s", [disabled]
        )
        connection.execute("UPDATE webhook_endpoints SET deleted_at = now() WHERE id = %s", [deleted])
        with connection.transaction():
            assert enqueue(connection) == 1
        assert table.row(connection, disabled).status == "PENDING"

    def test_a_row_is_written_once(self, connect: Connect) -> None:
        """The same event again adds nothing, under whatever id; another event of the same aggregate does."""
        connection = connect()
        table.register(connection)
        charge = uuid4()
        with connection.transaction():
            assert enqueue(connection, aggregate_id=charge) == 1
            assert enqueue(connection, aggregate_id=charge) == 0
            assert enqueue(connection, aggregate_id=charge, sequence=2) == 1

    def test_it_refuses_to_run_outside_a_transaction(self, connect: Connect) -> None:
        """There its rows would stay whatever became of the event."""
        connection = connect()
        table.register(connection)
        with pytest.raises(ValueError, match="transaction"):
            enqueue(connection)
        assert table.rows(connection) == []

    def test_rows_share_the_transactions_end(self, connect: Connect) -> None:
        """Rolled back with the event, they were never there."""
        connection, reader = connect(), connect()
        table.register(connection)
        with connection.transaction(force_rollback=True):
            assert enqueue(connection) == 1
            assert table.rows(reader) == []
        assert table.rows(reader) == []

    def test_it_looks_the_endpoints_up_by_their_principal(self, connect: Connect) -> None:
        """With ten thousand endpoints of others, one probe of the index and no more."""
        connection = connect()
        connection.execute(
            """
            INSERT INTO webhook_endpoints (id, principal, url, event_types)
            SELECT gen_random_uuid(), 'merchant ' || n, 'https://receiver.test/', ARRAY['ChargeCreated']
            FROM generate_series(1, 10000) AS n
            """
        )
        connection.execute("ANALYZE webhook_endpoints")
        parameters = {
            "principal": "alice",
            "event_type": "ChargeCreated",
            "event_id": uuid4(),
            "aggregate_id": uuid4(),
            "sequence": 1,
            "payload": "{}",
        }
        plan = explained(connection, sql.ENQUEUE_DELIVERIES, parameters)
        assert '"Index Name": "webhook_endpoints_of_principal"' in plan
        assert "Seq Scan" not in plan


def explained(connection: table.Connection, statement: bytes, parameters: Mapping[str, object]) -> str:
    found = connection.execute(b"EXPLAIN (FORMAT JSON) " + statement, parameters).fetchone()
    assert found is not None
    return json.dumps(found[0])


class TestClaim:
    """What is taken, of whom, for how long."""

    def test_it_charges_the_attempt_and_leases_the_row(self, connect: Connect, database: Database) -> None:
        """A claimed row counts before anything is sent, and is due again when the lease ends, and not before."""
        connection = connect()
        endpoint = table.register(connection)
        table.write(connection, endpoint)
        for attempt in (1, 2, 3):
            assert claim_one(database).attempts == attempt
            row = table.row(connection, endpoint)
            assert (row.status, row.attempts, row.failures) == ("CLAIMED", attempt, 0)
            assert row.due_in_seconds == pytest.approx(LEASE_SECONDS, abs=5)
            assert claim(database) == []
            table.let_pass(connection, seconds=LEASE_SECONDS)

    def test_it_says_where_the_delivery_goes_and_what_signs_it(self, connect: Connect, database: Database) -> None:
        """The URL, the payload as it was written, and the secret's version, with the one before while that signs."""
        connection = connect()
        endpoint = table.register(connection, url="https://receiver.test/a")
        [event_id] = table.write(connection, endpoint)
        found = claim_one(database)
        assert (found.endpoint_id, found.event_id, found.url) == (endpoint, event_id, "https://receiver.test/a")
        assert json.loads(found.payload)["id"] == str(event_id)
        assert (found.secret_version, found.previous_signs) == (1, False)
        connection.execute(
            "UPDATE webhook_endpoints SET secret_version = 2, previous_signs_until = now() + interval '1 hour'"
        )
        table.let_pass(connection, seconds=LEASE_SECONDS)
        found = claim_one(database)
        assert (found.secret_version, found.previous_signs) == (2, True)
        table.let_pass(connection, seconds=HOURS)
        found = claim_one(database)
        assert (found.secret_version, found.previous_signs) == (2, False)

    def test_an_endpoint_gets_its_share_and_no_more(self, connect: Connect, database: Database) -> None:
        """Of a thousand due rows a few are taken; those of the other endpoint beside them too."""
        connection = connect()
        crowded, other = table.register(connection), table.register(connection)
        table.write(connection, crowded, count=1000)
        table.write(connection, other, count=3)
        assert Counter(delivery.endpoint_id for delivery in claim(database)) == {crowded: 8, other: 3}

    def test_what_is_under_way_counts_towards_the_share(self, connect: Connect, database: Database) -> None:
        """An endpoint that has three of eight gets five; one that has all of them, or more, gets none."""
        connection = connect()
        endpoint = table.register(connection)
        table.write(connection, endpoint, count=20)
        assert len(claim(database, busy={endpoint: 3})) == 5
        assert claim(database, busy={endpoint: 8}) == []
        assert claim(database, busy={endpoint: 9}) == []

    def test_what_has_been_due_longest_comes_first(self, connect: Connect, database: Database) -> None:
        """Within an endpoint, whatever the order of the ids."""
        connection = connect()
        endpoint = table.register(connection)
        first, second, third = table.write(connection, endpoint, count=3)
        due = "UPDATE outbox_deliveries SET next_attempt_at = now() - make_interval(hours => %s) WHERE event_id = %s"
        connection.execute(due, [1, third])
        connection.execute(due, [2, second])
        assert {delivery.event_id for delivery in claim(database, share=2)} == {second, third}
        assert claim_one(database).event_id == first

    def test_a_limit_goes_round_the_endpoints(self, connect: Connect, database: Database) -> None:
        """With room for one, each claim that goes on after the last one's endpoint takes the next endpoint's row."""
        connection = connect()
        endpoints = sorted(table.register(connection) for _ in range(4))
        for endpoint in endpoints:
            table.write(connection, endpoint, count=3)
        after, seen = BEFORE_ALL, []
        for _ in endpoints:
            [delivery] = claim(database, after=after, limit=1)
            after = delivery.endpoint_id
            seen.append(after)
        assert seen == endpoints
        assert claim(database, after=after) == []

    def test_slow_endpoints_are_claimed_apart(self, connect: Connect, database: Database) -> None:
        """Slow is whose last attempt took longer than two seconds; one that was never tried is not."""
        connection = connect()
        slow, quick, new = (table.register(connection) for _ in range(3))
        for endpoint, durations in ((slow, [5, 2001]), (quick, [15_000, 2000]), (new, [])):
            ids = sorted(table.write(connection, endpoint, count=3))
            for event_id, duration_ms in zip(ids, durations, strict=False):
                table.settle(connection, event_id, duration_ms=duration_ms)
        assert {delivery.endpoint_id for delivery in claim(database)} == {quick, new}
        assert {delivery.endpoint_id for delivery in claim(database, slow=True)} == {slow}

    @pytest.mark.parametrize(
        "held",
        [
            "disabled_at = now(), disabled_reason = 'owner'",
            "deleted_at = now()",
            "resumes_at = now() + interval '1 minute'",
            "opened_at = now(), resumes_at = now() - interval '1 minute'",
        ],
        ids=["disabled", "deleted", "paused", "open"],
    )
    def test_nothing_of_an_endpoint_that_is_held_is_taken(
        self, held: str, connect: Connect, database: Database
    ) -> None:
        """Its rows stay as they are, and those of its neighbour go."""
        connection = connect()
        endpoint, other = table.register(connection), table.register(connection)
        table.write(connection, endpoint, count=3)
        table.write(connection, other)
        change = psycopg.sql.SQL("UPDATE webhook_endpoints SET {} WHERE id = %s")
        connection.execute(change.format(psycopg.sql.SQL(held)), [endpoint])
        assert [delivery.endpoint_id for delivery in claim(database)] == [other]
        assert {row.attempts for row in table.rows(connection, endpoint)} == {0}

    def test_a_pause_ends_by_itself(self, connect: Connect, database: Database) -> None:
        """When its time has come, nobody has to lift it."""
        connection = connect()
        endpoint = table.register(connection)
        table.write(connection, endpoint)
        connection.execute("UPDATE webhook_endpoints SET resumes_at = now() + interval '1 minute'")
        assert claim(database) == []
        table.let_pass(connection, seconds=60)
        assert len(claim(database)) == 1

    @pytest.mark.parametrize("status", ["SENT", "FAILED"])
    def test_what_is_settled_is_never_claimed(self, status: str, connect: Connect, database: Database) -> None:
        """However long ago it was due."""
        connection = connect()
        table.write(connection, table.register(connection))
        connection.execute(
            """
            UPDATE outbox_deliveries
            SET status = %(status)s, next_attempt_at = now() - interval '1 day',
                sent_at = CASE WHEN %(status)s = 'SENT' THEN now() END,
                failed_at = CASE WHEN %(status)s = 'FAILED' THEN now() END
            """,
            {"status": status},
        )
        assert claim(database) == []

    def test_two_at_once_never_take_the_same_row(self, connect: Connect, database: Database, database_url: str) -> None:
        """Two dispatchers that claim in turns of ten share 400 rows of four endpoints without an overlap or a rest."""
        connection = connect()
        ids = [
            event_id for _ in range(4) for event_id in table.write(connection, table.register(connection), count=100)
        ]
        start = threading.Barrier(2)

        def drain(by: Database) -> list[UUID]:
            start.wait(10)
            taken: list[UUID] = []
            while some := [delivery.event_id for delivery in claim(by, limit=10, share=3)]:
                taken += some
            return taken

        with deployment.database(database_url) as other, ThreadPoolExecutor(2) as dispatchers:
            one, two = dispatchers.map(drain, [database, other])
            rest = drain_alone(database)
        assert sorted(one + two + rest) == sorted(ids)
        assert {row.attempts for row in table.rows(connection)} == {1}

    def test_it_reads_little_however_much_waits_or_is_kept(self, connect: Connect) -> None:
        """Beside one endpoint's 20,000 due rows and another's 20,000 that were sent, it reads a few pages."""
        connection = connect()
        crowded, done = table.register(connection), table.register(connection)
        connection.execute("SET statement_timeout = 0; SET transaction_timeout = 0")
        connection.execute(
            """
            INSERT INTO outbox_deliveries
                (endpoint_id, event_id, event_type, aggregate_id, sequence, payload, status, sent_at)
            SELECT endpoint_id::uuid, gen_random_uuid(), 'ChargeCreated', gen_random_uuid(), 1, '{}', status, sent_at
            FROM generate_series(1, 20000)
            CROSS JOIN (
                VALUES (%(crowded)s, 'PENDING', NULL), (%(done)s, 'SENT', now())
            ) AS kind (endpoint_id, status, sent_at)
            """,
            {"crowded": crowded, "done": done},
        )
        table.write(connection, table.register(connection))
        connection.execute("ANALYZE outbox_deliveries")
        parameters = {
            "slow": False,
            "slow_seconds": SLOW_SECONDS,
            "after": BEFORE_ALL,
            "limit": 64,
            "share": 8,
            "busy_endpoints": [],
            "busy_deliveries": [],
            "lease_seconds": 60,
        }
        plan = explained(connection, sql.CLAIM_DELIVERIES, parameters)
        assert '"Index Name": "outbox_deliveries_open"' in plan
        assert "Seq Scan" not in plan
        [found] = connection.execute(
            b"EXPLAIN (ANALYZE, BUFFERS, FORMAT JSON) " + sql.CLAIM_DELIVERIES, parameters
        ).fetchall()
        [whole] = found[0]
        assert whole["Plan"]["Actual Rows"] == 9
        assert whole["Plan"]["Shared Hit Blocks"] + whole["Plan"]["Shared Read Blocks"] < 300


def drain_alone(database: Database) -> list[UUID]:
    """What is left when two have passed each other by."""
    taken: list[UUID] = []
    while some := [delivery.event_id for delivery in claim(database)]:
        taken += some
    return taken


class TestComplete:
    """What is written down of each result."""

    @pytest.mark.parametrize("plan", ["force_custom_plan", "force_generic_plan"])
    def test_it_finds_its_rows_by_primary_key_whatever_the_statistics_say(self, plan: str, connect: Connect) -> None:
        """Statistics from before an outage say that nothing is open, and a completion reads none of what is."""
        connection = connect()
        connection.execute(composing.SQL("SET plan_cache_mode = {}").format(composing.Identifier(plan)))
        write = """
            INSERT INTO outbox_deliveries
                (endpoint_id, event_id, event_type, aggregate_id, sequence, payload, status, sent_at)
            SELECT gen_random_uuid(), gen_random_uuid(), 'ChargeCreated', gen_random_uuid(), 1, '{}', %s,
                CASE WHEN %s = 'SENT' THEN now() END
            FROM generate_series(1, 5000)
        """
        connection.execute("ALTER TABLE outbox_deliveries SET (autovacuum_enabled = off)")
        connection.execute(write, ["SENT", "SENT"])
        connection.execute("ANALYZE outbox_deliveries")
        connection.execute(write, ["PENDING", "PENDING"])
        found = explained(
            connection,
            sql.COMPLETE_DELIVERIES,
            {
                "endpoint_ids": [UUID(int=1)] * 10,
                "event_ids": [UUID(int=index) for index in range(10)],
                "attempts": [1] * 10,
                "outcomes": ["SENT"] * 10,
                "delays": [0.0] * 10,
                "durations": [1] * 10,
                "statuses": [200] * 10,
                "errors": [None] * 10,
                "excerpts": [None] * 10,
            },
        )
        assert "outbox_deliveries_pkey" in found
        assert "outbox_deliveries_open" not in found

    def test_a_delivery_that_was_taken_is_sent(self, connect: Connect, database: Database) -> None:
        """It has no error, is not claimed again, and its attempt is kept for its owner."""
        connection = connect()
        endpoint = table.register(connection)
        table.write(connection, endpoint)
        assert end(database, claim_one(database), status=204, excerpt="thanks") == Completion()
        row = table.row(connection, endpoint)
        assert (row.status, row.attempts, row.failures, row.last_error) == ("SENT", 1, 0, None)
        kept = connection.execute("SELECT attempt, duration_ms, status, error, excerpt FROM delivery_attempts")
        assert kept.fetchall() == [(1, 12, 204, None, "thanks")]
        table.let_pass(connection, seconds=100 * HOURS)
        assert claim(database) == []

    def test_a_refusal_is_held_against_it(self, connect: Connect, database: Database) -> None:
        """It is due again half a minute later, and remembers why."""
        connection = connect()
        endpoint = table.register(connection)
        table.write(connection, endpoint)
        end(database, claim_one(database), status=500)
        row = table.row(connection, endpoint)
        assert (row.status, row.failures, row.last_error) == ("RETRY", 1, "The receiver answered 500")
        assert 26 <= row.due_in_seconds <= 33
        table.let_pass(connection, seconds=34)
        end(database, claim_one(database), status=None)
        assert table.row(connection, endpoint).last_error == "timed_out: no answer"

    def test_all_eight_attempts_are_made_and_then_no_more(self, connect: Connect, database: Database) -> None:
        """By time travel, each at its time and not before; the row is then kept as failed."""
        connection = connect()
        endpoint = table.register(connection)
        table.write(connection, endpoint)
        travelled = 0.0
        row = table.row(connection, endpoint)
        for failures in range(MAX_FAILURES):
            connection.execute("UPDATE webhook_endpoints SET opened_at = NULL")  # the breaker is another test's
            end(database, claim_one(database), status=500)
            row = table.row(connection, endpoint)
            assert row.failures == failures + 1
            if row.status == "RETRY":
                assert claim(database) == []
                travelled += row.due_in_seconds
                table.let_pass(connection, seconds=row.due_in_seconds - 2)
                connection.execute("UPDATE webhook_endpoints SET resumes_at = NULL, opened_at = NULL")
                assert claim(database) == []
                table.let_pass(connection, seconds=2)
        assert (row.status, row.attempts) == ("FAILED", MAX_FAILURES)
        assert 40 * HOURS < travelled < 51 * HOURS
        table.let_pass(connection, seconds=1000 * HOURS)
        assert claim(database) == []
        assert probe(database) == []

    def test_a_lost_lease_changes_nothing(self, connect: Connect, database: Database) -> None:
        """A dispatcher that wakes up after its lease cannot answer for a row that another has claimed since: neither
        for the row nor for its endpoint."""
        connection = connect()
        endpoint = table.register(connection)
        table.write(connection, endpoint)
        slow = claim_one(database)
        table.let_pass(connection, seconds=LEASE_SECONDS)
        quick = claim_one(database)
        assert end(database, slow, status=410) == Completion(lease_lost=1)
        assert table.row(connection, endpoint).status == "CLAIMED"
        assert table.state(connection, endpoint).disabled_reason is None
        assert end(database, quick) == Completion()

    def test_a_lease_that_has_ended_is_not_lost_until_it_is_taken(self, connect: Connect, database: Database) -> None:
        """The receiver did take it: while nobody else has claimed it, that is still worth knowing."""
        connection = connect()
        endpoint = table.register(connection)
        table.write(connection, endpoint)
        claimed = claim_one(database)
        table.let_pass(connection, seconds=HOURS)
        assert end(database, claimed) == Completion()
        assert table.row(connection, endpoint).status == "SENT"

    def test_a_completion_twice_is_as_once(self, connect: Connect, database: Database) -> None:
        """Nothing is counted, kept or judged a second time, and no lease is taken for lost."""
        connection = connect()
        endpoint = table.register(connection)
        table.write(connection, endpoint)
        claimed = claim_one(database)
        for _ in range(2):
            assert end(database, claimed, status=500) == Completion()
            assert table.row(connection, endpoint).failures == 1
            assert table.state(connection, endpoint).failures_in_a_row == 1
        assert connection.execute("SELECT count(*) FROM delivery_attempts").fetchone() == (1,)

    @pytest.mark.parametrize("lost", [Sender.CLIENT, Sender.SERVER], ids=["before", "after"])
    def test_a_connection_that_is_lost_in_the_commit_is_replaced(
        self, lost: Sender, connect: Connect, database_url: str
    ) -> None:
        """Before the commit or after it: the result is written down, and once."""
        connection = connect()
        endpoint = table.register(connection)
        table.write(connection, endpoint, count=2)
        with Wire(database_url) as wire, deployment.database(wire.url) as database:
            claimed = claim(database, share=1)
            wire.judge = cut_at_commit(lost)
            assert end(database, *claimed, status=500) == Completion()
            assert wire.connections == 2
        rows = [row for row in table.rows(connection) if row.attempts]
        assert [(row.status, row.failures) for row in rows] == [("RETRY", 1)]
        assert table.state(connection, endpoint).failures_in_a_row == 1

    def test_the_last_twenty_attempts_are_kept(self, connect: Connect, database: Database) -> None:
        """A receiver that asks for time for weeks leaves no endless list."""
        connection = connect()
        endpoint = table.register(connection)
        table.write(connection, endpoint)
        for _ in range(25):
            connection.execute("UPDATE webhook_endpoints SET opened_at = NULL, resumes_at = NULL")
            end(database, claim_one(database), status=429)
        kept = connection.execute("SELECT min(attempt), max(attempt), count(*) FROM delivery_attempts").fetchone()
        assert kept == (6, 25, 20)
        assert table.row(connection, endpoint).failures == 0

    def test_results_of_many_kinds_go_down_together(self, connect: Connect, database: Database) -> None:
        """Each row gets its own, and each endpoint its due."""
        connection = connect()
        endpoints = [table.register(connection) for _ in range(3)]
        for endpoint in endpoints:
            table.write(connection, endpoint)
        claimed = {delivery.endpoint_id: delivery for delivery in claim(database)}
        attempts = [
            Attempt(claimed[endpoint], 5, status=status)
            for endpoint, status in zip(endpoints, [200, 500, 410], strict=True)
        ]
        completion = deliveries.complete(database, attempts)
        assert [(one.endpoint_id, one.change) for one in completion.transitions] == [(endpoints[2], "disabled")]
        assert [table.row(connection, endpoint).status for endpoint in endpoints] == ["SENT", "RETRY", "RETRY"]
        assert [table.state(connection, endpoint).failures_in_a_row for endpoint in endpoints] == [0, 1, 1]

    @pytest.mark.parametrize("status", [429, 500])
    def test_receivers_that_ask_for_time_and_that_do_not_go_down_together(
        self, status: int, connect: Connect, database: Database
    ) -> None:
        """A whole number of seconds, as Retry-After has them, beside a delay of ours."""
        connection = connect()
        asking, silent_one = (table.register(connection) for _ in range(2))
        for endpoint in (asking, silent_one):
            table.write(connection, endpoint)
        claimed = {delivery.endpoint_id: delivery for delivery in claim(database)}
        attempts = [
            Attempt(claimed[asking], 5, status=status, retry_after_seconds=3600),
            Attempt(claimed[silent_one], 5, status=status),
        ]
        assert deliveries.complete(database, attempts).lease_lost == 0
        assert {row.status for row in table.rows(connection)} == {"RETRY"}


def cut_at_commit(sender: Sender) -> Judge:
    """Cuts the connection at the first commit: at the client's word, which is not passed on, or at the server's."""
    spent = False

    def judge(message: Message) -> Verdict:
        nonlocal spent
        if not spent and message.sender is sender and b"COMMIT" in message.content:
            spent = True
            return Verdict.CUT
        return Verdict.PASS

    return judge


class TestBreaker:
    """An endpoint that fails is asked less and less often, and one answer makes it whole."""

    def test_five_failures_in_a_row_open_it(self, connect: Connect, database: Database) -> None:
        """Four do not; and a success in between begins the count anew."""
        connection = connect()
        endpoint = table.register(connection)
        table.write(connection, endpoint, count=20)
        for status in (500, None, 503, 404, 200, 500, 302, 500, 500):
            [claimed] = claim(database, share=1)
            assert "opened" not in changes(end(database, claimed, status=status, **quick(status)))
            table.let_pass(connection, seconds=1)
        [claimed] = claim(database, share=1)
        assert changes(end(database, claimed, status=500)) == ["opened"]
        assert table.state(connection, endpoint).is_open
        assert claim(database) == []

    def test_failures_that_were_under_way_together_count_each(self, connect: Connect, database: Database) -> None:
        """Eight at once open it at once; one success among them does not let it."""
        connection = connect()
        dead, alive = table.register(connection), table.register(connection)
        for endpoint in (dead, alive):
            table.write(connection, endpoint, count=8)
        attempts = [
            Attempt(delivery, 5, status=200 if delivery.endpoint_id == alive and number % 8 == 0 else 500)
            for number, delivery in enumerate(sorted(claim(database), key=lambda delivery: delivery.endpoint_id))
        ]
        completion = deliveries.complete(database, attempts)
        assert [(one.endpoint_id, one.change) for one in completion.transitions] == [(dead, "opened")]

    def open(self, connection: table.Connection, database: Database, count: int = 10) -> UUID:
        endpoint = table.register(connection)
        table.write(connection, endpoint, count=count)
        assert changes(end(database, *claim(database, share=5), status=500)) == ["opened"]
        return endpoint

    def test_one_probe_goes_out_when_its_time_has_come(self, connect: Connect, database: Database) -> None:
        """Not before, and not two: the next is behind the first one's lease, whoever asks."""
        connection = connect()
        endpoint = self.open(connection, database)
        assert probe(database) == []
        table.let_pass(connection, seconds=30)
        [claimed] = probe(database)
        assert claimed.endpoint_id == endpoint
        assert probe(database) == []
        assert claim(database) == []
        table.let_pass(connection, seconds=LEASE_SECONDS)
        assert len(probe(database)) == 1, "the probe of a dispatcher that died comes back"

    def test_two_dispatchers_send_one_probe(self, connect: Connect, database: Database, database_url: str) -> None:
        """At the same moment, for ten open endpoints."""
        connection = connect()
        endpoints = [self.open(connection, database) for _ in range(10)]
        table.let_pass(connection, seconds=30)
        start = threading.Barrier(2)

        def ask(by: Database) -> list[UUID]:
            start.wait(10)
            return [delivery.endpoint_id for delivery in probe(by)]

        with deployment.database(database_url) as other, ThreadPoolExecutor(2) as dispatchers:
            one, two = dispatchers.map(ask, [database, other])
        assert sorted(one + two) == sorted(endpoints)

    def test_a_probe_that_succeeds_closes_it(self, connect: Connect, database: Database) -> None:
        """Everything that has waited goes at once."""
        connection = connect()
        endpoint = self.open(connection, database, count=20)
        table.let_pass(connection, seconds=30)
        [claimed] = probe(database)
        assert changes(end(database, claimed)) == ["closed"]
        state = table.state(connection, endpoint)
        assert (state.is_open, state.failures_in_a_row) == (False, 0)
        assert len(claim(database)) == 8

    def test_a_probe_that_fails_makes_the_next_one_rarer(self, connect: Connect, database: Database) -> None:
        """After a quarter of the time that it has been open: from half a minute up to an hour."""
        connection = connect()
        endpoint = self.open(connection, database, count=40)
        gaps = []
        for _ in range(30):
            gap = table.state(connection, endpoint).resumes_in_seconds
            assert gap is not None
            gaps.append(gap)
            table.let_pass(connection, seconds=gap + 1)
            [claimed] = probe(database)
            assert changes(end(database, claimed, status=500)) == ["reopened"]
        assert gaps[0] == pytest.approx(30, abs=2)
        assert gaps[-1] == pytest.approx(HOURS, abs=10)
        assert all(later > earlier - 2 for earlier, later in itertools.pairwise(gaps))

    def test_an_open_endpoint_costs_its_deliveries_no_attempts(self, connect: Connect, database: Database) -> None:
        """What waits behind the breaker is as it was; only the probes count."""
        connection = connect()
        endpoint = self.open(connection, database, count=100)
        for _ in range(10):
            table.let_pass(connection, seconds=HOURS)
            end(database, *probe(database), status=500)
        rows = table.rows(connection, endpoint)
        assert sum(row.failures for row in rows) == 5 + 10
        assert Counter(row.status for row in rows)["FAILED"] == 0

    def test_an_open_endpoint_without_due_deliveries_is_not_probed(self, connect: Connect, database: Database) -> None:
        """There is nothing to ask it with, and the probe is not used up."""
        connection = connect()
        endpoint = self.open(connection, database, count=5)
        connection.execute("UPDATE webhook_endpoints SET resumes_at = now()")
        assert probe(database) == []
        table.write(connection, endpoint)
        assert len(probe(database)) == 1

    def test_a_late_failure_does_not_open_it_anew(self, connect: Connect, database: Database) -> None:
        """What was under way when it opened is no probe: a failure is no transition and leaves the next probe where it
        is, and what ends well closes it, from the time on at which the probe would have been due."""
        connection = connect()
        endpoint = table.register(connection)
        table.write(connection, endpoint, count=8)
        first, second, *others = claim(database)
        assert changes(end(database, *others, status=500)) == ["opened"]
        table.let_pass(connection, seconds=10)
        assert changes(end(database, first, status=500)) == []
        assert table.state(connection, endpoint).resumes_in_seconds == pytest.approx(20, abs=2)
        assert changes(end(database, second)) == ["closed"]
        assert not table.state(connection, endpoint).is_open
        [waiting] = table.write(connection, endpoint)
        assert (claim(database), probe(database)) == ([], [])
        table.let_pass(connection, seconds=20)
        assert waiting in [delivery.event_id for delivery in claim(database)]

    def test_a_delivery_that_fails_for_itself_holds_nobody_up(self, connect: Connect, database: Database) -> None:
        """The one that the receiver chokes on waits for its own time, so the next probe is another's, and closes it."""
        connection = connect()
        endpoint = self.open(connection, database, count=5)
        table.let_pass(connection, seconds=40)
        [poison] = probe(database)
        assert changes(end(database, poison, status=500)) == ["reopened"]
        table.write(connection, endpoint)
        table.let_pass(connection, seconds=40)
        [next_one] = probe(database)
        assert next_one.event_id != poison.event_id
        assert changes(end(database, next_one)) == ["closed"]


def quick(status: int | None) -> dict[str, float]:
    """A pause that is over in a second, where an answer makes one."""
    return {"retry_after_seconds": 1.0} if status in (429, 503) else {}


class TestPauses:
    """A receiver that asks for time gets it, and loses nothing."""

    @pytest.mark.parametrize("status", [429, 503])
    def test_the_endpoint_is_left_alone_for_as_long_as_it_asks(
        self, status: int, connect: Connect, database: Database
    ) -> None:
        """All of its deliveries wait, the one that was refused is held nothing against, and then all go."""
        connection = connect()
        endpoint = table.register(connection)
        table.write(connection, endpoint, count=3)
        first, *others = claim(database, share=2)
        assert changes(end(database, first, status=status, retry_after_seconds=120.0)) == ["paused"]
        end(database, *others)
        assert claim(database) == []
        assert {row.failures for row in table.rows(connection)} == {0}
        table.let_pass(connection, seconds=118)
        assert claim(database) == []
        table.let_pass(connection, seconds=2)
        assert len(claim(database)) == 2

    def test_a_receiver_that_asks_for_time_again_and_again_is_probed(
        self, connect: Connect, database: Database
    ) -> None:
        """After five such answers in a row one delivery at a time asks, and not before the receiver wants it to."""
        connection = connect()
        endpoint = table.register(connection)
        table.write(connection, endpoint, count=3)
        for _ in range(4):
            [claimed] = claim(database, share=1)
            assert changes(end(database, claimed, status=503, retry_after_seconds=1.0)) == ["paused"]
            table.let_pass(connection, seconds=1)
        [claimed] = claim(database, share=1)
        assert changes(end(database, claimed, status=503, retry_after_seconds=500.0)) == ["opened", "paused"]
        resumes = table.state(connection, endpoint).resumes_in_seconds
        assert resumes == pytest.approx(500, abs=5)

    @pytest.mark.parametrize("late", [[503], [500] * 5, [200], [500] * 4 + [200]], ids=str)
    def test_what_was_under_way_cuts_no_pause_short(
        self, late: list[int], connect: Connect, database: Database
    ) -> None:
        """A receiver that asks for an hour gets it, whatever it has answered to others that it had already: that it is
        busy for a minute, failures that open the breaker, or even that it has taken one."""
        connection = connect()
        endpoint = table.register(connection)
        table.write(connection, endpoint, count=8)
        first, *others = claim(database)
        assert changes(end(database, first, status=429, retry_after_seconds=float(HOURS))) == ["paused"]
        for delivery, status in zip(others, late, strict=False):
            end(database, delivery, status=status)
        assert table.state(connection, endpoint).resumes_in_seconds == pytest.approx(HOURS, abs=5)
        assert (claim(database), probe(database)) == ([], [])

    def test_what_was_a_probe_before_the_owner_enabled_cuts_no_pause_short(
        self, connect: Connect, database: Database
    ) -> None:
        """Its lease is over by then: what holds the endpoint is what its receiver has asked for."""
        connection = connect()
        endpoint = table.register(connection)
        table.write(connection, endpoint, count=7)
        end(database, *claim(database, share=5), status=500)
        table.let_pass(connection, seconds=30)
        [probed] = probe(database)
        connection.execute(sql.ENABLE_ENDPOINT, {"endpoint_id": endpoint, "principal": "alice"})
        [claimed] = claim(database, share=1)
        assert changes(end(database, claimed, status=429, retry_after_seconds=float(HOURS))) == ["paused"]
        assert changes(end(database, probed, status=500)) == []
        assert table.state(connection, endpoint).resumes_in_seconds == pytest.approx(HOURS, abs=5)

    def test_gone_disables_and_keeps(self, connect: Connect, database: Database) -> None:
        """410: nothing goes there any more, and nothing is lost: enabled again, all of it is sent."""
        connection = connect()
        endpoint = table.register(connection)
        table.write(connection, endpoint, count=3)
        first, *others = claim(database, share=2)
        assert changes(end(database, first, status=410)) == ["disabled"]
        assert changes(end(database, *others, status=410)) == []
        assert table.state(connection, endpoint).disabled_reason == "gone"
        table.write(connection, endpoint)
        table.let_pass(connection, seconds=100 * HOURS)
        assert (claim(database), probe(database)) == ([], [])
        assert {row.failures for row in table.rows(connection)} == {0}
        connection.execute(sql.ENABLE_ENDPOINT, {"endpoint_id": endpoint, "principal": "alice"})
        assert len(claim(database)) == 4

    def test_an_owners_disabling_stays_the_owners(self, connect: Connect, database: Database) -> None:
        """A late 410 does not change the reason."""
        connection = connect()
        endpoint = table.register(connection)
        table.write(connection, endpoint)
        claimed = claim_one(database)
        connection.execute(sql.DISABLE_ENDPOINT, {"endpoint_id": endpoint, "principal": "alice"})
        assert changes(end(database, claimed, status=410)) == []
        assert table.state(connection, endpoint).disabled_reason == "owner"


class TestAbandon:
    """Endpoints that are there no more."""

    @pytest.mark.parametrize(
        "gone", ["UPDATE webhook_endpoints SET deleted_at = now()", "DELETE FROM webhook_endpoints"]
    )
    def test_what_is_queued_for_a_deleted_endpoint_fails_with_its_reason(
        self, gone: str, connect: Connect, database: Database
    ) -> None:
        """Marked as deleted by its owner or removed by an operator: its rows end, bit by bit, and others' go on."""
        connection = connect()
        endpoint = table.register(connection)
        table.write(connection, endpoint, count=5)
        connection.execute(gone)
        other = table.register(connection)
        table.write(connection, other)
        assert [deliveries.abandon(database, limit=3) for _ in range(3)] == [3, 2, 0]
        found = {(row.status, row.last_error) for row in table.rows(connection, endpoint)}
        assert found == {("FAILED", "The endpoint was deleted.")}
        assert claim_one(database).endpoint_id == other

    def test_what_is_under_way_is_left_to_its_dispatcher(self, connect: Connect, database: Database) -> None:
        """Its result is still written down; when the dispatcher has died, the row is given up with its lease."""
        connection = connect()
        endpoint = table.register(connection)
        table.write(connection, endpoint, count=2)
        one, two = claim(database)
        connection.execute("UPDATE webhook_endpoints SET deleted_at = now()")
        assert deliveries.abandon(database, limit=10) == 0
        assert end(database, one) == Completion()
        table.let_pass(connection, seconds=LEASE_SECONDS)
        assert deliveries.abandon(database, limit=10) == 1
        statuses = {row.event_id: row.status for row in table.rows(connection)}
        assert statuses == {one.event_id: "SENT", two.event_id: "FAILED"}


class TestPurge:
    """What is removed in the end, and what never is."""

    DAYS = 14

    def purge(self, database: Database) -> Counter[str]:
        return maintenance.run(
            database,
            outbox_retention_days=self.DAYS,
            processed_events_retention_days=60,
            remaining_seconds=lambda: 600.0,
        ).counts

    def settle(self, connection: table.Connection, status: str, *, days: float) -> UUID:
        """Writes a delivery that was settled so many days ago, with an attempt, to an endpoint of its own."""
        endpoint = table.register(connection)
        table.write(connection, endpoint)
        connection.execute(
            """
            UPDATE outbox_deliveries
            SET status = %(status)s, created_at = now() - make_interval(secs => %(age)s),
                sent_at = CASE WHEN %(status)s = 'SENT' THEN now() - make_interval(secs => %(age)s) END,
                failed_at = CASE WHEN %(status)s = 'FAILED' THEN now() - make_interval(secs => %(age)s) END
            WHERE endpoint_id = %(endpoint)s
            """,
            {"status": status, "age": days * 24 * HOURS, "endpoint": endpoint},
        )
        connection.execute(
            "INSERT INTO delivery_attempts (endpoint_id, event_id, attempt, duration_ms)"
            " SELECT endpoint_id, event_id, 1, 5 FROM outbox_deliveries WHERE endpoint_id = %s",
            [endpoint],
        )
        return endpoint

    def test_what_was_sent_goes_after_its_retention_and_nothing_else_does(
        self, connect: Connect, database: Database
    ) -> None:
        """With its attempts. What waits, or was given up, is kept however old it is."""
        connection = connect()
        self.settle(connection, "SENT", days=self.DAYS + 0.01)
        kept = {self.settle(connection, "SENT", days=self.DAYS - 0.01)}
        kept |= {self.settle(connection, status, days=1000) for status in ("PENDING", "CLAIMED", "RETRY", "FAILED")}
        assert self.purge(database)["deliveries"] == 1
        assert {row.endpoint_id for row in table.rows(connection)} == kept
        left = connection.execute("SELECT endpoint_id FROM delivery_attempts").fetchall()
        assert {endpoint for (endpoint,) in left} == kept
        assert connection.execute("SELECT count(*) FROM webhook_endpoints").fetchone() == (6,)

    def test_a_deleted_endpoint_goes_with_all_that_is_left_of_it(
        self, connect: Connect, database: Database, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """After the retention, batch by batch; one that was deleted since, or not at all, stays."""
        monkeypatch.setattr(maintenance, "BATCH", 3)
        connection = connect()
        old = self.settle(connection, "FAILED", days=20)
        table.write(connection, old, count=10)
        young, alive = self.settle(connection, "FAILED", days=20), self.settle(connection, "FAILED", days=20)
        deleted = "UPDATE webhook_endpoints SET deleted_at = now() - make_interval(days => %s) WHERE id = %s"
        connection.execute(deleted, [self.DAYS + 1, old])
        connection.execute(deleted, [self.DAYS - 1, young])
        for _ in range(3):
            self.purge(database)
        assert {row.endpoint_id for row in table.rows(connection)} == {young, alive}
        endpoints = connection.execute("SELECT id FROM webhook_endpoints").fetchall()
        assert {endpoint for (endpoint,) in endpoints} == {young, alive}

    def test_what_is_sent_again_meanwhile_is_kept(self, connect: Connect, database: Database) -> None:
        """The purge waits for nobody, and looks again at what it locks."""
        connection = connect()
        endpoint = self.settle(connection, "SENT", days=100)
        with connection.transaction():
            [event_id] = [row.event_id for row in table.rows(connection)]
            connection.execute(sql.RESEND_DELIVERY, {"endpoint_id": endpoint, "event_id": event_id})
            assert self.purge(database)["deliveries"] == 0
        assert self.purge(database)["deliveries"] == 0
        assert table.row(connection, endpoint).status == "PENDING"


class TestMeasure:
    """What the monitor is told."""

    def test_without_deliveries_there_is_no_age(self, database: Database) -> None:
        """Zero is measured, since a metric that is missing is an alarm."""
        assert deliveries.measure(database).oldest_age_seconds == 0

    def test_the_age_is_that_of_the_delivery_that_has_been_due_longest(
        self, connect: Connect, database: Database
    ) -> None:
        """Of all endpoints; a delivery that waits for its next attempt, or was settled, has none."""
        connection = connect()
        endpoint, other = table.register(connection), table.register(connection)
        table.write(connection, endpoint, count=2)
        table.write(connection, other, count=3)
        end(database, *claim(database, share=1), status=500)
        connection.execute(
            """
            UPDATE outbox_deliveries SET next_attempt_at = now() - interval '2 hours'
            WHERE event_id = (
                SELECT event_id FROM outbox_deliveries WHERE status = 'PENDING' ORDER BY event_id DESC LIMIT 1
            )
            """
        )
        assert deliveries.measure(database).oldest_age_seconds == pytest.approx(2 * HOURS, abs=10)

    @pytest.mark.parametrize(
        "held",
        [
            "disabled_at = now(), disabled_reason = 'owner'",
            "deleted_at = now()",
            "resumes_at = now() + interval '1 minute'",
            "opened_at = now(), resumes_at = now() - interval '1 minute'",
        ],
        ids=["disabled", "deleted", "paused", "open"],
    )
    def test_what_waits_for_the_receiver_has_no_age(self, held: str, connect: Connect, database: Database) -> None:
        """It is no fault of ours, and nobody is woken up for it."""
        connection = connect()
        table.write(connection, table.register(connection))
        table.let_pass(connection, seconds=HOURS)
        assert deliveries.measure(database).oldest_age_seconds > HOURS - 1
        change = psycopg.sql.SQL("UPDATE webhook_endpoints SET {}")
        connection.execute(change.format(psycopg.sql.SQL(held)))
        assert deliveries.measure(database).oldest_age_seconds == 0

    def test_endpoints_are_lost_while_nobody_takes_anything(self, connect: Connect, database: Database) -> None:
        """Those whose breaker has opened since the last delivery that any receiver took, and that their owners want."""
        connection = connect()
        gone_before, lost, disabled, alive = (table.register(connection) for _ in range(4))
        assert deliveries.measure(database).lost_endpoints == 0
        for endpoint in (gone_before, lost, disabled):
            table.write(connection, endpoint, count=5)
        self.open(database, connection, gone_before)
        assert deliveries.measure(database).lost_endpoints == 1
        table.write(connection, alive)
        end(database, *claim(database, limit=1, busy={lost: 8, disabled: 8}))
        assert deliveries.measure(database).lost_endpoints == 0
        for endpoint in (lost, disabled):
            self.open(database, connection, endpoint)
        assert deliveries.measure(database).lost_endpoints == 2
        connection.execute(sql.DISABLE_ENDPOINT, {"endpoint_id": disabled, "principal": "alice"})
        assert deliveries.measure(database).lost_endpoints == 1

    def open(self, database: Database, connection: table.Connection, endpoint: UUID) -> None:
        """Lets the endpoint's five deliveries fail."""
        others = {one.endpoint_id: 8 for one in table.rows(connection) if one.endpoint_id != endpoint}
        end(database, *claim(database, busy=others), status=None)
        assert table.state(connection, endpoint).is_open

    def test_an_endpoint_that_is_enabled_begins_anew(self, connect: Connect, database: Database) -> None:
        """What was held for days is not days late."""
        connection = connect()
        endpoint = table.register(connection)
        table.write(connection, endpoint)
        connection.execute(sql.DISABLE_ENDPOINT, {"endpoint_id": endpoint, "principal": "alice"})
        table.let_pass(connection, seconds=100 * HOURS)
        connection.execute(sql.ENABLE_ENDPOINT, {"endpoint_id": endpoint, "principal": "alice"})
        assert deliveries.measure(database).oldest_age_seconds < 10


@given(answers=st.lists(st.sampled_from([200, 204, 301, 400, 410, 429, 500, 503, None]), max_size=25))
@settings(max_examples=60, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_no_answers_in_any_order_lose_a_delivery(
    connect: Connect, database: Database, answers: list[int | None]
) -> None:
    """Whatever a receiver answers, time after time, its delivery is sent exactly when it says so, given up after eight
    refusals and no sooner, and otherwise still on its way: at once, after a wait, or once the endpoint is enabled."""
    connection = connect()
    connection.execute("DELETE FROM webhook_endpoints; DELETE FROM outbox_deliveries")
    endpoint = table.register(connection)
    table.write(connection, endpoint)
    refused = in_a_row = 0
    for attempt, answer in enumerate(answers, start=1):
        claimed = [*claim(database), *probe(database)]
        assert len(claimed) == 1, "it is on its way"
        assert claimed[0].attempts == attempt
        end(database, *claimed, status=answer)
        row, state = table.row(connection, endpoint), table.state(connection, endpoint)
        is_sent = answer is not None and 200 <= answer < 300
        refused += not is_sent and answer not in (410, 429, 503)
        in_a_row = 0 if is_sent else in_a_row + 1
        expected = "SENT" if is_sent else "FAILED" if refused == MAX_FAILURES else "RETRY"
        assert (row.status, row.failures) == (expected, refused)
        assert (state.failures_in_a_row, state.is_open) == (in_a_row, in_a_row >= 5)
        if expected != "RETRY":
            break
        if answer == 410:
            table.let_pass(connection, seconds=100 * HOURS)
            assert [*claim(database), *probe(database)] == []
            connection.execute(sql.ENABLE_ENDPOINT, {"endpoint_id": endpoint, "principal": "alice"})
            in_a_row = 0
        # Whatever makes it wait ends: its own pause, its endpoint's, or the time before a probe.
        table.let_pass(connection, seconds=max(row.due_in_seconds, state.resumes_in_seconds or 0) + 0.1)


@pytest.mark.parametrize("hours_off", [-2, 2])
def test_the_functions_own_clock_decides_nothing(
    hours_off: int, connect: Connect, database: Database, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Leases, delays and pauses are the database's, whatever time the function takes it to be."""
    real = time.time
    monkeypatch.setattr(time, "time", lambda: real() + hours_off * HOURS)
    connection = connect()
    endpoint = table.register(connection)
    table.write(connection, endpoint)
    end(database, claim_one(database), status=500)
    assert 26 <= table.row(connection, endpoint).due_in_seconds <= 33
    table.let_pass(connection, seconds=33)
    claimed = claim_one(database)
    assert claim(database) == []
    end(database, claimed)
    assert deliveries.measure(database).oldest_age_seconds == 0


def test_a_server_that_falls_silent_is_given_up(database_url: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A dispatcher does not wait for a server that is gone."""
    monkeypatch.setattr("charging.database.SILENCE_SECONDS", 2.5)
    with Wire(database_url) as wire, deployment.database(wire.url) as database:
        claim(database)
        wire.judge = silent([Sender.SERVER])
        with pytest.raises(errors.ConnectionLost):
            claim(database)
