"""A task or a tenant alone goes back to stable; the rest goes on; a person may do the same."""

from __future__ import annotations

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice_operator.api.rollout import CandidateArm, Exclusion, RollbackScope, Step
from sluice_operator.api.routepolicy import Match
from sluice_operator.api.rulestatus import ExclusionStatus, Phase, RuleStatus
from sluice_operator.plan.scope import Eligibility, covered, eligibility, narrows, nothing_left, told, widens
from unit.plan.rollout_world import SHADOW, WATCH, FakeWorld, rollout, rule, steps


def reasons(world: FakeWorld) -> list[str]:
    return [line.reason for line in world.status.history]


def allowed(world: FakeWorld, task: str = "", tenant: str = "t") -> bool:
    return eligibility(world.rule, world.status).allows(task, tenant)


@pytest.mark.parametrize(
    ("task", "tenant", "reason"),
    [
        ("sql", "", "TaskRolledBack"),
        ("", "a", "TenantRolledBack"),
        ("sql", "a", "SliceRolledBack"),
    ],
)
@pytest.mark.parametrize("why", ["GuardFired", "HardGateBroken"])
def test_a_slice_goes_back_alone(task: str, tenant: str, reason: str, why: str) -> None:
    world = FakeWorld().settle().complete_stage()
    world.serve(30, seconds=10.0)
    world.tick()
    restarts = world.status.num_restarts
    decision = world.says(why, task, tenant).tick()
    status = world.status
    assert (status.phase, status.step, status.weight) == (Phase.STEP, 1, 50)
    assert decision.reduces, "the gateway hears of it first"
    assert [line.reason for line in decision.transitions] == [reason]
    assert "the evidence" in decision.transitions[0].message
    assert (status.num_restarts, status.num_samples, status.guards) == (restarts + 1, 0, [])
    assert not allowed(world, "sql", "a")
    assert allowed(world, "qa", "b")
    world.restart()
    world.settle().complete_stage()
    assert (world.status.phase, world.weight) == (Phase.PROMOTED, 100)
    assert not allowed(world, "sql", "a"), "nor once promoted"
    assert eligibility(world.rule, world.status).excluded == ((task, tenant),)


def test_it_stays_out_over_restarts_and_edits() -> None:
    world = FakeWorld().settle()
    world.says("GuardFired", "sql").tick()
    for edit in ({"guards": []}, {"steps": steps(20, 60)}, {"paused": True}, {"exclude": []}):
        world.edit(**edit)
        world.restart()
        world.settle()
        assert not allowed(world, "sql")


def test_it_stays_out_when_its_attempt_comes_back() -> None:
    world = FakeWorld().settle()
    world.says("GuardFired", "sql").tick()
    world.edit(candidate=CandidateArm(backend="newer"))
    world.settle()
    assert allowed(world, "sql"), "another candidate starts clean"
    world.edit(candidate=CandidateArm(backend="new"))
    world.settle()
    assert (world.weight, allowed(world, "sql")) == (10, False)
    world.edit_rule(rollout=None)
    world.settle()
    world.edit_rule(rollout=rollout())
    assert not allowed(world.settle(), "sql")
    world.edit(attempt=2)
    assert allowed(world.settle(), "sql")


def test_late_evidence_of_what_is_gone_already_changes_nothing() -> None:
    world = FakeWorld().settle()
    world.says("HardGateBroken", "sql").tick()
    before = world.settle().saved
    for task, tenant in (("sql", ""), ("sql", "a")):
        decision = world.says("HardGateBroken", task, tenant).tick()
        assert not decision.transitions
    assert world.saved == before


def test_a_second_slice_follows_the_first() -> None:
    world = FakeWorld().settle()
    world.says("GuardFired", "sql").tick()
    world.says("GuardFired", "", "a").tick()
    assert eligibility(world.rule, world.status).excluded == (("", "a"), ("sql", ""))


