"""Everything in force as one state for the gateway, and what pods must hold for it.

The order is pods → endpoints → routes → removal. So an arm of a rule stays where it is until pods that
hold what it moves to are there (``_settle``), and pods go on holding whatever a route still names.

Invariant: every endpoint of a cluster holds every configuration that some fit pod holds and that a route
to the cluster names; so no request meets a pod that does not know what the request means.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field, replace

from ..api.backend import Fitness
from ..api.cachescope import CacheScopeSpec
from ..api.routepolicy import Phase, RoutePolicySpec, RuleStatus
from ..api.routepolicy import Rule as RuleSpec
from ..xds import state as gateway
from . import names
from .arms import CANDIDATE, STABLE, Arm, PodConfig, candidate_arm, pod_config, stable_arm
from .backend_status import PodState, is_fit
from .fitness import unfit

ArmKey = tuple[str, str, str]
"""Policy (namespace/name), rule, ``stable`` or ``candidate``."""


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
class Inputs:
    """All that routes follow from."""

    policies: tuple[Accepted, ...] = ()
    backends: Mapping[str, BackendView] = field(default_factory=dict)
    """By cluster name."""
    scopes: Mapping[str, Mapping[str, CacheScopeSpec]] = field(default_factory=dict)
    """By namespace, then name."""
    tenants: tuple[gateway.Tenant, ...] = ()
    credential: str = ""
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
    endpoints: Mapping[str, tuple[PodState, ...]]
    """By cluster: pods that get traffic."""
    waiting: Mapping[ArmKey, str]
    """Why an arm is not yet where it shall be."""


def models_taken(policies: Iterable[Accepted]) -> dict[str, Accepted]:
    """Who publishes each model: the oldest policy, by name where they are of one second."""
    owners: dict[str, Accepted] = {}
    for policy in sorted(policies, key=lambda p: (p.created, p.key)):
        owners.setdefault(policy.spec.model, policy)
    return owners


def rule_arms(rule: RuleSpec, status: RuleStatus | None) -> tuple[Arm | None, Arm | None]:
    """Stable and candidate as they take traffic: once promoted, and while it can serve, the candidate *is*
    stable."""
    stable, candidate = stable_arm(rule), candidate_arm(rule)
    if candidate is None or rule.rollout is None or rule.rollout.abort:
        return stable, None
    if status is None:
        return stable, candidate
    if status.phase is Phase.PROMOTED and status.weight == 100:
        return candidate, None
    if status.phase in (Phase.ROLLED_BACK, Phase.ABORTED):
        return stable, None
    return stable, candidate


def plan(inputs: Inputs) -> Plan:
    """Routes, clusters and pod configurations that follow from ``inputs``."""
    owners = models_taken(inputs.policies)
    serving = sorted((p for p in inputs.policies if owners[p.spec.model] is p), key=lambda p: p.key)
    wanted: dict[ArmKey, gateway.Arm] = {}
    configs: dict[str, dict[str, PodConfig]] = {name: {} for name in inputs.backends}
    for policy in serving:
        _want(policy, inputs, wanted, configs)
    fit = {name: [p for p in view.pods if is_fit(p, view.digest)] for name, view in inputs.backends.items()}
    arms, waiting = _settle(wanted, fit, inputs)
    users = _users(serving, arms, fit)
    endpoints = {name: _endpoints(pods, users.get(name, set())) for name, pods in fit.items()}
    policies = tuple(_policy(p, arms, endpoints, inputs.backends) for p in serving)
    state = gateway.GatewayState(
        clusters=_clusters(serving, arms, endpoints),
        policies=policies,
        tenants=inputs.tenants,
        credential=inputs.credential,
    )
    return Plan(state, arms, wanted, configs, endpoints, waiting)


def _cluster_of(policy: Accepted, arm: Arm) -> str:
    if arm.service is not None:
        return names.service_cluster(policy.namespace, arm.service.name, arm.service.port)
    return names.cluster(policy.namespace, arm.backend or "")


def _fallbacks(policy: Accepted, rule: RuleSpec) -> list[str]:
    return [names.cluster(policy.namespace, f.backend) for f in rule.fallbacks]


def _want(
    policy: Accepted,
    inputs: Inputs,
    wanted: dict[ArmKey, gateway.Arm],
    configs: dict[str, dict[str, PodConfig]],
) -> None:
    """Adds the policy's arms, and what pods of their clusters (fallbacks included) must hold."""
    scopes = inputs.scopes.get(policy.namespace, {})
    for rule in policy.spec.rules:
        for role, arm in zip((STABLE, CANDIDATE), rule_arms(rule, policy.rules.get(rule.name)), strict=True):
            if arm is None:
                continue
            config = pod_config(policy.namespace, policy.name, policy.spec.model, rule, arm, scopes)
            cluster = _cluster_of(policy, arm)
            wanted[(policy.key, rule.name, role)] = gateway.Arm(cluster=cluster, config=config["version"])
            for name in (cluster, *_fallbacks(policy, rule)):
                if name in configs:
                    configs[name][config["version"]] = config


