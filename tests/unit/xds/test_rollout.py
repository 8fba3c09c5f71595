"""Weights, mirrors and what becomes of them when the operator is gone: with a real Envoy."""

from __future__ import annotations

from collections import Counter
from dataclasses import replace
from typing import Any

import pytest

from sluice_operator.xds.messages import RTDS
from sluice_operator.xds.state import Arm, Rule

pytestmark = [pytest.mark.envoy, pytest.mark.asyncio(loop_scope="session")]

CANARY = Rule(
    "all",
    Arm("ns/stable", "c-stable"),
    candidate=Arm("ns/candidate", "c-candidate"),
    attempt="a1",
    weight=0,
    retries=0,
)


async def arms(world: Any, count: int = 400) -> set[str]:
    """Conversations that the candidate answers."""
    for pod in world.pods.values():
        pod.requests.clear()
    answers = await world.many(count)
    assert Counter(a.status for a in answers) == {200: count}
    return {h["x-sluice-conversation"] for h in world.seen("candidate") if h.get("x-sluice-mirror") != "1"}


async def test_weights_are_kept_sticky_and_monotone(world: Any) -> None:
    await world.push(world.state(CANARY))
    assert await arms(world) == set()
    before: set[str] = set()
    for weight, low, high in ((10, 15, 70), (50, 150, 250), (90, 330, 390), (100, 400, 400)):
        result = await world.server.push(world.state(replace(CANARY, weight=weight)))
        assert result.changed == {RTDS}
        assert (await world.server.wait_in_force(60)).ok
        now = await arms(world)
        assert low <= len(now) <= high
        assert before <= now
        assert await arms(world) == now
        before = now
    await world.push(world.state(replace(CANARY, weight=10)))
    assert len(await arms(world)) <= 70


async def test_arms_are_told_apart(world: Any) -> None:
    await world.push(world.state(replace(CANARY, weight=50)))
    await arms(world, 40)
    for name, config in (("stable", "c-stable"), ("candidate", "c-candidate")):
        assert {
            (h["x-sluice-arm"], h["x-sluice-config"], h["x-sluice-attempt"]) for h in world.seen(name)
        } == {(name, config, "a1")}
        assert all("x-sluice-mirror" not in h for h in world.seen(name))


async def test_without_a_conversation_requests_are_spread(world: Any) -> None:
    await world.push(world.state(replace(CANARY, weight=50)))
    for _ in range(60):
        assert (await world.chat()).status == 200
    assert 10 <= len(world.seen("candidate")) <= 50


async def test_a_candidate_that_differs_only_in_features(world: Any) -> None:
    rule = replace(CANARY, candidate=Arm("ns/stable", "c-features"), weight=50)
    await world.push(world.state(rule))
    await world.many(100)
    seen = Counter((h["x-sluice-arm"], h["x-sluice-config"]) for h in world.seen("stable"))
    assert set(seen) == {("stable", "c-stable"), ("candidate", "c-features")}
    assert 20 <= seen["candidate", "c-features"] <= 80


async def test_mirrors_are_marked_and_counted(world: Any, eventually: Any) -> None:
    await world.push(world.state(replace(CANARY, shadow_percent=100)))
    assert await arms(world, 20) == set()
    await eventually(lambda: len(world.seen("candidate")) == 20)
    stable = {h["x-request-id"]: h for h in world.seen("stable")}
    for mirrored in world.seen("candidate"):
        original = stable[mirrored["x-request-id"]]
        assert mirrored["x-sluice-mirror"] == "1"
        assert (mirrored["x-sluice-arm"], mirrored["x-sluice-config"]) == ("candidate", "c-candidate")
        assert mirrored["x-sluice-attempt"] == "a1"
        assert "shadow" not in mirrored["host"]
        assert mirrored["x-sluice-credential"] == original["x-sluice-credential"]
        assert (original["x-sluice-arm"], "x-sluice-mirror" in original) == ("stable", False)
    assert world.pods["candidate"].requests[0][1] == world.pods["stable"].requests[0][1]

    result = await world.server.push(world.state(replace(CANARY, shadow_percent=30)))
    assert result.changed == {RTDS}
    assert (await world.server.wait_in_force(60)).ok
    await arms(world, 200)
    await eventually(lambda: 25 <= len(world.seen("candidate")) <= 95)


async def test_large_bodies_are_mirrored_whole(world: Any, eventually: Any) -> None:
    await world.push(world.state(replace(CANARY, shadow_percent=100)))
    body = '{"model": "m", "x": "' + "x" * 3_000_000 + '"}'
    assert (await world.chat(body=body)).status == 200
    await eventually(lambda: world.pods["candidate"].requests)
    assert len(world.pods["candidate"].requests[0][1]) == len(body)


async def test_a_gateway_without_operator_returns_to_stable(open_world: Any, eventually: Any) -> None:
    async with open_world(ttl_seconds=2) as world:
        await world.push(world.state(replace(CANARY, weight=100, shadow_percent=100)))
        assert (await world.chat()).json == {"pod": world.pods["candidate"].port}
        await world.server.stop()

        async def back() -> bool:
            return bool((await world.chat()).json == {"pod": world.pods["stable"].port})

        await eventually(back)
        world.pods["candidate"].requests.clear()
        await arms(world, 20)
        assert not world.seen("candidate")


async def test_a_watched_candidate_keeps_its_share_without_an_operator(
    open_world: Any, eventually: Any
) -> None:
    """The old arm may be too small for all by then; and a rollback takes the share away for good."""
    async with open_world(ttl_seconds=1) as world:
        await world.push(world.state(replace(CANARY, weight=100, alone=100)))
        layer = f"http://127.0.0.1:{world.envoy.admin_port}/runtime"

        async def expired() -> bool:
            async with world.http.get(layer) as response:
                return "sluice.weight" not in await response.text()

        async def held() -> bool:
            return not await expired()

        await eventually(held)
        await world.server.stop()
        await eventually(expired)
        assert (await world.chat()).json == {"pod": world.pods["candidate"].port}
    async with open_world(ttl_seconds=1) as world:
        await world.push(world.state(replace(CANARY, weight=100, alone=100)))
        await world.push(world.state(replace(CANARY, weight=0, alone=0)))
        await world.server.stop()
        layer = f"http://127.0.0.1:{world.envoy.admin_port}/runtime"
        await eventually(expired)
        assert (await world.chat()).json == {"pod": world.pods["stable"].port}


async def test_heartbeats_keep_weights_alive(open_world: Any, eventually: Any) -> None:
    import time

    # Three seconds, so that this process may stand still for two of them without losing its heartbeat.
    async with open_world(ttl_seconds=3) as world:
        await world.push(world.state(replace(CANARY, weight=100)))
        end = time.monotonic() + 7

        async def past() -> bool:
            assert (await world.chat()).json == {"pod": world.pods["candidate"].port}
            return time.monotonic() > end

        await eventually(past)
