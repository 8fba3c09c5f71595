"""Tokens a second, lately. Invariant: one thread adds, any thread reads, and neither waits for the other."""

from __future__ import annotations

from collections import deque

_WINDOW_S = 10.0


class Rate:
    """The mean over the last ten seconds: 50 tokens three seconds ago and none since are 5 a second."""

    def __init__(self) -> None:
        self._recent: deque[tuple[float, int]] = deque()

    def add(self, now: float, num: int) -> None:
        self._recent.append((now, num))
        while now - self._recent[0][0] > _WINDOW_S:
            self._recent.popleft()

    def per_s(self, now: float) -> float:
        return sum(num for at, num in list(self._recent) if now - at <= _WINDOW_S) / _WINDOW_S
