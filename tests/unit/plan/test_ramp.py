"""The load ramp's pure part: what breaks an SLO, which level comes next, and what follows from the result."""

from __future__ import annotations

import math

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice_operator.api.routepolicy import Slo
from sluice_operator.plan import ramp
from sluice_operator.plan.ramp import Level, Limits, Ramp, Sample

LIMITS = Limits(ttft_s=1.0, tpot_s=0.1, errors=0.01)
GOOD, SLOW, FAILED = Sample(True, 0.5, 0.05, 2.0), Sample(True, 1.5, 0.05, 3.0), Sample(False)


def test_an_slo_in_numbers_and_in_words() -> None:
    limits = Limits.of(Slo(ttft_seconds="2", time_per_token_seconds="0.25", error_percent="0.5"))
    assert limits == Limits(2.0, 0.25, 0.005)
    assert limits.words() == "p95 TTFT 2 s, p95 time per token 0.25 s, errors 0.5 %"


@pytest.mark.parametrize(("num", "over"), [(100, 5), (119, 5), (120, 6), (19, 0), (20, 1), (0, 0)])
def test_how_many_may_be_over_the_95th_percentile(num: int, over: int) -> None:
    assert ramp.allowed(num) == over


@pytest.mark.parametrize(
    ("samples", "broken"),
    [
        ([GOOD] * 95 + [SLOW] * 5, ""),
        ([GOOD] * 94 + [SLOW] * 6, "6 of 100 requests took more than 1 s to the first token"),
        ([GOOD] * 94 + [Sample(True, 0.5, 0.2, 9.0)] * 6, "6 of 100 requests took more than 0.1 s a token"),
        ([GOOD] * 99 + [FAILED], ""),
        ([GOOD] * 98 + [FAILED] * 2, "2 of 100 requests failed"),
        ([FAILED] * 3, "3 of 3 requests failed"),
        ([], "no request was answered"),
        ([Sample(True, 0.5, None, 0.5)] * 100, ""),
    ],
)
def test_what_breaks_a_level(samples: list[Sample], broken: str) -> None:
    assert ramp.judge(3.0, samples, LIMITS).broken == broken


def test_failures_are_slow_too_where_errors_are_tolerated() -> None:
    """Refusing half the load must not look fast."""
    level = ramp.judge(3.0, [GOOD] * 94 + [FAILED] * 6, Limits(1.0, 0.1, errors=0.5))
    assert level.broken == "6 of 100 requests took more than 1 s to the first token"


def test_the_mean_is_of_answers_only() -> None:
    assert ramp.judge(3.0, [GOOD, SLOW, FAILED], LIMITS).mean_s == 2.5


def climb(safe: float, single_s: float = 1.0, *, hiccups: set[int] | None = None) -> tuple[Ramp, list[float]]:
    """A pod that holds up to `safe` requests a second; `hiccups` are levels that break for no reason."""
    at, rates = ramp.begin(single_s), []
    while not at.finished:
        rates.append(round(at.rate, 3))
        broken = at.rate > safe or len(rates) - 1 in (hiccups or set())
        at = ramp.after(at, Level(at.rate, 100, 1.0, "slow" if broken else ""))
        assert len(rates) < 100
    return at, rates


def test_the_worked_example() -> None:
    at, rates = climb(3.0)
    assert rates == [1.0, 1.5, 2.25, 3.375, 3.375, 2.756, 3.05, 3.05]
    assert at.good is not None
    assert round(at.good.rate, 3) == 2.756


def test_a_hiccup_is_tried_again_and_costs_nothing() -> None:
    at, rates = climb(3.0, hiccups={1})
    assert rates[:4] == [1.0, 1.5, 1.5, 2.25]
    assert at.good is not None
    assert round(at.good.rate, 3) == 2.756


def test_a_pod_that_is_slow_from_the_start_is_tried_at_less() -> None:
    at, rates = climb(0.5)
    assert rates[:6] == [1.0, 1.0, 0.667, 0.667, 0.444, 0.544]
    assert at.good is not None
    assert 0.444 <= at.good.rate <= 0.5


def test_a_pod_that_never_holds_has_no_result() -> None:
    at, rates = climb(0.0)
    assert at.good is None
    assert at.bad is not None
    assert min(rates) >= 0.1


@given(st.floats(0.14, 500.0), st.floats(0.01, 30.0))
def test_the_result_is_the_highest_safe_level_within_11_percent(load: float, single_s: float) -> None:
    safe = load / single_s
    at, rates = climb(safe, single_s)
    assert at.good is not None
    assert at.good.rate <= safe
    assert at.good.rate * math.sqrt(math.sqrt(ramp.FACTOR)) * 1.001 >= safe
    assert len(rates) < 40


def test_levels_are_long_enough() -> None:
    assert (ramp.num_requests(0.5), ramp.num_requests(20), ramp.num_requests(100)) == (100, 100, 500)


def test_capacity_follows_littles_law() -> None:
    found = ramp.capacity(
        Level(2.7557, 100, 1.5, ""), LIMITS, prompt_tokens=256, output_tokens=64, now="t", identity="d"
    )
    assert (found.safe_requests_per_second, found.mean_seconds, found.concurrency) == (
        "2.756",
        "1.5",
        "4.134",
    )
    assert found.shape == "256 tokens in, 64 out"


@pytest.mark.parametrize(
    ("rate", "safe", "wanted"), [(10.0, "4", 4), (0.1, "4", 1), (8.0, "10", 1), (8.1, "10", 2), (0.0, "4", 0)]
)
def test_advice_has_room_for_bursts(rate: float, safe: str, wanted: int) -> None:
    tested = ramp.capacity(
        Level(float(safe), 100, 1.0, ""), LIMITS, prompt_tokens=1, output_tokens=2, now="t", identity="d"
    )
    assert ramp.advised_replicas(rate, tested, "d") == wanted
    assert ramp.advised_replicas(rate, tested, "another") == 0
    assert ramp.advised_replicas(rate, None, "d") == 0


@pytest.mark.parametrize(
    ("value", "text"),
    [(1234567.0, "1234567"), (0.000012345, "0.00001234"), (2.7557, "2.756"), (100.0, "100"), (0.0, "0")],
)
def test_decimals_fit_the_resource(value: float, text: str) -> None:
    assert ramp.decimal(value) == text
