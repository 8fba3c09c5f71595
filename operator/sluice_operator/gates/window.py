"""Stable's recent values of one metric, to take thresholds from.

Invariant: a threshold is read before the sample under test is put in, so it never depends on what it
judges. It need not be accurate for the test to hold, since one threshold judges both arms; so sorting waits
for a tenth of the window to be new, and age and size only keep it concurrent.
"""

from __future__ import annotations

from collections import deque

MAX_SAMPLES = 500
MAX_AGE_S = 600.0
MIN_SAMPLES = 20
_REFRESH_S = 5.0


class StableWindow:
    """The last `MAX_SAMPLES` values that are not older than `MAX_AGE_S`."""

    __slots__ = ("_arrivals", "_num_new", "_refresh_at", "_sorted")

    def __init__(self) -> None:
        self._arrivals: deque[tuple[float, float]] = deque(maxlen=MAX_SAMPLES)
        self._sorted: list[float] = []
        self._num_new = 0
        self._refresh_at = 0.0

    def add(self, time: float, value: float) -> None:
        """Puts in a value that arrived at `time`, Unix seconds."""
        self._arrivals.append((time, value))
        self._num_new += 1

    def quantile(self, percent: int, time: float) -> float | None:
        """The `percent` quantile, an order statistic: always a value that occurred. None: too few samples.

        Example: of 1, 2 … 20 the 95 % quantile is 19, the smallest value that 95 % do not exceed.
        """
        if self._num_new * 10 > len(self._sorted) - MIN_SAMPLES or time >= self._refresh_at:
            self._refresh(time)
        num = len(self._sorted)
        if num < MIN_SAMPLES:
            return None
        return self._sorted[-(-percent * num // 100) - 1]

    def _refresh(self, time: float) -> None:
        while self._arrivals and self._arrivals[0][0] < time - MAX_AGE_S:
            self._arrivals.popleft()
        self._sorted = sorted(value for _, value in self._arrivals)
        self._num_new = 0
        self._refresh_at = time + _REFRESH_S
