"""What both arms did in an attempt, for the ledger: counts, quantiles, tokens, time and cost.

Figures for people, not for decisions: quantiles come from histograms whose buckets are 5 % wide, so they are
within 5 %. Invariant: each request counts once for its arm, whoever tells of it.

After a restart of the operator counts, tokens, time and cost go on from the record (`restore`); the
histograms do not. Quantiles are then those of the requests since, and until `MIN_FRESH` of them have ended
the recorded ones stand.
"""

from __future__ import annotations

import numpy as np

from ..api.guards import Metric
from ..api.releaserecord import ArmEvidence, Quantiles
from .columns import LATENCIES, RATES, TOKEN_COUNTS, Bools, Columns, Floats, Ints
from .seen import Answered

_WIDTH = float(np.log(1.05))
_LOWEST = float(np.log(1e-5))
_NUM_BUCKETS = 500
MIN_FRESH = 100


class Histogram:
    """Values from 10 µs to about five days, by logarithm."""

    __slots__ = ("counts",)

    def __init__(self) -> None:
        self.counts: Ints = np.zeros(_NUM_BUCKETS, np.int64)

    def add(self, values: Floats) -> None:
        """Puts values in; NaN is left out."""
        values = values[~np.isnan(values)]
        if len(values):
            bucket = (np.log(np.maximum(values, 1e-5)) - _LOWEST) / _WIDTH
            bucket = np.clip(bucket.astype(np.int64), 0, _NUM_BUCKETS - 1)
            self.counts += np.bincount(bucket, minlength=_NUM_BUCKETS)

    def quantile(self, percent: int) -> float | None:
        """Middle of the bucket in which the quantile lies; None: no values."""
        total = int(self.counts.sum())
        if not total:
            return None
        bucket = int(np.searchsorted(np.cumsum(self.counts), -(-percent * total // 100)))
        return float(np.exp(_LOWEST + (bucket + 0.5) * _WIDTH))


class ArmSummary:
    """One arm."""

    __slots__ = (
        "_base",
        "busy_s",
        "cost",
        "counts",
        "mirrored",
        "num",
        "priced",
        "successes",
        "times",
        "tokens",
    )

    def __init__(self, base: ArmEvidence | None = None) -> None:
        """`base`: what the record says of the time before."""
        self._base = base or ArmEvidence()
        self.num = self.mirrored = self.successes = 0
        self.counts: dict[str, int] = {}
        timed = (Metric.TTFT, Metric.TIME_TO_VERIFIED, Metric.TIME_PER_TOKEN, Metric.TOTAL)
        self.times = {metric: Histogram() for metric in timed}
        self.tokens = dict.fromkeys(TOKEN_COUNTS, 0)
        self.busy_s = self.cost = 0.0
        self.priced = False

    def take(self, columns: Columns, rows: Ints, needless: bool) -> None:
        """Counts these requests, which have ended."""
        flags = columns.flags
        self.num += len(rows)
        self.mirrored += int(flags["mirror"][rows].sum())
        refused = flags["refused"][rows]
        for metric, name in RATES.items():
            self._count(metric, flags[name][rows])
        if needless:
            self._count(Metric.NEEDLESS_REFUSAL_RATE, refused)
        good = ~(flags["failed"] | flags["truncated"] | flags["cancelled"])[rows]
        self.successes += int((good & ~refused if needless else good).sum())
        ended = rows[~(flags["failed"] | flags["cancelled"])[rows]]
        for metric, histogram in self.times.items():
            histogram.add(columns.numbers[LATENCIES[metric]][ended])
        for name in self.tokens:
            self.tokens[name] += int(columns.tokens[name][rows].sum())
        self.busy_s += float(np.nansum(columns.numbers["busy_s"][rows]))
        cost = columns.numbers["cost"][rows]
        self.priced = self.priced or bool((~np.isnan(cost)).any())
        self.cost += float(np.nansum(cost))

    @property
    def cached_share(self) -> float:
        """Share of the prompt tokens that the prefix cache had, of requests seen in this process."""
        prompt = self.tokens["prompt_tokens"]
        return self.tokens["cached_tokens"] / prompt if prompt else 0.0

    def complain(self, num: int) -> None:
        """Negative feedback."""
        name = Metric.NEGATIVE_FEEDBACK_RATE.value
        self.counts[name] = self.counts.get(name, 0) + num

    def evidence(self) -> ArmEvidence:
        """For the ledger. Hours of replicas, the fullest cache and the price of hours are not known here:
        what the requests themselves cost stands in `cost`."""
        base = self._base
        counts = {
            name: base.counts.get(name, 0) + self.counts.get(name, 0)
            for name in sorted({*base.counts, *self.counts})
        }
        priced = self.priced or bool(base.cost)
        cost = _number(base.cost) + self.cost
        num_before = base.num_requests - sum(
            base.counts.get(metric.value, 0) for metric in (Metric.ERROR_RATE, Metric.TRUNCATION_RATE)
        )
        successes = self.successes + max(0, num_before)
        return base.model_copy(
            update={
                "num_requests": base.num_requests + self.num,
                "num_mirrored": base.num_mirrored + self.mirrored,
                "ttft_seconds": self._quantiles(Metric.TTFT, base.ttft_seconds),
                "time_to_verified_seconds": self._quantiles(
                    Metric.TIME_TO_VERIFIED, base.time_to_verified_seconds
                ),
                "time_per_token_seconds": self._quantiles(Metric.TIME_PER_TOKEN, base.time_per_token_seconds),
                "total_seconds": self._quantiles(Metric.TOTAL, base.total_seconds),
                "counts": counts,
                **{name: getattr(base, name) + num for name, num in self.tokens.items()},
                "busy_seconds": _text(_number(base.busy_seconds) + self.busy_s),
                "cost": _text(cost) if priced else "",
                "cost_per_success": _text(cost / successes) if priced and successes else "",
            }
        )

    def _count(self, metric: Metric, flagged: Bools) -> None:
        num = int(flagged.sum())
        if num:
            self.counts[metric.value] = self.counts.get(metric.value, 0) + num

    def _quantiles(self, metric: Metric, before: Quantiles) -> Quantiles:
        histogram = self.times[metric]
        if before.p50 and int(histogram.counts.sum()) < MIN_FRESH:
            return before
        found = [histogram.quantile(percent) for percent in (50, 95, 99)]
        return Quantiles(
            **{
                name: "" if value is None else _text(value)
                for name, value in zip(("p50", "p95", "p99"), found, strict=True)
            }
        )


class Summary:
    """Both arms over an attempt."""

    __slots__ = ("_unwell", "candidate", "stable")

    def __init__(self) -> None:
        self.stable, self.candidate = ArmSummary(), ArmSummary()
        self._unwell = Answered()

    def restore(self, stable: ArmEvidence, candidate: ArmEvidence) -> None:
        """Goes on from a record, after a restart; what has been counted since is lost."""
        self.stable, self.candidate = ArmSummary(stable), ArmSummary(candidate)

    def take(self, columns: Columns, mine: Bools, new: Bools, complained: Bools, needless: bool) -> None:
        """Counts a batch. `mine`: of the attempt and no pair; `new`: ended well, for the first time;
        `complained`: rows of negative feedback."""
        rest = np.flatnonzero(mine & ~new & (columns.flags["failed"] | columns.flags["cancelled"]))
        rows = np.flatnonzero(mine & new)
        if len(self._unwell) or len(rest):
            told = rows[~self._unwell.known(rows, columns.candidate, columns.request)]
            bad = self._unwell.new(rest, columns.candidate, columns.request)
            rows = np.sort(np.concatenate([told, bad]))
        candidate = columns.candidate[rows]
        for arm, chosen in ((self.stable, rows[~candidate]), (self.candidate, rows[candidate])):
            if len(chosen):
                arm.take(columns, chosen, needless)
        for arm, is_candidate in ((self.stable, False), (self.candidate, True)):
            num = int((complained & (columns.candidate == is_candidate)).sum()) if complained.any() else 0
            if num:
                arm.complain(num)


def _number(text: str) -> float:
    return float(text) if text else 0.0


def _text(value: float) -> str:
    """A decimal string, without an exponent."""
    return f"{value:.6f}".rstrip("0").rstrip(".")
