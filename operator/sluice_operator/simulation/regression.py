"""What is wrong with a simulated candidate, in the words of the command line.

``p95 x2`` is all latencies doubled, so that each quantile is; ``ttft x5`` and ``tpot x1.5`` are one stage of
them; ``3% x100`` hits so many requests; ``errors 5%`` raises a share to 5 %. Any of it may end with ``for
nl2sql`` and ``from 300s``, and several are joined by commas. A factor below 1 is an improvement.

Invariant: only the candidate's outcomes change, and only of requests that come from then on.
"""

from __future__ import annotations

import re
from dataclasses import dataclass, replace

import numpy as np

from .trace import Outcomes, Trace, Wrong, totals

_SHARES = {
    "errors": Wrong.FAILED,
    "interruptions": Wrong.INTERRUPTED,
    "truncations": Wrong.TRUNCATED,
    "refusals": Wrong.REFUSED,
    "schema failures": Wrong.SCHEMA,
    "tool failures": Wrong.TOOL,
    "retries": Wrong.RETRIED,
    "repetitions": Wrong.REPEATED,
    "hard": Wrong.HARD,
    "complaints": Wrong.COMPLAINT,
}
_LATENCIES = ("p50", "p90", "p95", "p99", "latency", "ttft", "tpot")
_NUMBER = r"([0-9]+(?:\.[0-9]+)?)"
_SCOPE = re.compile(rf"\s+(?:(?:only\s+)?for\s+([a-z0-9][a-z0-9-]*)|from\s+{_NUMBER}\s*(s|m|h)?)$")
_FACTOR = re.compile(rf"^({'|'.join(_LATENCIES)}|{_NUMBER}\s*%)\s*[x×]\s*{_NUMBER}$")
_SHARE = re.compile(rf"^({'|'.join(_SHARES)})\s+{_NUMBER}\s*%$")
_SECONDS = {"s": 1.0, "m": 60.0, "h": 3600.0, None: 1.0}


@dataclass(frozen=True)
class Change:
    """One thing that is different in the candidate."""

    ttft: float = 1.0
    """Factor on the time to the first token."""
    tpot: float = 1.0
    """Factor on the time for each further token."""
    share: float = 1.0
    """Part of the requests that it hits."""
    wrong: Wrong | None = None
    """What goes wrong in that part; None: latencies change."""
    task: str = ""
    """Only requests of this task; empty: all."""
    start: float = 0.0
    """Seconds after the start of the rollout."""


@dataclass(frozen=True)
class Regression:
    """All that is different; nothing in an A/A test."""

    changes: tuple[Change, ...] = ()
    text: str = "none"
    """As it was given."""

    @property
    def start(self) -> float:
        """Seconds after the start of the rollout from which on anything is different; 0 for nothing."""
        return min((change.start for change in self.changes), default=0.0)

    @property
    def task(self) -> str:
        """The one task that is hit; empty: more than one."""
        tasks = {change.task for change in self.changes}
        return tasks.pop() if len(tasks) == 1 else ""


class RegressionError(ValueError):
    """Not a regression; the message says what one looks like."""


def parse_regression(text: str, start: float = 0.0) -> Regression:
    """Reads the command line's words; `start` counts where none is given. Raises RegressionError.

    Example: ``p95 x2 for nl2sql from 300s, errors 5%``.
    """
    if text.strip().lower() in ("", "none", "a/a"):
        return Regression()
    changes = tuple(_change(part.strip().lower(), start) for part in text.split(","))
    return Regression(changes, " ".join(text.split()))


def _change(text: str, start: float) -> Change:
    task = ""
    body = text
    while (scope := _SCOPE.search(body)) is not None:
        if scope[1]:
            task = scope[1]
        else:
            start = float(scope[2]) * _SECONDS[scope[3]]
        body = body[: scope.start()]
    factor = _FACTOR.match(body)
    if factor is not None:
        share = float(factor[2]) / 100.0 if factor[2] else 1.0
        by = float(factor[3])
        both = factor[1] not in ("ttft", "tpot")
        change = Change(
            ttft=by if both or factor[1] == "ttft" else 1.0,
            tpot=by if both or factor[1] == "tpot" else 1.0,
            share=share,
            task=task,
            start=start,
        )
    elif (counted := _SHARE.match(body)) is not None:
        change = Change(share=float(counted[2]) / 100.0, wrong=_SHARES[counted[1]], task=task, start=start)
    else:
        raise RegressionError(
            f"{text!r} is no regression: write a latency and a factor (p95 x2, ttft x5, 3% x100) or a share"
            f" ({', '.join(_SHARES)} and a percentage: errors 5%), then perhaps: for TASK, from 300s"
        )
    if change.share > 1.0 or min(change.ttft, change.tpot) <= 0.0:
        raise RegressionError(f"{text!r}: a share is at most 100 %, a factor above 0")
    return change


def regress(trace: Trace, regression: Regression, seed: int, index: int = 0) -> Trace:
    """The trace with a candidate that has changed so. Raises RegressionError for a task that nobody asks
    for."""
    rng = np.random.default_rng([seed, index, 1])
    for change in regression.changes:
        trace = replace(trace, candidate=_changed(rng, trace, change))
    return trace


def _changed(rng: np.random.Generator, trace: Trace, change: Change) -> Outcomes:
    before = trace.candidate
    chance = rng.random(trace.num_requests)
    hit = (trace.times >= change.start) & (chance < change.share)
    if change.task:
        if change.task not in trace.tasks:
            raise RegressionError(f"nobody asks for task {change.task}: there is {', '.join(trace.tasks)}")
        hit &= trace.task == trace.tasks.index(change.task)
    if change.wrong is None:
        ttft = np.where(hit, before.ttft * change.ttft, before.ttft)
        tpot = np.where(hit, before.tpot * change.tpot, before.tpot)
        jitter = np.where(hit, before.jitter * change.tpot, before.jitter)
        wrong = before.wrong
    else:
        ttft, tpot, jitter = before.ttft, before.tpot, before.jitter
        bits = int(change.wrong) | (int(Wrong.FAILED) if change.wrong is Wrong.INTERRUPTED else 0)
        wrong = np.where(hit, before.wrong | bits, before.wrong)
    return Outcomes(ttft, tpot, jitter, totals(ttft, tpot, trace.output_tokens, wrong), wrong)
