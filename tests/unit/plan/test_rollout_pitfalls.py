"""Faults that users of other rollout tools reported; each named by its report (PITFALLS, "Rollouts")."""

from __future__ import annotations

from datetime import timedelta

import pytest
from pydantic import ValidationError

from sluice_operator.api.guards import Guard
from sluice_operator.api.rollout import Approval, CandidateArm, Consent, Step
from sluice_operator.api.routepolicy import Target
from sluice_operator.api.rulestatus import Phase
from sluice_operator.plan.ledger import rebuild
from sluice_operator.plan.scope import eligibility
from unit.plan.rollout_world import SHADOW, SUITES, TTFT_ONLY, WATCH, FakeWorld, rollout, run, steps


def test_argo_rollouts_1292_abort_with_nothing_running_is_a_no_op() -> None:
    world = FakeWorld(rollout(abort=True))
    world.identities["new"] = ""
    for _ in range(3):
        decision = world.tick()
        assert (decision.status.weight, decision.reduces, decision.status.rejected) == (0, False, [])
    world.identities["new"] = "sha256:new"
    world.edit(abort=False)
    assert world.settle().weight == 10


@pytest.mark.parametrize("ready", [True, False])
def test_argo_rollouts_3372_a_third_version_waits_for_its_endpoints(ready: bool) -> None:
    world = FakeWorld().settle().complete_stage()
    world.edit(candidate=CandidateArm(backend="newer"))
    world.candidate_ready = ready
    assert world.tick().status.weight == 0
    world.settle()
    assert (world.weight, world.status.step) == (10 if ready else 0, 0)
    assert world.status.candidate.backend == "newer"


def test_argo_rollouts_3372_a_third_version_not_loaded_yet() -> None:
    """Nobody knows yet what it will be; the second one leaves all the same."""
    world = FakeWorld().settle().complete_stage()
    world.identities["newer"] = ""
    world.edit(candidate=CandidateArm(backend="newer"))
    assert world.tick().status.weight == 0
    world.settle()
    assert (world.status.phase, world.status.held) == (Phase.STABLE, "CandidateNotReady")


def test_argo_rollouts_1690_an_edit_during_a_pause_starts_over_with_fresh_evidence() -> None:
    world = FakeWorld().settle().complete_stage()
    world.edit(paused=True)
    world.serve(30, ttft_s=0.11)
    world.tick()
    world.edit(candidate=CandidateArm(backend="newer"))
    decision = world.tick()
    assert (decision.status.weight, decision.status.step, decision.status.num_samples) == (0, 0, 0)
    assert decision.status.guards == []
    world.settle()
    assert world.weight == 0, "paused before it began"


def test_argo_rollouts_1690_an_approval_is_not_carried_over_to_the_next_candidate() -> None:
    manual = [one.model_copy(update={"consent": Consent.MANUAL}) for one in steps(10)]
    world = FakeWorld(rollout(steps=manual)).settle()
    world.edit(approval=Approval(attempt=world.status.attempt, step=0))
    assert world.settle().weight == 10
    world.edit(candidate=CandidateArm(backend="newer"))
    world.settle()
    assert (world.weight, world.status.held) == (0, "AwaitingApproval")


def test_flagger_30_late_evidence_of_the_earlier_candidate_does_not_judge_the_next() -> None:
    world = FakeWorld().settle()
    earlier = world.status.attempt
    world.edit(candidate=CandidateArm(backend="newer"))
    world.settle()
    world.serve(30)
    world.late(30, earlier)
    world.tick()
    assert world.status.phase is Phase.STEP


def test_kserve_1968_the_baseline_is_the_last_promoted_version() -> None:
    """A rolled-back candidate is never what the next one is compared with."""
    world = FakeWorld().roll_back()
    world.edit(candidate=CandidateArm(backend="newer"))
    world.settle()
    assert (world.status.stable.backend, world.status.candidate.backend) == ("old", "newer")
    world = FakeWorld().promote()
    world.edit_rule(target=Target(backend="new"), rollout=rollout(candidate=CandidateArm(backend="newer")))
    world.settle()
    assert (world.status.stable.backend, world.status.candidate.backend) == ("new", "newer")


STAGES = ["paused", "held", "evaluating", "approval", "watching", "promoted"]


