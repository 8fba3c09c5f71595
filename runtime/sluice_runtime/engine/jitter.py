"""How unevenly a request's tokens come; exists because a mean per token hides stalls.

Invariant: at most `CAPACITY` gaps are held of a request, however long; beyond that they are a uniform sample
(Vitter's algorithm R), up to there all of them.
"""

from __future__ import annotations

import random
from array import array

CAPACITY = 512
MIN_TOKENS = 8
_draw = random.Random(0)  # noqa: S311


class Gaps:
    """Seconds between the output tokens of one request."""

    __slots__ = ("_held", "_num_seen")

    def __init__(self) -> None:
        self._held = array("d")
        self._num_seen = 0

    def add(self, gap_s: float) -> None:
        self._num_seen += 1
        if len(self._held) < CAPACITY:
            self._held.append(gap_s)
            return
        at = int(_draw.random() * self._num_seen)
        if at < CAPACITY:
            self._held[at] = gap_s

    def jitter_s(self) -> float | None:
        """95th percentile minus median, None under `MIN_TOKENS` tokens. Between two order statistics, linear
        (definition 7 of Hyndman and Fan, 1996).
        """
        if self._num_seen + 1 < MIN_TOKENS:
            return None
        ordered = sorted(self._held)
        return _quantile(ordered, 0.95) - _quantile(ordered, 0.5)


def _quantile(ordered: list[float], share: float) -> float:
    at = (len(ordered) - 1) * share
    low = int(at)
    high = min(low + 1, len(ordered) - 1)
    return ordered[low] + (at - low) * (ordered[high] - ordered[low])
