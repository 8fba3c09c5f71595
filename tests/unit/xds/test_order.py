"""Order, refusals and truth: what is in force, and that one bad object holds up nothing but itself."""

from __future__ import annotations

import asyncio
import statistics
from dataclasses import replace
from typing import Any

import pytest

from sluice_operator.xds.local import LocalEnvoy
from sluice_operator.xds.messages import CDS, EDS, RTDS
from sluice_operator.xds.server import AdsServer
from sluice_operator.xds.state import Arm, Cluster, Jwt, Policy, Rule, Scope, Tenant

pytestmark = [pytest.mark.envoy, pytest.mark.asyncio(loop_scope="session")]

CANARY = Rule("all", Arm("ns/stable", "c"), candidate=Arm("ns/candidate", "c2"), attempt="a1", weight=100)
# What validation does not look for and Envoy refuses, and with it the whole route configuration.
POISONED = Rule("poisoned", refusal=(403, "x" * 2_000_000))
POISON = Policy("ns/poison", "poison", (POISONED,))


def policy(name: str, cluster: str) -> Policy:
    return Policy(f"ns/{name}", name, (Rule("all", Arm(f"ns/{cluster}", "c")),))


async def test_a_refused_policy_holds_up_nothing_else(world: Any) -> None:
    base = world.state(CANARY)
    await world.push(base)
    assert (await world.chat()).json == {"pod": world.pods["candidate"].port}
    more = tuple(policy(f"p{i}", "third") for i in range(7))
    state = replace(
        world.state(replace(CANARY, weight=0)),
        policies=(*world.state(replace(CANARY, weight=0)).policies, *more[:3], POISON, *more[3:]),
    )
    result = await world.server.push(state)
    assert RTDS in result.changed
    assert (await world.server.wait_in_force(60, weights_only=True)).ok
    assert (await world.chat()).json == {"pod": world.pods["stable"].port}
    result = await world.server.wait_in_force(60)
    assert result.ok
    assert list(result.quarantined) == ["policy/ns/poison"]
    assert [name for name, _ in world.quarantines] == ["policy/ns/poison"]
    for one in more:
        assert (await world.chat(one.model)).json == {"pod": world.pods["third"].port}
    assert (await world.chat("poison")).code == "model_not_found"


async def test_the_last_good_version_of_a_refused_policy_stays(world: Any) -> None:
    good = world.state(replace(CANARY, weight=100))
    await world.push(good)
    bad = replace(good, policies=(replace(good.policies[0], rules=(replace(CANARY, weight=0), POISONED)),))
    await world.push(bad)
    assert world.server.quarantined.keys() == {"policy/ns/policy"}
    assert (await world.chat()).json == {"pod": world.pods["stable"].port}
    await world.push(world.state(Rule("all", Arm("ns/third", "c"))))
    assert not world.server.quarantined
    assert (await world.chat()).json == {"pod": world.pods["third"].port}


async def test_a_refused_policy_never_keeps_an_excluded_task_at_the_candidate(world: Any) -> None:
    good = world.state(replace(CANARY, weight=100))
    await world.push(good)
    excluded = replace(CANARY, scope=Scope(excluded=(("kyc", ""),)))
    bad = replace(good, policies=(replace(good.policies[0], rules=(excluded, POISONED)),))
    await world.push(bad)
    assert world.server.quarantined.keys() == {"policy/ns/policy"}
    for task in ("kyc", "chat"):
        answer = await world.chat(headers={"sluice-task": task})
        assert answer.json == {"pod": world.pods["stable"].port}, "what can't be told apart goes back whole"
    await world.push(world.state(excluded))
    assert (await world.chat(headers={"sluice-task": "chat"})).json == {"pod": world.pods["candidate"].port}
    assert (await world.chat(headers={"sluice-task": "kyc"})).json == {"pod": world.pods["stable"].port}


async def test_routes_that_nobody_replaces_lose_what_they_should_no_longer_have(
    open_world: Any, monkeypatch: pytest.MonkeyPatch
) -> None:
    def shares() -> list[float]:
        layer = world.server._target.resources[RTDS]["sluice"].message.layer
        return sorted(v for key, v in layer.items() if key.endswith("ns/candidate"))

    async with open_world(envoy=False) as world:
        await world.server.push(world.state(CANARY))
        world.server._admission.accept(world.server._target.state)
        world.server._moving_since = None
        await world.server.push(world.state(replace(CANARY, scope=Scope(excluded=(("kyc", ""),)))))
        assert shares() == [10_000, 10_000], "old routes and new ones"
        monkeypatch.setattr("sluice_operator.xds.server.PATIENCE_S", 0)
        world.server._retarget()
        assert shares() == [0, 10_000]


async def test_a_bad_key_set_holds_up_nothing_else(world: Any) -> None:
    await world.push(world.state())
    bad = Tenant("jwt", "d", jwt=Jwt("https://issuer", (), "no key set"))
    state = world.state(Rule("all", Arm("ns/third", "c")))
    await world.push(replace(state, tenants=(*state.tenants, bad)))
    assert world.server.quarantined.keys() == {"tenant/jwt"}
    assert (await world.chat()).json == {"pod": world.pods["third"].port}


