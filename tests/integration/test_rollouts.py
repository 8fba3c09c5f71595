"""Rollouts through a real gateway: progress, rollback, edits, restarts. Pods are the runtime's stand-in."""

from __future__ import annotations

import asyncio
import json
import signal
from collections.abc import AsyncIterator

import aiohttp
import grpc
import pytest
from envoy.service.discovery.v3 import ads_pb2_grpc, discovery_pb2

from integration.world import (
    PATIENCE_S,
    Load,
    World,
    backend_manifest,
    condition,
    policy_manifest,
    rollout,
    until,
)
from sluice_operator.kube.client import BACKEND, CONTROLLER_REVISION, EVENT, POLICY
from sluice_operator.xds.local import LocalEnvoy
from sluice_operator.xds.messages import CDS

pytestmark = pytest.mark.apiserver
PARIS = {"checks": [{"name": "capital", "mustMatch": "Paris"}]}


async def in_phase(world: World, policy: str, *phases: str, seconds: float = PATIENCE_S) -> dict:  # type: ignore[type-arg]
    async def probe() -> dict | None:  # type: ignore[type-arg]
        rule = await world.rule(policy)
        return rule if rule.get("phase") in phases else None

    return await until(f"{policy} in {phases}", probe, seconds=seconds)


async def test_a_sound_candidate_is_promoted_and_git_can_follow(world: World) -> None:
    await world.serve("a")
    await world.serve("b")
    await world.apply(policy_manifest("m", "a"))
    await world.wait_condition(POLICY, "m", "Ready")
    async with Load(world, "m") as load:
        spec = policy_manifest(
            "m", "a", rollout=rollout("b", 25, 50, shadow={"percent": 50, "minSeconds": 1, "minSamples": 3})
        )
        applied = await world.apply(spec)
        rule = await in_phase(world, "m", "Promoted")
        assert [line["phase"] for line in rule["history"]][-4:] == ["Shadowing", "Step", "Step", "Promoted"]
        assert rule["weight"] == 100
        obj = await world.get(POLICY, "m")
        assert obj["spec"] == applied["spec"], "nothing is ever written to spec"
        assert condition(obj, "Ready")["status"] == "True"
        await world.apply(policy_manifest("m", "b"))
        await in_phase(world, "m", "Stable")
        sent = len(load.statuses)

        async def more() -> bool:
            return len(load.statuses) > sent + 20

        await until("traffic after Git has followed", more)
        assert not load.failures, load.failures[:3]


async def test_a_broken_contract_goes_back_at_once_and_stays_back(world: World) -> None:
    await world.serve("a")
    await world.serve("b", text="Rome.")
    await world.apply(policy_manifest("m", "a", contract=PARIS))
    await world.wait_condition(POLICY, "m", "Ready")
    async with Load(world, "m") as load:
        spec = policy_manifest("m", "a", contract=PARIS, rollout=rollout("b", 25, seconds=60, samples=500))
        await world.apply(spec)
        rule = await in_phase(world, "m", "RolledBack")
        assert rule["weight"] == 0
        assert rule["history"][-1]["reason"] == "HardGateBroken"
        assert "capital" in rule["history"][-1]["message"]
        obj = await world.get(POLICY, "m")
        assert condition(obj, "RolledBack")["status"] == "True"
        assert condition(obj, "Ready")["status"] == "True"
        spec["spec"]["rules"][0]["rollout"]["guards"] = [{"metric": "TTFT", "maxIncreasePercent": 1000}]
        await world.apply(spec)

        async def seen() -> bool:
            told = await world.get(POLICY, "m")
            return bool(told["status"]["observedGeneration"] == told["metadata"]["generation"])

        await until("the edit is seen", seen)
        await load.drained()
        bad, sent = len(load.failures), len(load.statuses)
        # The first, and what chance sends beside it until the gateway knows: five a second.
        assert bad <= 10, load.failures

        async def more() -> bool:
            return len(load.statuses) > sent + 40

        await until("traffic after the edit", more)
        assert (await world.rule("m"))["phase"] == "RolledBack"
        assert len(load.failures) == bad
        events = await world.kube.list_all(EVENT, world.namespace)
        assert any(e["involvedObject"]["kind"] == "RoutePolicy" and "capital" in e["message"] for e in events)


