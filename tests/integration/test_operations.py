"""What operators do to a real outbox, beside relays and other operators that are at work on it."""

import json
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from datetime import timedelta
from itertools import pairwise
from typing import Any
from uuid import UUID

import pytest
from psycopg import sql as composing

from charging import answers, errors, instructions, operations, outbox, sql
from charging.database import Database
from charging.outbox import ClaimedEvent, Completion
from tests.conftest import Connect
from tests.support import deployment
from tests.support import outbox as table
from tests.support.wire import Message, Sender, Verdict, Wire

PAST = "2026-01-31T12:00:00Z"
SECONDS = 20.0


@pytest.fixture
def database(database_url: str) -> Iterator[Database]:
    """The operations function's connection."""
    with deployment.database(database_url) as opened:
        yield opened


@pytest.fixture
def relays(database_url: str) -> Iterator[Database]:
    """A relay's connection."""
    with deployment.database(database_url) as opened:
        yield opened


def ask(database: Database, command: str, **members: Any) -> dict[str, Any]:
    """The answer to a document, which is JSON and no refusal."""
    answer = answers.answer(database, {"command": command, "operator": "ann", **members})
    assert "violations" not in answer, answer
    parsed: dict[str, Any] = json.loads(json.dumps(answer, allow_nan=False))
    return parsed


def apply(database: Database, command: str, **members: Any) -> dict[str, Any]:
    return ask(database, command, apply=True, reason="as agreed", **members)


def shown(answer: dict[str, Any]) -> set[UUID]:
    return {UUID(event["id"]) for event in answer["events"]}


def texts(*ids: UUID) -> list[str]:
    return [str(event_id) for event_id in ids]


def settle(connection: table.Connection, column: str, *ids: UUID, at: str = "now") -> None:
    """Parks or publishes rows, as at that time."""
    statement = (
        "UPDATE outbox SET {} = %s::timestamptz, attempts = 3, refusals = 2, last_error = 'Odd: no' WHERE id = ANY (%s)"
    )
    connection.execute(composing.SQL(statement).format(composing.Identifier(column)), [at, list(ids)])


def parked(connection: table.Connection, *, count: int = 1) -> list[UUID]:
    ids = table.write(connection, count=count)
    settle(connection, "failed_at", *ids)
    return ids


def published(connection: table.Connection, *, count: int = 1) -> list[UUID]:
    ids = table.write(connection, count=count)
    settle(connection, "published_at", *ids)
    connection.execute("UPDATE outbox SET last_error = NULL WHERE id = ANY (%s)", [ids])
    return ids


def audit(connection: table.Connection) -> list[tuple[str, str, str, dict[str, Any], set[UUID]]]:
    """Who did what, why, what was asked for and what was changed, in the order of the doing."""
    rows = connection.execute(
        "SELECT operator, action, reason, selection, event_ids FROM operator_actions ORDER BY taken_at"
    ).fetchall()
    return [(operator, action, reason, selection, set(ids)) for operator, action, reason, selection, ids in rows]


def due(connection: table.Connection, *ids: UUID) -> list[float]:
    """When the rows are due, in seconds after the first of them, in the order of the ids."""
    rows = dict[UUID, float](
        connection.execute(
            """
            SELECT id, EXTRACT(EPOCH FROM next_attempt_at - min(next_attempt_at) OVER ())::float8
            FROM outbox
            WHERE id = ANY (%s)
            """,
            [list(ids)],
        ).fetchall()
    )
    return [rows[event_id] for event_id in ids]


def claim(database: Database) -> dict[UUID, ClaimedEvent]:
    """A relay's claim."""
    return {event.id: event for event in outbox.claim(database, limit=100, lease_seconds=outbox.LEASE_SECONDS)}


def ways(connection: table.Connection, statement: bytes, parameters: dict[str, Any]) -> set[str]:
    """The indexes by which the outbox is read; its own name where it is read from end to end."""
    explained = connection.execute(b"EXPLAIN (FORMAT JSON) " + statement, parameters, prepare=False).fetchone()
    assert explained is not None

    def nodes(node: dict[str, Any]) -> Iterator[str]:
        if node["Node Type"] == "Seq Scan":
            yield node["Relation Name"]
        elif "Index Name" in node:
            yield node["Index Name"]
        for inner in node.get("Plans", []):
            yield from nodes(inner)

    return {way for way in nodes(explained[0][0]["Plan"]) if way.startswith("outbox")}


