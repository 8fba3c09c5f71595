"""What the ledger says of an arm's parameters, each with where it is from, and of what it was judged by.

Invariant: nothing of a request's or an answer's text, and nothing that a Secret holds.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from pydantic import BaseModel

from ..api.backend import EngineSettings, InferenceBackend, KvCacheDtype, Quantization
from ..api.cachescope import CacheScopeSpec
from ..api.guards import Gain, Guard, GuardMode, Query
from ..api.rollout import Rollout
from ..api.routepolicy import Check, Rule
from ..api.rulestatus import RuleStatus
from ..api.tuning import Switch
from ..gates.battery import gain_names
from .arms import Arm


def parameters(
    rule: Rule,
    arm: Arm,
    backend: InferenceBackend | None,
    *,
    candidate: bool,
    scopes: Mapping[str, CacheScopeSpec],
    switches: Iterable[Switch] = (),
) -> dict[str, Any]:
    """Everything that makes the arm answer as it does, by section; ``from`` names the object and field."""
    found = _of_backend(backend) if backend is not None else {}
    own = f"rule {rule.name}"
    change = rule.rollout.candidate if candidate and rule.rollout is not None else None

    def origin(changed: object, field: str) -> str:
        return f"{own} rollout.candidate.{field}" if changed is not None else f"{own} {field}"

    found["features"] = _section(origin(change and change.features, "features"), _plain(arm.features))
    found["sampling"] = _section(origin(change and change.sampling, "sampling"), _plain(arm.sampling))
    scope = scopes.get(arm.cache_scope or "")
    found["cacheScope"] = _section(
        origin(change and change.cache_scope, "cacheScope"),
        {"name": arm.cache_scope or "", **(_plain(scope) if scope is not None else {})},
    )
    found["route"] = _section(
        own,
        {
            "match": _plain(rule.match),
            "timeouts": _plain(rule.timeouts),
            "retries": _plain(rule.retries),
            "circuitBreaker": _plain(rule.circuit_breaker),
            "fallbacks": [one.backend for one in rule.fallbacks],
            "switches": [_plain(one) for one in switches],
        },
    )
    return found


def _activations(engine: EngineSettings) -> str:
    return "Int8" if engine.quantization is Quantization.W8A8 else engine.dtype.value


def _kv_cache(engine: EngineSettings) -> str:
    return engine.dtype.value if engine.kv_cache_dtype is KvCacheDtype.AUTO else engine.kv_cache_dtype.value


def _of_backend(backend: InferenceBackend) -> dict[str, Any]:
    spec, at = backend.spec, f"InferenceBackend {backend.metadata.name}"
    found = {
        "model": _section(f"{at} spec.model", _plain(spec.model)),
        "engine": _section(f"{at} spec.engine", _plain(spec.engine)),
        "precision": _section(
            f"{at} spec.engine, spec.card",
            {
                "weights": spec.engine.quantization.value,
                "activations": _activations(spec.engine),
                "kvCache": _kv_cache(spec.engine),
                "calibration": spec.card.quantization,
            },
        ),
        "image": _section(
            f"{at} spec.image, status.image",
            {
                "image": spec.image or backend.status.image,
                "args": list(spec.args),
            },
        ),
        "hardware": _section(
            f"{at} spec.resources, spec.accelerator, spec.scheduling",
            {
                "resources": _plain(spec.resources),
                "accelerator": _plain(spec.accelerator) if spec.accelerator is not None else {},
                "scheduling": _plain(spec.scheduling),
                "replicas": spec.replicas,
            },
        ),
        "fitness": _section(f"{at} spec.fitness", _plain(spec.fitness)),
        "card": _section(f"{at} spec.card, spec.owner", {**_plain(spec.card), "owner": spec.owner}),
    }
    if spec.cost is not None:
        found["cost"] = _section(f"{at} spec.cost", _plain(spec.cost))
    if backend.status.capacity is not None:
        found["capacity"] = _section(f"{at} status.capacity", _plain(backend.status.capacity))
    return found


def _section(origin: str, values: dict[str, Any]) -> dict[str, Any]:
    return {"from": origin, "values": values}


def _plain(model: BaseModel) -> dict[str, Any]:
    return model.model_dump(mode="json", by_alias=True, exclude_none=True)


def judged_by(rollout: Rollout) -> list[str]:
    """Guards and queries, each in words."""
    return [*(_guard(one) for one in rollout.guards), *(_query(one) for one in rollout.queries)]


_MODES = {
    GuardMode.HARD: "one such request rolls back",
    GuardMode.GUARD: "statistics decide",
    GuardMode.WATCH: "recorded only",
}


def _guard(guard: Guard) -> str:
    at = "" if guard.metric.is_rate else f" at {', '.join(f'p{p}' for p in guard.percentiles)}"
    told = f"{guard.metric.value}{at}: at most {guard.max_increase_percent} % above stable"
    if guard.ceiling is not None:
        where = "" if guard.metric.is_rate else f" at p{guard.ceiling.percentile}"
        told += f", and at most {guard.ceiling.value}{where}"
    return f"{told}{_for(guard.tasks)}; {_MODES[guard.mode]}"


def _query(query: Query) -> str:
    limits = [f"at most {query.max}"] if query.max is not None else []
    if query.max_increase_percent is not None:
        limits.append(f"at most {query.max_increase_percent} % above stable")
    rule = f"{query.failures} in a row decide" if query.mode is GuardMode.GUARD else _MODES[query.mode]
    return f"query {query.name}: {' and '.join(limits)}, every {query.interval_seconds} s; {rule}"


def _for(tasks: Iterable[str]) -> str:
    named = ", ".join(tasks)
    return f", for {named}" if named else ""


def checked_by(checks: Iterable[Check]) -> list[str]:
    """Checks of the contract, each in words."""
    return [f"{one.name}: {_check(one)} ({one.severity.value})" for one in checks]


def _check(check: Check) -> str:
    if check.json_schema is not None:
        return "answers are JSON of its schema"
    if check.must_match is not None:
        return f"answers match {check.must_match}"
    if check.verifier is not None:
        return f"answers pass {check.verifier.url}"
    return f"answers do not match {check.must_not_match}"


def hoped_for(rule: Rule, status: RuleStatus) -> list[str]:
    """Expected gains, each in words, with whether they were shown."""
    shown = {one.name for one in status.gains if one.shown}
    gains = rule.rollout.gains if rule.rollout is not None else []
    return [
        f"{_gain(gain)}: {'shown' if name in shown else 'not shown'}"
        for name, gain in zip(gain_names(rule), gains, strict=True)
    ]


def _gain(gain: Gain) -> str:
    at = "" if gain.metric.is_rate else f" at p{gain.percentile}"
    return f"{gain.metric.value}{at} at least {gain.min_decrease_percent} % below stable{_for(gain.tasks)}"
