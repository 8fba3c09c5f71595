"""Which tests a rollout's guards come to, and what part of alpha each has.

Invariant: weights are fixed before any evidence, and those of the tests that can fire sum to 1, so that the
weighted mean of their e-values is one e-value. A guard in mode Watch has weight 0. Example: `TTFT` with the
default percentiles comes to the ladder `TTFT` over p50, p90, p95, p99 and the far tail, and to the event
tests `TTFT/p95`, `TTFT/p99` and `TTFT/far`.

A ladder counts a conversation once, by its first request; event tests count it once, by its first bad one. So
the ladder is quick where conversations are short, and a regression in the middle of long ones is seen too.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from enum import Enum, auto

from ..api.guards import Gain, Guard, GuardMode, Metric
from ..api.routepolicy import Rule

FAR_FACTOR = 3.0
"""The far tail begins at so many times stable's p99: "3 % became 100 times slower" lies beyond it."""
FAR_RATE = 0.002
"""About how often stable itself is there; a ladder's odds need no more than a guess."""

LADDER_BLOCK = 8
"""A ladder is evaluated after so many requests, not after each."""


JUMP_PART = 0.63
"""At most so much of alpha is for clusters of rare events (`jump`); what they do not take is for the evidence
of the hour."""
_JUMP_PARTS = {Metric.ERROR_RATE: 0.6}
"""By a rate's metric. Four errors in a row of a candidate that gets a quarter of the requests are by chance
in 1 of 256 cases, whatever the test: to stop at the fourth costs nearly half of an alpha of 0.01."""
_OTHER_JUMP_PART = 0.004


class Kind(Enum):
    """What a test looks at."""

    LADDER = auto()
    TAIL = auto()
    RATE = auto()
    CEILING = auto()
    GAIN = auto()
    PAIR = auto()


@dataclass(frozen=True, slots=True)
class Test:
    """One sequential test. Each slice of the traffic has its own evidence for it."""

    name: str
    """Unique: TTFT, TTFT/p95, ErrorRate, Total/ceiling …"""
    kind: Kind
    metric: Metric
    guard: int
    """Index of the guard that it belongs to; of the gain for a gain."""
    mode: GuardMode
    tolerance: float
    """Factor on stable's limits or rate; below 1 for a gain."""
    tasks: frozenset[str] = frozenset()
    """Only these; empty: all."""
    percentiles: tuple[int, ...] = ()
    """Ladder: its thresholds. Tail, gain, ceiling of a value: the one it looks at; empty: the far tail."""
    limit: float = 0.0
    """Ceiling: seconds, money, or the share of requests."""
    weight: float = 0.0

    @property
    def block(self) -> int:
        """Requests after which it is evaluated."""
        return LADDER_BLOCK if self.counts_all else 1

    @property
    def counts_all(self) -> bool:
        """Whether good requests are evidence too."""
        return self.kind in (Kind.LADDER, Kind.CEILING) or (
            self.kind is Kind.GAIN and not self.metric.is_rate
        )

    @property
    def hazard(self) -> float:
        """Share of half the waiting capital that joins at each event: for events so rare that time is no
        measure."""
        rare = not self.counts_all and not self.percentiles
        return 0.1 if rare else 0.0

    def levels(self) -> tuple[float, ...]:
        """Ladder: how often stable exceeds each threshold, the far tail last."""
        return (*((100 - percent) / 100.0 for percent in self.percentiles), FAR_RATE)


@dataclass(frozen=True, slots=True)
class Battery:
    """All tests of a rule."""

    tests: tuple[Test, ...]
    guards: tuple[Guard, ...]
    gains: tuple[Gain, ...]
    asked: Mapping[Metric, tuple[int, ...]]

    def percentiles(self, metric: Metric) -> tuple[int, ...]:
        """Thresholds that any test of the metric needs, ascending; p99 is always among them, for the far
        tail. Empty: nobody asks."""
        return self.asked.get(metric, ())


def _asked(tests: Sequence[Test]) -> dict[Metric, tuple[int, ...]]:
    found: dict[Metric, set[int]] = {}
    for test in tests:
        if test.percentiles and test.kind in (Kind.LADDER, Kind.TAIL, Kind.GAIN):
            found.setdefault(test.metric, {99}).update(test.percentiles)
    return {metric: tuple(sorted(asked)) for metric, asked in found.items()}


_WEIGHTS = {
    Metric.TTFT: 3.0,
    Metric.TIME_TO_VERIFIED: 3.0,
    Metric.TIME_PER_TOKEN: 2.5,
    Metric.TOTAL: 4.0,
    Metric.INTER_TOKEN_JITTER: 1.5,
    Metric.COST_PER_SUCCESS: 1.0,
    Metric.ERROR_RATE: 4.0,
}
_TAIL_WEIGHT = {"p": 0.1, "far": 0.25}