class TestSelection:
    """Which events are meant."""

    @pytest.fixture(autouse=True)
    def events(self, connect: Connect) -> dict[str, UUID]:
        """One event in each state, of two types."""
        connection = connect()
        # Their ids have another order than they come into their states.
        other, sent, failed, waiting = sorted(table.write(connection, count=4))
        settle(connection, "failed_at", failed, at="2026-01-31 11:00Z")
        settle(connection, "published_at", sent, at="2026-01-31 13:00Z")
        connection.execute("UPDATE outbox SET created_at = '2026-01-31 10:00Z'")
        connection.execute("UPDATE outbox SET event_type = 'ChargeRefunded', created_at = now() WHERE id = %s", [other])
        return {"waiting": waiting, "parked": failed, "published": sent, "other": other}

    def test_a_list_shows_what_waits_and_what_is_parked(self, database: Database, events: dict[str, UUID]) -> None:
        """What came into its state first comes first; published events are shown when they are asked for."""
        answer = ask(database, "list")
        assert [UUID(event["id"]) for event in answer["events"]] == [
            events["waiting"], events["parked"], events["other"]
        ]  # fmt: skip
        assert answer["counts"] == [
            {"state": "waiting", "type": "ChargeCreated", "number": 1},
            {"state": "waiting", "type": "ChargeRefunded", "number": 1},
            {"state": "parked", "type": "ChargeCreated", "number": 1},
        ]
        assert answer["summary"] == "Waiting: 2. Parked: 1."
        assert shown(ask(database, "list", limit=1)) == {events["waiting"]}
        for state in ("waiting", "parked", "published"):
            assert {event["state"] for event in ask(database, "list", state=state)["events"]} == {state}

    def test_it_is_by_id_by_type_and_by_aggregate(
        self, database: Database, events: dict[str, UUID], connect: Connect
    ) -> None:
        """Conditions are met together."""
        [(aggregate,)] = (
            connect().execute("SELECT aggregate_id FROM outbox WHERE id = %s", [events["parked"]]).fetchall()
        )
        ids = texts(events["parked"], events["other"])
        assert shown(ask(database, "list", ids=ids)) == {events["parked"], events["other"]}
        assert shown(ask(database, "list", type="ChargeRefunded")) == {events["other"]}
        assert shown(ask(database, "list", aggregate=str(aggregate))) == {events["parked"]}
        assert shown(ask(database, "list", ids=ids, type="ChargeRefunded")) == {events["other"]}
        assert shown(ask(database, "list", aggregate=str(aggregate), type="ChargeRefunded")) == set()
        assert shown(ask(database, "list", type="Nothing")) == set()

    def test_the_window_is_of_the_state(self, database: Database, events: dict[str, UUID]) -> None:
        """An event counts from when it was made, parked or published; the window has its beginning and not its end."""
        every = {"command": "inspect"}
        assert shown(ask(database, **every, until="2026-01-31T10:30:00Z")) == {events["waiting"]}
        assert shown(ask(database, **every, since="2026-01-31T10:30:00Z", until=PAST)) == {events["parked"]}
        assert shown(ask(database, **every, since="2026-01-31T11:00:00Z", until=PAST)) == {events["parked"]}
        assert shown(ask(database, **every, since="2026-01-31T10:00:00Z", until="2026-01-31T11:00:00Z")) == {
            events["waiting"]
        }
        assert shown(ask(database, **every, since=PAST, until="2026-02-01T00:00:00+01:00")) == {events["published"]}
        assert shown(ask(database, **every, since="1h")) == {events["other"]}

    def test_spans_are_taken_from_the_databases_clock(
        self, database: Database, events: dict[str, UUID], connect: Connect, monkeypatch: pytest.MonkeyPatch
    ) -> None:
        """Also where the function's clock is years off; the answer says which instants they came to."""
        monkeypatch.setattr("time.time", lambda: 0.0)
        monkeypatch.setattr("time.time_ns", lambda: 0)
        answer = ask(database, "list", since="2d", until="1h")
        connect().execute("UPDATE outbox SET created_at = now() - interval '1 day' WHERE id = %s", [events["other"]])
        assert shown(ask(database, "list", since="2d", until="1h")) == {events["other"]}
        [(off,)] = (
            connect()
            .execute(
                "SELECT now() - %s::timestamptz - interval '2 days' < interval '1 minute'", [answer["window"]["since"]]
            )
            .fetchall()
        )
        assert off

    def test_a_window_that_is_empty_is_pointed_out(self, database: Database) -> None:
        """An hour before two hours ago is a slip."""
        answer = ask(database, "redrive", since="1h", until="2h")
        assert answer["warnings"] == ["The window is empty: since is not before until."]
        assert answer["events"] == []

    def test_a_list_is_bounded(self, database: Database, connect: Connect, monkeypatch: pytest.MonkeyPatch) -> None:
        """However much there is, as many events are shown as asked for, and counted up to a bound."""
        table.write(connect(), count=50)
        answer = ask(database, "list", limit=5)
        assert len(answer["events"]) == 5
        assert answer["summary"] == "Waiting: 52. Parked: 1."
        monkeypatch.setattr(operations, "COUNTED_EVENTS", 30)
        assert ask(database, "list", state="waiting")["summary"] == "Waiting: 30 or more."

    def test_it_uses_the_indexes_however_long_the_history(self, connect: Connect) -> None:
        """With 50,000 published events kept, no selection but one of all of them reads the table."""
        connection = connect()
        connection.execute(
            """
            INSERT INTO outbox (id, event_type, aggregate_id, payload, published_at, failed_at)
            SELECT
                gen_random_uuid(), 'ChargeCreated', gen_random_uuid(), '{}',
                CASE WHEN n % 100 > 1 THEN now() - n * interval '1 minute' END,
                CASE WHEN n % 100 = 1 THEN now() - n * interval '1 minute' END
            FROM generate_series(1, 50000) AS n
            """
        )
        connection.execute("ANALYZE outbox")
        [(event_id, aggregate_id, now)] = connection.execute(
            "SELECT id, aggregate_id, now() FROM outbox LIMIT 1"
        ).fetchall()
        anything: dict[str, Any] = {
            "ids": None, "aggregate_id": None, "event_type": None, "since": None, "until": now, "limit": 9, "bound": 99
        }  # fmt: skip
        every = ["waiting", "parked", "published"]
        for states, condition, index in (
            (every, {"ids": [event_id]}, "outbox_pkey"),
            (every, {"aggregate_id": aggregate_id}, "outbox_places_are_taken_once"),
            (["waiting"], {"event_type": "ChargeCreated"}, "outbox_due"),
            (["parked"], {"event_type": "ChargeCreated"}, "outbox_failed"),
            (["published"], {"since": now - timedelta(hours=1)}, "outbox_published"),
        ):
            selection = anything | condition | {"states": states}
            assert ways(connection, sql.COUNT_EVENTS, selection) == {index}, (states, condition)
            # It looks each event up, and the later ones of its aggregate.
            looked_up = {"outbox_pkey", "outbox_places_are_taken_once"}
            assert ways(connection, sql.LIST_EVENTS, selection) == {index} | looked_up, (states, condition)

    def test_amid_an_outage_a_named_event_is_found_by_its_name(self, connect: Connect) -> None:
        """With statistics of before, when nothing was due, neither it nor its change reads the whole backlog."""
        connection = connect()
        backlog = """
            INSERT INTO outbox (id, event_type, aggregate_id, payload, published_at, failed_at)
            SELECT gen_random_uuid(), 'ChargeCreated', gen_random_uuid(), '{}', %s::timestamptz, %s::timestamptz
            FROM generate_series(1, 5000)
            """
        connection.execute("DELETE FROM outbox")
        connection.execute(backlog, ["now", None])
        connection.execute("ANALYZE outbox")
        connection.execute(backlog, [None, "now"])
        connection.execute(backlog, [None, None])
        waiting = "SELECT id, aggregate_id, now() FROM outbox WHERE published_at IS NULL LIMIT 50"
        rows = connection.execute(waiting).fetchall()
        ids, aggregate_id, now = [row[0] for row in rows], rows[0][1], rows[0][2]
        selection: dict[str, Any] = {"states": ["waiting"], "event_type": None, "since": None, "until": now, "limit": 9}
        action = {"action_id": ids[0], "operator": "", "reason": "", "selection": "{}", "ids": ids}
        places = "outbox_places_are_taken_once"
        for statement, parameters, indexes in (
            (sql.LIST_EVENTS, selection | {"ids": ids, "aggregate_id": None}, {"outbox_pkey", places}),
            (sql.LIST_EVENTS, selection | {"ids": None, "aggregate_id": aggregate_id}, {"outbox_pkey", places}),
            (sql.PARK_EVENTS, action | {"lease_seconds": 30}, {"outbox_pkey"}),
            (sql.REDRIVE_EVENTS, action | {"state": "parked", "per_second": 50}, {"outbox_pkey"}),
        ):
            assert ways(connection, statement, parameters) == indexes, parameters


