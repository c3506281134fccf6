"""One command, a charge, its event, its replay: the deployed template, over HTTP to SQS, on this machine."""

import contextlib
import json
import os
import shlex
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any
from uuid import uuid4

import boto3
import psycopg
import pytest

from local import deploy, emulator, lock, postgres
from local.deploy import Deployment
from tests.support.ledger import until
from tests.support.stack import ROOT, STOP_SECONDS, Stack, processes, running, wait_until_gone

# One worker runs them all: two stacks at once would take more than twice as long on two cores.
pytestmark = pytest.mark.xdist_group("local stack")

# What the service promises on a quiet machine, over the emulator that adds a little.
EVENT_SECONDS = 2.0
# A connection that is cut is seen at once. The rest is the command's own end.
CUT_SECONDS = 5.0

# Makes a migration's first statement take long enough to be met at work.
SLOW_LEDGER = """
CREATE FUNCTION be_slow() RETURNS event_trigger LANGUAGE plpgsql AS $$
BEGIN
    IF to_regclass('schema_migrations') IS NULL THEN PERFORM pg_sleep(1); END IF;
END $$;
CREATE EVENT TRIGGER slow ON ddl_command_start EXECUTE FUNCTION be_slow();
"""


@pytest.fixture(scope="module")
def stack(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Stack]:
    with running(tmp_path_factory.mktemp("stack")) as stack:
        yield stack


def client(service: Any, url: str) -> Any:
    session = boto3.Session(emulator.ACCESS_KEY_ID, emulator.SECRET_ACCESS_KEY, region_name=emulator.REGION)
    return session.client(service, endpoint_url=url)


@contextlib.contextmanager
def command(name: str, folder: Path, *arguments: str) -> Iterator[subprocess.Popen[str]]:
    with subprocess.Popen(
        [sys.executable, "-m", "local", name, *arguments],
        cwd=ROOT,
        env=os.environ | {"LOCAL_DIR": str(folder), "PORT": "0"},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    ) as process:
        try:
            yield process
        finally:
            process.kill()


def read_until(process: subprocess.Popen[str], text: str) -> str:
    """What the process says, up to the text."""
    assert process.stdout is not None
    said = ""
    while text not in said:
        character = process.stdout.read(1)
        assert character, f"it ended without it: {said}"
        said += character
    return said


def test_a_charge_is_taken_and_its_event_arrives(stack: Stack) -> None:
    """201 with where it is; within two seconds its event is in the queue, as it was written."""
    answer = stack.charge(uuid4())
    assert answer.status == 201
    charge = answer.headers["Location"].removeprefix("/charges/")
    event = stack.event(charge, EVENT_SECONDS)
    assert event is not None
    assert event["type"] == "ChargeCreated"
    assert event["data"]["amountCents"] == 4900


def test_a_stack_that_keeps_order_takes_charges_to_the_subscriber(tmp_path: Path) -> None:
    """With FIFO topic and queues the same code does the same: each event arrives and is counted."""
    with running(tmp_path, parameters="EventOrder=per-aggregate") as stack:
        assert stack.variables["TOPIC_ARN"].endswith(".fifo")
        charges = [stack.charge(uuid4()).headers["Location"].removeprefix("/charges/") for _ in range(3)]
        until(lambda: stack.query("SELECT count(*) FROM processed_events") == [(3,)])
        assert {
            str(row[0]) for row in stack.query("SELECT aggregate_id FROM outbox WHERE published_at > created_at")
        } == {*charges}


@pytest.mark.parametrize("parameters", ["EventOrder", "EventOder=none", "DatabaseHost=elsewhere"])
def test_a_parameter_that_is_none_ends_the_start(parameters: str, tmp_path: Path) -> None:
    """It says which are."""
    with pytest.raises(AssertionError, match=r"PARAMETERS|InFlightWaitMs"), running(tmp_path, parameters=parameters):
        pass


