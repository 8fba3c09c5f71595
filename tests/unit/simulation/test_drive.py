"""The real gates and `decide` under simulated traffic: what they are asked, and that time goes forward."""

from __future__ import annotations

import numpy as np
import pytest

from sluice_operator.api.rollout import CandidateArm, Exclusion, RollbackScope, Rollout, Shadow, Step, Watch
from sluice_operator.api.routepolicy import Rule, Target
from sluice_operator.api.rulestatus import ExclusionStatus, Phase, RuleStatus
from sluice_operator.simulation.campaign import Scenario, simulate, simulate_one
from sluice_operator.simulation.drive import Pace, eligible, run, settled
from sluice_operator.simulation.regression import parse_regression, regress
from sluice_operator.simulation.traffic import Traffic, make_trace

EXACT = Pace(exact=True)
TRAFFIC = Traffic(rate=10.0, tasks={"chat": 0.5, "nl2sql": 0.5})


def rule(*weights: int, seconds: int = 40, samples: int = 5, **changes: object) -> Rule:
    steps = [Step(weight=weight, min_seconds=seconds, min_samples=samples) for weight in weights]
    one = Rollout(candidate=CandidateArm(backend="candidate"), steps=steps, watch=Watch(seconds=0))
    return Rule(name="all", target=Target(backend="stable"), rollout=one.model_copy(update=changes))


def test_a_sound_candidate_goes_through_its_steps_and_is_promoted() -> None:
    done = run(rule(10, 50), make_trace(TRAFFIC, 150.0, 3))
    assert (done.outcome, done.seconds) == ("promoted", 80.0)
    assert [name for _, name in done.stages] == ["Step 1", "Step 2", "Promoted"]
    assert [seconds for seconds, _ in done.stages] == [0.0, 40.0, 80.0]
    assert done.num_candidate == pytest.approx(0.1 * 400 + 0.5 * 400, rel=0.15)
    assert not done.stopped


def test_shadow_and_watch_are_stages_too() -> None:
    shadow = Shadow(percent=50, min_seconds=30, min_samples=5, pairing_percent=0)
    one = rule(50, shadow=shadow, watch=Watch(seconds=30, holdback_percent=10))
    done = run(one, make_trace(TRAFFIC, 200.0, 3))
    assert [name for _, name in done.stages] == ["Shadowing", "Step 1", "Watching", "Promoted"]
    assert done.outcome == "promoted"


def test_the_same_trace_gives_the_same_result() -> None:
    trace = make_trace(TRAFFIC, 100.0, 3)
    assert run(rule(10), trace) == run(rule(10), trace)


def test_a_hard_violation_is_decided_upon_at_its_own_record() -> None:
    trace = regress(make_trace(TRAFFIC, 100.0, 3), parse_regression("hard 100% from 30s"), 3)
    done = run(rule(10, seconds=90), trace, onset=30.0, pace=EXACT)
    assert (done.outcome, done.reason) == ("rolled-back", "HardGateBroken")
    assert (done.num_violations, done.num_told) == (1, 1)
    ends = trace.times + trace.candidate.total
    assert done.seconds == pytest.approx(ends[(trace.times >= 30.0) & (trace.bucket < 0.1)].min(), abs=1e-6)


def test_who_was_sent_is_who_came_before_the_decision() -> None:
    trace = regress(make_trace(TRAFFIC, 100.0, 3), parse_regression("hard 100% from 30s"), 3)
    done = run(rule(10, seconds=90), trace, onset=30.0, pace=EXACT)
    at_candidate = trace.bucket < 0.1
    sent = at_candidate & (trace.times >= 0.0) & (trace.times < done.seconds)
    assert done.num_candidate == sent.sum()
    assert done.num_exposed == (sent & (trace.times >= 30.0)).sum()