class TestLooking:
    """What changes nothing."""

    @pytest.mark.parametrize(
        "document",
        [
            {"command": "list"},
            {"command": "list", "state": "published"},
            {"command": "inspect", "since": "1h"},
            {"command": "redrive", "since": "1h"},
            {"command": "redrive", "since": "1h", "state": "published", "apply": False, "reason": "not yet"},
            {"command": "park", "since": "1h"},
        ],
        ids=lambda document: "-".join(str(value) for value in document.values()),
    )
    def test_it_takes_no_transaction_id_and_no_lock(
        self, document: dict[str, Any], database: Database, connect: Connect
    ) -> None:
        """Nothing is written, no row is locked, and no other operator waits: not even the dry run of a change."""
        connection = connect()
        table.write(connection, count=3)
        parked(connection, count=3)
        published(connection, count=3)
        before = table.rows(connection)
        with database.transaction() as transaction:
            answer = ask(database, **document)
            assert len(answer["events"]) >= 3
            assert transaction.execute("SELECT pg_current_xact_id_if_assigned()").fetchone() == (None,)
            held = "SELECT count(*) FROM pg_locks WHERE pid = pg_backend_pid() AND mode <> 'AccessShareLock'"
            # Its own virtual transaction is the one that every transaction locks.
            assert transaction.execute(held + " AND locktype <> 'virtualxid'").fetchone() == (0,)
        unmoved = [replace(row, due_in_seconds=0) for row in before]
        assert [replace(row, due_in_seconds=0) for row in table.rows(connection)] == unmoved
        assert audit(connection) == []

    def test_an_event_is_shown_in_full(self, database: Database, connect: Connect) -> None:
        """With its payload as it is sent, its times, and what operators did to it, the latest first."""
        connection = connect()
        first, second = parked(connection, count=2)
        apply(database, "redrive", ids=texts(first))
        answers.answer(
            database,
            {"command": "park", "operator": "bob", "reason": "not yet", "apply": True, "ids": texts(first)},
        )
        [event] = ask(database, "inspect", ids=texts(first))["events"]
        [(payload,)] = connection.execute("SELECT payload FROM outbox WHERE id = %s", [first]).fetchall()
        assert event["payload"] == payload
        assert event["payloadBytes"] == len(payload.encode())
        assert (event["state"], event["attempts"], event["sequence"]) == ("parked", 5, 1)
        assert event["lastError"] == "Parked by an operator: not yet"
        assert event["parkedAt"] is not None
        assert event["publishedAt"] is None
        assert [(action["action"], action["operator"], action["reason"]) for action in event["actions"]] == [
            ("park", "bob", "not yet"),
            ("redrive", "ann", "as agreed"),
        ]
        [other] = ask(database, "inspect", ids=texts(second))["events"]
        assert other["actions"] == []

    def test_one_that_is_removed_between_its_two_statements_is_not_shown(
        self, database_url: str, connect: Connect
    ) -> None:
        """The maintenance works while operators look: the others are shown all the same."""
        connection = connect()
        removed, kept = table.write(connection, count=2)

        def remove(message: Message) -> Verdict:
            if message.sender is Sender.CLIENT and b"octet_length" in message.content:
                connection.execute("DELETE FROM outbox WHERE id = %s", [removed])
            return Verdict.PASS

        with Wire(database_url) as wire, deployment.database(wire.url) as database:
            wire.judge = remove
            assert shown(ask(database, "inspect", ids=texts(removed, kept))) == {kept}

    def test_a_payload_beyond_any_bound_is_cut(self, database: Database, connect: Connect) -> None:
        """The answer stays within what a function may answer; the size is the whole one."""
        [event_id] = table.write(connect(), "é" * 200_000)
        [event] = ask(database, "inspect", ids=texts(event_id))["events"]
        assert event["payload"] == "é" * operations.PAYLOAD_CHARACTERS
        assert event["payloadBytes"] == 400_000

    def test_what_a_dry_run_shows_is_what_is_done(self, database: Database, connect: Connect) -> None:
        """Its next document, with a reason, changes the events that it showed, and none that came meanwhile."""
        connection = connect()
        ids = parked(connection, count=3)
        dry = ask(database, "redrive", type="ChargeCreated", since="1h")
        assert shown(dry) == set(ids)
        assert "Would be redriven: 3 parked events, under the same ids, 50 a second, in 1 s." in dry["summary"]
        [late] = parked(connection)
        answer = answers.answer(database, dry["nextDocument"] | {"reason": "as agreed"})
        assert shown(answer) == set(ids)
        assert [row.is_failed for row in table.rows(connection, [*ids, late])] == [False, False, False, True]


