"""The functions' roles: each can do its function's work, and nothing else."""

import re
from collections.abc import Callable, Iterator, Mapping
from contextlib import ExitStack
from pathlib import Path

import psycopg
import pytest
from psycopg import conninfo, sql
from psycopg.errors import InsufficientPrivilege

from charging import errors, migrations, roles
from charging.migrations import LIMITS
from local import postgres
from tests.conftest import Connect
from tests.integration.test_statements import PARAMETERS, STATEMENTS
from tests.packaging.artifacts import FUNCTIONS, TEMPLATE
from tests.support.database import SCHEMA
from tests.support.invocation import OWNER, ROOT, database_variables
from tests.support.outbox import Connection

PAGE = ROOT / "docs" / "security.md"

# What each function sends, by the names in charging.sql.
RUNS: Mapping[str, frozenset[str]] = {
    # Deliveries are enqueued by whichever transaction writes an event, which is the charge's.
    "charges": frozenset(
        {
            "CREATE_CHARGE",
            "CREATE_REFUND",
            "AWAIT_TWIN",
            "READ_CHARGE",
            "READ_REFUND",
            "READ_STORED_RESPONSE",
            "ENQUEUE_DELIVERIES",
        }
    ),
    "endpoints": frozenset(
        {
            "CREATE_ENDPOINT",
            "HAS_ROOM_FOR_ENDPOINT",
            "AWAIT_TWIN",
            "LIST_ENDPOINTS",
            "ROTATE_SECRET",
            "DISABLE_ENDPOINT",
            "ENABLE_ENDPOINT",
            "DELETE_ENDPOINT",
            "ENQUEUE_SAMPLE",
            "LIST_DELIVERIES",
            "RESEND_DELIVERY",
            "RESEND_DELIVERIES",
        }
    ),
    "webhooks": frozenset(
        {"CLAIM_DELIVERIES", "CLAIM_PROBES", "COMPLETE_DELIVERIES", "JUDGE_ENDPOINTS", "ABANDON_DELIVERIES"}
    ),
    "relay": frozenset({"CLAIM_EVENTS", "CLAIM_EVENTS_IN_ORDER", "COMPLETE_EVENTS"}),
    "subscriber": frozenset({"RECORD_DELIVERY", "ADD_TO_TOTALS"}),
    "monitor": frozenset({"MEASURE_OUTBOX", "MEASURE_DELIVERIES"}),
    "maintenance": frozenset(
        {
            "PURGE_KEYS",
            "PURGE_EVENTS",
            "PURGE_PROCESSED_EVENTS",
            "PURGE_DELIVERIES",
            "PURGE_ENDPOINTS",
            "START_RECONCILIATION",
            "RECONCILE_EVENTS",
            "FORGET_MISSING_EVENTS",
            "FIND_MISSING_EVENTS",
            "FIND_STARTED_KEYS",
        }
    ),
    "operations": frozenset(
        {
            "AWAIT_OPERATORS",
            "RESOLVE_WINDOW",
            "LIST_EVENTS",
            "COUNT_EVENTS",
            "INSPECT_EVENTS",
            "PARK_EVENTS",
            "REDRIVE_EVENTS",
        }
    ),
}
# They read no table, and everybody may run them.
HARMLESS = frozenset({"AWAIT_TWIN", "AWAIT_OPERATORS", "RESOLVE_WINDOW"})

type SignIn = Callable[[str], Connection]


@pytest.fixture
def sign_in(database_url: str) -> Iterator[SignIn]:
    """Connects as a function's role to this test's database."""
    with ExitStack() as opened:

        def connect(function: str) -> Connection:
            user = database_variables(database_url, function)["DATABASE_USER"]
            password = database_variables(database_url)["DATABASE_PASSWORD"]
            return opened.enter_context(psycopg.connect(database_url, user=user, password=password, autocommit=True))

        yield connect


def expected() -> dict[tuple[str, str], str]:
    """The table of docs/security.md: privileges by role and table."""
    rows = re.findall(r"^\| (\w+) \| (\w+) \| (.+) \|$", PAGE.read_text(), re.MULTILINE)
    return {(role, table): privileges for role, table, privileges in rows if table != "table"}


