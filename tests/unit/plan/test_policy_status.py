"""What conditions tell of rollouts: who is watched until when, who waits, who was left out."""

from __future__ import annotations

from typing import Any

import pytest

from sluice_operator.api.common import Condition, Metadata
from sluice_operator.api.routepolicy import RoutePolicy, RoutePolicySpec
from sluice_operator.api.rulestatus import ArmStatus, ExclusionStatus, Phase, RuleStatus, Transition
from sluice_operator.plan.conditions import Problem
from sluice_operator.plan.policy_status import PolicySeen, status
from unit.plan.rollout_world import rule

APART = ExclusionStatus(task="sql", reason="GuardFired", message="TTFT: 9 of 9", time="")


def conditions(**rollout: Any) -> dict[str, Condition]:
    """Of a policy in force with one rule."""
    base: dict[str, Any] = {
        "name": "all",
        "stable": ArmStatus(backend="old"),
        "candidate": ArmStatus(backend="new"),
    }
    policy = RoutePolicy(
        metadata=Metadata(name="p", namespace="shop", generation=3),
        spec=RoutePolicySpec(model="m", rules=[rule(None)]),
    )
    seen = PolicySeen(accepted=3, rules=(RuleStatus(**{**base, **rollout}),))
    return {one.type: one for one in status(policy, seen, "2026-01-01T00:00:00Z").conditions}


@pytest.mark.parametrize("phase", list(Phase))
def test_no_phase_takes_anything_from_ready(phase: Phase) -> None:
    found = conditions(phase=phase)
    assert (found["Ready"].status, found["Stalled"].status) == ("True", "False")


@pytest.mark.parametrize("phase", [Phase.EVALUATING, Phase.SHADOWING, Phase.STEP, Phase.WATCHING])
def test_in_progress(phase: Phase) -> None:
    told = conditions(phase=phase, weight=10)["RolloutInProgress"]
    assert (told.reason, "advancing" in told.message) == (phase.value, True)
    held = conditions(phase=phase, held="NoGain", held_message="not shown yet: TTFT/p50")["RolloutInProgress"]
    assert held.reason == "NoGain"
    assert "not shown yet: TTFT/p50" in held.message


def test_figures_that_follow_the_traffic_do_not_stand_in_a_condition() -> None:
    told = conditions(phase=Phase.STEP, held="CandidateTooSmall", held_message="10.3/s")["RolloutInProgress"]
    assert "10.3" not in told.message


def test_awaiting_approval_has_a_condition_with_the_command() -> None:
    command = "kubectl sluice approve assistant all -n shop"
    found = conditions(phase=Phase.STEP, held="AwaitingApproval", held_message=f"waits: {command}")
    assert command in found["AwaitingApproval"].message
    assert "AwaitingApproval" not in conditions(phase=Phase.STEP, held="NoGain", held_message="x")


def test_watching_is_not_in_git_and_says_until_when_and_what_to_edit_then() -> None:
    told = conditions(phase=Phase.WATCHING, weight=98, watch_until="2026-01-08T00:00:00Z")
    message = told["PromotionNotInGit"].message
    for part in ("98 %", "2026-01-08T00:00:00Z", "set target.backend to new", "remove the rollout"):
        assert part in message
    assert "PromotionNotInGit" not in conditions(phase=Phase.STEP)


def test_promoted_says_what_to_edit() -> None:
    assert "set target.backend to new" in conditions(phase=Phase.PROMOTED)["PromotionNotInGit"].message
    same = conditions(phase=Phase.PROMOTED, candidate=ArmStatus(backend="old"))["PromotionNotInGit"]
    assert "move what rollout.candidate changes into the rule" in same.message


def test_excluded_parts_are_named_and_would_follow_an_edit_of_the_target() -> None:
    found = conditions(phase=Phase.PROMOTED, excluded=[APART])
    assert found["PartlyRolledBack"].reason == "GuardFired"
    assert "task sql stays on old: TTFT: 9 of 9" in found["PartlyRolledBack"].message
    assert "task sql would then go to it too" in found["PromotionNotInGit"].message
    by_person = APART.model_copy(update={"reason": "Excluded"})
    assert "PartlyRolledBack" not in conditions(phase=Phase.STEP, excluded=[by_person])
    assert "task sql" in conditions(phase=Phase.STEP, excluded=[by_person])["RolloutInProgress"].message


def test_rolled_back_tells_the_evidence() -> None:
    line = Transition(time="", phase=Phase.ROLLED_BACK, reason="EvaluationFailed", message="qa/leak")
    found = conditions(phase=Phase.ROLLED_BACK, history=[line], excluded=[APART])
    told = found["RolledBack"]
    assert (told.reason, told.message) == ("EvaluationFailed", "rule all: qa/leak")
    assert "PartlyRolledBack" not in found


def test_what_is_in_force_of_a_spec_that_is_not_accepted_is_told() -> None:
    policy = RoutePolicy(
        metadata=Metadata(name="p", namespace="shop", generation=3),
        spec=RoutePolicySpec(model="m", rules=[rule(None)]),
    )
    wrong = (Problem("SuiteNotFound", "EvalSuite 'qa' does not exist", "spec.rules[0]"),)
    seen = PolicySeen(accepted=2, problems=wrong, withdrawn=("abort of rule all",))
    (ready,) = [one for one in status(policy, seen, "2026-01-01T00:00:00Z").conditions if one.type == "Ready"]
    assert (ready.status, ready.reason) == ("False", "NotAccepted")
    assert ready.message.endswith("generation 2 serves, with abort of rule all")
