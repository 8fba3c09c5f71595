"""What a step of so many rows takes, as measured; exists because a guess is cheap only while the batch is
small: weights are read once a step, and beyond some number of rows it is their arithmetic that counts."""

from __future__ import annotations

import math
from collections.abc import Sequence

_SMOOTHING = 0.1
_OPTIMISM = 0.8
"""Chance of a guess before any was measured."""


class StepCost:
    """Seconds of steps by rows, half powers of two together; between two known ones a straight line."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[float, float, int]] = {}

    def saw(self, num_rows: int, seconds: float) -> None:
        """A step without prompts took `seconds`."""
        at = round(2 * math.log2(num_rows))
        rows, mean, num = self._known.get(at, (0.0, 0.0, 0))
        # The first ones count alike, so that one slow step at the beginning is soon forgotten. The mean of
        # rows moves along, so that a bucket's two figures belong together.
        share = max(_SMOOTHING, 1 / (num + 1))
        self._known[at] = (rows + share * (num_rows - rows), mean + share * (seconds - mean), num + 1)

    def seconds(self, num_rows: int) -> float | None:
        """None while nothing is known. Beyond what is known: the nearest below, that is no dearer; so more
        rows are tried until they have been measured."""
        points = sorted((rows, mean) for rows, mean, _ in self._known.values())
        if not points:
            return None
        below = [p for p in points if p[0] <= num_rows]
        above = [p for p in points if p[0] > num_rows]
        if not below or not above:
            return (below[-1] if below else above[0])[1]
        (r0, s0), (r1, s1) = below[-1], above[0]
        return s0 + (s1 - s0) * (num_rows - r0) / (r1 - r0)

    def best_num_guesses(self, num_streams: int, chances: Sequence[float | None]) -> int:
        """How many guesses for each stream give the most tokens a second; 0 if none do. `chances[i]`: how
        often guess i was right where it was made, given those before it were; None: not measured."""
        best, best_rate = len(chances), 0.0
        tokens, reached = 1.0, 1.0
        for num in range(len(chances) + 1):
            if num:
                chance = chances[num - 1]
                reached *= _OPTIMISM if chance is None else chance
                tokens += reached
            seconds = self.seconds(num_streams * (1 + num))
            if seconds is None:
                return len(chances)
            if tokens / seconds > best_rate * (1 + 1e-9):
                best, best_rate = num, tokens / seconds
        return best
