"""A positive quantity's distribution as a curve over normal scores: one form for all sources.

A value at score z is exp(curve(z)): score 0 is the median, 1.645 the 95th percentile, 2.326 the 99th. A
straight line is a log-normal; three quantiles of a ReleaseRecord are three knots; a recorded sample is many.
So what is correlated (requests of a conversation, weather, prompt length) is mixed as normal scores first,
and any source has the same correlations. Beyond the outer knots the curve goes on with the last slope.
"""

from __future__ import annotations

from dataclasses import dataclass
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]
_NORMAL = NormalDist()
_MIN_VALUE = 1e-6


@dataclass(frozen=True)
class Curve:
    """Knots of log values over normal scores, ascending; two at least."""

    scores: tuple[float, ...]
    logs: tuple[float, ...]

    def values(self, scores: Array) -> Array:
        """The values at these scores, in the curve's unit."""
        knots, logs = np.asarray(self.scores), np.asarray(self.logs)
        inside = np.interp(scores, knots, logs)
        low = (logs[1] - logs[0]) / (knots[1] - knots[0])
        high = (logs[-1] - logs[-2]) / (knots[-1] - knots[-2])
        below = np.minimum(scores - knots[0], 0.0) * low
        above = np.maximum(scores - knots[-1], 0.0) * high
        values: Array = np.exp(inside + below + above)
        return values

    def quantile(self, percent: float) -> float:
        """The value that `percent` of all do not exceed."""
        return float(self.values(np.array([_NORMAL.inv_cdf(percent / 100.0)]))[0])


def log_normal(median: float, sigma: float) -> Curve:
    """Median in the curve's unit; `sigma` is the standard deviation of the logarithm."""
    middle = float(np.log(max(median, _MIN_VALUE)))
    return Curve((-1.0, 1.0), (middle - sigma, middle + sigma))


def from_quantiles(quantiles: dict[float, float]) -> Curve:
    """Through given quantiles, by percent; two at least. Raises ValueError for fewer."""
    known = {percent: value for percent, value in quantiles.items() if value > 0.0}
    if len(known) < 2:
        raise ValueError("two quantiles above 0 are needed to make a distribution of")
    scores = [_NORMAL.inv_cdf(percent / 100.0) for percent in sorted(known)]
    logs = np.maximum.accumulate(np.log([known[percent] for percent in sorted(known)]))
    return Curve(tuple(scores), tuple(float(value) for value in logs))


def from_sample(values: list[float]) -> Curve:
    """The sample's own quantiles, from 1/n to 1 - 1/n. Raises ValueError under 20 values."""
    if len(values) < 20:
        raise ValueError(f"{len(values)} values are too few to make a distribution of: 20 are needed")
    edge = _NORMAL.inv_cdf(1.0 - 1.0 / len(values))
    scores = np.linspace(-edge, edge, min(101, len(values)))
    shares = [_NORMAL.cdf(float(score)) for score in scores]
    found = np.quantile(np.maximum(np.asarray(values, dtype=float), _MIN_VALUE), shares)
    return Curve(tuple(float(score) for score in scores), tuple(float(value) for value in np.log(found)))
