"""Everything in force as one state for the gateway, and what pods must hold for it.

The order is pods → endpoints → routes → removal. So an arm of a rule stays where it is until pods that
hold what it moves to are there (``settle``), and pods go on holding whatever a route still names.

Invariant: every endpoint of a cluster holds every configuration that some fit pod holds and that a route
to the cluster names; so no request meets a pod that does not know what the request means.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from ..api.routepolicy import Rule as RuleSpec
from ..api.rulestatus import Phase, RuleStatus
from ..xds import state as gateway
from . import names
from .arms import STABLE, Arm, PodConfig, candidate_arm, pod_config, stable_arm
from .backend_status import PodState, is_fit
from .fitness import complaint
from .gateway_rules import ROLES, Placed, clusters, fallbacks
from .routed import Accepted, ArmKey, BackendView, Inputs, Plan, Review, RuleKey
from .scope import eligibility
from .settle import Fit, Settling, missing

__all__ = [
    "Accepted",
    "ArmKey",
    "BackendView",
    "Inputs",
    "Plan",
    "Review",
    "RuleKey",
    "aside_arm",
    "models_taken",
    "plan",
    "rule_arms",
]


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
    if _promoted(status):
        return candidate, None
    if status.phase in (Phase.ROLLED_BACK, Phase.ABORTED):
        return stable, None
    return stable, candidate


def aside_arm(rule: RuleSpec, status: RuleStatus | None) -> Arm | None:
    """Who answers what a promoted candidate must not get: the arm before it; None: there is no such thing."""
    if rule.rollout is None or rule.rollout.abort or status is None or not _promoted(status):
        return None
    return stable_arm(rule) if eligibility(rule, status).excluded else None


def _promoted(status: RuleStatus) -> bool:
    return status.phase is Phase.PROMOTED and status.weight == 100


def plan(inputs: Inputs) -> Plan:
    """Routes, clusters and pod configurations that follow from ``inputs``."""
    owners = models_taken(inputs.policies)
    serving = sorted((p for p in inputs.policies if owners[p.spec.model] is p), key=lambda p: p.key)
    wanted = _Wanted({name: {} for name in inputs.backends})
    for policy in serving:
        wanted.add(policy, inputs)
    fit = {name: [p for p in view.pods if is_fit(p, view.digest)] for name, view in inputs.backends.items()}
    aborted = {
        (p.key, r.name) for p in serving for r in p.spec.rules if r.rollout is not None and r.rollout.abort
    }
    arms, waiting = Settling(fit, inputs.before, inputs.overdue, aborted).settle(wanted.arms)
    refused = {**dict.fromkeys(inputs.reviews, "no such rule serves"), **wanted.unfit}
    refused |= {k: missing(fit, r.stable) or missing(fit, r.candidate) for k, r in wanted.reviews.items()}
    reviews = {k: r for k, r in wanted.reviews.items() if not refused[k]}
    users = _users(serving, arms, reviews, fit)
    endpoints = {name: _endpoints(pods, users.get(name, set())) for name, pods in fit.items()}
    placed = Placed(arms, endpoints, inputs.backends, reviews)
    state = gateway.GatewayState(
        clusters=clusters(serving, arms, endpoints),
        policies=tuple(map(placed.policy, serving)),
        tenants=inputs.tenants,
        credential=inputs.credential,
        feedback=inputs.feedback,
    )
    return Plan(state, arms, wanted.arms, wanted.configs, wanted.leaked, endpoints, waiting, refused)


@dataclass
class _Wanted:
    """Where arms and reviews shall go, and what pods must hold for that."""

    configs: dict[str, dict[str, PodConfig]]
    """By cluster; only clusters that pods serve are in it."""
    arms: dict[ArmKey, gateway.Arm] = field(default_factory=dict)
    reviews: dict[RuleKey, gateway.Review] = field(default_factory=dict)
    unfit: dict[RuleKey, str] = field(default_factory=dict)
    """Why a review must not have its copies."""
    leaked: dict[str, frozenset[str]] = field(default_factory=dict)
    """Attempts, by cluster that their candidate's requests may have come to."""

    def add(self, policy: Accepted, inputs: Inputs) -> None:
        """Adds the policy's arms, and what pods of their clusters (fallbacks included) must hold."""
        scopes = inputs.scopes.get(policy.namespace, {})
        for rule in policy.spec.rules:
            status = policy.rules.get(rule.name)
            if status is not None and status.leaked:
                self._leak(policy, rule, status)
            found = (*rule_arms(rule, status), aside_arm(rule, status))
            for role, arm in zip(ROLES, found, strict=True):
                if arm is None:
                    continue
                config = pod_config(policy.namespace, policy.name, policy.spec, rule, arm, scopes)
                cluster = _cluster_of(policy, arm)
                self.arms[(policy.key, rule.name, role)] = gateway.Arm(cluster, config["version"])
                for name in (cluster, *fallbacks(policy, rule)):
                    self._hold(name, config)
                review = inputs.reviews.get((policy.key, rule.name))
                if role == STABLE and review is not None:
                    self._review(policy, rule, review, config, inputs)

    def _review(
        self, policy: Accepted, rule: RuleSpec, review: Review, config: PodConfig, inputs: Inputs
    ) -> None:
        key = (policy.key, rule.name)
        for backend in (review.stable, review.candidate):
            wrong = _review_problem(policy, rule, backend, inputs)
            if wrong:
                self.unfit[key] = wrong
                return
        stable, candidate = (
            gateway.Arm(names.cluster(policy.namespace, backend), config["version"])
            for backend in (review.stable, review.candidate)
        )
        for arm in (stable, candidate):
            self._hold(arm.cluster, config)
        self.reviews[key] = gateway.Review(review.attempt, stable, candidate, review.percent)

    def _leak(self, policy: Accepted, rule: RuleSpec, status: RuleStatus) -> None:
        candidate = names.cluster(policy.namespace, status.candidate.backend)
        for cluster in (candidate, *fallbacks(policy, rule)):
            self.leaked[cluster] = self.leaked.get(cluster, frozenset()) | {status.attempt}

    def _hold(self, cluster: str, config: PodConfig) -> None:
        if cluster in self.configs:
            self.configs[cluster][config["version"]] = config


