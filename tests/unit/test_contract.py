"""The contract's grammar: which headers and bodies are taken, and when two requests are the same command."""

import json
import os
import re
import subprocess
import sys
from typing import Any
from uuid import UUID

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from pydantic import Field, create_model

from charging import contract, errors, sql
from charging.charges import ChargeCommand
from charging.contract import Command
from charging.errors import Violation
from charging.refunds import RefundCommand

KEY = "8e03978e-40d5-43e8-bc93-6894a57f9324"

AMOUNT = Violation("amountCents", "must be a JSON integer from 1 to 999999999999")
CURRENCY = Violation("currency", "must be three upper-case letters")
REFERENCE = Violation("reference", "must be a text of 1 to 64 characters, none of them NUL, U+FFFE or U+FFFF")

# What is tested is not how fast a busy machine is.
unhurried = settings(deadline=None)

# Half of a surrogate pair, as a JSON escape.
LONE_SURROGATE = r"\ud83d"

NOT_KEYS = {
    "empty": "",
    "only quotes": '""',
    "braces": f"{{{KEY}}}",
    "urn": f"urn:uuid:{KEY}",
    "no hyphens": KEY.replace("-", ""),
    "one hyphen missing": KEY.replace("-", "", 1),
    "moved hyphen": "8e03978-e40d5-43e8-bc93-6894a57f9324",
    "a digit short": KEY[:-1],
    "a digit long": KEY + "0",
    "no hexadecimal digit": KEY.replace("8", "g", 1),
    "parameter": f'"{KEY}";v=1',
    "parameter after a bare key": f"{KEY};v=1",
    "single quotes": f"'{KEY}'",
    "opening quote alone": f'"{KEY}',
    "closing quote alone": f'{KEY}"',
    "quotes twice": f'""{KEY}""',
    "curly quotes": f"\u201c{KEY}\u201d",
    "escaped quotes": f'\\"{KEY}\\"',
    "list": f"{KEY}, {KEY}",
    "list of strings": f'"{KEY}", "{KEY}"',
    "trailing comma": f"{KEY},",
    "byte sequence": f":{KEY}:",
    "arabic digits": KEY.replace("4", "\u0664"),
    "full-width digits": KEY.replace("4", "\uff14"),
    "full-width hyphens": KEY.replace("-", "\uff0d"),
    "long hyphens": KEY.replace("-", "\u2010"),
    "underscores": KEY.replace("-", "_"),
    "space inside": KEY.replace("-", " -", 1),
    "space inside the quotes": f'" {KEY}"',
    "no-break space around": f"\u00a0{KEY}\u00a0",
    "em space around": f"\u2003{KEY}",
    "line feed after": f"{KEY}\n",
    "carriage return after": f"{KEY}\r",
    "form feed around": f"\f{KEY}",
    "NUL after": f"{KEY}\0",
    "lone surrogate": f"\ud800{KEY}",
    "text": "abc",
}


@pytest.mark.parametrize("text", NOT_KEYS.values(), ids=NOT_KEYS.keys())
def test_whatever_is_not_exactly_one_uuid_is_malformed(text: str) -> None:
    """The grammar is 8-4-4-4-12, bare or in double quotes, and nothing beside it but white space around it."""
    with pytest.raises(errors.KeyInvalid):
        contract.idempotency_key([text])


@unhurried
@given(st.uuids(allow_nil=True))
@example(UUID(int=0))
@example(UUID(int=2**128 - 1))
def test_every_uuid_is_a_key_in_all_its_spellings(key: UUID) -> None:
    """Any version, either letter case, bare or quoted, with blanks around it: one key."""
    text = str(key)
    spellings = [text, text.upper(), f'"{text}"', f'"{text.upper()}"', f" \t{text}\t ", f' "{text}" ']
    assert {contract.idempotency_key([spelling]) for spelling in spellings} == {key}


