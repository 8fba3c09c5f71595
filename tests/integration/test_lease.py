"""Operators that overlap: one alone decides and writes, and the other takes over when it goes."""

from __future__ import annotations

import asyncio
import json
import os
import signal
import time
from typing import Any

import pytest

from integration.world import PATIENCE_S, SYSTEM, Load, World, policy_manifest, rollout, until
from sluice_operator.kube.client import LEASE, POLICY
from sluice_operator.xds.local import LocalEnvoy, free_port

pytestmark = pytest.mark.apiserver


LEASE_S = 10
"""Where a test tells a Lease that was released from one that ran out: longer than it takes to end."""


async def holder(world: World) -> str:
    found = await world.kube.find(LEASE, SYSTEM, f"operator-{world.namespace}")
    return str((found or {}).get("spec", {}).get("holderIdentity") or "")


async def held_by(world: World, process: asyncio.subprocess.Process) -> None:
    async def probe() -> bool:
        return (await holder(world)).endswith(f"_{process.pid}")

    await until(f"the lease is held by {process.pid}", probe)


async def running(world: World) -> dict[str, Any]:
    """A rollout with some evidence."""
    await world.serve("a")
    await world.serve("b")
    await world.apply(policy_manifest("m", "a", rollout=rollout("b", 25, seconds=600)))
    await world.wait_condition(POLICY, "m", "Ready")
    return await further(world, 0)


async def further(world: World, num_samples: int) -> dict[str, Any]:
    async def probe() -> dict[str, Any] | None:
        rule = await world.rule("m")
        return rule if rule.get("numSamples", 0) > num_samples and rule["weight"] == 25 else None

    return await until("more samples", probe)


async def standby(world: World, **other: int | str) -> asyncio.subprocess.Process:
    """A second operator, which shares the first one's port for gateways, as a Service would."""
    port = free_port()
    process = await world.start_operator(wait=False, http_address=f"127.0.0.1:{port}", **other)

    async def up() -> bool:
        return await world.probe("healthz", port) == 200

    await until("the second is up", up)
    assert await world.probe("readyz", port) == 503
    return process


def lines(world: World, message: str) -> list[dict[str, Any]]:
    told = (json.loads(line) for line in world.log().splitlines() if line.startswith("{"))
    return [line for line in told if line["message"] == message]


async def test_only_the_holder_works_and_sigterm_hands_over(bare: World) -> None:
    world = bare
    first = await world.start_operator(lease_seconds=LEASE_S)
    async with LocalEnvoy(world.ads_port), Load(world, "m") as load:
        await world.tenant()
        rule = await running(world)
        load.failures.clear()  # before the policy was there
        second = await standby(world, lease_seconds=LEASE_S)
        await asyncio.sleep(LEASE_S + 1)  # longer than the lease lasts unrenewed
        await held_by(world, first)
        assert len(lines(world, "listening for gateways")) == 1
        began = time.monotonic()
        first.send_signal(signal.SIGTERM)
        await held_by(world, second)
        assert time.monotonic() - began < LEASE_S, "released, not run out"
        assert await asyncio.wait_for(first.wait(), PATIENCE_S) == 0
        after = await further(world, rule["numSamples"])
        assert (after["attempt"], after["history"]) == (rule["attempt"], rule["history"])
        assert not load.failures, load.failures[:3]
        await world.apply(policy_manifest("m", "a", rollout=rollout("b", 25, abort=True)))

        async def aborted() -> bool:
            return bool((await world.rule("m")).get("phase") == "Aborted")

        await until("the second decides", aborted)
    assert second.returncode is None
    assert "Traceback" not in world.log()


async def test_a_killed_holder_is_succeeded_within_seconds(world: World) -> None:
    first = world.operator
    assert first is not None
    async with Load(world, "m") as load:
        rule = await running(world)
        load.failures.clear()
        second = await standby(world)
        first.kill()
        await held_by(world, second)
        after = await further(world, rule["numSamples"])
        assert (after["attempt"], after["history"]) == (rule["attempt"], rule["history"])
        assert not load.failures, load.failures[:3]


async def test_a_holder_that_slept_ends_and_has_written_nothing(world: World) -> None:
    first = world.operator
    assert first is not None
    async with Load(world, "m"):
        await running(world)
        os.kill(first.pid, signal.SIGSTOP)
        # The ports are still bound by the sleeper, as those of another pod would not be.
        world.ads_port, old, world.feedback_port = free_port(), world.ads_port, free_port()
        second = await standby(world)
        world.ads_port = old
        await held_by(world, second)
        await world.apply(policy_manifest("m", "a", rollout=rollout("b", 25, abort=True)))

        async def aborted() -> bool:
            return bool((await world.rule("m")).get("phase") == "Aborted")

        await until("the second decides", aborted)
        await asyncio.sleep(1)
        before = await world.get(POLICY, "m")
        os.kill(first.pid, signal.SIGCONT)
        assert await asyncio.wait_for(first.wait(), PATIENCE_S) == 1
        after = await world.get(POLICY, "m")
        assert after["status"]["rules"][0]["phase"] == "Aborted"
        assert after["status"]["rules"][0]["history"] == before["status"]["rules"][0]["history"]
    assert second.returncode is None


async def test_a_waiting_operator_ends_in_peace(world: World) -> None:
    first = world.operator
    assert first is not None
    second = await standby(world)
    second.send_signal(signal.SIGTERM)
    assert await asyncio.wait_for(second.wait(), PATIENCE_S) == 0
    await held_by(world, first)
