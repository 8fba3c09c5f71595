"""What routes follow from and what follows from them, as data."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from ..api.backend import Fitness
from ..api.cachescope import CacheScopeSpec
from ..api.routepolicy import RoutePolicySpec
from ..api.rulestatus import RuleStatus
from ..xds import state as gateway
from .arms import PodConfig
from .backend_status import PodState

ArmKey = tuple[str, str, str]
"""Policy (namespace/name), rule, and ``stable``, ``candidate`` or ``aside``."""
RuleKey = tuple[str, str]
"""Policy (namespace/name) and rule."""


@dataclass(frozen=True)
class Accepted:
    """A policy's spec in force and where its rollouts stand."""

    namespace: str
    name: str
    created: str
    spec: RoutePolicySpec
    rules: Mapping[str, RuleStatus] = field(default_factory=dict)

    @property
    def key(self) -> str:
        return f"{self.namespace}/{self.name}"


@dataclass(frozen=True)
class BackendView:
    """A backend's pods and the digest on record."""

    pods: tuple[PodState, ...] = ()
    digest: str = ""
    fitness: Fitness = field(default_factory=Fitness)


@dataclass(frozen=True)
class Review:
    """A comparison of the past to be made once more: two backends of the policy's namespace get copies of a
    rule's traffic, under the configuration that its stable arm has now."""

    attempt: str
    """What the copies carry as their attempt; not that of any release."""
    stable: str
    """Backend that was stable then."""
    candidate: str
    """Backend that was the candidate."""
    percent: int
    """Percent of the rule's requests that are copied."""


@dataclass(frozen=True)
class Inputs:
    """All that routes follow from."""

    policies: tuple[Accepted, ...] = ()
    backends: Mapping[str, BackendView] = field(default_factory=dict)
    """By cluster name."""
    scopes: Mapping[str, Mapping[str, CacheScopeSpec]] = field(default_factory=dict)
    """By namespace, then name."""
    tenants: tuple[gateway.Tenant, ...] = ()
    credential: str = ""
    feedback: tuple[str, int] | None = None
    """Host and port of who takes feedback."""
    reviews: Mapping[RuleKey, Review] = field(default_factory=dict)
    """Reviews that run."""
    before: Mapping[ArmKey, gateway.Arm] = field(default_factory=dict)
    """Arms as they were last routed."""
    overdue: frozenset[ArmKey] = frozenset()
    """Arms that have waited long enough for the last pods: those are left behind."""


@dataclass(frozen=True)
class Plan:
    """What follows from them."""

    state: gateway.GatewayState
    arms: Mapping[ArmKey, gateway.Arm]
    """Arms as they are routed now."""
    wanted: Mapping[ArmKey, gateway.Arm]
    """Arms as they shall be."""
    configs: Mapping[str, Mapping[str, PodConfig]]
    """By cluster, then version: what its pods must hold for what is wanted."""
    leaked: Mapping[str, frozenset[str]]
    """By cluster: attempts of which its pods must cut, and refuse, the candidate's requests."""
    endpoints: Mapping[str, tuple[PodState, ...]]
    """By cluster: pods that get traffic."""
    waiting: Mapping[ArmKey, str]
    """Why an arm is not yet where it shall be."""
    reviews: Mapping[RuleKey, str]
    """Why a review does not get its copies; empty: it gets them."""
