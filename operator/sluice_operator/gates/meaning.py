"""What a request means to a test: an event or not, and in which cell it falls.

Invariant: it depends on the request, on stable's thresholds from before it and on its arm's tolerance, and on
nothing else that the candidate did. A request that failed, was cut off or needlessly refused is above every
limit of every value.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from ..api.guards import Metric
from .battery import Battery, Kind, Test
from .columns import RATES, Bools, Columns, Floats, Ints
from .window import Limits, unknown

NONE = np.zeros(0, np.int64)


@dataclass(slots=True)
class Batch:
    """Requests with what is known of them beside their own columns."""

    columns: Columns
    counted: Bools
    """Began under the evidence's traffic."""
    ended: Bools
    """Of these, those that ended here, well or not."""
    complained: Bools
    """Negative feedback on a request of this stage."""
    pairs: list[tuple[int, bool]]
    """Rows at which exactly one of three greedy answers differed, and whether it was the candidate's."""
    limits: dict[Metric, Limits]
    """Stable's quantiles for each request, by metric; a column each of `Battery.percentiles`."""
    needless: bool
    """A refusal by the model is a failure in this rule."""


@dataclass(slots=True)
class Values:
    """A metric of each request of a batch."""

    bound: Floats
    """Its value, or what it exceeds; infinite: above every limit; NaN: not measured."""
    measured: Floats
    """The same by the clock alone, for the far tail: an error has a guard of its own."""
    final: Bools
    """Whether the value can't change any more."""
    limits: Limits
    """Stable's quantiles times the arm's tolerance."""


def flagged(metric: Metric, columns: Columns, needless: bool) -> Bools:
    """Requests that have what a rate counts; none for feedback and pairs, which other records bring."""
    if metric is Metric.NEEDLESS_REFUSAL_RATE:
        return columns.flags["refused"] if needless else np.zeros(columns.size, bool)
    return columns.flags[RATES[metric]] if metric in RATES else np.zeros(columns.size, bool)


def flags_of(test: Test, batch: Batch, counted: Bools) -> Bools:
    """Requests that are events of a rate."""
    if test.metric is Metric.NEGATIVE_FEEDBACK_RATE:
        return batch.complained
    return counted & flagged(test.metric, batch.columns, batch.needless)


def values_of(test: Test, batch: Batch) -> Values:
    """What the batch says of the test's metric."""
    value, final = batch.columns.value(test.metric)
    above = batch.columns.above_all(batch.needless)
    limits = batch.limits.get(test.metric) or unknown(batch.columns.size)
    rows, at = limits.rows, limits.at + len(limits.rows) * batch.columns.candidate
    limits = Limits(np.concatenate([rows, test.tolerance * rows]), at)
    return Values(np.where(above, np.inf, value), value, final | above, limits)


def column_of(test: Test, battery: Battery) -> int:
    """Column of a tail's threshold; the last is the far tail's."""
    known = battery.percentiles(test.metric)
    return known.index(test.percentiles[0]) if test.percentiles else len(known)


def events(test: Test, battery: Battery, batch: Batch, counted: Bools, values: Values | None) -> Ints | None:
    """Rows that are events of the test; None: it looks at no events."""
    if test.kind is Kind.TAIL and values is not None:
        value = values.bound if test.percentiles else values.measured
        return np.flatnonzero(counted & (value > values.limits.column(column_of(test, battery))))
    if test.kind is Kind.RATE:
        found = flags_of(test, batch, counted)
        return np.flatnonzero(found) if found.any() else NONE
    return None


def on_ladder(
    test: Test, battery: Battery, batch: Batch, counted: Bools, values: Values
) -> tuple[Bools, Ints]:
    """Which requests a ladder counts, and their cells. One that still runs counts once it is past the highest
    quantile that is finite."""
    known = battery.percentiles(test.metric)
    columns = [known.index(percent) for percent in test.percentiles]
    bound, limits = values.bound, values.limits
    past = np.zeros(batch.columns.size, np.int64)
    for column in columns:
        past += bound > limits.column(column)
    num_cells = len(columns) + 1
    if test.kind is Kind.LADDER:
        past += values.measured > limits.column(-1)
        num_cells += 1
    cell = past + num_cells * batch.columns.candidate
    tops = limits.rows[:, columns]
    top = np.where(np.isinf(tops), -np.inf, tops).max(axis=1)[limits.at]
    told = values.final | ((bound > top) & (top > 0.0))
    return counted & told & ~np.isnan(limits.column(columns[-1])) & ~np.isnan(bound), cell


def against_ceiling(test: Test, batch: Batch, counted: Bools, values: Values | None) -> tuple[Bools, Ints]:
    """Which of the candidate's requests a ceiling counts: over it (cell 1) or ended below it (cell 0).

    Feedback comes after the end, so it corrects: cell 2 is worth what over is more than below. Until it comes
    wealth is lower than what it stands for, so it is still bounded by a martingale.
    """
    columns = batch.columns
    if values is not None:
        over, ended = values.bound > test.limit, values.final
    else:
        over = flags_of(test, batch, counted)
        ended = ~columns.running & (columns.flags["failed"] | ~np.isnan(columns.numbers["total_s"]))
    if test.metric is Metric.NEGATIVE_FEEDBACK_RATE:
        return counted & columns.candidate & ended, np.zeros(columns.size, np.int64)
    return counted & columns.candidate & (ended | over), over.astype(np.int64)
