"""A charge is one statement: what goes over the wire, what is written, and what is not."""

import time
from collections.abc import Iterator
from uuid import UUID, uuid4

import psycopg
import pytest
from psycopg.rows import scalar_row

from charging.database import Database
from charging.idempotency import Created, KeyReused, Replayed
from tests.conftest import Connect
from tests.support import deliveries
from tests.support.invocation import CHARGES, Instance, charge_event
from tests.support.ledger import ONCE, charge, counts, settings
from tests.support.wire import Sender, Wire

KEY = UUID("8e03978e-40d5-43e8-bc93-6894a57f9324")

# One statement that is already prepared: Bind, Describe, Execute, Sync. Its answer: BindComplete, RowDescription,
# one DataRow, CommandComplete, ReadyForQuery.
ONE_STATEMENT = "BDES"
ONE_ANSWER = "2TDCZ"

REPEATS = 1_000


@pytest.fixture
def warm(database_url: str) -> Iterator[tuple[Instance, Wire]]:
    """An instance that has charged before, and the wire to its database, on which nothing has been said since."""
    with Wire(database_url) as wire:
        instance = Instance("charges", wire.url, CHARGES)
        instance.call(charge_event())
        wire.messages.clear()
        yield instance, wire
        instance.close()


def assert_one_round_trip(wire: Wire) -> None:
    assert wire.kinds(Sender.CLIENT) == ONE_STATEMENT
    assert wire.kinds(Sender.SERVER) == ONE_ANSWER
    # All of the question is there before any of the answer.
    assert [message.kind for message in wire.messages] == list(ONE_STATEMENT + ONE_ANSWER)
    wire.messages.clear()


def test_a_charge_is_one_statement_in_one_round_trip(warm: tuple[Instance, Wire]) -> None:
    """Key, charge, event and stored response go over the wire at once: nothing is begun, parsed or committed apart."""
    instance, wire = warm
    assert instance.call(charge_event(KEY)).status == 201
    assert_one_round_trip(wire)


def test_a_charge_with_webhooks_is_one_statement_in_one_round_trip(
    warm: tuple[Instance, Wire], connect: Connect
) -> None:
    """Its deliveries are written by it: one for each endpoint of the caller that wants the event, with the very event
    that the topic gets; and none by a replay."""
    instance, wire = warm
    operator = connect()
    endpoints = {deliveries.register(operator), deliveries.register(operator)}
    deliveries.register(operator, principal="bob")
    deliveries.register(operator, event_types=["SomethingElse"])
    for _ in range(2):
        assert instance.call(charge_event(KEY)).status == 201
        assert_one_round_trip(wire)
    written = operator.execute(
        """
        SELECT endpoint_id, outbox.id IS NOT NULL, outbox_deliveries.payload = outbox.payload
        FROM outbox_deliveries
        LEFT JOIN outbox ON outbox.id = event_id AND outbox.event_type = outbox_deliveries.event_type
            AND outbox.aggregate_id = outbox_deliveries.aggregate_id AND outbox.sequence = outbox_deliveries.sequence
        """
    ).fetchall()
    assert sorted(written) == sorted((endpoint, True, True) for endpoint in endpoints)


def test_a_replay_is_one_statement_in_one_round_trip(warm: tuple[Instance, Wire]) -> None:
    """The stored answer comes back from the claim itself."""
    instance, wire = warm
    instance.call(charge_event(KEY))
    wire.messages.clear()
    assert instance.call(charge_event(KEY)).is_replay
    assert_one_round_trip(wire)


def test_a_reused_key_is_one_statement_in_one_round_trip(warm: tuple[Instance, Wire]) -> None:
    """So is the comparison with the stored fingerprint."""
    instance, wire = warm
    instance.call(charge_event(KEY))
    wire.messages.clear()
    assert instance.call(charge_event(KEY, {"amountCents": 1})).status == 422
    assert_one_round_trip(wire)