def found(connection: Connection, function: str) -> dict[tuple[str, str], str]:
    """What the server lets the role of this connection do, in the words of docs/security.md."""
    privileges: dict[tuple[str, str], list[str]] = {}
    rows = connection.execute(
        """
        SELECT relation.oid::regclass::text, privilege, has_table_privilege(relation.oid, privilege), ARRAY(
            SELECT attname::text
            FROM pg_attribute
            WHERE attrelid = relation.oid AND (attnum > 0 OR attacl IS NOT NULL) AND NOT attisdropped
              AND privilege IN ('SELECT', 'INSERT', 'UPDATE', 'REFERENCES')
              AND has_column_privilege(relation.oid, attnum, CASE
                  WHEN privilege IN ('SELECT', 'INSERT', 'UPDATE', 'REFERENCES') THEN privilege ELSE 'SELECT'
              END)
            ORDER BY attname::text COLLATE "C"
        )
        FROM pg_class AS relation
        CROSS JOIN unnest(ARRAY[
            'SELECT', 'INSERT', 'UPDATE', 'DELETE', 'TRUNCATE', 'REFERENCES', 'TRIGGER', 'MAINTAIN'
        ]) WITH ORDINALITY AS asked (privilege, place)
        WHERE relnamespace = 'public'::regnamespace AND relkind IN ('r', 'p', 'v', 'm', 'f')
        ORDER BY 1, place
        """
    )
    for table, privilege, on_all_of_it, columns in rows:
        if on_all_of_it:
            privileges.setdefault((function, table), []).append(privilege)
        elif columns:
            privileges.setdefault((function, table), []).append(f"{privilege} ({', '.join(columns)})")
    return {key: ", ".join(words) for key, words in privileges.items()}


def test_every_function_has_a_role() -> None:
    """Each function that is deployed, the migrations excepted, and no other; each signs in as itself alone."""
    folders = {name: str(properties["CodeUri"]).rpartition("/")[2] for name, properties in FUNCTIONS.items()}
    assert {*folders.values()} - {OWNER} == roles.ROLES.keys() == RUNS.keys()
    for name, folder in folders.items():
        user = FUNCTIONS[name]["Environment"]["Variables"]["DATABASE_USER"]
        assert user == ({"Ref": "DatabaseUser"} if folder == OWNER else {"Fn::Sub": f"${{DatabaseName}}_{folder}"})
        # To the database, and to a proxy before it.
        may_connect = {*re.findall(r"dbuser:[^']+", str(FUNCTIONS[name]["Policies"]))}
        who = "${DatabaseUser}" if folder == OWNER else f"${{DatabaseName}}_{folder}"
        assert may_connect == {f"dbuser:${{ResourceId}}/{who}"}


def test_every_statement_is_some_functions() -> None:
    """None is sent by nobody."""
    assert frozenset().union(*RUNS.values()) == STATEMENTS.keys()


# What a function does not send, and could with the grants that it has.
READS_OUTBOX = frozenset({"MEASURE_OUTBOX", "LIST_EVENTS", "COUNT_EVENTS"})
ALSO: Mapping[str, frozenset[str]] = {
    "charges": frozenset({"FIND_STARTED_KEYS", "HAS_ROOM_FOR_ENDPOINT"}),
    # What it changes of an endpoint and its deliveries the dispatcher changes, too; each has columns of its own beside.
    "endpoints": frozenset(
        {"ENQUEUE_DELIVERIES", "MEASURE_DELIVERIES", "JUDGE_ENDPOINTS", "READ_STORED_RESPONSE", "FIND_STARTED_KEYS"}
    ),
    "webhooks": frozenset(
        {"MEASURE_DELIVERIES", "LIST_ENDPOINTS", "DISABLE_ENDPOINT", "ENABLE_ENDPOINT"}
        | {"RESEND_DELIVERY", "RESEND_DELIVERIES"}
    ),
    "relay": READS_OUTBOX,
    "monitor": READS_OUTBOX,
    "operations": READS_OUTBOX | RUNS["relay"],
}


@pytest.mark.parametrize("function", RUNS)
def test_a_function_may_run_its_own_statements_and_no_others(function: str, sign_in: SignIn) -> None:
    """Those that it sends are answered; each other one is refused."""
    connection = sign_in(function)
    allowed = set()
    for name, statement in STATEMENTS.items():
        try:
            with connection.transaction(force_rollback=True):
                connection.execute(statement, PARAMETERS[name])
        except InsufficientPrivilege:
            continue
        allowed.add(name)
    assert allowed == RUNS[function] | ALSO.get(function, frozenset()) | HARMLESS


