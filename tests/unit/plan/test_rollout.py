"""The life of a rollout, stage by stage."""

from __future__ import annotations

import pytest

from sluice_operator.api.rollout import CandidateArm
from sluice_operator.api.routepolicy import Check, Contract, Target
from sluice_operator.api.rulestatus import Phase
from sluice_operator.api.tuning import Features
from sluice_operator.gates import ArmName, fold
from sluice_operator.plan.attempt import gates_hash
from unit.plan.rollout_world import CONTRACT, SHADOW, TTFT_ONLY, FakeWorld, rollout, rule, steps


def test_from_shadow_through_the_steps_to_promotion() -> None:
    world = FakeWorld(rollout(shadow=SHADOW)).settle()
    assert (world.status.phase, world.weight, world.status.shadow_percent) == (Phase.SHADOWING, 0, 100)
    world.complete_stage()
    assert (world.status.phase, world.status.step, world.weight) == (Phase.STEP, 0, 10)
    assert world.status.shadow_percent == 0
    world.complete_stage()
    assert (world.status.step, world.weight) == (1, 50)
    world.complete_stage()
    assert (world.status.phase, world.weight) == (Phase.PROMOTED, 100)
    reasons = [line.reason for line in world.status.history]
    assert reasons == ["AttemptStarted", "ShadowComplete", "StepComplete", "Promoted"]


def test_first_decision_of_an_attempt_is_weight_0() -> None:
    world = FakeWorld()
    assert world.tick().status.weight == 0
    assert world.tick().status.weight == 10


def test_a_tick_without_news_changes_nothing() -> None:
    world = FakeWorld().settle()
    before = world.saved
    for _ in range(5):
        decision = world.tick()
        assert not decision.material
        assert not decision.transitions
    assert world.saved == before


def test_order_of_writes() -> None:
    world = FakeWorld()
    world.tick()
    assert world.tick().increases
    world.candidate_ready = False
    assert world.tick().reduces
    world.candidate_ready = True
    assert world.tick().increases


def test_evidence_alone_is_not_material() -> None:
    world = FakeWorld().settle()
    world.serve(5, seconds=5.0)
    decision = world.tick()
    assert not decision.material
    assert decision.status.num_stable_samples == 45


@pytest.mark.parametrize("short", ["time", "samples"])
def test_a_step_asks_for_time_and_samples(short: str) -> None:
    world = FakeWorld(rollout(steps=steps(10, 50, samples=50))).settle()
    world.serve(100, seconds=30.0) if short == "time" else world.serve(40, seconds=120.0)
    world.tick()
    assert world.weight == 10
    assert world.status.held == ("" if short == "time" else "NoEvidence")


def test_no_traffic_holds_and_resumes() -> None:
    world = FakeWorld().settle()
    world.tick(8 * 3600)
    world.tick()
    assert (world.weight, world.status.held) == (10, "NoEvidence")
    world.complete_stage()
    assert world.weight == 50


def test_failed_requests_alone_never_complete_a_step() -> None:
    world = FakeWorld(rollout(guards=[])).settle()
    world.serve(200, seconds=100.0, failed=True)
    world.tick()
    assert (world.weight, world.status.held) == (10, "NoEvidence")


def test_a_slow_candidate_is_rolled_back_with_the_evidence_in_its_history() -> None:
    world = FakeWorld(rollout(guards=TTFT_ONLY)).settle()
    world.serve(30, seconds=10.0)
    world.serve(30, seconds=20.0, ttft_s=5.0)
    decision = world.tick()
    assert (decision.status.phase, decision.status.weight) == (Phase.ROLLED_BACK, 0)
    assert decision.reduces
    assert decision.transitions[0].reason == "GuardFired"
    assert "TTFT" in decision.transitions[0].message
    assert decision.status.attempt in decision.status.rejected


def test_a_hard_violation_is_the_very_next_decision() -> None:
    world = FakeWorld(rollout(shadow=SHADOW)).settle()
    world.serve(1, seconds=0.1, hard_violations=("json",))
    decision = world.tick()
    assert (decision.status.phase, decision.status.shadow_percent) == (Phase.ROLLED_BACK, 0)
    assert decision.transitions[0].reason == "HardGateBroken"