def test_a_takeover_is_one_statement_in_one_round_trip(warm: tuple[Instance, Wire], connect: Connect) -> None:
    """An expired key costs no more than a new one."""
    instance, wire = warm
    instance.call(charge_event(KEY))
    connect().execute(
        "UPDATE idempotency_keys "
        "SET created_at = created_at - interval '2 days', expires_at = expires_at - interval '2 days'"
    )
    wire.messages.clear()
    assert instance.call(charge_event(KEY)).status == 201
    assert_one_round_trip(wire)


def test_a_refusal_says_nothing_to_the_database(warm: tuple[Instance, Wire]) -> None:
    """What is wrong with a request is known without asking."""
    instance, wire = warm
    assert instance.call(charge_event(KEY, "{")).status == 400
    assert instance.call(charge_event("42")).status == 400
    assert instance.call(charge_event(KEY, principal=None)).status == 401
    assert wire.messages == []


def test_a_warm_instance_keeps_its_connection(warm: tuple[Instance, Wire]) -> None:
    """Requests of every kind, also refused ones, are served over the first connection."""
    instance, wire = warm
    for _ in range(5):
        instance.call(charge_event(KEY))
        instance.call(charge_event(KEY, {"amountCents": 1}))
        instance.call(charge_event(KEY, "{"))
    assert wire.connections == 1


def test_a_connection_prepares_the_statement_once(database_url: str) -> None:
    """The first call on a connection parses the statement; its parameters stay apart from it."""
    with Wire(database_url) as wire:
        instance = Instance("charges", wire.url, CHARGES)
        for _ in range(20):
            instance.call(charge_event())
        sent = wire.kinds(Sender.CLIENT)
        assert sent.count("P") == 1
        assert "Q" not in sent
        assert sent.count("B") == sent.count("E") == 20
        instance.close()


def repeat(database: Database, key: UUID) -> None:
    """One replay and one refusal."""
    assert isinstance(charge(database, key), Replayed)
    assert isinstance(charge(database, key, amount_cents=1), KeyReused)


