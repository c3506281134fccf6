"""Signatures of webhooks, as the reference library of Standard Webhooks verifies them."""

import base64
import time
from uuid import UUID, uuid4

import pytest
from hypothesis import given
from hypothesis import strategies as st
from standardwebhooks import Webhook, WebhookVerificationError

from charging import errors, signing

MASTER_KEY = bytes(range(32))
ENDPOINT = UUID("01a22fc4-9395-7a4e-9400-75652bc34a19")
SHOWN = "whsec_MfKQ9r8GKYqrTwjUPD8ILPZIo2LaLaSw"

messages = st.builds(str, st.uuids())
master_keys = st.binary(min_size=32, max_size=64)
versions = st.integers(1, 2**31 - 1)
# The reference library reads a body as text.
bodies = st.text(st.characters(exclude_categories=["Cs"])).map(str.encode)


def verify(shown: str, body: bytes, headers: dict[str, str]) -> None:
    """Verifies as a receiver does; raises when it is not ours."""
    Webhook(shown).verify(body, headers, json_parse=False)


def test_the_published_vector() -> None:
    """The secret, message and signature that the reference libraries are tested with."""
    made = signing.headers("msg_p5jXN8AQM9LWM0D4loKWxJek", 1614265330, b'{"test": 2432232314}', [SHOWN])
    assert made == {
        "webhook-id": "msg_p5jXN8AQM9LWM0D4loKWxJek",
        "webhook-timestamp": "1614265330",
        "webhook-signature": "v1,g0hM9SsE+OTPJTGt/tmIKtSyZlE3uFJELVlNIOLJ1OE=",
    }


@given(master_keys, st.uuids(), versions, messages, bodies)
def test_the_reference_library_verifies_every_request(
    master_key: bytes, endpoint: UUID, version: int, message: str, body: bytes
) -> None:
    """Whatever the secret, the message and the body."""
    shown = signing.secret(master_key, endpoint, version)
    verify(shown, body, signing.headers(message, int(time.time()), body, [shown]))


def test_each_live_secret_verifies_alone() -> None:
    """While a secret is being replaced, a receiver may hold either, and only those."""
    live = [signing.secret(MASTER_KEY, ENDPOINT, version) for version in (7, 8)]
    made = signing.headers(str(uuid4()), int(time.time()), b"{}", live)
    for shown in live:
        verify(shown, b"{}", made)
    with pytest.raises(WebhookVerificationError):
        verify(signing.secret(MASTER_KEY, ENDPOINT, 6), b"{}", made)


@pytest.mark.parametrize("header", ["webhook-id", "webhook-timestamp", "webhook-signature"])
def test_nothing_signed_can_be_exchanged(header: str) -> None:
    """The signature holds the message's id, the moment and the body together."""
    now = int(time.time())
    made = signing.headers(str(uuid4()), now, b'{"amountCents":4900}', [SHOWN])
    others = signing.headers(str(uuid4()), now - 1, b'{"amountCents":4901}', [SHOWN])
    with pytest.raises(WebhookVerificationError, match="No matching signature"):
        verify(SHOWN, b'{"amountCents":4900}', made | {header: others[header]})
    with pytest.raises(WebhookVerificationError, match="No matching signature"):
        verify(SHOWN, b'{"amountCents":4901}', made)


@given(st.lists(st.tuples(master_keys, st.uuids(), versions), min_size=2, max_size=20, unique=True))
def test_no_two_secrets_are_the_same(given_parts: list[tuple[bytes, UUID, int]]) -> None:
    """Another master key, endpoint or version is another secret."""
    assert len({signing.secret(*parts) for parts in given_parts}) == len(given_parts)


def test_a_secret_never_changes() -> None:
    """It is derived anew at each attempt; this very value is what receivers have stored."""
    assert signing.secret(MASTER_KEY, ENDPOINT, 1) == "whsec_b78sQt+HJNOxEQtxP7EtZHDoq9CXv3daDt490mo5oJg="


def test_a_secret_is_one_as_standard_webhooks_has_them() -> None:
    """`whsec_`, and 24 to 64 bytes in base64."""
    shown = signing.secret(MASTER_KEY, ENDPOINT, 1)
    assert shown.startswith("whsec_")
    assert len(base64.b64decode(shown.removeprefix("whsec_"), validate=True)) == 32


def test_a_short_master_key_is_refused() -> None:
    """Without its value: a key of a few characters could be guessed from one signature."""
    with pytest.raises(errors.Misconfigured, match="32 bytes") as refused:
        signing.secret(b"tops3cret" * 3, ENDPOINT, 1)
    assert "tops3cret" not in str(refused.value)
