"""What a stage of so many requests can notice, and how many it needs. "No guard fired" is no evidence of no
harm.

The yardstick: all the candidate's latencies become `factor` times as long (so p95 is doubled at 2), log-
normal with sigma 0.6, and stable's quantiles are known. Where doubling is tolerated, or nearly, the factor is
`BEYOND` times what is: what is tolerated is noticed by no number of requests. Every request of either arm
then multiplies wealth on the ladder by a known table, so the log of wealth is a random walk whose drift and
variance are sums over its cells. The least n is wanted at which the walk has reached the threshold in 9 of 10
cases (Wald's approximation: drift n - z sqrt(variance n) >= what is needed, z = 1.2816). What is needed is
the logarithm of 1/alpha with its shares for clusters of rare events, for restarts, for slices, for the test
among the others, and for the moment of the change.

The same numbers always: pure arithmetic, cached. Against simulation it is within about a fifth
(tests/unit/gates/test_power.py).
"""

from __future__ import annotations

import math
from functools import lru_cache
from statistics import NormalDist

import numpy as np

from ..api.guards import GuardMode, Metric
from ..api.routepolicy import Rule
from .battery import FAR_FACTOR, Kind, Test, battery, hourly_part, num_stages
from .columns import Floats
from .sequential import FIRST_BET, NUM_ALTERNATIVES, event_table, ladder_table, null_share, spent
from .slices import RULE, slot_weights

SIGMA = 0.6
CASES = " in 9 of 10 cases"
NOTHING = "nothing: too few requests"
_NORMAL = NormalDist()
_Z = 1.2815515655446004
_MOST = 1_000_000
DOUBLED, BEYOND = 2.0, 4.0 / 3.0
_EXACT = 1000
"""Up to so many events their mean is computed, beyond approximated."""


def min_samples(rule: Rule, weight: float) -> int:
    """Candidate requests needed to notice that p95 has doubled, or is a third beyond what is tolerated, in 9
    of 10 cases; with guards of rates only, that 5 % of requests go wrong. `weight`: the candidate's share of
    the requests in percent. At 0 and 100, and without a guard that can fire, there is nothing to compare
    with: 1."""
    key = _key(rule, weight)
    if key is not None:
        return _needed(*key, max(DOUBLED, BEYOND * key[2]))
    events = _events(rule, weight)
    return min(_MOST, math.ceil(events / 0.05)) if events else 1


def detects(rule: Rule, weight: float, num_samples: int) -> str:
    """What so many candidate requests would notice, for people; empty: there is no guard that could."""
    key = _key(rule, weight)
    if key is None:
        events = _events(rule, weight)
        share = 100.0 * events / max(1, num_samples)
        return "" if not events else f"{share:.1f} % gone wrong{CASES}" if share <= 100.0 else NOTHING
    low, high = key[2], 100.0 * key[2]
    if _needed(*key, high) > num_samples:
        return NOTHING
    while high / low > 1.01:
        middle = math.sqrt(low * high)
        low, high = (low, middle) if _needed(*key, middle) <= num_samples else (middle, high)
    return f"p95 × {high:.1f}{CASES}" if high < 9.95 else f"p95 × {high:.0f}{CASES}"


_Key = tuple[float, float, float, tuple[int, ...]]


def _key(rule: Rule, weight: float) -> _Key | None:
    """Share, nats needed, tolerance and percentiles of the strongest ladder; None: there is none."""
    if rule.rollout is None or not 0.0 < weight < 100.0:
        return None
    tests = battery(rule).tests
    ladders = [test for test in _armed(tests) if test.kind is Kind.LADDER]
    if not ladders:
        return None
    best = max(ladders, key=lambda test: test.weight)
    return weight / 100.0, _nats(best, tests, rule), best.tolerance, best.percentiles


