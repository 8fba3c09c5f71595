"""Tenants as the gateway knows them.

Invariant: one API key, or one kind of token, proves one tenant; where two claim it the older keeps it and
the younger is told, without the key.
"""

from __future__ import annotations

import json
from collections.abc import Iterable, Iterator, Mapping

from ..api.tenant import Tenant
from ..xds import state as gateway
from .conditions import Problem

Secrets = Mapping[tuple[str, str], Mapping[str, str]]
"""Decoded data of Secrets, by namespace and name; only those that tenants name."""


def referenced_secrets(tenant: Tenant) -> set[tuple[str, str]]:
    refs = {(tenant.metadata.namespace, ref.name) for ref in tenant.spec.api_keys}
    if tenant.spec.jwt is not None:
        refs.add((tenant.metadata.namespace, tenant.spec.jwt.jwks_secret.name))
    return refs


def named_once(tenants: Iterable[Tenant]) -> Iterator[Tenant]:
    """Of tenants with one name the oldest: the one that the gateway knows."""
    names: set[str] = set()
    for tenant in _oldest_first(tenants):
        if tenant.metadata.name not in names:
            names.add(tenant.metadata.name)
            yield tenant


def _oldest_first(tenants: Iterable[Tenant]) -> list[Tenant]:
    return sorted(
        tenants, key=lambda t: (t.metadata.creation_timestamp, t.metadata.namespace, t.metadata.name)
    )


def resolve(
    tenants: Iterable[Tenant], secrets: Secrets
) -> tuple[tuple[gateway.Tenant, ...], dict[tuple[str, str], tuple[Problem, ...]]]:
    """Tenants for the gateway, and what is wrong with each, by namespace and name."""
    known: dict[str, str] = {}
    keys_taken: dict[str, str] = {}
    tokens_taken: dict[gateway.Jwt, str] = {}
    told: list[gateway.Tenant] = []
    problems: dict[tuple[str, str], tuple[Problem, ...]] = {}
    for tenant in _oldest_first(tenants):
        meta, found = tenant.metadata, []
        if meta.name in known:
            found.append(
                Problem(
                    "DuplicateTenant",
                    f"a Tenant of this name exists already in namespace {known[meta.name]}; "
                    "the gateway knows tenants by name alone",
                    "metadata.name",
                )
            )
        else:
            known[meta.name] = meta.namespace
            keys = _keys(tenant, secrets, keys_taken, found)
            jwt = _jwt(tenant, secrets, found)
            if jwt is not None and tokens_taken.setdefault(jwt, meta.name) != meta.name:
                found.append(
                    Problem(
                        "DuplicateIdentity",
                        f"the same tokens already prove Tenant {tokens_taken[jwt]!r}, which is older; "
                        "ask for other claims",
                        "spec.jwt.claims",
                    )
                )
                jwt = None
            told.append(_tenant(tenant, keys, jwt))
        problems[(meta.namespace, meta.name)] = tuple(found)
    return tuple(sorted(told, key=lambda t: t.name)), problems


def _keys(tenant: Tenant, secrets: Secrets, taken: dict[str, str], found: list[Problem]) -> tuple[str, ...]:
    keys = []
    for i, ref in enumerate(tenant.spec.api_keys):
        field = f"spec.apiKeys[{i}]"
        value = secrets.get((tenant.metadata.namespace, ref.name), {}).get(ref.key, "").strip()
        if not value:
            found.append(
                Problem(
                    "SecretNotFound", f"Secret {ref.name!r} has no key {ref.key!r}, or it is empty", field
                )
            )
        elif not value.isascii() or not value.isprintable() or " " in value or len(value) > 512:
            found.append(
                Problem(
                    "InvalidApiKey",
                    "an API key is printable ASCII without spaces, 512 characters at most",
                    field,
                )
            )
        elif taken.get(value, tenant.metadata.name) != tenant.metadata.name:
            found.append(
                Problem(
                    "DuplicateApiKey",
                    f"the same key already proves Tenant {taken[value]!r}, which is older; issue another key",
                    field,
                )
            )
        elif value not in taken:
            taken[value] = tenant.metadata.name
            keys.append(value)
    return tuple(keys)


def _jwt(tenant: Tenant, secrets: Secrets, found: list[Problem]) -> gateway.Jwt | None:
    spec = tenant.spec.jwt
    if spec is None:
        return None
    jwks = secrets.get((tenant.metadata.namespace, spec.jwks_secret.name), {}).get(spec.jwks_secret.key, "")
    if not jwks:
        found.append(
            Problem(
                "SecretNotFound",
                f"Secret {spec.jwks_secret.name!r} has no key {spec.jwks_secret.key!r}",
                "spec.jwt.jwksSecret",
            )
        )
        return None
    wrong = _jwks_error(jwks)
    if wrong:
        found.append(
            Problem(
                "InvalidJwks",
                f"key {spec.jwks_secret.key!r} of Secret {spec.jwks_secret.name!r} {wrong}",
                "spec.jwt.jwksSecret",
            )
        )
        return None
    return gateway.Jwt(spec.issuer, tuple(spec.audiences), jwks, tuple(sorted(spec.claims.items())))


def _jwks_error(text: str) -> str:
    """Why it is no JSON Web Key Set (RFC 7517); Envoy would take it and then refuse every token."""
    try:
        told = json.loads(text)
    except ValueError:
        return "is not JSON"
    keys = told.get("keys") if isinstance(told, dict) else None
    if not isinstance(keys, list) or not keys:
        return "is no JSON Web Key Set: it needs a list `keys` that is not empty"
    if not all(isinstance(key, dict) and isinstance(key.get("kty"), str) for key in keys):
        return "is no JSON Web Key Set: each of its keys needs `kty`"
    return ""


def _tenant(tenant: Tenant, keys: tuple[str, ...], jwt: gateway.Jwt | None) -> gateway.Tenant:
    spec = tenant.spec
    return gateway.Tenant(
        name=tenant.metadata.name,
        domain=spec.security_domain,
        api_keys=keys,
        jwt=jwt,
        tasks=tuple(spec.tasks),
        data_classes=tuple(spec.data_classes),
        risks=tuple(spec.risks),
    )
