"""What is wrong with an object before Envoy ever sees it.

Envoy refuses a whole resource for one bad item, so each object is looked at alone and against those already
in force: of two that want the same key or model name, the one that is in force keeps it; among newcomers,
the first by name.
"""

from __future__ import annotations

import re
from collections.abc import Iterable, Iterator

from .identity import JWT_SHAPE
from .state import Arm, Cluster, GatewayState, Policy, Rule, Tenant

Problem = tuple[str, str, str]
"""Kind of object, its name, what is wrong."""

_NAME = re.compile(r"[!-~]{1,300}")
_KEY = re.compile(r"[!-~]{1,4096}")


def problems(state: GatewayState, in_force: GatewayState) -> list[Problem]:
    """All objects that must not be pushed."""
    return [*_cluster_problems(state), *_tenant_problems(state, in_force), *_policy_problems(state, in_force)]


def _cluster_problems(state: GatewayState) -> Iterator[Problem]:
    for cluster in state.clusters:
        message = _cluster_problem(cluster)
        if message:
            yield "cluster", cluster.name, message


def _cluster_problem(cluster: Cluster) -> str:
    if not _NAME.fullmatch(cluster.name) or any(c in cluster.name for c in "@|"):
        return "its name can't be used in the gateway"
    for endpoint in cluster.endpoints:
        if not 0 < endpoint.port < 65536:
            return f"port {endpoint.port} is not between 1 and 65535"
    return ""


def _tenant_problems(state: GatewayState, in_force: GatewayState) -> Iterator[Problem]:
    old = {tenant.name: tenant for tenant in in_force.tenants}

    def age(tenant: Tenant) -> tuple[bool, str]:
        return (tenant.name not in old, tenant.name)

    owners = {key: t.name for t in sorted(in_force.tenants, key=age, reverse=True) for key in t.api_keys}
    alive = {tenant.name: set(tenant.api_keys) for tenant in state.tenants}
    owners = {key: name for key, name in owners.items() if key in alive.get(name, ())}
    seen: set[str] = set()
    for tenant in sorted(state.tenants, key=age):
        message = _tenant_problem(tenant)
        if tenant.name in seen:
            message = "another tenant has the same name"
        seen.add(tenant.name)
        for key in tenant.api_keys:
            owner = owners.setdefault(key, tenant.name)
            if owner != tenant.name:
                message = f"one of its API keys is also a key of tenant {owner}"
        if message:
            yield "tenant", tenant.name, message


def _tenant_problem(tenant: Tenant) -> str:
    if not _NAME.fullmatch(tenant.name) or not _NAME.fullmatch(tenant.domain):
        return "its name or security domain can't be used in a header"
    for key in tenant.api_keys:
        if not _KEY.fullmatch(key):
            return "an API key is empty or has characters that can't be sent in a header"
        if re.fullmatch(JWT_SHAPE.removeprefix("(?i:bearer) +"), key):
            return "an API key looks like a JSON Web Token"
    if len(set(tenant.api_keys)) != len(tenant.api_keys):
        return "it has the same API key twice"
    return ""


def _policy_problems(state: GatewayState, in_force: GatewayState) -> Iterator[Problem]:
    owners = {p.model: p.name for p in in_force.policies}
    alive = {p.name: p.model for p in state.policies}
    owners = {model: name for model, name in owners.items() if alive.get(name) == model}
    for policy in sorted(state.policies, key=lambda p: p.name):
        message = _policy_problem(policy)
        owner = owners.setdefault(policy.model, policy.name)
        if owner != policy.name:
            message = f"policy {owner} already serves model {policy.model}"
        if message:
            yield "policy", policy.name, message


def _policy_problem(policy: Policy) -> str:
    if not _NAME.fullmatch(policy.name) or not policy.model:
        return "its name or model can't be used in the gateway"
    names = [rule.name for rule in policy.rules]
    if len(set(names)) != len(names):
        return "two of its rules have the same name"
    for rule in policy.rules:
        if (rule.stable is None) == (rule.refusal is None):
            return f"rule {rule.name}: exactly one of an arm and a refusal must be given"
        if not all(0 <= percent <= 100 for percent in _percents(rule)):
            return f"rule {rule.name}: weight and shadow are percentages"
        if ("", "") in rule.scope.excluded:
            return f"rule {rule.name}: an exclusion names neither task nor tenant"
        if rule.refusal and not 200 <= rule.refusal[0] < 600:
            return f"rule {rule.name}: {rule.refusal[0]} is not an HTTP status"
        arms = (rule.stable, rule.candidate, rule.aside)
        review = (rule.review.stable, rule.review.candidate) if rule.review else ()
        attempts = (rule.attempt, rule.review.attempt if rule.review else "")
        for text in (*_texts((*arms, *review)), *attempts, rule.name):
            if text and not _NAME.fullmatch(text):
                return f"rule {rule.name}: {text[:40]!r} can't be sent in a header"
    return ""


def _percents(rule: Rule) -> Iterator[int]:
    yield from (rule.weight, rule.shadow_percent, rule.pair_percent)
    if rule.review is not None:
        yield rule.review.percent


def _texts(arms: Iterable[Arm | None]) -> Iterator[str]:
    for arm in arms:
        if arm is not None:
            yield from (arm.cluster, arm.config)
