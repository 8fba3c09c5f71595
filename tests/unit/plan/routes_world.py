"""Policies, pods and plans for tests of routes."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

from sluice_operator.api import RoutePolicySpec, RuleStatus
from sluice_operator.api.backend import Fitness
from sluice_operator.plan.backend_status import PodState
from sluice_operator.plan.observed import PodView, StreamView
from sluice_operator.plan.routes import Accepted, BackendView, Inputs, Plan, plan

DIGEST = "sha256:1"
SCHEMA = json.loads((Path(__file__).parents[3] / "docs/contracts/podconfig.schema.json").read_text())
ALL = Fitness.model_validate({"dataClasses": ["Public", "Internal", "Confidential", "Restricted"]})
STABLE = ("ns/chat", "all", "stable")
CANDIDATE = ("ns/chat", "all", "candidate")


def pod(name: str, *versions: str, digest: str = DIGEST, **view: Any) -> PodState:
    base = {"ip": f"10.0.0.{sum(map(ord, name)) % 250}", "phase": "Running", "ready": True}
    return PodState(
        PodView(name, "ns", "x", **{**base, **view}), StreamView(True, digest, frozenset(versions))
    )


def policy(
    status: dict[str, Any] | None = None, created: str = "1", name: str = "chat", **rule: Any
) -> Accepted:
    spec = RoutePolicySpec.model_validate(
        {"model": "assistant", "rules": [{"name": "all", "target": {"backend": "a"}, **rule}]}
    )
    rules = {"all": RuleStatus.model_validate({"name": "all", **status})} if status else {}
    return Accepted("ns", name, created, spec, rules)


ROLLOUT = {"candidate": {"backend": "b"}, "steps": [{"weight": 10}]}


def inputs(*policies: Accepted, **pods: list[PodState]) -> Inputs:
    backends = {f"ns/{name}": BackendView(tuple(found), DIGEST, ALL) for name, found in pods.items()}
    return Inputs(policies=policies, backends=backends)


def settled(given: Inputs) -> tuple[Inputs, Plan]:
    """Pods hold all that they shall: what is true once nothing moves any more."""
    made = plan(given)
    backends = {
        name: replace(
            view,
            pods=tuple(
                replace(p, stream=replace(p.stream, versions=frozenset(made.configs[name])))
                for p in view.pods
            ),
        )
        for name, view in given.backends.items()
    }
    given = replace(given, backends=backends, before=made.arms)
    return given, plan(given)
