"""Ten thousand generated requests, or as many as FUZZ_EXAMPLES says: four tenths differ in their bodies, three tenths
in their header lines, in every gateway's shape, and three tenths are hostile events.

Bodies and headers are put together from parts that are known to be good or bad, so that each request's answer is known
beforehand and without the code under test. Requests are sent in batches, for the sake of time; a batch that fails is
reduced to the request at fault.
"""

import base64
import io
import json
import logging
import os
from collections.abc import Iterator, Sequence
from contextlib import redirect_stdout
from dataclasses import dataclass, field
from typing import Any
from uuid import UUID

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from charging import telemetry
from tests.conftest import Connect
from tests.support.invocation import CHARGES, Answer, Event, Instance, charge_event, sample
from tests.support.ledger import Connection, counts
from tests.support.shapes import SHAPES, Request

REQUESTS = int(os.environ.get("FUZZ_EXAMPLES", "10000"))
BATCH = 20
# Twenty events are long to print, and are printed all the same when one of them is a finding. A thousand requests take
# about five seconds.
pytestmark = [
    pytest.mark.filterwarnings("ignore:Generating overly large repr"),
    pytest.mark.timeout(300 + REQUESTS // 50),
]

# Words that are found again wherever they end up. Every key begins alike.
PRINCIPAL, REFERENCE = "principal-7f3a", "reference-7f3a"
KEY_PREFIX = "8e03978e-40d5-43e8-bc93-"


def key(number: int) -> UUID:
    return UUID(f"{KEY_PREFIX}{number:012x}")


def fuzz(tenths: int) -> settings:
    """The settings of a property that gets so many tenths of the requests."""
    return settings(
        max_examples=max(REQUESTS * tenths // 10 // BATCH, 1),
        deadline=None,
        suppress_health_check=list(HealthCheck),
    )


# Amount, currency, reference.
type Command = tuple[int, str, str | None]


@dataclass(slots=True)
class Service:
    """A warm instance, its database, and its log."""

    instance: Instance
    database: Connection
    log: io.StringIO = field(default_factory=io.StringIO)
    known: dict[UUID, tuple[Command, str]] = field(default_factory=dict)
    charges: int = 0
    logged: set[str] = field(default_factory=set)

    def call(self, event: Event) -> Answer:
        """Sends a request. Whatever it is, the answer and the log tell nobody what they should not."""
        self.log.seek(0)
        self.log.truncate()
        # Here, since pytest has a standard output of its own for each phase of a test.
        with redirect_stdout(self.log):
            answer = self.instance.call(event)
        assert_discreet(answer)
        self.logged = {found for line in self.log.getvalue().splitlines() if (found := key_in(line))}
        return answer

    def assert_answered(self, event: Event, used: UUID, command: Command | None, *, code: str) -> None:
        """The request is answered as it must be after all that went before: with the code where it is no command."""
        answer = self.call(event)
        # A key that is not well formed is not logged, and least of all the one of the request before.
        assert self.logged == (set() if code in NO_KEY else {str(used)})
        if command is None:
            assert answer.code == code
            assert answer.status == STATUSES[code]
            return
        before, body = self.known.setdefault(used, (command, answer.body))
        if before != command:
            assert answer.code == "idempotency_key_reused"
        else:
            assert (answer.status, answer.body) == (201, body)
            assert answer.is_replay == (len(self.known) == self.charges)
            self.charges = len(self.known)

    def created(self) -> int:
        """How many charges there are, each with its event. Every key has one: none expires here."""
        charges, events, keys = counts(self.database)
        assert charges == events == keys
        return charges

    def assert_rows_discreet(self) -> None:
        """No key beside its own column; no principal in a stored answer, and no reference but in its body. A gateway
        may name a principal as it likes."""
        leaks = self.database.execute(
            "SELECT (SELECT count(*) FROM charges WHERE strpos(lower(charges::text), %(key)s) > 0), "
            "(SELECT count(*) FROM outbox WHERE strpos(lower(outbox::text), %(key)s) > 0), "
            "(SELECT count(*) FROM idempotency_keys"
            " WHERE strpos(lower(response_headers::text || response_body), %(key)s) > 0"
            "  OR strpos(response_headers::text || response_body, %(principal)s) > 0"
            "  OR strpos(concat(endpoint, fingerprint, response_headers), %(reference)s) > 0)",
            {"key": KEY_PREFIX, "principal": PRINCIPAL, "reference": REFERENCE},
        ).fetchall()
        assert leaks == [(0, 0, 0)]


def assert_discreet(answer: Answer) -> None:
    """No answer has a key or a principal in it, and only a charge its reference."""
    text = json.dumps([*answer.headers.items(), answer.body]).lower()
    assert KEY_PREFIX not in text
    assert PRINCIPAL not in text
    assert answer.status in (200, 201) or REFERENCE not in text


def key_in(line: str) -> str | None:
    """The key that a line of the log tells. It has a member of its own and is nowhere else, which is no metric and no
    dimension; and no line has a principal or a reference in it."""
    assert PRINCIPAL not in line
    assert REFERENCE not in line
    members = json.loads(line)
    logged: str | None = members.pop("idempotency_key", None)
    assert KEY_PREFIX not in json.dumps(members).lower()
    return logged


@pytest.fixture
def service(database_url: str, connect: Connect, monkeypatch: pytest.MonkeyPatch) -> Iterator[Service]:
    """One service for all requests of a property, so that each finds what the ones before have left."""
    made = Service(Instance("charges", database_url, CHARGES), connect())
    telemetry.logger("charges")
    log = logging.getLogger("charges")
    monkeypatch.setattr(log, "propagate", False)  # pytest would keep every line
    (handler,) = log.handlers
    assert isinstance(handler, logging.StreamHandler)
    before = handler.setStream(made.log)
    yield made
    handler.setStream(before)
    made.instance.close()
    made.assert_rows_discreet()
    assert made.created()


# How many keys are used; the fewer, the more replays.
numbers = st.integers(0, 199)
STATUSES = {
    "idempotency_key_missing": 400,
    "idempotency_key_invalid": 400,
    "invalid_request": 400,
    "unauthenticated": 401,
    "payload_too_large": 413,
    "unsupported_media_type": 415,
}
# Refused before there is a key to log.
NO_KEY = ("idempotency_key_missing", "idempotency_key_invalid", "unauthenticated")


# ---- bodies ---------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class Part:
    """A piece of a request, and whether a request that has it can be good."""

    text: str
    is_good: bool


def good(*texts: str) -> list[Part]:
    return [Part(text, is_good=True) for text in texts]


def bad(*texts: str) -> list[Part]:
    return [Part(text, is_good=False) for text in texts]


AMOUNTS = good("1", "2", "4900", "999999999999") + bad(
    *("0", "-0", "-1", "1000000000000", "9007199254740993", "9" * 4_301, "-" + "9" * 5_000, "4900.0", "4.9e3", "1e999"),
    *('"1"', "true", "null", "NaN", "-Infinity", "[1]", "{}", "01", "+1", "0x1", "1_0", "\u0661", "1 2", ""),
)
CURRENCIES = good('"USD"', '"EUR"', '"\\u0055SD"') + bad(
    *('"usd"', '"US"', '"USDX"', '"US1"', '"USD\\n"', '" USD"', '"\u0421\u0410\u0414"', '""', "null", "1", "USD")
)
REFERENCES = good(
    *(f'"{REFERENCE}"', '"x"', '"\\u00e9"', '"\u00e9"', '"\\ud83d\\ude00"', '"\\"\\\\/"', '"\u2028"'),
    *(f'"{"x" * 64}"', f'"{"\U0001f600" * 64}"', '"null"', '"%s{}"'),
) + bad('""', "null", "7", "[]", f'"{REFERENCE * 5}"', '"\\u0000"', '"\\ud83d"', '"\\udc00\\ud83d"', '"\n"', '"\\x"')
NAMES = ("amountCents", "currency", "reference")
VALUES = dict(zip(NAMES, (AMOUNTS, CURRENCIES, REFERENCES), strict=True))
STRANGERS = bad('"x":1', '"Currency":"EUR"', '"amount_cents":1', '"\\ud83d":1', '"":null', '"__proto__":{}', '"x":NaN')
BLANKS = good(*("", "", "", " ", "\r\n\t ")) + bad("\u00a0", "\f", "//", "\0", ",", "\ufeff")
BEFORE = good("", "", "", " \r\n") + bad("\ufeff", "[", "\0", ")]}'", "{}")
AFTER = good("", "", "", "\n") + bad("}", "]", ",", "\0", "{}", "x")


@st.composite
def written(draw: st.DrawFn) -> tuple[str, bool]:
    """A body, and whether it is a command: good but for a part or two, mostly."""

    def part(parts: Sequence[Part]) -> Part:
        return draw(st.sampled_from(parts))

    spoils = draw(st.sampled_from(["", "", "value", "value", "stranger", "blank", "frame", "twice", "missing"]))
    names = ["amountCents", *(name for name in NAMES[1:] if draw(st.booleans()))]
    if spoils == "missing":
        names = names[1:]
    if spoils == "twice":
        names.append(draw(st.sampled_from(names)))
    blank = part(BLANKS if spoils == "blank" else BLANKS[:5])
    parts = [blank]
    members = []
    for name in names:
        values = VALUES[name]
        value = part(values if spoils == "value" else [each for each in values if each.is_good])
        parts.append(value)
        members.append(f'{blank.text}"{name}"{blank.text}:{blank.text}{value.text}')
    if spoils == "stranger":
        parts.append(part(STRANGERS))
        members.append(parts[-1].text)
    if spoils == "frame":
        before, after = part(BEFORE), part(AFTER)
        parts += [before, after]
    else:
        before = after = Part("", is_good=True)
    if draw(st.booleans()):
        members.reverse()
    body = f"{before.text}{{{','.join(members)}}}{after.text}"
    return body, all(each.is_good for each in parts) and spoils not in ("twice", "missing")


def meaning(body: str) -> Command:
    members = json.loads(body)
    return members["amountCents"], members.get("currency", "USD"), members.get("reference")


@fuzz(tenths=4)
@given(st.lists(st.tuples(written(), numbers), min_size=BATCH, max_size=BATCH))
def test_a_body_is_taken_if_and_only_if_it_is_a_command(
    service: Service, requests: list[tuple[tuple[str, bool], int]]
) -> None:
    """A command is created, or under a used key replayed or refused; anything else is 400 and leaves no row."""
    for (body, is_command), number in requests:
        event = charge_event(key(number), body, principal=PRINCIPAL)
        service.assert_answered(event, key(number), meaning(body) if is_command else None, code="invalid_request")
    assert service.created() == service.charges


# ---- header lines ---------------------------------------------------------------------------------------------------

SPELLINGS = good("{}", "{}", '"{}"', " {}\t", '\t"{}" ') + bad(
    *(
        "{{}}",
        "urn:uuid:{}",
        "{},",
        "{};v=1",
        '"{}";v=1',
        "'{}'",
        '"{}',
        '{}"',
        '""{}""',
        "{}0",
        "0{}",
        "{} {}",
        "{},{}",
    ),
    *("", '""', "\u00a0{}", "{}\n", "{}\0", "\u201c{}\u201d", ":{}:", "null", "\ud800", "*"),
)
MEDIA_TYPES = good(
    "application/json", "APPLICATION/JSON", "application/json; charset=utf-8", 'application/json ;charset="UTF-8"'
) + bad(
    *("", "text/plain", "application/jsonx", "application/json, text/plain", "application/json; charset=latin-1"),
    *("application/json;", "application/json\n", "application/problem+json", "*/*", "\u00e9"),
)
# None of these is a reason to refuse a request, or to take it for somebody's.
FURTHER = [
    ("X-Local-Principal", PRINCIPAL),
    ("Authorization", f"Bearer {PRINCIPAL}"),
    ("x-amzn-oidc-identity", PRINCIPAL),
    ("traceparent", "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"),
    ("Traceparent", '"},"x":"'),
    ("Cookie", f"session={REFERENCE}"),
    ("Content-Length", "-1"),
    ("Content-Encoding", "gzip"),
    ("Accept", "text/html"),
    ("X-HTTP-Method-Override", "GET"),
    ("", ""),
    ("\u00e9\0", "\ud800"),
]
CASES = [str.title, str.lower, str.upper]


@dataclass(frozen=True, slots=True)
class Sent:
    """A request in a gateway's shape, and what it must come to: a command, or a problem's code."""

    event: Event
    number: int
    command: Command | None
    code: str


@st.composite
def sent(draw: st.DrawFn) -> Sent:
    number = draw(numbers)
    principal = PRINCIPAL if draw(st.integers(0, 9)) else None
    keys, code = lines(draw, "idempotency-key", SPELLINGS, "idempotency_key_missing", "idempotency_key_invalid")
    types, type_code = lines(draw, "content-type", MEDIA_TYPES, "unsupported_media_type", "unsupported_media_type")
    amount = draw(st.sampled_from([1, 1, 4900]))
    body = json.dumps({"amountCents": amount, "reference": REFERENCE})
    if is_long := not draw(st.integers(0, 19)):
        body = body.ljust(16 * 1024 + 1)
    problem = "" if principal else "unauthenticated"
    problem = problem or code or type_code or ("payload_too_large" if is_long else "")
    written_key = draw(st.sampled_from([str(key(number)), str(key(number)).upper()]))
    headers = [(name, value.replace("{}", written_key)) for name, value in keys]
    headers += types + draw(st.lists(st.sampled_from(FURTHER), max_size=2))
    shape = SHAPES[draw(st.sampled_from(sorted(SHAPES)))]
    path = draw(st.sampled_from(["/charges", "/charges/"]))
    event = shape(Request("POST", path, {}, draw(st.permutations(headers)), body.encode(), principal))
    return Sent(event, number, None if problem else (amount, "USD", REFERENCE), problem)


def lines(
    draw: st.DrawFn, name: str, values: list[Part], missing: str, invalid: str
) -> tuple[list[tuple[str, str]], str]:
    """A header's lines, one good one mostly, and the code of the problem that they are."""
    among = values if not draw(st.integers(0, 4)) else [value for value in values if value.is_good]
    count = draw(st.sampled_from([1] * 12 + [0, 2]))
    chosen = [draw(st.sampled_from(among)) for _ in range(count)]
    written = [(draw(st.sampled_from(CASES))(name), value.text) for value in chosen]
    if not written:
        return written, missing
    return written, "" if len(written) == 1 and chosen[0].is_good else invalid


@fuzz(tenths=3)
@given(st.lists(sent(), min_size=BATCH, max_size=BATCH))
def test_header_lines_are_read_alike_in_every_shape(service: Service, requests: list[Sent]) -> None:
    """Whoever sends them, however spelt, in whatever order, with whatever beside them: one answer, known beforehand."""
    for request in requests:
        service.assert_answered(request.event, key(request.number), request.command, code=request.code)
    assert service.created() == service.charges


# ---- events ---------------------------------------------------------------------------------------------------------

ODD: list[Any] = [
    *(None, True, False, 0, -1, 1.5, 1e308, 10**30),
    *("", " ", "/", "//", "\0", "\ud800", "\u00e9", "{", "null", "x" * 20_000, "POST", "GET", "OPTIONS", "2.0", "prod"),
    *("/charges", "/charges/", "/charges\n", "/prod/charges", "/prod/prod/charges", f"/charges/{key(1)}", "/Charges"),
    *("application/json", "text/plain", "application/json; charset=utf-8", str(key(1)), f"{{{key(1)}}}", "a" * 32),
    *([], {}, [None], [[]], [{}], {"": None}, {"sub": None}, {"sub": "mallory"}, {"principalId": 1}, {"elb": {}}),
    *(
        {"idempotencyKey": str(key(1))},
        {"idempotencyKey": [str(key(1))]},
        {"Idempotency-Key": [str(key(1)), str(key(1))]},
    ),
]
texts = st.text(st.characters(codec=None), max_size=8)
odd = st.sampled_from(ODD) | texts
keys = (
    st.sampled_from([str(key(1)), f'"{key(1)}"', str(key(1)).upper(), f"{{{key(1)}}}", str(key(1))[:-1], "", "\u0660"])
    | texts
)
member = st.tuples(
    st.sampled_from(['"amountCents"', '"currency"', '"reference"', '"x"', '"\\ud83d"']),
    st.sampled_from([part.text for values in VALUES.values() for part in values]),
)
objects = st.lists(member, max_size=4).map(
    lambda drawn: "{" + ",".join(f"{name}:{value}" for name, value in drawn) + "}"
)
bodies = st.sampled_from(['{"amountCents":1}', '{"amountCents":1,"currency":"EUR"}']) | objects | texts


def places(value: Any, place: tuple[str, ...] = ()) -> Iterator[tuple[str, ...]]:
    """Where an event can be spoilt: at each of its members, however deep."""
    for name, inner in value.items() if isinstance(value, dict) else ():
        yield (*place, name)
        yield from places(inner, (*place, name))


def spoil(event: Event, spoils: list[tuple[tuple[str, ...], Any]]) -> Event:
    for (*above, name), value in spoils:
        target: Any = event
        for step in above:
            target = target.get(step) if isinstance(target, dict) else None
        if isinstance(target, dict):
            target[name] = value
    return event


SAMPLES = ["charge-rest", "charge-http-api", "charge-load-balancer", "charge-sam-local", "charge-emulator"]
PLACES = sorted({place for name in SAMPLES for place in places(sample(name))})

proper = st.builds(charge_event, keys, bodies)
# A proper request, or a gateway's sample, of which some parts have been replaced.
spoilt = st.builds(
    spoil,
    proper | st.sampled_from(SAMPLES).map(sample),
    st.lists(st.tuples(st.sampled_from(PLACES), odd | bodies), max_size=3),
)
garbage = st.dictionaries(st.sampled_from(sorted({place[0] for place in PLACES})) | texts, odd | bodies, max_size=6)


def names_somebody(value: Any) -> bool:
    """Whether a member of this name, however deep, is a text."""
    if not isinstance(value, dict):
        return False
    vouching = ("principalId", "sub", "userArn", "identityId", "cognitoIdentityId")
    return any(
        names_somebody(inner) or (name in vouching and isinstance(inner, str) and inner)
        for name, inner in value.items()
    )


def is_proper(event: Event) -> bool:
    """Whether an event can have been charged at all, told without the code under test: the gateway names somebody in
    it, its path is that of charges, and its body has an integer amount within the bounds."""
    context = event["requestContext"]
    body = base64.b64decode(event["body"]).decode() if event.get("isBase64Encoded") is True else event["body"]
    amount = json.loads(body)["amountCents"]
    return (
        (names_somebody(context.get("authorizer")) or names_somebody(context.get("identity")))
        and any(
            isinstance(path, str) and path.strip().rstrip("/").endswith("/charges")
            for path in (event.get("rawPath"), event.get("path"))
        )
        and type(amount) is int
        and 1 <= amount <= 999_999_999_999
    )


@fuzz(tenths=3)
@given(st.lists(proper | spoilt | garbage, min_size=BATCH, max_size=BATCH))
def test_no_event_breaks_the_function(service: Service, events: list[Event]) -> None:
    """Whatever arrives: an answer and no exception, no 5xx, and a row only for a proper request that says 201."""
    expected = service.created()
    for event in events:
        answer = service.call(event)
        assert answer.status in (200, 201, 400, 401, 404, 413, 415, 422)
        if answer.status == 201:
            assert is_proper(event)
            expected += not answer.is_replay
    assert service.created() == expected