def leaky() -> FakeWorld:
    """With a check that tells of a leak beside one that does not."""
    private = Check(name="private", must_not_match="secret", leak=True)
    checks = [*CONTRACT.checks, private]
    return FakeWorld(rollout(), contract=Contract(checks=checks)).settle()


def test_a_leak_cuts_what_runs_and_a_restart_of_the_operator_does_not_forget_it() -> None:
    world = leaky()
    world.serve(1, seconds=0.1, hard_violations=("private",))
    decision = world.tick()
    assert (decision.status.phase, decision.status.weight) == (Phase.ROLLED_BACK, 0)
    assert (decision.status.leaked, decision.reduces) == (True, True)
    assert "private" in decision.transitions[0].message
    assert "is cut" in decision.transitions[0].message
    world.restart()
    assert not world.tick(1.0).transitions
    assert world.status.leaked
    world.edit(attempt=2)
    world.tick()
    assert not world.status.leaked, "another attempt has let nothing out"


def test_another_hard_violation_or_an_abort_lets_streams_end_in_peace() -> None:
    for end in (lambda world: world.roll_back(), lambda world: world.edit(abort=True)):
        world = leaky()
        end(world)
        world.tick()
        assert world.status.phase in (Phase.ROLLED_BACK, Phase.ABORTED)
        assert not world.status.leaked


@pytest.mark.parametrize("abort", [False, True])
def test_what_was_left_to_end_in_peace_is_cut_when_it_leaks(abort: bool) -> None:
    world = leaky()
    if abort:
        world.edit(abort=True)
        world.tick()
    else:
        world.roll_back()
    phase = world.status.phase
    late = world._request(ArmName.CANDIDATE)._replace(hard_violations=("private",))
    assert world.gate is not None
    fold(world.gate, [late])
    decision = world.tick(1.0)
    assert (decision.status.phase, decision.status.leaked, decision.material) == (phase, True, True)
    assert [line.reason for line in decision.transitions] == ["Leaked"]
    assert not world.tick(1.0).transitions


def test_what_a_violation_means_is_edited_without_a_restart_of_evidence() -> None:
    world = leaky()
    before = world.status.num_restarts
    checks = [check.model_copy(update={"leak": False}) for check in world.rule.contract.checks]
    world.edit_rule(contract=Contract(checks=checks))
    assert not world.tick(1.0).transitions
    world.serve(1, seconds=0.1, hard_violations=("private",))
    assert (world.tick().status.leaked, world.status.num_restarts) == (False, before)


def test_guards_stay_armed_while_paused() -> None:
    world = FakeWorld().settle()
    world.edit(paused=True)
    world.tick()
    assert (world.weight, world.status.held) == (10, "Paused")
    world.complete_stage()
    assert (world.weight, world.status.held) == (10, "Paused")
    world.serve(1, seconds=0.1, hard_violations=("json",))
    assert world.tick().status.phase is Phase.ROLLED_BACK


def test_paused_from_the_start_does_not_begin() -> None:
    world = FakeWorld(rollout(paused=True)).settle()
    assert (world.weight, world.status.held) == (0, "Paused")
    world.edit(paused=False)
    assert world.settle().weight == 10


@pytest.mark.parametrize(
    ("missing", "held"),
    [
        ("candidate_ready", "CandidateNotReady"),
        ("stable_ready", "StableNotReady"),
        ("evidence_live", "EvidenceNotLive"),
    ],
)
def test_arriving_waits(missing: str, held: str) -> None:
    world = FakeWorld()
    setattr(world, missing, False)
    world.settle()
    assert (world.weight, world.status.held) == (0, held)
    setattr(world, missing, True)
    assert world.settle().weight == 10


