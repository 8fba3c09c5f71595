"""Who is to blame: one task, one tenant, both together, or the rule as a whole."""

from __future__ import annotations

from dataclasses import replace

import pytest

from sluice_operator.api.guards import Guard, Metric
from sluice_operator.api.rollout import RollbackScope
from sluice_operator.gates import GateState, align, verdict
from sluice_operator.gates.slices import MAX_PAIRS, MAX_SINGLES, NUM_SLOTS, Slices, slot_weights
from unit.gates.test_gate import seen
from unit.gates.traffic import START, Traffic, at, gate, observations, rule, status, warm

TASKS, TENANTS = ("nl2sql", "summary", "code", "chat"), ("a", "b", "c", "d")
BASE = Traffic(seconds=150.0, weight=25, tasks=TASKS, tenants=TENANTS, slow_from=60.0)


def blamed(traffic: Traffic, seed: int = 0, scope: RollbackScope = RollbackScope.NARROWEST) -> object:
    """The slice that the verdict names, second by second as the operator would see it."""
    one = rule()
    assert one.rollout is not None
    one = one.model_copy(update={"rollout": one.rollout.model_copy(update={"rollback_scope": scope})})
    state = warm(align(None, one, status(traffic.weight), START))
    seen_ones = observations(traffic, seed)
    begin = 0
    for second in range(200):
        end = begin
        while end < len(seen_ones) and seen_ones[end].time < START.timestamp() + second:
            end += 1
        state.take_all(seen_ones[begin:end])
        begin = end
        if state.fired is not None:
            return state.fired.slice
    return "nothing fired"


@pytest.mark.parametrize("seed", range(3))
def test_an_arm_that_fails_at_one_task_loses_only_that(seed: int) -> None:
    broken = replace(BASE, errors_candidate=0.4, slow_tasks=("nl2sql",))
    assert blamed(broken, seed) == ("nl2sql", "")


@pytest.mark.parametrize("seed", range(3))
def test_one_bad_tenant(seed: int) -> None:
    assert blamed(replace(BASE, slow=6.0, slow_tenants=("b",)), seed) == ("", "b")


def test_one_task_of_one_tenant() -> None:
    """At 25 % four errors end it, which tell no more than the tenant; at 50 % it takes eight."""
    broken = replace(BASE, errors_candidate=0.9, slow_tasks=("code",), slow_tenants=("c",))
    assert blamed(broken, 1) == ("", "c")
    assert blamed(replace(broken, weight=50), 1) == ("code", "c")


@pytest.mark.parametrize("seed", range(3))
def test_two_bad_tasks_are_the_whole_rule(seed: int) -> None:
    assert blamed(replace(BASE, slow=6.0, slow_tasks=("nl2sql", "code")), seed) is None


@pytest.mark.parametrize("seed", range(3))
def test_bad_everywhere_is_the_whole_rule(seed: int) -> None:
    assert blamed(replace(BASE, slow=5.0), seed) is None


def test_scope_rule_never_narrows() -> None:
    broken = replace(BASE, errors_candidate=0.4, slow_tasks=("nl2sql",))
    assert blamed(broken, 0, RollbackScope.RULE) is None


def test_a_hard_violation_is_the_whole_rules() -> None:
    state = gate()
    state.take(seen(10, task="nl2sql", tenant="a", hard_violations=("sluice/leak",)))
    assert verdict(state, at(10)).reason == "HardGateBroken"
    assert verdict(state, at(10)).slice is None


def errors() -> GateState:
    return gate(guards=[Guard(metric=Metric.ERROR_RATE, max_increase_percent=0)])


def test_too_few_others_are_not_called_clean() -> None:
    state = errors()
    for second in range(10, 40, 3):
        state.take(seen(second, task="nl2sql", failed=True))
    assert state.fired is not None
    assert state.fired.slice is None, "nobody else was there to compare with"


def test_the_evidence_is_in_words() -> None:
    state = errors()
    for second in range(10, 100):
        state.take_all([seen(second + part / 10, task="chat") for part in range(5)])
        state.take(seen(second, candidate=False, task="chat"))
        if second >= 60 and second % 3 == 0:
            state.take(seen(second + 0.5, task="nl2sql", failed=True))
    assert state.fired is not None
    assert state.fired.slice == ("nl2sql", "")
    assert "of task nl2sql" in state.fired.message
    assert "share is 0.1" in state.fired.message


def test_an_excluded_slice_never_counts() -> None:
    """Its requests carry no attempt, of whichever arm."""
    state = errors()
    for second in range(10, 60):
        state.take(seen(second, task="nl2sql", failed=True, attempt=""))
        state.take(seen(second, candidate=False, task="nl2sql", failed=True, attempt=""))
    assert not state.evidence.slices.order()
    assert (state.num_samples, state.num_stable_samples) == (0, 0)
    assert state.evidence.bank.total == 1.0


def test_slices_are_bounded_and_their_weights_sum_to_one() -> None:
    assert slot_weights().sum() == pytest.approx(1.0)
    assert slot_weights()[0] == 0.5
    state = errors()
    state.take_all([seen(10 + row / 10, task=f"t{row}", tenant=f"u{row}") for row in range(60)])
    order = state.evidence.slices.order()
    assert len(order) == MAX_SINGLES + MAX_PAIRS == NUM_SLOTS - 1
    assert order[0] == (1, "t0", "")
    again = Slices([(task, tenant) for _, task, tenant in order])
    assert again.order() == order
