"""Weights and caps of tenants as pods are told of them."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from jsonschema import Draft202012Validator
from pydantic import ValidationError

from sluice_operator.api.common import TokenCaps
from sluice_operator.api.tenant import Tenant, TenantSpec
from sluice_operator.plan.limits import limit_set, tenant_limits

SCHEMA = json.loads((Path(__file__).parents[3] / "docs/contracts/limits.schema.json").read_text())


def tenant(name: str, namespace: str = "ns", created: str = "1", **spec: Any) -> Tenant:
    metadata = {"name": name, "namespace": namespace, "creationTimestamp": created}
    return Tenant.model_validate({"metadata": metadata, "spec": spec})


def test_what_pods_are_told_is_as_the_contract_says() -> None:
    limits = {
        "maxRunning": 2,
        "maxInFlight": 4,
        "maxInputTokens": 100,
        "maxOutputTokens": 50,
        "maxContextTokens": 120,
        "maxSeconds": 60,
    }
    told = tenant_limits([tenant("acme", weight=3, limits=limits), tenant("plain"), tenant("b", weight=2)])
    assert told == {"acme": {"weight": 3, **limits}, "b": {"weight": 2}}
    made = limit_set(TokenCaps(max_input_tokens=9, max_output_tokens=8), told)
    Draft202012Validator(SCHEMA).validate(made)
    named = SCHEMA["properties"]["tenants"]["additionalProperties"]["properties"]
    assert set(named) == set(told["acme"]), "nothing that the contract names is left out"
    assert set(SCHEMA["properties"]["backend"]["properties"]) == set(made["backend"])


def test_the_version_is_the_digest_of_the_rest() -> None:
    caps = TokenCaps()
    one = limit_set(caps, tenant_limits([tenant("a", weight=2), tenant("b", weight=3)]))
    same = limit_set(caps, tenant_limits([tenant("b", weight=3), tenant("plain"), tenant("a", weight=2)]))
    assert one == same
    others = [
        limit_set(caps, tenant_limits([tenant("a", weight=2)])),
        limit_set(caps, tenant_limits([tenant("a", weight=3), tenant("b", weight=3)])),
        limit_set(
            TokenCaps(max_input_tokens=1), tenant_limits([tenant("a", weight=2), tenant("b", weight=3)])
        ),
    ]
    assert len({made["version"] for made in (one, *others)}) == 4


def test_of_two_tenants_with_one_name_the_older_has_the_say() -> None:
    younger = tenant("acme", "elsewhere", created="2026-02-01T00:00:00Z", weight=1000)
    older = tenant("acme", created="2026-01-01T00:00:00Z", weight=2)
    assert tenant_limits([younger, older]) == {"acme": {"weight": 2}}
    # Also where the older one leaves everything as it is.
    assert tenant_limits([younger, tenant("acme", created="2026-01-01T00:00:00Z")]) == {}


@pytest.mark.parametrize(
    "spec",
    [
        {"weight": 0},
        {"weight": 1001},
        {"weight": 1.5},
        {"limits": {"maxRunning": 0}},
        {"limits": {"more": 1}},
    ],
)
def test_what_is_no_limit_is_refused(spec: dict[str, Any]) -> None:
    with pytest.raises(ValidationError):
        TenantSpec.model_validate(spec)