class TestRedrive:
    """What is settled is due again."""

    def test_a_parked_event_is_due_again_under_its_id(self, database: Database, connect: Connect) -> None:
        """Same id, same payload; its refusals are forgiven, its attempts are not; the error stays until the next."""
        connection = connect()
        [event_id] = parked(connection)
        content = "SELECT id, event_type, aggregate_id, sequence, payload, created_at FROM outbox"
        before = connection.execute(content).fetchall()
        answer = apply(database, "redrive", ids=texts(event_id))
        assert answer["applied"] is True
        row = table.row(connection, event_id)
        assert (row.is_failed, row.is_published, row.refusals, row.attempts) == (False, False, 0, 4)
        assert row.last_error == "Odd: no"
        assert row.due_in_seconds <= 0
        assert connection.execute(content).fetchall() == before

    def test_a_published_event_is_sent_again_only_when_that_is_said(self, database: Database, connect: Connect) -> None:
        """Without the state nothing published is touched; with it, the answer warns."""
        connection = connect()
        [event_id] = published(connection)
        assert apply(database, "redrive", ids=texts(event_id))["applied"] is False
        assert table.row(connection, event_id).is_published
        answer = apply(database, "redrive", ids=texts(event_id), state="published")
        assert answer["applied"] is True
        assert any("sent before" in warning for warning in answer["warnings"])
        row = table.row(connection, event_id)
        assert (row.is_published, row.attempts) == (False, 4)

    @pytest.mark.parametrize("state", ["waiting", "published"])
    def test_what_is_in_another_state_is_left_alone(self, state: str, database: Database, connect: Connect) -> None:
        """Whoever names the id."""
        connection = connect()
        [event_id] = table.write(connection) if state == "waiting" else published(connection)
        before = table.row(connection, event_id).attempts
        answer = apply(database, "redrive", ids=texts(event_id))
        assert answer["summary"] == "Nothing matches, and nothing was changed."
        assert "Only parked events were looked at" in answer["next"]
        assert table.row(connection, event_id).attempts == before
        assert audit(connection) == []

    def test_it_is_spread_over_time(self, database: Database, connect: Connect) -> None:
        """So many a second: the first now, and each after the one before."""
        connection = connect()
        ids = parked(connection, count=5)
        apply(database, "redrive", type="ChargeCreated", perSecond=2)
        assert sorted(due(connection, *ids)) == pytest.approx([0.0, 0.5, 1.0, 1.5, 2.0])
        assert min(row.due_in_seconds for row in table.rows(connection)) <= 0

    def test_fifty_a_second_is_what_is_meant_by_nothing(self, database: Database, connect: Connect) -> None:
        """A hundred thousand take half an hour, in which the events of the day go on."""
        connection = connect()
        ids = parked(connection, count=100)
        apply(database, "redrive", type="ChargeCreated")
        assert sorted(due(connection, *ids)) == pytest.approx([number / 50 for number in range(100)])

    def test_two_redrives_are_no_faster_than_one(self, database: Database, connect: Connect) -> None:
        """The second begins where the first ends, at its own pace; once that is over, the next begins at once."""
        connection = connect()
        first = parked(connection, count=4)
        apply(database, "redrive", ids=texts(*first), perSecond=1)
        second = parked(connection, count=2)
        apply(database, "redrive", ids=texts(*second), perSecond=4)
        times = due(connection, *first, *second)
        assert sorted(times[:4]) + sorted(times[4:]) == pytest.approx([0, 1, 2, 3, 3.25, 3.5])
        table.let_pass(connection, seconds=10)
        [third] = parked(connection)
        apply(database, "redrive", ids=texts(third))
        assert table.row(connection, third).due_in_seconds <= 0

    def test_a_redrive_that_was_called_off_holds_up_none(self, database: Database, connect: Connect) -> None:
        """Parked again, its events keep nobody waiting."""
        connection = connect()
        first = parked(connection, count=3)
        apply(database, "redrive", ids=texts(*first), perSecond=1)
        apply(database, "park", ids=texts(*first))
        [second] = parked(connection)
        apply(database, "redrive", ids=texts(second))
        assert table.row(connection, second).due_in_seconds <= 0

    def test_the_events_of_an_aggregate_keep_their_order(self, database: Database, connect: Connect) -> None:
        """Whatever the order in which they were made or parked, the one of the lower sequence is due before."""
        connection = connect()
        aggregates = table.write_aggregates(connection, aggregates=3, events=4)
        connection.execute("UPDATE outbox SET failed_at = now() - random() * interval '1 hour'")
        apply(database, "redrive", type="ChargeCreated", perSecond=1)
        for ids in aggregates.values():
            assert all(before < after for before, after in pairwise(due(connection, *ids)))

    def test_it_says_what_comes_out_of_order(self, database: Database, connect: Connect) -> None:
        """A later event of the same aggregate was published meanwhile."""
        connection = connect()
        [[first, second]] = table.write_aggregates(connection, aggregates=1, events=2).values()
        settle(connection, "failed_at", first)
        settle(connection, "published_at", second)
        answer = ask(database, "redrive", ids=texts(first))
        assert [warning for warning in answer["warnings"] if "aggregate" in warning] == [
            "Later events of the same aggregate were published before these: 1 event."
        ]

    def test_it_says_that_the_alarm_will_go_off(self, database: Database, connect: Connect) -> None:
        """An old event makes the outbox look late until it is published."""
        connection = connect()
        old, _ = parked(connection, count=2)
        connection.execute("UPDATE outbox SET created_at = now() - interval '1 day' WHERE id = %s", [old])
        [warning] = ask(database, "redrive", type="ChargeCreated")["warnings"]
        assert warning.startswith("OutboxOldestAge")
        assert warning.endswith("1 event.")

    def test_a_relay_publishes_it_as_any_other(self, database: Database, relays: Database, connect: Connect) -> None:
        """It is claimed when it is due, and its error is forgotten once it is published."""
        connection = connect()
        [event_id] = parked(connection)
        apply(database, "redrive", ids=texts(event_id))
        event = claim(relays)[event_id]
        assert event.attempts == 5
        assert outbox.complete(relays, [Completion(event, "PUBLISHED")]) == 0
        row = table.row(connection, event_id)
        assert (row.is_published, row.last_error) == (True, None)


