"""A step sends no more than what was tested to be safe, and waits for replicas. Figures by hand."""

from __future__ import annotations

import pytest

from sluice_operator.api.rollout import Step
from sluice_operator.api.rulestatus import ArmStatus, Phase
from sluice_operator.plan.capacity import (
    candidate_rate,
    in_flight,
    overload,
    replicas_for,
    rollback_cost,
    shortage,
)
from sluice_operator.plan.scope import Eligibility
from sluice_operator.plan.situation import Arms, World
from unit.plan.rollout_world import SHADOW, WATCH, FakeWorld, rollout, steps


@pytest.mark.parametrize(
    ("rate", "safe", "replicas"),
    [
        (10.0, 4.0, 3),  # 2.5
        (10.0, 2.5, 4),  # exactly
        (0.3, 0.1, 3),  # 0.3 / 0.1 is 2.9999999999999996 in binary
        (0.7, 0.1, 7),  # and 0.7 / 0.1 is 6.999999999999999
        (0.01, 4.0, 1),
    ],
)
def test_replicas(rate: float, safe: float, replicas: int) -> None:
    assert replicas_for(rate, safe) == replicas


def test_a_safe_throughput_of_nothing_is_a_mistake() -> None:
    with pytest.raises(ValueError, match="above 0"):
        replicas_for(1.0, 0.0)


def test_littles_law() -> None:
    """Little 1961: 10 arrivals a second that stay 1.5 s are 15 in the system."""
    assert in_flight(10.0, 1.5) == 15.0


def world(**room: object) -> World:
    return World(Arms(ArmStatus(backend="old"), None), True, True, True, **room)  # type: ignore[arg-type]


def test_advice() -> None:
    """20/s at 50 % are 10/s; two replicas take 2 × 4/s; three are needed; 10/s × 1.5 s are 15 in flight."""
    room = {"request_rate": 20.0, "safe_rate": 4.0, "ready_replicas": 2, "mean_seconds": 1.5}
    told = shortage(world(**room), 50, Eligibility())
    assert "10 requests/s" in told
    assert "safely take 8/s" in told
    assert "scale the candidate to 3" in told
    assert "15 requests are then in flight" in told
    assert shortage(world(**room), 40, Eligibility()) == "", "8/s is what they take"


@pytest.mark.parametrize(
    "room",
    [
        {"request_rate": 0.0, "safe_rate": 4.0},
        {"request_rate": 99.0, "safe_rate": None},
    ],
)
def test_what_is_not_known_holds_nobody(room: dict[str, object]) -> None:
    assert shortage(world(**room), 100, Eligibility()) == ""


def test_a_step_for_some_sends_only_their_requests() -> None:
    """4/s of tenant a, 16/s of b of which 6 are excluded: 4/s, or 14/s without the limit."""
    rates = {("x", "a"): 4.0, ("x", "b"): 10.0, ("y", "b"): 6.0}
    seen = world(request_rate=20.0, slice_rates=rates)
    assert candidate_rate(seen, 100, Eligibility(tenants=("a",))) == 4.0
    assert candidate_rate(seen, 50, Eligibility((("y", ""),))) == 7.0
    assert candidate_rate(world(request_rate=20.0), 50, Eligibility(tenants=("a",))) == 10.0


ROOM = {"request_rate": 20.0, "safe_rate": 4.0, "ready_replicas": 2, "wanted_replicas": 2}


def test_a_step_is_held_while_the_candidate_is_too_small() -> None:
    fake = FakeWorld()
    fake.room = dict(ROOM)
    fake.settle().complete_stage()
    assert (fake.weight, fake.status.held) == (10, "CandidateTooSmall")
    assert "scale the candidate to 3" in fake.status.held_message
    fake.room.update(ready_replicas=3, wanted_replicas=3)
    assert fake.tick().status.weight == 50


def test_the_first_step_and_the_shadow_too() -> None:
    """All of 20/s mirrored are 20/s; at 10 % they are 2/s."""
    fake = FakeWorld(rollout(shadow=SHADOW))
    fake.room = dict(ROOM)
    fake.settle()
    assert (fake.status.phase, fake.status.shadow_percent) == (Phase.SHADOWING, 0)
    assert fake.status.held == "CandidateTooSmall"
    fake.edit(shadow=SHADOW.model_copy(update={"percent": 40}))
    assert fake.settle().status.shadow_percent == 40