@pytest.mark.parametrize(
    ("missing", "held"),
    [
        ("stable_ready", "StableNotReady"),
        ("evidence_live", "EvidenceNotLive"),
    ],
)
def test_a_step_does_not_complete_blindly(missing: str, held: str) -> None:
    world = FakeWorld().settle()
    world.serve(80, seconds=61.0)
    setattr(world, missing, False)
    world.tick()
    assert (world.weight, world.status.held) == (10, held)
    setattr(world, missing, True)
    world.tick()
    assert world.weight == 50


def test_a_candidate_that_is_not_ready_leaves_and_comes_back_to_its_step() -> None:
    world = FakeWorld().settle().complete_stage()
    assert world.weight == 50
    world.candidate_ready = False
    world.tick()
    assert (world.weight, world.status.step, world.status.held) == (0, 1, "CandidateNotReady")
    world.tick(600)
    world.candidate_ready = True
    world.tick()
    assert (world.weight, world.status.step) == (50, 1)
    world.tick()
    assert world.status.phase is Phase.STEP, "the step's time begins anew"


def test_evidence_restarts_at_each_stage_with_its_own_share_of_alpha() -> None:
    world = FakeWorld(rollout(shadow=SHADOW)).settle()
    assert world.status.num_restarts == 0
    world.complete_stage()
    assert (world.status.num_restarts, world.status.num_samples, world.status.guards) == (1, 0, [])


def test_evidence_restarts_each_hour_and_samples_stay() -> None:
    world = FakeWorld(rollout(steps=steps(10, 50, samples=100))).settle()
    world.serve(60, seconds=30.0)
    world.tick()
    samples = world.status.num_samples
    assert samples > 0
    world.tick(3600)
    assert (world.status.num_restarts, world.status.num_samples) == (1, samples)


def test_an_edit_of_weights_is_in_force_in_the_next_decision() -> None:
    world = FakeWorld().settle()
    world.edit(steps=steps(30, 50))
    decision = world.tick()
    assert (decision.status.weight, decision.status.num_samples) == (30, 0)
    world.edit(steps=steps(5, 50))
    decision = world.tick()
    assert decision.status.weight == 5
    assert decision.reduces


def test_steps_cut_away_leave_the_last_one() -> None:
    world = FakeWorld(rollout(steps=steps(10, 20, 30))).settle().complete_stage().complete_stage()
    assert world.weight == 30
    world.edit(steps=steps(10))
    world.tick()
    assert (world.status.phase, world.status.step, world.weight) == (Phase.STEP, 0, 10)


def test_a_shadow_stage_edited_away_moves_on_to_the_first_step() -> None:
    world = FakeWorld(rollout(shadow=SHADOW)).settle()
    world.edit(shadow=None)
    world.tick()
    assert (world.status.phase, world.weight, world.status.shadow_percent) == (Phase.STEP, 10, 0)


def test_longer_minimums_do_not_restart_a_step() -> None:
    world = FakeWorld().settle()
    world.serve(30, seconds=10.0)
    world.tick()
    samples = world.status.num_samples
    world.edit(steps=steps(10, 50, seconds=600))
    world.tick()
    assert world.status.num_samples == samples > 0


def test_an_edit_of_gates_restarts_the_evidence_and_keeps_the_stage() -> None:
    world = FakeWorld().settle().complete_stage()
    world.serve(30, seconds=10.0)
    world.edit(guards=TTFT_ONLY)
    decision = world.tick()
    assert (decision.status.weight, decision.status.step, decision.status.num_samples) == (50, 1, 0)
    assert decision.transitions[0].reason == "GatesChanged"
    assert decision.status.gates == gates_hash(world.rule)


def test_evidence_of_edited_gates_fires_nothing() -> None:
    """The check that failed was taken out of the contract in the same moment."""
    world = FakeWorld().settle()
    world.serve(1, seconds=0.1, hard_violations=("json",))
    world.edit_rule(contract=Contract())
    world.tick()
    assert world.status.phase is Phase.STEP


