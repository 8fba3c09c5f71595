"""What counts, how often, and what a restart remembers."""

from __future__ import annotations

import json
from datetime import timedelta

import numpy as np
import pytest

from sluice_operator.api.guards import Guard, Metric
from sluice_operator.api.rulestatus import Phase, RuleStatus
from sluice_operator.gates import ArmName, GateState, Observation, align, checkpoint, deafen, fold, verdict
from sluice_operator.gates.battery import battery, hourly_part, jump_parts
from unit.gates.traffic import START, at, gate, rule, status, warm

TTFT = [Guard(metric=Metric.TTFT, percentiles=[95])]
ERRORS = [Guard(metric=Metric.ERROR_RATE, max_increase_percent=0)]


def seen(second: float, candidate: bool = True, **changes: object) -> Observation:
    """A request of 1 s that ended `second` seconds after the start, good by default."""
    base = Observation(
        time=START.timestamp() + second,
        request_id=f"{candidate}{second}",
        age_s=1.0,
        attempt="a",
        arm=ArmName.CANDIDATE if candidate else ArmName.STABLE,
        ttft_s=0.1,
        tpot_s=0.01,
        total_s=0.5,
    )
    return base._replace(**changes)  # type: ignore[arg-type]


def bad(state: GateState, name: str = "") -> tuple[int, int]:
    """Bad events of the candidate and of stable at a test, the first guard's if it is not named."""
    tests = [test.name for test in state.evidence.battery.tests]
    index = tests.index(name) if name else 0
    stable, candidate = state.evidence.bad(0, index)
    return candidate, stable


def counts(state: GateState) -> dict[str, int]:
    """The candidate's bad events by test, without those that have none."""
    found = {one.name: one.num_bad_candidate for one in checkpoint(state, status()).guards}
    return {name: num for name, num in found.items() if num}


def limit(state: GateState, second: float = 10.0) -> float:
    """Above what the candidate's time to first token is slow."""
    state.take(seen(second, task="chat"))
    index = [test.name for test in state.evidence.battery.tests].index("TTFT/p95")
    found = state.evidence.newest_limit(index)
    assert found is not None
    return found


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
    state = gate(guards=[Guard(metric=Metric.TTFT, percentiles=[95], max_increase_percent=20)])
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
    state.take(running._replace(time=running.time + 1, age_s=10.0))
    state.take(seen(12, request_id="r", failed=True, age_s=11.0, total_s=11.0))
    state.take(seen(13, request_id="r", age_s=12.0, ttft_s=10.0, total_s=12.0))
    found = counts(state)
    assert found.pop("ErrorRate") == 1
    assert set(found.values()) == {1}
    assert {"TTFT/p95", "TimePerToken/p99", "Total/far"} <= set(found)


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
    most = limit(state)
    running = seen(10, censored=True, age_s=most * 0.9, task="chat", ttft_s=None, tpot_s=None, total_s=None)
    state.take(running)
    assert bad(state) == (0, 0)
    state.take(running._replace(age_s=most * 1.1))
    assert bad(state) == (1, 0)


def test_a_first_token_closes_the_question_of_its_time() -> None:
    state = warm(gate(guards=TTFT))
    state.take(seen(10, censored=True, age_s=9.0, first_token=True, ttft_s=None, total_s=None))
    assert bad(state) == (0, 0)


def test_a_client_that_left_early_says_nothing_and_one_that_waited_long_does() -> None:
    state = warm(gate())
    gone = {"cancelled": True, "ttft_s": None, "tpot_s": None}
    state.take(seen(10, age_s=0.01, total_s=0.01, **gone))
    assert not counts(state)
    state.take(seen(20, age_s=9.0, total_s=9.0, **gone))
    assert {"TTFT/p95": 1, "Total/p95": 1}.items() <= counts(state).items()
    assert not {"TimePerToken/p95", "ErrorRate"} & set(counts(state))
    assert state.num_samples == 0


def test_a_second_contributes_little() -> None:
    state = gate(guards=ERRORS)
    for index in range(50):
        state.take(seen(10 + index / 100, failed=True))
    assert bad(state) == (2, 0)
    assert state.fired is None


def test_a_long_outage_of_the_candidate_fires() -> None:
    state = gate(guards=ERRORS)
    for index in range(50):
        state.take(seen(10 + index / 10, failed=True))
    assert state.fired is not None
    assert verdict(state, at(15)).reason == "GuardFired"
    assert "ErrorRate" in verdict(state, at(15)).message


@pytest.mark.parametrize("seed", range(8))
def test_an_outage_of_both_arms_does_not_fire(seed: int) -> None:
    """All requests fail for a minute, a tenth of them the candidate's."""
    state = gate(guards=ERRORS)
    candidate = np.random.default_rng(seed).random(600) < 0.1
    fold(state, [seen(10 + row / 10, candidate=bool(one), failed=True) for row, one in enumerate(candidate)])
    assert state.fired is None


