"""Traffic from a seed: arrivals, conversations, tasks and tenants, latencies, and what goes wrong anyhow.

Six shapes, each of which breaks a test that assumes independent requests at a steady rate:

- ``poisson``: none of that; the reference.
- ``bursty``: load comes and goes by an AR(1) series that rate and latencies of *both* arms share.
- ``diurnal``: a day's curve of the rate, latencies rising with load.
- ``heavy-tailed``: 3 % of all requests take a Pareto (1.2) multiple of their time.
- ``autocorrelated``: conversations of some turns that stay with their arm and are slow or fast as a whole.
- ``hiccups``: once a minute one arm, either one, is 3 times slower for 2 s.

Invariant: all randomness is the seed's.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from enum import StrEnum

import numpy as np

from .curves import Array, Curve, log_normal
from .trace import Ints, Outcomes, Trace, Wrong, totals

WARM_UP_S = 60.0
"""Seconds of stable's traffic before the rollout: its windows are filled, as they are in production."""

USUAL: Mapping[Wrong, float] = {
    Wrong.FAILED: 0.001,
    Wrong.INTERRUPTED: 0.0002,
    Wrong.TRUNCATED: 0.01,
    Wrong.REFUSED: 0.005,
    Wrong.SCHEMA: 0.002,
    Wrong.TOOL: 0.001,
    Wrong.RETRIED: 0.002,
    Wrong.REPEATED: 0.001,
    Wrong.COMPLAINT: 0.003,
}
"""Shares of requests that go wrong in either arm, where nothing else is given."""

_PROMPT_WEIGHT = 0.6
"""Correlation of the time to the first token with the prompt's length, as normal scores."""
_ARM_WEIGHT = 0.7
"""Part of the rest that is the pod's doing, not the request's."""


class Shape(StrEnum):
    """How requests come, and what moves latencies of both arms or of one."""

    POISSON = "poisson"
    BURSTY = "bursty"
    DIURNAL = "diurnal"
    HEAVY_TAILED = "heavy-tailed"
    AUTOCORRELATED = "autocorrelated"
    HICCUPS = "hiccups"


@dataclass(frozen=True)
class Traffic:
    """What comes in, and how sound arms behave."""

    rate: float = 20.0
    """Requests a second, in the mean."""
    shape: Shape = Shape.POISSON
    tasks: Mapping[str, float] = field(default_factory=lambda: {"chat": 1.0})
    """Share of each task."""
    tenants: Mapping[str, float] = field(default_factory=lambda: {"tenant": 1.0})
    """Share of each tenant."""
    ttft: Curve = field(default_factory=lambda: log_normal(0.3, 0.6))
    """Seconds to the first token."""
    tpot: Curve = field(default_factory=lambda: log_normal(0.02, 0.3))
    """Seconds a token."""
    tokens: Curve = field(default_factory=lambda: log_normal(80.0, 0.6))
    """Tokens of an answer."""
    prompt: Curve = field(default_factory=lambda: log_normal(400.0, 0.8))
    """Tokens of a prompt."""
    wrong: Mapping[Wrong, float] = field(default_factory=lambda: USUAL)
    """Shares of requests that go wrong in both arms alike."""
    turns: float = 5.0
    """Requests of a conversation, in the mean; for the autocorrelated shape."""
    day_s: float = 86_400.0
    """Length of a day; for the diurnal shape."""


