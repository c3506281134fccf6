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


@pytest.mark.parametrize("reference", [{}, {"reference": "order 7"}], ids=["bare", "with a reference"])
def test_the_event_that_the_page_writes_is_the_one_that_is_missing(
    reference: dict[str, str], database_url: str, connect: Connect
) -> None:
    """For a charge or a refund whose event is gone it writes the one that there was, under another id, and due."""
    [statement] = [block for block in re.findall(r"```sql\n(.*?)```", PAGE, re.DOTALL) if "INSERT INTO outbox" in block]
    connection = connect()
    with contextlib.closing(Instance("charges", database_url, CHARGES)) as instance:
        charge = instance.call(charge_event(body={"amountCents": 4900, **reference})).headers["location"]
        instance.call(refund_event(charge, body={"amountCents": 600, **reference}))
    events = (
        "SELECT payload, aggregate_id, event_type, sequence, next_attempt_at <= now() FROM outbox"
        " WHERE sequence = ANY (%s) ORDER BY sequence"
    )
    written = connection.execute(events, [[1, 2]]).fetchall()
    connection.execute(
        "WITH lost AS (DELETE FROM outbox RETURNING aggregate_id, sequence, event_type)"
        " INSERT INTO missing_events (aggregate_id, sequence, event_type) SELECT * FROM lost"
    )
    for place, (was, *row) in enumerate(written, start=1):
        asked = re.sub(r"'[0-9a-f-]{36}' AND sequence = 1;", f"'{row[0]}' AND sequence = {place};", statement)
        connection.execute(asked.encode())
        [(rewritten, *again)] = connection.execute(events, [[place]]).fetchall()
        assert again == row
        before, after = json.loads(was), json.loads(rewritten)
        assert before.pop("id") != after.pop("id")
        assert after == before
