"""After the last step: the candidate serves, its guards stay armed, and a person may end it."""

from __future__ import annotations

from typing import Any

import pytest

from sluice_operator.api.rollout import Watch
from sluice_operator.api.routepolicy import Fallback, Target
from sluice_operator.api.rulestatus import Phase
from unit.plan.rollout_world import WATCH, FakeWorld, rollout, steps


def reasons(world: FakeWorld) -> list[str]:
    return [line.reason for line in world.status.history]


def watching(**changes: Any) -> FakeWorld:
    world = FakeWorld(rollout(**{"steps": steps(50), "watch": WATCH, **changes})).settle().complete_stage()
    assert world.status.phase is Phase.WATCHING
    return world


def test_the_watch_is_a_step_down_for_a_last_step_of_100() -> None:
    world = FakeWorld(rollout(steps=steps(100), watch=WATCH)).settle()
    world.serve(80, seconds=61.0)
    decision = world.tick()
    assert (decision.status.weight, decision.reduces) == (98, True)


@pytest.mark.parametrize("how", ["hard", "guard"])
def test_rollback_is_armed_all_the_while(how: str) -> None:
    world = watching()
    world.edit(paused=True)
    world.tick()
    if how == "hard":
        world.serve(1, seconds=0.1, hard_violations=("json",))
    else:
        world.says("GuardFired", slice_only=False)
    decision = world.tick()
    assert (decision.status.phase, decision.status.weight) == (Phase.ROLLED_BACK, 0)


def test_an_edit_of_the_watch_is_in_force_at_once() -> None:
    world = watching()
    began = world.status.stage_since
    assert world.status.watch_until == "2026-01-01T01:01:01Z"
    world.edit(watch=Watch(seconds=7200, holdback_percent=10))
    decision = world.tick()
    assert (decision.status.weight, decision.status.watch_until) == (90, "2026-01-01T02:01:01Z")
    assert (decision.reduces, decision.status.stage_since) == (True, began)
    world.serve(10)
    world.edit(watch=Watch(seconds=0, holdback_percent=10))
    assert world.tick().status.phase is Phase.PROMOTED


def test_nobody_is_held_back_on_an_old_arm_that_is_gone() -> None:
    world = watching()
    world.stable_ready = False
    del world.identities["old"]
    world.settle()
    assert (world.status.phase, world.weight, world.status.held) == (Phase.WATCHING, 100, "StableNotReady")
    world.serve(30, seconds=3601.0)
    assert world.settle().status.phase is Phase.PROMOTED, "a missing old backend is a warning"


@pytest.mark.parametrize("reason", ["GuardFired", "QueryFired"])
def test_nobody_is_sent_back_to_an_arm_that_was_scaled_away(reason: str) -> None:
    """A slow answer is better than none; it goes back as soon as somebody is there."""
    world = watching()
    world.stable_ready = False
    world.settle()
    world.says(reason, slice_only=False).tick()
    assert (world.status.phase, world.weight, world.status.held) == (Phase.WATCHING, 100, "StableNotReady")
    assert "to be rolled back (the evidence)" in world.status.held_message
    world.stable_ready = True
    world.says(reason, slice_only=False).tick()
    assert (world.status.phase, world.weight) == (Phase.ROLLED_BACK, 0)


def test_what_is_never_tolerated_goes_back_all_the_same() -> None:
    world = watching()
    world.stable_ready = False
    world.settle()
    world.says("HardGateBroken", slice_only=False).tick()
    assert (world.status.phase, world.weight) == (Phase.ROLLED_BACK, 0)


def test_with_a_fallback_there_is_somebody() -> None:
    world = watching()
    world.edit_rule(fallbacks=[Fallback(backend="spare")])
    world.stable_ready = False
    world.settle()
    world.says("GuardFired", slice_only=False).tick()
    assert (world.status.phase, world.weight) == (Phase.ROLLED_BACK, 0)


def test_silence_does_not_end_a_watch() -> None:
    world = watching()
    world.tick(7200)
    world.tick()
    assert (world.status.phase, world.status.held) == (Phase.WATCHING, "NoEvidence")
    world.evidence_live, world.unheard_s = False, 3600.0
    world.settle()
    assert (world.weight, world.status.held) == (98, "EvidenceNotLive"), "the old arm may be small"
    world.evidence_live = True
    world.serve(2000, seconds=600.0)
    assert world.tick().status.phase is Phase.PROMOTED


def test_an_interruption_does_not_begin_the_watch_anew() -> None:
    world = watching()
    until = world.status.watch_until
    world.candidate_ready = False
    assert world.tick(60).status.weight == 0
    world.candidate_ready = True
    world.settle()
    assert (world.weight, world.status.watch_until) == (98, until)


@pytest.mark.parametrize("how", ["abort", "remove"])
def test_a_human_ends_it(how: str) -> None:
    world = watching()
    world.edit(abort=True) if how == "abort" else world.edit_rule(rollout=None)
    decision = world.tick()
    assert (decision.status.weight, decision.reduces) == (0, True)
    assert decision.status.phase is (Phase.ABORTED if how == "abort" else Phase.STABLE)


@pytest.mark.parametrize("removed", [True, False])
def test_the_spec_may_take_the_candidate_over_during_the_watch(removed: bool) -> None:
    world = watching()
    world.edit_rule(target=Target(backend="new"), **({"rollout": None} if removed else {}))
    decision = world.tick()
    assert decision.handover
    assert (decision.status.phase, decision.status.stable.backend) == (Phase.STABLE, "new")


def test_paused_it_is_not_promoted() -> None:
    world = watching()
    world.edit(paused=True)
    world.serve(80, seconds=3700.0)
    world.settle()
    assert (world.status.phase, world.status.held) == (Phase.WATCHING, "Paused")


def test_an_edit_of_guards_restarts_the_evidence_and_not_the_watch() -> None:
    world = watching()
    until = world.status.watch_until
    world.tick(600)
    world.edit(guards=[])
    decision = world.tick()
    assert decision.transitions[0].reason == "GatesChanged"
    assert (decision.status.weight, decision.status.watch_until) == (98, until)


def test_without_a_watch_it_is_promoted_at_once() -> None:
    world = FakeWorld(rollout(steps=steps(50), watch=Watch(seconds=0))).settle().complete_stage()
    assert (world.status.phase, world.weight, world.status.watch_until) == (Phase.PROMOTED, 100, "")
