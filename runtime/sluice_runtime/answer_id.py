"""Makes the id under which a client knows an answer; exists so that feedback needs no store.

The layout is docs/contracts/README.md, "Answer ids and feedback".

Invariant: who lacks the gateway's credential can neither read an id, nor make one that opens, nor tell from
its length which arm it names.
"""

from __future__ import annotations

import base64
import hashlib
import hmac
import os

from cryptography.hazmat.primitives.ciphers.aead import AESGCM

from sluice_runtime.caller import Caller

NONCE_BYTES = 12
MIN_BYTES, STEP_BYTES = 256, 64
"""A payload is padded to this, and to a multiple of that: its length would tell arms apart."""
_LABEL = b"sluice-answer-id"


def seal(credential: bytes, caller: Caller, time: int, nonce: bytes | None = None) -> str:
    """The token that follows `chatcmpl-` or `cmpl-`. `time` is in Unix seconds; a fixed `nonce` is for tests
    alone. ValueError if a field holds a NUL, which separates them (HTTP lets none into a header).
    """
    fields = (
        "1",
        str(time),
        caller.request_id,
        caller.policy,
        caller.rule,
        caller.arm,
        caller.attempt,
        caller.tenant,
        caller.task,
        caller.unit,
    )
    if any("\0" in field for field in fields):
        raise ValueError("a field of an answer id holds a NUL")
    nonce = os.urandom(NONCE_BYTES) if nonce is None else nonce
    key = hmac.digest(credential, _LABEL, hashlib.sha256)
    sealed = AESGCM(key).encrypt(nonce, _padded("\0".join(fields).encode()), None)
    return base64.urlsafe_b64encode(nonce + sealed).rstrip(b"=").decode()


def _padded(text: bytes) -> bytes:
    """An eleventh field of spaces."""
    size = max(MIN_BYTES, -(-(len(text) + 1) // STEP_BYTES) * STEP_BYTES)
    return text + b"\0" + b" " * (size - len(text) - 1)
