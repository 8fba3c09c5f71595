"""Requests that go straight to a pod, past the gateway: evaluation samples and load ramps.

They carry the gateway's credential and an empty rule and attempt, so a pod answers them as it would answer
users and what it tells of them is no evidence. Invariant: tenant and security domain `sluice-eval` are
nobody's, so no cache entry is shared with a user.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ..plan import names
from ..plan.arms import CANDIDATE, STABLE
from ..plan.routes import Accepted, Plan, aside_arm, rule_arms

EVAL_TENANT = "sluice-eval"


class NoTarget(Exception):
    """There is no pod to ask; the message says why and what to do."""


@dataclass(frozen=True)
class Target:
    """A pod, and the configuration that requests to it mean."""

    url: str
    """Such as http://10.0.0.7:8000, without a path."""
    policy: str
    """namespace/name."""
    arm: str
    """stable or candidate."""
    config: str
    """Configuration version that the pod holds."""
    pod: str = ""
    """The pod's name, for events."""

    def headers(self, credential: str, *, task: str = "", data_class: str = "Internal") -> dict[str, str]:
        """What the gateway would set; see docs/contracts."""
        return {
            "x-sluice-credential": credential,
            "x-sluice-tenant": EVAL_TENANT,
            "x-sluice-domain": EVAL_TENANT,
            "x-sluice-task": task,
            "x-sluice-data-class": data_class,
            "x-sluice-risk": "High",
            "x-sluice-policy": self.policy,
            "x-sluice-rule": "",
            "x-sluice-arm": self.arm,
            "x-sluice-attempt": "",
            "x-sluice-config": self.config,
        }


def target(made: Plan | None, policy: str, rule: str, arm: str) -> Target:
    """A ready pod of one arm of a rule; `policy` is namespace/name. Raises NoTarget."""
    wanted = made.wanted.get((policy, rule, arm)) if made is not None else None
    if made is None or wanted is None:
        raise NoTarget(f"rule {rule} of policy {policy} has no {arm} arm that pods serve")
    holding = [s.pod for s in made.endpoints.get(wanted.cluster, ()) if wanted.config in s.stream.versions]
    if not holding:
        raise NoTarget(f"no ready pod of {wanted.cluster} holds what rule {rule} asks of it yet")
    pod = min(holding, key=lambda pod: pod.name)
    host = f"[{pod.ip}]" if ":" in pod.ip else pod.ip
    # What a promoted candidate must not get is answered by the arm before it, as stable.
    told = CANDIDATE if arm == CANDIDATE else STABLE
    return Target(f"http://{host}:{pod.api_port}", policy, told, wanted.config, pod.name)


def backend_target(made: Plan | None, policy: str, backend: str) -> Target:
    """A ready pod of a backend that a rule of the policy names. Raises NoTarget."""
    cluster = names.cluster(policy.partition("/")[0], backend)
    for (key, rule, arm), wanted in sorted(made.wanted.items()) if made is not None else ():
        if key == policy and wanted.cluster == cluster:
            return target(made, policy, rule, arm)
    raise NoTarget(
        f"no rule of policy {policy} names backend {backend}: make it a target or a rollout's candidate"
        " there, since that says how its pods answer"
    )


def serves(policies: Iterable[Accepted], namespace: str, backend: str) -> str:
    """Whose requests reach the backend now, in words; empty: nobody's."""
    for policy in policies:
        if policy.namespace != namespace:
            continue
        for rule in policy.spec.rules:
            where = f"rule {rule.name} of policy {policy.name}"
            status = policy.rules.get(rule.name)
            stable, candidate = rule_arms(rule, status)
            aside = aside_arm(rule, status)
            if backend in {arm.backend for arm in (stable, aside) if arm is not None}:
                return f"it answers {where}"
            mirrored = status.shadow_percent if status is not None else 0
            weight = status.weight if status is not None else 0
            if candidate is not None and candidate.backend == backend and (weight or mirrored):
                share = f"{weight} % of" if weight else "mirrored requests of"
                return f"it gets {share} {where}"
            if any(fallback.backend == backend for fallback in rule.fallbacks):
                return f"it is a fallback of {where}"
    return ""
