"""Brings pods and gateway to what the plan says, in order: pods hold, then endpoints, then routes, then
removal.

Invariant: nothing is pushed before ``open``, that is before lists and pods are known after a start; and
what pods hold is always a superset of what the gateway's routes may still name.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import Callable, Iterable, Mapping
from dataclasses import replace

from ..api import CacheScope, InferenceBackend
from ..api.common import TokenCaps
from ..evidence import Collector
from ..plan import names
from ..plan.access import Known, access_set
from ..plan.arms import CANDIDATE, STABLE, PodConfig
from ..plan.backend_status import PodState
from ..plan.cut import Cut
from ..plan.limits import LimitSet, limit_set
from ..plan.routes import Accepted, ArmKey, BackendView, Inputs, Plan, Review, RuleKey, plan
from ..xds import state as gateway
from ..xds.server import AdsServer
from . import metrics
from .cache import Cache

log = logging.getLogger(__name__)
_PATIENCE_S = 5.0
"""How long routes wait for the last pods to hold a configuration before those are left behind."""
_BRIDGE_S = 1.0


class Router:
    """Owns what was last planned and pushed."""

    def __init__(
        self,
        cache: Cache,
        collector: Collector,
        ads: AdsServer,
        *,
        accepted: Callable[[], Iterable[Accepted]],
        tenants: Callable[[], tuple[gateway.Tenant, ...]],
        limits: Callable[[], dict[str, dict[str, int]]],
        access: Callable[[], Known],
        revoked: Callable[[], frozenset[str]],
        credential: Callable[[], str],
        in_force: Callable[[], None],
        feedback: tuple[str, int] | None = None,
        reviews: Callable[[], Mapping[RuleKey, Review]] = dict,
    ) -> None:
        self._cache, self._collector, self._ads = cache, collector, ads
        self._accepted, self._tenants, self._credential, self._in_force = (
            accepted,
            tenants,
            credential,
            in_force,
        )
        self._limits, self._feedback, self._reviews = limits, feedback, reviews
        self._access, self._revoked = access, revoked
        self.plan: Plan | None = None
        self.open = False
        self.dirty = asyncio.Event()
        self._pushed: gateway.GatewayState | None = None
        self._final: gateway.GatewayState | None = None
        self._known: dict[str, PodConfig] = {}
        self._waiting_since: dict[ArmKey, float] = {}
        self._reached: set[tuple[str, gateway.Endpoint]] = set()
        self._watch: asyncio.Task[None] | None = None
        self._settled = False
        self._gateways: object = None

    async def run(self) -> None:
        """Plans again whenever something is dirty, and once a second for what only time changes."""
        while True:
            try:
                async with asyncio.timeout(1.0):
                    await self.dirty.wait()
            except TimeoutError:
                if not self._waiting_since:
                    continue
            self.dirty.clear()
            await self.flush()

    async def flush(self) -> None:
        """Plans, configures pods, and pushes if open. Never waits for anybody."""
        now = time.monotonic()
        overdue = frozenset(k for k, since in self._waiting_since.items() if now - since > _PATIENCE_S)
        last = self.plan
        before = last.arms if last and self.open else {}
        made = plan(replace(self.inputs(), before=before, overdue=overdue))
        self._waiting_since = {k: self._waiting_since.get(k, now) for k in made.waiting}
        self.plan = made
        self._configure(made)
        if self.open and made.state != self._final:
            await self._push(made.state)
        elif last is not None and made.waiting != last.waiting:
            # A pod that forgot and was told again moves no route, but statuses tell of it.
            self._in_force()

    def inputs(self) -> Inputs:
        scopes: dict[str, dict[str, object]] = {}
        for (namespace, name), scope in self._cache.scopes.items():
            if isinstance(scope, CacheScope):
                scopes.setdefault(namespace, {})[name] = scope.spec
        backends = {
            names.cluster(*name): BackendView(
                pods=self.pod_states(*name),
                digest=b.status.identity.digest if b.status.identity else "",
                fitness=b.spec.fitness,
            )
            for name, b in self._cache.backends.items()
            if isinstance(b, InferenceBackend)
        }
        return Inputs(
            policies=tuple(self._accepted()),
            backends=backends,
            scopes=scopes,  # type: ignore[arg-type]
            tenants=self._tenants(),
            credential=self._credential(),
            feedback=self._feedback,
            reviews=self._reviews(),
        )

    def pod_states(self, namespace: str, backend: str) -> tuple[PodState, ...]:
        """The backend's pods; those of a deleted one of the same name, which are older than it, are not: what
        they loaded would go on record as what this one is."""
        owner = self._cache.backends.get((namespace, backend))
        born = owner.metadata.creation_timestamp if owner is not None else ""
        pods = (p for p in self._cache.backend_pods(namespace, backend) if not p.created or p.created >= born)
        return tuple(PodState(p, self._collector.view(p)) for p in pods)

    def reached(self, cluster: str) -> int:
        """Endpoints of ``cluster`` that the gateway has, or had and is merely reconnecting."""
        if self.plan is None:
            return 0
        acked = self._ads.acked_clusters().get(cluster, frozenset())
        ours = {_endpoint(p) for p in self.plan.endpoints.get(cluster, ())}
        self._reached = {(c, e) for c, e in self._reached if c != cluster or e in ours}
        self._reached |= {(cluster, e) for e in acked & ours}
        return len({e for c, e in self._reached if c == cluster})

    def acked(self, cluster: str) -> bool:
        return cluster in self._ads.acked_clusters()

    @property
    def settled(self) -> bool:
        """Whether the final state was pushed and every gateway has it."""
        return self._settled and self._ads.num_gateways > 0

    def look_at_gateways(self) -> None:
        """Gateways come and go unasked; where what they hold has changed, statuses follow."""
        seen = (self._ads.num_gateways, self._ads.acked_clusters())
        if seen != self._gateways:
            self._gateways = seen
            if self.open and (self._watch is None or self._watch.done()):
                self._settled = False
                self._watch = asyncio.create_task(self._until_in_force(None))
            self._in_force()

    def _configure(self, made: Plan) -> None:
        """Pods hold what is wanted and what is still routed; what leaves the set they honour for a while by
        themselves."""
        for configs in made.configs.values():
            self._known.update(configs)
        held = {cluster: dict(configs) for cluster, configs in made.configs.items()}
        for (policy, rule, _), arm in made.arms.items():
            for cluster in (arm.cluster, *_fallbacks(made.state, policy, rule)):
                if arm.config in self._known:
                    held.setdefault(cluster, {})[arm.config] = self._known[arm.config]
        self._known = {version: config for configs in held.values() for version, config in configs.items()}
        tenants, limits = self._limits(), dict[TokenCaps, LimitSet]()
        known, key, revoked = self._access(), self._credential(), self._revoked()
        for cluster in made.endpoints:
            namespace, backend = cluster.split("/", 1)
            owner = self._cache.backends.get((namespace, backend))
            caps = owner.spec.limits if isinstance(owner, InferenceBackend) else TokenCaps()
            if caps not in limits:  # most backends have none: one digest over all tenants serves them all
                limits[caps] = limit_set(caps, tenants)
            configs, cut = held.get(cluster, {}), Cut(made.leaked.get(cluster, frozenset()), revoked)
            access = access_set(configs.values(), known, key)
            for state in self.pod_states(namespace, backend):
                self._collector.configure(state.pod, configs, limits[caps], access, cut)

    async def _push(self, state: gateway.GatewayState) -> None:
        """Pushes; where a candidate becomes stable, first routes in which it is both, or weights would
        dip."""
        self._final, self._settled = state, False
        bridge = _bridge(self._pushed, state)
        await self._send(bridge or state)
        if self._watch is not None:
            self._watch.cancel()
        self._watch = asyncio.create_task(self._until_in_force(state if bridge is not None else None))

    async def _send(self, state: gateway.GatewayState) -> None:
        self._pushed = state
        metrics.PUSHES.inc()
        await self._ads.push(state)

    async def _until_in_force(self, then: gateway.GatewayState | None) -> None:
        if then is not None:
            await self._ads.wait_in_force(_BRIDGE_S)
            await self._send(then)
        while not (await self._ads.wait_in_force(5.0)).ok:
            self._in_force()
        self._settled = True
        self._in_force()


def _endpoint(state: PodState) -> gateway.Endpoint:
    return gateway.Endpoint(state.pod.ip, state.pod.api_port)


def _fallbacks(state: gateway.GatewayState, policy: str, rule: str) -> tuple[str, ...]:
    return next(
        (r.fallbacks for p in state.policies if p.name == policy for r in p.rules if r.name == rule), ()
    )


def _bridge(before: gateway.GatewayState | None, after: gateway.GatewayState) -> gateway.GatewayState | None:
    """``after`` with each candidate that turns stable still at its weight; None where there is none."""
    if before is None:
        return None
    old = _candidates(before)
    bridged = False
    policies = []
    for policy in after.policies:
        rules = []
        for rule in policy.rules:
            was = old.get((policy.name, rule.name))
            if was is not None and rule.candidate is None and rule.stable == was.candidate and was.weight > 0:
                rule = replace(rule, candidate=was.candidate, attempt=was.attempt, weight=was.weight)
                bridged = True
            rules.append(rule)
        policies.append(replace(policy, rules=tuple(rules)))
    return replace(after, policies=tuple(policies)) if bridged else None


def _candidates(state: gateway.GatewayState) -> Mapping[tuple[str, str], gateway.Rule]:
    return {(p.name, r.name): r for p in state.policies for r in p.rules if r.candidate is not None}


__all__ = ["CANDIDATE", "STABLE", "Router"]