@unhurried
@given(st.text(st.characters(codec=None), max_size=60) | st.from_regex(r'["\s{]?[-0-9a-fA-F]{34,38}["\s}]?'))
def test_no_header_breaks_the_parser(text: str) -> None:
    """A key comes back only for text that, trimmed and unquoted, is that key; anything else is KeyInvalid."""
    try:
        key = contract.idempotency_key([text])
    except errors.KeyInvalid:
        return
    assert text.strip(" \t").strip('"').lower() == str(key)


def test_no_line_is_a_missing_key() -> None:
    """A request without the header is told so, not that its key is malformed."""
    with pytest.raises(errors.KeyMissing):
        contract.idempotency_key([])


@pytest.mark.parametrize("lines", [[KEY, KEY], [KEY, ""], ["", ""]])
def test_a_key_on_two_lines_is_malformed(lines: list[str]) -> None:
    """Two readers could take them for two keys, even where they are equal."""
    with pytest.raises(errors.KeyInvalid):
        contract.idempotency_key(lines)


@pytest.mark.parametrize(
    "value",
    [
        "application/json",
        "APPLICATION/JSON",
        " application/json\t",
        "application/json;charset=utf-8",
        "application/json ; charset=UTF-8",
        'application/json; Charset="utf-8"',
    ],
)
def test_json_in_utf8_is_the_media_type(value: str) -> None:
    """Its names have no letter case, and a charset is allowed where it is the one that JSON has."""
    contract.require_json([value])


@pytest.mark.parametrize(
    "lines",
    [
        [],
        [""],
        ["text/json"],
        ["text/plain"],
        ["application/x-www-form-urlencoded"],
        ["multipart/form-data; boundary=x"],
        ["application/problem+json"],
        ["application/jsonx"],
        ["application/json, text/plain"],
        ["application/json; charset=latin-1"],
        ["application/json; charset=utf-16"],
        ["application/json; charset='utf-8'"],
        ["application/json\n"],
        ["application/json", "application/json"],
    ],
)
def test_every_other_media_type_is_refused(lines: list[str]) -> None:
    """A body that is not declared as JSON is not guessed at."""
    with pytest.raises(errors.UnsupportedMediaType):
        contract.require_json(lines)


TRACE = "00-4bf92f3577b34da6a3ce929d0e0e4736-00f067aa0ba902b7-01"


@pytest.mark.parametrize(
    ("lines", "expected"),
    [
        ([TRACE], TRACE),
        ([], None),
        ([TRACE, TRACE], None),
        ([TRACE.upper()], None),
        ([TRACE + "\n"], None),
        ([TRACE + "-extra"], None),
        (["ff" + TRACE[2:]], None),
        ([TRACE.replace("4bf92f3577b34da6a3ce929d0e0e4736", "0" * 32)], None),
        ([TRACE.replace("00f067aa0ba902b7", "0" * 16)], None),
        (['"},"x":"'], None),
    ],
)
def test_a_trace_context_is_carried_if_it_is_one(lines: list[str], expected: str | None) -> None:
    """What is no W3C traceparent is left out, and never fails the charge."""
    assert contract.traceparent(lines) == expected


def parse(body: str | bytes) -> ChargeCommand:
    return contract.parse(ChargeCommand, body if isinstance(body, bytes) else body.encode())


def violations(body: str | bytes) -> list[Violation]:
    with pytest.raises(errors.InvalidRequest) as refused:
        parse(body)
    return list(refused.value.violations)


def test_a_command_needs_only_its_amount() -> None:
    """The currency is then USD, and there is no reference."""
    command = parse('{"amountCents":4900}')
    assert (command.amount_cents, command.currency, command.reference) == (4900, "USD", None)


@pytest.mark.parametrize("amount", [1, 2, 4900, 999_999_999_999])
def test_amounts_within_the_bounds_are_taken(amount: int) -> None:
    """Both bounds belong to the range."""
    assert parse(f'{{"amountCents":{amount}}}').amount_cents == amount


