"""The examples pass what the operator asks of them beyond the schema, each beside the others."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest
import yaml

from sluice_operator import api
from sluice_operator.plan.surroundings import Surroundings
from sluice_operator.plan.validate import policy_problems
from sluice_operator.plan.validate_backend import backend_problems
from unit.docs.pages import ROOT, fences

FILES = sorted((ROOT / "examples").rglob("*.yaml"))


def read(path: Path, kind: str) -> list[Any]:
    found = (one for one in yaml.safe_load_all(path.read_text()) if one["kind"] == kind)
    return [parsed(one) for one in found]


def parsed(manifest: dict[str, Any]) -> Any:
    metadata = manifest["metadata"] | {"namespace": "demo"}
    return getattr(api, manifest["kind"]).model_validate({"metadata": metadata, "spec": manifest["spec"]})


def everything(kind: str) -> dict[str, Any]:
    return {one.metadata.name: one for path in FILES for one in read(path, kind)}


@cache
def around() -> Surroundings:
    return Surroundings(
        backends={name: one.spec.fitness for name, one in everything("InferenceBackend").items()},
        scopes=frozenset(everything("CacheScope")),
        suites=frozenset(everything("EvalSuite")),
        tenants={name: tuple(one.spec.tasks) for name, one in everything("Tenant").items()},
    )


@pytest.mark.parametrize("path", FILES, ids=lambda path: path.stem)
def test_it_is_accepted(path: Path) -> None:
    for policy in read(path, "RoutePolicy"):
        assert policy_problems(policy.spec, around()) == ()
    for backend in read(path, "InferenceBackend"):
        assert backend_problems(backend) == ()


def test_the_policy_on_the_first_page_is_accepted() -> None:
    blocks = [block for language, block in fences(ROOT / "README.md") if language == "yaml"]
    policy = parsed(yaml.safe_load(blocks[0]))
    here = around()
    tenants = {**here.tenants, "staff": ("chat",)}
    told = policy_problems(policy.spec, Surroundings(here.backends, here.scopes, here.suites, tenants))
    assert told == ()
