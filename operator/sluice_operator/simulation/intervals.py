"""How sure a counted share is.

Clopper and Pearson, "The use of confidence or fiducial limits illustrated in the case of the binomial",
Biometrika 26 (1934): the shares that the count does not contradict at 2.5 % on either side. Never too narrow.

Example: 0 of 2,000: 0 to 0.00184 (1 - 0.025^(1/2000)); 5 of 10: 0.187 to 0.813.
"""

from __future__ import annotations

from collections.abc import Callable

import numpy as np

_CONFIDENCE = 0.95


def clopper_pearson(num: int, total: int, confidence: float = _CONFIDENCE) -> tuple[float, float]:
    """Lower and upper limit of the share behind `num` of `total`; (0, 1) for a total of 0."""
    tail = (1.0 - confidence) / 2.0
    low = 0.0 if num == 0 else _where(lambda share: at_least(num, total, share) > tail)
    high = 1.0 if num >= total else _where(lambda share: at_least(num + 1, total, share) > 1.0 - tail)
    return low, high


def at_least(num: int, total: int, share: float) -> float:
    """P(X >= num) for a binomial X."""
    if num <= 0:
        return 1.0
    if num > total or share <= 0.0:
        return 0.0
    if share >= 1.0:
        return 1.0
    counts = np.arange(1, total + 1)
    choose = np.concatenate([[0.0], np.cumsum(np.log((total - counts + 1) / counts))])
    every = np.arange(total + 1)
    logs = choose + every * np.log(share) + (total - every) * np.log1p(-share)
    return float(min(1.0, np.exp(logs[num:]).sum()))


def _where(holds: Callable[[float], bool]) -> float:
    """The share from which on a monotone condition holds."""
    low, high = 0.0, 1.0
    for _ in range(60):
        middle = (low + high) / 2.0
        low, high = (low, middle) if holds(middle) else (middle, high)
    return (low + high) / 2.0
