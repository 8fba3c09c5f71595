"""Traffic as arrays: who asks when, and what either arm would make of it.

Invariant: a trace knows nothing of weights. Each request carries the outcome of both arms and a number in
[0, 1) that its conversation keeps: it goes to the candidate while the candidate's weight is above that, so
that a conversation stays with its arm as weights grow. So the same trace can be put through several tools.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from enum import IntFlag
from typing import Any

import numpy as np
from numpy.typing import NDArray

from .curves import Array

Ints = NDArray[np.int64]


class Wrong(IntFlag):
    """What can go wrong with an answer, and what can be said of it; as bits."""

    FAILED = 1
    INTERRUPTED = 2
    TRUNCATED = 4
    REFUSED = 8
    SCHEMA = 16
    TOOL = 32
    RETRIED = 64
    REPEATED = 128
    HARD = 256
    COMPLAINT = 512


@dataclass(frozen=True)
class Outcomes:
    """What one arm would make of each request."""

    ttft: Array
    """Seconds to the first token."""
    tpot: Array
    """Seconds for each further token."""
    jitter: Array
    """Seconds."""
    total: Array
    """Seconds until it ends; a failure ends early."""
    wrong: Ints
    """Bits of `Wrong`."""


@dataclass(frozen=True)
class Trace:
    """Requests in order of arrival."""

    seconds: float
    """How long it lasts; requests before 0 are stable's past."""
    times: Array
    """Seconds; the rollout begins at 0."""
    bucket: Array
    """In [0, 1), the same for a conversation."""
    mirror_bucket: Array
    """In [0, 1), by request: mirrored while the percentage is above."""
    unit: Ints
    """Number of the conversation."""
    task: Ints
    """Index into `tasks`."""
    tenant: Ints
    """Index into `tenants`."""
    prompt_tokens: Ints
    cached_tokens: Ints
    output_tokens: Ints
    beat: Array
    """Seconds from arrival to the next heartbeat of its pod, in [0, 1)."""
    stable: Outcomes
    candidate: Outcomes
    tasks: tuple[str, ...]
    tenants: tuple[str, ...]

    @property
    def num_requests(self) -> int:
        """All of them, stable's past included."""
        return len(self.times)

    def until(self, seconds: float) -> Trace:
        """The same trace, cut short."""
        last = int(np.searchsorted(self.times, seconds, side="left"))

        def cut(arm: Outcomes) -> Outcomes:
            return Outcomes(
                arm.ttft[:last], arm.tpot[:last], arm.jitter[:last], arm.total[:last], arm.wrong[:last]
            )

        columns: dict[str, Any] = {name: getattr(self, name)[:last] for name in _COLUMNS}
        columns |= {"stable": cut(self.stable), "candidate": cut(self.candidate)}
        return replace(self, seconds=min(seconds, self.seconds), **columns)


_COLUMNS = (
    "times", "bucket", "mirror_bucket", "unit", "task", "tenant", "prompt_tokens", "cached_tokens",
    "output_tokens", "beat",
)  # fmt: skip
"""Arrays of a trace by request, besides the arms' outcomes."""


def totals(ttft: Array, tpot: Array, tokens: Ints, wrong: Ints) -> Array:
    """Seconds until each request ends. A failure ends at what would have been its first token; what is
    interrupted, half-way."""
    whole = ttft + tpot * np.maximum(tokens - 1, 0)
    half = ttft + 0.5 * (whole - ttft)
    failed, interrupted = (wrong & Wrong.FAILED) > 0, (wrong & Wrong.INTERRUPTED) > 0
    return np.where(failed, np.where(interrupted, half, ttft), whole)
