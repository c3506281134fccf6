"""The page that an operator opens at night agrees with the alarms and the commands that there are."""

import contextlib
import json
import re
import shlex

import pytest

from charging import errors, instructions
from local import ops
from tests.conftest import Connect
from tests.packaging.artifacts import ROOT, TEMPLATE
from tests.support.invocation import CHARGES, Instance, charge_event, refund_event

PAGE = (ROOT / "docs" / "operations.md").read_text()
# By the name that an operator is woken with.
ALARMS = {
    name.removesuffix("Alarm"): resource["Properties"]
    for name, resource in TEMPLATE["Resources"].items()
    if resource["Type"] == "AWS::CloudWatch::Alarm"
}
HEADINGS = re.findall(r"^### (\w+)$", PAGE[PAGE.index("## When an alarm goes off") :], re.MULTILINE)


def section(heading: str) -> str:
    """What stands under a heading."""
    _, _, rest = PAGE.partition(f"\n### {heading}\n")
    return rest.partition("\n### ")[0]


def test_each_alarm_has_its_heading() -> None:
    """No alarm without a word on it."""
    assert set(ALARMS) <= set(HEADINGS)
    assert len(HEADINGS) == len(set(HEADINGS))


@pytest.mark.parametrize("alarm", ALARMS)
def test_an_alarm_leads_to_what_to_do(alarm: str) -> None:
    """Its description says where; there it says what it means, what to look at and what to do."""
    assert ALARMS[alarm]["AlarmDescription"].endswith(f" See docs/operations.md#{alarm.lower()}.")
    for part in ("**It means**", "**Look**", "**Do**"):
        assert part in section(alarm)


def test_the_commands_on_the_page_are_commands() -> None:
    """Each make ops, and each document for the function, is understood."""
    typed = re.findall(r"make ops ARGS='([^']*)'", PAGE)
    sent = re.findall(r"^ops '(.*)'$", PAGE, re.MULTILINE)
    assert len(typed) >= 5
    assert len(sent) >= 6
    documents = [ops.document(shlex.split(words)) for words in typed if "--help" not in words]
    for document in [*documents, *map(json.loads, sent)]:
        instructions.read(document)


def test_errors_on_the_page_are_errors() -> None:
    """The names that a failed invocation can show are the package's own."""
    table = PAGE[PAGE.index("### When the function fails") : PAGE.index("## When an alarm goes off")]
    named = re.findall(r"^\| `(\w+)` \|", table, re.MULTILINE)
    assert len(named) >= 5
    assert all(issubclass(getattr(errors, name), errors.ChargingError) for name in named)


def test_the_event_that_the_page_writes_is_the_charges_own(database_url: str, connect: Connect) -> None:
    """For a charge whose event is gone it writes the one that there was, under another id, and due."""
    [statement] = [block for block in re.findall(r"```sql\n(.*?)```", PAGE, re.DOTALL) if "INSERT INTO outbox" in block]
    connection = connect()
    events = "SELECT payload, aggregate_id, event_type, next_attempt_at <= now() FROM outbox"
    for reference in ({}, {"reference": "order 7"}):
        with contextlib.closing(Instance("charges", database_url, CHARGES)) as instance:
            charge_id = instance.call(charge_event(body={"amountCents": 4900, **reference})).json["id"]
        [(written, *row)] = connection.execute(events).fetchall()
        connection.execute("DELETE FROM outbox")
        connection.execute(re.sub(r"'[0-9a-f-]{36}'", f"'{charge_id}'", statement).encode())
        [(rewritten, *again)] = connection.execute(events).fetchall()
        connection.execute("DELETE FROM outbox")
        assert again == row
        before, after = json.loads(written), json.loads(rewritten)
        assert before.pop("id") != after.pop("id")
        assert after == before


def test_the_page_finds_a_refund_whose_event_is_gone(database_url: str, connect: Connect) -> None:
    """That one, and none that has its event."""
    [query] = [block for block in re.findall(r"```sql\n(.*?)```", PAGE, re.DOTALL) if "FROM refunds" in block]
    connection = connect()
    with contextlib.closing(Instance("charges", database_url, CHARGES)) as instance:
        charge = instance.call(charge_event()).headers["location"]
        lost, *_ = (instance.call(refund_event(charge)).json["id"] for _ in range(3))
    assert connection.execute(query.encode()).fetchall() == []
    connection.execute("DELETE FROM outbox WHERE payload::jsonb #>> '{data,refundId}' = %s", [lost])
    assert [str(found) for found, *_ in connection.execute(query.encode()).fetchall()] == [lost]
