"""How many requests a stage needs, against simulation, and the bounds of the answer."""

from __future__ import annotations

import pytest

from sluice_operator.api.guards import Guard, Metric
from sluice_operator.gates.power import NOTHING, _mean_for, detects, min_samples
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


@pytest.mark.parametrize("tolerated", [80, 90, 100, 300, 10_000])
@pytest.mark.parametrize("weight", [5, 25, 50])
def test_who_tolerates_much_waits_for_no_million_requests(tolerated: int, weight: int) -> None:
    """By no number of requests is it noticed that p95 has doubled where doubling is tolerated."""
    lenient = rule([Guard(metric=Metric.TOTAL, max_increase_percent=tolerated)])
    need = min_samples(lenient, weight)
    as_strict = min_samples(rule([Guard(metric=Metric.TOTAL, max_increase_percent=50)]), weight)
    assert need == pytest.approx(as_strict, rel=0.02), "a third beyond is a third beyond"
    factor = float(detects(lenient, weight, need).split()[2])
    assert factor == pytest.approx(4 / 3 * (1 + tolerated / 100), rel=0.03)


def test_what_is_tolerated_is_never_said_to_be_noticed() -> None:
    lenient = rule([Guard(metric=Metric.TOTAL, max_increase_percent=100)])
    assert float(detects(lenient, 25, 1_000_000).split()[2]) >= 2.0
    assert detects(lenient, 25, 3) == NOTHING


@pytest.mark.parametrize(("num", "mean"), [(1, 2.302585), (2, 3.889720), (3, 5.322320), (10, 14.205990)])
def test_how_many_must_be_expected(num: int, mean: float) -> None:
    """Half of chi-squared's 90 % quantile with 2, 4, 6 and 20 degrees of freedom: 4.605170, 7.779440,
    10.644641, 28.411981 (NIST/SEMATECH e-Handbook of Statistical Methods, 1.3.6.7.4)."""
    assert _mean_for(num) == pytest.approx(mean, abs=1e-4)


def test_many_events_are_approximated_without_a_jump() -> None:
    assert _mean_for(1001) - _mean_for(1000) == pytest.approx(1.02, abs=0.02)


@pytest.mark.parametrize("weight", [50, 80, 99])
def test_guards_of_rates_that_tolerate_everything_take_no_time(weight: int) -> None:
    """It was a sum over a million events, in the operator's loop; no clock is asked: it would not end."""
    lenient = rule([Guard(metric=Metric.ERROR_RATE, max_increase_percent=10_000)])
    need = min_samples(lenient, weight)
    assert 10_000 < need <= 1_000_000
    assert detects(lenient, weight, 1_000) == NOTHING


@pytest.mark.parametrize("metric", [Metric.TOTAL, Metric.ERROR_RATE])
def test_guards_of_some_tasks_alone_ask_for_requests_too(metric: Metric) -> None:
    of_all, of_one = (rule([Guard(metric=metric, tasks=tasks)]) for tasks in ([], ["sql"]))
    assert min_samples(of_one, 10) == min_samples(of_all, 10) > 50
    both = rule([Guard(metric=Metric.ERROR_RATE), Guard(metric=Metric.TOTAL, tasks=["sql"])])
    assert detects(both, 10, 400).endswith("% gone wrong in 9 of 10 cases"), "of all requests, if anything is"


def test_nothing_to_compare_with() -> None:
    assert min_samples(rule(), 100) == min_samples(rule([]), 10) == 1
    assert detects(rule([]), 10, 100) == ""
    only_watched = rule([Guard.model_validate({"metric": "TTFT", "mode": "Watch"})])
    assert min_samples(only_watched, 10) == 1
