"""What counts, how often, and what a restart remembers."""

from __future__ import annotations

import json
import time
from dataclasses import replace
from datetime import timedelta

import pytest

from sluice_operator.api.routepolicy import Guard, Metric, Phase, RuleStatus
from sluice_operator.gates import ArmName, GateState, Observation, align, checkpoint, deafen, fold, verdict
from sluice_operator.gates.guard import guard_names
from sluice_operator.gates.window import StableWindow
from unit.gates import traffic
from unit.gates.traffic import START, at, gate, rule, status, warm

TTFT = [Guard(metric=Metric.TTFT)]
ERRORS = [Guard(metric=Metric.ERROR_RATE, max_increase_percent=0)]


def seen(second: float, candidate: bool = True, **changes: object) -> Observation:
    """A request of 1 s that ended `second` seconds after the start, good by default."""
    base = Observation(
        time=START.timestamp() + second, request_id=f"{candidate}{second}", age_s=1.0, attempt="a",
        arm=ArmName.CANDIDATE if candidate else ArmName.STABLE, ttft_s=0.1, tpot_s=0.01, total_s=0.5,
    )
    return replace(base, **changes)  # type: ignore[arg-type]


def bad(state: GateState) -> tuple[int, int]:
    """Bad events of the candidate and of stable at the first guard."""
    return state.guards[0].num_bad_candidate, state.guards[0].num_bad_stable


def test_quantile_is_an_order_statistic() -> None:
    window = StableWindow()
    for value in range(1, 21):
        window.add(0.0, float(value))
    assert window.quantile(95, 0.0) == 19.0
    assert window.quantile(50, 0.0) == 10.0
    assert window.quantile(99, 0.0) == 20.0


def test_quantile_needs_samples_that_are_concurrent() -> None:
    window = StableWindow()
    for index in range(19):
        window.add(0.0, float(index))
    assert window.quantile(95, 0.0) is None
    window.add(0.0, 3.0)
    assert window.quantile(95, 1.0) is not None
    assert window.quantile(95, 700.0) is None


def test_a_sample_is_judged_by_those_before_it_only() -> None:
    """The slowest stable request ever is above the threshold that it will itself shift."""
    state = gate(guards=TTFT)
    for index in range(20):
        state.take(seen(1 + index, candidate=False, ttft_s=0.1))
    assert bad(state) == (0, 0)
    state.take(seen(30, candidate=False, ttft_s=0.100001))
    assert bad(state) == (0, 1)


def test_nothing_counts_before_there_is_a_threshold() -> None:
    state = gate(guards=TTFT)
    state.take(seen(1, ttft_s=99.0))
    assert bad(state) == (0, 0)
    assert state.num_samples == 0


def test_within_tolerance_is_not_worse() -> None:
    state = gate(guards=[Guard(metric=Metric.TTFT, max_increase_percent=20)])
    for index in range(20):
        state.take(seen(1 + index, candidate=False, ttft_s=0.1))
    state.take(seen(30, ttft_s=0.119))
    assert bad(state) == (0, 0)
    state.take(seen(31, ttft_s=0.121))
    assert bad(state) == (1, 0)


def test_a_request_counts_once_whoever_reports_it() -> None:
    """Running past the limit, then failed at the gateway, then ended by the pod's account: one bad event."""
    state = warm(gate())
    running = seen(10, request_id="r", age_s=9.0, censored=True, ttft_s=None, tpot_s=None, total_s=None)
    state.take(running)
    state.take(replace(running, time=running.time + 1, age_s=10.0))
    state.take(seen(12, request_id="r", failed=True, age_s=11.0, total_s=11.0))
    state.take(seen(13, request_id="r", age_s=12.0, ttft_s=10.0, total_s=12.0))
    counts = {guard.name: guard.num_bad_candidate for guard in state.guards}
    assert counts == {"TTFT/p95": 1, "TimePerToken/p95": 1, "Total/p95": 1, "ErrorRate": 1}


def test_the_same_request_mirrored_counts_for_each_arm() -> None:
    state = gate(weight=0, shadow_percent=100, guards=ERRORS)
    state.take(seen(10, request_id="r", mirror=True, failed=True))
    state.take(seen(10, candidate=False, request_id="r", failed=True))
    assert bad(state) == (1, 1)


def test_a_conversation_counts_once() -> None:
    state = gate(guards=ERRORS)
    for second in range(10, 15):
        state.take(seen(second, unit="u", failed=True))
    assert bad(state) == (1, 0)


