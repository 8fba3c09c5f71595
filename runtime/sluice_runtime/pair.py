"""What two arms' answers to the same request are compared by; exists so that the comparison needs no text.

The layout is docs/contracts/README.md, "Pairs". Example: "café " and "cafe\\u0301" have one digest, "Café"
another: Unicode's two ways to write a letter and outer whitespace are no difference, all else is.
"""

from __future__ import annotations

import hashlib
import hmac
import unicodedata


def digest(admin_token: bytes, attempt: str, text: str) -> str:
    """32 hex digits. Only equal within one attempt, and not to be guessed without the token."""
    key = hmac.digest(admin_token, f"sluice-pair\0{attempt}".encode(), hashlib.sha256)
    plain = unicodedata.normalize("NFC", text).strip()
    return hmac.digest(key, plain.encode("utf-8", "replace"), hashlib.sha256).hex()[:32]
