"""Signatures of webhooks, as Standard Webhooks has them (symmetric, v1), and the secrets behind them.

Source: https://github.com/standard-webhooks/standard-webhooks/blob/main/spec/standard-webhooks.md
"""

import base64
import hmac
from collections.abc import Sequence
from uuid import UUID

from charging import errors

# An HMAC-SHA256 key gains nothing above the hash's own length, and must not be guessable below it.
MASTER_KEY_BYTES = 32

_PREFIX = "whsec_"
# What else is ever derived from the same master key has another label, and so nothing in common with a secret.
_LABEL = b"webhook secret v1"


def check(master_key: bytes) -> None:
    """Raises Misconfigured for a master key of fewer than 32 bytes."""
    if len(master_key) < MASTER_KEY_BYTES:
        raise errors.Misconfigured(f"The master key of webhook secrets must have at least {MASTER_KEY_BYTES} bytes.")


def secret(master_key: bytes, endpoint_id: UUID, version: int) -> str:
    """Returns an endpoint's secret of one version, as its owner gets to see it: `whsec_` and 32 bytes in base64.

    It is derived and never stored, so the database holds nothing that could sign: the key is outside it. Raises
    Misconfigured for a master key of fewer than 32 bytes.
    """
    check(master_key)
    # Parts of fixed length, so that no two endpoints and versions read the same.
    derived = hmac.digest(master_key, _LABEL + endpoint_id.bytes + version.to_bytes(8), "sha256")
    return _PREFIX + base64.b64encode(derived).decode()


def headers(message_id: str, timestamp: int, body: bytes, secrets: Sequence[str]) -> dict[str, str]:
    """Returns the three headers of one attempt: a signature over exactly these bytes for each secret that is live.

    `timestamp` is the attempt's own, in Unix seconds: receivers refuse one that is five minutes off. Receivers
    accept a request when any of its signatures is right, which is how a secret is replaced without a gap.
    """
    signed = f"{message_id}.{timestamp}.".encode() + body
    return {
        "webhook-id": message_id,
        "webhook-timestamp": str(timestamp),
        "webhook-signature": " ".join(f"v1,{_signature(shown, signed)}" for shown in secrets),
    }


def _signature(shown: str, signed: bytes) -> str:
    key = base64.b64decode(shown.removeprefix(_PREFIX), validate=True)
    return base64.b64encode(hmac.digest(key, signed, "sha256")).decode()
