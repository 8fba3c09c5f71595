"""What a Prometheus would answer about the candidate, having scraped its counters every few seconds.

Requests count when they end, as a proxy's counters do. ``rate()[w]`` looks at the first and the last scrape
within w, ``irate()[w]`` at the last two; with fewer than two there is no value at all. Extrapolation to the
window's ends is the same factor for every series of a ratio or a histogram, so it is left out. Sources:
prometheus.io/docs/prometheus/latest/querying/functions (rate, irate, histogram_quantile), and the buckets of
istio.io/latest/docs/reference/config/metrics.

Example: buckets 1000 and 2500 ms with 90 of 100 requests under the first and all under the second: p99 is
1000 + 1500 × (99 − 90) / 10 = 2350 ms.
"""

from __future__ import annotations

import math

import numpy as np

from ..curves import Array
from ..trace import Ints, Trace, Wrong

SCRAPE_S = 5.0
"""Flagger's own Prometheus scrapes so often; a default installation does every 60 s."""

BUCKETS_S: Array = (
    np.array(
        [
            0.5,
            1,
            5,
            10,
            25,
            50,
            100,
            250,
            500,
            1000,
            2500,
            5000,
            10_000,
            30_000,
            60_000,
            300_000,
            600_000,
            1_800_000,
            3_600_000,
        ]
    )
    / 1000.0
)


class Candidate:
    """The candidate's requests as its proxy counts them, under weights that change."""

    def __init__(self, trace: Trace) -> None:
        self._trace = trace
        self._since = 0.0
        self._weight = 0
        self._sent: list[Ints] = []
        self._ends: Array = np.zeros(0)
        self._durations: Array = np.zeros(0)
        self._bad: Array = np.zeros(0)

    def weigh(self, weight: int, now: float) -> None:
        """From `now` on so many percent of the requests go to the candidate."""
        self._send(now)
        self._weight = weight

    def num_sent(self, since: float, until: float) -> int:
        """Requests that it got in that time, seconds."""
        self._send(until)
        times = np.concatenate([self._trace.times[sent] for sent in self._sent] or [np.zeros(0)])
        return int(((times >= since) & (times < until)).sum())

    def success_share(self, now: float, window: float, instant: bool) -> float | None:
        """Share of requests without a 5xx; NaN: none ended between the scrapes; None: no value."""
        span = self._span(now, window, instant)
        if span is None:
            return None
        chosen = (self._ends > span[0]) & (self._ends <= span[1])
        num = int(chosen.sum())
        return math.nan if num == 0 else 1.0 - float(self._bad[chosen].sum()) / num

    def duration_p99(self, now: float, window: float, instant: bool) -> float | None:
        """histogram_quantile(0.99) of the duration, seconds; NaN and None as above."""
        span = self._span(now, window, instant)
        if span is None:
            return None
        chosen = (self._ends > span[0]) & (self._ends <= span[1])
        return histogram_quantile(0.99, self._durations[chosen])

    def _send(self, now: float) -> None:
        trace = self._trace
        first, last = np.searchsorted(trace.times, [self._since, now], side="left")
        self._since = now
        requests = np.arange(first, last)
        sent = requests[trace.bucket[requests] < self._weight / 100.0]
        if not len(sent):
            return
        self._sent.append(sent)
        total, wrong = trace.candidate.total[sent], trace.candidate.wrong[sent]
        # An answer that breaks off has said 200 long before.
        bad = ((wrong & Wrong.FAILED) > 0) & ((wrong & Wrong.INTERRUPTED) == 0)
        self._ends = np.concatenate([self._ends, trace.times[sent] + total])
        self._durations = np.concatenate([self._durations, total])
        self._bad = np.concatenate([self._bad, bad.astype(float)])

    def _span(self, now: float, window: float, instant: bool) -> tuple[float, float] | None:
        """First and last scrape that count; the series begin with the first scrape after the first end."""
        self._send(now)
        if not len(self._ends) or self._ends.min() > now:
            return None
        born = math.ceil(float(self._ends.min()) / SCRAPE_S) * SCRAPE_S
        last = math.floor(now / SCRAPE_S) * SCRAPE_S
        earliest = max(born, math.floor((now - window) / SCRAPE_S) * SCRAPE_S + SCRAPE_S)
        first = last - SCRAPE_S if instant else earliest
        return (first, last) if earliest <= first < last else None


def histogram_quantile(quantile: float, durations: Array) -> float:
    """Linear within a bucket; above the last one its bound; NaN without requests. Seconds."""
    num = len(durations)
    if num == 0:
        return math.nan
    below = np.searchsorted(np.sort(durations), BUCKETS_S, side="right")
    rank = quantile * num
    index = int(np.searchsorted(below, rank, side="left"))
    if index == len(BUCKETS_S):
        return float(BUCKETS_S[-1])
    lower = float(BUCKETS_S[index - 1]) if index else 0.0
    before = int(below[index - 1]) if index else 0
    inside = int(below[index]) - before
    return lower + (float(BUCKETS_S[index]) - lower) * (rank - before) / inside