@pytest.mark.parametrize("stage", STAGES)
def test_argo_rollouts_3756_a_human_abort_always_wins(stage: str) -> None:
    change = {
        "evaluating": {"evaluation": SUITES},
        "watching": {"watch": WATCH},
        "approval": {"promotion": Consent.MANUAL},
    }.get(stage, {})
    world = FakeWorld(rollout(**change)).settle()
    if stage in ("approval", "watching"):
        world.complete_stage().complete_stage()
    if stage == "promoted":
        world.promote()
    assert world.status.held == ("AwaitingApproval" if stage == "approval" else world.status.held)
    world.edit(paused=stage == "paused", abort=True)
    world.evidence_live = stage != "held"
    assert (world.tick().status.phase, world.weight) == (Phase.ABORTED, 0)


def test_argo_rollouts_4461_so_does_removing_the_rollout_after_promotion_began() -> None:
    world = FakeWorld(rollout(watch=WATCH)).settle().complete_stage().complete_stage()
    assert world.weight == 98
    world.edit_rule(rollout=None)
    assert (world.tick().status.phase, world.weight) == (Phase.STABLE, 0)


def test_argo_rollouts_2048_the_next_version_starts_clean_after_an_abort() -> None:
    world = FakeWorld().settle().complete_stage()
    world.edit(abort=True)
    world.tick()
    world.edit(abort=False, candidate=CandidateArm(backend="newer"))
    world.settle()
    assert (world.status.phase, world.status.step, world.weight) == (Phase.STEP, 0, 10)
    assert world.status.num_samples == 0


def test_argo_rollouts_3120_an_aborted_version_does_not_come_back() -> None:
    world = FakeWorld().settle()
    world.edit(abort=True)
    world.tick()
    world.edit(abort=False)
    world.settle()
    assert (world.status.phase, world.weight) == (Phase.ABORTED, 0)
    world.edit(attempt=2)
    assert world.settle().weight == 10


def test_a_refused_attempt_does_not_come_back_after_another_was_tried() -> None:
    world = FakeWorld().roll_back()
    world.edit(candidate=CandidateArm(backend="newer"))
    assert world.settle().weight == 10
    world.edit(candidate=CandidateArm(backend="new"))
    world.settle()
    assert (world.status.phase, world.weight) == (Phase.ROLLED_BACK, 0)
    world.edit_rule(rollout=None)
    world.settle()
    world.edit_rule(rollout=rollout())
    world.settle()
    assert (world.status.phase, world.weight) == (Phase.ROLLED_BACK, 0)


def test_a_refused_attempt_is_remembered_over_many_others() -> None:
    """Git is set back to a state of months ago."""
    world = FakeWorld()
    for number in range(1, 60):
        world.edit(attempt=number)
        world.settle()
        world.edit(abort=True)
        world.tick()
        world.edit(abort=False)
    world.edit(attempt=1)
    world.settle()
    assert (world.status.phase, world.weight) == (Phase.ROLLED_BACK, 0)


@pytest.mark.parametrize("weight", [-1, 0, 101])
def test_argo_rollouts_3589_impossible_weights_are_refused(weight: int) -> None:
    with pytest.raises(ValidationError):
        Step(weight=weight)


def test_argo_rollouts_4973_scaling_does_not_revive() -> None:
    world = FakeWorld().roll_back()
    for ready in (False, True, False, True):
        world.candidate_ready = ready
        world.tick(60)
        assert world.weight == 0
    assert world.status.phase is Phase.ROLLED_BACK


def test_argo_rollouts_4479_errors_are_no_success() -> None:
    """Also where stable fails as well and so no guard fires."""
    world = FakeWorld(rollout(guards=[])).settle()
    world.serve(500, seconds=600.0, failed=True)
    world.tick()
    assert (world.weight, world.status.held) == (10, "NoEvidence")


def test_flagger_1581_an_unknown_metric_is_refused() -> None:
    with pytest.raises(ValidationError):
        Guard.model_validate({"metric": "Latency"})


def test_argo_rollouts_1905_no_traffic_at_night_holds() -> None:
    world = FakeWorld(rollout(shadow=SHADOW)).settle()
    for _ in range(12):
        world.tick(3600)
        world.tick()
    assert (world.status.phase, world.status.held) == (Phase.SHADOWING, "NoEvidence")
    world.complete_stage()
    assert world.status.phase is Phase.STEP


