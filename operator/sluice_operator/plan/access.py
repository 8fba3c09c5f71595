"""Tokens and authorities of verifiers: what is wrong with those that policies name, and what pods are given.

They go to pods beside configurations and over the same port, so that they stand in no pod's spec, no route
and no status, and a rotated one is in force without a restart or another configuration version.
Invariant: a pod is given what its configurations name and nothing else; a value that is missing or malformed
is left out, so whoever needs it withholds answers, and the problem names the field and never the value.
"""

from __future__ import annotations

import hashlib
import hmac
import json
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

from cryptography import x509
from cryptography.hazmat.primitives.serialization import Encoding

from ..api.routepolicy import Verifier
from .arms import PodConfig
from .conditions import Problem
from .references import authority_of, token_of, verifiers
from .routed import Accepted

AccessSet = dict[str, Any]
"""As in docs/contracts/access.schema.json."""
Data = Mapping[tuple[str, str], Mapping[str, str]]
"""Decoded data of Secrets or ConfigMaps, by namespace and name; empty where there is no such object, absent
where nobody has looked yet."""

OFFERED_TYPE = "sluice.dev/verifier-token"
"""Type of the Secrets that may be sent to verifiers. Else whoever may write a policy could have any Secret of
the namespace sent to a service of theirs, without the right to read it."""
MAX_TOKEN = 8192
MAX_BUNDLE = 512 * 1024


@dataclass
class Known:
    """What could be resolved, by the name that configurations use, and what could not."""

    tokens: dict[str, str] = field(default_factory=dict, repr=False)
    authorities: dict[str, str] = field(default_factory=dict)
    problems: dict[tuple[str, str], tuple[Problem, ...]] = field(default_factory=dict)
    """By namespace and name of the policy; of those that have any."""


def resolve(
    policies: Iterable[Accepted], secrets: Data, config_maps: Data, offered: Collection[tuple[str, str]]
) -> Known:
    """Values of everything that the policies name. ``offered``: Secrets of `OFFERED_TYPE`."""
    known = Known()
    for policy in policies:
        found = [
            problem
            for at, verifier in verifiers(policy.spec)
            for problem in _resolve(policy.namespace, verifier, at, known, secrets, config_maps, offered)
        ]
        if found:
            known.problems[policy.namespace, policy.name] = tuple(found)
    return known


def _resolve(
    namespace: str,
    verifier: Verifier,
    at: str,
    known: Known,
    secrets: Data,
    config_maps: Data,
    offered: Collection[tuple[str, str]],
) -> Iterator[Problem]:
    for ref, values, read in (
        (token_of(namespace, verifier), known.tokens, _token),
        (authority_of(namespace, verifier), known.authorities, _authorities),
    ):
        if ref is None:
            continue
        where, data = f"{at}.{ref.field}", secrets if ref.kind == "Secret" else config_maps
        what = f"key {ref.key!r} of {ref.kind} {ref.name!r}"
        if data.get(ref.object) and read is _token and ref.object not in offered:
            told = f"Secret {ref.name!r} is not of type {OFFERED_TYPE}: it is sent to nobody"
            yield Problem("SecretRefused", f"{told}; answers are withheld", where)
        elif ref.object in data:
            text = data[ref.object].get(ref.key, "").strip()
            value = read(text)
            if value:
                values[ref.text] = value
            elif not text:
                told = f"{ref.kind} {ref.name!r} has no key {ref.key!r}, or it is empty; answers are withheld"
                yield Problem(f"{ref.kind}NotFound", told, where)
            elif read is _token:
                told = f"{what} is no token: printable ASCII without spaces, at most {MAX_TOKEN} characters"
                yield Problem("InvalidToken", f"{told}; answers are withheld", where)
            else:
                told = f"{what} has no certificates in PEM that can be read, or more than {MAX_BUNDLE} bytes"
                yield Problem("InvalidCertificates", f"{told}; answers are withheld", where)


def _token(text: str) -> str:
    """Empty where it can stand in no header."""
    good = text.isascii() and text.isprintable() and " " not in text and len(text) <= MAX_TOKEN
    return text if good else ""


@lru_cache(maxsize=64)
def _authorities(text: str) -> str:
    """The certificates alone: bundles have names and comments between them. Empty where there are none."""
    try:
        found = x509.load_pem_x509_certificates(text.encode())
    except ValueError:
        return ""
    kept = "".join(certificate.public_bytes(Encoding.PEM).decode() for certificate in found)
    return kept if len(kept) <= MAX_BUNDLE else ""


def access_set(configs: Iterable[PodConfig], known: Known, key: str) -> AccessSet:
    """What a pod needs for these configurations. ``key``: of the version, which is logged and must not help
    to guess a short token."""
    asked = [check["verifier"] for config in configs for check in config["contract"] if "verifier" in check]
    named = {
        part: sorted({verifier[part] for verifier in asked if part in verifier})
        for part in ("token", "authority")
    }
    body = {
        "tokens": {name: known.tokens[name] for name in named["token"] if name in known.tokens},
        "authorities": {
            name: known.authorities[name] for name in named["authority"] if name in known.authorities
        },
    }
    if not any(body.values()):
        return {"version": "", **body}
    canonical = json.dumps(body, sort_keys=True, separators=(",", ":")).encode()
    return {"version": hmac.new(key.encode(), canonical, hashlib.sha256).hexdigest()[:16], **body}
