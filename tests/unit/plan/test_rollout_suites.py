"""Suites run before traffic, at steps that ask, and on demand; what proves nothing holds."""

from __future__ import annotations

import pytest

from sluice_operator.api.guards import Evaluation
from sluice_operator.api.rollout import Exclusion, RollbackScope
from sluice_operator.api.rulestatus import Phase
from sluice_operator.plan.stages import text
from unit.plan.rollout_world import SHADOW, SUITES, WATCH, FakeWorld, rates, rollout, run, steps


def reasons(world: FakeWorld) -> list[str]:
    return [line.reason for line in world.status.history]


def test_the_full_life() -> None:
    world = FakeWorld(rollout(evaluation=SUITES, shadow=SHADOW, watch=WATCH)).settle()
    assert (world.status.phase, world.weight, world.status.held) == (Phase.EVALUATING, 0, "EvaluationRunning")
    assert world.decision is not None
    assert world.decision.evaluate == "Start"
    world.evaluation = run(ended="")
    world.settle()
    assert (world.status.held, world.decision.evaluate) == ("EvaluationRunning", "")
    world.evaluation = run()
    world.settle()
    assert (world.status.phase, world.status.shadow_percent) == (Phase.SHADOWING, 100)
    world.complete_stage().complete_stage()
    assert (world.status.phase, world.status.step, world.weight) == (Phase.STEP, 1, 50)
    world.complete_stage()
    assert (world.status.phase, world.weight) == (Phase.WATCHING, 98)
    world.serve(80, seconds=3601.0)
    world.settle()
    assert (world.status.phase, world.weight) == (Phase.PROMOTED, 100)
    assert reasons(world) == [
        "AttemptStarted",
        "EvaluationPassed",
        "ShadowComplete",
        "StepComplete",
        "WatchStarted",
        "Promoted",
    ]
    assert "qa 10/10 (stable 10/10)" in world.status.history[1].message


def test_a_run_is_wanted_until_it_is_known_and_again_when_its_operator_is_gone() -> None:
    world = FakeWorld(rollout(evaluation=SUITES)).settle()
    assert world.tick().evaluate == "Start"
    world.evaluation = run(ended="")
    assert world.tick().evaluate == ""
    world.restart()
    world.evaluation = None
    assert world.tick().evaluate == "Start"


def test_a_finished_run_outlives_the_operator() -> None:
    world = FakeWorld(rollout(evaluation=SUITES, paused=True)).settle()
    world.evaluation = run()
    world.tick()
    world.restart()
    world.evaluation = None
    assert world.tick().evaluate == ""
    world.edit(paused=False)
    assert world.settle().weight == 10


def test_a_failed_hard_sample_ends_the_attempt_while_the_run_goes_on() -> None:
    world = FakeWorld(rollout(evaluation=SUITES)).settle()
    world.evaluation = run(ended="", failed_hard=["qa/leak"])
    world.tick()
    assert world.status.phase is Phase.ROLLED_BACK
    assert reasons(world)[-1] == "EvaluationFailed"
    assert "qa/leak" in world.status.history[-1].message
    world.edit(evaluation=None)
    world.evaluation = run()
    assert world.settle().weight == 0


@pytest.mark.parametrize("error", ["timed out", ""])
def test_a_run_that_proves_nothing_holds_and_is_tried_again(error: str) -> None:
    """Broken off, or finished without an answer from stable: it never passes."""
    world = FakeWorld(rollout(evaluation=SUITES)).settle()
    stable = [] if not error else rates(("qa", 10, 10))
    world.evaluation = run(error=error, stable=stable, ended=text(world.now))
    assert world.tick().evaluate == ""
    assert (world.status.phase, world.status.held) == (Phase.EVALUATING, "EvaluationIncomplete")
    assert (error or "qa") in world.status.held_message
    assert world.tick(60).evaluate == "Start"
    assert world.status.phase is Phase.EVALUATING


def test_a_task_that_was_not_answered_at_all_is_no_pass() -> None:
    world = FakeWorld(rollout(evaluation=SUITES)).settle()
    world.evaluation = run(stable=rates(("qa", 10, 10), ("sql", 5, 5)))
    world.tick()
    assert world.status.held == "EvaluationIncomplete"
    assert "sql" in world.status.held_message


RATES = [
    # min_pass, max_drop, candidate passed, stable passed of 10; good?
    (0, 0, 9, 9, True),
    (0, 0, 8, 9, False),
    (0, 10, 8, 9, True),
    (0, 10, 7, 9, False),
    (80, 100, 8, 9, True),
    (80, 100, 7, 9, False),
    (100, 0, 10, 10, True),
    (90, 0, 8, 8, False),
]


@pytest.mark.parametrize(("least", "drop", "candidate", "stable", "good"), RATES)
def test_rates_by_task(least: int, drop: int, candidate: int, stable: int, good: bool) -> None:
    asked = Evaluation(suites=["qa"], min_pass_percent=least, max_drop_percent=drop)
    world = FakeWorld(rollout(evaluation=asked)).settle()
    world.evaluation = run(candidate=rates(("qa", 10, candidate)), stable=rates(("qa", 10, stable)))
    world.settle()
    assert (world.status.phase is Phase.STEP) == good
    assert (world.status.phase is Phase.ROLLED_BACK) == (not good)


