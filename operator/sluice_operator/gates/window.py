"""Stable's recent values of one metric, to take thresholds from.

Invariant: the threshold for a request comes from stable's requests before it only, so it never depends on
what it judges. It need not be accurate for the tests to hold, since one threshold judges both arms; so it is
renewed at every 20th value at first and every 100th later, at points that do not depend on how evidence is
batched.

A request of stable's that failed, was cut off or needlessly refused is above every limit, as the candidate's
is, so it stands in the window as infinite: p99 of an arm of which 2 % are cut off is infinite, and nothing
lies above. The far tail is about time alone: 3 times the p99 of what went right.

Values are kept by stratum (task; for time to first token the lengths of prompt and cached part: a new arm
starts with a cold cache). A stratum with too few values is merged with all the others.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..api.guards import Metric
from .battery import FAR_FACTOR, Battery
from .columns import LATENCIES, Bools, Columns, Floats, Ints, codes

MAX_SAMPLES = 500
MAX_AGE_S = 600.0
MIN_SAMPLES = 20
FULL = 200
MAX_STRATA = 64
_RENEW_EARLY, _RENEW = 20, 100


class Stream:
    """One stratum: the last values of stable."""

    __slots__ = ("_asked", "_mark", "_row", "count", "times", "values")

    def __init__(self) -> None:
        self.values: Floats = np.zeros((2, 0))
        """Row of values as judged (infinite: above every limit) and row of values as measured (NaN: not)."""
        self.times: Floats = np.zeros(0)
        self.count = 0
        """Values so far, those dropped included."""
        self._mark = -1
        self._asked: tuple[int, ...] = ()
        self._row: Floats = np.zeros(0)

    def take(
        self,
        samples: Bools,
        value: Floats,
        time: Floats,
        percentiles: Sequence[int],
        wanted: Ints | None = None,
    ) -> Floats:
        """Thresholds for each of these requests (rows, NaN: too little is known; the far tail last), then
        their values.

        `samples`: which of them are stable's; `value`: two rows as in `values`; all in order of arrival.
        `wanted`: the requests for which thresholds are wanted; None: all.
        """
        held, values, times = len(self.times), self.values, self.times
        if samples.any():
            values = np.concatenate([values, value[:, samples]], axis=1)
            times = np.concatenate([times, time[samples]])
        before: Ints = held + np.cumsum(samples) - samples
        if wanted is not None:
            before, time = before[wanted], time[wanted]
        limits = self._limits(before, values, times, time, percentiles)
        self.count += len(times) - held
        drop = max(0, len(times) - MAX_SAMPLES - _RENEW)
        self.values, self.times = values[:, drop:], times[drop:]
        return limits

    def _limits(
        self, before: Ints, values: Floats, times: Floats, time: Floats, percentiles: Sequence[int]
    ) -> Floats:
        """`before`: how many of `values` came before each request."""
        kept = self.count - len(self.times)
        number = before + kept
        marks = number - number % np.where(number < FULL, _RENEW_EARLY, _RENEW)
        if not len(marks) or not percentiles:
            return np.full((len(marks), len(percentiles) + 1), np.nan)
        if marks[0] == marks[-1]:
            row = self._at(int(marks[0]), int(marks[0]) - kept, values, times, percentiles)
            found = np.repeat(row[None], len(marks), axis=0)
        else:
            begins = np.flatnonzero(np.diff(marks, prepend=-1))  # they never fall
            rows = [
                self._at(mark, mark - kept, values, times, percentiles) for mark in marks[begins].tolist()
            ]
            found = np.repeat(np.array(rows), np.diff(begins, append=len(marks)), axis=0)
        if len(times):
            stale = (before < 1) | (time - times[np.maximum(before - 1, 0)] > MAX_AGE_S)
            found[stale] = np.nan
        return found

    def _at(self, mark: int, end: int, values: Floats, times: Floats, percentiles: Sequence[int]) -> Floats:
        if mark == self._mark and self._asked == tuple(percentiles):
            return self._row
        row: Floats = np.full(len(percentiles) + 1, np.nan)
        if mark < MIN_SAMPLES:
            return row
        begin, oldest = max(0, end - MAX_SAMPLES), times[end - 1] - MAX_AGE_S
        if times[begin] < oldest:
            begin = int(np.searchsorted(times[:end], oldest))
        judged, measured = values[:, begin:end]
        self._mark, self._asked, self._row = mark, tuple(percentiles), row
        if len(judged) >= MIN_SAMPLES:
            ascending = np.sort(judged)
            row[:-1] = ascending[[quantile_rank(percent, len(judged)) for percent in percentiles]]
            good = int(np.searchsorted(ascending, np.inf))
            ascending = ascending[:good] if good >= MIN_SAMPLES else np.sort(measured[~np.isnan(measured)])
            if len(ascending) >= MIN_SAMPLES:
                row[-1] = FAR_FACTOR * ascending[quantile_rank(99, len(ascending))]
        return self._row


def quantile_rank(percent: int, num: int) -> int:
    """Index of the `percent` quantile among so many ascending values: an order statistic, always a value that
    occurred. Example: of 1, 2 … 20 the 95 % quantile is 19, the smallest that 95 % do not exceed."""
    return -(-percent * num // 100) - 1


class Strata:
    """All of one metric's streams."""

    __slots__ = ("all", "parts")

    def __init__(self) -> None:
        self.all = Stream()
        self.parts: dict[int, Stream] = {}

    def take(
        self, stratum: Ints, samples: Bools, value: Floats, time: Floats, percentiles: Sequence[int]
    ) -> Floats:
        """As `Stream.take`, each request by its own stratum, or by all where that has too few values."""
        limits = np.full((len(stratum), len(percentiles) + 1), np.nan)
        for part in np.unique(stratum).tolist():
            stream = self.parts.get(part)
            if stream is None:
                if len(self.parts) >= MAX_STRATA:
                    continue
                stream = self.parts[part] = Stream()
            here = np.flatnonzero(stratum == part)
            limits[here] = stream.take(samples[here], value[:, here], time[here], percentiles)
        short = np.flatnonzero(np.isnan(limits[:, 0]))
        limits[short] = self.all.take(samples, value, time, percentiles, short)
        return limits


