"""The operator's commands against the running stack: ``python -m local ops``, which asks the deployed function."""

import argparse
import getpass
import json
import re
import string
import sys
from collections.abc import Mapping, Sequence
from typing import Any

from botocore import exceptions
from pydantic.fields import FieldInfo

from charging.instructions import INSTRUCTIONS
from local import deploy, environment, running
from local.errors import StackError

# The function's own limit is 30 s; a cold start comes on top.
ANSWER_SECONDS = 40.0

COLUMNS = ("id", "type", "state", "for", "age", "due in", "attempts", "refusals", "aggregate", "sequence")

EXAMPLES = {
    "list": """\
  make ops ARGS='list'                                         what waits, and what is parked
  make ops ARGS='list --state published --since 1h'""",
    "inspect": """\
  make ops ARGS='inspect 01a22fbf-f561-7b0c-9d0e-6a1b2c3d4e5f'""",
    "redrive": """\
  make ops ARGS='redrive --type ChargeCreated --since 1h'      a dry run: says what it would do
  make ops ARGS='redrive --type ChargeCreated --since 1h --apply --reason "the topic is back"'""",
    "park": """\
  make ops ARGS='park 01a22fbf-f561-7b0c-9d0e-6a1b2c3d4e5f --apply --reason "the ledger cannot read it"'""",
}
# Stands for what the person has to say again. The function takes it for nothing.
UNSAID = '"..."'
LAST_WORD = "Nothing is changed without --apply. docs/operations.md has a heading for each alarm."


def main() -> int:
    """Carry out one command and print the answer; 2 where it was not acceptable. Raises StackError."""
    arguments = sys.argv[1:]
    if not arguments:
        _parser().print_help()
        return 0
    answer = _ask(document(arguments))
    if "violations" in answer:
        for violation in answer["violations"]:
            print(f"{_flag(violation['member']) or 'The command'} {violation['reason']}.", file=sys.stderr)
        print("Nothing was done. COMMAND --help explains each option.", file=sys.stderr)
        return 2
    _print(answer)
    return 0


def document(arguments: Sequence[str]) -> dict[str, Any]:
    """The document that says what was typed. Ends the process where the words make no command."""
    given = vars(_parser().parse_args(arguments))
    # What is not given is left out: the function knows its defaults.
    return {name: value for name, value in given.items() if not (value is None or value is False or value == [])}


def command(document: Mapping[str, Any]) -> str:
    """What to type, for the function to be sent the document."""
    words = [document["command"], *document.get("ids", [])]
    for name, value in document.items():
        if value is True:
            words.append(_flag(name))
        elif name not in {"command", "ids", "operator", "apply"}:
            words += [_flag(name), _word(str(value))]
    if document.get("apply") and "reason" not in document:
        words += ["--reason", UNSAID]
    return f"{environment.command('ops')} ARGS='{' '.join(words)}'"


