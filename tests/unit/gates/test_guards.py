"""What each kind of guard looks at, and what it does when it has seen enough."""

from __future__ import annotations

import numpy as np
import pytest

from sluice_operator.api.guards import Coverage, Gain, Guard, Metric
from sluice_operator.api.rollout import CandidateArm, Rollout, Step
from sluice_operator.api.routepolicy import Contract, Refusals, Rule, Target
from sluice_operator.api.rulestatus import Phase, RuleStatus
from sluice_operator.gates import GateState, Observation, align, checkpoint, fold, verdict
from sluice_operator.gates.battery import Kind, battery
from sluice_operator.gates.columns import LATENCIES
from unit.gates.test_gate import bad, counts, seen
from unit.gates.traffic import START, at, gate, rule, status

RATES = {
    Metric.ERROR_RATE: "failed", Metric.REFUSAL_RATE: "refused", Metric.NEEDLESS_REFUSAL_RATE: "refused",
    Metric.SCHEMA_FAILURE_RATE: "schema_failed", Metric.TOOL_ARGUMENT_FAILURE_RATE: "tool_failed",
    Metric.TRUNCATION_RATE: "truncated", Metric.INTERRUPTION_RATE: "interrupted", Metric.RETRY_RATE:
    "retried", Metric.REPETITION_RATE: "repeated",
}  # fmt: skip


def guard(metric: Metric, **changes: object) -> Guard:
    return Guard.model_validate({"metric": metric.value, **changes})


def rolled(weight: int, **rollout: object) -> GateState:
    """A gate of a rollout with one step."""
    found = Rollout.model_validate(
        {"candidate": {"backend": "new"}, "steps": [{"weight": max(1, weight)}], "guards": [], **rollout}
    )
    one = Rule(name="all", target=Target(backend="old"), rollout=found)
    return align(None, one, status(weight), START)


@pytest.mark.parametrize("metric", RATES, ids=lambda metric: metric.value)
def test_each_rate_reads_its_flag(metric: Metric) -> None:
    state = gate(guards=[guard(metric)])
    for second in range(10, 30, 4):
        state.take(seen(second, **{RATES[metric]: True}))
        state.take(seen(second + 1))
    assert bad(state) == (5, 0)
    assert verdict(state, at(60)).reason == "GuardFired"
    assert metric.value in verdict(state, at(60)).message


def test_every_metric_is_measured() -> None:
    """A name that nobody measures would never fire."""
    known = {*RATES, Metric.NEGATIVE_FEEDBACK_RATE, Metric.DISAGREEMENT_RATE}
    assert known == {metric for metric in Metric if metric.is_rate}
    assert set(LATENCIES) == {metric for metric in Metric if not metric.is_rate}
    assert {test.metric for test in battery(rule()).tests} == set(Metric) - {Metric.TIME_TO_VERIFIED}
    assert {test.metric for test in battery(rule([guard(metric) for metric in Metric])).tests} == set(Metric)


def test_proper_refusals_are_not_needless() -> None:
    state = gate(guards=[guard(Metric.NEEDLESS_REFUSAL_RATE)], contract=Contract(refusals=Refusals.PROPER))
    for second in range(10, 40, 3):
        state.take(seen(second, refused=True))
    assert bad(state) == (0, 0)


@pytest.mark.parametrize("flag", ["failed", "truncated", "refused"])
def test_what_gave_no_answer_is_not_fast(flag: str) -> None:
    state = gate(guards=[guard(Metric.TTFT)])
    fold(state, [seen(1 + row, candidate=False) for row in range(20)])
    state.take(seen(30, ttft_s=0.001, **{flag: True}))
    assert counts(state) == {"TTFT/p95": 1, "TTFT/p99": 1}