def test_a_slow_candidate_is_stopped_soon_after_it_becomes_slow() -> None:
    trace = regress(make_trace(TRAFFIC, 120.0, 3), parse_regression("p95 x10 from 40s"), 3)
    done = run(rule(30, seconds=110), trace, onset=40.0, pace=EXACT)
    assert (done.outcome, done.reason) == ("rolled-back", "GuardFired")
    assert 40.0 < done.seconds < 60.0
    assert 0 < done.num_told <= done.num_exposed


def test_how_time_is_cut_changes_nothing_but_the_moment_of_notice() -> None:
    trace = regress(make_trace(TRAFFIC, 120.0, 3), parse_regression("p95 x10 from 40s"), 3)
    one = rule(30, seconds=110)
    fine, coarse = (run(one, trace, 40.0, Pace(turn_s=turn, exact=True)) for turn in (0.5, 5.0))
    assert fine.seconds == coarse.seconds
    assert (fine.num_exposed, fine.num_told) == (coarse.num_exposed, coarse.num_told)


def test_stages_begin_on_the_second_however_time_is_cut() -> None:
    done = run(rule(10, 50), make_trace(TRAFFIC, 150.0, 3), pace=Pace(turn_s=7.0))
    assert [seconds for seconds, _ in done.stages] == [0.0, 40.0, 80.0]


def test_without_traffic_it_is_held_and_never_promoted() -> None:
    done = run(rule(10, samples=50), make_trace(Traffic(rate=0.2), 120.0, 3))
    assert done.outcome == "unfinished"
    assert done.seconds == 120.0
    assert done.held["NoEvidence"] > 60.0


def test_a_step_for_some_and_what_is_excluded_limit_who_may_get_the_candidate() -> None:
    trace = make_trace(Traffic(tasks={"a": 1.0, "b": 1.0}, tenants={"x": 1.0, "y": 1.0}), 10.0, 3)
    only = rule(10, steps=[Step(weight=10, tenants=["x"]), Step(weight=50)])
    status = RuleStatus(name="all", phase=Phase.STEP, step=0)
    assert eligible(only, status, trace).tolist() == [[True, False], [True, False]]
    gone = ExclusionStatus(task="b", reason="GuardFired", message="", time="2026-01-01T00:00:00Z")
    later = status.model_copy(update={"step": 1, "excluded": [gone]})
    assert eligible(only, later, trace).tolist() == [[True, True], [False, False]]
    by_hand = rule(10, exclude=[Exclusion(task="a", tenant="y")])
    assert eligible(by_hand, status, trace).tolist() == [[True, False], [True, True]]


def test_one_bad_task_goes_back_alone_and_the_rest_may_go_on() -> None:
    mixed = Traffic(rate=20.0, tasks={"chat": 0.8, "nl2sql": 0.2})
    wrong = parse_regression("errors 50% for nl2sql from 30s")
    trace = regress(make_trace(mixed, 150.0, 3), wrong, 3)
    done = run(rule(50, seconds=100), trace, onset=30.0, pace=EXACT)
    assert done.outcome == "narrowed"
    assert done.message.startswith("nl2sql: ")
    on = run(rule(50, seconds=100), trace, onset=30.0, pace=Pace(narrowed_ends=False))
    assert on.seconds > done.seconds
    whole = run(rule(50, seconds=100, rollback_scope=RollbackScope.RULE), trace, onset=30.0, pace=EXACT)
    assert whole.outcome == "rolled-back"


def test_the_status_that_speed_is_measured_with_has_its_step_in_force() -> None:
    status = settled(rule(10))
    assert (status.phase, status.weight) == (Phase.STEP, 10)
    assert status.attempt


def test_runs_differ_by_index_and_not_by_who_runs_them() -> None:
    scenario = Scenario(TRAFFIC, 60.0, rule(10, seconds=20))
    several = simulate(scenario, 3, seed=5)
    assert several[2] == simulate_one(scenario, 5, 2)
    assert len({one.num_candidate for one in several}) > 1


def test_requests_before_the_rollout_are_stables() -> None:
    trace = make_trace(TRAFFIC, 30.0, 3)
    done = run(rule(100, seconds=20), trace)
    assert done.num_candidate <= int(np.sum(trace.times >= 0.0))
