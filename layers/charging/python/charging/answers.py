"""What operators are told: an answer in JSON's types, and in words that are understood at 3 a.m."""

import math
from collections.abc import Sequence
from dataclasses import asdict
from typing import Any

from charging import errors, instructions, operations
from charging.database import Database
from charging.instructions import Help, Inspect, List, Park, Redrive
from charging.operations import Change, Details, Event, Findings, Parked, Redriven

type Answer = dict[str, Any]

# Of a change, or of what would be one. Its record names all of them.
SHOWN_EVENTS = 20
# The threshold of the alarm on OutboxOldestAge.
LATE_SECONDS = 60


def answer(database: Database, document: object) -> Answer:
    """Does what a document asks for and says what was done.

    Every answer has a `summary` and says what to do `next`; `nextDocument` is the document that does it, where there is
    one. A document that is not acceptable is answered too, with its `violations`. Raises as `Database.fetch` does; once
    a change is sent, a lost connection leaves it open whether it was made.
    """
    try:
        instruction = instructions.read(document)
    except errors.InvalidRequest as refused:
        return _refusal(refused)
    match instruction:
        case Help():
            return _explanation()
        case List():
            return _listed(instruction, operations.find(database, instruction))
        case Inspect():
            return _inspected(instruction, *operations.inspect(database, instruction))
        case Redrive():
            return _redriven(instruction, operations.redrive(database, instruction))
        case Park():
            return _parked(instruction, operations.park(database, instruction))


def _refusal(refused: errors.InvalidRequest) -> Answer:
    return {
        "summary": "Nothing was done: the document is not acceptable.",
        "violations": [asdict(violation) for violation in refused.violations],
        "next": "Correct what violations lists. help explains every command and its members.",
        "nextDocument": {"command": "help"},
    }


def _explanation() -> Answer:
    return {
        "command": "help",
        "summary": "A document has a command and the members that it takes. list and inspect change nothing. redrive "
        "and park change nothing without apply.",
        "commands": instructions.explained(),
        "next": "list shows what there is.",
        "nextDocument": {"command": "list", "operator": "your name"},
    }


def _listed(instruction: List, found: Findings) -> Answer:
    states = ["waiting", "parked"] if instruction.state is None else [instruction.state]
    numbers = {state: sum(count.number for count in found.counts if count.state == state) for state in states}
    if numbers.get("parked"):
        following = "Parked events stay until somebody acts: inspect one, mend what its lastError says, and redrive."
    elif found.events:
        following = "inspect shows one of them in full."
    else:
        following = "There is nothing to do here."
    summary = " ".join(f"{state.capitalize()}: {_number(number)}." for state, number in numbers.items())
    return _answer(instruction, found, summary, following)


def _inspected(instruction: Inspect, found: Findings, details: Sequence[Details]) -> Answer:
    of_how_many = f" of {_number(found.total)}" if found.total > len(found.events) else ""
    if found.events:
        following = "park stops one that waits. redrive sends one that is parked again, or a published one if told so."
    else:
        following = "The outbox has no such event. A published one is removed some time later."
    answered = _answer(instruction, found, f"Shown: {_events(len(found.events))}{of_how_many}.", following)
    answered["events"] = [_event(event) | _details(more) for event, more in zip(found.events, details, strict=True)]
    return answered


def _redriven(instruction: Redrive, change: Change[Redriven]) -> Answer:
    events, redriven = change.found.events, change.changed
    pace = f"under the same ids, {instruction.per_second} a second"
    if redriven:
        pace += f", the last one due at {operations.instant(redriven[-1].next_attempt_at)}"
    else:
        pace += f", in {math.ceil(len(events) / instruction.per_second)} s"
    warnings = []
    if events and instruction.state == "published":
        warnings.append("They were sent before. A subscriber that no longer remembers their ids applies them twice.")
    if late := sum(event.age_seconds > LATE_SECONDS for event in events):
        warnings.append(
            "OutboxOldestAge takes an event's age from its making. Its alarm goes off until these are published: "
            f"{_events(late)}."
        )
    if followed := sum(event.is_followed for event in events):
        warnings.append(f"Later events of the same aggregate were published before these: {_events(followed)}.")
    following = "What the topic refuses again is parked again, with a new lastError. list shows what is left."
    return _changed(
        instruction, change, f"{_events(len(redriven or events), instruction.state)}, {pace}", warnings, following
    )


