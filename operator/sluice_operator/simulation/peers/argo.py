"""Argo Rollouts' analysis: each metric is measured once an interval and compared with a success condition.

A measurement whose condition does not hold is Failed, one without data an Error that is repeated after 10 s.
A metric fails when more than `failure_limit` measurements have failed, and errs after more than
`consecutive_error_limit` errors in a row; either aborts the rollout. Background analysis runs beside the
steps and ends with them; analysis as a step blocks until `count` measurements are taken. Sources:
argo-rollouts.readthedocs.io/en/stable/features/analysis (background analysis: weights 20, 40, 60, 80 of 10
minutes, interval 5m, ``result[0] >= 0.95``, failureLimit 3, irate over 5m; failureLimit is 0 by default;
"interval: 60s, count: 5" for a step), and the CRD's field documentation (consecutiveErrorLimit 4 and
inconclusiveLimit 0 by default). With a success condition alone nothing is ever inconclusive. Not-a-number
meets no condition, so an idle candidate has failed.

Example: failureLimit 3, interval 5m, bad from the start: measured bad at 300, 600, 900 and 1200 s (the first
measurement, at 0 s, has no data), aborted at 1200 s.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace
from enum import StrEnum

from ..result import Result
from ..trace import Trace
from .prometheus import Candidate

RETRY_S = 10.0


class Phase(StrEnum):
    """Of one measurement."""

    SUCCESSFUL = "Successful"
    FAILED = "Failed"
    ERROR = "Error"


@dataclass(frozen=True)
class Argo:
    """Steps of a Rollout and the two metrics of its AnalysisTemplate."""

    max_duration_s: float = 0.5
    """Upper limit for the p99 duration."""
    steps: tuple[tuple[int, float], ...] = ((20, 600.0), (40, 600.0), (60, 600.0), (80, 600.0))
    """setWeight and pause, seconds."""
    interval_s: float = 300.0
    window_s: float = 300.0
    """Range of the queries."""
    instant: bool = True
    """irate(), as in the documentation: the last two scrapes alone; else rate() over the range."""
    min_success: float = 0.95
    failure_limit: int = 3
    consecutive_error_limit: int = 4
    count: int | None = None
    """None: in the background, for as long as the steps last. Else after each step's pause, so often."""


ARGO_DOCUMENTED = Argo()
ARGO_QUICK = replace(
    ARGO_DOCUMENTED, steps=tuple((weight, 60.0) for weight in (10, 20, 30, 40, 50)), interval_s=10.0,
    window_s=60.0, instant=False, min_success=0.99,
)  # fmt: skip
"""Measured every 10 s over the last minute, with the documented failureLimit."""
ARGO_FASTEST = replace(ARGO_QUICK, failure_limit=0)
"""The first failed measurement aborts, which is what failureLimit is by default."""


@dataclass
class _Metric:
    name: str
    next_at: float
    num_failed: int = 0
    num_errors: int = 0
    num_measured: int = 0


class _Run:
    """One AnalysisRun."""

    def __init__(self, settings: Argo, candidate: Candidate, begins: float) -> None:
        self._settings, self._candidate = settings, candidate
        self._metrics = [_Metric(name, begins) for name in ("success-rate", "duration")]

    def until(self, end: float) -> tuple[float, str] | None:
        """Measures until `end`. When and why it failed; None: it has not."""
        while True:
            open_metrics = [metric for metric in self._metrics if not self._complete(metric)]
            metric = min(open_metrics, key=lambda one: one.next_at, default=None)
            if metric is None or metric.next_at >= end:
                return None
            now = metric.next_at
            if reason := self._measure(metric, now):
                return now, reason

    @property
    def ends(self) -> float:
        """When its last measurement is due, if none errs."""
        assert self._settings.count is not None
        return max(
            metric.next_at + (self._settings.count - metric.num_measured - 1) * self._settings.interval_s
            for metric in self._metrics
        )

    @property
    def complete(self) -> bool:
        """Whether every metric has been measured `count` times."""
        return all(self._complete(metric) for metric in self._metrics)

    def _complete(self, metric: _Metric) -> bool:
        return self._settings.count is not None and metric.num_measured >= self._settings.count

    def _measure(self, metric: _Metric, now: float) -> str:
        settings = self._settings
        phase = self._phase(metric.name, now)
        if phase is Phase.ERROR:
            metric.num_errors += 1
            metric.next_at = now + RETRY_S
            return f"{metric.name}: no data" if metric.num_errors > settings.consecutive_error_limit else ""
        metric.num_errors = 0
        metric.num_measured += 1
        metric.num_failed += phase is Phase.FAILED
        metric.next_at = now + settings.interval_s
        return metric.name if metric.num_failed > settings.failure_limit else ""

    def _phase(self, name: str, now: float) -> Phase:
        settings = self._settings
        if name == "success-rate":
            value = self._candidate.success_share(now, settings.window_s, settings.instant)
            holds = value is not None and value >= settings.min_success
        else:
            value = self._candidate.duration_p99(now, settings.window_s, instant=False)
            holds = value is not None and not math.isnan(value) and value <= settings.max_duration_s
        if value is None:
            return Phase.ERROR
        return Phase.SUCCESSFUL if holds else Phase.FAILED


def run(settings: Argo, trace: Trace, onset: float = 0.0) -> Result:
    """Puts the trace through it. `onset`: when a regression begins, for counting the exposed."""
    candidate = Candidate(trace)
    background = _Run(settings, candidate, 0.0) if settings.count is None else None
    now = 0.0
    ended: tuple[str, float, str] | None = None
    for weight, pause in settings.steps:
        candidate.weigh(weight, now)
        now += pause
        if background is not None:
            failed = background.until(min(now, trace.seconds))
        else:
            inline = _Run(settings, candidate, now)
            failed = None
            while failed is None and not inline.complete and now < trace.seconds:
                now = min(inline.ends, trace.seconds)
                failed = inline.until(now + 1e-6)
        if failed is not None:
            ended = ("rolled-back", *failed)
            break
        if now >= trace.seconds:
            ended = ("unfinished", trace.seconds, "")
            break
    outcome, seconds, reason = ended or ("promoted", now, "")
    return Result(
        outcome,
        seconds,
        reason,
        num_exposed=candidate.num_sent(onset, seconds),
        num_candidate=candidate.num_sent(0.0, seconds),
    )