class TestPark:
    """What waits is held back."""

    def test_a_waiting_event_is_parked_for_a_reason(
        self, database: Database, relays: Database, connect: Connect
    ) -> None:
        """No relay claims it any more; its error says that an operator did it and why."""
        connection = connect()
        event_id, other = table.write(connection, count=2)
        answer = apply(database, "park", ids=texts(event_id))
        assert answer["applied"] is True
        row = table.row(connection, event_id)
        assert (row.is_failed, row.is_published, row.attempts) == (True, False, 1)
        assert row.last_error == "Parked by an operator: as agreed"
        assert claim(relays).keys() == {other}

    @pytest.mark.parametrize("column", ["failed_at", "published_at"])
    def test_what_is_settled_is_left_alone(self, column: str, database: Database, connect: Connect) -> None:
        """Whoever names the id."""
        connection = connect()
        [event_id] = table.write(connection)
        settle(connection, column, event_id)
        assert apply(database, "park", ids=texts(event_id))["applied"] is False
        assert table.row(connection, event_id).last_error == "Odd: no"
        assert audit(connection) == []

    def test_a_relay_that_is_sending_it_cannot_publish_it_any_more(
        self, database: Database, relays: Database, connect: Connect
    ) -> None:
        """Its lease is lost, the event stays parked, and the operator is told that the message may arrive."""
        connection = connect()
        event_id, postponed, fresh = table.write(connection, count=3)
        events = claim(relays)
        outbox.complete(relays, [Completion(events[postponed], "POSTPONED"), Completion(events[fresh], "RETURNED")])
        connection.execute(
            "UPDATE outbox SET next_attempt_at = now() + interval '50 seconds' WHERE id = %s", [postponed]
        )
        answer = apply(database, "park", type="ChargeCreated")
        [warning] = [warning for warning in answer["warnings"] if "relay" in warning]
        assert warning.startswith("The relay may have been sending these at that moment: 1 event.")
        assert outbox.complete(relays, [Completion(events[event_id], "PUBLISHED")]) == 1
        row = table.row(connection, event_id)
        assert (row.is_failed, row.is_published) == (True, False)

    def test_it_says_who_waits_behind_it(self, database: Database, connect: Connect) -> None:
        """A later event of the same aggregate waits too."""
        connection = connect()
        [[first, _]] = table.write_aggregates(connection, aggregates=1, events=2).values()
        answer = ask(database, "park", ids=texts(first))
        assert any("wait behind these: 1 event." in warning for warning in answer["warnings"])


