"""Observations as columns, so that thousands are judged at once.

Invariant: row i of every column is the i-th observation, in order of arrival; NaN is "not measured".
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..api.guards import Metric
from .observation import ArmName, Observation

Floats = NDArray[np.float64]
Ints = NDArray[np.int64]
Bools = NDArray[np.bool_]

_NUMBERS = ("time", "age_s", "ttft_s", "verified_s", "tpot_s", "jitter_s", "total_s", "busy_s", "cost")
TOKEN_COUNTS = ("prompt_tokens", "cached_tokens", "output_tokens", "guessed_tokens", "accepted_tokens")
_FLAGS = ("failed", "cancelled", "truncated", "refused", "repeated", "schema_failed", "tool_failed",
          "interrupted", "retried", "censored", "first_token", "mirror", "pair")  # fmt: skip

LATENCIES = {
    Metric.TTFT: "ttft_s",
    Metric.TIME_TO_VERIFIED: "verified_s",
    Metric.TIME_PER_TOKEN: "tpot_s",
    Metric.INTER_TOKEN_JITTER: "jitter_s",
    Metric.TOTAL: "total_s",
    Metric.COST_PER_SUCCESS: "cost",
}
"""Metrics with a value for each request, and where it stands."""

RATES = {
    Metric.ERROR_RATE: "failed",
    Metric.REFUSAL_RATE: "refused",
    Metric.SCHEMA_FAILURE_RATE: "schema_failed",
    Metric.TOOL_ARGUMENT_FAILURE_RATE: "tool_failed",
    Metric.TRUNCATION_RATE: "truncated",
    Metric.INTERRUPTION_RATE: "interrupted",
    Metric.RETRY_RATE: "retried",
    Metric.REPETITION_RATE: "repeated",
}
"""Metrics that are a flag of the request; needless refusal, feedback and disagreement are not among them."""


class Columns:
    """A batch."""

    __slots__ = (
        "attempt",
        "begin",
        "candidate",
        "feedback",
        "flags",
        "hard_violations",
        "numbers",
        "request",
        "size",
        "task",
        "tenant",
        "tokens",
        "unit",
    )

    def __init__(self, rows: Sequence[Observation]) -> None:
        self.size = len(rows)
        read = _by_name(rows)
        self.numbers = {name: _floats(read[name]) for name in _NUMBERS}
        self.tokens = {name: np.fromiter(read[name], np.int64, self.size) for name in TOKEN_COUNTS}
        self.flags = {name: bools(read[name]) for name in _FLAGS}
        self.attempt, self.task, self.tenant = read["attempt"], read["task"], read["tenant"]
        self.request, self.unit = read["request_id"], read["unit"]
        self.feedback, self.hard_violations = read["feedback"], read["hard_violations"]
        candidate = ArmName.CANDIDATE  # looked up once: it is no plain attribute
        self.candidate = bools([arm is candidate for arm in read["arm"]])
        self.begin: Floats = self.numbers["time"] - self.numbers["age_s"]

    @property
    def time(self) -> Floats:
        """Arrival, Unix seconds."""
        return self.numbers["time"]

    @property
    def age(self) -> Floats:
        """Seconds since the request began."""
        return self.numbers["age_s"]

    @property
    def running(self) -> Bools:
        """Not ended when seen, or left by its client: times are at least its age."""
        found: Bools = self.flags["censored"] | self.flags["cancelled"]
        return found

    def above_all(self, needless: bool) -> Bools:
        """Counts as slower than every limit: failed, cut off, or needlessly refused."""
        found: Bools = self.flags["failed"] | self.flags["truncated"]
        return found | self.flags["refused"] if needless else found

    def value(self, metric: Metric) -> tuple[Floats, Bools]:
        """The metric's value or a bound that it exceeds (NaN: neither), and whether it is final.

        A running request's times to first token, to what is verified and to its end are at least its age as
        long as they have not come; so a request past a limit is
        evidence before it ends. Mean time per token and jitter can still fall, so what has been measured of
        them in a running request counts as a bound only where a record brings it.
        """
        value: Floats = self.numbers[LATENCIES[metric]]
        running, measured = self.running, ~np.isnan(value)
        if metric is Metric.TTFT:
            still_open = running & ~measured & ~self.flags["first_token"]
            bound: Floats = np.where(still_open, self.age, value)
            return bound, measured
        if metric is Metric.TIME_TO_VERIFIED:
            return np.where(running & ~measured, self.age, value), measured
        if metric is Metric.TOTAL:
            total: Floats = np.where(running | (self.flags["failed"] & ~measured), self.age, value)
            return total, measured & ~running
        if metric is Metric.COST_PER_SUCCESS:
            return value, measured & ~running
        final: Bools = measured & ~self.flags["censored"]
        return value, final


def _by_name(rows: Sequence[Observation]) -> dict[str, list[Any]]:
    flat: list[Any] = []  # one list: thousands of them would set off the garbage collector
    for row in rows:
        flat += row
    names = Observation._fields
    return {name: flat[at :: len(names)] for at, name in enumerate(names)}


def _floats(values: Sequence[float | None]) -> Floats:
    return np.fromiter(values, float, len(values))  # None becomes NaN


def bools(flags: Sequence[bool]) -> Bools:
    """Flags as a column, which is read-only."""
    return np.frombuffer(bytes(flags), bool)


def codes(texts: Sequence[str], known: dict[str, int], base: int = 0) -> Ints:
    """Numbers for the texts, from `base` on; `known` grows."""
    for text in texts:
        if text not in known:
            known[text] = base + len(known)
    return np.fromiter(map(known.__getitem__, texts), np.int64, len(texts))
