"""How fast it goes: tokens a second, lately, and what a step may hold so that streams don't stall.

Invariant: one thread adds, any thread reads, and neither waits for the other.
"""

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


_SMOOTHING = 0.1
_STRETCH = 1.8
_MIN_PROMPT_TOKENS = 16


class Pace:
    """How many prompt tokens may join the streams of a step: so many that it takes 1.8 times what the streams
    take alone, since twice their median is what a stream's slowest tokens may take.

    Example: 20 ms for the streams, 0.4 ms for a prompt token: 40. All of `max_tokens` while nothing is known.
    """

    def __init__(self, max_tokens: int) -> None:
        self._max_tokens = max_tokens
        self._streams_s: float | None = None
        self._token_s: float | None = None

    def saw(self, num_streams: int, num_prompt_tokens: int, seconds: float) -> None:
        """A step of so many streams' and prompts' tokens took `seconds`."""
        if num_prompt_tokens == 0:
            self._streams_s = _smooth(self._streams_s, seconds)
        elif num_prompt_tokens >= _MIN_PROMPT_TOKENS:
            alone = (self._streams_s or 0.0) if num_streams else 0.0
            self._token_s = _smooth(self._token_s, max(0.0, seconds - alone) / num_prompt_tokens)

    def max_prompt_tokens(self) -> int:
        if not self._streams_s or not self._token_s:
            return self._max_tokens
        num = int((_STRETCH - 1) * self._streams_s / self._token_s)
        return min(self._max_tokens, max(_MIN_PROMPT_TOKENS, num))


def _smooth(known: float | None, latest: float) -> float:
    return latest if known is None else known + _SMOOTHING * (latest - known)