def test_still_running_counts_as_slow_once_it_is_past_the_limit() -> None:
    state = warm(gate(guards=TTFT))
    limit = state.guards[0].limit(True, at(10).timestamp())
    assert limit is not None
    running = seen(10, censored=True, age_s=limit * 0.9, ttft_s=None, tpot_s=None, total_s=None)
    state.take(running)
    assert bad(state) == (0, 0)
    state.take(replace(running, age_s=limit * 1.1))
    assert bad(state) == (1, 0)


def test_a_first_token_closes_the_question_of_its_time() -> None:
    state = warm(gate(guards=TTFT))
    state.take(seen(10, censored=True, age_s=9.0, first_token=True, ttft_s=None, total_s=None))
    assert bad(state) == (0, 0)


def test_a_client_that_left_early_says_nothing_and_one_that_waited_long_does() -> None:
    state = warm(gate())
    gone = {"cancelled": True, "ttft_s": None, "tpot_s": None}
    state.take(seen(10, age_s=0.01, total_s=0.01, **gone))
    assert all(guard.num_bad_candidate == 0 for guard in state.guards)
    state.take(seen(20, age_s=9.0, total_s=9.0, **gone))
    counts = {guard.name: guard.num_bad_candidate for guard in state.guards}
    assert counts == {"TTFT/p95": 1, "TimePerToken/p95": 0, "Total/p95": 1, "ErrorRate": 0}
    assert state.num_samples == 0


def test_a_second_contributes_little() -> None:
    state = gate(guards=ERRORS)
    for index in range(50):
        state.take(seen(10 + index / 100, failed=True))
    assert bad(state) == (3, 0)
    assert state.fired is None


def test_a_long_outage_of_the_candidate_fires() -> None:
    state = gate(guards=ERRORS)
    for index in range(50):
        state.take(seen(10 + index / 10, failed=True))
    assert state.fired is not None
    assert verdict(state, at(15)).reason == "GuardFired"
    assert "ErrorRate" in verdict(state, at(15)).message


def test_an_outage_of_both_arms_does_not_fire() -> None:
    """All requests fail for a minute, a tenth of them the candidate's."""
    state = gate(guards=ERRORS)
    for index in range(600):
        state.take(seen(10 + index / 10, candidate=index % 10 == 3, failed=True))
    assert state.fired is None


def test_evidence_of_another_attempt_counts_for_nothing() -> None:
    state = warm(gate())
    for second in range(10, 40):
        state.take(seen(second, attempt="earlier", failed=True, hard_violations=("sluice/leak",)))
    assert all(guard.num_bad_candidate == 0 for guard in state.guards)
    assert verdict(state, at(60)).reason == ""


def test_requests_assigned_before_the_stage_count_for_nothing() -> None:
    state = gate(guards=ERRORS)
    state.take(seen(10, age_s=11.0, failed=True))
    assert bad(state) == (0, 0)


def test_mirrors_count_in_the_shadow_stage_only() -> None:
    live, shadow = gate(guards=ERRORS), gate(weight=0, shadow_percent=100, guards=ERRORS)
    live.take(seen(10, failed=True, mirror=True))
    shadow.take(seen(10, failed=True, mirror=False))
    assert bad(live) == bad(shadow) == (0, 0)


def test_at_full_weight_there_is_nothing_to_compare_with() -> None:
    state = gate(weight=100, guards=ERRORS)
    for second in range(10, 200):
        state.take(seen(second, failed=True))
    assert state.fired is None
    state.take(seen(300))
    assert state.num_samples == 1


def test_failures_are_evidence_but_never_samples() -> None:
    state = warm(gate())
    state.take(seen(10, failed=True))
    assert state.num_samples == 0
    state.take(seen(11))
    state.take(seen(11))
    assert state.num_samples == 1


def test_a_held_candidates_last_requests_still_count() -> None:
    """Its pod died and its weight went to 0; what had been sent to it fails a little later."""
    state = gate(guards=ERRORS)
    state = align(state, rule(ERRORS), status(0), at(10))
    state.take(seen(12, age_s=3.0, failed=True))
    assert bad(state) == (1, 0)
    state.take(seen(20, candidate=False, age_s=1.0, failed=True))
    assert bad(state) == (1, 0), "stable alone was assigned then"


def test_a_lowered_weight_waits_for_the_gateway() -> None:
    state = gate(weight=50, guards=ERRORS)
    state = align(state, rule(ERRORS), status(10), at(10))
    state.take(seen(11.5, age_s=1.0, failed=True))
    assert bad(state) == (0, 0)
    state.take(seen(12.5, age_s=1.0, failed=True))
    assert bad(state) == (1, 0)