@pytest.mark.parametrize("scope", list(RollbackScope))
def test_one_bad_task_is_left_out_alone_where_the_rest_is_sound(scope: RollbackScope) -> None:
    world = FakeWorld(rollout(evaluation=SUITES, rollback_scope=scope)).settle()
    world.evaluation = run(
        candidate=rates(("qa", 10, 10), ("sql", 10, 4)), stable=rates(("qa", 10, 10), ("sql", 10, 9))
    )
    world.settle()
    if scope is RollbackScope.RULE:
        assert world.status.phase is Phase.ROLLED_BACK
        return
    assert (world.status.phase, world.weight) == (Phase.STEP, 10)
    assert [(one.task, one.reason) for one in world.status.excluded] == [("sql", "EvaluationFailed")]
    assert "TaskRolledBack" in reasons(world)


def test_all_tasks_bad_is_a_rollback() -> None:
    world = FakeWorld(rollout(evaluation=SUITES)).settle()
    both = (("qa", 10, 1), ("sql", 10, 1))
    world.evaluation = run(candidate=rates(*both), stable=rates(("qa", 10, 9), ("sql", 10, 9)))
    world.tick()
    assert world.status.phase is Phase.ROLLED_BACK


def test_a_run_of_another_attempt_says_nothing() -> None:
    world = FakeWorld(rollout(evaluation=SUITES)).settle()
    world.evaluation = run(attempt="another", failed_hard=["qa/leak"])
    assert world.tick().evaluate == "Start"
    assert world.status.phase is Phase.EVALUATING


def test_suites_that_were_not_in_the_run_are_run() -> None:
    world = FakeWorld(rollout(evaluation=Evaluation(suites=["qa", "six"]))).settle()
    world.evaluation = run()
    assert world.tick().evaluate == "Start"
    world.evaluation = run(suites=["qa@1", "six@2"])
    assert world.settle().weight == 10


@pytest.mark.parametrize("ready", ["candidate_ready", "stable_ready"])
def test_suites_wait_for_both_arms(ready: str) -> None:
    world = FakeWorld(rollout(evaluation=SUITES))
    setattr(world, ready, False)
    world.settle()
    assert world.decision is not None
    assert world.decision.evaluate == ""
    setattr(world, ready, True)
    assert world.tick().evaluate == "Start"


def test_an_evaluation_edited_away_moves_on() -> None:
    world = FakeWorld(rollout(evaluation=SUITES)).settle()
    world.edit(evaluation=None)
    assert world.settle().weight == 10


def test_an_on_demand_run_is_judged_in_the_middle_of_a_step() -> None:
    world = FakeWorld(rollout(evaluation=SUITES)).settle()
    world.evaluation = run()
    world.settle()
    world.evaluation = run("OnDemand", ended="")
    world.complete_stage()
    assert world.weight == 50, "a run on demand holds nothing up"
    world.evaluation = run("OnDemand", failed_hard=["qa/leak"])
    assert world.tick().status.phase is Phase.ROLLED_BACK


def step_with_suites() -> FakeWorld:
    two = [*steps(10), *(one.model_copy(update={"evaluate": True}) for one in steps(50))]
    world = FakeWorld(rollout(evaluation=SUITES, steps=two)).settle()
    world.evaluation = run()
    return world.settle()


def test_a_step_that_asks_for_the_suites_waits_for_its_own_run() -> None:
    world = step_with_suites()
    world.complete_stage()
    assert (world.weight, world.status.held) == (10, "EvaluationRunning")
    assert world.tick().evaluate == "Step/1"
    world.evaluation = run("Step/1", ended="")
    assert world.tick().evaluate == ""
    world.evaluation = run("Step/1")
    assert world.tick().status.weight == 50


def test_a_suite_of_excluded_tasks_alone_holds_nothing_up() -> None:
    """It says nothing of what is left, and never has; without it the rollout would wait for ever."""
    world = step_with_suites()
    world.says("GuardFired", "qa").tick()
    world.complete_stage()
    assert world.tick().evaluate == "Step/1"
    world.evaluation = run("Step/1", candidate=[], stable=[], without=["qa"])
    assert world.tick().status.weight == 50
    assert "qa" in world.status.history[-1].message


def test_a_task_that_is_let_in_again_is_asked_about() -> None:
    world = step_with_suites()
    world.edit(exclude=[Exclusion(task="sql")])
    world.settle()
    world.evaluation = run("Step/1", without=["sql"])
    world.edit(exclude=[])
    world.settle().complete_stage()
    assert (world.weight, world.status.held) == (10, "EvaluationRunning")
    assert world.tick().evaluate == "Step/1"


def test_guards_are_armed_while_a_step_waits_for_its_suites() -> None:
    world = step_with_suites()
    world.complete_stage()
    world.serve(1, seconds=0.1, hard_violations=("json",))
    assert world.tick().status.phase is Phase.ROLLED_BACK


@pytest.mark.parametrize("shadow", [True, False])
def test_the_first_step_accepts_the_run_that_has_only_just_ended(shadow: bool) -> None:
    first = [steps(10)[0].model_copy(update={"evaluate": True})]
    world = FakeWorld(rollout(evaluation=SUITES, steps=first, shadow=SHADOW if shadow else None)).settle()
    world.evaluation = run()
    world.settle()
    if shadow:
        world.complete_stage()
        assert (world.status.phase, world.tick().evaluate) == (Phase.SHADOWING, "Step/0")
        world.evaluation = run("Step/0")
        world.tick()
    assert world.weight == 10
