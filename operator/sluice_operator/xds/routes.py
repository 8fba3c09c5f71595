"""Policies and tenants as one route configuration.

Everything that must take effect on open connections is here and not in the listener: keys, permissions,
routes. The first route that matches wins, so the order of the list is: who are you, what do you call, the
rules of each policy in order, and what is left is an error. Weights are never here (see ``runtime``).
"""

from __future__ import annotations

import json
import re
from collections.abc import Iterable, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import Any

from envoy.config.route.v3 import route_components_pb2, route_pb2
from envoy.extensions.filters.http.api_key_auth.v3 import api_key_auth_pb2
from envoy.extensions.filters.http.rbac.v3 import rbac_pb2
from envoy.extensions.retry.host.previous_hosts.v3 import previous_hosts_pb2
from envoy.extensions.retry.priority.previous_priorities.v3 import previous_priorities_config_pb2

from .clusters import CHAIN, arm_clusters
from .messages import Message, duration, error_body, extension, pack, struct
from .runtime import mirror_key, weight_prefix
from .state import Arm, GatewayState, Policy, Rule, Tenant

ROUTES = "sluice"
IDENTITY = "x-sluice-identity"
CLAIMS = ("sluice-task", "sluice-data-class", "sluice-risk")
METADATA = "sluice"
API_KEY_FILTER = "sluice.api_key"
RBAC_FILTER = "sluice.claims"
COMPLETION_PATHS = r"/v1/(chat/)?completions"
OVERWRITE = 2
INVALID = "invalid_request_error"
# No response was begun, so another pod may try. 429 is an answer and never tried again.
RETRY_ON = "connect-failure,refused-stream,reset,retriable-status-codes"


def build_routes(state: GatewayState) -> Message:
    """The route configuration."""
    routes = [*_front(state)]
    for policy in state.policies:
        routes.extend(_policy_routes(policy_without_weights(policy)))
    routes.extend(_rest())
    return route_pb2.RouteConfiguration(
        name=ROUTES,
        max_direct_response_body_size_bytes={"value": 1 << 20},
        virtual_hosts=[
            {
                "name": "sluice",
                "domains": ["*"],
                "routes": routes,
                "include_request_attempt_count": True,
                "request_headers_to_add": [_header("x-sluice-credential", state.credential)]
                if state.credential
                else [],
                # Retries and mirrors need the whole body; what is above this limit was refused before.
                "request_body_buffer_limit": {"value": state.max_body_bytes},
                "typed_per_filter_config": {
                    API_KEY_FILTER: pack(_api_keys(state.tenants)),
                    RBAC_FILTER: pack(rbac_pb2.RBACPerRoute(rbac={"rules": permissions(state.tenants)})),
                },
            }
        ],
    )


def policy_without_weights(policy: Policy) -> Policy:
    """The policy as far as routes are concerned."""
    return replace(policy, rules=tuple(replace(rule, weight=0, shadow_percent=0) for rule in policy.rules))


def identity(tenant: Tenant) -> str:
    """Name and security domain in one value, as authentication forwards it."""
    return f"{tenant.name} {tenant.domain}"


def _api_keys(tenants: Iterable[Tenant]) -> Message:
    # An override without forwarding would lose the tenant and hand the key to the pods.
    return api_key_auth_pb2.ApiKeyAuthPerRoute(
        credentials=[{"key": key, "client": identity(t)} for t in tenants for key in t.api_keys],
        key_sources=[{"header": "Authorization"}],
        forwarding={"header": IDENTITY, "hide_credentials": True},
    )


def permissions(tenants: Iterable[Tenant]) -> dict[str, Any]:
    """RBAC rules: each tenant with the claims it may make; whoever is not named is refused."""
    return {
        "action": 0,
        "policies": {
            tenant.name: {
                "principals": [{"header": {"name": IDENTITY, "string_match": {"exact": identity(tenant)}}}],
                "permissions": [
                    {
                        "and_rules": {
                            "rules": [
                                _claim("x-sluice-task", tenant.tasks),
                                _claim("x-sluice-data-class", tenant.data_classes),
                                _claim("x-sluice-risk", tenant.risks),
                            ]
                        }
                    }
                ],
            }
            for tenant in tenants
        },
    }


