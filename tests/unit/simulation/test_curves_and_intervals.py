"""Distributions as curves over normal scores, and how sure a counted share is. Hand-computed."""

from __future__ import annotations

import math

import numpy as np
import pytest

from sluice_operator.simulation.curves import from_quantiles, from_sample, log_normal
from sluice_operator.simulation.intervals import at_least, clopper_pearson


def test_a_log_normal_has_its_median_and_its_95th_percentile() -> None:
    curve = log_normal(0.3, 0.6)
    assert curve.quantile(50) == pytest.approx(0.3)
    assert curve.quantile(95) == pytest.approx(0.3 * math.exp(0.6 * 1.644854))


def test_three_quantiles_come_back_and_the_tail_goes_on_with_the_last_slope() -> None:
    curve = from_quantiles({50.0: 1.0, 95.0: 4.0, 99.0: 10.0})
    assert [curve.quantile(p) for p in (50, 95, 99)] == pytest.approx([1.0, 4.0, 10.0])
    slope = math.log(10.0 / 4.0) / (2.326348 - 1.644854)
    assert curve.quantile(99.9) == pytest.approx(10.0 * math.exp(slope * (3.090232 - 2.326348)), rel=1e-5)


def test_one_quantile_is_no_distribution() -> None:
    with pytest.raises(ValueError, match="two quantiles"):
        from_quantiles({50.0: 1.0, 95.0: 0.0})


def test_a_sample_is_resampled_with_its_own_quantiles() -> None:
    sample = np.random.default_rng(1).gamma(2.0, 1.0, 4000)
    drawn = from_sample(sample.tolist()).values(np.random.default_rng(2).standard_normal(20_000))
    assert np.quantile(drawn, [0.1, 0.5, 0.95]) == pytest.approx(
        np.quantile(sample, [0.1, 0.5, 0.95]), rel=0.05
    )


def test_few_values_are_refused() -> None:
    with pytest.raises(ValueError, match="19 values are too few"):
        from_sample([1.0] * 19)


def test_no_event_in_2000_says_less_than_two_in_a_thousand() -> None:
    """Clopper and Pearson for 0 of n: 1 - (alpha/2)^(1/n)."""
    assert clopper_pearson(0, 2000) == (0.0, pytest.approx(1.0 - 0.025 ** (1 / 2000)))


def test_five_of_ten() -> None:
    """Table in Clopper and Pearson (1934): 0.187 to 0.813."""
    low, high = clopper_pearson(5, 10)
    assert (round(low, 3), round(high, 3)) == (0.187, 0.813)


def test_all_and_nothing() -> None:
    assert clopper_pearson(0, 0) == (0.0, 1.0)
    assert clopper_pearson(3, 3)[1] == 1.0


def test_binomial_tail_by_hand() -> None:
    """P(X >= 2) of 3 at 1/2 is 3/8 + 1/8."""
    assert at_least(2, 3, 0.5) == pytest.approx(0.5)
    assert at_least(0, 3, 0.5) == 1.0
    assert at_least(4, 3, 0.5) == 0.0