async def test_a_leak_cuts_the_candidates_streams_and_no_others(world: World) -> None:
    private = {"checks": [{"name": "private", "mustNotMatch": "secret", "leak": True}]}
    await world.serve("a", text="stable " * 20, tpot=0.1)
    # Without a cut its streams would last for longer than anybody waits here.
    answers = [{"match": "tell", "text": "a secret"}]
    await world.serve("b", text="candidate " * 500, tpot=1.0, answers=answers)
    await world.apply(policy_manifest("m", "a", contract=private))
    await world.wait_condition(POLICY, "m", "Ready")
    spec = policy_manifest("m", "a", contract=private, rollout=rollout("b", 50, seconds=600))
    await world.apply(spec)

    async def in_force() -> bool:
        return (await world.rule("m")).get("weight") == 50

    await until("the step", in_force)
    begun: asyncio.Queue[str] = asyncio.Queue()
    async with asyncio.TaskGroup() as group:
        reading = [group.create_task(world.stream("m", begun)) for _ in range(16)]
        for _ in reading:
            await asyncio.wait_for(begun.get(), PATIENCE_S)
        async with aiohttp.ClientSession() as http:

            async def leaked() -> bool:
                return (await world.chat(http, "m", "tell"))[0] == 502

            await until("a leak", leaked)
    texts = [task.result() for task in reading]
    cut, peaceful = ([text for text in texts if f'"{first}"' in text] for first in ("cand", "stab"))
    assert cut, texts
    assert peaceful
    assert len(cut) + len(peaceful) == len(texts)
    assert all('"code":"withdrawn"' in text for text in cut), cut
    assert all(text.rstrip().endswith("[DONE]") for text in peaceful), peaceful
    rule = await in_phase(world, "m", "RolledBack")
    assert rule["leaked"]


async def test_pods_of_another_version_serve_and_no_rollout_goes_on_with_them(world: World) -> None:
    """As after an upgrade of the chart alone: the backend says so, and so does what the rollout waits for."""
    pod = await world.serve("a", schema="0123456789abcdef")
    told = await world.wait_condition(BACKEND, "a", "EvidenceUnreadable")
    assert pod.name in told["message"]
    await world.serve("b")
    await world.apply(policy_manifest("m", "a", rollout=rollout("b", 25)))

    async def held() -> dict | None:  # type: ignore[type-arg]
        rule = await world.rule("m")
        return rule if rule.get("held") == "EvidenceUnreadable" else None

    rule = await until("the hold", held)
    assert rule["weight"] == 0
    assert "pods of a tell evidence of another version" in rule["heldMessage"]
    await world.wait_condition(POLICY, "m", "Ready")
    async with aiohttp.ClientSession() as http:
        assert (await world.chat(http, "m"))[0] == 200

    async def event() -> bool:
        events = await world.kube.list_all(EVENT, world.namespace)
        return any(e["reason"] == "EvidenceUnreadable" for e in events)

    await until("the event", event)


async def test_a_bad_edit_leaves_the_last_accepted_in_force_also_over_a_restart(world: World) -> None:
    await world.serve("a")
    await world.apply(policy_manifest("m", "a"))
    await world.wait_condition(POLICY, "m", "Ready")
    await world.apply(policy_manifest("m", "none-such"))
    told = await world.wait_condition(POLICY, "m", "Stalled")
    assert told["reason"] == "BackendNotFound"
    assert "spec.rules[0].target.backend" in told["message"]
    async with aiohttp.ClientSession() as http:
        assert (await world.chat(http, "m"))[0] == 200
        await world.kill_operator()
        assert (await world.chat(http, "m"))[0] == 200
        await world.start_operator()
        await world.wait_condition(BACKEND, "a", "Ready")
        assert (await world.chat(http, "m"))[0] == 200
        status = (await world.get(POLICY, "m"))["status"]
        assert status["acceptedGeneration"] < status["observedGeneration"]
        assert await world.kube.list_all(CONTROLLER_REVISION, world.namespace)
        # What was missing appears: the edit is taken without another one.
        await world.serve("none-such")
        await world.wait_condition(POLICY, "m", "Ready")


async def test_an_abort_is_in_force_whatever_else_is_wrong_with_the_spec(world: World) -> None:
    """Another rule was broken in the evening; who aborts at night is heard all the same, also by the next
    operator."""
    await world.serve("a")
    await world.serve("b")
    spec = rollout("b", 25, 50, seconds=300)
    await world.apply(policy_manifest("m", "a", rollout=spec))

    async def stepped() -> bool:
        return bool((await world.rule("m")).get("weight") == 25)

    await until("the first step", stepped)
    broken = policy_manifest("m", "a", rollout={**spec, "abort": True})
    broken["spec"]["rules"].append({"name": "other", "target": {"backend": "none-such"}})
    await world.apply(broken)

    assert (await in_phase(world, "m", "Aborted"))["weight"] == 0
    told = await world.wait_condition(POLICY, "m", "Stalled")
    assert told["reason"] == "BackendNotFound"
    ready = condition(await world.get(POLICY, "m"), "Ready")
    assert (ready["status"], ready["reason"]) == ("False", "NotAccepted")
    assert "with abort of rule all" in ready["message"]
    await world.kill_operator()
    await world.start_operator()
    await world.wait_condition(BACKEND, "b", "Ready")
    assert (await in_phase(world, "m", "Aborted"))["weight"] == 0


