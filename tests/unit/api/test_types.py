"""The types read what the API server stores."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml
from pydantic import ValidationError

from sluice_operator.api import (
    CacheScope,
    EvalSuite,
    InferenceBackend,
    InferenceBackendSpec,
    RoutePolicy,
    RoutePolicySpec,
    Tenant,
)
from sluice_operator.api.guards import GuardMode, Metric

EXAMPLES = sorted((Path(__file__).parents[3] / "examples").rglob("*.yaml"))
KINDS: dict[str, Any] = {
    "InferenceBackend": InferenceBackend,
    "RoutePolicy": RoutePolicy,
    "CacheScope": CacheScope,
    "Tenant": Tenant,
    "EvalSuite": EvalSuite,
}


@pytest.mark.parametrize("path", EXAMPLES, ids=lambda path: path.stem)
def test_examples_are_read(path: Path) -> None:
    for manifest in yaml.safe_load_all(path.read_text()):
        if manifest["kind"] in KINDS:
            manifest["metadata"]["namespace"] = "demo"
            KINDS[manifest["kind"]].model_validate({k: manifest[k] for k in ("metadata", "spec")})


def test_defaults_of_a_rollout() -> None:
    spec = RoutePolicySpec.model_validate(
        {
            "model": "m",
            "rules": [
                {
                    "name": "r",
                    "target": {"backend": "a"},
                    "rollout": {"candidate": {"backend": "b"}, "steps": [{"weight": 5}]},
                }
            ],
        }
    )
    rollout = spec.rules[0].rollout
    assert rollout is not None
    asked_for = {Metric.TIME_TO_VERIFIED}
    assert [guard.metric for guard in rollout.guards] == [m for m in Metric if m not in asked_for]
    watched = {guard.metric for guard in rollout.guards if guard.mode is GuardMode.WATCH}
    assert watched == {
        Metric.REFUSAL_RATE, Metric.RETRY_RATE, Metric.COST_PER_SUCCESS, Metric.DISAGREEMENT_RATE,
    }  # fmt: skip
    assert rollout.watch.seconds == 7 * 86_400
    assert rollout.alpha == "0.01"


@pytest.mark.parametrize(("given", "read"), [(2, "2"), ("500m", "500m"), ("0.5", "0.5")])
def test_integers_are_quantities_too(given: object, read: str) -> None:
    spec = InferenceBackendSpec.model_validate(
        {"model": {"image": {"reference": "x"}}, "resources": {"limits": {"cpu": given}}}
    )
    assert spec.resources.limits.cpu == read


@pytest.mark.parametrize(
    ("resources", "field"),
    [
        ({"limits": {"cpu": True}}, "cpu"),
        ({"limits": {"memory": "2gb"}}, "memory"),
        ({"limits": {"memory": "500m"}}, "memory"),
        ({"limit": {}}, "limit"),
    ],
)
def test_what_is_wrong_is_refused_by_name(resources: object, field: str) -> None:
    with pytest.raises(ValidationError, match=field):
        InferenceBackendSpec.model_validate({"model": {"image": {"reference": "x"}}, "resources": resources})


def test_tolerations_stay_what_they_are() -> None:
    toleration = {"key": "gpu", "operator": "Exists", "effect": "NoSchedule", "tolerationSeconds": 60}
    spec = InferenceBackendSpec.model_validate(
        {"model": {"image": {"reference": "x"}}, "scheduling": {"tolerations": [toleration]}}
    )
    assert spec.model_dump(mode="json", by_alias=True)["scheduling"]["tolerations"] == [toleration]
