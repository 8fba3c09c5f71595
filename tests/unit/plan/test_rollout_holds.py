"""Consent, gains, coverage and queries: each holds with what would let it go on."""

from __future__ import annotations

from typing import Any

import pytest

from sluice_operator.api.guards import Coverage, Gain, GuardMode, Metric, Query
from sluice_operator.api.rollout import Approval, Consent, Exclusion, Step
from sluice_operator.api.rulestatus import CoverageStatus, GainStatus, Phase, QueryStatus
from sluice_operator.plan import situation
from sluice_operator.plan.stages import text
from unit.plan.rollout_world import SHADOW, FakeWorld, rollout, steps


def reasons(world: FakeWorld) -> list[str]:
    return [line.reason for line in world.status.history]


def manual(*weights: int) -> list[Step]:
    return [one.model_copy(update={"consent": Consent.MANUAL}) for one in steps(*weights)]


def approve(world: FakeWorld, step: int, attempt: str = "") -> None:
    world.edit(approval=Approval(attempt=attempt or world.status.attempt, step=step))


def test_a_step_waits_for_a_person_and_names_the_command() -> None:
    world = FakeWorld(rollout(steps=[*steps(10), *manual(50)])).settle().complete_stage()
    assert (world.weight, world.status.held) == (10, "AwaitingApproval")
    assert "kubectl sluice approve assistant all -n shop" in world.status.held_message
    approve(world, 0)
    assert world.tick().status.weight == 10, "of an earlier step"
    approve(world, 1)
    assert world.tick().status.weight == 50


def test_the_first_step_and_the_promotion_wait_too() -> None:
    world = FakeWorld(rollout(steps=manual(10), promotion=Consent.MANUAL)).settle()
    assert (world.weight, world.status.held) == (0, "AwaitingApproval")
    approve(world, 0)
    world.settle().complete_stage()
    assert (world.status.phase, world.status.held) == (Phase.STEP, "AwaitingApproval")
    approve(world, 1)
    assert world.tick().status.phase is Phase.PROMOTED


def test_an_approval_is_for_one_attempt() -> None:
    world = FakeWorld(rollout(steps=manual(10))).settle()
    approve(world, 0)
    world.edit(attempt=2)
    world.settle()
    assert (world.weight, world.status.held) == (0, "AwaitingApproval")


def test_an_approval_ahead_of_time_is_no_evidence() -> None:
    world = FakeWorld(rollout(steps=manual(10, 50))).settle()
    approve(world, 2)
    world.settle()
    world.tick(3600)
    world.tick()
    assert (world.weight, world.status.held) == (10, "NoEvidence")


def test_a_shadow_edited_away_does_not_get_round_consent() -> None:
    world = FakeWorld(rollout(shadow=SHADOW, steps=manual(10))).settle()
    world.edit(shadow=None)
    decision = world.tick()
    assert (decision.status.shadow_percent, decision.status.weight) == (0, 0)
    world.settle()
    assert world.status.held == "AwaitingApproval"


def test_consent_is_not_asked_again_after_an_interruption() -> None:
    world = FakeWorld(rollout(steps=manual(10))).settle()
    approve(world, 0)
    world.settle()
    world.edit(approval=None)
    world.candidate_ready = False
    world.tick()
    world.candidate_ready = True
    assert world.settle().weight == 10


# Gains, coverage, queries


def checkpointed(world: FakeWorld, **found: Any) -> None:
    """Evidence as a checkpoint in the status would have it, whatever the gates make of it."""
    plain = situation.checkpoint
    world.verdict = None
    world.patches = {"checkpoint": lambda gate, status: plain(gate, status).model_copy(update=found)}


def test_a_price_that_only_the_candidate_has_holds_nothing_up() -> None:
    """What is only watched can't be waited for: the old backend will never name its price."""
    world = FakeWorld().settle()
    world.serve(80, seconds=61.0, cost=0.01)
    assert world.tick().status.weight == 50


def test_what_can_not_be_compared_is_named() -> None:
    """Stable's answers are too short to have a jitter: that is no pass, and people are told."""
    world = FakeWorld().settle()
    world.serve(80, seconds=61.0, jitter_s=0.01)
    world.tick()
    assert (world.weight, world.status.held) == (10, "NoEvidence")
    assert "nothing of stable's InterTokenJitter is known" in world.status.held_message
    world.serve(80, seconds=61.0)
    assert world.tick().status.weight == 50


def test_too_little_traffic_to_compare_with_is_told() -> None:
    """A request a minute: quantiles of stable are never known."""
    world = FakeWorld(rollout(steps=steps(50))).settle()
    for _ in range(4):
        world.serve(50, seconds=3000.0)
        world.tick()
    assert (world.weight, world.status.held) == (50, "NoEvidence")
    assert "20 of its requests within 10 minutes are needed" in world.status.held_message