class TestRecord:
    """Who did what."""

    def test_each_change_has_its_row(self, database: Database, connect: Connect) -> None:
        """With what was asked for, its window in instants, and what was changed. Its id is in the answer."""
        connection = connect()
        ids = sorted(parked(connection, count=3))
        done = apply(database, "redrive", type="ChargeCreated", since="1h", limit=2, perSecond=7)
        apply(database, "park", ids=texts(ids[0]))
        assert audit(connection) == [
            (
                "ann",
                "redrive",
                "as agreed",
                {"command": "redrive", "type": "ChargeCreated", "limit": 2, "perSecond": 7, **done["window"]},
                set(ids[:2]),
            ),
            (
                "ann",
                "park",
                "as agreed",
                {"command": "park", "ids": texts(ids[0]), "until": audit(connection)[1][3]["until"]},
                {ids[0]},
            ),
        ]
        [(first,)] = connection.execute("SELECT id FROM operator_actions WHERE action = 'redrive'").fetchall()
        assert done["action"] == str(first)

    @pytest.mark.parametrize("command", ["redrive", "park"])
    def test_no_change_without_its_row(self, command: str, database: Database, connect: Connect) -> None:
        """The server ends the connection when the change is made and its row is not yet: nothing was changed."""
        connection, other = connect(), connect()
        [event_id] = parked(connection) if command == "redrive" else table.write(connection)
        before = table.row(connection, event_id)
        with ThreadPoolExecutor(1) as thread, other.transaction():
            other.execute("LOCK TABLE operator_actions IN EXCLUSIVE MODE")
            change = thread.submit(apply, database, command, ids=texts(event_id))
            waiting = "SELECT pid FROM pg_stat_activity WHERE datname = current_database() AND wait_event_type = 'Lock'"
            while not (found := connection.execute(waiting).fetchall()):
                assert not change.done()
            connection.execute("SELECT pg_terminate_backend(%s, 5000)", found[0])
            with pytest.raises(errors.ConnectionLost):
                change.result(SECONDS)
        after = table.row(connection, event_id)
        assert (after.attempts, after.is_failed) == (before.attempts, before.is_failed)
        assert audit(connection) == []


class TestBounds:
    """No invocation does more than it can."""

    def test_it_goes_on_where_it_stopped(self, database: Database, connect: Connect) -> None:
        """A thousand at a time unless told otherwise; the next document does the next ones, until none is left."""
        connection = connect()
        connection.execute(
            """
            INSERT INTO outbox (id, event_type, aggregate_id, payload, failed_at)
            SELECT gen_random_uuid(), 'ChargeCreated', gen_random_uuid(), '{}', now() FROM generate_series(1, 2500)
            """
        )
        answer = apply(database, "redrive", type="ChargeCreated", perSecond=1000)
        assert answer["next"] == "More match: 1500. To go on with them, do it again."
        assert len(answer["events"]) == answers.SHOWN_EVENTS
        while "nextDocument" in answer:
            answer = answers.answer(database, answer["nextDocument"])
        assert [len(ids) for *_, ids in audit(connection)] == [1000, 1000, 500]
        assert len(set().union(*(ids for *_, ids in audit(connection)))) == 2500
        assert connection.execute("SELECT count(DISTINCT next_attempt_at) FROM outbox").fetchone() == (2500,)

    def test_what_is_published_meanwhile_is_not_sent_once_more(
        self, database: Database, relays: Database, connect: Connect
    ) -> None:
        """Going on with published events comes to an end, though each is published again: the window is fixed."""
        connection = connect()
        ids = published(connection, count=6)
        answer = apply(database, "redrive", type="ChargeCreated", state="published", limit=2)
        while "nextDocument" in answer:
            table.let_pass(connection, seconds=10)
            outbox.complete(relays, [Completion(event, "PUBLISHED") for event in claim(relays).values()])
            answer = answers.answer(database, answer["nextDocument"])
        assert Counter(event_id for *_, some in audit(connection) for event_id in some) == Counter(ids)

    def test_the_most_that_can_be_asked_for_is_done_in_time(self, database: Database, connect: Connect) -> None:
        """Ten thousand events with charges' payloads, redriven and parked, within the server's five seconds each."""
        connection = connect()
        connection.execute(
            """
            INSERT INTO outbox (id, event_type, aggregate_id, payload, failed_at)
            SELECT gen_random_uuid(), 'ChargeCreated', gen_random_uuid(), repeat('x', 500), now()
            FROM generate_series(1, 10000)
            """
        )
        assert apply(database, "redrive", type="ChargeCreated", limit=10_000)["counts"] == []
        assert apply(database, "park", type="ChargeCreated", limit=10_000)["counts"] == []
        assert [len(ids) for *_, ids in audit(connection)] == [10_000, 10_000]


