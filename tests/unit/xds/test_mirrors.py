"""Pairs and reviews: which requests are copied, to whom, and under which name. With a real Envoy."""

from __future__ import annotations

from collections import Counter, defaultdict
from dataclasses import replace
from typing import Any

import pytest

from sluice_operator.xds.messages import RTDS
from sluice_operator.xds.state import Arm, Review, Rule, Scope

pytestmark = [pytest.mark.envoy, pytest.mark.asyncio(loop_scope="session")]

SHADOW = Rule(
    "all",
    Arm("ns/stable", "c-stable"),
    candidate=Arm("ns/candidate", "c-candidate"),
    attempt="a1",
    shadow_percent=100,
    pair_percent=100,
)
Copies = dict[str, Counter[tuple[str, ...]]]


def copies(world: Any) -> Copies:
    """By request id: pod, kind of copy, arm, configuration and attempt of all that arrived."""
    found: Copies = defaultdict(Counter)
    for name in world.pods:
        for h in world.seen(name):
            kind = h.get("x-sluice-mirror", "")
            told = (h["x-sluice-arm"], h["x-sluice-config"], h["x-sluice-attempt"])
            found[h["x-request-id"]][name, kind, *told] += 1
    return found


LIVE = ("stable", "", "stable", "c-stable", "a1")
PLAIN = ("candidate", "1", "candidate", "c-candidate", "a1")
THEIRS = ("candidate", "pair", "candidate", "c-candidate", "a1")
OURS = ("stable", "pair", "stable", "c-stable", "a1")


async def test_a_pair_is_the_candidates_answer_and_two_of_stable(world: Any, eventually: Any) -> None:
    await world.push(world.state(SHADOW))
    await world.many(20)
    await eventually(lambda: sum(c.total() for c in copies(world).values()) == 100)
    assert list(copies(world).values()) == [Counter({LIVE: 1, PLAIN: 1, THEIRS: 1, OURS: 2})] * 20
    bodies = {body for pod in world.pods.values() for _, body in pod.requests}
    assert len(bodies) == 1
    assert all("shadow" not in h["host"] for name in world.pods for h in world.seen(name))


async def test_all_three_of_a_pair_are_of_the_same_requests(world: Any, eventually: Any) -> None:
    await world.push(world.state(replace(SHADOW, shadow_percent=60, pair_percent=30)))
    await world.many(400)

    def settled() -> Copies | None:
        found = copies(world)
        # "<=": the smaller share is part of the larger one.
        whole = all(c[THEIRS] * 2 == c[OURS] and c[THEIRS] <= c[PLAIN] for c in found.values())
        return found if whole else None

    found = await eventually(settled)
    assert len(found) == 400
    pairs = {request for request, c in found.items() if c[THEIRS]}
    shadows = {request for request, c in found.items() if c[PLAIN]}
    assert 70 <= len(pairs) <= 170, "binomial(400, 0.3): missed once in twenty million runs"
    assert 190 <= len(shadows) <= 290
    assert all(c[LIVE] == 1 for c in found.values())


async def test_the_share_of_pairs_is_a_push_of_weights(world: Any) -> None:
    await world.push(world.state(SHADOW))
    result = await world.server.push(world.state(replace(SHADOW, shadow_percent=0, pair_percent=0)))
    assert result.changed == {RTDS}
    assert (await world.server.wait_in_force(60)).ok
    for pod in world.pods.values():
        pod.requests.clear()
    await world.many(20)
    assert list(copies(world).values()) == [Counter({LIVE: 1})] * 20


async def test_records_tell_pairs_from_other_copies(world: Any, eventually: Any) -> None:
    await world.push(world.state(SHADOW))
    assert (await world.chat()).status == 200
    records = await eventually(
        lambda: len(r := [r for r in world.records if r.final and r.kind == "attempt"]) == 5 and r
    )
    assert not any(r.retried or r.interrupted for r in records)
    assert Counter((r.arm, r.mirror, r.pair) for r in records) == {
        ("stable", False, False): 1,
        ("candidate", True, False): 1,
        ("candidate", True, True): 1,
        ("stable", True, True): 2,
    }


async def test_pairs_end_with_the_operator(open_world: Any, eventually: Any) -> None:
    async with open_world(ttl_seconds=1) as world:
        await world.push(world.state(SHADOW))
        await world.server.stop()

        async def over() -> bool:
            for pod in world.pods.values():
                pod.requests.clear()
            await world.many(5)
            return all(c == Counter({LIVE: 1}) for c in copies(world).values())

        await eventually(over)


REVIEW = Review("review-1", Arm("ns/third", "c-stable"), Arm("ns/candidate", "c-stable"), 100)


@pytest.mark.parametrize("scope", [Scope(), Scope(excluded=(("", "acme"),)), Scope(tenants=("small",))])
async def test_a_review_copies_to_two_arms_of_the_past(world: Any, eventually: Any, scope: Scope) -> None:
    rule = replace(SHADOW, shadow_percent=0, pair_percent=0, scope=scope, review=REVIEW)
    await world.push(world.state(rule))
    await world.many(10)
    await eventually(lambda: sum(c.total() for c in copies(world).values()) == 30)
    attempt = "" if scope != Scope() else "a1"
    assert (
        list(copies(world).values())
        == [
            Counter(
                {
                    ("stable", "", "stable", "c-stable", attempt): 1,
                    ("third", "1", "stable", "c-stable", "review-1"): 1,
                    ("candidate", "1", "candidate", "c-stable", "review-1"): 1,
                }
            )
        ]
        * 10
    )


async def test_a_review_needs_no_rollout_and_its_share_is_a_push_of_weights(
    world: Any, eventually: Any
) -> None:
    rule = Rule("all", Arm("ns/stable", "c-stable"), review=replace(REVIEW, percent=30))
    await world.push(world.state(rule))
    await world.many(200)

    def same() -> set[str] | None:
        third, candidate = ({h["x-request-id"] for h in world.seen(pod)} for pod in ("third", "candidate"))
        return third if third == candidate else None

    third = await eventually(same)
    assert 25 <= len(third) <= 95, "binomial(200, 0.3): missed once in ten million runs"
    result = await world.server.push(world.state(replace(rule, review=replace(REVIEW, percent=0))))
    assert result.changed == {RTDS}