async def test_a_shared_key_stays_with_its_first_owner(world: Any) -> None:
    state = world.state()
    await world.push(state)
    thief = Tenant("aaa", "d", ("key-acme",))
    await world.push(replace(state, tenants=(thief, *state.tenants)))
    assert world.server.quarantined.keys() == {"tenant/aaa"}
    await world.chat()
    assert world.seen("stable")[0]["x-sluice-tenant"] == "acme"
    await world.push(replace(state, tenants=(thief,)))
    assert not world.server.quarantined
    await world.chat()
    assert world.seen("stable")[0]["x-sluice-tenant"] == "aaa"


async def test_no_request_fails_while_everything_moves(world: Any) -> None:
    await world.push(world.state())
    stop = asyncio.Event()
    failed: list[Any] = []

    async def traffic() -> None:
        while not stop.is_set():
            answer = await world.chat()
            if answer.status != 200:
                failed.append(answer)

    tasks = [asyncio.create_task(traffic()) for _ in range(4)]
    for i in range(12):
        name = ("stable", "candidate", "third")[i % 3]
        new = Cluster(f"ns/new{i}", (world.pods[name].endpoint,), max_requests=100 + i)
        state = world.state(
            replace(
                CANARY,
                stable=Arm(new.name, f"c{i}"),
                candidate=Arm(f"ns/{name}", "c"),
                attempt=f"a{i}",
                weight=50,
            ),
            clusters=(*world.clusters(max_requests=100 + i), new),
        )
        await world.push(state)
    stop.set()
    await asyncio.gather(*tasks)
    assert not failed


async def test_only_what_changed_is_pushed(world: Any) -> None:
    await world.push(world.state(CANARY))
    assert not (await world.server.push(world.state(CANARY))).changed
    result = await world.server.push(world.state(CANARY, clusters=world.clusters()[:2]))
    assert result.changed == {CDS, EDS}


async def test_acknowledged_clusters_tell_the_truth(world: Any, open_world: Any) -> None:
    await world.push(
        world.state(
            clusters=(*world.clusters(), Cluster("ns/empty"), Cluster("ns/svc", dns=("localhost", 80)))
        )
    )
    acked = world.server.acked_clusters()
    assert acked["ns/stable"] == {world.pods["stable"].endpoint}
    assert acked["ns/empty"] == frozenset()
    assert "ns/svc" in acked
    async with open_world(envoy=False) as nobody:
        await nobody.server.push(nobody.state())
        assert nobody.server.acked_clusters() == {}
        assert not (await nobody.server.wait_in_force(0.01)).ok


async def test_two_gateways_and_one_that_comes_back(open_world: Any, eventually: Any) -> None:
    async with open_world() as world:
        ads_port = world.ads_port
        async with LocalEnvoy(ads_port, node_id="second", arguments=("--ignore-unknown-dynamic-fields",)):
            await eventually(lambda: world.server.num_gateways == 2)
            await eventually(lambda: "ns/stable" in world.server.acked_clusters())
        await eventually(lambda: world.server.num_gateways == 1)
        async with LocalEnvoy(ads_port, node_id="second"):
            await eventually(lambda: world.server.num_gateways == 2)
            assert (await world.chat()).status == 200


async def test_push_latency_is_printed(world: Any) -> None:
    import time

    times: dict[str, list[float]] = {"weights": [], "routes": []}
    for i in range(20):
        for kind, rule in (
            ("routes", replace(CANARY, attempt=f"a{i}", weight=0)),
            ("weights", replace(CANARY, attempt=f"a{i}", weight=50)),
        ):
            start = time.perf_counter()
            await world.push(world.state(rule))
            times[kind].append(time.perf_counter() - start)
    for kind, values in times.items():
        print(
            f"{kind}: in force after {statistics.median(values) * 1e3:.1f} ms (median), "
            f"{max(values) * 1e3:.1f} ms (worst of 20)"
        )


async def test_an_operator_that_comes_back_finds_traffic_as_it_was(open_world: Any) -> None:
    async with open_world() as world:
        await world.push(world.state(CANARY))
        await world.server.stop()
        assert (await world.chat()).json == {"pod": world.pods["candidate"].port}
        world.server = AdsServer(
            host="127.0.0.1", port=world.ads_port, gateway_address=("127.0.0.1", world.port)
        )
        await world.server.start()
        result = await world.server.push(world.state(CANARY))
        assert result.num_gateways == 0
        assert (await world.server.wait_in_force(60)).ok
        assert (await world.chat()).json == {"pod": world.pods["candidate"].port}
        await world.push(world.state(replace(CANARY, weight=0)))
        assert (await world.chat()).json == {"pod": world.pods["stable"].port}
        await world.server.stop()