def test_time_to_verified_counts_what_was_verified_and_what_keeps_people_waiting() -> None:
    state = gate(guards=[guard(Metric.TIME_TO_VERIFIED, percentiles=[95])])
    fold(state, [seen(1 + row, candidate=False, verified_s=1.0) for row in range(20)])
    state.take(seen(30, verified_s=1.1))
    state.take(seen(31, total_s=9.0))
    assert counts(state) == {}, "within 1.2 times, and nothing was to be verified"
    state.take(seen(32, verified_s=1.3))
    state.take(seen(33, age_s=0.9, censored=True, first_token=True, ttft_s=None, total_s=None))
    assert counts(state) == {"TimeToVerified/p95": 1}
    state.take(seen(34, age_s=1.3, censored=True, first_token=True, ttft_s=None, total_s=None))
    state.take(seen(35, failed=True))
    assert counts(state) == {"TimeToVerified/p95": 3}, "unverified still, and never"


def test_a_later_verdict_rolls_back() -> None:
    """First tokens come as fast as ever; what can be relied on comes twice as late."""
    state = gate(guards=[guard(Metric.TIME_TO_VERIFIED)])
    for second in range(1, 400):
        state.take(seen(second, candidate=False, verified_s=1.0 + second % 10 / 50))
        state.take(seen(second + 0.5, verified_s=2.0 + second % 10 / 25))
    fired = verdict(state, at(500))
    assert fired.reason == "GuardFired"
    assert "TimeToVerified" in fired.message


def test_an_unsuccessful_request_costs_more_than_any_limit() -> None:
    state = gate(guards=[guard(Metric.COST_PER_SUCCESS, percentiles=[95])])
    fold(state, [seen(1 + row, candidate=False, cost=0.01) for row in range(20)])
    state.take(seen(30, cost=0.0119))
    assert counts(state) == {}
    state.take(seen(31, cost=0.0, truncated=True))
    assert counts(state)["CostPerSuccess/p95"] == 1


def test_one_event_of_a_hard_rate_is_enough_even_if_it_is_stables_too() -> None:
    state = gate(guards=[guard(Metric.SCHEMA_FAILURE_RATE, mode="Hard")])
    state.take(seen(10, candidate=False, schema_failed=True))
    assert verdict(state, at(10)).reason == ""
    state.take(seen(11, schema_failed=True))
    assert verdict(state, at(11)).reason == "HardGateBroken"
    assert verdict(state, at(11)).slice is None


def test_what_is_watched_is_recorded_and_never_fires() -> None:
    state = gate(guards=[guard(Metric.ERROR_RATE, mode="Watch")])
    for second in range(10, 300):
        state.take(seen(second, failed=True))
    assert bad(state)[0] > 100
    assert verdict(state, at(400)).reason == ""


def test_a_guard_of_some_tasks_sees_no_others() -> None:
    state = gate(guards=[guard(Metric.ERROR_RATE, tasks=["code"])])
    state.take(seen(10, task="chat", failed=True))
    assert bad(state) == (0, 0)
    state.take(seen(11, task="code", failed=True))
    assert bad(state) == (1, 0)


def test_a_ceiling_needs_no_stable() -> None:
    """At weight 100 there is nothing to compare with."""
    ceiling = {"value": "2", "percentile": 95}
    state = gate(weight=100, guards=[guard(Metric.TTFT, ceiling=ceiling)])
    fold(state, [seen(10 + row, ttft_s=1.0) for row in range(100)])
    assert verdict(state, at(200)).reason == ""
    fold(state, [seen(200 + row, ttft_s=3.0) for row in range(20)])
    assert verdict(state, at(300)).reason == "GuardFired"
    assert "TTFT/ceiling" in verdict(state, at(300)).message


def test_a_ceiling_that_is_kept_does_not_fire() -> None:
    """4 of 100 are above what 5 of 100 may be."""
    state = gate(weight=100, guards=[guard(Metric.TTFT, ceiling={"value": "2", "percentile": 95})])
    fold(state, [seen(10 + row, ttft_s=9.0 if row % 25 == 7 else 1.0) for row in range(2000)])
    assert state.fired is None


def test_a_ceiling_of_a_rate_is_in_percent() -> None:
    state = gate(weight=100, guards=[guard(Metric.ERROR_RATE, ceiling={"value": "1"})])
    fold(state, [seen(10 + row, failed=row % 100 == 50) for row in range(600)])
    assert state.fired is None
    fold(state, [seen(700 + row, failed=row % 4 == 0) for row in range(60)])
    assert state.fired is not None