def test_flagger_989_an_error_is_no_change() -> None:
    """Reads fail for a while: identities unknown, objects not found."""
    world = FakeWorld().settle().complete_stage()
    attempt = world.status.attempt
    identities = dict(world.identities)
    world.identities.update(old="", new="")
    world.tick(1)
    world.identities.clear()
    world.tick(1)
    world.identities.update(identities)
    world.tick(1)
    assert (world.status.attempt, world.status.step, world.weight) == (attempt, 1, 50)


def test_flagger_1248_ticks_are_idempotent() -> None:
    world = FakeWorld().settle()
    world.serve(30)
    world.tick()
    before = world.saved
    for _ in range(20):
        world.tick()
    assert world.saved == before


def test_flagger_1577_a_rebuilt_cluster_does_not_promote_what_was_unproven() -> None:
    world = FakeWorld(rollout(shadow=SHADOW)).settle().complete_stage().complete_stage()
    assert world.weight == 50
    world.lose_status()
    assert world.tick().status.weight == 0
    world.settle()
    assert (world.status.phase, world.weight, world.status.stable.backend) == (Phase.SHADOWING, 0, "old")
    assert world.status.num_samples == 0


@pytest.mark.parametrize("stage", ["step", "watching", "promoted", "rolled back"])
def test_flagger_1577_what_was_promoted_or_refused_can_be_told_from_the_ledger(stage: str) -> None:
    world = FakeWorld(rollout(watch=WATCH)).settle()
    if stage == "rolled back":
        world.roll_back()
    else:
        for _ in range({"step": 1, "watching": 2, "promoted": 2}[stage]):
            world.complete_stage()
    if stage == "promoted":
        world.serve(80, seconds=3601.0)
        world.settle()
    before, kept = world.status, world.recorded()
    world.lose_status(rebuild([kept], "uid", "all"))
    decision = world.tick()
    world.settle()
    after = world.status
    assert (after.phase, after.step, after.attempt) == (before.phase, before.step, before.attempt)
    if stage == "promoted":
        assert (decision.status.weight, after.weight) == (100, 100)
    elif stage == "rolled back":
        assert (after.weight, after.rejected) == (0, before.rejected)
    else:
        assert (after.num_samples, after.weight) == (0, before.weight), "evidence since is unknown"


def test_flagger_1407_deciding_never_writes_spec() -> None:
    world = FakeWorld()
    before = world.rule.model_copy(deep=True)
    world.promote()
    assert world.rule == before


def test_argo_rollouts_3283_a_late_tick_judges_all_that_came_meanwhile() -> None:
    """What the loop missed for ten minutes is decided at once: back, not on."""
    world = FakeWorld(rollout(guards=TTFT_ONLY)).settle()
    world.serve(30, seconds=10.0)
    world.serve(300, seconds=600.0, ttft_s=5.0)
    assert world.tick().status.phase is Phase.ROLLED_BACK


@pytest.mark.parametrize("watched", [False, True])
def test_kserve_rolled_back_means_zero(watched: bool) -> None:
    world = FakeWorld(rollout(steps=steps(90), watch=WATCH)).settle()
    if watched:
        world.complete_stage()
    world.roll_back()
    assert (world.weight, world.status.shadow_percent) == (0, 0)


def test_flagger_1035_no_traffic_in_the_watch_holds_too() -> None:
    world = FakeWorld(rollout(watch=WATCH)).settle().complete_stage().complete_stage()
    for _ in range(3):
        world.tick(3600)
    world.settle()
    assert (world.status.phase, world.status.held) == (Phase.WATCHING, "NoEvidence")


@pytest.mark.parametrize("how", ["error", "no answers", "no suite"])
def test_argo_rollouts_4479_a_run_of_the_suites_without_answers_is_no_success(how: str) -> None:
    world = FakeWorld(rollout(evaluation=SUITES)).settle()
    world.evaluation = {
        "error": run(error="connection refused"),
        "no answers": run(candidate=[]),
        "no suite": run(suites=[]),
    }[how]
    world.settle()
    assert (world.status.phase, world.weight) == (Phase.EVALUATING, 0)


def test_argo_rollouts_3078_scaling_does_not_bring_back_a_slice() -> None:
    world = FakeWorld().settle()
    world.says("GuardFired", "sql").tick()
    for ready in (False, True, False, True):
        world.candidate_ready = ready
        world.tick(60)
        assert not eligibility(world.rule, world.status).allows("sql", "t")


