"""Flagger's canary analysis: once an interval the metrics are compared with fixed limits.

At each interval: roll back if the number of failed checks has reached the threshold; else check success rate
and p99 duration; if one fails, or has no value, count a failed check and stay; else raise the weight, or
promote where it is at its maximum. Failed checks add up over the whole analysis. Sources:
docs.flagger.app/usage/how-it-works (canary analysis: interval 60 s by default; the example has threshold 10,
maxWeight 50, stepWeight 5), docs.flagger.app/usage/deployment-strategies (gated stages; time to promote
interval × maxWeight / stepWeight, to roll back interval × threshold), docs.flagger.app/usage/metrics and
/faq#metrics (the queries; success rate at least 99, metric interval 1m, which should not be above the
loop's). Intervals under 10 s are taken as 10 s, a threshold under 1 as 1.

Example: interval 60, threshold 10, bad from the first check on: checks fail at 60, 120 … 600 s and the
rollback comes at 660 s.
"""

from __future__ import annotations

import math
from dataclasses import dataclass, replace

from ..result import Result
from ..trace import Trace
from .prometheus import Candidate


@dataclass(frozen=True)
class Flagger:
    """``analysis:`` of a Canary."""

    max_duration_s: float = 0.5
    """Upper limit for the p99 duration; documentation's example is 500 ms."""
    interval_s: float = 60.0
    threshold: int = 10
    max_weight: int = 50
    step_weight: int = 5
    metric_interval_s: float = 60.0
    min_success: float = 0.99


FLAGGER_DOCUMENTED = Flagger()
FLAGGER_QUICK = replace(FLAGGER_DOCUMENTED, interval_s=10.0, step_weight=2, metric_interval_s=10.0)
"""The shortest interval that it takes; the metrics' must not be longer. 2 % every 10 s are about 10 %
a minute."""
FLAGGER_FASTEST = replace(FLAGGER_QUICK, threshold=1)
"""The first failed check rolls back, which is what threshold is by default."""


def run(settings: Flagger, trace: Trace, onset: float = 0.0) -> Result:
    """Puts the trace through it. `onset`: when a regression begins, for counting the exposed."""
    candidate = Candidate(trace)
    interval = max(settings.interval_s, 10.0)
    weight, failed, now = 0, 0, 0.0
    outcome, reason = "unfinished", ""
    while now <= trace.seconds:
        if failed >= max(settings.threshold, 1):
            outcome = "rolled-back"
            break
        said = _check(settings, candidate, now) if weight else ""
        if said:
            failed, reason = failed + 1, said
        elif weight < settings.max_weight:
            weight = min(weight + settings.step_weight, 100)
            candidate.weigh(weight, now)
        else:
            outcome = "promoted"
            break
        now += interval
    now = min(now, trace.seconds)
    return Result(
        outcome,
        now,
        reason if outcome == "rolled-back" else "",
        num_exposed=candidate.num_sent(onset, now),
        num_candidate=candidate.num_sent(0.0, now),
    )


def _check(settings: Flagger, candidate: Candidate, now: float) -> str:
    """What failed; no value counts as failed."""
    window = settings.metric_interval_s
    share = candidate.success_share(now, window, instant=False)
    if share is None or math.isnan(share):
        return "no values found"
    if share < settings.min_success:
        return "request-success-rate"
    duration = candidate.duration_p99(now, window, instant=False)
    if duration is None or math.isnan(duration):
        return "no values found"
    return "request-duration" if duration > settings.max_duration_s else ""