def make_trace(traffic: Traffic, seconds: float, seed: int, index: int = 0) -> Trace:
    """Traffic from `WARM_UP_S` before the rollout to `seconds` after its start. `seed` and `index` fix it."""
    rng = np.random.default_rng([seed, index])
    weather = _weather(rng, traffic, seconds)
    times, unit = _arrivals(rng, traffic, seconds, weather)
    num, num_units = len(times), int(unit.max(initial=-1)) + 1
    tasks, task = _choose(rng, traffic.tasks, num_units, unit)
    tenants, tenant = _choose(rng, traffic.tenants, num_units, unit)
    prompt_score = rng.standard_normal(num)
    request_score = _request_scores(rng, traffic, num_units, unit)
    tokens = np.maximum(1, traffic.tokens.values(rng.standard_normal(num)).astype(np.int64))
    prompt = np.maximum(1, traffic.prompt.values(prompt_score).astype(np.int64))
    load = _load(traffic, times, weather) * _tail(rng, traffic, num)
    hiccup = _hiccups(rng, traffic, times, seconds)
    arms = [
        _outcomes(rng, traffic, prompt_score, request_score, tokens, load * hiccup[arm]) for arm in range(2)
    ]
    return Trace(
        seconds=seconds,
        times=times,
        unit=unit,
        bucket=rng.random(num_units)[unit],
        mirror_bucket=rng.random(num),
        task=task,
        tenant=tenant,
        prompt_tokens=prompt,
        cached_tokens=np.where(rng.random(num) < 0.3, prompt // 2, 0),
        output_tokens=tokens,
        beat=rng.random(num),
        stable=arms[0],
        candidate=arms[1],
        tasks=tasks,
        tenants=tenants,
    )


def _weather(rng: np.random.Generator, traffic: Traffic, seconds: float) -> Array:
    """Logarithm of how busy it is, by the second from the warm-up on: AR(1), standard deviation 0.6."""
    num = int(WARM_UP_S + seconds) + 2
    if traffic.shape is not Shape.BURSTY:
        return np.zeros(num)
    shocks = rng.normal(0.0, 0.19, num)
    level = np.empty(num)
    held = rng.normal(0.0, 0.6)
    for second in range(num):
        held = 0.95 * held + shocks[second]
        level[second] = held
    return level


def _arrivals(
    rng: np.random.Generator, traffic: Traffic, seconds: float, weather: Array
) -> tuple[Array, Ints]:
    """Times, ascending, and the conversation of each request."""
    if traffic.shape is Shape.AUTOCORRELATED:
        return _conversations(rng, traffic, seconds)
    second = np.arange(len(weather))
    rate = traffic.rate * np.exp(0.5 * weather - 0.5 * (0.5 * 0.6) ** 2 * (traffic.shape is Shape.BURSTY))
    if traffic.shape is Shape.DIURNAL:
        rate = rate * (1.0 + 0.8 * np.sin(2.0 * np.pi * second / traffic.day_s))
    counts = rng.poisson(rate)
    times = np.sort(np.repeat(second, counts) + rng.random(int(counts.sum()))) - WARM_UP_S
    times = times[times < seconds]
    return times, np.arange(len(times))


def _conversations(rng: np.random.Generator, traffic: Traffic, seconds: float) -> tuple[Array, Ints]:
    """Each begins at random and has a geometric number of turns, 10 s apart in the mean."""
    early = 20.0 * traffic.turns  # begins so long before, or there would be fewest requests at first
    num = rng.poisson(traffic.rate / traffic.turns * (WARM_UP_S + seconds + early))
    begins = rng.uniform(-WARM_UP_S - early, seconds, num)
    turns = rng.geometric(1.0 / traffic.turns, num)
    unit = np.repeat(np.arange(num), turns)
    gaps = rng.exponential(10.0, len(unit))
    first = np.cumsum(turns) - turns
    passed = np.cumsum(gaps)
    times = begins[unit] + passed - passed[first][unit]
    kept = (times >= -WARM_UP_S) & (times < seconds)
    times, unit = times[kept], unit[kept]
    order = np.argsort(times, kind="stable")
    _, unit = np.unique(unit[order], return_inverse=True)
    return times[order], unit.astype(np.int64)


def _choose(
    rng: np.random.Generator, shares: Mapping[str, float], num_units: int, unit: Ints
) -> tuple[tuple[str, ...], Ints]:
    names = tuple(shares)
    weights = np.array([shares[name] for name in names])
    picked = rng.choice(len(names), num_units, p=weights / weights.sum()) if num_units else np.zeros(0, int)
    return names, picked[unit].astype(np.int64)


def _request_scores(rng: np.random.Generator, traffic: Traffic, num_units: int, unit: Ints) -> Array:
    own = rng.standard_normal(len(unit))
    if traffic.shape is not Shape.AUTOCORRELATED:
        return own
    mixed: Array = np.sqrt(0.5) * (rng.standard_normal(num_units)[unit] + own)
    return mixed


def _load(traffic: Traffic, times: Array, weather: Array) -> Array:
    """Factor on the latencies of both arms."""
    if traffic.shape is Shape.BURSTY:
        return np.exp(weather[(times + WARM_UP_S).astype(np.int64)])
    if traffic.shape is Shape.DIURNAL:
        return np.exp(0.5 * np.sin(2.0 * np.pi * (times + WARM_UP_S) / traffic.day_s))
    return np.ones(len(times))


def _tail(rng: np.random.Generator, traffic: Traffic, num: int) -> Array:
    if traffic.shape is not Shape.HEAVY_TAILED:
        return np.ones(num)
    return np.where(rng.random(num) < 0.03, np.minimum(1.0 + rng.pareto(1.2, num), 200.0), 1.0)


def _hiccups(rng: np.random.Generator, traffic: Traffic, times: Array, seconds: float) -> tuple[Array, Array]:
    """Factors on stable's and the candidate's latencies."""
    factors = np.ones(len(times)), np.ones(len(times))
    if traffic.shape is Shape.HICCUPS:
        num = rng.poisson((WARM_UP_S + seconds) / 60.0)
        begins = rng.uniform(-WARM_UP_S, seconds, num)
        for begin, arm in zip(begins, rng.integers(0, 2, num), strict=True):
            factors[arm][(times >= begin) & (times < begin + 2.0)] = 3.0
    return factors


def _outcomes(
    rng: np.random.Generator, traffic: Traffic, prompt: Array, request: Array, tokens: Ints, load: Array
) -> Outcomes:
    num = len(load)
    pod = rng.standard_normal((2, num))
    mixed = np.sqrt(1.0 - _ARM_WEIGHT**2) * request + _ARM_WEIGHT * pod
    score = _PROMPT_WEIGHT * prompt + np.sqrt(1.0 - _PROMPT_WEIGHT**2) * mixed[0]
    ttft = traffic.ttft.values(score) * load
    tpot = traffic.tpot.values(mixed[1]) * load
    jitter = 0.3 * tpot * np.exp(rng.normal(0.0, 0.5, num))
    wrong = np.zeros(num, np.int64)
    for bit, share in traffic.wrong.items():
        wrong |= np.where(rng.random(num) < share, int(bit), 0)
    interrupted = (wrong & Wrong.INTERRUPTED) > 0
    wrong |= np.where(interrupted, int(Wrong.FAILED), 0)
    return Outcomes(ttft, tpot, jitter, totals(ttft, tpot, tokens, wrong), wrong)
