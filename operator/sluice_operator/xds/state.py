"""What the gateway shall do, as plain data: input of the xDS builder and all that the operator says to it.

Weights and mirror shares are kept apart from routes on purpose: they travel in a runtime layer with a TTL,
so that a rollback is one tiny push that no bad route can block, and a gateway without an operator returns
to stable by itself.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from ..api.common import DataClass, Risk


@dataclass(frozen=True)
class Endpoint:
    """Address of a ready pod."""

    address: str
    port: int


@dataclass(frozen=True)
class Cluster:
    """One backend (``namespace/name``) or HTTP service (``namespace/svc:name:port``) to the gateway."""

    name: str
    endpoints: tuple[Endpoint, ...] = ()
    """Ready pods; empty and no ``dns`` means: known, but nobody is home."""
    dns: tuple[str, int] | None = None
    """Host and port of an HTTP service, resolved by the gateway."""
    max_requests: int = 256
    max_pending: int = 64


@dataclass(frozen=True)
class Arm:
    """One arm of a rule."""

    cluster: str
    config: str
    """Configuration version that the pods hold; sent in ``x-sluice-config``."""


@dataclass(frozen=True)
class Scope:
    """Requests that a candidate may get: the default is all."""

    tasks: tuple[str, ...] = ()
    """Only these tasks; empty: any, and requests that claim none."""
    tenants: tuple[str, ...] = ()
    """Only these tenants; empty: any."""
    excluded: tuple[tuple[str, str], ...] = ()
    """Never these: task and tenant, empty for any; not both empty."""

    def within(self, other: Scope) -> bool:
        """Whether nothing is let through here that ``other`` holds back. May say no where it can't tell."""
        return (
            all(self.excludes(*pair) for pair in other.excluded)
            and _within(self.tasks, other.tasks)
            and _within(self.tenants, other.tenants)
        )

    def excludes(self, task: str, tenant: str) -> bool:
        """Whether an exclusion holds for all of them; empty is any."""
        return any(a in ("", task) and b in ("", tenant) for a, b in self.excluded)


def _within(names: tuple[str, ...], others: tuple[str, ...]) -> bool:
    return not others or (bool(names) and set(names) <= set(others))


@dataclass(frozen=True)
class Review:
    """Live traffic mirrored to two arms that are compared once more; nobody sees what they answer."""

    attempt: str
    """What the mirrored copies carry as their attempt."""
    stable: Arm
    candidate: Arm
    percent: int
    """Percent of the rule's requests."""


@dataclass(frozen=True)
class Rule:
    """One rule, in the terms of the gateway. ``stable`` or ``refusal`` is set."""

    name: str
    stable: Arm | None = None
    refusal: tuple[int, str] | None = None
    candidate: Arm | None = None
    """Present while a rollout may send it traffic, also at weight 0."""
    attempt: str = ""
    weight: int = 0
    """Percent of requests for the candidate."""
    alone: int = 0
    """Percent of requests for the candidate at a gateway that hears nothing of its operator. 0 but while a
    candidate is watched, which has passed every step: the old arm may be too small for all by then."""
    shadow_percent: int = 0
    """Percent of requests mirrored to the candidate."""
    pair_percent: int = 0
    """Percent of requests that are also answered greedily to be compared: by the candidate once and by
    stable twice."""
    scope: Scope = Scope()
    """Which of the rule's requests the candidate may get, mirrors included; all others carry no attempt."""
    aside: Arm | None = None
    """Who answers those others; None: stable. (A promoted candidate *is* stable; what was rolled back alone
    stays with the arm before it.)"""
    review: Review | None = None
    """A comparison of two arms of the past on today's traffic."""
    fallbacks: tuple[str, ...] = ()
    """Clusters tried in order when the arm fails before the first byte."""
    tasks: tuple[str, ...] = ()
    tenants: tuple[str, ...] = ()
    data_classes: tuple[DataClass, ...] = ()
    risks: tuple[Risk, ...] = ()
    min_bytes: int = 0
    max_bytes: int | None = None
    idle_seconds: int = 120
    total_seconds: int | None = None
    retries: int = 1


@dataclass(frozen=True)
class Policy:
    """The rules of one RoutePolicy, in order."""

    name: str
    """``namespace/name``."""
    model: str
    rules: tuple[Rule, ...]


@dataclass(frozen=True)
class Jwt:
    """Tokens that prove a tenant."""

    issuer: str
    audiences: tuple[str, ...]
    jwks: str
    claims: tuple[tuple[str, str], ...] = ()


@dataclass(frozen=True)
class Tenant:
    """Who a caller is and what such a caller may claim."""

    name: str
    domain: str
    api_keys: tuple[str, ...] = field(default=(), repr=False)
    jwt: Jwt | None = None
    tasks: tuple[str, ...] = ()
    data_classes: tuple[DataClass, ...] = ()
    risks: tuple[Risk, ...] = ()


@dataclass(frozen=True)
class GatewayState:
    """All of it."""

    clusters: tuple[Cluster, ...] = ()
    policies: tuple[Policy, ...] = ()
    tenants: tuple[Tenant, ...] = ()
    credential: str = field(default="", repr=False)
    """Secret that pods ask for, sent in ``x-sluice-credential``."""
    max_body_bytes: int = 4 * 1024 * 1024
    feedback: tuple[str, int] | None = None
    """Host and port of who takes feedback, resolved by the gateway; None: there is no such path."""


@dataclass(frozen=True)
class AccessRecord:
    """One attempt (or one whole request) as the gateway saw it."""

    kind: str
    """``request``: what the client got; ``attempt``: one try at one pod, mirrors included."""
    request_id: str
    policy: str
    rule: str
    arm: str
    attempt: str
    tenant: str
    task: str
    unit: str
    mirror: bool
    """A copy, pairs included."""
    cluster: str
    status: int
    """HTTP status; 0 where none arrived."""
    outcome: str
    """``ok``, ``error`` (5xx, reset, timeout, no pod), ``rejected`` (4xx), ``cancelled`` (client left)."""
    flags: str
    """Envoy response flags."""
    start: float
    """Unix seconds."""
    first_byte_s: float | None
    total_s: float | None
    final: bool = True
    """False for the record that Envoy writes when an attempt starts."""
    pair: bool = False
    """A copy that is answered greedily to be compared."""
    retried: bool = False
    """Not the first try (of a request: it needed more than one)."""
    interrupted: bool = False
    """It failed after its first byte: half an answer was sent on."""
    limited: bool = False
    """The pod refused it for its tenant's own cap."""
