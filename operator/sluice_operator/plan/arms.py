"""Arms of a rule, and what pods must know of each: the PodConfig.

Invariant: a PodConfig's version is the digest of all the rest of it and of nothing else (not of the
backend), so that a fallback serves an arm's requests under the very version that the route names.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Mapping
from dataclasses import dataclass, replace
from typing import Any, TypeVar

from ..api.cachescope import CacheScopeSpec, Isolation
from ..api.routepolicy import RoutePolicySpec, Rule, ServiceTarget, Streaming, Verifier
from ..api.tuning import Features, Sampling, Switch
from .references import authority_of, token_of

PodConfig = dict[str, Any]
STABLE, CANDIDATE, ASIDE = "stable", "candidate", "aside"
"""Roles in a rule; aside: who answers what a promoted candidate must not get."""
_T = TypeVar("_T", Features, Sampling)


@dataclass(frozen=True)
class Arm:
    """Who answers and how; one of backend and service is set."""

    backend: str | None
    service: ServiceTarget | None
    features: Features
    cache_scope: str | None
    sampling: Sampling


def stable_arm(rule: Rule) -> Arm | None:
    """The rule's own arm; None where the rule refuses."""
    if rule.target.refusal is not None:
        return None
    return Arm(rule.target.backend, rule.target.service, rule.features, rule.cache_scope, rule.sampling)


def candidate_arm(rule: Rule) -> Arm | None:
    """The stable arm with what the candidate does differently."""
    stable = stable_arm(rule)
    if stable is None or rule.rollout is None:
        return None
    change = rule.rollout.candidate
    arm = stable
    if change.backend is not None:
        arm = replace(arm, backend=change.backend, service=None)
    if change.features is not None:
        arm = replace(arm, features=_over(arm.features, change.features))
    if change.cache_scope is not None:
        arm = replace(arm, cache_scope=change.cache_scope)
    if change.sampling is not None:
        arm = replace(arm, sampling=_over(arm.sampling, change.sampling))
    return arm


def _over(base: _T, change: _T) -> _T:
    return base.model_copy(update=change.model_dump(exclude_none=True))


def pod_config(
    namespace: str,
    policy: str,
    spec: RoutePolicySpec,
    rule: Rule,
    arm: Arm,
    scopes: Mapping[str, CacheScopeSpec],
) -> PodConfig:
    """What a pod must know of ``arm``; ``scopes`` are those of the namespace, by name."""
    scope = scopes.get(arm.cache_scope) if arm.cache_scope else None
    # A scope that is gone permits nothing.
    permitted = scope.prefix.enabled if scope is not None else not arm.cache_scope
    body: PodConfig = {
        "policy": f"{namespace}/{policy}",
        "rule": rule.name,
        "model": spec.model,
        "contract": _contract(namespace, rule),
        **_streaming(rule),
        "features": {
            "prefixCache": permitted and arm.features.prefix_cache is not False,
            # Nothing where it is as ever, as with streaming.
            **({"speculation": False} if arm.features.speculation is False else {}),
            **({"directStreaming": False} if arm.features.direct_streaming is False else {}),
        },
        "switches": [_switch(switch, permitted) for switch in spec.switches],
        "scope": {
            "name": f"{namespace}/{arm.cache_scope or ''}",
            "isolation": (scope.isolation if scope else Isolation.TENANT).value,
            "epoch": scope.epoch if scope else 0,
            "versions": dict(scope.versions) if scope else {},
        },
        "sampling": _sampling(arm.sampling),
        "caps": {},
    }
    canonical = json.dumps(body, sort_keys=True, separators=(",", ":"))
    return {"version": hashlib.sha256(canonical.encode()).hexdigest()[:16], **body}


def _switch(switch: Switch, permitted: bool) -> dict[str, Any]:
    """A switch can't turn on what the cache scope does not permit."""
    told = {}
    if switch.features.prefix_cache is not None:
        told["prefixCache"] = permitted and switch.features.prefix_cache
    if switch.features.speculation is not None:
        told["speculation"] = switch.features.speculation
    if switch.features.direct_streaming is not None:
        told["directStreaming"] = switch.features.direct_streaming
    return {"tasks": sorted(switch.tasks), "tenants": sorted(switch.tenants), "features": told}


def _streaming(rule: Rule) -> dict[str, str]:
    """Nothing where it is as ever: a pod that knows no other way must refuse the configuration, and only
    that one."""
    streaming = rule.contract.streaming
    return {} if streaming is Streaming.IMMEDIATE else {"streaming": streaming.value}


def _contract(namespace: str, rule: Rule) -> list[dict[str, Any]]:
    checks = []
    for check in rule.contract.checks:
        told: dict[str, Any] = {"name": check.name, "hard": check.severity.value == "Hard"}
        if check.json_schema is not None:
            told |= {"kind": "JsonSchema", "schema": check.json_schema}
        elif check.must_match is not None:
            told |= {"kind": "MustMatch", "pattern": check.must_match}
        elif check.verifier is not None:
            told |= {"kind": "Verifier", "verifier": _verifier(namespace, check.verifier)}
        else:
            told |= {"kind": "MustNotMatch", "pattern": check.must_not_match}
        checks.append(told)
    return checks


def _verifier(namespace: str, verifier: Verifier) -> dict[str, Any]:
    """Names of its token and authorities, never what they are: those come beside (`access`)."""
    told: dict[str, Any] = {"url": verifier.url, "timeoutSeconds": verifier.timeout_seconds}
    for part, ref in (
        ("token", token_of(namespace, verifier)),
        ("authority", authority_of(namespace, verifier)),
    ):
        if ref is not None:
            told[part] = ref.text
    return told


def _sampling(sampling: Sampling) -> dict[str, Any]:
    told: dict[str, Any] = {}
    if sampling.temperature is not None:
        told["temperature"] = float(sampling.temperature)
    if sampling.top_p is not None:
        told["topP"] = float(sampling.top_p)
    if sampling.max_tokens is not None:
        told["maxTokens"] = sampling.max_tokens
    return told
