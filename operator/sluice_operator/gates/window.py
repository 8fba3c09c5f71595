"""Stable's recent values of one metric, to take thresholds from.

Invariant: a threshold is read before the sample under test is put in, so it never depends on what it judges. It need
not be accurate for the test to hold, since one threshold judges both arms; age and size only keep it concurrent.
"""

from __future__ import annotations

from bisect import bisect_left, insort
from collections import deque

MAX_SAMPLES = 500
MAX_AGE_S = 600.0
MIN_SAMPLES = 20


class StableWindow:
    """The last `MAX_SAMPLES` values that are not older than `MAX_AGE_S`."""

    __slots__ = ("_arrivals", "_sorted")

    def __init__(self) -> None:
        self._arrivals: deque[tuple[float, float]] = deque()
        self._sorted: list[float] = []

    def add(self, time: float, value: float) -> None:
        """Puts in a value that arrived at `time`, Unix seconds."""
        self._arrivals.append((time, value))
        insort(self._sorted, value)
        if len(self._arrivals) > MAX_SAMPLES:
            self._drop_oldest()

    def quantile(self, percent: int, time: float) -> float | None:
        """The `percent` quantile (an order statistic, so always a value that occurred); None: too few samples."""
        arrivals = self._arrivals
        while arrivals and arrivals[0][0] < time - MAX_AGE_S:
            self._drop_oldest()
        num = len(arrivals)
        if num < MIN_SAMPLES:
            return None
        return self._sorted[-(-percent * num // 100) - 1]

    def _drop_oldest(self) -> None:
        _, value = self._arrivals.popleft()
        del self._sorted[bisect_left(self._sorted, value)]
