"""What a RoutePolicy can get wrong beyond its schema: each problem is typed and names the field.

A policy with problems is not accepted and the last accepted spec stays in force. Invariant: what passes
here can be pushed to the gateway and to pods without being refused there, and no rule can send a backend
what it is not fit for.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator, Mapping
from typing import Any

import re2

from .. import metaschema
from ..api.routepolicy import Check, RoutePolicySpec, Rule, ServiceTarget, Streaming, Verifier
from .conditions import Problem
from .fitness import complaint
from .surroundings import Surroundings
from .validate_rollout import rollout_problems

__all__ = ["Surroundings", "pattern_error", "policy_problems", "service_problem"]

_MAX_SCHEMA_BYTES = 64 * 1024
_MAX_SCHEMA_DEPTH = 32
_MAX_PATTERN_MEMORY = 1 << 20


def service_problem(index: int, service: ServiceTarget, found: Mapping[str, Any] | None) -> Problem | None:
    """What is wrong with the Service that rule ``index`` names, as the API server has it (None: nothing)."""
    at = f"spec.rules[{index}].target.service"
    if found is None:
        told = f"Service {service.name!r} does not exist in this namespace; create it or correct the name"
        return Problem("ServiceNotFound", told, f"{at}.name")
    spec = found.get("spec") or {}
    if spec.get("type") == "ExternalName":
        return None
    ports = {p["port"] for p in spec.get("ports") or []}
    if spec.get("clusterIP") == "None":  # its name stands for the pods themselves
        ports |= {p["targetPort"] for p in spec.get("ports") or [] if isinstance(p.get("targetPort"), int)}
    if service.port in ports:
        return None
    has = ", ".join(map(str, sorted(ports))) or "none"
    told = f"Service {service.name!r} has no port {service.port}, only {has}"
    return Problem("ServiceNotFound", told, f"{at}.port")


def policy_problems(spec: RoutePolicySpec, around: Surroundings) -> tuple[Problem, ...]:
    """All problems, in the order of the fields."""
    return tuple(p for check in _CHECKS for p in check(spec, around))


def _model(spec: RoutePolicySpec, around: Surroundings) -> Iterator[Problem]:
    owner = around.models_taken.get(spec.model)
    if owner:
        yield Problem(
            "DuplicateModel",
            f"model {spec.model!r} is already published by RoutePolicy {owner}, which is older; "
            "choose another name or delete that policy",
            "spec.model",
        )


def _names(spec: RoutePolicySpec, around: Surroundings) -> Iterator[Problem]:
    seen: set[str] = set()
    for i, rule in enumerate(spec.rules):
        if rule.name in seen:
            yield Problem("InvalidSpec", f"rule name {rule.name!r} is used twice", f"spec.rules[{i}].name")
        seen.add(rule.name)


def _targets(spec: RoutePolicySpec, around: Surroundings) -> Iterator[Problem]:
    for i, rule in enumerate(spec.rules):
        given = [k for k in ("backend", "service", "refusal") if getattr(rule.target, k) is not None]
        if len(given) != 1:
            yield Problem(
                "InvalidSpec",
                f"exactly one of backend, service and refusal is needed, given: {given or 'none'}",
                f"spec.rules[{i}].target",
            )
        for where, backend in _backends(rule):
            if backend not in around.backends:
                yield Problem(
                    "BackendNotFound",
                    f"InferenceBackend {backend!r} does not exist in this namespace; create it "
                    "or correct the name",
                    f"spec.rules[{i}].{where}",
                )


def _backends(rule: Rule) -> Iterator[tuple[str, str]]:
    """Every backend that the rule may send requests to, with the field that says so."""
    if rule.target.backend is not None:
        yield "target.backend", rule.target.backend
    if rule.rollout is not None and rule.rollout.candidate.backend is not None:
        yield "rollout.candidate.backend", rule.rollout.candidate.backend
    for j, fallback in enumerate(rule.fallbacks):
        yield f"fallbacks[{j}].backend", fallback.backend


def _scopes(spec: RoutePolicySpec, around: Surroundings) -> Iterator[Problem]:
    for i, rule in enumerate(spec.rules):
        named = [("cacheScope", rule.cache_scope)]
        if rule.rollout is not None:
            named.append(("rollout.candidate.cacheScope", rule.rollout.candidate.cache_scope))
        for where, scope in named:
            if scope is not None and scope not in around.scopes:
                yield Problem(
                    "CacheScopeNotFound",
                    f"CacheScope {scope!r} does not exist in this namespace; create it or correct the name",
                    f"spec.rules[{i}].{where}",
                )


def _matches(spec: RoutePolicySpec, around: Surroundings) -> Iterator[Problem]:
    for i, rule in enumerate(spec.rules):
        size = rule.match.input_bytes
        if size is not None and size.max is not None and size.max <= size.min:
            yield Problem(
                "InvalidSpec",
                f"max {size.max} must be more than min {size.min}",
                f"spec.rules[{i}].match.inputBytes",
            )
        for tenant in rule.match.tenants:
            if tenant not in around.tenants:
                yield Problem(
                    "TenantNotFound",
                    f"Tenant {tenant!r} does not exist; create it or correct the name",
                    f"spec.rules[{i}].match.tenants",
                )


def _rollouts(spec: RoutePolicySpec, around: Surroundings) -> Iterator[Problem]:
    for i, rule in enumerate(spec.rules):
        yield from rollout_problems(i, rule, around)


def _sampling(spec: RoutePolicySpec, around: Surroundings) -> Iterator[Problem]:
    for i, rule in enumerate(spec.rules):
        given = [("sampling", rule.sampling)]
        if rule.rollout is not None and rule.rollout.candidate.sampling is not None:
            given.append(("rollout.candidate.sampling", rule.rollout.candidate.sampling))
        for where, sampling in given:
            if sampling.temperature is not None and float(sampling.temperature) > 2:
                yield Problem(
                    "InvalidSpec",
                    f"{sampling.temperature} is more than 2",
                    f"spec.rules[{i}].{where}.temperature",
                )
            if sampling.top_p is not None and not 0 < float(sampling.top_p) <= 1:
                yield Problem(
                    "InvalidSpec",
                    f"{sampling.top_p} must be more than 0 and at most 1",
                    f"spec.rules[{i}].{where}.topP",
                )


def _contracts(spec: RoutePolicySpec, around: Surroundings) -> Iterator[Problem]:
    for i, rule in enumerate(spec.rules):
        seen: set[str] = set()
        for j, check in enumerate(rule.contract.checks):
            at = f"spec.rules[{i}].contract.checks[{j}]"
            if check.name in seen:
                yield Problem("InvalidSpec", f"check name {check.name!r} is used twice", f"{at}.name")
            seen.add(check.name)
            yield from _check(check, at)
        streaming = rule.contract.streaming
        if streaming is not Streaming.IMMEDIATE and not rule.contract.can_fail:
            yield Problem(
                "InvalidSpec",
                f"{streaming.value} needs a check of severity Hard to pass",
                f"spec.rules[{i}].contract.streaming",
            )


def _check(check: Check, at: str) -> Iterator[Problem]:
    kinds = ("json_schema", "must_match", "must_not_match", "verifier")
    if sum(getattr(check, kind) is not None for kind in kinds) != 1:
        told = "exactly one of jsonSchema, mustMatch, mustNotMatch and verifier is needed"
        yield Problem("InvalidSpec", told, at)
    if check.json_schema is not None:
        yield from _schema(check.json_schema, f"{at}.jsonSchema")
    if check.verifier is not None:
        yield from _verifier(check.verifier, f"{at}.verifier")
    for where, pattern in (("mustMatch", check.must_match), ("mustNotMatch", check.must_not_match)):
        if pattern is not None:
            error = pattern_error(pattern)
            if error:
                yield Problem(
                    "InvalidPattern", f"{pattern!r} is not an RE2 pattern: {error}", f"{at}.{where}"
                )


def _verifier(verifier: Verifier, at: str) -> Iterator[Problem]:
    bundle = verifier.ca_bundle
    if (verifier.token_secret or bundle) and not verifier.url.startswith("https://"):
        told = (
            "must be https where tokenSecret or caBundle is given: over http anybody on the way can read it"
        )
        yield Problem("InvalidSpec", told, f"{at}.url")
    if bundle is not None and (bundle.config_map is None) == (bundle.secret is None):
        yield Problem("InvalidSpec", "exactly one of configMap and secret is needed", f"{at}.caBundle")


def pattern_error(pattern: str) -> str:
    """Why RE2 refuses ``pattern``; empty where it does not."""
    options = re2.Options()
    options.max_mem = _MAX_PATTERN_MEMORY
    options.log_errors = False
    try:
        re2.compile(pattern, options)
    except re2.error as error:
        told = error.args[0] if error.args else error
        return told.decode(errors="replace") if isinstance(told, bytes) else str(told)
    return ""


def _schema(schema: dict[str, object], at: str) -> Iterator[Problem]:
    if _deeper_than(_MAX_SCHEMA_DEPTH, schema):
        yield Problem("InvalidSchema", f"nested more than {_MAX_SCHEMA_DEPTH} levels deep", at)
        return
    text = json.dumps(schema)
    told = ""
    if len(text) > _MAX_SCHEMA_BYTES:
        told = f"larger than {_MAX_SCHEMA_BYTES} bytes"
    elif metaschema.num_parts(text) > metaschema.MAX_PARTS:
        told = f"more than {metaschema.MAX_PARTS} objects and booleans in it"
    elif wrong := metaschema.wrong(text):
        where = ".".join(map(str, wrong.at))
        told = f"not a JSON schema (2020-12): {where + ': ' if where else ''}{wrong.message}"
    if told:
        yield Problem("InvalidSchema", told, at)
        return
    for ref in _references(schema):
        if not ref.startswith("#"):
            yield Problem("InvalidSchema", f"$ref {ref!r} points outside the schema; nothing is fetched", at)


def _deeper_than(depth: int, node: object) -> bool:
    """Level by level, since what is nested without end would exhaust whatever recurses into it."""
    level = [node]
    for _ in range(depth):
        groups = [n.values() if isinstance(n, dict) else n for n in level if isinstance(n, dict | list)]
        level = [child for group in groups for child in group]
        if not level:
            return False
    return True


def _references(node: object) -> Iterator[str]:
    if isinstance(node, dict):
        for key, value in node.items():
            if key == "$ref" and isinstance(value, str):
                yield value
            yield from _references(value)
    elif isinstance(node, list):
        for item in node:
            yield from _references(item)


def _fitness(spec: RoutePolicySpec, around: Surroundings) -> Iterator[Problem]:
    for i, rule in enumerate(spec.rules):
        claimable = {
            t
            for name, tasks in around.tenants.items()
            if not rule.match.tenants or name in rule.match.tenants
            for t in tasks
        }
        for where, backend in _backends(rule):
            fitness = around.backends.get(backend)
            told = (
                complaint(rule.match, [r.match for r in spec.rules[:i]], fitness, claimable)
                if fitness
                else ""
            )
            if told:
                yield Problem(
                    "UnfitBackend",
                    f"backend {backend!r} is not fit for what this rule takes: {told}",
                    f"spec.rules[{i}].{where}",
                )


_CHECKS: tuple[Callable[[RoutePolicySpec, Surroundings], Iterator[Problem]], ...] = (
    _model,
    _names,
    _targets,
    _scopes,
    _matches,
    _rollouts,
    _sampling,
    _contracts,
    _fitness,
)