def test_scope_rule_takes_everything_back() -> None:
    world = FakeWorld(rollout(rollback_scope=RollbackScope.RULE)).settle()
    world.says("GuardFired", "sql").tick()
    assert (world.status.phase, world.weight) == (Phase.ROLLED_BACK, 0)


@pytest.mark.parametrize(
    "slices", [[("sql", ""), ("qa", "")], [("", "a"), ("", "b")], [("sql", "a"), ("sql", "b"), ("qa", "")]]
)
def test_when_nothing_is_left_the_attempt_is_over(slices: list[tuple[str, str]]) -> None:
    world = FakeWorld(match=Match(tasks=["sql", "qa"], tenants=["a", "b"])).settle()
    for task, tenant in slices:
        assert world.status.phase is Phase.STEP
        world.says("GuardFired", task, tenant).tick()
    assert (world.status.phase, world.weight) == (Phase.ROLLED_BACK, 0)
    assert reasons(world)[-1] == "GuardFired"
    assert world.status.attempt in world.status.rejected


def test_a_step_whose_own_tenants_are_gone_is_over() -> None:
    first = Step(weight=100, tenants=["a"], min_seconds=60, min_samples=10)
    world = FakeWorld(rollout(steps=[first, *steps(10)])).settle()
    assert (allowed(world, "", "a"), allowed(world, "", "b")) == (True, False)
    world.says("GuardFired", "", "a").tick()
    assert world.status.phase is Phase.ROLLED_BACK


def test_low_risk_tenants_first() -> None:
    first = Step(weight=50, tenants=["a"], min_seconds=60, min_samples=10)
    world = FakeWorld(rollout(steps=[first, *steps(10)])).settle()
    world.serve(80, seconds=61.0, tenant="b")
    world.tick()
    assert (world.status.step, world.status.held) == (0, "NoEvidence"), "others' requests are no evidence"
    world.serve(80, seconds=61.0, tenant="a")
    decision = world.tick()
    assert (decision.status.step, decision.status.weight) == (1, 10)
    assert decision.increases, "others may get it now: write it down first"
    assert allowed(world, "", "b")


def test_a_steps_audience_edited_starts_its_evidence_anew() -> None:
    first = Step(weight=50, tenants=["a"], min_seconds=60, min_samples=10)
    world = FakeWorld(rollout(steps=[first, *steps(10)])).settle()
    world.serve(30, tenant="a")
    world.tick()
    world.edit(steps=[first.model_copy(update={"tenants": ["a", "b"]}), *steps(10)])
    decision = world.tick()
    assert (decision.transitions[0].reason, decision.status.num_samples) == ("GatesChanged", 0)


@pytest.mark.parametrize("stage", ["shadow", "step", "watch", "promoted"])
def test_a_persons_exclusion_is_in_force_in_the_next_decision_and_may_be_taken_back(stage: str) -> None:
    world = FakeWorld(rollout(shadow=SHADOW, watch=WATCH)).settle()
    for _ in range({"shadow": 0, "step": 1, "watch": 3, "promoted": 3}[stage]):
        world.complete_stage()
    if stage == "promoted":
        world.serve(80, seconds=3601.0)
        assert world.settle().status.phase is Phase.PROMOTED
    phase = world.status.phase
    world.edit(exclude=[Exclusion(task="sql")])
    assert not allowed(world, "sql"), "routes follow the spec"
    decision = world.tick()
    assert [line.reason for line in decision.transitions] == ["Excluded"]
    assert [(one.task, one.reason) for one in decision.status.excluded] == [("sql", "Excluded")]
    assert decision.status.phase is phase
    world.edit(exclude=[])
    assert allowed(world, "sql")
    decision = world.tick()
    assert [line.reason for line in decision.transitions] == ["ExclusionWithdrawn"]
    assert decision.status.excluded == []
    assert decision.status.phase is phase