class TestRaces:
    """Relays and operators on the same rows."""

    def test_a_row_that_a_relay_is_claiming_is_left_alone(
        self, database: Database, relays: Database, connect: Connect
    ) -> None:
        """It is not waited for; the answer counts it, and the next run parks it, lease or no lease."""
        connection = connect()
        first, second = table.write(connection, count=2)
        with relays.transaction() as claiming:
            claiming.execute(sql.CLAIM_EVENTS, {"limit": 1, "lease_seconds": outbox.LEASE_SECONDS, "since": None})
            answer = apply(database, "park", type="ChargeCreated")
            assert "Left alone, since somebody else was changing them: 1 event." in answer["summary"]
            assert answer["counts"] == [{"state": "waiting", "type": "ChargeCreated", "number": 1}]
        assert "nextDocument" in answer
        assert answers.answer(database, answer["nextDocument"])["applied"] is True
        assert [row.is_failed for row in table.rows(connection, [first, second])] == [True, True]

    def test_a_row_that_an_operator_is_parking_is_not_claimed(
        self, database: Database, relays: Database, connect: Connect
    ) -> None:
        """Nor waited for: the relay goes on with the others."""
        first, second = table.write(connect(), count=2)
        with database.transaction():
            apply(database, "park", ids=texts(first))
            assert claim(relays).keys() == {second}
        assert claim(relays) == {}

    def test_a_redriven_event_is_in_a_running_relays_next_claim(
        self, database: Database, relays: Database, connect: Connect
    ) -> None:
        """However long ago it was parked, and however far the relay has got since."""
        connection = connect()
        [event_id] = parked(connection)
        connection.execute("UPDATE outbox SET next_attempt_at = now() - interval '1 day'")
        claims = outbox.Claims(relays)
        table.write(connection)
        assert len(claims.claim(100)) == 1
        apply(database, "redrive", ids=texts(event_id))
        assert [event.id for event in claims.claim(100)] == [event_id]

    def test_a_redriven_event_is_not_settled_by_an_older_completion(
        self, database: Database, relays: Database, connect: Connect
    ) -> None:
        """A completion that a relay sends twice marks nothing that was redriven in between: it has to be sent."""
        connection = connect()
        [event_id] = table.write(connection)
        event = claim(relays)[event_id]
        assert outbox.complete(relays, [Completion(event, "PUBLISHED")]) == 0
        apply(database, "redrive", ids=texts(event_id), state="published")
        assert outbox.complete(relays, [Completion(event, "PUBLISHED")]) == 1
        assert not table.row(connection, event_id).is_published
        assert claim(relays).keys() == {event_id}

    def test_a_row_that_leaves_its_state_in_between_is_left_alone(
        self, database: Database, relays: Database, connect: Connect
    ) -> None:
        """A completion that is being committed is not overwritten: the event is published, not parked."""
        connection = connect()
        event_id, other = table.write(connection, count=2)
        event = claim(relays)[event_id]
        with relays.transaction():
            outbox.complete(relays, [Completion(event, "PUBLISHED")])
            answer = apply(database, "park", type="ChargeCreated")
        assert "Left alone" in answer["summary"]
        rows = table.rows(connection, [event_id, other])
        assert [(row.is_published, row.is_failed) for row in rows] == [(True, False), (False, True)]

    @pytest.mark.parametrize("column", ["published_at", "failed_at", None])
    def test_a_change_asks_for_the_state_once_more(self, column: str | None, connect: Connect) -> None:
        """An event that was selected and is in another state by the time of the change is not changed."""
        connection = connect()
        [event_id] = table.write(connection)
        if column is not None:
            settle(connection, column, event_id)
        before = table.row(connection, event_id)
        action = {"action_id": event_id, "operator": "ann", "reason": "x", "selection": "{}", "ids": [event_id]}
        changes: dict[str | None, tuple[bytes, dict[str, Any]]] = {
            None: (sql.PARK_EVENTS, {"lease_seconds": 30}),
            "failed_at": (sql.REDRIVE_EVENTS, {"state": "parked", "per_second": 50}),
            "published_at": (sql.REDRIVE_EVENTS, {"state": "published", "per_second": 50}),
        }
        for of, (statement, more) in changes.items():
            if of != column:
                assert connection.execute(statement, action | more).fetchall() == []
        assert table.row(connection, event_id).attempts == before.attempts
        assert audit(connection) == []

    def test_redrives_follow_one_another_in_the_order_of_their_turns(
        self, database: Database, relays: Database, connect: Connect
    ) -> None:
        """Also where the transaction of the later one began first."""
        connection = connect()
        first, second, third = (parked(connection, count=3) for _ in range(3))
        with database.transaction() as begun:
            begun.execute("SELECT 1")
            apply(relays, "redrive", ids=texts(*first), perSecond=1)
            apply(database, "redrive", ids=texts(*second), perSecond=1)
        apply(relays, "redrive", ids=texts(*third), perSecond=1)
        times = due(connection, *first, *second, *third)
        assert [round(time) for n in (0, 3, 6) for time in sorted(times[n : n + 3])] == list(range(9))

    def test_two_operators_at_once_change_each_event_once(
        self, database: Database, relays: Database, connect: Connect
    ) -> None:
        """Started together on the same 300 events, they share them, and their redrives follow one another."""
        connection = connect()
        ids = parked(connection, count=300)
        start = threading.Barrier(2)

        def redrive(by: Database) -> None:
            start.wait(SECONDS)
            for _ in range(3):
                apply(by, "redrive", type="ChargeCreated", limit=100, perSecond=100)

        with ThreadPoolExecutor(2) as operators:
            list(operators.map(redrive, [database, relays]))
        changed = [some for *_, some in audit(connection)]
        assert [len(some) for some in changed] == [100, 100, 100]
        assert set().union(*changed) == set(ids)
        assert {row.attempts for row in table.rows(connection)} == {4}
        assert sorted(due(connection, *ids)) == pytest.approx([number / 100 for number in range(300)])

    def test_an_operator_waits_for_another_no_longer_than_a_lock_is_waited_for(
        self, database: Database, connect: Connect
    ) -> None:
        """Then nothing was changed, and the invocation fails."""
        connection, other = connect(), connect()
        [event_id] = parked(connection)
        with other.transaction():
            other.execute(sql.AWAIT_OPERATORS)
            with pytest.raises(errors.Contended):
                apply(database, "redrive", ids=texts(event_id))
        assert table.row(connection, event_id).is_failed
        assert apply(database, "redrive", ids=texts(event_id))["applied"] is True

    def test_relays_and_operators_in_a_crowd_lose_nothing(self, connect: Connect, database_url: str) -> None:
        """Two relays publish and fail events while two operators park, and redrive what is parked and published.

        Each change of a row was one claim or stands in one record: `attempts` counts exactly these. And in the end
        every event can be published.
        """
        connection = connect()
        ids = table.write(connection, count=60)
        claims: Counter[UUID] = Counter()
        counting = threading.Lock()
        start = threading.Barrier(4)

        def send(seed: int) -> None:
            with deployment.database(database_url) as by:
                start.wait(SECONDS)
                for turn in range(60):
                    events = outbox.claim(by, limit=10, lease_seconds=outbox.LEASE_SECONDS)
                    with counting:
                        claims.update(event.id for event in events)
                    results: list[outbox.Result] = ["PUBLISHED", "FAILED", "RETURNED"]
                    outbox.complete(
                        by, [Completion(event, results[(turn + seed + n) % 3]) for n, event in enumerate(events)]
                    )

        def meddle(state: str) -> None:
            with deployment.database(database_url) as by:
                start.wait(SECONDS)
                for _ in range(20):
                    apply(by, "park", type="ChargeCreated", limit=7)
                    apply(by, "redrive", type="ChargeCreated", limit=9, state=state, perSecond=1000)

        with ThreadPoolExecutor(4) as everybody:
            work = [everybody.submit(send, seed) for seed in range(2)]
            work += [everybody.submit(meddle, state) for state in ("parked", "published")]
            for one in work:
                one.result(60)
        actions = Counter(event_id for *_, some in audit(connection) for event_id in some)
        assert {row.id: row.attempts for row in table.rows(connection)} == {
            event_id: claims[event_id] + actions[event_id] for event_id in ids
        }

        with deployment.database(database_url) as by:
            apply(by, "redrive", type="ChargeCreated", perSecond=1000)
            table.let_pass(connection, seconds=60)
            while events := claim(by):
                assert outbox.complete(by, [Completion(event, "PUBLISHED") for event in events.values()]) == 0
        assert all(row.is_published for row in table.rows(connection))


def test_an_instruction_is_understood_by_what_carries_it_out(database: Database) -> None:
    """Every command that has a document has an answer."""
    for command in instructions.INSTRUCTIONS:
        document = {"command": command} | ({} if command == "help" else {"operator": "ann", "since": "1h"})
        assert answers.answer(database, document)["command"] == command
