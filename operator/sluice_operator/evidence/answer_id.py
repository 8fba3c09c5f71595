"""The id of an answer: what feedback needs to know of it, sealed, so that nothing has to be stored.

Format: ``docs/contracts/README.md``, with a test vector in ``answer-id.json`` beside it. Invariant: an id
that was not made with this credential, or was changed by one bit, is unknown; it is never read in part.
"""

from __future__ import annotations

import base64
import binascii
import hmac
from dataclasses import astuple, dataclass

from cryptography.exceptions import InvalidTag
from cryptography.hazmat.primitives.ciphers.aead import AESGCM

NONCE_BYTES = 12
MIN_BYTES, STEP_BYTES = 256, 64
"""A payload is padded to this, and to a multiple of that: its length would tell arms apart."""
MAX_LENGTH = 2048
"""Characters; names of our resources keep an id far below."""
_PREFIXES = ("chatcmpl-", "cmpl-")
_VERSION = "1"


@dataclass(frozen=True)
class Answer:
    """What an id says of its answer."""

    time: int
    """When it was made, Unix seconds."""
    request_id: str
    policy: str
    rule: str
    arm: str
    """``stable`` or ``candidate``."""
    attempt: str
    tenant: str
    task: str
    unit: str


def encode(credential: str, nonce: bytes, answer: Answer, prefix: str = "chatcmpl-") -> str:
    """The id. A nonce is never used twice under one credential: 12 random bytes."""
    text = "\0".join((_VERSION, *map(str, astuple(answer)))).encode()
    size = max(MIN_BYTES, -(-(len(text) + 1) // STEP_BYTES) * STEP_BYTES)
    padded = text + b"\0" + b" " * (size - len(text) - 1)
    sealed = nonce + AESGCM(_key(credential)).encrypt(nonce, padded, None)
    return prefix + _text(sealed)


def decode(credential: str, text: str) -> Answer | None:
    """What the id says; None where it is not one of ours."""
    token = next((text.removeprefix(p) for p in _PREFIXES if text.startswith(p)), "")
    if not token or len(text) > MAX_LENGTH or not token.isascii():
        return None
    try:
        sealed = base64.b64decode(token + "=" * (-len(token) % 4), altchars=b"-_", validate=True)
        if _text(sealed) != token:  # the last character may have bits that mean nothing
            return None
        plain = AESGCM(_key(credential)).decrypt(sealed[:NONCE_BYTES], sealed[NONCE_BYTES:], None)
        version, time, *rest, padding = plain.decode().split("\0")
        answer = Answer(int(time), *rest)
        if padding.strip(" "):
            return None
        return answer if version == _VERSION and answer.arm in ("stable", "candidate") else None
    except (binascii.Error, InvalidTag, ValueError, TypeError):
        return None


def _text(sealed: bytes) -> str:
    return base64.urlsafe_b64encode(sealed).rstrip(b"=").decode()


def _key(credential: str) -> bytes:
    return hmac.digest(credential.encode(), b"sluice-answer-id", "sha256")