def _parser() -> argparse.ArgumentParser:
    """The commands, their options and what is said of them: the very grammar of the function's documents."""
    parser = argparse.ArgumentParser(
        prog="make ops",
        usage="make ops ARGS='COMMAND ...'",
        description="Looks at the events in the running stack's outbox, sends them again, or holds them back.",
        epilog=_epilog(*EXAMPLES.values()),
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    commands = parser.add_subparsers(dest="command", metavar="COMMAND", required=True)
    for name, examples in EXAMPLES.items():
        model = INSTRUCTIONS[name]
        does = " ".join((model.__doc__ or "").split())
        added = commands.add_parser(
            name,
            help=does,
            description=does,
            usage=f"make ops ARGS='{name} [ID ...] [OPTION ...]'",
            epilog=_epilog(examples),
            formatter_class=argparse.RawDescriptionHelpFormatter,
        )
        for member, field in model.model_fields.items():
            if member != "command":
                _add(added, field.alias or member, field)
    return parser


def _epilog(*examples: str) -> str:
    return "\n".join(["examples:", *examples, "", LAST_WORD])


def _add(parser: argparse.ArgumentParser, member: str, field: FieldInfo) -> None:
    if member == "ids":
        parser.add_argument("ids", nargs="*", metavar="ID", help="the ids of events")
    elif isinstance(field.default, bool):
        parser.add_argument(f"--{member}", action="store_true", help="do it; without it, only say what would be done")
    else:
        default = getpass.getuser() if member == "operator" else None
        parser.add_argument(
            _flag(member),
            dest=member,
            default=default,
            type=int if isinstance(field.default, int) else str,
            metavar=_flag(member).removeprefix("--").upper(),
            help=field.description,
        )


def _flag(member: str) -> str:
    """The option for a member of the document, such as --per-second for perSecond. Ids stand by themselves."""
    if member in {"", "ids"}:
        return member.upper()
    return "--" + re.sub(r"(?=[A-Z])", "-", member).lower()


def _ask(document: Mapping[str, Any]) -> dict[str, Any]:
    """The function's answer."""
    stack = environment.read()
    look = command({"command": "list"})
    try:
        (deployed,) = running.client(stack, "cloudformation", answer_seconds=ANSWER_SECONDS).describe_stacks(
            StackName=deploy.STACK
        )["Stacks"]
        outputs = {output["OutputKey"]: output["OutputValue"] for output in deployed["Outputs"]}
        invoked = running.client(stack, "lambda", answer_seconds=ANSWER_SECONDS).invoke(
            FunctionName=outputs["OperationsFunction"], Payload=json.dumps(document)
        )
    except (exceptions.ReadTimeoutError, KeyboardInterrupt) as error:
        raise StackError(
            f"There is no answer: {str(error) or 'it was not waited for.'}",
            means="What was asked for was done or not.",
            remedy=f"see which with `{look}`, and do it again if it was not.",
        ) from error
    except running.GONE as error:
        raise running.lost(error) from error
    answer: dict[str, Any] = json.load(invoked["Payload"])
    if "FunctionError" in invoked:
        raise StackError(
            f"The function failed: {answer.get('errorType')}: {answer.get('errorMessage')}",
            means="The database did not do what was asked for, or its answer was lost.",
            remedy=f"see which with `{look}`, and do it again if it was not done.",
        )
    return answer


def _print(answer: Mapping[str, Any]) -> None:
    print(answer["summary"])
    for warning in answer["warnings"]:
        print(f"  Note: {warning}")
    if answer["events"] and answer["command"] == "inspect":
        for event in map(_legible, answer["events"]):
            _print_in_full(event)
    elif answer["events"]:
        print("\nAs they were before:" if answer.get("applied") else "")
        _print_table([_legible(event) for event in answer["events"]])
    if "action" in answer:
        print(f"\nRecorded as {answer['action']}, by {answer['operator']}.")
    print(f"\nNext: {answer['next']}")
    if "nextDocument" in answer:
        print(f"  {command(answer['nextDocument'])}")


def _print_table(events: Sequence[Mapping[str, Any]]) -> None:
    rows = [[name.upper() for name in COLUMNS], *([str(event[name]) for name in COLUMNS] for event in events)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row, event in zip(rows, [{}, *events], strict=True):
        print("  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip())
        if event.get("lastError"):
            print(f"    {event['lastError']}")


def _print_in_full(event: Mapping[str, Any]) -> None:
    print()
    for name, value in event.items():
        if name == "actions":
            for action in value:
                print(f"{action['at']}  {action['action']} by {action['operator']}: {action['reason']}")
        elif value not in (None, ""):
            print(f"{name:<13}  {value}")


def _legible(event: Mapping[str, Any]) -> dict[str, Any]:
    """The event with its seconds as a person says them."""
    due = event["dueInSeconds"]
    times = {
        "secondsInState": ("for", _span(event["secondsInState"])),
        "ageSeconds": ("age", _span(event["ageSeconds"])),
        "dueInSeconds": ("due in", "" if due is None else _span(due)),
    }
    return dict(times.get(name, (name, value)) for name, value in event.items())


def _span(seconds: float) -> str:
    """So many seconds, in the two largest units that they have."""
    minutes, seconds = divmod(round(seconds), 60)
    hours, minutes = divmod(minutes, 60)
    days, hours = divmod(hours, 24)
    parts = [
        f"{number} {unit}" for number, unit in ((days, "d"), (hours, "h"), (minutes, "min"), (seconds, "s")) if number
    ]
    return " ".join(parts[:2]) or "0 s"


def _word(text: str) -> str:
    """The text as a word between the quotes of ARGS; unsaid where neither make nor a shell would leave it alone."""
    plain = set(string.ascii_letters + string.digits + "_-.:+,/ ")
    if not set(text) <= plain:
        return UNSAID
    return f'"{text}"' if " " in text else text