def _settle(
    wanted: Mapping[ArmKey, gateway.Arm], fit: Mapping[str, list[PodState]], inputs: Inputs
) -> tuple[dict[ArmKey, gateway.Arm], dict[ArmKey, str]]:
    """Where each arm goes now, and why it is not yet where it shall be."""
    arms: dict[ArmKey, gateway.Arm] = {}
    waiting: dict[ArmKey, str] = {}
    for key, arm in wanted.items():
        before = inputs.before.get(key)
        reason = _not_yet(key, arm, before, fit, inputs)
        stays = bool(reason) and before is not None and _stays(key, before, arm, fit, inputs)
        arms[key] = before if stays and before is not None else arm
        if reason:
            waiting[key] = reason
    return arms, waiting


def _stays(
    key: ArmKey,
    before: gateway.Arm,
    wanted: gateway.Arm,
    fit: Mapping[str, list[PodState]],
    inputs: Inputs,
) -> bool:
    """Whether an arm that can't move yet keeps its old place, or goes where nobody is home instead."""
    if "/svc:" in before.cluster:
        return True
    if before.cluster not in inputs.backends:
        return False
    there = fit.get(wanted.cluster, [])
    if not fit[before.cluster] and any(wanted.config in p.stream.versions for p in there):
        return False
    # Who aborts wants the candidate out, also where it was promoted and the old target has no pods.
    return before.cluster == wanted.cluster or bool(there) or not _aborted(key, inputs)


def _aborted(key: ArmKey, inputs: Inputs) -> bool:
    rules = (r for p in inputs.policies if p.key == key[0] for r in p.spec.rules if r.name == key[1])
    return any(r.rollout is not None and r.rollout.abort for r in rules)


def _not_yet(
    key: ArmKey,
    arm: gateway.Arm,
    before: gateway.Arm | None,
    fit: Mapping[str, list[PodState]],
    inputs: Inputs,
) -> str:
    """Why ``arm`` can't be arrived at now; empty where it can."""
    if arm.cluster not in fit:
        return "" if "/svc:" in arm.cluster else f"backend {arm.cluster} does not exist"
    pods = fit[arm.cluster]
    holding = [p for p in pods if arm.config in p.stream.versions]
    if holding and (len(holding) == len(pods) or key in inputs.overdue or arm == before):
        return ""
    for state in pods:
        if arm.config in state.stream.rejected:
            return f"pod {state.pod.name} refused the configuration: {state.stream.rejected[arm.config]}"
    if not pods:
        return f"backend {arm.cluster} has no ready pod"
    return f"{len(holding)} of {len(pods)} pods of {arm.cluster} hold the configuration"


def _users(
    serving: Iterable[Accepted], arms: Mapping[ArmKey, gateway.Arm], fit: Mapping[str, list[PodState]]
) -> dict[str, set[str]]:
    """Versions that requests to each cluster may name, as far as at least one fit pod knows them."""
    users: dict[str, set[str]] = {}

    def use(cluster: str, version: str) -> None:
        if any(version in p.stream.versions for p in fit.get(cluster, ())):
            users.setdefault(cluster, set()).add(version)

    for policy in serving:
        for rule in policy.spec.rules:
            for role in (STABLE, CANDIDATE):
                arm = arms.get((policy.key, rule.name, role))
                if arm is not None:
                    for cluster in (arm.cluster, *_fallbacks(policy, rule)):
                        use(cluster, arm.config)
    return users