@pytest.mark.parametrize(
    "amount",
    [
        "0",
        "-0",
        "-1",
        "-999999999999999999999",
        "1000000000000",
        "9007199254740993",
        "9223372036854775808",
        "9" * 5000,
        "-" + "9" * 5000,
        "4900.0",
        "4.9e3",
        "49E2",
        "1e400",
        '"4900"',
        "true",
        "null",
        "[4900]",
        '{"value":4900}',
        '""',
    ],
    ids=lambda amount: amount[:24],
)
def test_only_an_integer_within_the_bounds_is_an_amount(amount: str) -> None:
    """4900.0, 4.9e3, "4900" and true are not JSON integers, whatever a language makes of them."""
    assert violations(f'{{"amountCents":{amount}}}') == [AMOUNT]


@pytest.mark.parametrize("amount", ["01", "+1", "0x10", "1_000", "1,000", ".5", "1.", "1e", "\u0661", "--1"])
def test_what_json_does_not_call_a_number_is_no_json(amount: str) -> None:
    """Python's own int() would take several of these."""
    (violation,) = violations(f'{{"amountCents":{amount}}}')
    assert violation.member == ""


@pytest.mark.parametrize(
    "currency", ['"usd"', '"US"', '"USDX"', '"US1"', '"US\\n"', '"USD\\n"', '"\u0421\u0410\u0414"', "null", "1"]
)
def test_a_currency_is_three_upper_case_letters(currency: str) -> None:
    """Nothing is upper-cased or trimmed for the caller, and letters are those of ASCII."""
    assert violations(f'{{"amountCents":1,"currency":{currency}}}') == [CURRENCY]


@pytest.mark.parametrize("reference", ["x", "x" * 64, "\U0001f600" * 64, "\u00e9", " ", '"', "\n", "\u2028"])
def test_a_reference_is_any_text_of_1_to_64_characters(reference: str) -> None:
    """Characters are counted, not bytes, and the text is kept as it is."""
    assert parse(json.dumps({"amountCents": 1, "reference": reference})).reference == reference


@pytest.mark.parametrize(
    "reference",
    ['""', f'"{"x" * 65}"', "null", "1", "[]", '"a\\u0000b"', f'"{LONE_SURROGATE}"', f'"a{LONE_SURROGATE}z"'],
)
def test_no_other_reference_is_taken(reference: str) -> None:
    """Empty, too long, no text, a NUL, half of a surrogate pair; and null is not how a member is left out."""
    assert violations(f'{{"amountCents":1,"reference":{reference}}}') == [REFERENCE]


@pytest.mark.parametrize(
    ("body", "member"),
    [
        ('{"amountCents":1,"amount":2}', "amount"),
        ('{"amountCents":1,"amount_cents":2}', "amount_cents"),
        ('{"amountCents":1,"AmountCents":2}', "AmountCents"),
        ('{"amountCents":1,"":2}', ""),
        ('{"amountCents":1,"__proto__":{}}', "__proto__"),
        ('{"amountCents":1,"principal":"mallory"}', "principal"),
    ],
)
def test_an_unknown_member_is_refused(body: str, member: str) -> None:
    """A misspelt member would otherwise be a charge that its caller did not mean."""
    assert violations(body) == [Violation(member, "is not a member of this command")]


@pytest.mark.parametrize(
    "body",
    [
        '{"amountCents":1,"amountCents":1}',
        '{"amountCents":1,"amountCents":2}',
        '{"amountCents":1,"amount\\u0043ents":2}',
    ],
)
def test_a_member_given_twice_is_refused(body: str) -> None:
    """Readers differ in which one they take. An escaped name is the same name."""
    assert violations(body) == [Violation("amountCents", "must be given once")]


@pytest.mark.parametrize("constant", ["NaN", "Infinity", "-Infinity"])
def test_a_constant_that_json_does_not_have_is_refused(constant: str) -> None:
    """Python's parser takes them. They are refused wherever they stand."""
    found = violations(f'{{"amountCents":1,"reference":{constant}}}')
    assert Violation("", f"must not use {constant}, which is no JSON value") in found