def test_the_page_says_what_the_server_says(sign_in: SignIn) -> None:
    """The table lists all that any role may do with any table of this database."""
    on_the_server: dict[tuple[str, str], str] = {}
    for function in roles.ROLES:
        on_the_server |= found(sign_in(function), function)
    assert on_the_server == expected()


@pytest.mark.parametrize("function", roles.ROLES)
def test_a_role_is_nobody_else(function: str, sign_in: SignIn, connect: Connect) -> None:
    """It may sign in and no more: no membership but the monitor's, nothing that it owns, no room to make anything."""
    connection = sign_in(function)
    [row] = connection.execute(
        """
        SELECT
            rolsuper OR rolcreatedb OR rolcreaterole OR rolreplication OR rolbypassrls,
            ARRAY(SELECT roleid::regrole::text FROM pg_auth_members WHERE member = pg_roles.oid),
            has_database_privilege(current_database(), 'CREATE') OR has_database_privilege(current_database(), 'TEMP'),
            has_schema_privilege('public', 'CREATE'),
            EXISTS (SELECT FROM pg_class WHERE relowner = pg_roles.oid)
        FROM pg_roles
        WHERE rolname = current_user
        """
    ).fetchall()
    assert row == (False, ["pg_read_all_stats"] if roles.ROLES[function].reads_statistics else [], False, False, False)
    makes = ("CREATE TABLE t ()", "CREATE TEMP TABLE t ()", "CREATE SCHEMA s", "CREATE ROLE r", "DROP TABLE outbox")
    for attempt in makes:
        with pytest.raises(InsufficientPrivilege):
            connection.execute(attempt)
    owner = connect().info.user
    with pytest.raises(InsufficientPrivilege):
        connection.execute(sql.SQL("SET ROLE {}").format(sql.Identifier(owner)))


def test_the_api_cannot_change_a_published_row(sign_in: SignIn) -> None:
    """It cannot even see one, nor make one that counts as published, nor take its own charge back."""
    charges = sign_in("charges")
    with charges.transaction(force_rollback=True):
        charges.execute(STATEMENTS["CREATE_CHARGE"], PARAMETERS["CREATE_CHARGE"])
    for attempt in (
        "UPDATE outbox SET published_at = NULL",
        "UPDATE outbox SET payload = '{}'",
        "DELETE FROM outbox",
        "SELECT payload FROM outbox",
        "INSERT INTO outbox (published_at) VALUES (now())",
        "UPDATE charges SET amount_cents = 1",
        "DELETE FROM charges",
        "DELETE FROM idempotency_keys",
        "SELECT FROM processed_events",
        "SELECT FROM charge_totals",
        "SELECT FROM operator_actions",
    ):
        with pytest.raises(InsufficientPrivilege):
            charges.execute(attempt.encode())


def test_nobody_can_send_anothers_events_elsewhere(sign_in: SignIn) -> None:
    """An endpoint's URL and owner are written once; what is sent is written by the charge."""
    for function in roles.ROLES:
        connection = sign_in(function)
        for attempt in (
            "UPDATE webhook_endpoints SET url = 'https://elsewhere.test/'",
            "UPDATE webhook_endpoints SET principal = 'mallory'",
            "UPDATE outbox_deliveries SET payload = '{}'",
            "UPDATE outbox_deliveries SET endpoint_id = event_id",
        ):
            with pytest.raises(InsufficientPrivilege):
                connection.execute(attempt.encode())


@pytest.mark.parametrize("function", roles.ROLES)
def test_limits_are_the_roles_own(function: str, connect: Connect, sign_in: SignIn) -> None:
    """They hold wherever the role connects, and whatever the database's own are."""
    owner = connect()
    for setting in LIMITS:
        owner.execute(
            sql.SQL("ALTER DATABASE {} RESET {}").format(sql.Identifier(owner.info.dbname), sql.Identifier(setting))
        )
    connection = sign_in(function)
    kept = {name: connection.execute("SELECT current_setting(%s)", [name]).fetchone() for name in LIMITS}
    assert kept == {name: (value,) for name, value in LIMITS.items()}


def test_the_longest_name_is_not_cut_off() -> None:
    """The server shortens what is longer than 63 bytes, and two roles would be one."""
    pattern = TEMPLATE["Parameters"]["DatabaseName"]["AllowedPattern"]
    longest = next(name for name in ("d" * length for length in range(63, 0, -1)) if re.fullmatch(pattern, name))
    assert max(len(roles.name(longest, function)) for function in roles.ROLES) <= 63


