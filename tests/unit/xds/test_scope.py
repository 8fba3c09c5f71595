"""Whose requests a candidate gets: exclusions and steps for some tenants or tasks, with a real Envoy."""

from __future__ import annotations

import asyncio
import itertools
from collections import Counter
from dataclasses import replace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice_operator.xds.messages import RTDS
from sluice_operator.xds.runtime import build_runtime
from sluice_operator.xds.scopes import parts
from sluice_operator.xds.state import Arm, GatewayState, Policy, Rule, Scope

STABLE, CANDIDATE, OLD = (
    Arm("ns/stable", "c-stable"),
    Arm("ns/candidate", "c-candidate"),
    Arm("ns/third", "c-old"),
)
CANARY = Rule("all", STABLE, candidate=CANDIDATE, attempt="a1", weight=100, retries=0)
CALLERS = [
    ("key-acme", "kyc"),
    ("key-acme", "chat"),
    ("key-acme", ""),
    ("key-small", "chat"),
    ("key-small", ""),
]
envoy = [pytest.mark.envoy, pytest.mark.asyncio(loop_scope="session")]


def marked(test: Any) -> Any:
    for mark in envoy:
        test = mark(test)
    return test


async def ask(world: Any) -> dict[tuple[str, str], tuple[str, str, str]]:
    """Who answers each caller: pod, arm and attempt."""
    found = {}
    for key, task in CALLERS:
        for pod in world.pods.values():
            pod.requests.clear()
        answer = await world.chat(key=key, headers={"sluice-task": task} if task else {})
        assert answer.status == 200, answer.text
        [(pod, told)] = [
            (name, h) for name in world.pods for h in world.seen(name) if "x-sluice-mirror" not in h
        ]
        assert told["x-sluice-rule"] == "all"
        found[key, task] = (pod, told["x-sluice-arm"], told["x-sluice-attempt"])
    return found


def served(*without: tuple[str, str]) -> dict[tuple[str, str], tuple[str, str, str]]:
    return {
        caller: ("stable", "stable", "") if caller in without else ("candidate", "candidate", "a1")
        for caller in CALLERS
    }


SCOPES = {
    "task": (Scope(excluded=(("kyc", ""),)), served(("key-acme", "kyc"))),
    "tenant": (Scope(excluded=(("", "small"),)), served(("key-small", "chat"), ("key-small", ""))),
    "both": (Scope(excluded=(("chat", "small"),)), served(("key-small", "chat"))),
    "several": (
        Scope(excluded=(("", "small"), ("chat", "acme"), ("kyc", "acme"))),
        served(*(c for c in CALLERS if c != ("key-acme", ""))),
    ),
    "step for a tenant": (Scope(tenants=("small",)), served(*CALLERS[:3])),
    "step for a task": (Scope(tasks=("chat",)), served(*(c for c in CALLERS if c[1] != "chat"))),
    "step for a tenant without a task": (
        Scope(tenants=("small",), excluded=(("chat", ""),)),
        served(*(c for c in CALLERS if c != ("key-small", ""))),
    ),
}


@marked
@pytest.mark.parametrize("case", SCOPES)
async def test_who_gets_the_candidate(world: Any, case: str) -> None:
    scope, expected = SCOPES[case]
    await world.push(world.state(replace(CANARY, scope=scope)))
    assert await ask(world) == expected


@marked
async def test_what_is_excluded_is_not_mirrored_either(world: Any, eventually: Any) -> None:
    rule = replace(
        CANARY, weight=0, shadow_percent=100, pair_percent=100, scope=Scope(excluded=(("kyc", ""),))
    )
    await world.push(world.state(rule))
    for key, task in CALLERS:
        assert (await world.chat(key=key, headers={"sluice-task": task} if task else {})).status == 200
    await eventually(lambda: len(world.seen("candidate")) == 8)
    assert "kyc" not in {h.get("x-sluice-task") for h in world.seen("candidate")}
    assert len([h for h in world.seen("stable") if h.get("x-sluice-task") == "kyc"]) == 1


@marked
async def test_records_of_all_parts_have_the_rules_own_name(world: Any, eventually: Any) -> None:
    rule = replace(CANARY, scope=Scope(tenants=("acme",), excluded=(("kyc", ""),)))
    await world.push(world.state(rule))
    await ask(world)
    records = await eventually(
        lambda: len(r := [r for r in world.records if r.final and r.kind == "request"]) == 5 and r
    )
    assert {(r.policy, r.rule) for r in records} == {("ns/policy", "all")}
    assert Counter((r.arm, r.attempt, r.cluster) for r in records) == {
        ("stable", "", "ns/stable"): 3,
        ("candidate", "a1", "ns/candidate"): 2,
    }


@marked
async def test_a_rollback_of_the_whole_is_one_push_of_weights_whatever_the_parts(world: Any) -> None:
    rule = replace(CANARY, scope=Scope(tenants=("acme",), excluded=(("kyc", ""),)))
    await world.push(world.state(rule))
    result = await world.server.push(world.state(replace(rule, weight=0)))
    assert result.changed == {RTDS}
    assert (await world.server.wait_in_force(60)).ok
    assert {pod for pod, _, _ in (await ask(world)).values()} == {"stable"}


@marked
async def test_an_exclusion_comes_and_goes_without_a_dip_for_the_rest(world: Any) -> None:
    await world.push(world.state(CANARY))
    stop = asyncio.Event()
    pods: set[int] = set()

    async def traffic() -> None:
        while not stop.is_set():
            pods.add((await world.chat(headers={"sluice-task": "chat"})).json["pod"])

    tasks = [asyncio.create_task(traffic()) for _ in range(4)]
    without = replace(CANARY, scope=Scope(excluded=(("kyc", ""),)))
    for _ in range(5):
        for rule, task in ((without, "stable"), (CANARY, "candidate")):
            await world.push(world.state(rule))
            answer = await world.chat(headers={"sluice-task": "kyc"})
            assert answer.json == {"pod": world.pods[task].port}, "in force once it is acknowledged"
    stop.set()
    await asyncio.gather(*tasks)
    assert pods == {world.pods["candidate"].port}


