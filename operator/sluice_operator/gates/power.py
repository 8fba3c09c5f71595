"""What a stage of so many requests can notice, and how many it needs. "No guard fired" is no evidence of no
harm.

The yardstick: all the candidate's latencies become `factor` times as long (so p95 is doubled at 2),
log-normal with sigma 0.6, and stable's quantiles are known. Every request of either arm then multiplies
wealth on the ladder by a known table, so the log of wealth is a random walk whose drift and variance are sums
over its cells. The least n is wanted at which the walk has reached the threshold in 9 of 10 cases (Wald's
approximation: drift n - z sqrt(variance n) >= what is needed, z = 1.2816). What is needed is the logarithm of
1/alpha with its shares for restarts, for half of the weight on slices, for the test among the others, and for
the moment of the change.

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
from .battery import FAR_FACTOR, JUMP_PART, Kind, Test, battery, num_stages
from .columns import Floats
from .sequential import FIRST_BET, NUM_ALTERNATIVES, event_table, ladder_table, null_share, spent
from .slices import RULE, slot_weights

SIGMA = 0.6
CASES = " in 9 of 10 cases"
NOTHING = "nothing: too few requests"
_NORMAL = NormalDist()
_Z = 1.2815515655446004
_MOST = 1_000_000


def min_samples(rule: Rule, weight: float) -> int:
    """Candidate requests needed to notice that p95 has doubled, in 9 of 10 cases; with guards of rates only,
    that 5 % of requests go wrong. `weight`: the candidate's share of the requests in percent. At 0 and 100,
    and without a guard that can fire, there is nothing to compare with: 1."""
    key = _key(rule, weight)
    if key is not None:
        return _needed(*key, 2.0)
    events = _events(rule, weight)
    return math.ceil(events / 0.05) if events else 1


def detects(rule: Rule, weight: float, num_samples: int) -> str:
    """What so many candidate requests would notice, for people; empty: there is no guard that could."""
    key = _key(rule, weight)
    if key is None:
        events = _events(rule, weight)
        share = 100.0 * events / max(1, num_samples)
        return "" if not events else f"{share:.1f} % gone wrong{CASES}" if share <= 100.0 else NOTHING
    if _needed(*key, 100.0) > num_samples:
        return NOTHING
    low, high = 1.0, 100.0
    while high / low > 1.01:
        middle = math.sqrt(low * high)
        low, high = (low, middle) if _needed(*key, middle) <= num_samples else (middle, high)
    return f"p95 × {high:.1f}{CASES}" if high < 9.95 else f"p95 × {high:.0f}{CASES}"


_Key = tuple[float, float, float, tuple[int, ...]]


def _key(rule: Rule, weight: float) -> _Key | None:
    """Share, nats needed, tolerance and percentiles of the strongest ladder; None: there is none."""
    if rule.rollout is None or not 0.0 < weight < 100.0:
        return None
    ladders = [test for test in battery(rule).tests if test.kind is Kind.LADDER and _armed(test)]
    if not ladders:
        return None
    best = max(ladders, key=lambda test: test.weight)
    return weight / 100.0, _nats(best, rule), best.tolerance, best.percentiles


def _events(rule: Rule, weight: float) -> float:
    """Bad events of the candidate alone that must be expected for a rate's guard to fire in 9 of 10 cases; 0:
    there is none."""
    if rule.rollout is None or not 0.0 < weight < 100.0:
        return 0.0
    rates = [test for test in battery(rule).tests if test.kind is Kind.RATE and _armed(test)]
    if not rates:
        return 0.0
    best = max(rates, key=lambda test: test.weight)
    gain = float(event_table(null_share(weight / 100.0, best.tolerance))[1, -1])
    least = math.ceil(_nats(best, rule) / gain)
    expected = float(least)
    while _poisson_below(least, expected) > 0.1:
        expected += 0.05
    return expected


def _armed(test: Test) -> bool:
    return test.weight > 0.0 and not test.tasks


def _poisson_below(num: int, mean: float) -> float:
    """Chance of fewer than `num` events."""
    return sum(math.exp(-mean + nth * math.log(mean) - math.lgamma(nth + 1)) for nth in range(num))


def _cells(limits: list[float], shift: float) -> Floats:
    """Chance of each cell between normal limits, for a normal variable shifted by so many of its sigmas."""
    below = np.array([0.0, *(_NORMAL.cdf(limit - shift) for limit in limits), 1.0])
    return np.diff(below)


def _nats(test: Test, rule: Rule) -> float:
    """Logarithm of what one alternative must multiply its capital by."""
    assert rule.rollout is not None
    alpha = (1.0 - JUMP_PART) * min(float(rule.rollout.alpha), 0.5)
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
