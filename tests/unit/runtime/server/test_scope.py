"""Who shares cached prefixes: derived from the gateway's headers alone, and never by accident."""

from __future__ import annotations

from typing import Any

import pytest
from starlette.datastructures import Headers

from sluice_runtime.caller import cache_scope, caller_from
from sluice_runtime.podconfig import Scope
from unit.runtime.server.support import Pod, chat_body, pod_config, route_headers


def scope(isolation: str = "Tenant", **changes: Any) -> Scope:
    return Scope.model_validate(
        {"name": "s", "isolation": isolation, "epoch": 1, "versions": {"a": "1", "b": "2"}, **changes}
    )


def key(of: Scope, **headers: str) -> str:
    return cache_scope(of, caller_from(Headers(route_headers(**headers))))


@pytest.mark.parametrize(
    ("isolation", "separated_by"),
    [
        ("User", {"user", "tenant", "domain"}),
        ("Tenant", {"tenant", "domain"}),
        ("SecurityDomain", {"domain"}),
        ("Public", set()),
    ],
)
def test_what_separates_callers(isolation: str, separated_by: set[str]) -> None:
    base = key(scope(isolation))
    assert key(scope(isolation)) == base
    for name in ("user", "tenant", "domain", "conversation", "task"):
        assert (key(scope(isolation), **{name: "other"}) != base) == (name in separated_by), name


@pytest.mark.parametrize("isolation", ["User", "Tenant", "SecurityDomain"])
def test_unknown_identity_shares_nothing(isolation: str) -> None:
    missing = {"User": "user", "Tenant": "tenant", "SecurityDomain": "domain"}[isolation]
    assert key(scope(isolation), **{missing: ""}) != key(scope(isolation), **{missing: ""})


def test_every_part_of_the_scope_counts() -> None:
    base = key(scope())
    others = [
        scope(name="t"),
        scope(epoch=2),
        scope("SecurityDomain"),
        scope(versions={"a": "1"}),
        scope(versions={"a": "1", "b": "3"}),
        scope(versions={"a": "1", "c": "2"}),
        scope(versions={}),
    ]
    keys = {base, *(key(other) for other in others)}
    assert len(keys) == 1 + len(others)
    assert key(scope(versions={"b": "2", "a": "1"})) == base


def test_fields_can_not_run_into_each_other() -> None:
    assert key(scope(), tenant="ab", domain="c") != key(scope(), tenant="b", domain="ca")
    assert key(scope(), tenant="a\x01b") != key(scope(), tenant="a", domain="\x01b")
    assert key(scope("Tenant", versions={"a": "b"})) != key(scope("Tenant", versions={"ab": ""}))


async def test_the_body_has_no_say(pod: Pod) -> None:
    pod.engine.auto = ["x"]
    await pod.hold(pod_config())
    await pod.post(chat_body())
    await pod.post(chat_body(user="mallory", metadata={"tenant": "other"}, prompt_cache_key="other"))
    await pod.post(chat_body(), headers=route_headers(tenant="other"))
    scopes = [(await pod.engine.next()).request.scope for _ in range(3)]
    assert scopes[0] == scopes[1] != scopes[2]
    assert (await pod.post(chat_body(cache_salt="x"))).status_code == 400