@marked
async def test_a_step_that_narrows_and_grows_lets_nobody_else_in_meanwhile(world: Any) -> None:
    before = replace(CANARY, weight=1)
    await world.push(world.state(before))
    stop = asyncio.Event()
    at_candidate: list[int] = []

    async def traffic(worker: int) -> None:
        for i in itertools.count():
            if stop.is_set():
                return
            answer = await world.chat(headers={"sluice-conversation": f"{worker}/{i}"})
            at_candidate.append(int(answer.json == {"pod": world.pods["candidate"].port}))

    tasks = [asyncio.create_task(traffic(i)) for i in range(4)]
    for _ in range(5):
        await world.push(world.state(replace(CANARY, weight=100, scope=Scope(tenants=("small",)))))
        await world.push(world.state(before))
    stop.set()
    await asyncio.gather(*tasks)
    assert sum(at_candidate) <= 2 + 0.05 * len(at_candidate), "one percent, never all"


@marked
async def test_a_promoted_candidate_leaves_what_is_excluded_to_the_arm_before_it(world: Any) -> None:
    rule = Rule("all", CANDIDATE, attempt="a1", aside=OLD, scope=Scope(excluded=(("kyc", ""),)))
    await world.push(world.state(rule))
    found = await ask(world)
    assert found.pop(("key-acme", "kyc")) == ("third", "stable", "")
    assert set(found.values()) == {("candidate", "stable", "a1")}


@marked
async def test_a_conversation_keeps_its_arm_when_others_are_excluded(world: Any) -> None:
    async def mine() -> set[str]:
        for pod in world.pods.values():
            pod.requests.clear()
        await world.many(200)
        return {h["x-sluice-conversation"] for h in world.seen("candidate")}

    half = replace(CANARY, weight=50)
    await world.push(world.state(half))
    before = await mine()
    assert 60 <= len(before) <= 140
    await world.push(world.state(replace(half, scope=Scope(excluded=(("kyc", ""),)))))
    assert await mine() == before


def state(rule: Rule) -> GatewayState:
    return GatewayState(policies=(Policy("ns/p", "m", (rule,)),))


def shares(desired: Rule, in_force: Rule, leaving: bool = False) -> list[float]:
    """What routes of ``in_force`` give to the candidate: its weight in percent, then mirror shares."""
    layer = dict(build_runtime(state(desired), state(in_force), leaving).layer)
    weight = next(v for k, v in layer.items() if k.endswith("ns/candidate"))
    return [weight / 100, *(v for k, v in sorted(layer.items()) if ".weight." not in k)]


def test_routes_that_still_let_through_what_is_excluded_get_nothing() -> None:
    old = replace(CANARY, weight=40, shadow_percent=30, pair_percent=2)
    new = replace(old, scope=Scope(excluded=(("kyc", ""),)))
    assert shares(new, old) == [0], "they stay: the newest version was refused"
    assert shares(new, old, leaving=True) == [40, 30, 2], "they are about to go"
    assert shares(replace(new, weight=10), old, leaving=True) == [10, 30, 2]
    assert shares(replace(new, weight=90), old, leaving=True) == [40, 30, 2], "no more than they had"
    assert shares(old, new) == [40, 30, 2], "narrower than it need be"
    wide = replace(old, scope=Scope(tenants=("acme", "small")))
    assert shares(replace(old, scope=Scope(tenants=("acme",))), wide) == [0]
    assert shares(replace(old, attempt="a2"), old, leaving=True) == [0]


NAMES = ("", "a", "b", "c")
names = st.lists(st.sampled_from(NAMES[1:]), unique=True, max_size=2).map(tuple)
scopes = st.builds(
    Scope,
    tasks=names,
    tenants=names,
    excluded=st.lists(
        st.tuples(st.sampled_from(NAMES), st.sampled_from(NAMES)).filter(any), unique=True, max_size=4
    ).map(tuple),
)


def takes(rule: Rule, task: str, tenant: str) -> bool:
    return (not rule.tasks or task in rule.tasks) and (not rule.tenants or tenant in rule.tenants)


def allows(scope: Scope, task: str, tenant: str) -> bool:
    return (
        (not scope.tasks or task in scope.tasks)
        and (not scope.tenants or tenant in scope.tenants)
        and not any(a in ("", task) and b in ("", tenant) for a, b in scope.excluded)
    )


@given(scopes, names, names)
def test_parts_take_what_the_rule_takes_and_the_first_that_matches_is_right(
    scope: Scope, tasks: tuple[str, ...], tenants: tuple[str, ...]
) -> None:
    rule = replace(CANARY, scope=scope, tasks=tasks, tenants=tenants, review=None)
    found = parts(rule)
    assert {part.name for part in found} == {"all"}
    for task, tenant in itertools.product(NAMES, NAMES[1:]):
        first = next((part for part in found if takes(part, task, tenant)), None)
        assert (first is not None) == takes(rule, task, tenant)
        if first is not None:
            assert (first.candidate is not None) == allows(scope, task, tenant)
            assert first.attempt == ("a1" if first.candidate else "")


@given(scopes, scopes)
def test_within_never_says_yes_wrongly(one: Scope, other: Scope) -> None:
    if one.within(other):
        for task, tenant in itertools.product(NAMES, NAMES[1:]):
            assert allows(other, task, tenant) or not allows(one, task, tenant)
    assert one.within(one)
