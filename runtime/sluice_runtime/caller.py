"""Who asks and by which route, from the gateway's headers; exists so that identity never comes from a

request's body.

Invariant: two requests get the same cache scope only if every field that their isolation names is equal and
known; where one is missing, the scope is unique to the request and nothing is shared.
"""

from __future__ import annotations

import hashlib
import re
import uuid
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from starlette.datastructures import Headers

from sluice_runtime.podconfig import Scope
from sluice_runtime.reported import NOTHING, BadReport, Reported, parse_stages, parse_time
from sluice_runtime.tracing import TraceHeaders, trace_context

Arm = Literal["stable", "candidate"]
_MAX_VALUE = 512
_SECONDS = re.compile(r"[0-9]{1,6}(\.[0-9]{1,6})?", re.ASCII)


class BadContext(ValueError):
    """Headers that no gateway of ours sends."""


@dataclass(frozen=True)
class Caller:
    """The route and the identity of one request. `conversation` and `user` never leave the process.

    `route_s` is for how long the gateway waits for the answer (retries taken off), `patience_s` for how long
    the client says it does; seconds, None: for ever.
    """

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
    route_s: float | None = None
    patience_s: float | None = None
    reported: Reported = NOTHING
    trace: TraceHeaders = ()

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
        route_s=_route_seconds(headers),
        patience_s=_patience(headers),
        reported=_reported(headers),
        trace=trace_context(headers),
    )


def _reported(headers: Headers) -> Reported:
    try:
        return Reported(
            gateway_time=parse_time("x-sluice-time", _value(headers, "x-sluice-time")),
            user_time=parse_time("sluice-user-time", _value(headers, "sluice-user-time")),
            stages=parse_stages("sluice-stages", _value(headers, "sluice-stages")),
        )
    except BadReport as e:
        raise BadContext(str(e)) from None


def _route_seconds(headers: Headers) -> float | None:
    """What Envoy's router tells of the rule's time limit; it sends nothing where there is none."""
    value = _value(headers, "x-envoy-expected-rq-timeout-ms")
    if not value:
        return None
    if not (value.isascii() and value.isdecimal() and len(value) < 16):
        raise BadContext("x-envoy-expected-rq-timeout-ms must be a number of milliseconds.")
    return int(value) / 1000


def _patience(headers: Headers) -> float | None:
    value = _value(headers, "x-sluice-timeout")
    if not value:
        return None
    if not _SECONDS.fullmatch(value) or float(value) == 0:
        raise BadContext("sluice-timeout must be the seconds that you wait for the answer, such as 2.5.")
    return float(value)


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
