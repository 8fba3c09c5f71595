"""What a hiccup may contribute: a leaky bucket for each guard.

Each slow or bad request of the candidate takes a token, and tokens come back at a steady rate. While less
than one is left, the guard hears neither arm: dropping the candidate's alone would hide a regression under
high load. Whether a request is heard depends on the past only, so the tests stay what they are. Example, 4
tokens and 2.5 a second, as at a share of 0.1: two seconds in which everything at the candidate stands still
count as nine requests, whatever the load; a regression that lasts ten seconds counts as twenty-nine.

Where the candidate's share is larger, a hiccup hits more of its requests; where it is smaller, each of them
is stronger evidence. So guards of a value have most tokens, and they come back most quickly, at a share of
0.1. Guards of a rate have as many tokens as can't roll back alone, since an event multiplies wealth by 1 /
share at most, and the next is heard 2.5 s later.
"""

from __future__ import annotations

import math

import numpy as np

from .columns import Bools, Floats, Ints

LATENCY_BURST, LATENCY_REFILL, QUICKEST_AT = 4.0, 2.5, 0.1
"""Tokens of guards of a value and how many come back a second, at this share of the candidate."""
LEAST_BURST = 2.0
RATE_REFILL = 0.4
"""Tokens a second for guards of a rate."""
RATE_WORTH = 150.0
"""What a burst of a rate's events may multiply wealth by: less than a cluster of errors needs (`jump`)."""
MAX_RATE_BURST = 3.0
"""Even where each is worth little: a second of failures does not show who is to blame."""


def latency_tokens(share: float | None) -> tuple[float, float]:
    """Tokens of a guard of a value at this share, and how many come back a second; None: nothing is compared.
    Example: at 0.25 two (1.6, but two at least) and one a second."""
    part = 1.0 if share is None else min((share / QUICKEST_AT) ** 2, QUICKEST_AT / share)
    return max(LEAST_BURST, LATENCY_BURST * part), LATENCY_REFILL * part


def rate_burst(share: float | None) -> float:
    """Tokens of a guard of a rate at this share; None: nothing is compared. Example: two at 0.1, since three
    failures may be worth 1,000."""
    if share is None:
        return 2.0
    return min(MAX_RATE_BURST, max(1.0, math.floor(math.log(RATE_WORTH) / -math.log(share))))


class Bucket:
    """Tokens of one guard."""

    __slots__ = ("_deaf_until", "_time", "_tokens", "burst", "refill")

    def __init__(self, burst: float, refill: float) -> None:
        self.burst, self.refill = burst, refill
        self._tokens = burst
        self._time = -math.inf
        self._deaf_until = -math.inf

    def heard(self, events: Ints, time: Floats) -> Bools | None:
        """Which requests of a batch are heard; None: all. `events`: rows of the candidate's bad ones."""
        begin, until = [-1], [self._deaf_until]
        for row, now in zip(events.tolist(), time[events].tolist(), strict=True):
            if now < self._deaf_until:
                continue
            self._tokens = min(self.burst, self._tokens + (now - self._time) * self.refill) - 1.0
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