def _claim(header: str, allowed: Sequence[str]) -> dict[str, Any]:
    absent = {"not_rule": {"header": {"name": header, "present_match": True}}}
    given = [{"header": _one_of(header, [value])} for value in allowed]
    return {"or_rules": {"rules": [absent, *given]}}


def _one_of(header: str, values: Iterable[str]) -> dict[str, Any]:
    values = [str(value) for value in values]
    if len(values) == 1:
        return {"name": header, "string_match": {"exact": values[0]}}
    return {"name": header, "string_match": {"safe_regex": {"regex": "|".join(map(re.escape, values))}}}


def _header(name: str, value: str) -> dict[str, Any]:
    # An empty value is kept: it says "no rollout", where an absent header would say nothing.
    return {
        "header": {"key": name, "value": value.replace("%", "%%")},
        "append_action": OVERWRITE,
        "keep_empty_value": True,
    }


def _answer(name: str, match: dict[str, Any], status: int, body: str) -> Message:
    return route_components_pb2.Route(
        name=name, match=match, direct_response={"status": status, "body": {"inline_string": body}}
    )


def _front(state: GatewayState) -> Iterable[Message]:
    """Routes before those of the policies."""
    anywhere = {"prefix": "/"}
    yield _answer(
        "unknown-caller",
        {**anywhere, "headers": [{"name": "x-sluice-tenant", "present_match": True, "invert_match": True}]},
        401,
        error_body("Incorrect or missing API key.", INVALID, "invalid_api_key"),
    )
    yield from _models(state)
    yield _answer(
        "unknown-path",
        {
            **anywhere,
            "headers": [
                {
                    "name": ":path",
                    "invert_match": True,
                    "string_match": {"safe_regex": {"regex": COMPLETION_PATHS + r"(\?.*)?"}},
                }
            ],
        },
        404,
        error_body("There is no such path here.", INVALID, "not_found"),
    )
    yield _answer(
        "unknown-method",
        {
            **anywhere,
            "headers": [{"name": ":method", "invert_match": True, "string_match": {"exact": "POST"}}],
        },
        405,
        error_body("Only POST is allowed here.", INVALID, "method_not_allowed"),
    )


def _models(state: GatewayState) -> Iterable[Message]:
    groups: dict[tuple[str, ...], list[str]] = {}
    for tenant, models in visible_models(state.policies, state.tenants).items():
        groups.setdefault(models, []).append(tenant)
    for models, tenants in sorted(groups.items()):
        listing = {
            "object": "list",
            "data": [
                {"id": model, "object": "model", "created": 0, "owned_by": "sluice"} for model in models
            ],
        }
        yield _answer(
            "models",
            {
                "path": "/v1/models",
                "headers": [
                    {"name": ":method", "string_match": {"exact": "GET"}},
                    _one_of("x-sluice-tenant", tenants),
                ],
            },
            200,
            json.dumps(listing),
        )


def visible_models(policies: Iterable[Policy], tenants: Iterable[Tenant]) -> dict[str, tuple[str, ...]]:
    """For each tenant the names of the models that some rule gives to it."""
    everybody: list[str] = []
    chosen: dict[str, list[str]] = {}
    for policy in policies:
        if any(not rule.tenants for rule in policy.rules):
            everybody.append(policy.model)
            continue
        for tenant in {name for rule in policy.rules for name in rule.tenants}:
            chosen.setdefault(tenant, []).append(policy.model)
    everybody.sort()
    return {
        t.name: tuple(sorted((*everybody, *chosen[t.name])) if t.name in chosen else everybody)
        for t in tenants
    }


def _model_is(matcher: dict[str, Any]) -> dict[str, Any]:
    return {"filter": METADATA, "path": [{"key": "model"}], "value": {"string_match": matcher}}


def _rest() -> Iterable[Message]:
    """Routes after those of the policies."""
    yield _answer(
        "unknown-model",
        {"prefix": "/", "dynamic_metadata": [_model_is({"safe_regex": {"regex": r"(?s).+"}})]},
        404,
        error_body("There is no such model.", INVALID, "model_not_found", "model"),
    )
    yield _answer(
        "no-model",
        {"prefix": "/"},
        400,
        error_body(
            "The body must be application/json, an object with a string 'model'.", INVALID, "invalid_body"
        ),
    )