# ---- how they come to be --------------------------------------------------------------------------------------------


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Path]:
    """The folder of a server for the tests of this module, and a superuser's session on it."""
    folder = tmp_path_factory.mktemp("rds")
    with postgres.serve(folder) as server:
        (folder / "url").write_text(server.url)
        yield folder


@pytest.fixture
def superuser(server: Path) -> Iterator[Connection]:
    """Who stands for RDS itself."""
    password = (server / "postgres.password").read_text()
    url = conninfo.make_conninfo((server / "url").read_text(), user=postgres.SUPERUSER, password=password)
    with psycopg.connect(url, autocommit=True) as connection:
        yield connection


@pytest.fixture
def as_on_rds(superuser: Connection, server: Path) -> Iterator[Callable[..., str]]:
    """Makes a database whose owner is no superuser, as RDS's master user is not, and returns its URL."""
    made: list[str] = []

    def make(name: str, attributes: str = "CREATEROLE", iam: str | None = None) -> str:
        made.append(name)
        superuser.execute(f"CREATE ROLE {name}_owner LOGIN {attributes} PASSWORD 'x'".encode())
        superuser.execute(f"CREATE DATABASE {name} OWNER {name}_owner".encode())
        if iam is not None:
            superuser.execute("CREATE ROLE rds_iam")
            superuser.execute(f"GRANT rds_iam TO {name}_owner {iam}".encode())
        url = conninfo.make_conninfo((server / "url").read_text(), dbname=name, user=f"{name}_owner", password="x")
        with psycopg.connect(url, autocommit=True) as connection:
            migrations.migrate(connection, SCHEMA)
        return url

    yield make
    for name in made:
        superuser.execute(f"DROP DATABASE {name} WITH (FORCE)".encode())
    # The owners last, who have granted what the others are members of.
    functions = [roles.name(name, function) for name in made for function in roles.ROLES]
    for role in (*functions, "rds_iam", *(f"{name}_owner" for name in made)):
        superuser.execute(f"DROP ROLE IF EXISTS {role}".encode())


def provide(url: str, password: str | None = None) -> None:
    with psycopg.connect(url, autocommit=True) as connection:
        roles.provide(connection, password=password)


def members(url: str, group: str) -> set[str]:
    with psycopg.connect(url) as connection:
        rows = connection.execute(
            "SELECT member::regrole::text FROM pg_auth_members WHERE roleid = to_regrole(%s)", [group]
        )
        return {name for (name,) in rows}


def test_an_owner_that_is_no_superuser_makes_them(as_on_rds: Callable[..., str]) -> None:
    """And finds nothing to do the second time; without a password, and outside RDS, nobody can sign in yet."""
    url = as_on_rds("one")
    provide(url)
    provide(url)
    with pytest.raises(psycopg.OperationalError, match="password"):
        psycopg.connect(url, user="one_relay", password="x")
    provide(url, password="secret")
    with psycopg.connect(url, user="one_relay", password="secret", autocommit=True) as relay:
        assert relay.execute("SELECT count(*) FROM outbox").fetchone() == (0,)


def test_two_databases_on_one_server_do_not_meet(as_on_rds: Callable[..., str]) -> None:
    """Each has its own roles, which nobody lets into the other."""
    one, two = as_on_rds("one"), as_on_rds("two")
    provide(one, password="first")
    provide(two, password="second")
    for url, role, password in ((one, "one_relay", "first"), (two, "two_relay", "second")):
        psycopg.connect(url, user=role, password=password).close()
    for url, role, password in ((one, "two_relay", "second"), (two, "one_relay", "first")):
        with pytest.raises(psycopg.OperationalError, match="permission denied for database"):
            psycopg.connect(url, user=role, password=password)


def test_on_rds_they_sign_in_with_tokens(as_on_rds: Callable[..., str]) -> None:
    """They are what RDS lets in with a token. A password takes them out again, since RDS then takes no password."""
    url = as_on_rds("one", iam="WITH ADMIN OPTION")
    everyone = {roles.name("one", function) for function in roles.ROLES}
    provide(url)
    assert members(url, "rds_iam") == everyone | {"one_owner"}
    provide(url, password="secret")
    assert members(url, "rds_iam") == {"one_owner"}
    provide(url)
    assert members(url, "rds_iam") == everyone | {"one_owner"}


