"""Policies and clusters in the gateway's terms, once it is known where each arm goes."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace

from ..api.routepolicy import RoutePolicySpec, Streaming
from ..api.routepolicy import Rule as RuleSpec
from ..api.rulestatus import Phase, RuleStatus
from ..xds import state as gateway
from . import names
from .arms import ASIDE, CANDIDATE, STABLE
from .backend_status import PodState
from .fitness import Unfit, unfit
from .routed import Accepted, ArmKey, BackendView, RuleKey
from .scope import Eligibility, eligibility

ROLES = (STABLE, CANDIDATE, ASIDE)
LONGEST_HELD_S = 3600
"""How long a verified answer may take where nothing else says so, seconds."""


def fallbacks(policy: Accepted, rule: RuleSpec) -> list[str]:
    """Clusters of a rule's fallbacks."""
    return [names.cluster(policy.namespace, f.backend) for f in rule.fallbacks]


def longest_silence(spec: RoutePolicySpec, rule: RuleSpec) -> int:
    """Seconds without a byte after which the gateway gives up. A held answer is silent on purpose, from its
    queue to its verdict: only what bounds the whole request can bound that."""
    timeouts, contract = rule.timeouts, rule.contract
    if _holds_answers(spec, rule):
        return max(timeouts.idle_seconds, timeouts.total_seconds or LONGEST_HELD_S)
    asked = (check.verifier.timeout_seconds for check in contract.checks if check.verifier is not None)
    return timeouts.idle_seconds + max(asked, default=0)


def _holds_answers(spec: RoutePolicySpec, rule: RuleSpec) -> bool:
    """Whether some request of the rule may see nothing before its answer is whole: a route has one time-out
    for both arms and all who use it."""
    features = [rule.features, *(switch.features for switch in spec.switches)]
    if rule.rollout is not None and rule.rollout.candidate.features is not None:
        features.append(rule.rollout.candidate.features)
    off = any(found.direct_streaming is False for found in features)
    return off or rule.contract.streaming is Streaming.VERIFIED


@dataclass(frozen=True)
class Placed:
    """Where everything goes."""

    arms: Mapping[ArmKey, gateway.Arm]
    endpoints: Mapping[str, tuple[PodState, ...]]
    backends: Mapping[str, BackendView]
    reviews: Mapping[RuleKey, gateway.Review]
    """Those that get their copies."""

    def policy(self, policy: Accepted) -> gateway.Policy:
        """The policy's rules in order, refusals for what a backend is not fit for in front of each."""
        rules: list[gateway.Rule] = []
        for spec in policy.spec.rules:
            rule = self._rule(policy, spec)
            rules += [*self._guards(policy, spec, rule), rule]
        return gateway.Policy(name=policy.key, model=policy.spec.model, rules=tuple(rules))

    def _rule(self, policy: Accepted, rule: RuleSpec) -> gateway.Rule:
        status = policy.rules.get(rule.name) or RuleStatus(name=rule.name)
        key = (policy.key, rule.name)
        candidate, aside = self.arms.get((*key, CANDIDATE)), self.arms.get((*key, ASIDE))
        arrived = candidate is not None and any(
            candidate.config in p.stream.versions for p in self.endpoints.get(candidate.cluster, ())
        )
        match, size, refusal = rule.match, rule.match.input_bytes, rule.target.refusal
        return gateway.Rule(
            name=rule.name,
            stable=self.arms.get((*key, STABLE)),
            refusal=(refusal.status, refusal.message) if refusal else None,
            candidate=candidate,
            attempt=status.attempt if rule.rollout is not None else "",
            weight=status.weight if arrived else 0,
            alone=status.weight if arrived and status.phase is Phase.WATCHING else 0,
            shadow_percent=status.shadow_percent if arrived else 0,
            pair_percent=_pair_percent(rule, status) if arrived else 0,
            scope=_scope(rule, status) if candidate is not None or aside is not None else gateway.Scope(),
            aside=aside,
            review=self.reviews.get(key),
            fallbacks=tuple(c for c in fallbacks(policy, rule) if self.endpoints.get(c)),
            tasks=tuple(match.tasks),
            tenants=tuple(match.tenants),
            data_classes=tuple(match.data_classes),
            risks=tuple(match.risks),
            min_bytes=size.min if size else 0,
            max_bytes=size.max if size else None,
            idle_seconds=longest_silence(policy.spec, rule),
            total_seconds=rule.timeouts.total_seconds,
            retries=rule.retries.attempts,
        )

    def _guards(self, policy: Accepted, spec: RuleSpec, rule: gateway.Rule) -> list[gateway.Rule]:
        """Refusals in front of a rule for what a backend of it is not fit for, whatever changed since it was
        accepted."""
        name = f"{rule.name}.unfit"
        refuse = gateway.Rule(
            name=name,
            refusal=(403, "no backend of this rule is fit for this request"),
            tasks=rule.tasks,
            tenants=rule.tenants,
            data_classes=rule.data_classes,
            risks=rule.risks,
            min_bytes=rule.min_bytes,
            max_bytes=rule.max_bytes,
        )
        guards: list[gateway.Rule] = []
        for told in self._unfit(policy, spec):
            if told.everything:
                return [refuse]
            if told.tasks:
                guards.append(replace(refuse, tasks=told.tasks))
            if told.data_classes:
                guards.append(replace(refuse, data_classes=told.data_classes))
            if told.tenants:
                guards.append(replace(refuse, tenants=told.tenants))
        return [replace(g, name=f"{name}{i}") for i, g in enumerate(dict.fromkeys(guards))]

    def _unfit(self, policy: Accepted, spec: RuleSpec) -> Iterator[Unfit]:
        """For each backend of the rule, what it would get and must not."""
        key = (policy.key, spec.name)
        found = {role: arm.cluster for role in ROLES if (arm := self.arms.get((*key, role)))}
        always = {*fallbacks(policy, spec), *(c for role, c in found.items() if role != CANDIDATE)}
        for cluster in sorted({*always, *found.values()}):
            if cluster in self.backends:
                told = unfit(spec.match, self.backends[cluster].fitness)
                status = policy.rules.get(spec.name) or RuleStatus(name=spec.name)
                yield told if cluster in always else _left(told, eligibility(spec, status))


