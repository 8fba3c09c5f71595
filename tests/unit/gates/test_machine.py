"""Properties over random evidence: batches, restarts, and silence."""

from __future__ import annotations

import json
from dataclasses import replace

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sluice_operator.api.rulestatus import Phase, RuleStatus
from sluice_operator.gates import ArmName, GateState, align, checkpoint, fold, verdict
from unit.gates.traffic import START, Traffic, at, gate, observations, rule, status, warm

TRAFFIC = Traffic(seconds=25.0, weight=25, tasks=("chat", "code"), tenants=("a", "b"), requests_per_unit=2.0,
                  errors_stable=0.02, errors_candidate=0.1, slow=1.5)  # fmt: skip


def state_of(found: GateState) -> tuple[object, ...]:
    """All that a gate says; logarithms of wealth to nine digits."""
    saved = checkpoint(found, status(25))
    wealth = np.round(np.log(np.maximum(found.evidence.bank.wealth, 1e-300)), 6)
    return (
        found.num_samples, found.num_stable_samples, found.evidence.bank.totals.tolist(), wealth.tolist(),
        [(one.task, one.tenant, one.num_samples) for one in saved.slices], found.fired_time,
        found.summary.candidate.evidence(), found.summary.stable.evidence(),
    )  # fmt: skip


@settings(max_examples=12)
@given(seed=st.integers(0, 1000), data=st.data())
def test_where_a_batch_ends_makes_no_difference(seed: int, data: st.DataObject) -> None:
    found = observations(TRAFFIC, seed)
    cuts = sorted(data.draw(st.sets(st.integers(0, len(found)), max_size=12)))
    whole, parts = warm(gate(25)), warm(gate(25))
    fold(whole, found)
    for begin, end in zip([0, *cuts], [*cuts, len(found)], strict=True):
        fold(parts, found[begin:end])
    assert state_of(whole) == state_of(parts)


def test_one_by_one_is_the_same_as_all_at_once() -> None:
    found = observations(replace(TRAFFIC, seconds=10.0), 3)
    whole, single = warm(gate(25)), warm(gate(25))
    fold(whole, found)
    for one in found:
        single.take(one)
    assert state_of(whole) == state_of(single)


@settings(max_examples=10)
@given(seed=st.integers(0, 1000), when=st.floats(3.0, 15.0))
def test_a_restart_of_the_operator_goes_on(seed: int, when: float) -> None:
    """Through JSON, as the API server keeps it. What it may lose is evidence, which is never gained: stable's
    window comes from before, as the pods' streams bring it again."""
    found = observations(TRAFFIC, seed)
    before = [one for one in found if one.time < START.timestamp() + when]
    state = fold(warm(gate(25)), before)
    text = json.dumps(checkpoint(state, status(25)).model_dump(mode="json", by_alias=True))
    saved = RuleStatus.model_validate_json(text)
    again = align(None, rule(), saved, at(when))
    assert (again.num_samples, again.num_stable_samples) == (state.num_samples, state.num_stable_samples)
    assert again.evidence.slices.order() == state.evidence.slices.order()
    tests = again.evidence.bank.num_tests
    ours, theirs = again.evidence.bank.e_values()[:tests], state.evidence.bank.e_values()[:tests]
    assert ours == pytest.approx(theirs, rel=1e-5), "of the rule as a whole everything"
    assert (again.evidence.bank.e_values() <= state.evidence.bank.e_values() * (1 + 1e-5)).all()
    assert checkpoint(again, saved).guards == saved.guards
    assert again.evidence.bank.total <= state.evidence.bank.total * (1 + 1e-5)
    fold(again, before)
    assert again.num_samples == state.num_samples, "what began before does not count again"


@settings(max_examples=20)
@given(num=st.integers(0, 60), weight=st.sampled_from([10, 98]), errors=st.integers(1, 5))
def test_a_checkpoint_is_what_it_was_after_a_restart(num: int, weight: int, errors: int) -> None:
    """Also of blocks that have only begun, and where nothing but failures came."""
    begun = status(weight).model_copy(update={"evidence_since": START.isoformat(), "phase": Phase.WATCHING})
    state = warm(align(None, rule(), begun, START))
    fold(state, [
        observations(TRAFFIC, 1)[0]._replace(time=START.timestamp() + 20 + row, age_s=1.0, unit=f"u{row}",
                arm=ArmName.CANDIDATE if row % 3 else ArmName.STABLE, failed=row % errors == 0)
        for row in range(num)
    ])  # fmt: skip
    saved = checkpoint(state, begun)
    text = saved.model_dump_json(by_alias=True)
    again = align(None, rule(), RuleStatus.model_validate_json(text), at(200))
    assert checkpoint(again, saved).model_dump_json(by_alias=True) == text


@settings(max_examples=20)
@given(seconds=st.lists(st.floats(0, 5000), max_size=5), restarts=st.integers(0, 3))
def test_no_evidence_says_nothing(seconds: list[float], restarts: int) -> None:
    state = gate(num_restarts=restarts)
    for second in sorted(seconds):
        state = fold(align(state, rule(), status(num_restarts=restarts), at(second)), [])
        assert verdict(state, at(second)).reason == ""
    assert state.evidence.bank.total == 1.0
    assert checkpoint(state, status(num_restarts=restarts)).guards == []


def test_the_status_stays_small() -> None:
    """It is an object in the API server, which refuses more than 1.5 MB."""
    traffic = replace(TRAFFIC, seconds=40.0, tasks=tuple(f"t{n}" for n in range(12)),
                      tenants=tuple(f"u{n}" for n in range(20)), slow=3.0)  # fmt: skip
    state = fold(warm(gate(25)), observations(traffic, 1))
    saved = checkpoint(state, status(25))
    assert len(saved.slices) == 32
    assert len(saved.model_dump_json()) < 40_000
