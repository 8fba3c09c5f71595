"""What a hiccup may contribute: a leaky bucket for each guard.

Each slow or bad request of the candidate takes one of `BURST` tokens, which come back at a steady rate. While
less than one is left, the guard hears neither arm: dropping the candidate's alone would hide a regression
under high load. Whether a request is heard depends on the past only, so the tests stay what they are.
Example, 2 tokens and 3 a second: two seconds in which everything at the candidate stands still count as eight
requests, whatever the load; a regression that lasts ten seconds counts as thirty-two.

Where the candidate's share is larger, a hiccup hits more of its requests; where it is smaller, each of them
is stronger evidence. So tokens come back most quickly at a share of 0.1.
"""

from __future__ import annotations

import math

import numpy as np

from .columns import Bools, Floats, Ints

BURST = 2.0
LATENCY_REFILL, QUICKEST_AT = 3.0, 0.1
"""Tokens a second for guards of a value, at this share of the candidate."""
RATE_REFILL = 0.5
"""Tokens a second for guards of a rate."""


def latency_refill(share: float | None) -> float:
    """Tokens a second for a guard of a value at this share; None: nothing is compared."""
    if share is None:
        return LATENCY_REFILL
    return LATENCY_REFILL * min((share / QUICKEST_AT) ** 2, QUICKEST_AT / share)


class Bucket:
    """Tokens of one guard."""

    __slots__ = ("_deaf_until", "_time", "_tokens", "refill")

    def __init__(self, refill: float) -> None:
        self.refill = refill
        self._tokens = BURST
        self._time = -math.inf
        self._deaf_until = -math.inf

    def heard(self, events: Ints, time: Floats) -> Bools | None:
        """Which requests of a batch are heard; None: all. `events`: rows of the candidate's bad ones."""
        begin, until = [-1], [self._deaf_until]
        for row, now in zip(events.tolist(), time[events].tolist(), strict=True):
            if now < self._deaf_until:
                continue
            self._tokens = min(BURST, self._tokens + (now - self._time) * self.refill) - 1.0
            self._time = now
            if self._tokens < 1.0:
                self._deaf_until = now + (1.0 - self._tokens) / self.refill
                begin.append(row)
                until.append(self._deaf_until)
        if until[0] <= time[0] and len(until) == 1:
            return None
        rows = np.arange(len(time))
        last = np.searchsorted(np.array(begin), rows, side="left") - 1
        found: Bools = time >= np.array(until)[np.maximum(last, 0)]
        return found
