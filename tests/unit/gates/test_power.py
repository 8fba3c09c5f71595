"""How many requests a stage needs, against simulation, and the bounds of the answer."""

from __future__ import annotations

import pytest

from sluice_operator.api.guards import Guard, Metric
from sluice_operator.gates.power import NOTHING, detects, min_samples
from unit.gates.traffic import Traffic, gate, observations, rule, seeds, until_fired, warm


def test_doubled_latency_is_noticed_with_so_many() -> None:
    """9 of 10 rollouts at 25 %, within 40 % of the formula's number: delays are not in it."""
    need = min_samples(rule(), 25)
    traffic = Traffic(seconds=60.0, weight=25, slow=2.0, sigma=0.6)
    found = [until_fired(warm(gate(25)), observations(traffic, seed)) for seed in seeds(20)]
    within = sum(one is not None and one <= 1.4 * need for one in found)
    assert within >= 16
    half = sum(one is not None and one <= 0.4 * need for one in found)
    assert half <= 10


def test_the_same_number_always_and_more_for_less_alpha() -> None:
    strict = rule()
    assert strict.rollout is not None
    strict = strict.model_copy(update={"rollout": strict.rollout.model_copy(update={"alpha": "0.0001"})})
    assert min_samples(rule(), 10) == min_samples(rule(), 10) < min_samples(strict, 10)


@pytest.mark.parametrize("weight", [1, 5, 10, 25, 50, 75, 90])
def test_what_is_asked_for_is_what_it_detects(weight: int) -> None:
    need = min_samples(rule(), weight)
    assert 20 <= need <= 2000
    assert detects(rule(), weight, need) == "p95 × 2.0 in 9 of 10 cases"


def test_more_requests_detect_less() -> None:
    factors = [float(detects(rule(), 10, num).split()[2]) for num in (60, 100, 300, 3000)]
    assert factors == sorted(factors, reverse=True)
    assert 1.2 < factors[-1] < factors[0]
    assert detects(rule(), 10, 3) == NOTHING


def test_with_rates_only_it_is_about_what_goes_wrong() -> None:
    errors = rule([Guard(metric=Metric.ERROR_RATE)])
    need = min_samples(errors, 10)
    assert 100 <= need <= 400
    assert detects(errors, 10, need) == "5.0 % gone wrong in 9 of 10 cases"


def test_nothing_to_compare_with() -> None:
    assert min_samples(rule(), 100) == min_samples(rule([]), 10) == 1
    assert detects(rule([]), 10, 100) == ""
    only_watched = rule([Guard.model_validate({"metric": "TTFT", "mode": "Watch"})])
    assert min_samples(only_watched, 10) == 1
