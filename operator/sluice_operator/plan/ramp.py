"""The tested safe throughput of one pod: which load comes next, and what a level of load has shown. Pure.

A ramp at the policy's SLO, and not to the point of collapse: rates rise by half until a level breaks the SLO
twice, then the gap is halved (geometrically) twice, which leaves the result within 11 %. Worked example:
levels 1, 1.5 and 2.25 hold, 3.38 breaks, 2.76 holds, 3.05 breaks: the result is 2.76 requests a second.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, replace

from ..api.backend import Capacity
from ..api.routepolicy import Slo
from .capacity import in_flight, replicas_for

FACTOR = 1.5
NUM_HALVINGS = 2
PERCENTILE = 95
MIN_SAMPLES = 100
"""Requests of a level. With so many, 5 are the most that may be over a limit whose 95th percentile holds."""
MIN_SECONDS = 5.0
"""Shortest level: a queue needs time to show."""
MAX_RATE = 100_000.0
LOWEST = 0.1
"""A pod that breaks the SLO at a tenth of the load of one request after the other breaks it at any load."""
HEADROOM_PERCENT = 25
"""Room for bursts that is advised."""


@dataclass(frozen=True)
class Limits:
    """The SLO as numbers: seconds, and a fraction of requests."""

    ttft_s: float
    tpot_s: float
    errors: float

    @classmethod
    def of(cls, slo: Slo) -> Limits:
        return cls(float(slo.ttft_seconds), float(slo.time_per_token_seconds), float(slo.error_percent) / 100)

    def words(self) -> str:
        """Such as `p95 TTFT 2 s, p95 time per token 0.2 s, errors 1 %`."""
        latency = f"p95 TTFT {self.ttft_s:g} s, p95 time per token {self.tpot_s:g} s"
        return f"{latency}, errors {self.errors * 100:g} %"


@dataclass(frozen=True, slots=True)
class Sample:
    """One request that was sent. Times in seconds; None: not reached, or too short an answer for one."""

    ok: bool
    ttft_s: float | None = None
    tpot_s: float | None = None
    total_s: float | None = None


@dataclass(frozen=True)
class Level:
    """What one level has shown."""

    rate: float
    """Requests a second that were sent."""
    num_samples: int
    mean_s: float
    """Mean time of a request that was answered."""
    broken: str
    """Which promise broke, in words; empty: the SLO held."""


def judge(rate: float, samples: Sequence[Sample], limits: Limits) -> Level:
    """What the requests of one level say. One that failed is over every limit: it was not fast."""
    num, failed = len(samples), sum(not s.ok for s in samples)
    times = [s.total_s for s in samples if s.ok and s.total_s is not None]
    mean = sum(times) / len(times) if times else 0.0
    slow_ttft = sum(not s.ok or (s.ttft_s is not None and s.ttft_s > limits.ttft_s) for s in samples)
    slow_tpot = sum(not s.ok or (s.tpot_s is not None and s.tpot_s > limits.tpot_s) for s in samples)
    broken = ""
    if failed > limits.errors * num:
        broken = f"{failed} of {num} requests failed"
    elif slow_ttft > allowed(num):
        broken = f"{slow_ttft} of {num} requests took more than {limits.ttft_s:g} s to the first token"
    elif slow_tpot > allowed(num):
        broken = f"{slow_tpot} of {num} requests took more than {limits.tpot_s:g} s a token"
    elif not times:
        broken = "no request was answered"
    return Level(rate, num, mean, broken)


def allowed(num_samples: int) -> int:
    """How many of so many may be over a limit while the 95th percentile still holds."""
    return num_samples * (100 - PERCENTILE) // 100


def num_requests(rate: float) -> int:
    """Requests of a level: enough for its 95th percentile, and for a queue to show."""
    return max(MIN_SAMPLES, math.ceil(rate * MIN_SECONDS))


@dataclass(frozen=True)
class Ramp:
    """Where a ramp stands. `rate` comes next; 0: it is finished."""

    rate: float
    floor: float = 0.0
    """No level below this rate."""
    good: Level | None = None
    """Highest level that held."""
    bad: Level | None = None
    """Lowest level that broke, confirmed."""
    suspect: bool = False
    """The level at `rate` broke once, and is tried again."""
    num_halvings: int = 0

    @property
    def finished(self) -> bool:
        return self.rate == 0.0


def begin(single_s: float) -> Ramp:
    """A ramp for a pod that answers one request alone in `single_s` seconds: it begins at a load of one."""
    rate = min(MAX_RATE, 1.0 / max(single_s, 1e-5))
    return Ramp(rate, floor=rate * LOWEST)


def after(ramp: Ramp, level: Level) -> Ramp:
    """The ramp after `level` was seen at its rate."""
    if level.broken and not ramp.suspect:
        return replace(ramp, suspect=True)
    ramp = replace(ramp, suspect=False)
    ramp = replace(ramp, bad=level) if level.broken else replace(ramp, good=level)
    if ramp.good is None:
        return _to(ramp, level.rate / FACTOR)
    if ramp.bad is None:
        return _to(ramp, level.rate * FACTOR)
    if ramp.num_halvings == NUM_HALVINGS:
        return replace(ramp, rate=0.0)
    between = math.sqrt(ramp.good.rate * ramp.bad.rate)
    return replace(ramp, rate=between, num_halvings=ramp.num_halvings + 1)


def _to(ramp: Ramp, rate: float) -> Ramp:
    return replace(ramp, rate=rate if ramp.floor <= rate <= MAX_RATE else 0.0)


def capacity(
    good: Level, limits: Limits, *, prompt_tokens: int, output_tokens: int, now: str, identity: str
) -> Capacity:
    """What stands in a backend's status; `good` is the highest level that held."""
    return Capacity(
        safe_requests_per_second=decimal(good.rate),
        mean_seconds=decimal(good.mean_s),
        concurrency=decimal(in_flight(good.rate, good.mean_s)),
        slo=limits.words(),
        shape=f"{prompt_tokens} tokens in, {output_tokens} out",
        measured_at=now,
        identity=identity,
    )


def advised_replicas(rate: float, tested: Capacity | None, identity: str) -> int:
    """Replicas for `rate` requests a second with room for bursts; 0: unknown, since nothing was tested, or
    something else than what is on record."""
    if tested is None or tested.identity != identity or rate <= 0:
        return 0
    safe = float(tested.safe_requests_per_second)
    return replicas_for(rate * (100 + HEADROOM_PERCENT) / 100, safe) if safe > 0 else 0


def decimal(value: float) -> str:
    """Four significant digits, never in exponent notation."""
    if value <= 0:
        return "0"
    digits = max(0, 3 - math.floor(math.log10(value)))
    return f"{value:.{digits}f}".rstrip("0").rstrip(".") if digits else f"{value:.0f}"