def test_a_replay_and_a_refusal_take_no_transaction_id(database_url: str) -> None:
    """Over a thousand of each, no id is assigned to their transaction: nothing was written, no row was locked. Nor is
    the key itself."""
    database = Database(settings(database_url))
    keys_locked = "SELECT count(*) FROM pg_locks WHERE locktype = 'advisory' AND pid = pg_backend_pid()"
    assigned = "SELECT pg_current_xact_id_if_assigned()"
    assert isinstance(charge(database, KEY), Created)
    for _ in range(20):  # the server bounds how long a transaction may take
        with database.transaction() as transaction:
            for _ in range(REPEATS // 20):
                repeat(database, KEY)
            assert transaction.execute(assigned).fetchone() == (None,)
            assert transaction.execute(keys_locked).fetchone() == (0,)
    # So that the test would see one: a charge takes it.
    with database.transaction() as transaction:
        assert isinstance(charge(database, uuid4()), Created)
        assert transaction.execute(assigned).fetchone() != (None,)
        assert transaction.execute(keys_locked).fetchone() == (1,)
    database.close()


def wal_written(database: Database) -> tuple[int, int]:
    """What the database's own connection has written to the WAL so far: records, bytes."""
    database.fetch(scalar_row, b"SELECT pg_stat_force_next_flush()", {})
    (records,) = database.fetch(scalar_row, b"SELECT wal_records FROM pg_stat_get_backend_wal(pg_backend_pid())", {})
    (written,) = database.fetch(
        scalar_row, b"SELECT wal_bytes::bigint FROM pg_stat_get_backend_wal(pg_backend_pid())", {}
    )
    return records, written


def test_a_replay_and_a_refusal_write_no_wal(database_url: str, connect: Connect) -> None:
    """Over a thousand of each, the connection has written not one record, whatever the rest of the server did."""
    database = Database(settings(database_url))
    if connect().info.server_version < 180000:
        pytest.skip("PostgreSQL counts WAL by connection from version 18 on")
    assert isinstance(charge(database, KEY), Created)
    # The first reader of a new row may mark it as committed, which a server with checksums writes down.
    repeat(database, KEY)
    before = wal_written(database)
    for _ in range(3):  # a catalog page that autovacuum has just touched may cost a reader a record, once
        for _ in range(REPEATS):
            repeat(database, KEY)
        last, before = before, wal_written(database)
        if before == last:
            break
    else:
        pytest.fail("replays and refusals write to the WAL")
    # So that the test would see a record.
    assert isinstance(charge(database, uuid4()), Created)
    assert wal_written(database) > before
    database.close()


def test_a_replay_leaves_the_stored_row_as_it_was(database_url: str, connect: Connect) -> None:
    """Not even a row lock is left in it: same version, same place, no locker."""
    database, reader = Database(settings(database_url)), connect()
    charge(database, KEY)
    versions = "SELECT ctid, xmin, xmax, * FROM idempotency_keys"
    before = reader.execute(versions).fetchall()
    assert before[0][2] == "0"
    repeat(database, KEY)
    assert reader.execute(versions).fetchall() == before
    database.close()


def test_a_replay_waits_for_no_lock_on_its_row(database_url: str, connect: Connect) -> None:
    """A purge or an operator that holds the row does not hold up its readers."""
    database, operator = Database(settings(database_url)), connect()
    charge(database, KEY)
    repeat(database, KEY)
    with operator.transaction():
        operator.execute("SELECT FROM idempotency_keys FOR UPDATE")
        begun = time.monotonic()
        repeat(database, KEY)
        assert time.monotonic() - begun < 1
    database.close()


def test_a_charge_is_one_commit(database_url: str, connect: Connect) -> None:
    """It takes exactly one transaction id, and with it flushes the WAL once."""
    database, reader = Database(settings(database_url)), connect()
    deliveries.register(reader)
    charge(database, uuid4())
    ids = "SELECT xmin::text::bigint FROM {} WHERE xmin::text::bigint > %s"
    last = max(xid for (xid,) in reader.execute("SELECT xmin::text::bigint FROM charges").fetchall())
    charge(database, KEY)
    taken = {
        xid
        for table in ("charges", "outbox", "outbox_deliveries", "idempotency_keys")
        for (xid,) in reader.execute(psycopg.sql.SQL(ids).format(psycopg.sql.Identifier(table)), [last]).fetchall()
    }
    assert len(taken) == 1
    assert counts(reader) == tuple(2 * count for count in ONCE)
    database.close()


@pytest.mark.parametrize("table", ["charges", "outbox", "outbox_deliveries", "idempotency_keys"])
def test_a_charge_fails_as_a_whole(warm: tuple[Instance, Wire], connect: Connect, table: str) -> None:
    """Whichever of the tables refuses its row, none of the four has one, and nothing is left in the way."""
    instance, operator = warm[0], connect()
    deliveries.register(operator)
    operator.execute(f"ALTER TABLE {table} ADD CONSTRAINT refused CHECK (false) NOT VALID")
    assert instance.call(charge_event(KEY)).code == "temporarily_unavailable"
    assert counts(operator) == ONCE  # the one before
    assert deliveries.rows(operator) == []
    operator.execute(f"ALTER TABLE {table} DROP CONSTRAINT refused")
    answer = instance.call(charge_event(KEY))
    assert (answer.status, answer.is_replay) == (201, False)


@pytest.mark.parametrize(
    ("column", "value", "constraint"),
    [
        ("response_body", "x" * 8193, "idempotency_keys_body_has_at_most_8_kib"),
        ("response_headers", '{"Set-Cookie": "a=b"}', "idempotency_keys_stores_allowed_headers_only"),
        ("response_body", None, "idempotency_keys_completed_has_a_response"),
        ("fingerprint", "deadbeef", "idempotency_keys_fingerprint_has_a_version"),
    ],
)
def test_the_table_itself_keeps_what_may_be_replayed(
    connect: Connect, database_url: str, column: str, value: str | None, constraint: str
) -> None:
    """No writer, ours or another, can store a response that is too large, or a header that is some caller's own."""
    operator = connect()
    database = Database(settings(database_url))
    charge(database, KEY)
    database.close()
    change = psycopg.sql.SQL("UPDATE idempotency_keys SET {} = %s").format(psycopg.sql.Identifier(column))
    with pytest.raises(psycopg.errors.CheckViolation) as refused:
        operator.execute(change, [value])
    assert refused.value.diag.constraint_name == constraint
