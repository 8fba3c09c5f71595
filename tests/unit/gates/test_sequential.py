"""Each number worked out by hand, beside the formula's source."""

from __future__ import annotations

import itertools
import math

import pytest

from sluice_operator.gates import sequential
from sluice_operator.gates.sequential import FIRST_BET, HAZARD, ODDS, bet, e_value, null_share, threshold


def test_likelihood_ratios_at_a_tenth() -> None:
    """k / (kw + 1 - w) and 1 / (kw + 1 - w) with w = 0.1: for k = 30 that is 30/3.9 and 1/3.9."""
    candidate, stable = bet((), 0, 0.1, True), bet((), 0, 0.1, False)
    divisors = {2.0: 1.1, 4.0: 1.3, 10.0: 1.9, 30.0: 3.9}
    for odds, up, down in zip(ODDS, candidate, stable, strict=True):
        assert math.exp(up) == pytest.approx(FIRST_BET * odds / divisors[odds])
        assert math.exp(down) == pytest.approx(FIRST_BET / divisors[odds])


def test_first_event_by_hand() -> None:
    """(1.8182 + 3.0769 + 5.2632 + 7.6923) / 4 = 4.4626; half of the capital was bet: 0.5 + 2.2313."""
    assert e_value(bet((), 0, 0.1, True), 1) == pytest.approx(2.7313, abs=1e-4)


def test_second_event_by_hand() -> None:
    """0.001 of the waiting half joins before the second event: k = 30 holds (3.84615 + 0.0005) * 7.6923."""
    wealth = bet(bet((), 0, 0.1, True), 1, 0.1, True)
    assert math.exp(wealth[3]) == pytest.approx((3.846154 + 0.0005) * 7.692308, rel=1e-6)
    waiting = 0.5 * 0.999
    assert e_value(wealth, 2) == pytest.approx(sum(map(math.exp, wealth)) / 4 + waiting)


def test_no_event_is_no_evidence() -> None:
    assert e_value((), 0) == 1.0


@pytest.mark.parametrize("share", [0.01, 0.1, 0.5, 0.9])
def test_wealth_is_a_martingale_at_the_null(share: float) -> None:
    """E[e after n events] = 1 exactly, over all 2^n outcomes (what Ville's inequality needs)."""
    num_events, mean = 8, 0.0
    for outcome in itertools.product([True, False], repeat=num_events):
        wealth: tuple[float, ...] = ()
        chance = 1.0
        for seen, candidate in enumerate(outcome):
            wealth = bet(wealth, seen, share, candidate)
            chance *= share if candidate else 1.0 - share
        mean += chance * e_value(wealth, num_events)
    assert mean == pytest.approx(1.0)


def test_a_better_candidate_only_loses_wealth() -> None:
    """Under P(candidate | bad) < w the expected gain of each bet is below 1."""
    share, truth = 0.3, 0.2
    for odds in ODDS:
        assert (truth * odds + 1 - truth) / (odds * share + 1 - share) < 1.0


def test_tolerated_odds() -> None:
    """At 10 % and a rate allowed to be twice stable's, 2 of 11 errors may be the candidate's."""
    assert null_share(0.1, 2.0) == pytest.approx(2 / 11)
    assert null_share(0.1) == pytest.approx(0.1)


def test_alpha_is_shared_over_all_restarts() -> None:
    """Basel problem: sum of 1/k^2 is pi^2/6. First window at alpha 0.01: 1 / 0.0060793 = 164.493."""
    assert threshold(0.01, 0) == pytest.approx(164.4934, abs=1e-4)
    assert threshold(0.01, 1) == pytest.approx(4 * 164.4934, abs=1e-3)
    assert sum(1 / threshold(0.01, restart) for restart in range(100_000)) == pytest.approx(0.01, abs=1e-6)
    assert threshold(0.0, 0) == math.inf


def test_late_regression_is_found_nearly_as_soon_as_an_early_one() -> None:
    """After 3,000 of stable's bad events the candidate needs a few more, not hundreds."""

    def needed(before: int) -> int:
        wealth: tuple[float, ...] = ()
        for seen in range(before):
            wealth = bet(wealth, seen, 0.1, False)
        for seen in itertools.count(before):
            if e_value(wealth, seen) >= threshold(0.01, 0):
                return seen - before
            wealth = bet(wealth, seen, 0.1, True)
        raise AssertionError

    assert needed(0) == 4
    assert needed(3000) <= 9


def test_waiting_capital_never_goes_negative_and_all_joins_in_the_end() -> None:
    num = 1000
    joined = sum(sequential._joining(index) for index in range(num))
    assert joined + sequential._waiting(num) == pytest.approx(1.0)
    assert sequential._joining(5) == pytest.approx(0.5 * (1 - HAZARD) ** 4 * HAZARD)


def test_wealth_does_not_overflow() -> None:
    wealth: tuple[float, ...] = ()
    for seen in range(2000):
        wealth = bet(wealth, seen, 0.05, True)
    assert math.isfinite(e_value(wealth, 2000))