def _events(rule: Rule, weight: float) -> float:
    """Bad events of the candidate alone that must be expected for a rate's guard to fire in 9 of 10 cases; 0:
    there is none."""
    if rule.rollout is None or not 0.0 < weight < 100.0:
        return 0.0
    tests = battery(rule).tests
    rates = [test for test in _armed(tests) if test.kind is Kind.RATE]
    if not rates:
        return 0.0
    best = max(rates, key=lambda test: test.weight)
    gain = float(event_table(null_share(weight / 100.0, best.tolerance))[1, -1])
    return _mean_for(math.ceil(_nats(best, tests, rule) / gain))


def _armed(tests: tuple[Test, ...]) -> list[Test]:
    """Comparisons that can fire, over all requests; where there is none, those over some tasks: with fewer
    requests than they need of these tasks nothing is shown, so not with fewer in all."""
    found = [test for test in tests if test.weight > 0.0 and test.kind in (Kind.LADDER, Kind.RATE)]
    return [test for test in found if not test.tasks] or found


@lru_cache(maxsize=4096)
def _mean_for(num: int) -> float:
    """The mean at which a Poisson variable is at least `num` in 9 of 10 cases: half of the 90 % quantile of
    chi-squared with 2 `num` degrees of freedom, by Wilson and Hilferty's approximation (1931); up to `_EXACT`
    refined by bisection."""
    cube = 1.0 / (9.0 * num)
    near = num * (1.0 - cube + _Z * math.sqrt(cube)) ** 3
    if num > _EXACT:
        return near
    low, high = 0.9 * near, 1.1 * near
    while high - low > 1e-6:
        middle = (low + high) / 2.0
        low, high = (middle, high) if _poisson_below(num, middle) > 0.1 else (low, middle)
    return high


def _poisson_below(num: int, mean: float) -> float:
    """Chance of fewer than `num` events."""
    nth = np.arange(1.0, num)
    logs = np.concatenate([[0.0], np.cumsum(np.log(mean / nth))]) - mean
    return float(np.exp(logs).sum())


def _cells(limits: list[float], shift: float) -> Floats:
    """Chance of each cell between normal limits, for a normal variable shifted by so many of its sigmas."""
    below = np.array([0.0, *(_NORMAL.cdf(limit - shift) for limit in limits), 1.0])
    return np.diff(below)


def _nats(test: Test, tests: tuple[Test, ...], rule: Rule) -> float:
    """Logarithm of what one alternative must multiply its capital by."""
    assert rule.rollout is not None
    alpha = hourly_part(tests) * min(float(rule.rollout.alpha), 0.5)
    part = test.weight * float(slot_weights()[RULE]) * FIRST_BET / NUM_ALTERNATIVES
    return -math.log(alpha * spent(0, num_stages(rule)) * part)


@lru_cache(maxsize=4096)
def _needed(share: float, nats: float, tolerance: float, percentiles: tuple[int, ...], factor: float) -> int:
    test = Test("", Kind.LADDER, Metric.TOTAL, 0, GuardMode.GUARD, tolerance, percentiles=percentiles)
    table = ladder_table(share, test.levels())
    half = len(table) // 2
    shift = math.log(factor / tolerance) / SIGMA
    limits = [
        *(_NORMAL.inv_cdf(p / 100.0) for p in percentiles),
        _NORMAL.inv_cdf(0.99) + math.log(FAR_FACTOR) / SIGMA,
    ]
    stable, candidate = _cells(limits, 0.0), _cells(limits, shift)
    ratio = (1.0 - share) / share
    best = _MOST
    for alternative in range(NUM_ALTERNATIVES):
        mine, others = table[half:, alternative], table[:half, alternative]
        drift = float(candidate @ mine + ratio * (stable @ others))
        spread = (
            float(candidate @ mine**2 + ratio * (stable @ others**2))
            - float(candidate @ mine) ** 2
            - (ratio * float(stable @ others) ** 2)
        )
        if drift > 0.0:
            root = (_Z * math.sqrt(spread) + math.sqrt(_Z**2 * spread + 4.0 * drift * nats)) / (2.0 * drift)
            best = min(best, math.ceil(root**2))
    return best