def length_bucket(prompt: Floats, cached: Floats) -> Ints:
    """Stratum of a time to first token: prompt tokens in powers of four from 256, and whether less than half
    of it was cached."""
    size = np.digitize(prompt, (256.0, 1024.0, 4096.0, 16384.0))
    found: Ints = 2 * size + (2.0 * cached >= np.maximum(prompt, 1.0))
    return found


class StableValues:
    """Stable's recent values of all metrics. They outlive rollouts, so that the next one knows from its first
    request what slow is."""

    __slots__ = ("_strata", "_tasks")

    def __init__(self) -> None:
        self._strata = {metric: Strata() for metric in LATENCIES}
        self._tasks: dict[str, int] = {}

    def take(self, columns: Columns, samples: Bools, above: Bools, battery: Battery) -> dict[Metric, Floats]:
        """Thresholds for each request of a batch, of metrics that the battery asks for; then the batch's own
        values. `samples`: stable's requests that have ended; `above`: those above every limit."""
        found = {}
        lengths: Ints | None = None
        tasks = codes(columns.task, self._tasks)
        for metric, name in LATENCIES.items():
            measured = columns.numbers[name]
            value = np.stack([np.where(above, np.inf, measured), measured])
            mine = samples & ~np.isnan(value[0])
            asked = battery.percentiles(metric)
            if not asked and not mine.any():
                continue
            if metric is Metric.TTFT and lengths is None:
                lengths = length_bucket(columns.tokens["prompt_tokens"], columns.tokens["cached_tokens"])
            stratum = lengths if metric is Metric.TTFT and lengths is not None else tasks
            limits = self._strata[metric].take(stratum, mine, value, columns.time, asked)
            if asked:
                found[metric] = limits
        return found
