"""The rules of one policy as routes: the first that matches wins."""

from __future__ import annotations

import re
from collections.abc import Iterable
from dataclasses import replace
from functools import lru_cache
from typing import Any

from envoy.config.route.v3 import route_components_pb2
from envoy.extensions.retry.host.previous_hosts.v3 import previous_hosts_pb2
from envoy.extensions.retry.priority.previous_priorities.v3 import previous_priorities_config_pb2

from .clusters import CHAIN, arm_clusters
from .messages import Message, duration, error_body, extension, struct
from .mirrors import arm_headers, mirrors
from .parts import ENDLESS, INVALID, METADATA, answer, header, model_is, one_of
from .runtime import TOTAL, weight_prefix
from .scopes import parts
from .state import Arm, Policy, Rule

# No response was begun, so another pod may try. 429 is an answer and never tried again; nor is what a pod
# withheld, which it marks with x-envoy-ratelimited: that header outweighs every condition here.
RETRY_ON = "connect-failure,refused-stream,reset,retriable-status-codes"


def policy_without_weights(policy: Policy) -> Policy:
    """The policy as far as routes are concerned."""
    return replace(policy, rules=tuple(map(_without_weights, policy.rules)))


def _without_weights(rule: Rule) -> Rule:
    review = rule.review and replace(rule.review, percent=0)
    return replace(rule, weight=0, shadow_percent=0, pair_percent=0, review=review)


def policy_routes(policy: Policy) -> tuple[Message, ...]:
    """Routes of the rules in order, and what no rule takes."""
    return _routes(policy_without_weights(policy))


@lru_cache(maxsize=4096)
def _routes(policy: Policy) -> tuple[Message, ...]:
    model = model_is({"exact": policy.model})
    refused = answer(
        f"{policy.name} ",
        {"prefix": "/", "dynamic_metadata": [model]},
        403,
        error_body("No rule takes this request.", "permission_error", "no_rule"),
    )
    rules = (part for rule in policy.rules for part in parts(rule))
    return (*(_rule_route(policy, rule, model) for rule in rules), refused)


def _rule_route(policy: Policy, rule: Rule, model: dict[str, Any]) -> Message:
    # Parts of a rule share its name, and so its access records: Envoy needs no distinct ones.
    name = f"{policy.name} {rule.name}"
    match = {"prefix": "/", "headers": list(_conditions(rule)), "dynamic_metadata": [model]}
    if rule.refusal is not None or rule.stable is None:
        status, message = rule.refusal or (503, "This rule has no target.")
        return answer(name, match, status, error_body(message, INVALID, "refused"))
    return route_components_pb2.Route(
        name=name,
        match=match,
        route=_action(policy.name, rule, rule.stable),
        # For access records of requests that reached no pod: they know the arm, but not its backend.
        metadata={
            "filter_metadata": {
                METADATA: struct(
                    {
                        arm: meant.cluster
                        for arm, meant in (("stable", rule.stable), ("candidate", rule.candidate))
                        if meant
                    }
                )
            }
        },
        request_headers_to_add=[header("x-sluice-policy", policy.name), header("x-sluice-rule", rule.name)],
    )


def _conditions(rule: Rule) -> Iterable[dict[str, Any]]:
    for name, values in (
        ("x-sluice-task", rule.tasks),
        ("x-sluice-tenant", rule.tenants),
        ("x-sluice-data-class", rule.data_classes),
        ("x-sluice-risk", rule.risks),
    ):
        if values:
            yield one_of(name, values)
    if rule.min_bytes or rule.max_bytes is not None:
        end = rule.max_bytes if rule.max_bytes is not None else ENDLESS
        yield {"name": "content-length", "range_match": {"start": rule.min_bytes, "end": end}}


def _action(policy: str, rule: Rule, stable: Arm) -> dict[str, Any]:
    stable_cluster, candidate_cluster = arm_clusters(rule)
    alone = rule.alone * TOTAL // 100 if rule.candidate is not None else 0
    arms = [_weighted(stable_cluster, "stable", stable, rule, TOTAL - alone)]
    if rule.candidate is not None:
        # The candidate's buckets come first: they grow at their upper end only, so who is there stays there.
        arms.insert(0, _weighted(candidate_cluster, "candidate", rule.candidate, rule, alone))
    # A mirrored copy is never rescued: its failure is the evidence.
    first = [name.split(CHAIN, 1)[0] for name in (stable_cluster, candidate_cluster)]
    return {
        "timeout": duration(rule.total_seconds or 0),
        "idle_timeout": duration(rule.idle_seconds),
        "retry_policy": _retry_policy(rule),
        "hash_policy": [
            {"header": {"header_name": "x-sluice-conversation"}, "terminal": True},
            {"header": {"header_name": "x-request-id"}},
        ],
        "request_mirror_policies": mirrors(policy, rule, *first),
        "weighted_clusters": {
            "clusters": arms,
            "runtime_key_prefix": weight_prefix(policy, rule),
            "use_hash_policy": {"value": True},
        },
    }


def _weighted(cluster: str, name: str, arm: Arm, rule: Rule, weight: int) -> dict[str, Any]:
    return {
        "name": cluster,
        "weight": {"value": weight},
        "request_headers_to_add": [header(key, value) for key, value in arm_headers(name, arm, rule.attempt)],
        "host_rewrite_literal": host_of(arm.cluster),
    }


def host_of(cluster: str) -> str:
    """Host header for pods and services: ours, never the client's."""
    namespace, _, name = cluster.partition("/")
    if name.startswith("svc:"):
        service, _, port = name.removeprefix("svc:").partition(":")
        return f"{service}.{namespace}:{port}"
    return re.sub(r"[^a-z0-9.-]", "-", f"{name or 'backend'}.{namespace}".lower())


def _retry_policy(rule: Rule) -> dict[str, Any]:
    tries = rule.retries + 1
    policy: dict[str, Any] = {
        "retry_on": RETRY_ON,
        "retriable_status_codes": [502, 503],
        "num_retries": {"value": tries * (1 + len(rule.fallbacks)) - 1},
        "retry_host_predicate": [
            extension(
                "envoy.retry_host_predicates.previous_hosts", previous_hosts_pb2.PreviousHostsPredicate()
            )
        ],
        "host_selection_retry_max_attempts": 3,
        "retry_back_off": {"base_interval": duration(0.005), "max_interval": duration(0.1)},
    }
    if rule.fallbacks:
        policy["retry_priority"] = extension(
            "envoy.retry_priorities.previous_priorities",
            previous_priorities_config_pb2.PreviousPrioritiesConfig(update_frequency=tries),
        )
    return policy
