"""False rollbacks and detection on simulated traffic, from fixed seeds; longer runs are in the benchmarks."""

from __future__ import annotations

import statistics
from dataclasses import replace

import pytest

from unit.gates.traffic import Traffic, bursts, gate, observations, seeds, stalls, until_fired, warm

BASE = Traffic(seconds=60.0)
SAME = {
    "poisson": BASE,
    "heavy-tail": replace(BASE, sigma=1.2),
    "shared-bursts": replace(BASE, weather=bursts),
    "shared-stalls": replace(BASE, weather=stalls),
    "conversations": replace(BASE, weather=bursts, requests_per_unit=5.0),
    "errors-in-both": replace(BASE, errors_stable=0.02, errors_candidate=0.02),
    "half": replace(BASE, weight=50, weather=stalls),
    "shadow": replace(BASE, weight=0, shadow_percent=100, weather=stalls),
}


def fired(traffic: Traffic, num: int, bad_from: float = 0.0) -> list[int | None]:
    """For each seed the number of candidate requests until the guards fired."""
    return [
        until_fired(warm(gate(traffic.weight, traffic.shadow_percent)), observations(traffic, seed), bad_from)
        for seed in seeds(num)
    ]


@pytest.mark.parametrize("traffic", SAME.values(), ids=SAME)
def test_equal_arms_are_hardly_ever_rolled_back(traffic: Traffic) -> None:
    """alpha is 0.01: more than 2 of 25 rollouts happen with a chance of 0.002 at most."""
    assert sum(one is not None for one in fired(traffic, 25)) <= 2


def test_five_times_slower_is_found_within_15_candidate_requests() -> None:
    found = fired(replace(BASE, slow=5.0, seconds=60.0), 40)
    assert all(one is not None for one in found)
    assert statistics.median(one for one in found if one is not None) <= 15
    assert max(one for one in found if one is not None) <= 60


def test_five_times_slower_late_in_a_stage_is_found_as_well() -> None:
    found = fired(replace(BASE, slow=5.0, slow_from=100.0, seconds=140.0), 20, bad_from=100.0)
    assert all(one is not None for one in found)
    assert statistics.median(one for one in found if one is not None) <= 20


def test_an_error_rate_is_found() -> None:
    found = fired(replace(BASE, errors_stable=0.001, errors_candidate=0.05, seconds=200.0), 20)
    assert all(one is not None for one in found)
    assert statistics.median(one for one in found if one is not None) <= 150


def test_a_hiccup_of_the_candidate_is_no_verdict() -> None:
    """Two seconds at three times the latency, once a minute: bad luck now and then, never the rule."""
    found = fired(replace(BASE, hiccups=1.0), 25)
    assert sum(one is not None for one in found) <= 3