async def test_a_restart_in_the_middle_goes_on_where_it_was(world: World) -> None:
    await world.serve("a")
    await world.serve("b")
    await world.apply(policy_manifest("m", "a"))
    await world.wait_condition(POLICY, "m", "Ready")
    async with Load(world, "m") as load:
        await world.apply(policy_manifest("m", "a", rollout=rollout("b", 25, 50, seconds=300)))

        async def sampled() -> dict | None:  # type: ignore[type-arg]
            rule = await world.rule("m")
            return rule if rule.get("numSamples", 0) > 3 else None

        before = await until("samples", sampled)
        await world.kill_operator()
        await world.start_operator()

        async def further() -> dict | None:  # type: ignore[type-arg]
            rule = await world.rule("m")
            return rule if rule.get("numSamples", 0) > before["numSamples"] else None

        after = await until("it goes on", further)
        assert (after["attempt"], after["step"], after["weight"]) == (before["attempt"], before["step"], 25)
        assert after["history"] == before["history"]
        assert not load.failures, load.failures[:3]


async def test_an_edit_wins_in_the_middle_and_two_at_once_end_in_the_last(world: World) -> None:
    await world.serve("a")
    b = await world.serve("b")
    await world.apply(policy_manifest("m", "a"))
    await world.wait_condition(POLICY, "m", "Ready")
    async with Load(world, "m") as load:
        await world.apply(policy_manifest("m", "a", rollout=rollout("b", 50, seconds=300)))
        rule = await in_phase(world, "m", "Step")
        await world.apply(policy_manifest("m", "a", rollout=rollout("b", 20, seconds=300)))
        await world.apply(policy_manifest("m", "a", rollout=rollout("b", 50, seconds=300, abort=True)))
        rule = await in_phase(world, "m", "Aborted")
        assert rule["weight"] == 0
        b.process.kill()
        sent = len(load.statuses)

        async def more() -> bool:
            return len(load.statuses) > sent + 30

        await until("traffic that the dead candidate does not see", more)
        assert not load.failures, load.failures[:3]


async def test_every_burst_of_edits_ends_in_the_last(world: World) -> None:
    """Edits that meet the operator's own writes of status: none may be taken for known because its version
    is."""

    async def told(text: str) -> bool:
        async with aiohttp.ClientSession() as http:
            _, body = await world.chat(http, "m")
            return text in str(body)

    for number in range(60):
        manifest = policy_manifest("m", "a")
        manifest["spec"]["rules"][0] = {"name": "all", "target": {"refusal": {"message": f"edit {number}."}}}
        await world.apply(manifest)
        if number == 0:
            await world.wait_condition(POLICY, "m", "Ready")
        await until(f"edit {number} in force", lambda n=number: told(f"edit {n}."), seconds=60)  # type: ignore[misc]


async def test_a_serving_backend_can_be_deleted_and_the_policy_says_so(world: World) -> None:
    await world.serve("a")
    await world.apply(policy_manifest("m", "a"))
    await world.wait_condition(POLICY, "m", "Ready")
    await world.kube.delete(BACKEND, world.namespace, "a")
    await until("deleted", lambda: world.gone(BACKEND, "a"))
    assert "a" in (await world.wait_condition(POLICY, "m", "Ready", "False"))["message"]


async def test_a_target_is_left_only_for_one_that_is_there(world: World) -> None:
    await world.serve("a")
    await world.apply(policy_manifest("m", "a"))
    await world.wait_condition(POLICY, "m", "Ready")
    async with Load(world, "m") as load:
        await world.apply(backend_manifest("c"))
        await world.apply(policy_manifest("m", "c"))
        told = await world.wait_condition(POLICY, "m", "Ready", "False")
        assert "no ready pod" in told["message"], told
        await world.serve("c")
        await world.wait_condition(POLICY, "m", "Ready")
        assert not load.failures, load.failures[:3]