def _review_problem(policy: Accepted, rule: RuleSpec, backend: str, inputs: Inputs) -> str:
    """Copies give a backend nothing that it may not have."""
    view = inputs.backends.get(names.cluster(policy.namespace, backend))
    if view is None:
        return f"backend {backend} does not exist"
    rules = policy.spec.rules
    earlier = [r.match for r in rules[: [r.name for r in rules].index(rule.name)]]
    claimable = {
        task
        for tenant in inputs.tenants
        if not rule.match.tenants or tenant.name in rule.match.tenants
        for task in tenant.tasks
    }
    wrong = complaint(rule.match, earlier, view.fitness, claimable)
    return f"rule {rule.name} would send backend {backend} {wrong}" if wrong else ""


def _cluster_of(policy: Accepted, arm: Arm) -> str:
    if arm.service is not None:
        return names.service_cluster(policy.namespace, arm.service.name, arm.service.port)
    return names.cluster(policy.namespace, arm.backend or "")


def _users(
    serving: Iterable[Accepted],
    arms: Mapping[ArmKey, gateway.Arm],
    reviews: Mapping[RuleKey, gateway.Review],
    fit: Fit,
) -> dict[str, set[str]]:
    """Versions that requests to each cluster may name, as far as at least one fit pod knows them."""
    users: dict[str, set[str]] = {}

    def use(cluster: str, version: str) -> None:
        if any(version in p.stream.versions for p in fit.get(cluster, ())):
            users.setdefault(cluster, set()).add(version)

    for policy in serving:
        for rule in policy.spec.rules:
            for role in ROLES:
                arm = arms.get((policy.key, rule.name, role))
                if arm is not None:
                    for cluster in (arm.cluster, *fallbacks(policy, rule)):
                        use(cluster, arm.config)
    for review in reviews.values():
        for arm in (review.stable, review.candidate):
            use(arm.cluster, arm.config)
    return users


def _endpoints(pods: Iterable[PodState], versions: set[str]) -> tuple[PodState, ...]:
    return tuple(sorted((p for p in pods if versions <= p.stream.versions), key=lambda p: p.pod.name))