def test_a_ceiling_of_feedback_counts_what_comes_after_the_end() -> None:
    state = gate(weight=100, guards=[guard(Metric.NEGATIVE_FEEDBACK_RATE, ceiling={"value": "5"})])
    fold(state, [seen(10 + row) for row in range(60)])
    complaints = [
        seen(10 + row)._replace(time=START.timestamp() + 100 + row, age_s=91.0, ttft_s=None, total_s=None,
                feedback="wrong")
        for row in range(0, 60, 2)
    ]  # fmt: skip
    fold(state, complaints)
    assert state.fired is not None


def test_watching_compares_with_the_holdback() -> None:
    watching = status(98).model_copy(update={"phase": Phase.WATCHING})
    state = align(None, rule([guard(Metric.ERROR_RATE)]), watching, START)
    assert state.share == pytest.approx(0.98)
    state.take(seen(10, failed=True))
    assert bad(state) == (1, 0)
    alone = align(None, rule([guard(Metric.ERROR_RATE)]), watching.model_copy(update={"weight": 100}), START)
    assert alone.share is None


def complaint(second: float, began: float, **changes: object) -> Observation:
    return seen(
        second, age_s=second - began, ttft_s=None, tpot_s=None, total_s=None, feedback="wrong", **changes
    )


def test_feedback_counts_by_when_its_request_began_and_outlives_the_hour() -> None:
    guards = [guard(Metric.NEGATIVE_FEEDBACK_RATE)]
    begun = status().model_copy(update={"stage_since": START.isoformat()})
    state = align(None, rule(guards), begun, START)
    state.take(complaint(50, -5.0))
    assert bad(state) == (0, 0), "it was sent before this stage"
    fold(state, [complaint(100 + row, 5.0 + row) for row in range(3)])
    later = begun.model_copy(update={"num_restarts": 1, "evidence_since": at(3600).isoformat()})
    state = align(state, rule(guards), later, at(3600))
    before = bad(state)[0]
    assert before > 0
    fold(state, [complaint(3700 + 4 * row, 20.0 + row) for row in range(8)])
    assert bad(state)[0] > before
    assert verdict(state, at(4000)).reason == "GuardFired"
    state.take(complaint(100, 5.0)._replace(time=at(3900).timestamp(), age_s=3895.0))
    following = later.model_copy(update={"num_restarts": 2, "step": 1, "weight": 25})
    assert bad(align(state, rule(guards), following, at(4000))) == (0, 0), "another stage, another share"


def test_helpful_is_no_complaint() -> None:
    state = gate(guards=[guard(Metric.NEGATIVE_FEEDBACK_RATE)])
    state.take(complaint(10, 5.0)._replace(feedback="helpful"))
    assert bad(state) == (0, 0)


def test_jitter_of_a_running_request_counts_where_it_was_measured() -> None:
    state = gate(guards=[guard(Metric.INTER_TOKEN_JITTER, percentiles=[95])])
    fold(state, [seen(1 + row, candidate=False, jitter_s=0.01) for row in range(20)])
    running = seen(30, request_id="r", censored=True, jitter_s=0.5, first_token=True, total_s=None)
    state.take(running)
    state.take(running._replace(time=running.time + 1, censored=False, total_s=3.0))
    assert counts(state)["InterTokenJitter/p95"] == 1
    state.take(
        seen(40, request_id="s", censored=True, age_s=9.0, first_token=True, total_s=None, ttft_s=None)
    )
    assert counts(state)["InterTokenJitter/p95"] == 1, "age alone says nothing of jitter"


@pytest.mark.parametrize("seed", range(3))
def test_a_cold_cache_is_compared_with_a_cold_cache(seed: int) -> None:
    """Long uncached prompts take ten times as long at both arms; the candidate, with an empty cache, has
    more. A minute of stable's before it has shown what cold is."""
    state = gate(guards=[guard(Metric.TTFT)])
    rng = np.random.default_rng(seed)
    found = []
    for row in range(-1200, 4000):
        candidate = row >= 0 and bool(rng.random() < 0.1)
        cold = bool(rng.random() < (0.9 if candidate else 0.1))
        value = float(rng.lognormal(0.0, 0.3)) * (1.0 if cold else 0.1)
        found.append(seen(10 + row * 0.05, candidate=candidate, ttft_s=value, request_id=f"r{row}",
                          prompt_tokens=3000, cached_tokens=0 if cold else 2900))  # fmt: skip
    fold(state, found)
    assert state.fired is None