@pytest.mark.parametrize(
    "body",
    [
        b"",
        b" ",
        b"null",
        b"4900",
        b'"amountCents"',
        b"[]",
        b'[{"amountCents":1}]',
        b'{"amountCents":1',
        b'{"amountCents":1}}',
        b'{"amountCents":1}{"amountCents":1}',
        b"{'amountCents':1}",
        b'{"amountCents":1,}',
        b"{amountCents:1}",
        b'{"amountCents":1}//',
        b'{"amountCents":1}\0',
        b'{"reference":"a\nb"}',
        b"amountCents=1",
        b"\xff\xfe{\x00}\x00",
        b'{"reference":"\xff"}',
        b'{"reference":"\xed\xa0\x80"}',
        b'{"reference":"\xc0\x80"}',
        b'\xef\xbb\xbf{"amountCents":1}',
        b"\x1f\x8b\x08\x00",
        b"[" * 16_000,
        b'{"a":' * 3_000,
        b"{" + b'"a":[' * 2_000 + b"]" * 2_000 + b"}",
    ],
    ids=lambda body: repr(body[:20]),
)
def test_a_body_that_is_no_json_object_is_refused_as_a_whole(body: bytes) -> None:
    """No JSON, no object, no UTF-8, a byte order mark, two values, nesting without an end: one reason each."""
    found = violations(body)
    assert found
    assert found[0].reason


@pytest.mark.parametrize("depth", [10, 500, 2_000, 8_000])
def test_nesting_is_refused_and_not_followed(depth: int) -> None:
    """However deep an object nests within the body's bound, its command is refused and nothing overflows."""
    assert violations(b'{"amountCents":' + b"[" * depth + b"]" * depth + b"}")


def test_a_member_name_that_is_no_text_is_refused_and_not_quoted() -> None:
    """Half of a surrogate pair in a name could not be written into the answer."""
    found = violations(f'{{"amountCents":1,"{LONE_SURROGATE}":1}}')
    assert found == [Violation("", "has a member whose name is not Unicode text")]


def test_every_violation_is_listed_at_once() -> None:
    """A caller corrects a body in one go, not member by member."""
    body = '{"currency":"usd","reference":"","colour":1,"colour":2,"size":NaN}'
    assert set(violations(body)) == {
        Violation("amountCents", "is required, as a JSON integer from 1 to 999999999999"),
        CURRENCY,
        REFERENCE,
        Violation("colour", "must be given once"),
        Violation("colour", "is not a member of this command"),
        Violation("size", "is not a member of this command"),
        Violation("", "must not use NaN, which is no JSON value"),
    }


def test_a_body_has_at_most_16_kib() -> None:
    """The bound counts bytes and includes its own number; white space counts too."""
    command = b'{"amountCents":1}'
    assert parse(command.ljust(16 * 1024)).amount_cents == 1
    with pytest.raises(errors.PayloadTooLarge):
        parse(command.ljust(16 * 1024 + 1))


json_values = st.recursive(
    st.none() | st.booleans() | st.integers() | st.floats() | st.text(st.characters(codec=None)),
    lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(max_size=5), inner, max_size=4),
    max_leaves=12,
)
members = st.dictionaries(
    st.sampled_from(["amountCents", "currency", "reference", "amount_cents", ""]) | st.text(max_size=5),
    json_values | st.integers(1, 999_999_999_999) | st.just("EUR"),
    max_size=5,
)


@unhurried
@given(members.map(lambda value: json.dumps(value).encode()) | st.binary(max_size=200))
def test_a_body_is_a_command_or_an_invalid_request(body: bytes) -> None:
    """Nothing else comes out of any body; and what comes out as a command keeps every bound."""
    try:
        command = parse(body)
    except errors.InvalidRequest:
        return
    assert 1 <= command.amount_cents <= 999_999_999_999
    assert len(command.currency) == 3
    assert command.reference is None or 1 <= len(command.reference) <= 64


characters = st.characters(codec="utf-8", exclude_characters="\0")
commands = st.builds(
    lambda amount, currency, reference: ChargeCommand.model_validate(
        {"amountCents": amount, "currency": currency} | ({} if reference is None else {"reference": reference})
    ),
    st.integers(1, 999_999_999_999),
    st.from_regex(r"[A-Z]{3}", fullmatch=True),
    st.none() | st.text(characters, min_size=1, max_size=64),
)