def test_a_charge_arrives_as_a_webhook_in_the_terminal(stack: Stack) -> None:
    """The receiver of `make run` has verified and printed it within moments, and the delivery is marked as sent."""
    charge = stack.charge(uuid4()).headers["Location"].removeprefix("/charges/")
    said = read_until(stack.process, charge)
    assert "signature verified" in said.splitlines()[-1]
    deadline = time.monotonic() + STOP_SECONDS
    sent = f"SELECT status FROM outbox_deliveries WHERE aggregate_id = '{charge}'"
    while stack.query(sent) != [("SENT",)]:
        assert time.monotonic() < deadline
        stack.query("SELECT pg_sleep(0.05)")  # the dispatcher marks it after the receiver has answered


def test_a_refund_arrives_as_a_webhook_in_the_terminal(stack: Stack) -> None:
    """The receiver of `make run` wants every type of event that there is, and not charges alone."""
    refund = stack.refund(stack.charge(uuid4()).headers["Location"], uuid4(), 1200).headers["Location"]
    said = read_until(stack.process, refund.rpartition("/")[2])
    assert "signature verified" in said.splitlines()[-1]


def test_a_repeated_charge_is_answered_as_the_first(stack: Stack) -> None:
    """The same status, body and place, marked as a replay, and one charge; 422 for another amount."""
    key = uuid4()
    first, second = stack.charge(key, 1200), stack.charge(key, 1200)
    assert (second.status, second.body) == (first.status, first.body)
    for name in ("Location", "Content-Type"):
        assert second.headers[name] == first.headers[name]
    assert "Idempotent-Replayed" not in first.headers
    assert second.headers["Idempotent-Replayed"] == "true"
    assert stack.charge(key, 1300).status == 422
    assert stack.query("SELECT count(*) FROM charges WHERE amount_cents = 1200") == [(1,)]
    assert stack.query("SELECT count(*) FROM charges WHERE amount_cents = 1300") == [(0,)]


def test_the_subscriber_counts_each_charge_once(stack: Stack) -> None:
    """The projection is of the caller alone, whom the local header names; another's use of a key is another charge."""
    key = uuid4()
    assert stack.charge(key, 70, principal="ada").status == 201
    assert stack.charge(key, 70, principal="ada").headers["Idempotent-Replayed"] == "true"
    other = stack.charge(key, 80, principal="grace")
    assert other.status == 201
    assert "Idempotent-Replayed" not in other.headers
    deadline = time.monotonic() + STOP_SECONDS
    totals = "SELECT principal, charges, amount_cents FROM charge_totals WHERE principal <> 'local' ORDER BY principal"
    while (counted := stack.query(totals)) != [("ada", 1, 70), ("grace", 1, 80)]:
        assert time.monotonic() < deadline, f"the projection is {counted}"
        stack.query("SELECT pg_sleep(0.1)")  # the subscriber is starting, on the same processors


def test_the_migrate_function_finds_the_schema(stack: Stack) -> None:
    """As deployed, it has the migrations beside it, and finds that none is missing."""
    url = stack.variables["AWS_ENDPOINT_URL"]
    (deployed,) = client("cloudformation", url).describe_stacks(StackName=deploy.STACK)["Stacks"]
    names = {output["OutputKey"]: output["OutputValue"] for output in deployed["Outputs"]}
    answer = client("lambda", url).invoke(FunctionName=names["MigrateFunction"])
    assert json.load(answer["Payload"]) == {"applied": []}


def test_a_person_sees_the_events_as_they_are(stack: Stack) -> None:
    """Attributes and message are told apart, and every character is itself."""
    with command("events", stack.folder) as events:
        read_until(events, "Ctrl-C")
        body = json.dumps({"amountCents": 4900, "reference": "Zo\u00eb, 5 \u20ac"}).encode()
        headers = {"Content-Type": "application/json", "Idempotency-Key": str(uuid4())}
        urllib.request.urlopen(urllib.request.Request(f"{stack.variables['API_URL']}/charges", body, headers)).close()  # noqa: S310 - our own
        said = read_until(events, '"Zo\u00eb, 5 \u20ac"')
        assert 'message attributes: {"eventType": "ChargeCreated"' in said
        events.terminate()
        assert events.wait(STOP_SECONDS) == 0


