"""Who asks and by which route, from the gateway's headers; exists so that identity never comes from a

request's body.

Invariant: two requests get the same cache scope only if every field that their isolation names is equal and
known; where one is missing, the scope is unique to the request and nothing is shared.
"""

from __future__ import annotations

import hashlib
import uuid
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from starlette.datastructures import Headers

from sluice_runtime.podconfig import Scope

Arm = Literal["stable", "candidate"]
_MAX_VALUE = 512


class BadContext(ValueError):
    """Headers that no gateway of ours sends."""


@dataclass(frozen=True)
class Caller:
    """The route and the identity of one request. `conversation` and `user` never leave the process."""

    request_id: str
    policy: str
    rule: str
    arm: Arm
    attempt: str
    config: str
    tenant: str
    domain: str
    user: str
    task: str
    conversation: str
    mirror: bool
    routed: bool
    pair: bool = False

    @property
    def evaluation(self) -> bool:
        """A suite's question, put by the operator under no rule: it is nobody's traffic and no evidence."""
        return self.routed and not self.rule

    @property
    def unit(self) -> str:
        """What statistical tests count: one conversation, or one request where none is known."""
        key = f"sluice-unit\0{self.policy}\0{self.conversation or self.request_id}"
        return hashlib.sha256(key.encode()).hexdigest()[:16]


def caller_from(headers: Headers) -> Caller:
    """Read `x-request-id` and `x-sluice-*`. BadContext if a routed request lacks what its evidence needs."""
    policy, rule = _value(headers, "x-sluice-policy"), _value(headers, "x-sluice-rule")
    config, arm = _value(headers, "x-sluice-config"), _value(headers, "x-sluice-arm")
    routed = bool(policy or rule or config or arm)
    if routed and arm not in ("stable", "candidate"):
        raise BadContext("x-sluice-arm must be stable or candidate.")
    if routed and not (policy and "x-sluice-rule" in headers):
        raise BadContext("x-sluice-policy and x-sluice-rule must be set (the rule may be empty).")
    mirror = _value(headers, "x-sluice-mirror")
    if mirror not in ("", "1", "pair"):
        raise BadContext("x-sluice-mirror must be 1 or pair.")
    return Caller(
        request_id=_value(headers, "x-request-id") or uuid.uuid4().hex,
        policy=policy,
        rule=rule,
        arm="candidate" if arm == "candidate" else "stable",
        attempt=_value(headers, "x-sluice-attempt"),
        config=config,
        tenant=_value(headers, "x-sluice-tenant"),
        domain=_value(headers, "x-sluice-domain"),
        user=_value(headers, "x-sluice-user"),
        task=_value(headers, "x-sluice-task"),
        conversation=_value(headers, "x-sluice-conversation"),
        mirror=mirror != "",
        routed=routed,
        pair=mirror == "pair",
    )


def _value(headers: Headers, name: str) -> str:
    values = headers.getlist(name)
    if len(values) > 1:
        raise BadContext(f"{name} is set more than once.")
    value = values[0] if values else ""
    if len(value) > _MAX_VALUE:
        raise BadContext(f"{name} is longer than {_MAX_VALUE} characters.")
    return value


def cache_scope(scope: Scope, caller: Caller) -> str:
    """The key under which this caller's prefixes are shared: hex SHA-256 over length-prefixed fields. What a
    suite asks stays with its own tenant, whatever the scope.
    """
    isolation = "Evaluation" if caller.evaluation else scope.isolation
    identity = {
        "Evaluation": (caller.domain, caller.tenant),
        "User": (caller.domain, caller.tenant, caller.user),
        "Tenant": (caller.domain, caller.tenant),
        "SecurityDomain": (caller.domain,),
        "Public": (),
    }[isolation]
    if not all(identity):
        return _digest(("unshared", uuid.uuid4().hex))
    versions = [part for item in sorted(scope.versions.items()) for part in item]
    return _digest(
        (
            "shared",
            isolation,
            scope.name,
            str(scope.epoch),
            str(len(scope.versions)),
            *versions,
            *identity,
        )
    )


def _digest(fields: Iterable[str]) -> str:
    digest = hashlib.sha256(b"sluice-cache-scope-v1")
    for value in fields:
        data = value.encode()
        digest.update(len(data).to_bytes(8, "big"))
        digest.update(data)
    return digest.hexdigest()