def test_a_restart_goes_on_where_it_was() -> None:
    """Through JSON, as the API server keeps it."""
    state = warm(gate(guards=ERRORS))
    for second in range(10, 13):
        state.take(seen(second, failed=True))
    saved = checkpoint(state, status())
    text = json.dumps(saved.model_dump(mode="json", by_alias=True))
    restored = align(None, rule(ERRORS), RuleStatus.model_validate_json(text), at(20))
    assert bad(restored) == (3, 0)
    assert restored.guards[0].e_value == pytest.approx(state.guards[0].e_value, rel=1e-6)
    for second in range(10, 13):
        restored.take(seen(second, failed=True))
    assert bad(restored) == (3, 0), "the pod's stream repeats what was counted already"
    restored.take(seen(25, failed=True))
    assert bad(restored) == (4, 0)


def test_a_restart_of_evidence_forgets_wealth_and_keeps_stables_window() -> None:
    state = warm(gate(guards=TTFT))
    for second in range(10, 12):
        state.take(seen(second, ttft_s=9.0))
    fresh = align(state, rule(TTFT), status(num_restarts=1), at(20))
    assert bad(fresh) == (0, 0)
    assert fresh.guards[0].limit(True, at(20).timestamp()) is not None
    assert fresh.threshold == pytest.approx(4 * state.threshold)


def test_what_slow_is_is_known_before_a_rollout_begins() -> None:
    """Else the first twenty stable requests of each rollout pass unjudged, and the candidate's with them."""
    alone = rule().model_copy(update={"rollout": None})
    before = status().model_copy(update={"attempt": "", "phase": Phase.STABLE, "weight": 0})
    state = align(None, alone, before, at(0))
    fold(state, [seen(second / 10, candidate=False, attempt="") for second in range(20)])
    begun = align(state, rule(TTFT), status(), at(20))
    assert begun.guards[0].limit(True, at(20).timestamp()) is not None


def test_another_stable_arm_has_its_own_window() -> None:
    state = warm(gate(guards=TTFT))
    other = status().model_copy(update={"attempt": "b", "stable": status().candidate})
    assert align(state, rule(TTFT), other, at(20)).guards[0].limit(True, at(20).timestamp()) is None


def test_align_is_idempotent() -> None:
    state = warm(gate())
    state.take(seen(10, failed=True))
    assert align(state, rule(), status(), at(11)) is state
    assert state.since == START.timestamp()


def test_checkpoint_of_another_attempt_changes_nothing() -> None:
    other = status().model_copy(update={"attempt": "b"})
    assert checkpoint(gate(), other) is other


def test_asking_changes_nothing() -> None:
    state = warm(gate())
    state.take(seen(10, failed=True))
    before = checkpoint(state, status())
    for _ in range(3):
        verdict(state, at(20))
    assert checkpoint(state, status()) == before


def test_guard_names_are_unique() -> None:
    guards = [Guard(metric=Metric.TTFT), Guard(metric=Metric.TTFT, percentile=50), Guard(metric=Metric.TTFT)]
    assert guard_names([*guards, *ERRORS]) == ["TTFT/p95", "TTFT/p50", "TTFT/p95#2", "ErrorRate"]


def test_no_guards_still_count_samples() -> None:
    state = fold(gate(guards=[]), [seen(10), seen(11, candidate=False)])
    assert (state.num_samples, state.num_stable_samples) == (1, 1)
    assert verdict(state, START + timedelta(seconds=20)).reason == ""


def test_ten_thousand_records_fold_quickly() -> None:
    """About 5 µs a record on an idle core; the bound leaves room for a busy machine."""
    state = warm(gate())
    records = traffic.observations(traffic.Traffic(seconds=520), 1)[:10_000]
    begin = time.process_time()
    fold(state, records)
    assert time.process_time() - begin < 0.25


def test_while_stable_cannot_be_heard_the_candidate_is_not_blamed_but_for_its_form() -> None:
    """Stable's pods are slow to tell: all that is heard of is the candidate's, and proves nothing."""
    state = warm(gate(guards=TTFT))
    before = bad(state)
    for index in range(40):
        now = at(100 + index)
        deafen(state, now)
        state.take(seen(100 + index, ttft_s=9.0, age_s=9.0))
    assert bad(state) == before
    assert not verdict(state, at(140)).reason
    for index in range(40):
        state.take(seen(150 + index, candidate=index % 2 == 0, ttft_s=9.0, age_s=9.0))
    assert bad(state) > before, "heard again, it counts"
    state = warm(gate(guards=TTFT))
    deafen(state, at(100))
    state.take(seen(100, hard_violations=("sluice/leak",)))
    assert verdict(state, at(100)).reason == "HardGateBroken"