def make_ops(stack: Stack, words: str = "") -> subprocess.CompletedProcess[str]:
    """What an operator types. The environment is there already: make is not to look after it amid a test."""
    return subprocess.run(
        ["make", "--silent", "--assume-old=.venv/installed", "ops", f"ARGS={words}"],
        cwd=ROOT,
        env={name: value for name, value in os.environ.items() if not name.startswith("MAKE")}
        | {"LOCAL_DIR": str(stack.folder), "LOGNAME": "ada"},
        capture_output=True,
        text=True,
        timeout=STOP_SECONDS,
        check=False,
    )


def test_an_operator_parks_finds_and_redrives_an_event(stack: Stack) -> None:
    """By `make ops` alone, from a charge whose event is not due yet to the event in the queue, under its id."""
    stack.execute("ALTER TABLE outbox ALTER next_attempt_at SET DEFAULT now() + interval '1 hour'")
    charge = stack.charge(uuid4(), 6100).headers["Location"].removeprefix("/charges/")
    stack.execute("ALTER TABLE outbox ALTER next_attempt_at SET DEFAULT now()")
    [(event_id,)] = stack.query(f"SELECT id FROM outbox WHERE aggregate_id = '{charge}'")

    def say(words: str) -> str:
        ended = make_ops(stack, words)
        assert (ended.returncode, ended.stderr) == (0, "")
        return ended.stdout

    assert say("list").startswith("Waiting: 1. Parked: 0.\n")
    assert "Would be parked: 1 waiting event." in say(f"park {event_id}")
    assert "Parked: 1 waiting event." in say(f'park {event_id} --apply --reason "the ledger cannot read it"')
    listed = say("list")
    assert listed.startswith("Waiting: 0. Parked: 1.\n")
    assert f"{event_id}  ChargeCreated  parked" in listed
    assert "Parked by an operator: the ledger cannot read it" in listed
    shown = say(f"inspect {event_id}")
    assert '"amountCents":6100' in shown
    assert "park by ada: the ledger cannot read it" in shown
    dry = say("redrive --type ChargeCreated --since 1h")
    assert dry.startswith("Dry run, nothing was changed. Would be redriven: 1 parked event")
    assert stack.query("SELECT count(*) FROM outbox WHERE failed_at IS NOT NULL") == [(1,)]
    # What it says to type, with a reason in place of the dots.
    _, _, words = dry.rstrip().rpartition("ARGS=")
    [words] = shlex.split(words)
    assert "Redriven: 1 parked event" in say(words.replace("...", "the ledger reads it now"))
    event = stack.event(charge, STOP_SECONDS)
    assert event is not None
    assert event["id"] == str(event_id)
    until(lambda: stack.query(f"SELECT count(*) FROM processed_events WHERE event_id = '{event_id}'") == [(1,)])
    assert [action for action, *_ in stack.query("SELECT action FROM operator_actions ORDER BY taken_at")] == [
        "park",
        "redrive",
    ]
    assert say("list").startswith("Waiting: 0. Parked: 0.\n")


def test_an_operator_is_told_what_is_wrong(stack: Stack, tmp_path: Path) -> None:
    """Alone, help; a command that is not acceptable, every reason; no stack, how to start one. Nothing is done."""
    helped = make_ops(stack)
    assert helped.returncode == 0
    assert "make ops ARGS='redrive --type ChargeCreated --since 1h'" in helped.stdout
    refused = make_ops(stack, "park --apply --limit 0")
    assert refused.returncode == 2
    assert refused.stderr.splitlines()[:4] == [
        "The command must select events by at least one of ids, type, aggregate, since, until.",
        "--reason is required to apply, as a sentence that says why, in 1 to 500 characters.",
        "--limit must be a number of events to change at most, from 1 to 10000 (default 1000).",
        "Nothing was done. COMMAND --help explains each option.",
    ]
    with command("ops", tmp_path, "list") as asked:
        assert asked.wait(STOP_SECONDS) == 1
        assert "make run" in read_until(asked, "is up.")


def test_an_operator_is_told_that_the_function_failed(stack: Stack) -> None:
    """What went wrong, what it means and how to find out what was done."""
    with psycopg.connect(stack.variables["DATABASE_URL"]) as other:
        # However long the command takes on a busy machine.
        other.execute("SET idle_in_transaction_session_timeout = 0")
        other.execute("SET transaction_timeout = 0")
        other.execute("LOCK TABLE outbox IN ACCESS EXCLUSIVE MODE")
        failed = make_ops(stack, "list")
        other.rollback()
    assert failed.returncode == 2  # make's own for a command that ended with 1
    assert "The function failed" in failed.stderr
    assert "the database answered 55P03" in failed.stderr
    assert "ARGS='list'" in failed.stderr