def test_coverage_counts_judged_requests_of_its_kind() -> None:
    wanted = [
        Coverage(name="code", tasks=["code"]), Coverage(name="long", min_prompt_tokens=1000),
        Coverage(name="night", hours_utc="23-01"), Coverage(name="day", hours_utc="08-18"),
    ]  # fmt: skip
    steps = [Step(weight=10, coverage=wanted)]
    one = Rule(
        name="all", target=Target(backend="old"),
        rollout=Rollout(candidate=CandidateArm(backend="new"), steps=steps, guards=[]),
    )  # fmt: skip
    state = align(None, one, status(), START)
    fold(state, [seen(10, task="code"), seen(11, prompt_tokens=1000), seen(12, candidate=False, task="code")])
    state.take(seen(12 * 3600, age_s=60.0))
    found = {one.name: one.num_samples for one in checkpoint(state, status()).coverage}
    assert found == {"code": 1, "long": 1, "night": 2, "day": 1}
    again = align(None, one, checkpoint(state, status()), at(60))
    assert {one.name: one.num_samples for one in again.coverage.status()} == found


def gains(state: GateState, weight: int = 50) -> dict[str, bool]:
    return {one.name: one.shown for one in checkpoint(state, status(weight)).gains}


def test_a_gain_is_shown_and_stays_shown() -> None:
    wanted = [Gain(metric=Metric.TTFT, min_decrease_percent=10).model_dump(mode="json")]
    state = rolled(50, gains=wanted)
    rng = np.random.default_rng(4)
    found = []
    for row in range(1500):
        candidate = bool(rng.random() < 0.5)
        value = float(rng.lognormal(-1.0 if candidate else 0.0, 0.5))
        found.append(seen(10 + row * 0.05, candidate=candidate, ttft_s=value, request_id=f"r{row}"))
    fold(state, found)
    assert gains(state) == {"TTFT/p50": True}
    saved = checkpoint(state, status(50))
    later = saved.model_copy(update={"num_restarts": 1, "gains": [one for one in saved.gains if one.shown]})
    again = align(None, state.rule, RuleStatus.model_validate(later.model_dump(mode="json")), at(200))
    assert again.shown == {"TTFT/p50"}


@pytest.mark.parametrize("better", [1.0, 0.9])
def test_a_gain_that_is_not_there_is_not_shown(better: float) -> None:
    """As fast as stable, or just as much faster as was promised, which is the edge of the claim."""
    wanted = [Gain(metric=Metric.TTFT, min_decrease_percent=10).model_dump(mode="json")]
    for seed in range(8):
        state, rng, found = rolled(50, gains=wanted), np.random.default_rng(seed), []
        for row in range(1000):
            candidate = bool(rng.random() < 0.5)
            value = float(rng.lognormal(0.0, 0.5)) * (better if candidate else 1.0)
            found.append(seen(10 + row * 0.05, candidate=candidate, ttft_s=value, request_id=f"r{row}"))
        fold(state, found)
        assert gains(state) == {"TTFT/p50": False}


def test_fewer_errors_are_a_gain_too() -> None:
    wanted = [Gain(metric=Metric.ERROR_RATE, min_decrease_percent=50).model_dump(mode="json")]
    state = rolled(50, gains=wanted)
    fold(state, [seen(10 + row, candidate=row % 2 == 0, failed=row % 2 == 1) for row in range(60)])
    assert gains(state) == {"ErrorRate": True}


def test_kinds_of_tests_of_a_guard() -> None:
    tests = battery(rule([guard(Metric.TOTAL, ceiling={"value": "5"})])).tests
    assert [test.kind for test in tests] == [Kind.LADDER, Kind.TAIL, Kind.TAIL, Kind.TAIL, Kind.CEILING]
