"""Keys prove one tenant each, and no problem shows a key."""

from __future__ import annotations

from typing import Any

import pytest

from sluice_operator.api import Tenant
from sluice_operator.plan.tenants import resolve


def tenant(name: str, created: str, *secrets: str, namespace: str = "ns", **spec: Any) -> Tenant:
    return Tenant.model_validate(
        {
            "metadata": {"name": name, "namespace": namespace, "creationTimestamp": created},
            "spec": {"apiKeys": [{"name": s} for s in secrets], **spec},
        }
    )


def test_keys_are_read_and_the_older_tenant_keeps_a_shared_one() -> None:
    secrets = {("ns", "one"): {"key": "alpha-key\n"}, ("ns", "two"): {"key": "alpha-key"}}
    told, problems = resolve([tenant("young", "2", "two"), tenant("old", "1", "one")], secrets)
    assert {t.name: t.api_keys for t in told} == {"old": ("alpha-key",), "young": ()}
    [problem] = problems[("ns", "young")]
    assert (problem.reason, problem.field) == ("DuplicateApiKey", "spec.apiKeys[0]")
    assert "alpha-key" not in problem.text()
    assert "alpha-key" not in repr(told)


def test_missing_and_unfit_keys_are_named() -> None:
    told, problems = resolve([tenant("t", "1", "none", "bad")], {("ns", "bad"): {"key": "two words"}})
    assert [p.reason for p in problems[("ns", "t")]] == ["SecretNotFound", "InvalidApiKey"]
    assert told[0].api_keys == ()


def test_a_tenants_key_may_stand_in_two_secrets() -> None:
    secrets = {("ns", "one"): {"key": "k"}, ("ns", "two"): {"key": "k"}}
    told, problems = resolve([tenant("t", "1", "one", "two")], secrets)
    assert told[0].api_keys == ("k",)
    assert not problems[("ns", "t")]


def test_a_name_is_one_tenant_whatever_the_namespace() -> None:
    told, problems = resolve([tenant("t", "2", namespace="b"), tenant("t", "1", namespace="a")], {})
    assert len(told) == 1
    assert problems[("b", "t")][0].reason == "DuplicateTenant"


@pytest.mark.parametrize(
    "text", ["{", "[]", "{}", '{"keys": []}', '{"keys": ["x"]}', '{"keys": [{"kid": "a"}]}', "-----BEGIN"]
)
def test_what_is_no_key_set_is_named_and_not_pushed(text: str) -> None:
    """Envoy would take it, and then refuse each token: Ready would be a lie."""
    jwt = {"issuer": "https://issuer.example", "jwksSecret": {"name": "jwks"}}
    told, problems = resolve([tenant("t", "1", jwt=jwt)], {("ns", "jwks"): {"key": text}})
    [problem] = problems[("ns", "t")]
    assert (problem.reason, problem.field) == ("InvalidJwks", "spec.jwt.jwksSecret")
    assert "Secret 'jwks'" in problem.message
    assert told[0].jwt is None
    sound = '{"keys": [{"kty": "RSA", "n": "x", "e": "AQAB"}]}'
    told, problems = resolve([tenant("t", "1", jwt=jwt)], {("ns", "jwks"): {"key": sound}})
    assert told[0].jwt is not None
    assert not problems[("ns", "t")]


def test_one_kind_of_token_proves_one_tenant() -> None:
    """Which of two the gateway took would depend on their names."""
    secrets = {("ns", "jwks"): {"key": '{"keys": [{"kty": "RSA", "n": "x", "e": "AQAB"}]}'}}
    jwt = {"issuer": "https://i.example", "jwksSecret": {"name": "jwks"}, "claims": {"team": "a"}}
    told, problems = resolve([tenant("a-young", "2", jwt=jwt), tenant("old", "1", jwt=jwt)], secrets)
    assert [t.name for t in told if t.jwt is not None] == ["old"]
    [problem] = problems[("ns", "a-young")]
    assert (problem.reason, problem.field) == ("DuplicateIdentity", "spec.jwt.claims")
    other = tenant("b", "3", jwt={**jwt, "claims": {"team": "b"}})
    assert not resolve([other, tenant("old", "1", jwt=jwt)], secrets)[1][("ns", "b")]