def test_nothing_outlives_a_killed_run(stack: Stack) -> None:
    """SIGKILL leaves no process either. The stack that the tests above share is gone after it."""
    assert len(processes(stack.folder)) > 2
    stack.process.kill()
    wait_until_gone(stack.folder)


def test_it_stops_when_told_and_keeps_what_it_took(tmp_path: Path) -> None:
    """SIGTERM, even twice: exit status 0, no process, no file that says it is up. The next start has the charge.

    Whoever follows the events is told.

    A child that dies ends the run: status 1, and what happened.
    """
    folder = tmp_path / "a new folder"
    with running(folder) as first:
        key = uuid4()
        answer = first.charge(key)
        with command("events", folder) as events:
            read_until(events, "Ctrl-C")
            first.process.terminate()
            first.process.send_signal(signal.SIGINT)
            assert first.process.wait(STOP_SECONDS) == 0
            assert events.wait(CUT_SECONDS) == 0
            assert read_until(events, "stopped.").endswith("The embedded stack has stopped.")
        assert not (folder / "env").exists()
        assert processes(folder) == {}
    with running(folder) as second:
        repeated = second.charge(key)
        assert (repeated.status, repeated.body) == (answer.status, answer.body)
        assert repeated.headers["Idempotent-Replayed"] == "true"
        emulator = next(pid for pid, line in processes(folder).items() if "ministack" in line and "guard" not in line)
        os.kill(emulator, signal.SIGKILL)
        assert second.process.wait(STOP_SECONDS) == 1
        assert second.process.stdout is not None
        assert "The emulated AWS has ended unexpectedly" in second.process.stdout.read()
        assert processes(folder) == {}


def test_it_stops_when_told_amid_a_migration(tmp_path: Path) -> None:
    """Exit status 0 and no word of an error; what the migrations began is whole, and the next start goes on from it."""
    folder = tmp_path / "postgres"
    with (
        postgres.serve(folder) as server,
        psycopg.connect(
            server.url, user=postgres.SUPERUSER, password=(folder / "postgres.password").read_text(), autocommit=True
        ) as superuser,
    ):
        superuser.execute(SLOW_LEDGER)
    with command("run", tmp_path) as run:
        read_until(run, "Bringing the schema forward ...")
        port = (folder / "data" / "postmaster.pid").read_text().splitlines()[3]
        with psycopg.connect(server.url, port=port, autocommit=True) as connection:
            asleep = "SELECT 1 FROM pg_stat_activity WHERE wait_event = 'PgSleep'"
            deadline = time.monotonic() + STOP_SECONDS
            while connection.execute(asleep).fetchone() is None:
                assert time.monotonic() < deadline, "no migration is at work"
            run.terminate()
        assert run.wait(STOP_SECONDS) == 0
        assert run.stdout is not None
        said = run.stdout.read().splitlines()
        assert said[1].startswith("Stopped."), said
        assert len(said) == 2
    wait_until_gone(tmp_path)


def test_a_queue_that_is_not_worked_off_is_not_drained(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither with a message that waits nor with one that somebody has taken and not finished."""
    monkeypatch.setattr(deploy, "DRAIN_SECONDS", 0.5)
    with (
        lock.held(tmp_path / "lock") as held,
        emulator.serve(tmp_path / "emulator", port=emulator.available(0), lock=held) as aws,
    ):
        sqs = client("sqs", aws.url)
        url = sqs.create_queue(QueueName="subscriber")["QueueUrl"]
        deployment = Deployment("", "", "", subscriber_queue_url=url, relay_function="")
        assert deploy.drain(aws, deployment)
        sqs.send_message(QueueUrl=url, MessageBody="{}")
        assert not deploy.drain(aws, deployment)
        (message,) = sqs.receive_message(QueueUrl=url)["Messages"]
        assert not deploy.drain(aws, deployment)
        sqs.delete_message(QueueUrl=url, ReceiptHandle=message["ReceiptHandle"])
        assert deploy.drain(aws, deployment)