def battery(rule: Rule) -> Battery:
    """The tests of a rule; none without a rollout."""
    if rule.rollout is None:
        return Battery((), (), (), {})
    guards, gains = tuple(rule.rollout.guards), tuple(rule.rollout.gains)
    found: list[Test] = []
    names: dict[str, int] = {}
    for index, guard in enumerate(guards):
        base = guard.metric.value
        names[base] = names.get(base, 0) + 1
        name = base if names[base] == 1 else f"{base}#{names[base]}"
        found += _rate(name, index, guard) if guard.metric.is_rate else _quantile(name, index, guard)
    total = sum(test.weight for test in found) or 1.0
    found = [replace(test, weight=test.weight / total) for test in found]
    found += [_gain(index, gain) for index, gain in enumerate(gains)]
    return Battery(tuple(found), guards, gains, _asked(found))


def gain_names(rule: Rule) -> list[str]:
    """Names of the expected gains, in the spec's order."""
    gains = rule.rollout.gains if rule.rollout is not None else []
    return [_gain(index, gain).name for index, gain in enumerate(gains)]


def _quantile(name: str, index: int, guard: Guard) -> list[Test]:
    percentiles = tuple(sorted(set(guard.percentiles)))
    weight = _WEIGHTS[guard.metric] if guard.mode is GuardMode.GUARD else 0.0
    first = Test(
        name,
        Kind.LADDER,
        guard.metric,
        index,
        guard.mode,
        1.0 + guard.max_increase_percent / 100.0,
        frozenset(guard.tasks),
        percentiles,
        weight=weight,
    )
    found = [first] if percentiles else []
    high = [p for p in percentiles if p >= 95] or list(percentiles[-1:])
    found += [
        replace(
            first, name=f"{name}/p{p}", kind=Kind.TAIL, percentiles=(p,), weight=weight * _TAIL_WEIGHT["p"]
        )
        for p in high
    ]
    far = replace(
        first, name=f"{name}/far", kind=Kind.TAIL, percentiles=(), weight=weight * _TAIL_WEIGHT["far"]
    )
    return [*found, far, *_ceiling(name, index, guard, weight)]


def _rate(name: str, index: int, guard: Guard) -> list[Test]:
    weight = _WEIGHTS.get(guard.metric, 0.4) if guard.mode is GuardMode.GUARD else 0.0
    kind = Kind.PAIR if guard.metric is Metric.DISAGREEMENT_RATE else Kind.RATE
    test = Test(
        name,
        kind,
        guard.metric,
        index,
        guard.mode,
        1.0 + guard.max_increase_percent / 100.0,
        frozenset(guard.tasks),
        weight=weight,
    )
    return [test, *_ceiling(name, index, guard, weight)]


def _ceiling(name: str, index: int, guard: Guard, weight: float) -> list[Test]:
    if guard.ceiling is None or guard.metric is Metric.DISAGREEMENT_RATE:
        return []
    limit = float(guard.ceiling.value)
    rate = guard.metric.is_rate
    return [
        Test(
            f"{name}/ceiling",
            Kind.CEILING,
            guard.metric,
            index,
            guard.mode,
            1.0,
            frozenset(guard.tasks),
            () if rate else (guard.ceiling.percentile,),
            limit / 100.0 if rate else limit,
            weight,
        )
    ]


def _gain(index: int, gain: Gain) -> Test:
    name = gain.metric.value if gain.metric.is_rate else f"{gain.metric.value}/p{gain.percentile}"
    before = "" if not gain.tasks else "@" + ",".join(sorted(gain.tasks))
    return Test(
        f"{name}{before}",
        Kind.GAIN,
        gain.metric,
        index,
        GuardMode.WATCH,
        1.0 - gain.min_decrease_percent / 100.0,
        frozenset(gain.tasks),
        () if gain.metric.is_rate else (gain.percentile,),
    )


def jump_parts(tests: tuple[Test, ...]) -> dict[int, float]:
    """Parts of alpha for clusters, by index of a rate's test; they sum to `JUMP_PART` at most."""
    parts = {
        at: _JUMP_PARTS.get(test.metric, _OTHER_JUMP_PART)
        for at, test in enumerate(tests)
        if test.kind is Kind.RATE and test.weight > 0.0
    }
    scale = min(1.0, JUMP_PART / (sum(parts.values()) or 1.0))
    return {at: scale * part for at, part in parts.items()}


def hourly_part(tests: tuple[Test, ...]) -> float:
    """Part of alpha for the evidence of the hour: what clusters do not take."""
    return 1.0 - sum(jump_parts(tests).values())


def num_stages(rule: Rule) -> int:
    """Stages with evidence of their own that the rollout will have if nothing happens."""
    rollout = rule.rollout
    if rollout is None:
        return 1
    return (rollout.shadow is not None) + len(rollout.steps) + (rollout.watch.seconds > 0)
