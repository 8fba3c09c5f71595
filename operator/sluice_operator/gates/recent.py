"""The candidate's newest requests and bad events by slice, to say who is to blame.

Counts since evidence began would not do: an hour of good requests makes everybody look clean.
"""

from __future__ import annotations

import numpy as np

from .columns import Floats, Ints
from .slices import Places

NUM_BAD = 32
NUM_ENDED = 2048


class Recent:
    """Rows of (time, slots of task, of tenant, of both), oldest first."""

    __slots__ = ("_bad", "_ended")

    def __init__(self) -> None:
        self._bad: dict[int, Floats] = {}
        self._ended: Floats = np.zeros((0, 4))

    def end(self, time: Floats, places: Places, rows: Ints) -> None:
        """Requests of the candidate that have ended."""
        self._ended = np.concatenate([self._ended, _lines(time, places, rows)])[-NUM_ENDED:]

    def fail(self, test: int, time: Floats, places: Places, rows: Ints) -> None:
        """Bad events of the candidate by a test."""
        before = self._bad.get(test, self._ended[:0])
        self._bad[test] = np.concatenate([before, _lines(time, places, rows)])[-NUM_BAD:]

    def times(self, test: int) -> tuple[list[float], list[int]]:
        """Of the newest bad events of a test, newest first: their times, and how many requests have ended
        since each."""
        bad = self._bad.get(test, self._ended[:0])[::-1, 0]
        since = len(self._ended) - np.searchsorted(self._ended[:, 0], bad, side="left")
        return bad.tolist(), since.tolist()

    def counts(self, test: int, since: float, slot: int | None = None) -> tuple[int, int]:
        """Requests and bad events of a slice (None: of all) since then."""
        bad, ended = (
            found[found[:, 0] >= since] for found in (self._bad.get(test, self._ended[:0]), self._ended)
        )
        if slot is not None:
            bad, ended = (found[(found[:, 1:] == slot).any(axis=1)] for found in (bad, ended))
        return max(len(ended), len(bad)), len(bad)


def _lines(time: Floats, places: Places, rows: Ints) -> Floats:
    return np.column_stack([time[rows], places.slots[places.which[rows], 1:]])