def test_the_page_makes_an_owner_that_can_do_it(superuser: Connection, server: Path) -> None:
    """An administrator who is no superuser, as on RDS, runs its statements; the owner then migrates and makes roles."""
    page = (ROOT / "docs" / "deploy.md").read_text()
    [statements] = re.findall(r"```sql\n(CREATE ROLE.*?)```", page, re.DOTALL)
    superuser.execute("CREATE ROLE rds_iam")
    superuser.execute("CREATE ROLE administrator LOGIN CREATEROLE CREATEDB PASSWORD 'x'")
    superuser.execute("GRANT rds_iam, pg_read_all_stats TO administrator WITH ADMIN OPTION")
    url = (server / "url").read_text()
    administrator = conninfo.make_conninfo(url, dbname="postgres", user="administrator", password="x")
    # This server has a database and an owner of that name.
    statements = re.sub(r"\bcharges\b", "page", statements)
    try:
        with psycopg.connect(administrator, autocommit=True) as connection:
            for statement in filter(str.strip, re.sub(r"--.*", "", statements).split(";")):
                connection.execute(statement.encode())
        superuser.execute("ALTER ROLE page PASSWORD 'x'")
        owner = conninfo.make_conninfo(url, dbname="page", user="page", password="x")
        with psycopg.connect(owner, autocommit=True) as connection:
            migrations.migrate(connection, SCHEMA)
            roles.provide(connection, password=None)
        assert members(owner, "rds_iam") == {"administrator", "page", *(f"page_{function}" for function in roles.ROLES)}
    finally:
        superuser.execute("DROP DATABASE IF EXISTS page WITH (FORCE)")
        for role in (*(f"page_{function}" for function in roles.ROLES), "page", "administrator", "rds_iam"):
            superuser.execute(f"DROP ROLE IF EXISTS {role}".encode())


def test_who_makes_roles_for_tokens_signs_in_with_tokens(as_on_rds: Callable[..., str], superuser: Connection) -> None:
    """Making them has made the owner a member of what they are let in by, though it was none and nobody granted it.

    RDS asks members of rds_iam for a token: an owner that came with a password could be refused from then on.
    """
    url = as_on_rds("one")
    provide(url)
    superuser.execute("CREATE ROLE rds_iam")
    is_asked = "SELECT pg_has_role('one_owner', 'rds_iam', 'MEMBER')"
    assert superuser.execute(is_asked).fetchone() == (False,)
    # RDS lets its master user grant this without having it.
    superuser.execute("GRANT rds_iam TO one_relay")
    assert superuser.execute(is_asked).fetchone() == (True,)


@pytest.mark.parametrize(
    ("attributes", "iam", "reason"),
    [
        pytest.param("NOCREATEROLE", None, "permission denied to create role", id="no role can be made"),
        pytest.param("CREATEROLE", "", "permission denied to grant role", id="tokens cannot be handed on"),
    ],
)
def test_an_owner_that_may_not_is_told_what_it_needs(
    attributes: str, iam: str | None, reason: str, as_on_rds: Callable[..., str]
) -> None:
    """All of it or nothing: no role is left half made."""
    url = as_on_rds("one", attributes, iam)
    with pytest.raises(errors.RolesRefused, match=f"{reason}.*CREATEROLE"):
        provide(url)
    with psycopg.connect(url) as connection:
        assert connection.execute("SELECT 1 FROM pg_roles WHERE rolname = 'one_relay'").fetchone() is None


def test_who_may_not_show_statistics_makes_the_rest(as_on_rds: Callable[..., str]) -> None:
    """The monitor then sees its own sessions, and measures all else."""
    url = as_on_rds("one")
    provide(url)
    assert members(url, "pg_read_all_stats") & {"one_monitor"} == set()
    assert members(url, "pg_monitor") == set()


def test_no_password_is_told_to_the_server(as_on_rds: Callable[..., str], superuser: Connection, server: Path) -> None:
    """It gets a hash alone: its log may hold every statement."""
    url = as_on_rds("one")
    superuser.execute("ALTER DATABASE one SET log_statement = 'all'")
    provide(url, password="not-for-the-log")
    log = (server / "postgres.log").read_text()
    assert 'ALTER ROLE "one_relay" PASSWORD \'SCRAM-SHA-256$' in log
    assert "not-for-the-log" not in log