@pytest.mark.parametrize("stage", ["shadow", "step", "promoted"])
def test_abort_and_removal_are_in_force_in_the_next_decision(stage: str) -> None:
    for how in ("abort", "remove"):
        world = FakeWorld(rollout(shadow=SHADOW)).settle()
        if stage != "shadow":
            world.complete_stage()
        if stage == "promoted":
            world.promote()
        world.edit(abort=True) if how == "abort" else world.edit_rule(rollout=None)
        decision = world.tick()
        assert (decision.status.weight, decision.status.shadow_percent) == (0, 0)
        assert decision.reduces
        assert decision.status.phase is (Phase.ABORTED if how == "abort" else Phase.STABLE)


def test_promotion_is_a_no_op_in_the_spec() -> None:
    """Target set to the candidate and the rollout removed: routes first, or traffic would dip to the old
    arm."""
    world = FakeWorld().promote()
    world.edit_rule(target=Target(backend="new"), rollout=None)
    decision = world.tick()
    assert decision.handover
    assert not decision.reduces
    assert (decision.status.phase, decision.status.stable.backend) == (Phase.STABLE, "new")


def test_target_set_first_and_rollout_removed_later() -> None:
    world = FakeWorld().promote()
    world.edit_rule(target=Target(backend="new"))
    decision = world.tick()
    assert decision.handover
    assert (decision.status.phase, decision.status.held) == (Phase.STABLE, "CandidateIsTarget")
    world.edit_rule(rollout=None)
    assert not world.tick().transitions


def test_after_promotion_the_old_backend_may_go() -> None:
    world = FakeWorld().promote()
    del world.identities["old"]
    world.stable_ready = False
    world.settle()
    assert (world.status.phase, world.weight) == (Phase.PROMOTED, 100)


def test_a_new_target_beside_a_promoted_candidate_is_waited_for() -> None:
    world = FakeWorld().promote()
    world.edit_rule(target=Target(backend="newer"))
    world.stable_ready = False
    world.settle()
    assert (world.status.phase, world.weight, world.status.held) == (Phase.PROMOTED, 100, "StableNotReady")
    world.stable_ready = True
    assert world.tick().status.weight == 0
    assert world.settle().weight == 10


def test_an_identity_that_becomes_known_starts_the_attempt_and_unknown_again_changes_nothing() -> None:
    world = FakeWorld()
    world.identities["new"] = ""
    world.settle()
    assert (world.status.phase, world.status.attempt, world.weight) == (Phase.STABLE, "", 0)
    assert world.status.held == "CandidateNotReady"
    world.identities["new"] = "sha256:new"
    world.settle()
    attempt = world.status.attempt
    assert world.weight == 10
    world.identities["new"] = world.identities["old"] = ""
    world.settle()
    assert (world.status.attempt, world.weight) == (attempt, 10)


def test_a_candidate_that_only_switches_a_feature() -> None:
    change = rollout(candidate=CandidateArm(features=Features(prefix_cache=False)))
    world = FakeWorld(change).settle()
    assert (world.status.candidate.backend, world.weight) == ("old", 10)
    world.promote()


def test_a_candidate_that_is_the_target_is_nothing_to_roll_out() -> None:
    world = FakeWorld(rollout(candidate=CandidateArm(backend="old"))).settle()
    assert (world.weight, world.status.held) == (0, "CandidateIsTarget")


def test_last_step_of_100_needs_no_stable_evidence() -> None:
    world = FakeWorld(rollout(steps=steps(100))).settle()
    assert world.weight == 100
    world.stable_ready = False
    world.complete_stage()
    assert world.status.phase is Phase.PROMOTED


def test_history_is_bounded() -> None:
    world = FakeWorld().settle()
    for attempt in range(2, 40):
        world.edit(attempt=attempt)
        world.settle()
    assert len(world.status.history) == 20


def test_a_rule_without_rollout_stays_stable() -> None:
    world = FakeWorld()
    world.rule = rule(None)
    assert not world.tick().transitions
    assert world.status.stable.backend == "old"


def test_a_status_that_makes_no_sense_starts_over() -> None:
    world = FakeWorld().settle()
    world.saved = world.status.model_copy(update={"phase": Phase.STABLE}).model_dump_json(by_alias=True)
    world.settle()
    assert (world.status.phase, world.weight) == (Phase.STEP, 10)