def test_the_promotion_too() -> None:
    fake = FakeWorld(rollout(steps=steps(40), watch=WATCH))
    fake.room = dict(ROOM)
    fake.settle().complete_stage()
    assert (fake.status.phase, fake.weight, fake.status.held) == (Phase.STEP, 40, "CandidateTooSmall")
    fake.room.update(ready_replicas=5, wanted_replicas=5)
    fake.tick()
    assert (fake.status.phase, fake.weight) == (Phase.WATCHING, 98)


def test_a_step_for_tenants_is_measured_by_their_requests() -> None:
    fake = FakeWorld(rollout(steps=[Step(weight=100, tenants=["a"]), *steps(10)]))
    fake.room = {**ROOM, "slice_rates": {("", "a"): 5.0, ("", "b"): 15.0}}
    assert fake.settle().weight == 100


@pytest.mark.parametrize("first", [True, False])
def test_a_step_waits_for_replicas(first: bool) -> None:
    fake = FakeWorld()
    if not first:
        fake.settle().complete_stage()
        fake.candidate_ready = False
        fake.tick()
        fake.candidate_ready = True
    fake.room = {"ready_replicas": 1, "wanted_replicas": 4}
    fake.settle()
    assert (fake.weight, fake.status.held) == (0, "WaitingForReplicas")
    assert "1 of 4" in fake.status.held_message
    fake.room["ready_replicas"] = 4
    assert fake.settle().weight == (10 if first else 50)


def test_a_step_under_way_keeps_its_traffic_when_a_replica_goes() -> None:
    fake = FakeWorld()
    fake.room = {"ready_replicas": 4, "wanted_replicas": 4}
    fake.settle()
    fake.room["ready_replicas"] = 3
    fake.complete_stage()
    assert (fake.weight, fake.status.held) == (10, "WaitingForReplicas")


def back(percent: int = 50, cached: float = 0.0, candidate: str = "new", **room: object) -> str:
    seen = World(
        Arms(ArmStatus(backend="old"), ArmStatus(backend=candidate)), True, True, True,
        **{"request_rate": 20.0, "stable_replicas": 2, **room},  # type: ignore[arg-type]
    )  # fmt: skip
    return rollback_cost(seen, percent, Eligibility(), cached)


def test_what_a_rollback_costs() -> None:
    """20/s at 50 % are 10/s more; two replicas take 2 × 12/s, or 2 × 8/s, and then three are needed."""
    assert back(stable_safe_rate=12.0) == "old gets 10 requests/s more, 20 in all, of 24 that it safely takes"
    told = back(stable_safe_rate=8.0, cached=0.624)
    assert "20 requests/s in all, and its 2 ready replica(s) safely take 16/s: scale it to 3" in told
    assert told.endswith(
        "62 % of the candidate's prompt tokens come from its cache, which is cold at the target"
    )
    assert (
        back()
        == "old gets 10 requests/s more, and what it safely takes was not measured (2 ready replica(s))"
    )


def test_what_costs_nothing_or_is_not_known_is_not_told() -> None:
    assert back(percent=0, cached=0.5) == ""
    assert back(candidate="old", cached=0.5) == "", "the same pods, and the same caches"
    assert back(request_rate=0.0) == ""


def test_a_rollback_says_whom_it_overloads() -> None:
    room = {"request_rate": 20.0, "stable_safe_rate": 8.0, "stable_replicas": 2}
    assert overload(world(**room)).startswith("old gets 20 requests/s in all")
    assert overload(world(**{**room, "stable_replicas": 3})) == ""
    running = FakeWorld(rollout(watch=WATCH))
    running.room = room
    running.settle()
    assert running.status.rollback_cost.startswith("old gets 20 requests/s in all")
    running.roll_back()
    assert running.status.history[-1].message.endswith("scale it to 3")
    assert running.status.rollback_cost == ""


def test_a_figure_alone_is_no_reason_to_write() -> None:
    running = FakeWorld()
    running.room = {"request_rate": 20.0, "stable_replicas": 2}
    running.settle()
    before = running.status.rollback_cost
    running.room = {"request_rate": 21.0, "stable_replicas": 2}
    assert not running.tick().material
    assert running.status.rollback_cost not in ("", before)