def test_an_exclusion_from_the_start_is_there_from_the_start() -> None:
    world = FakeWorld(rollout(exclude=[Exclusion(tenant="a")]))
    assert [one.tenant for one in world.tick().status.excluded] == ["a"]
    assert "Excluded" not in reasons(world.settle())


def test_a_person_cannot_take_back_what_the_evidence_excluded() -> None:
    world = FakeWorld(rollout(exclude=[Exclusion(task="sql")])).settle()
    world.says("GuardFired", "sql").tick()
    world.edit(exclude=[])
    assert not allowed(world.settle(), "sql")


def test_an_exclusion_of_everybody_by_a_person_holds_and_ends_nothing() -> None:
    world = FakeWorld(match=Match(tasks=["sql"])).settle()
    world.edit(exclude=[Exclusion(task="sql")])
    world.tick()
    world.serve(80, seconds=61.0, task="sql")
    world.tick()
    assert (world.status.phase, world.status.held) == (Phase.STEP, "NoEvidence")
    assert "task sql" in world.status.held_message


def test_a_slice_and_readiness_in_one_decision() -> None:
    """Whatever else happens, a candidate that is not ready has no traffic."""
    world = FakeWorld().settle()
    world.candidate_ready = False
    world.says("GuardFired", "sql").tick()
    assert (world.weight, allowed(world, "sql")) == (0, False)


def test_human_words_come_first() -> None:
    world = FakeWorld().settle()
    world.edit(abort=True)
    decision = world.says("GuardFired", "sql").tick()
    assert (decision.status.phase, [line.reason for line in decision.transitions]) == (
        Phase.ABORTED,
        ["Aborted"],
    )


# Who is covered


PAIRS = st.tuples(st.sampled_from(["", "x", "y"]), st.sampled_from(["", "a", "b"])).filter(any)


@given(st.lists(PAIRS, max_size=4), st.sampled_from(["", "x", "y"]), st.sampled_from(["", "a", "b"]))
def test_covered_is_what_it_says(excluded: list[tuple[str, str]], task: str, tenant: str) -> None:
    matches = [one for one in excluded if one[0] in ("", task) and one[1] in ("", tenant)]
    assert covered(excluded, task, tenant) == bool(matches)


@given(st.lists(PAIRS, max_size=4), st.lists(PAIRS, max_size=4))
def test_widening_is_that_somebody_new_may_get_it(
    old: list[tuple[str, str]], new: list[tuple[str, str]]
) -> None:
    before, after = Eligibility(tuple(old)), Eligibility(tuple(new))
    everybody = [(task, tenant) for task in ("", "x", "y", "z") for tenant in ("", "a", "b", "c")]
    gains = any(after.allows(*one) and not before.allows(*one) for one in everybody)
    if gains:
        assert widens(before, after)
        assert narrows(after, before)


def test_limits_widen_and_narrow() -> None:
    some, all_ = Eligibility(tenants=("a",)), Eligibility()
    assert widens(some, all_)
    assert not widens(all_, some)
    assert narrows(all_, some)
    assert widens(Eligibility(tasks=("x",)), Eligibility(tasks=("y",)))
    assert not widens(some, some)


def test_nothing_left_needs_all_of_a_product() -> None:
    both = rule(None, match=Match(tasks=["x", "y"], tenants=["a"]))
    assert not nothing_left(both, None, [("x", "a")])
    assert nothing_left(both, None, [("x", "a"), ("y", "")])
    assert not nothing_left(rule(None), None, [("x", ""), ("y", "")]), "there may be other tasks"
    assert nothing_left(rule(None), Step(weight=1, tasks=["x"]), [("x", "")])


def test_eligibility_of_a_rule_without_a_rollout() -> None:
    status = RuleStatus(name="all", excluded=[ExclusionStatus(task="x", reason="r", message="", time="")])
    assert eligibility(rule(None), status) == Eligibility()


def test_slices_in_words() -> None:
    assert told([("x", ""), ("", "a"), ("x", "a")]) == "task x, tenant a, task x of tenant a"