def escaped(text: str, which: list[bool]) -> str:
    """The text as a JSON string, each character escaped or not as its turn in `which` says."""
    out = []
    for number, character in enumerate(text):
        plain = json.dumps(character, ensure_ascii=False)[1:-1]
        units = character.encode("utf-16-be")
        code = "".join(f"\\u{units[at : at + 2].hex()}" for at in range(0, len(units), 2))
        out.append(code if which[number % len(which)] else plain)
    return '"' + "".join(out) + '"'


@st.composite
def spellings(draw: st.DrawFn, command: ChargeCommand) -> str:
    """A body that means the command: members in any order, white space, escapes, the default given or not."""
    which = draw(st.lists(st.booleans(), min_size=1, max_size=8))
    parts = [("amountCents", str(command.amount_cents))]
    if command.currency != "USD" or draw(st.booleans()):
        parts.append(("currency", escaped(command.currency, which)))
    if command.reference is not None:
        parts.append(("reference", escaped(command.reference, which)))
    blanks = st.text(" \t\r\n", max_size=3)
    given_members = [
        f"{draw(blanks)}{escaped(name, which)}{draw(blanks)}:{draw(blanks)}{value}{draw(blanks)}"
        for name, value in draw(st.permutations(parts))
    ]
    return "{" + ",".join(given_members) + "}"


@unhurried
@given(commands.flatmap(lambda command: st.tuples(st.just(command), spellings(command))))
def test_a_spelling_is_no_difference(case: tuple[ChargeCommand, str]) -> None:
    """White space, member order, escapes and an explicit default leave the fingerprint alone."""
    command, body = case
    assert contract.fingerprint(parse(body)) == contract.fingerprint(command)


@st.composite
def neighbours(draw: st.DrawFn) -> tuple[ChargeCommand, ChargeCommand]:
    """Two commands, often equal, and often different in one member only."""
    one = draw(commands)
    changes: dict[str, Any] = {}
    if draw(st.booleans()):
        changes["amount_cents"] = draw(st.integers(1, 999_999_999_999) | st.just(one.amount_cents))
    if draw(st.booleans()):
        changes["currency"] = draw(st.sampled_from(["USD", "EUR", one.currency]))
    if draw(st.booleans()):
        changes["reference"] = draw(st.none() | st.text(characters, min_size=1, max_size=3) | st.just(one.reference))
    return one, one.model_copy(update=changes)


@unhurried
@given(neighbours())
@example((ChargeCommand(amountCents=12, currency="USD", reference="3"), ChargeCommand(amountCents=123, currency="USD")))
@example((ChargeCommand(amountCents=1, reference="\u00e9"), ChargeCommand(amountCents=1, reference="e\u0301")))
@example((ChargeCommand(amountCents=1, reference='x","y":"z'), ChargeCommand(amountCents=1, reference="x")))
@example((ChargeCommand(amountCents=1, reference="None"), ChargeCommand(amountCents=1)))
def test_fingerprints_are_equal_if_and_only_if_commands_are(pair: tuple[ChargeCommand, ChargeCommand]) -> None:
    """Two requests are the same command exactly when their fingerprints are the same."""
    one, other = pair
    assert (contract.fingerprint(one) == contract.fingerprint(other)) == (one == other)
    assert contract.is_same(contract.fingerprint(one), contract.fingerprint(other)) == (one == other)


def test_the_first_version_of_the_fingerprint_never_changes() -> None:
    """Stored fingerprints outlive a deployment: this one was made by `sha256sum` over the canonical form."""
    command = parse('{"reference":"\\u00e9","amountCents":4900}')
    # printf '{"amountCents":4900,"currency":"USD","reference":"é"}' | sha256sum
    assert contract.fingerprint(command) == "v1:d36573081ca9e0ed887417b50eb550d4620960c617ca6859af3033f68fbc7aa9"


FINGERPRINTS = """
import sys
from charging import contract
from charging.charges import ChargeCommand
for line in sys.stdin.buffer:
    print(contract.fingerprint(contract.parse(ChargeCommand, bytes.fromhex(line.decode()))))
"""


