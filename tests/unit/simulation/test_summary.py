"""Figures and advice from results made by hand."""

from __future__ import annotations

import pytest

from sluice_operator.api.rollout import CandidateArm, Consent, Rollout, Shadow, Step, Watch
from sluice_operator.api.routepolicy import RoutePolicySpec, Rule, Target
from sluice_operator.simulation.prepare import PrepareError, pick_rule, prepare
from sluice_operator.simulation.result import Result
from sluice_operator.simulation.summary import advice, cause, spread, step_powers, summarise


def rule(name: str = "all", rollout: bool = True, **changes: object) -> Rule:
    one = Rollout(
        candidate=CandidateArm(backend="new"),
        steps=[Step(weight=weight, min_seconds=60, min_samples=1) for weight in (5, 50)],
        watch=Watch(seconds=0),
    )
    return Rule(
        name=name,
        target=Target(backend="old"),
        rollout=one.model_copy(update=changes) if rollout else None,
    )


def stop(seconds: float, exposed: int = 10, message: str = "TTFT/p95: worse") -> Result:
    return Result("rolled-back", seconds, "GuardFired", message, num_exposed=exposed, num_told=exposed)


def test_a_stop_before_the_regression_is_false_and_after_it_a_detection() -> None:
    results = [stop(50.0), stop(130.0, 20), stop(150.0, 40), Result("promoted", 200.0, num_exposed=90)]
    one = summarise(results, onset=100.0)
    assert (one.false_stops.num, one.false_stops.total) == (1, 4)
    assert (one.detected.num, one.detected.total) == (2, 3)
    assert (one.seconds_to_stop.median, one.seconds_to_stop.max) == (40.0, 50.0)
    assert (one.exposed.median, one.exposed.max) == (40.0, 90.0)
    assert (one.told.median, one.told.max) == (30.0, 40.0)
    assert one.reasons == {"TTFT/p95": 3}


def test_without_a_regression_each_stop_is_false() -> None:
    one = summarise(
        [stop(50.0), Result("narrowed", 60.0, message="nl2sql: x"), Result("promoted", 1.0)], None
    )
    assert one.false_stops.num == 2
    assert one.narrowed == 1
    assert one.detected.total == 0


def test_spread_by_hand() -> None:
    """Of 1 … 20 the 95th percentile is 19."""
    one = spread([float(value) for value in range(1, 21)])
    assert (one.median, one.p95, one.max) == (10.5, 19.0, 20.0)
    assert spread([]).max == 0.0


def test_mean_seconds_held() -> None:
    results = [Result("promoted", 10.0, held={"NoEvidence": 30.0}), Result("promoted", 10.0)]
    assert summarise(results, None).held == {"NoEvidence": 15.0}


def test_the_cause_is_the_guards_name_or_the_reason() -> None:
    assert cause(stop(1.0, message="Total/p99: 5 of 6")) == "Total/p99"
    assert cause(Result("rolled-back", 1.0, "HardGateBroken", "no colon here")) == "HardGateBroken"


def said(sound: list[Result], bad: list[Result] | None, onset: float = 0.0) -> str:
    one = summarise(bad, onset) if bad is not None else None
    return " ".join(advice(summarise(sound, None), one, rule(), 20.0, 120.0, onset))


GOOD = [Result("promoted", 120.0)] * 100


def test_advice_when_sound_candidates_are_stopped() -> None:
    assert "more often than alpha (0.01)" in said([stop(10.0)] * 10 + GOOD[:90], None)


def test_advice_says_what_no_stop_in_so_many_runs_means() -> None:
    """1 - 0.025^(1/100) = 3.6 %."""
    assert "below 3.6%" in said(GOOD, None)


def test_advice_when_most_are_promoted() -> None:
    """5 % of 20/s for 60 s are 60 requests."""
    assert "sends about 60 requests" in said(GOOD, GOOD)


def test_advice_when_some_are_promoted() -> None:
    told = said(GOOD, [stop(50.0, 200)] * 80 + GOOD[:20])
    assert "One in 5 such candidates is promoted" in told
    assert "above 200" in told


def test_advice_when_only_later_steps_see_it() -> None:
    assert "users of the later steps are exposed too" in said(GOOD, [stop(90.0, 200)] * 100)


def test_advice_when_evidence_is_what_it_waits_for() -> None:
    waiting = [Result("promoted", 200.0, held={"NoEvidence": 80.0})] * 100
    assert "held 80 s by NoEvidence" in said(waiting, None)


def test_each_step_says_what_it_can_see() -> None:
    """5 % of 20/s for 60 s are 60 requests, 50 % are 600; minSamples counts where it is more."""
    steps = [Step(weight=5, min_seconds=60, min_samples=200), Step(weight=50, min_seconds=60, min_samples=1)]
    first, second = step_powers(rule(steps=steps), 20.0)
    assert first.startswith("Step 1, 5 %: 200 candidate requests notice p95 ×")
    assert second.startswith("Step 2, 50 %: 600 candidate requests notice p95 ×")


def test_what_needs_people_is_left_out_and_said() -> None:
    steps = [Step(weight=5, consent=Consent.MANUAL, min_seconds=60)]
    one = prepare(
        rule(steps=steps, paused=True, shadow=Shadow(min_seconds=30), watch=Watch(seconds=604_800)), 600
    )
    assert one.min_seconds == 30 + 60 + 600
    assert one.rule.rollout is not None
    assert not one.rule.rollout.paused
    assert one.rule.rollout.steps[0].consent is Consent.AUTOMATIC
    told = "; ".join(one.notes)
    for word in ("approval", "paused", "pairs", "600 s instead of 604800 s"):
        assert word in told


def test_the_rule_is_named_where_several_have_a_rollout() -> None:
    spec = RoutePolicySpec(model="m", rules=[rule("a"), rule("b"), rule("c", rollout=False)])
    assert pick_rule(spec, "b").name == "b"
    with pytest.raises(PrepareError, match="--rule: a, b"):
        pick_rule(spec, "")
    with pytest.raises(PrepareError, match="no rollout in c"):
        pick_rule(spec, "c")
    with pytest.raises(PrepareError, match="no rule with a rollout"):
        pick_rule(RoutePolicySpec(model="m", rules=[rule(rollout=False)]), "")
