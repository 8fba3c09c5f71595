"""Pairs: by task, against stable's agreement with itself, and who the odd one is."""

from __future__ import annotations

import pytest

from sluice_operator.api.guards import Guard, Metric
from sluice_operator.gates import ArmName, GateState, Observation, checkpoint, verdict
from sluice_operator.gates.agreement import MAX_DIFFERING, Agreement
from sluice_operator.gates.sequential import event_table, null_share
from unit.gates.traffic import START, at, gate, status


def pair(name: str, arm: ArmName, digest: str, second: float = 10.0, task: str = "chat") -> Observation:
    return Observation(
        time=START.timestamp() + second, request_id=name, arm=arm, age_s=1.0, attempt="a", task=task,
        mirror=True, pair=True, digest=digest, total_s=1.0,
    )  # fmt: skip


def answers(name: str, candidate: str, first: str, second: str, when: float = 10.0) -> list[Observation]:
    arms = ((ArmName.STABLE, first), (ArmName.CANDIDATE, candidate), (ArmName.STABLE, second))
    return [pair(name, arm, digest, when) for arm, digest in arms]


@pytest.mark.parametrize(
    ("digests", "odd"),
    [("aaa", None), ("baa", True), ("aab", False), ("aba", False), ("abc", None)],
    ids=["all alike", "candidate", "second stable", "first stable", "all different"],
)
def test_the_odd_one_of_three(digests: str, odd: bool | None) -> None:
    agreement = Agreement()
    assert [agreement.take(one) for one in answers("r", *digests)] == [None, None, odd]


def test_counts_by_task() -> None:
    agreement = Agreement()
    for name, digests in (("1", "aaa"), ("2", "baa"), ("3", "aab")):
        for one in answers(name, *digests):
            agreement.take(one)
    found = agreement.status()[0]
    assert (found.task, found.num_pairs, found.num_equal) == ("chat", 3, 2)
    assert (found.num_baseline_pairs, found.num_baseline_equal) == (3, 2)
    assert agreement.differing == ["2"]


def test_differing_ids_are_bounded_and_the_newest_stay() -> None:
    agreement = Agreement()
    for number in range(MAX_DIFFERING + 5):
        for one in answers(f"r{number}", "b", "a", "a"):
            agreement.take(one)
    assert len(agreement.differing) == MAX_DIFFERING
    assert agreement.differing[-1] == f"r{MAX_DIFFERING + 4}"


def test_told_twice_counts_once() -> None:
    agreement = Agreement()
    for one in answers("r", "b", "a", "a") * 2:
        agreement.take(one)
    assert agreement.status()[0].num_pairs == 1


def test_by_chance_a_third_of_the_odd_ones_are_the_candidates() -> None:
    """With a fifth more tolerated: 1.2 / 3 of 1.2 / 3 + 2 / 3, so 0.375."""
    assert null_share(1 / 3, 1.2) == pytest.approx(0.375)
    assert event_table(1 / 3).shape == (2, 4)


def shadow(mode: str = "Guard") -> GateState:
    guard = Guard.model_validate({"metric": "DisagreementRate", "mode": mode})
    return gate(weight=0, shadow_percent=100, guards=[guard])


def test_a_candidate_that_says_something_else_is_noticed() -> None:
    state = shadow()
    for number in range(60):
        state.take_all(answers(f"r{number}", "b", "a", "a", 10.0 + number))
    assert verdict(state, at(80)).reason == "GuardFired"
    assert "DisagreementRate" in verdict(state, at(80)).message


def test_watched_it_is_only_recorded() -> None:
    state = shadow("Watch")
    for number in range(60):
        state.take_all(answers(f"r{number}", "b", "a", "a", 10.0 + number))
    assert verdict(state, at(80)).reason == ""
    saved = checkpoint(state, status(0, 100))
    assert saved.agreement[0].num_pairs == 60
    assert [guard.name for guard in saved.guards] == [Metric.DISAGREEMENT_RATE.value]


def test_pairs_count_for_nothing_else() -> None:
    state = gate(weight=0, shadow_percent=100)
    state.take_all(answers("r", "b", "a", "a"))
    assert (state.num_samples, state.num_stable_samples) == (0, 0)