@pytest.mark.parametrize("seed", ["0", "1", "4242"])
@settings(max_examples=3, suppress_health_check=[HealthCheck.data_too_large, HealthCheck.too_slow])
@given(st.lists(commands.flatmap(lambda command: st.tuples(st.just(command), spellings(command))), min_size=20))
def test_every_process_computes_the_same_fingerprint(seed: str, cases: list[tuple[ChargeCommand, str]]) -> None:
    """Nothing that differs between processes, such as the hash seed or the locale, is in it."""
    environment = {**os.environ, "PYTHONHASHSEED": seed, "LC_ALL": "C"}
    other = subprocess.run(
        [sys.executable, "-c", FINGERPRINTS],
        input="".join(f"{body.encode().hex()}\n" for _, body in cases).encode(),
        env=environment,
        capture_output=True,
        check=True,
    )
    assert other.stdout.decode().split() == [contract.fingerprint(command) for command, _ in cases]


# Of all that a refund's statement takes: neither what it is given by name in `refunds` nor the command's.
GIVEN = (
    set(re.findall(r"%\((\w+)\)s", (sql.CREATE_REFUND + sql.AWAIT_TWIN).decode()))
    - {"refund_id", "charge_id"}
    - RefundCommand.model_fields.keys()
)


@pytest.mark.parametrize("name", sorted(GIVEN))
def test_a_field_that_would_be_hidden_cannot_be_defined(name: str) -> None:
    """A command's field has no name by which every statement is given something else, in place of the field."""
    with pytest.raises(TypeError, match=rf"PayoutCommand needs other names for \['{name}'\]"):
        create_model("PayoutCommand", __base__=Command, **{name: (str, ...), "account": (str, ...)})  # type: ignore[call-overload]


class NextCommand(ChargeCommand):
    """The command of a later release, with one more optional member."""

    description: str | None = Field(default=None, description="a text")


@unhurried
@given(commands)
def test_a_release_that_adds_an_optional_member_keeps_old_fingerprints(command: ChargeCommand) -> None:
    """A retry of a request made before the release is still the same command; a use of the new member is another."""
    members_before = command.model_dump(by_alias=True, exclude_none=True)
    stored = contract.fingerprint(command)
    assert contract.is_same(contract.fingerprint(NextCommand.model_validate(members_before)), stored)
    other = NextCommand.model_validate(members_before | {"description": "new"})
    assert not contract.is_same(contract.fingerprint(other), stored)


@unhurried
@given(neighbours())
def test_a_release_that_adds_an_optional_member_tells_the_same_commands_apart(
    pair: tuple[ChargeCommand, ChargeCommand],
) -> None:
    """What was stored before the release is the same command after it exactly when it was before, and back again."""
    one, other = pair
    later = NextCommand.model_validate(one.model_dump(by_alias=True, exclude_none=True))
    assert contract.is_same(contract.fingerprint(later), contract.fingerprint(other)) == (one == other)
    assert contract.is_same(contract.fingerprint(other), contract.fingerprint(later)) == (one == other)


class ReorderedCommand(Command):
    """The command of a release that declares its members in another order."""

    reference: str | None = Field(default=None, description="a text")
    currency: str = Field(default="USD", description="three letters")
    amount_cents: int = Field(alias="amountCents", description="an integer")


@unhurried
@given(commands)
def test_the_order_in_which_a_release_declares_its_members_is_no_difference(command: ChargeCommand) -> None:
    """The canonical form has an order of its own."""
    members_before = command.model_dump(by_alias=True, exclude_none=True)
    reordered = ReorderedCommand.model_validate(members_before)
    assert contract.fingerprint(reordered) == contract.fingerprint(command)


@pytest.mark.parametrize("stored", ["v2:" + "0" * 64, "v10:" + "0" * 64, ""])
def test_a_fingerprint_of_an_unknown_version_is_not_called_different(stored: str) -> None:
    """A newer release stored it. Saying 422 to an honest retry would be wrong, and so would a replay."""
    with pytest.raises(errors.OutcomeUnknown):
        contract.is_same(contract.fingerprint(ChargeCommand(amountCents=1)), stored)