def test_evidence_of_another_attempt_counts_for_nothing() -> None:
    state = warm(gate())
    for second in range(10, 40):
        state.take(seen(second, attempt="earlier", failed=True, hard_violations=("sluice/leak",)))
    assert not counts(state)
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
    for second in range(10, 16, 2):
        state.take(seen(second, failed=True))
    saved = checkpoint(state, status())
    text = json.dumps(saved.model_dump(mode="json", by_alias=True))
    restored = align(None, rule(ERRORS), RuleStatus.model_validate_json(text), at(20))
    assert bad(restored) == (3, 0)
    assert restored.evidence.bank.e_values()[0] == pytest.approx(state.evidence.bank.e_values()[0], rel=1e-6)
    for second in range(10, 16, 2):
        restored.take(seen(second, failed=True))
    assert bad(restored) == (3, 0), "the pod's stream repeats what was counted already"
    restored.take(seen(25, failed=True))
    assert bad(restored) == (4, 0)


def test_people_read_of_failures_where_most_of_what_was_slow_had_failed() -> None:
    """A failed request counts as slow for every latency guard, which would hide what is the matter."""
    guards = [Guard(metric=Metric.TTFT), Guard(metric=Metric.TOTAL), Guard(metric=Metric.ERROR_RATE)]
    state = warm(gate(guards=guards))
    for second in range(10, 60):
        state.take(seen(second, failed=True, ttft_s=None, tpot_s=None))
    assert verdict(state, at(60)).message.startswith("ErrorRate: ")
    slow = warm(gate(guards=guards))
    for second in range(10, 60):
        slow.take(seen(second, ttft_s=9.0, total_s=9.5, age_s=9.5))
    assert not verdict(slow, at(60)).message.startswith("ErrorRate")


def test_a_restart_of_evidence_forgets_wealth_and_keeps_stables_window() -> None:
    state = warm(gate(guards=TTFT))
    for second in range(10, 12):
        state.take(seen(second, ttft_s=9.0))
    fresh = align(state, rule(TTFT), status(num_restarts=1), at(20))
    assert bad(fresh) == (0, 0)
    assert limit(fresh, 30) > 0.0
    assert fresh.threshold > 0.9 * state.threshold


def test_what_slow_is_is_known_before_a_rollout_begins() -> None:
    """Else the first twenty stable requests of each rollout pass unjudged, and the candidate's with them."""
    alone = rule().model_copy(update={"rollout": None})
    before = status().model_copy(update={"attempt": "", "phase": Phase.STABLE, "weight": 0})
    state = align(None, alone, before, at(0))
    fold(state, [seen(second / 10, candidate=False, attempt="") for second in range(20)])
    begun = align(state, rule(TTFT), status(), at(20))
    begun.take(seen(30, ttft_s=0.2))
    assert bad(begun) == (1, 0)


def test_another_stable_arm_has_its_own_window() -> None:
    state = warm(gate(guards=TTFT))
    other = status().model_copy(update={"attempt": "b", "stable": status().candidate})
    state = align(state, rule(TTFT), other, at(20))
    state.take(seen(30, attempt="b", ttft_s=99.0))
    assert bad(state) == (0, 0)


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


def test_names_are_unique() -> None:
    again = Guard(metric=Metric.TTFT, percentiles=[50], tasks=["chat"])
    names = [test.name for test in battery(rule([*TTFT, again, *ERRORS])).tests]
    assert names == ["TTFT", "TTFT/p95", "TTFT/far", "TTFT#2", "TTFT#2/p50", "TTFT#2/far", "ErrorRate"]


def test_what_can_fire_shares_alpha_and_what_is_watched_has_none() -> None:
    tests = battery(rule()).tests
    assert sum(test.weight for test in tests) == pytest.approx(1.0)
    assert all(test.weight == 0.0 for test in tests if test.metric is Metric.COST_PER_SUCCESS)


def test_clusters_and_the_hours_evidence_share_alpha() -> None:
    """By default errors have 0.6 and seven other rates 0.004 each, 0.628 in all, which leaves 0.372."""
    tests = battery(rule()).tests
    parts = {tests[at].name: part for at, part in jump_parts(tests).items()}
    assert parts["ErrorRate"] == pytest.approx(0.6)
    assert [part for name, part in parts.items() if name != "ErrorRate"] == pytest.approx([0.004] * 7)
    assert hourly_part(tests) == pytest.approx(0.372)


def test_what_has_no_clusters_leaves_all_of_alpha_to_the_hour() -> None:
    assert hourly_part(battery(rule(TTFT)).tests) == 1.0
    many = [Guard(metric=Metric.ERROR_RATE, tasks=[f"t{number}"]) for number in range(3)]
    tests = battery(rule(many)).tests
    assert list(jump_parts(tests).values()) == pytest.approx([0.63 / 3] * 3), "never more than that"
    assert hourly_part(tests) == pytest.approx(0.37)


def test_no_guards_still_count_samples() -> None:
    state = fold(gate(guards=[]), [seen(10), seen(11, candidate=False)])
    assert (state.num_samples, state.num_stable_samples) == (1, 1)
    assert verdict(state, START + timedelta(seconds=20)).reason == ""


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