async def test_a_gateway_that_comes_anew_gets_everything(bare: World) -> None:
    await bare.start_operator()
    async with LocalEnvoy(bare.ads_port):
        await bare.tenant()
        await bare.serve("a")
        await bare.apply(policy_manifest("m", "a"))
        await bare.wait_condition(POLICY, "m", "Ready")
    await bare.wait_condition(BACKEND, "a", "Ready", "False")
    async with LocalEnvoy(bare.ads_port):
        await bare.wait_condition(BACKEND, "a", "Ready")
        async with aiohttp.ClientSession() as http:

            async def answers() -> bool:
                try:
                    return (await bare.chat(http, "m"))[0] == 200
                except aiohttp.ClientError:
                    return False

            await until("an answer", answers)


async def test_the_operator_ends_in_peace_on_sigterm(world: World) -> None:
    await world.serve("a")
    assert await world.kill_operator(signal.SIGTERM) == 0
    assert "Traceback" not in world.log()
    assert "key-of-demo" not in world.log()


async def test_a_rollback_needs_no_api_server(world: World) -> None:
    """The gateway is told first; the status follows when it can."""
    await world.serve("a")
    b = await world.serve("b")
    await world.apply(policy_manifest("m", "a", contract=PARIS))
    await world.wait_condition(POLICY, "m", "Ready")
    async with Load(world, "m") as load:
        told = policy_manifest("m", "a", contract=PARIS, rollout=rollout("b", 50, seconds=300))
        await world.apply(told)
        await in_phase(world, "m", "Step")
        sent = len(load.statuses)

        async def more() -> bool:
            return len(load.statuses) > sent + 80

        await until("traffic at both arms", more)
        assert not load.failures
        with world.server_stopped():
            await world.script(b, text="Rome.")

            async def bad() -> bool:
                return bool(load.failures)

            await until("the first bad answer", bad)
            sent = len(load.statuses)
            await until("traffic, half of which would be the candidate's", more)
            # The first, and what chance sends beside it until the gateway knows: ten a second.
            assert len(load.failures) <= 12, load.failures
        assert (await in_phase(world, "m", "RolledBack"))["weight"] == 0


async def test_another_gateway_takes_nothing_from_what_is_ready(world: World) -> None:
    """A gateway that is rolled or scaled begins with nothing; conditions must not flap for it. This one is so
    slow that it never acknowledges anything."""
    await world.serve("a")
    await world.apply(policy_manifest("m", "a"))
    await world.wait_condition(POLICY, "m", "Ready")
    silent = asyncio.Event()

    async def requests() -> AsyncIterator[discovery_pb2.DiscoveryRequest]:
        yield discovery_pb2.DiscoveryRequest(type_url=CDS, node={"id": "slow"})
        await silent.wait()

    async with grpc.aio.insecure_channel(f"127.0.0.1:{world.ads_port}") as channel:
        stream = ads_pb2_grpc.AggregatedDiscoveryServiceStub(channel).StreamAggregatedResources(requests())
        await stream.read()
        seen = set()
        for _ in range(100):
            for kind, name in ((BACKEND, "a"), (POLICY, "m")):
                seen.add((name, condition(await world.get(kind, name), "Ready")["status"]))
            await asyncio.sleep(0.03)
        assert seen == {("a", "True"), ("m", "True")}
        stream.cancel()


async def test_a_schema_without_end_stalls_one_policy_and_nobody_else(world: World) -> None:
    """JSON of thousands of levels is legal for the API server, and ends most of what recurses into it."""
    await world.serve("a")
    schema: dict = {"type": "object"}  # type: ignore[type-arg]
    for _ in range(400):
        schema = {"not": schema}
    deep = policy_manifest("deep", "a", contract={"checks": [{"name": "c", "jsonSchema": schema}]})
    await world.apply(deep)
    told = await world.wait_condition(POLICY, "deep", "Stalled")
    assert told["reason"] == "InvalidSchema"
    assert "jsonSchema" in told["message"]
    # Deeper than this test's own client could send.
    end = 3000
    text = json.dumps({**deep, "metadata": {"name": "deeper", "namespace": world.namespace}})
    shallow = json.dumps(schema)
    assert shallow in text
    bottomless = '{"not":' * end + '{"type":"object"}' + "}" * end
    text = text.replace(shallow, bottomless).replace('"model": "deep"', '"model": "deeper"')
    world.server.kubectl("create", "-f", "-", stdin=text)
    await world.apply(policy_manifest("m", "a"))
    await world.wait_condition(POLICY, "m", "Ready")
    await world.kill_operator(signal.SIGTERM)
    await world.start_operator()
    await world.apply(policy_manifest("n", "a"))
    await world.wait_condition(POLICY, "n", "Ready")
    assert "Traceback" not in world.log()