def _left(told: Unfit, eligible: Eligibility) -> Unfit:
    """Without what the candidate does not get anyway."""
    return replace(
        told,
        tasks=tuple(t for t in told.tasks if (t, "") not in eligible.excluded),
        tenants=tuple(t for t in told.tenants if ("", t) not in eligible.excluded),
    )


def _pair_percent(rule: RuleSpec, status: RuleStatus) -> int:
    shadow = rule.rollout.shadow if rule.rollout is not None else None
    if shadow is None or status.phase is not Phase.SHADOWING:
        return 0
    return min(shadow.pairing_percent, status.shadow_percent)


def _scope(rule: RuleSpec, status: RuleStatus) -> gateway.Scope:
    eligible = eligibility(rule, status)
    return gateway.Scope(
        tasks=tuple(sorted(eligible.tasks)),
        tenants=tuple(sorted(eligible.tenants)),
        excluded=tuple(sorted(eligible.excluded)),
    )


def clusters(
    serving: Iterable[Accepted],
    arms: Mapping[ArmKey, gateway.Arm],
    endpoints: Mapping[str, tuple[PodState, ...]],
) -> tuple[gateway.Cluster, ...]:
    """One cluster a backend, routed or not, and one an HTTP service; bounds are the widest that a rule
    asks for."""
    bounds: dict[str, tuple[int, int]] = {}
    services: dict[str, tuple[str, int]] = {}
    for policy in serving:
        for rule in policy.spec.rules:
            for arm in (arms.get((policy.key, rule.name, role)) for role in ROLES):
                if arm is None:
                    continue
                asked = rule.circuit_breaker
                known = bounds.get(arm.cluster, (0, 0))
                bounds[arm.cluster] = (max(known[0], asked.max_requests), max(known[1], asked.max_pending))
                if "/svc:" in arm.cluster:
                    namespace, _, service = arm.cluster.partition("/svc:")
                    host, _, port = service.rpartition(":")
                    services[arm.cluster] = (f"{host}.{namespace}.svc", int(port))
    unknown = {name: () for name in bounds if name not in endpoints and name not in services}
    found = [
        gateway.Cluster(
            name=name,
            endpoints=tuple(gateway.Endpoint(p.pod.ip, p.pod.api_port) for p in pods),
            max_requests=bounds.get(name, (256, 64))[0],
            max_pending=bounds.get(name, (256, 64))[1],
        )
        for name, pods in {**endpoints, **unknown}.items()
    ]
    found += [
        gateway.Cluster(name=name, dns=address, max_requests=bounds[name][0], max_pending=bounds[name][1])
        for name, address in services.items()
    ]
    return tuple(sorted(found, key=lambda c: c.name))