@lru_cache(maxsize=4096)
def _policy_routes(policy: Policy) -> tuple[Message, ...]:
    model = _model_is({"exact": policy.model})
    refused = _answer(
        f"{policy.name} ",
        {"prefix": "/", "dynamic_metadata": [model]},
        403,
        error_body("No rule takes this request.", "permission_error", "no_rule"),
    )
    return (*(_rule_route(policy, rule, model) for rule in policy.rules), refused)


def _rule_route(policy: Policy, rule: Rule, model: dict[str, Any]) -> Message:
    name = f"{policy.name} {rule.name}"
    match = {"prefix": "/", "headers": list(_conditions(rule)), "dynamic_metadata": [model]}
    if rule.refusal is not None or rule.stable is None:
        status, message = rule.refusal or (503, "This rule has no target.")
        return _answer(name, match, status, error_body(message, INVALID, "refused"))
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
        request_headers_to_add=[_header("x-sluice-policy", policy.name), _header("x-sluice-rule", rule.name)],
    )


def _conditions(rule: Rule) -> Iterable[dict[str, Any]]:
    for header, values in (
        ("x-sluice-task", rule.tasks),
        ("x-sluice-tenant", rule.tenants),
        ("x-sluice-data-class", rule.data_classes),
        ("x-sluice-risk", rule.risks),
    ):
        if values:
            yield _one_of(header, values)
    if rule.min_bytes or rule.max_bytes is not None:
        end = rule.max_bytes if rule.max_bytes is not None else (1 << 62)
        yield {"name": "content-length", "range_match": {"start": rule.min_bytes, "end": end}}


def _action(policy: str, rule: Rule, stable: Arm) -> dict[str, Any]:
    stable_cluster, candidate_cluster = arm_clusters(rule)
    arms = [_weighted(stable_cluster, "stable", stable, rule, 10_000)]
    action: dict[str, Any] = {
        "timeout": duration(rule.total_seconds or 0),
        "idle_timeout": duration(rule.idle_seconds),
        "retry_policy": _retry_policy(rule),
        "hash_policy": [
            {"header": {"header_name": "x-sluice-conversation"}, "terminal": True},
            {"header": {"header_name": "x-request-id"}},
        ],
    }
    if rule.candidate is not None:
        # The candidate's buckets come first: they grow at their upper end only, so who is there stays there.
        arms.insert(0, _weighted(candidate_cluster, "candidate", rule.candidate, rule, 0))
        action["request_mirror_policies"] = [_mirror(policy, rule, rule.candidate, candidate_cluster)]
    action["weighted_clusters"] = {
        "clusters": arms,
        "runtime_key_prefix": weight_prefix(policy, rule),
        "use_hash_policy": {"value": True},
    }
    return action


def _weighted(cluster: str, name: str, arm: Arm, rule: Rule, weight: int) -> dict[str, Any]:
    return {
        "name": cluster,
        "weight": {"value": weight},
        "request_headers_to_add": [_header(key, value) for key, value in arm_headers(name, arm, rule)],
        "host_rewrite_literal": host_of(arm.cluster),
    }


def arm_headers(name: str, arm: Arm, rule: Rule) -> tuple[tuple[str, str], ...]:
    """What tells an attempt's arm."""
    return ("x-sluice-arm", name), ("x-sluice-config", arm.config), ("x-sluice-attempt", rule.attempt)


def host_of(cluster: str) -> str:
    """Host header for pods and services: ours, never the client's."""
    namespace, _, name = cluster.partition("/")
    if name.startswith("svc:"):
        service, _, port = name.removeprefix("svc:").partition(":")
        return f"{service}.{namespace}:{port}"
    return re.sub(r"[^a-z0-9.-]", "-", f"{name or 'backend'}.{namespace}".lower())


def _mirror(policy: str, rule: Rule, arm: Arm, cluster: str) -> dict[str, Any]:
    # A mirrored copy is never rescued: its failure is the evidence.
    return {
        "cluster": cluster.split(CHAIN, 1)[0],
        "runtime_fraction": {
            "default_value": {"numerator": 0, "denominator": 0},
            "runtime_key": mirror_key(policy, rule),
        },
        "trace_sampled": {"value": False},
        "disable_shadow_host_suffix_append": True,
        "request_headers_mutations": [
            {"append": _header(key, value)}
            for key, value in (("x-sluice-mirror", "1"), *arm_headers("candidate", arm, rule))
        ],
    }


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