def test_a_step_whose_tenants_a_person_excludes_says_so() -> None:
    first, second = steps(10, 50)
    world = FakeWorld(
        rollout(steps=[first.model_copy(update={"tenants": ["a"]}), second], exclude=[Exclusion(tenant="a")])
    ).settle()
    world.serve(80, seconds=61.0, tenant="a")
    world.tick()
    assert world.status.held == "NoEvidence"
    assert "nobody is left" in world.status.held_message
    assert "tenant a excluded" in world.status.held_message


def test_no_step_completes_before_the_gain_is_shown() -> None:
    gain = Gain(metric=Metric.TTFT, min_decrease_percent=10)
    world = FakeWorld(rollout(gains=[gain])).settle()
    hoped = GainStatus(name="TTFT/p50")
    checkpointed(world, gains=[hoped])
    world.complete_stage()
    assert (world.weight, world.status.held) == (10, "NoGain")
    assert "TTFT/p50" in world.status.held_message
    checkpointed(world, gains=[hoped.model_copy(update={"shown": True})])
    assert world.tick().status.weight == 50
    assert [gain.shown for gain in world.status.gains] == [True], "it need not be shown again"


def test_a_gain_is_asked_of_the_first_step_that_can_show_it() -> None:
    """Low-risk tasks first: their step would wait for ever for a gain at another task."""
    gain = Gain(metric=Metric.TTFT, min_decrease_percent=10, tasks=["sql"])
    first, *rest = steps(10, 20, 50)
    world = FakeWorld(rollout(gains=[gain], steps=[first.model_copy(update={"tasks": ["qa"]}), *rest]))
    world.settle()
    world.serve(80, seconds=61.0, task="qa")
    assert world.tick().status.weight == 20
    world.serve(80, seconds=61.0, task="sql")
    assert (world.tick().status.weight, world.status.held) == (20, "NoGain")


def test_a_gain_that_can_not_be_shown_any_more_says_why() -> None:
    gain = Gain(metric=Metric.TTFT, min_decrease_percent=10, tasks=["sql"])
    world = FakeWorld(rollout(gains=[gain])).settle()
    world.says("GuardFired", "sql").tick()
    world.complete_stage()
    assert world.status.held == "NoGain"
    assert "excluded: task sql" in world.status.held_message


def test_no_step_completes_without_the_traffic_that_it_must_have_seen() -> None:
    peak = Coverage(name="peak", min_samples=5)
    covering = [one.model_copy(update={"coverage": [peak]}) for one in steps(10, 50)]
    world = FakeWorld(rollout(steps=covering)).settle()
    checkpointed(world, coverage=[CoverageStatus(name="peak", num_samples=4)])
    world.complete_stage()
    assert (world.weight, world.status.held) == (10, "CoverageMissing")
    assert "peak (5 requests)" in world.status.held_message
    checkpointed(world, coverage=[CoverageStatus(name="peak", num_samples=5)])
    assert world.tick().status.weight == 50


def test_coverage_that_is_edited_counts_from_then_on() -> None:
    """Else it would be waited for until evidence restarts, and another kind would be taken for it."""
    kinds = [Coverage(name="sql", min_samples=5, tasks=["sql"]), Coverage(name="any", min_samples=5)]
    first, second = steps(10, 50)
    world = FakeWorld(rollout(steps=[first.model_copy(update={"coverage": kinds[1:]}), second])).settle()
    world.serve(40, seconds=30.0, task="qa")
    world.tick()
    world.edit(steps=[first.model_copy(update={"coverage": kinds}), second])
    world.tick()
    world.serve(40, seconds=40.0, task="qa")
    world.tick()
    seen = {one.name: one.num_samples for one in world.status.coverage}
    assert (world.weight, world.status.held, seen["sql"]) == (10, "CoverageMissing", 0)
    assert seen["any"] > 40, "what stays as it was goes on"
    world.serve(6, seconds=6.0, task="sql")
    assert world.tick().status.weight == 50


def test_a_query_that_fires_rolls_back() -> None:
    world = FakeWorld().settle()
    decision = world.says("QueryFired", slice_only=False).tick()
    assert (decision.status.phase, decision.transitions[0].reason) == (Phase.ROLLED_BACK, "QueryFired")


@pytest.mark.parametrize("mode", list(GuardMode))
def test_a_query_without_a_value_in_the_stage_holds(mode: GuardMode) -> None:
    query = Query(name="errors", query="vector(1)", max="0.5", mode=mode)
    world = FakeWorld(rollout(queries=[query])).settle()
    checkpointed(world, queries=[QueryStatus(name="errors", candidate="0.1", time="2025-01-01T00:00:00Z")])
    world.complete_stage()
    if mode is GuardMode.WATCH:
        assert world.weight == 50
        return
    assert (world.weight, world.status.held) == (10, "NoEvidence"), "a value of an earlier stage is none"
    checkpointed(world, queries=[QueryStatus(name="errors", error="no series")])
    world.tick()
    assert "no series" in world.status.held_message
    checkpointed(world, queries=[QueryStatus(name="errors", candidate="0.1", time=text(world.now))])
    assert world.tick().status.weight == 50