def _parked(instruction: Park, change: Change[Parked]) -> Answer:
    events, parked = change.found.events, change.changed
    warnings = []
    if claimed := sum(event.was_claimed for event in parked):
        warnings.append(
            f"The relay may have been sending these at that moment: {_events(claimed)}. A message that was sent "
            "arrives, and a redrive sends it once more, under the same id."
        )
    if followed := sum(event.is_followed for event in events):
        warnings.append(
            f"Later events of the same aggregate wait behind these: {_events(followed)}. With EventOrder per-aggregate "
            "they are held up or sent, as the parameter ParkedEvent says; without, they are sent."
        )
    if events:
        warnings.append("OutboxFailed counts parked events. Its alarm stays on until they are redriven.")
    following = "They stay where they are until you redrive them."
    return _changed(instruction, change, _events(len(parked or events), "waiting"), warnings, following)


def _changed(
    instruction: Redrive | Park,
    change: Change[Redriven] | Change[Parked],
    what: str,
    warnings: list[str],
    following: str,
) -> Answer:
    """Tells of a change, or of what would be one."""
    found = change.found
    participle = "redriven" if isinstance(instruction, Redrive) else "parked"
    again: Answer = {**found.selection, "operator": instruction.operator, "apply": True}
    if instruction.reason is not None:
        again["reason"] = instruction.reason
    if not found.events:
        summary = "Nothing matches, and nothing was changed."
        following = "list shows what there is."
        if isinstance(instruction, Redrive) and instruction.state == "parked":
            following = "Only parked events were looked at. For those that were published, give the state published."
    elif not instruction.apply:
        limited = f", of {_number(found.total)} that match" if found.total > len(found.events) else ""
        summary = f"Dry run, nothing was changed. Would be {participle}: {what}{limited}."
        following = f"To do it, apply it{'' if instruction.reason else ' and say why'}."
    else:
        summary = f"{participle.capitalize()}: {what}." if change.changed else "Nothing was changed."
        if skipped := len(found.events) - len(change.changed):
            summary += f" Left alone, since somebody else was changing them: {_events(skipped)}."
        if found.total:
            following = f"More match: {_number(found.total)}. To go on with them, do it again."
    answered = _answer(instruction, found, summary, following, warnings)
    answered["events"] = answered["events"][:SHOWN_EVENTS]
    answered["applied"] = bool(change.changed)
    if change.action is not None:
        answered["action"] = str(change.action)
    if found.total:
        answered["nextDocument"] = again
    return answered


def _answer(
    instruction: List | Inspect | Redrive | Park,
    found: Findings,
    summary: str,
    following: str,
    warnings: Sequence[str] = (),
) -> Answer:
    window = found.window
    if window.since is not None and window.since >= window.until:
        warnings = ["The window is empty: since is not before until.", *warnings]
    return {
        "command": instruction.command,
        "operator": instruction.operator,
        "summary": summary,
        "warnings": list(warnings),
        "next": following,
        "window": {name: at and operations.instant(at) for name, at in asdict(window).items()},
        "counts": [{"state": count.state, "type": count.event_type, "number": count.number} for count in found.counts],
        "events": [_event(event) for event in found.events],
    }


def _event(event: Event) -> Answer:
    due = event.due_in_seconds
    return {
        "id": str(event.id),
        "type": event.event_type,
        "aggregate": str(event.aggregate_id),
        "sequence": event.sequence,
        "state": event.state,
        "secondsInState": round(event.seconds_in_state),
        "ageSeconds": round(event.age_seconds),
        "dueInSeconds": None if due is None else max(0, round(due)),
        "attempts": event.attempts,
        "refusals": event.refusals,
        "lastError": event.last_error,
    }


def _details(details: Details) -> Answer:
    times = {
        "createdAt": details.created_at,
        "nextAttemptAt": details.next_attempt_at,
        "publishedAt": details.published_at,
        "parkedAt": details.failed_at,
    }
    return {
        **{name: at and operations.instant(at) for name, at in times.items()},
        "payloadBytes": details.payload_bytes,
        "payload": details.payload,
        "actions": details.actions,
    }


def _events(number: int, state: str = "") -> str:
    noun = "event" if number == 1 else "events"
    return " ".join(filter(None, [_number(number), state, noun]))


def _number(number: int) -> str:
    return f"{number} or more" if number >= operations.COUNTED_EVENTS else str(number)