def _endpoints(pods: Iterable[PodState], versions: set[str]) -> tuple[PodState, ...]:
    return tuple(sorted((p for p in pods if versions <= p.stream.versions), key=lambda p: p.pod.name))


def _policy(
    policy: Accepted,
    arms: Mapping[ArmKey, gateway.Arm],
    endpoints: Mapping[str, tuple[PodState, ...]],
    backends: Mapping[str, BackendView],
) -> gateway.Policy:
    rules: list[gateway.Rule] = []
    for spec in policy.spec.rules:
        rule = _rule(policy, spec, arms, endpoints)
        rules += [*_guards(policy, spec, rule, arms, backends), rule]
    return gateway.Policy(name=policy.key, model=policy.spec.model, rules=tuple(rules))


def _guards(
    policy: Accepted,
    spec: RuleSpec,
    rule: gateway.Rule,
    arms: Mapping[ArmKey, gateway.Arm],
    backends: Mapping[str, BackendView],
) -> list[gateway.Rule]:
    """Refusals in front of a rule for what a backend of it is not fit for, whatever changed since it was
    accepted."""
    found = {
        c
        for role in (STABLE, CANDIDATE)
        if (a := arms.get((policy.key, spec.name, role)))
        for c in [a.cluster]
    }
    found |= set(_fallbacks(policy, spec))
    guards: list[gateway.Rule] = []
    name = f"{rule.name}.unfit"
    for told in (unfit(spec.match, backends[c].fitness) for c in sorted(found) if c in backends):
        refuse = replace(
            rule,
            name=name,
            stable=None,
            candidate=None,
            attempt="",
            weight=0,
            shadow_percent=0,
            fallbacks=(),
            refusal=(403, "no backend of this rule is fit for this request"),
        )
        if told.everything:
            return [refuse]
        if told.tasks:
            guards.append(replace(refuse, tasks=told.tasks))
        if told.data_classes:
            guards.append(replace(refuse, data_classes=told.data_classes))
        if told.tenants:
            guards.append(replace(refuse, tenants=told.tenants))
    return [replace(g, name=f"{name}{i}") for i, g in enumerate(dict.fromkeys(guards))]


def _rule(
    policy: Accepted,
    rule: RuleSpec,
    arms: Mapping[ArmKey, gateway.Arm],
    endpoints: Mapping[str, tuple[PodState, ...]],
) -> gateway.Rule:
    status = policy.rules.get(rule.name) or RuleStatus(name=rule.name)
    candidate = arms.get((policy.key, rule.name, CANDIDATE))
    arrived = candidate is not None and any(
        candidate.config in p.stream.versions for p in endpoints.get(candidate.cluster, ())
    )
    match, size, refusal = rule.match, rule.match.input_bytes, rule.target.refusal
    return gateway.Rule(
        name=rule.name,
        stable=arms.get((policy.key, rule.name, STABLE)),
        refusal=(refusal.status, refusal.message) if refusal else None,
        candidate=candidate,
        attempt=status.attempt if rule.rollout is not None else "",
        weight=status.weight if arrived else 0,
        shadow_percent=status.shadow_percent if arrived else 0,
        fallbacks=tuple(c for c in _fallbacks(policy, rule) if endpoints.get(c)),
        tasks=tuple(match.tasks),
        tenants=tuple(match.tenants),
        data_classes=tuple(match.data_classes),
        risks=tuple(match.risks),
        min_bytes=size.min if size else 0,
        max_bytes=size.max if size else None,
        idle_seconds=rule.timeouts.idle_seconds,
        total_seconds=rule.timeouts.total_seconds,
        retries=rule.retries.attempts,
    )


def _clusters(
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
            for role in (STABLE, CANDIDATE):
                arm = arms.get((policy.key, rule.name, role))
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