def test_argo_rollouts_2463_nothing_is_decided_anew_by_applying_the_same_again() -> None:
    """A GitOps tool applies the policy every few minutes."""
    world = FakeWorld(rollout(watch=WATCH)).settle().complete_stage().complete_stage()
    before = world.settle().saved
    for _ in range(5):
        world.rule = world.rule.model_copy(deep=True)
        assert not world.tick().material
    assert world.saved == before


def test_the_evidence_of_a_rollback_stays_as_it_was() -> None:
    world = FakeWorld(rollout(guards=TTFT_ONLY)).settle()
    world.serve(30, seconds=10.0)
    world.serve(30, seconds=20.0, ttft_s=5.0)
    world.tick()
    guards = world.status.guards
    assert guards[0].num_bad_candidate > 0
    world.edit(guards=[])
    world.restart()
    world.serve(5, seconds=5.0)
    world.settle()
    assert world.status.guards == guards


@pytest.mark.parametrize("change", ["guards", "steps", "shadow", "paused", "restart"])
def test_a_rollback_is_sticky(change: str) -> None:
    world = FakeWorld().roll_back()
    edits = {"guards": TTFT_ONLY, "steps": steps(70), "shadow": SHADOW, "paused": True}
    world.restart() if change == "restart" else world.edit(**{change: edits[change]})
    world.settle()
    world.tick(7200)
    assert (world.status.phase, world.weight, world.status.shadow_percent) == (Phase.ROLLED_BACK, 0, 0)
    world.edit(attempt=2, paused=False)
    assert world.settle().status.phase is not Phase.ROLLED_BACK


def test_a_candidate_that_cannot_be_heard_keeps_its_traffic_for_seconds_and_not_for_ever() -> None:
    """A pod short of CPU loses its stream for some seconds: no flapping. Longer, and nobody guards it."""
    world = FakeWorld().settle()
    began = world.status
    world.evidence_live, world.unheard_s = False, 14.0
    world.tick(14)
    assert world.weight == 10
    world.unheard_s = 16.0
    assert world.tick(2).reduces
    assert (world.weight, world.status.held) == (0, "EvidenceNotLive")
    assert world.tick(600).status.phase is Phase.STEP, "it is held, not rolled back"
    world.evidence_live, world.unheard_s = True, 0.0
    world.settle()
    assert (world.weight, world.status.attempt) == (10, began.attempt)


def test_a_paused_candidate_that_cannot_be_heard_leaves_too() -> None:
    world = FakeWorld().settle()
    world.rule = world.rule.model_copy(update={"rollout": rollout(paused=True)})
    world.evidence_live, world.unheard_s = False, 16.0
    world.settle()
    assert world.weight == 0


@pytest.mark.parametrize("restart", [False, True], ids=["running", "another operator"])
def test_a_clock_that_was_set_back_blinds_no_guard(restart: bool) -> None:
    """By the new clock all requests begin before the evidence did, for an hour."""
    world = FakeWorld().settle()
    world.serve(30, seconds=30.0)
    world.tick()
    world.now -= timedelta(hours=1)
    if restart:
        world.restart()
    world.tick()
    assert [line.reason for line in world.status.history][-1] == "ClockSetBack"
    assert (world.weight, world.status.num_restarts) == (10, 1)
    world.tick()
    assert world.status.num_restarts == 1, "it was said once"
    world.serve(40, seconds=20.0, failed=True)
    world.tick()
    assert world.status.phase is Phase.ROLLED_BACK


def test_a_clock_that_was_set_back_stops_no_rollout() -> None:
    world = FakeWorld().settle()
    world.now -= timedelta(hours=1)
    world.tick()
    world.complete_stage()
    assert (world.status.phase, world.weight) == (Phase.STEP, 50)


def test_clocks_of_two_operators_that_differ_a_little_restart_nothing() -> None:
    world = FakeWorld().settle()
    world.now -= timedelta(seconds=1.5)
    world.restart()
    world.tick()
    assert world.status.num_restarts == 0


def test_a_promoted_arm_needs_no_evidence_to_go_on() -> None:
    world = FakeWorld().promote()
    world.evidence_live, world.unheard_s = False, 1e6
    world.settle()
    assert world.weight == 100
