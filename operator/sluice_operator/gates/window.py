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
from dataclasses import dataclass
from typing import TypeVar

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

_Whole = TypeVar("_Whole", int, Ints)


@dataclass(slots=True)
class Limits:
    """Thresholds for each request of a batch: `rows[at]`. NaN: too little is known."""

    rows: Floats
    """The distinct ones: a column for each percentile, and last the far tail."""
    at: Ints

    def column(self, index: int) -> Floats:
        """One threshold for each request."""
        found: Floats = self.rows[:, index][self.at]
        return found

    def put(self, here: Ints, other: Limits) -> None:
        """Takes the thresholds of these requests from `other`."""
        self.at[here] = len(self.rows) + other.at
        self.rows = np.concatenate([self.rows, other.rows])


def unknown(size: int, percentiles: Sequence[int] = ()) -> Limits:
    """Of so many requests nothing is known."""
    return Limits(np.full((1, len(percentiles) + 1), np.nan), np.zeros(size, np.int64))


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
        self._row: Floats = np.zeros((1, 0))

    def take(
        self,
        samples: Bools,
        value: Floats,
        time: Floats,
        percentiles: Sequence[int],
        wanted: Ints | None = None,
    ) -> Limits:
        """Thresholds for each of these requests, then their values.

        `samples`: which of them are stable's; `value`: two rows as in `values`; all in order of arrival.
        `wanted`: the requests for which thresholds are wanted; None: all.
        """
        held, values, times = len(self.times), self.values, self.times
        if samples.any():
            values = np.concatenate([values, value.compress(samples, axis=1)], axis=1)
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
    ) -> Limits:
        """`before`: how many of `values` came before each request."""
        if not len(before) or not len(times) or not percentiles:
            return unknown(len(before), percentiles)
        kept = self.count - len(self.times)
        number = before + kept
        marks = np.where(number < FULL, number // _RENEW_EARLY * _RENEW_EARLY, number // _RENEW * _RENEW)
        nth: Ints = np.ones(len(marks), np.int64)
        if marks[0] == marks[-1]:  # they never fall
            marks = marks[:1]
        else:
            new = marks[1:] > marks[:-1]
            nth[1:] += np.cumsum(new)
            marks = np.concatenate([marks[:1], marks[1:][new]])
        rows = self._rows(marks, kept, values, times, tuple(percentiles))
        stale = (before < 1) | (time - times[np.maximum(before - 1, 0)] > MAX_AGE_S)
        nth[stale] = 0
        return Limits(np.concatenate([np.full((1, rows.shape[1]), np.nan), rows]), nth)

    def _rows(
        self, marks: Ints, kept: int, values: Floats, times: Floats, percentiles: tuple[int, ...]
    ) -> Floats:
        """Thresholds as of each of these marks."""
        if len(marks) > 1 or marks[0] != self._mark or percentiles != self._asked:
            rows = _thresholds(values, times, marks - kept, percentiles)
            self._mark, self._asked, self._row = int(marks[-1]), percentiles, rows[-1:]
            return rows
        return self._row


def _thresholds(values: Floats, times: Floats, ends: Ints, percentiles: tuple[int, ...]) -> Floats:
    """As of the first so many values: a row for each of `ends`, with the far tail last."""
    begins, oldest = np.maximum(ends - MAX_SAMPLES, 0), times[ends - 1] - MAX_AGE_S
    for row in np.flatnonzero(times[begins] < oldest).tolist():
        begins[row] = np.searchsorted(times[: ends[row]], oldest[row])
    num = np.repeat((ends - begins)[:, None], len(percentiles) + 1, axis=1)
    ascending = np.full((len(ends), max(1, num.max())), np.nan)
    for row, (begin, end) in enumerate(zip(begins.tolist(), ends.tolist(), strict=True)):
        ascending[row, : end - begin] = values[0, begin:end]
    ascending.sort(axis=1)  # NaN comes last
    num[:, -1] = np.count_nonzero(ascending < np.inf, axis=1)
    found = ascending[np.arange(len(ends))[:, None], quantile_rank(np.array([*percentiles, 99]), num)]
    found[num < MIN_SAMPLES] = np.nan
    for row in np.flatnonzero(num[:, -1] < np.minimum(num[:, 0], MIN_SAMPLES)).tolist():
        measured = values[1, begins[row] : ends[row]]
        measured = np.sort(measured[~np.isnan(measured)])
        if len(measured) >= MIN_SAMPLES:
            found[row, -1] = measured[quantile_rank(99, len(measured))]
    found[:, -1] *= FAR_FACTOR
    return found


def quantile_rank(percent: _Whole, num: _Whole) -> _Whole:
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
    ) -> Limits:
        """As `Stream.take`, each request by its own stratum, or by all where that has too few values."""
        limits = unknown(len(stratum), percentiles)
        for part in np.flatnonzero(np.bincount(stratum)).tolist():
            stream = self.parts.get(part)
            if stream is None:
                if len(self.parts) >= MAX_STRATA:
                    continue
                stream = self.parts[part] = Stream()
            here = np.flatnonzero(stratum == part)
            limits.put(here, stream.take(samples[here], value.take(here, axis=1), time[here], percentiles))
        short = np.flatnonzero(np.isnan(limits.column(0)))
        limits.put(short, self.all.take(samples, value, time, percentiles, short))
        return limits


def length_bucket(prompt: Ints, cached: Ints) -> Ints:
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

    def take(self, columns: Columns, samples: Bools, above: Bools, battery: Battery) -> dict[Metric, Limits]:
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
