"""CacheScopes and Tenants: an edit is in force everywhere before a status says so, and harms no request."""

from __future__ import annotations

import asyncio
import base64
import os
import signal
from typing import Any

import aiohttp
import pytest

from integration.world import PATIENCE_S, Load, World, condition, policy_manifest, until
from sluice_operator.kube.client import POLICY, SCOPE, TENANT
from sluice_operator.plan.access import OFFERED_TYPE

pytestmark = pytest.mark.apiserver


def scope(epoch: int) -> dict[str, Any]:
    return {
        "apiVersion": "sluice.dev/v1alpha1",
        "kind": "CacheScope",
        "metadata": {"name": "shared"},
        "spec": {"isolation": "Tenant", "epoch": epoch},
    }


def tenant(name: str, **spec: Any) -> dict[str, Any]:
    return {
        "apiVersion": "sluice.dev/v1alpha1",
        "kind": "Tenant",
        "metadata": {"name": name},
        "spec": spec,
    }


async def secret(world: World, name: str, value: str, kind: str = "Opaque") -> None:
    data = {"key": base64.b64encode(value.encode()).decode()}
    meta = {"name": name, "namespace": world.namespace}
    await world.kube.apply(
        {"apiVersion": "v1", "kind": "Secret", "type": kind, "metadata": meta, "data": data}
    )


async def test_a_new_epoch_reaches_the_pods_without_a_failed_request(world: World) -> None:
    await world.apply(scope(1))
    await world.serve("a")
    await world.play_pod("a")
    await world.apply(policy_manifest("m", "a", cacheScope="shared"))
    await world.wait_condition(POLICY, "m", "Ready")
    async with Load(world, "m", rate=30) as load:
        for epoch in range(2, 7):
            await world.apply(scope(epoch))
            await world.wait_condition(SCOPE, "shared", "Ready")
            await asyncio.sleep(0.2)
        assert len(load.statuses) > 10
        assert not load.failures, load.failures[:3]


async def test_a_scope_is_ready_only_when_the_pods_hold_it(world: World) -> None:
    await world.apply(scope(1))
    pod = await world.serve("a")
    await world.apply(policy_manifest("m", "a", cacheScope="shared"))
    await world.wait_condition(POLICY, "m", "Ready")
    await world.wait_condition(SCOPE, "shared", "Ready")
    os.kill(pod.process.pid, signal.SIGSTOP)
    try:
        await world.apply(scope(2))
        seen = set()

        async def told() -> bool:
            seen.add(condition(await world.get(SCOPE, "shared"), "Ready").get("status"))
            return "False" in seen

        await until("the scope is not ready", told)
        for _ in range(60):
            await told()
            await asyncio.sleep(0.03)
        assert seen <= {None, "False"}, seen
    finally:
        os.kill(pod.process.pid, signal.SIGCONT)
    await world.wait_condition(SCOPE, "shared", "Ready")


async def test_a_tenant_with_its_secret_is_never_told_that_it_lacks_it(world: World) -> None:
    await secret(world, "fresh-key", "fresh-key-value")
    await world.apply(tenant("fresh", apiKeys=[{"name": "fresh-key"}]))
    seen: set[str] = set()

    async def ready() -> bool:
        obj = await world.get(TENANT, "fresh")
        seen.update(c["reason"] for c in (obj.get("status") or {}).get("conditions") or [])
        return bool(condition(obj, "Ready").get("status") == "True")

    await until("ready", ready)
    assert "SecretNotFound" not in seen


async def test_a_policy_says_what_its_verifier_lacks_until_it_is_there(world: World) -> None:
    await world.serve("a")
    verifier = {"url": "https://facts.invalid/v1", "tokenSecret": {"name": "facts"}}
    await world.apply(
        policy_manifest("m", "a", contract={"checks": [{"name": "facts", "verifier": verifier}]})
    )
    told = await world.wait_condition(POLICY, "m", "Stalled")
    assert told["reason"] == "SecretNotFound"
    assert "spec.rules[0].contract.checks[0].verifier.tokenSecret" in told["message"]
    await secret(world, "facts", "token-of-facts", OFFERED_TYPE)
    await world.wait_condition(POLICY, "m", "Ready")
    assert "token-of-facts" not in world.log()


async def test_keys_that_the_gateway_cannot_take_are_told_and_others_go_on(world: World) -> None:
    await world.serve("a")
    await world.apply(policy_manifest("m", "a"))
    await world.wait_condition(POLICY, "m", "Ready")
    # Looks like a token, so it would never be tried as a key.
    await secret(world, "odd-key", "eyJhbGciOiJub25lIn0.eyJzdWIiOiJ4In0.c2ln")
    await world.apply(tenant("odd", apiKeys=[{"name": "odd-key"}]))
    told = await world.wait_condition(TENANT, "odd", "Stalled")
    assert told["reason"] == "RefusedByGateway"
    assert "JSON Web Token" in told["message"]
    await secret(world, "jwks", "no key set")
    await world.apply(tenant("token", jwt={"issuer": "https://i.example", "jwksSecret": {"name": "jwks"}}))
    told = await world.wait_condition(TENANT, "token", "Stalled")
    assert told["reason"] == "InvalidJwks"
    assert "spec.jwt.jwksSecret" in told["message"]
    async with aiohttp.ClientSession() as http:
        assert (await world.chat(http, "m"))[0] == 200
    await secret(world, "odd-key", "a-plain-key")
    await world.apply(tenant("odd", apiKeys=[{"name": "odd-key"}]))
    await world.wait_condition(TENANT, "odd", "Ready")
    assert "a-plain-key" not in world.log()
    assert "eyJhbGciOiJub25lIn0" not in world.log()


async def test_what_a_deleted_tenant_has_asked_is_cut(world: World) -> None:
    # Without a cut the stream would last for longer than anybody waits here.
    await world.serve("a", text="stable " * 500, tpot=1.0)
    await world.apply(policy_manifest("m", "a"))
    await world.wait_condition(POLICY, "m", "Ready")
    begun: asyncio.Queue[str] = asyncio.Queue()
    async with asyncio.TaskGroup() as group:
        reading = group.create_task(world.stream("m", begun))
        await asyncio.wait_for(begun.get(), PATIENCE_S)
        await world.kube.delete(TENANT, world.namespace, "demo")
    assert '"code":"withdrawn"' in reading.result()
