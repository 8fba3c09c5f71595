"""False rollbacks and detection on simulated traffic, from fixed seeds; longer runs are in the benchmarks.

All with the default guards over four tasks and four tenants, in a third stage (two restarts of evidence).
"""

from __future__ import annotations

import statistics
from dataclasses import replace

import numpy as np
import pytest

from sluice_operator.api.guards import Guard, Metric
from sluice_operator.gates import GateState, align
from unit.gates.traffic import (
    START,
    Traffic,
    bursts,
    gate,
    observations,
    seeds,
    stalls,
    status,
    until_fired,
    warm,
)

BASE = Traffic(
    seconds=60.0, tasks=("chat", "nl2sql", "code", "summary"), tenants=("a", "b", "c", "d"),
    errors_stable=0.001, errors_candidate=0.001,
)  # fmt: skip
SAME = {
    "poisson": BASE,
    "heavy-tail": replace(BASE, sigma=1.2),
    "shared-bursts": replace(BASE, weather=bursts),
    "shared-stalls": replace(BASE, weather=stalls),
    "conversations": replace(BASE, weather=bursts, requests_per_unit=5.0),
    "errors-in-both": replace(BASE, errors_stable=0.02, errors_candidate=0.02),
    "half": replace(BASE, weight=50, weather=stalls),
    "shadow": replace(BASE, weight=0, shadow_percent=100, weather=stalls),
    "hiccups at 10": replace(BASE, hiccups=1.0),
    "hiccups at 25": replace(BASE, hiccups=1.0, weight=25),
    "hiccups at 50": replace(BASE, hiccups=1.0, weight=50),
}
GOOD_S = 60.0
"""Seconds of good traffic before a regression: 1,200 requests."""


def fired(traffic: Traffic, num: int, bad_from: float = 0.0) -> list[int | None]:
    """For each seed the number of candidate requests until the guards fired."""
    return [until_fired(third_stage(traffic), observations(traffic, seed), bad_from) for seed in seeds(num)]


def third_stage(traffic: Traffic) -> GateState:
    """A gate whose evidence has restarted twice; what outlives that is there."""
    first = warm(gate(traffic.weight, traffic.shadow_percent))
    later = status(traffic.weight, traffic.shadow_percent).model_copy(update={"num_restarts": 2})
    return align(first, first.rule, later, START)


def detected(num: int, **changes: object) -> list[int]:
    """The same for a regression in the middle of a stage; one that is not found counts as very late."""
    changed = {"seconds": GOOD_S + 60.0, "slow_from": GOOD_S, **changes}
    traffic = replace(BASE, **changed)  # type: ignore[arg-type]
    return [10_000 if one is None else one for one in fired(traffic, num, GOOD_S)]


@pytest.mark.parametrize("traffic", SAME.values(), ids=SAME)
def test_equal_arms_are_hardly_ever_rolled_back(traffic: Traffic) -> None:
    """alpha is 0.01: more than one of 8 rollouts happens with a chance of 0.003 at most."""
    assert sum(one is not None for one in fired(traffic, 8)) <= 1


def test_five_times_slower_is_found_within_about_15_candidate_requests() -> None:
    found = detected(20, slow=5.0)
    assert statistics.median(found) <= 18
    assert max(found) <= 60


def test_half_as_slow_again_is_found_within_400() -> None:
    assert statistics.median(detected(6, slow=1.5, seconds=GOOD_S + 240.0)) <= 400


@pytest.mark.parametrize(("weight", "most"), [(5, 130), (10, 160), (25, 220)])
def test_an_error_rate_is_found(weight: int, most: int) -> None:
    """5 % from 0.1 %; the benchmark has the medians of many more."""
    seconds = GOOD_S + 1500.0 / weight
    assert statistics.median(detected(7, weight=weight, errors_candidate=0.05, seconds=seconds)) <= most


def test_a_few_that_are_a_hundred_times_slower_are_found() -> None:
    found = detected(6, slow=100.0, slow_fraction=0.03, seconds=GOOD_S + 250.0)
    assert statistics.median(found) <= 500


def test_a_slow_task_is_found_among_others() -> None:
    found = detected(6, slow=6.0, slow_tasks=("nl2sql",), seconds=GOOD_S + 120.0)
    assert statistics.median(found) <= 120


def test_the_mean_of_the_evidence_is_at_most_one() -> None:
    """At a fixed time, over 200 rollouts of equal arms without tolerance: Markov's bound needs no more."""
    guards = [Guard(metric=metric, max_increase_percent=0) for metric in (Metric.TTFT, Metric.ERROR_RATE)]
    traffic = Traffic(seconds=8.0, weight=30, errors_stable=0.05, errors_candidate=0.05)
    totals = []
    for seed in seeds(200):
        state = warm(gate(30, guards=guards))
        state.take_all(observations(traffic, seed))
        totals.append(state.evidence.bank.total)
    error = float(np.std(totals)) / np.sqrt(len(totals))
    assert np.mean(totals) <= 1.0 + 3.0 * error
    assert np.median(totals) < 1.0
