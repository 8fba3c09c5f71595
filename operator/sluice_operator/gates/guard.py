"""One statistical guard: which requests are bad events, and what they prove.

A stable request is slow above stable's own quantile q, a candidate's above r * q, where r is the tolerance.
So a candidate within tolerance is slow no more often than stable is, which is the null hypothesis of
`sequential`. Nothing is said while stable has shown fewer than 20 values: what comes before counts for
neither arm.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence
from operator import attrgetter

from ..api.routepolicy import Guard, GuardStatus, Metric
from . import sequential
from .observation import Observation
from .window import StableWindow

VALUES: dict[Metric, Callable[[Observation], float | None]] = {
    Metric.TTFT: attrgetter("ttft_s"),
    Metric.TIME_PER_TOKEN: attrgetter("tpot_s"),
    Metric.TOTAL: attrgetter("total_s"),
}
"""How each latency metric reads in an observation, seconds."""

MAX_CANDIDATE_EVENTS_PER_SECOND = 3
"""After so many bad events of the candidate a guard hears neither arm until the next second: a hiccup is
no verdict. Both arms, since dropping the candidate's alone would hide a regression under high load."""


def _unmeasured(_: Observation) -> float | None:
    return None


def guard_names(guards: Sequence[Guard]) -> list[str]:
    """A unique name for each guard, such as TTFT/p95; a repeated one gets #2."""
    names: list[str] = []
    for guard in guards:
        base = guard.metric.value
        if guard.metric is not Metric.ERROR_RATE:
            base = f"{base}/p{guard.percentile}"
        num_before = sum(name == base or name.startswith(f"{base}#") for name in names)
        names.append(f"{base}#{num_before + 1}" if num_before else base)
    return names


class GuardEvidence:
    """Evidence of one guard since it last restarted."""

    __slots__ = (
        "_events_this_second",
        "_read",
        "_second",
        "_seen",
        "e_value",
        "log_wealth",
        "metric",
        "name",
        "num_bad_candidate",
        "num_bad_stable",
        "percentile",
        "tolerance",
        "window",
    )

    def __init__(
        self, name: str, guard: Guard, window: StableWindow | None, saved: GuardStatus | None
    ) -> None:
        self.name = name
        self.metric = guard.metric
        self._read = VALUES.get(guard.metric, _unmeasured)
        self.percentile = guard.percentile
        self.tolerance = 1.0 + guard.max_increase_percent / 100.0
        self.window = window
        """Stable's values; None for the error rate."""
        self.log_wealth: tuple[float, ...] = ()
        self.num_bad_stable = 0
        self.num_bad_candidate = 0
        if saved is not None and len(saved.log_wealth) == len(sequential.ODDS):
            self.log_wealth = tuple(float(text) for text in saved.log_wealth)
            self.num_bad_stable = saved.num_bad_stable
            self.num_bad_candidate = saved.num_bad_candidate
        self.e_value = sequential.e_value(self.log_wealth, self.num_bad_stable + self.num_bad_candidate)
        self._seen: set[str] = set()
        self._second = -math.inf
        self._events_this_second = 0

    def value(self, seen: Observation) -> float | None:
        """The measured value of this guard's metric; None: not measured, or not at its end."""
        if self.metric is Metric.TOTAL and (seen.cancelled or seen.censored):
            return None
        return self._read(seen)

    def limit(self, candidate: bool, time: float) -> float | None:
        """Seconds above which a request of that arm is slow now; None: stable has shown too little."""
        quantile = self.window.quantile(self.percentile, time) if self.window is not None else None
        if quantile is None:
            return None
        return quantile * self.tolerance if candidate else quantile

    def is_bad(self, seen: Observation, candidate: bool) -> bool:
        """Whether what is known of the request is a bad event already."""
        if self.window is None:
            return seen.failed
        limit = self.window.quantile(self.percentile, seen.time)
        if limit is None:
            return False
        if candidate:
            limit *= self.tolerance
        if seen.failed:
            return True
        value = self.value(seen) if seen.cancelled or seen.censored else self._read(seen)
        if value is not None:
            return value > limit
        return self._still_open(seen) and seen.age_s > limit

    def take(self, seen: Observation, candidate: bool, share: float) -> bool:
        """Counts a bad event, once a request and once a conversation and arm. True: it changed the
        evidence."""
        if not self.is_bad(seen, candidate) or self._counted(seen, candidate):
            return False
        if self._too_many(seen.time, candidate):
            return False
        fair = sequential.null_share(share, self.tolerance if self.window is None else 1.0)
        num_events = self.num_bad_stable + self.num_bad_candidate
        self.log_wealth = sequential.bet(self.log_wealth, num_events, fair, candidate)
        if candidate:
            self.num_bad_candidate += 1
        else:
            self.num_bad_stable += 1
        self.e_value = sequential.e_value(self.log_wealth, num_events + 1)
        return True

    def status(self) -> GuardStatus:
        """The checkpoint."""
        return GuardStatus(
            name=self.name, log_wealth=[f"{value:.9f}" for value in self.log_wealth],
            num_bad_stable=self.num_bad_stable, num_bad_candidate=self.num_bad_candidate,
        )

    def _still_open(self, seen: Observation) -> bool:
        """Whether the metric's value is at least the request's age, because it had not ended when last
        seen."""
        if self.metric is Metric.TTFT:
            return (seen.censored or seen.cancelled) and not seen.first_token
        return self.metric is Metric.TOTAL and (seen.censored or seen.cancelled)

    def _counted(self, seen: Observation, candidate: bool) -> bool:
        arm = "c" if candidate else "s"
        keys = {f"{arm}r{seen.request_id}", f"{arm}u{seen.unit}" if seen.unit else f"{arm}r{seen.request_id}"}
        known = not self._seen.isdisjoint(keys)
        self._seen |= keys
        return known

    def _too_many(self, time: float, candidate: bool) -> bool:
        second = math.floor(time)
        if second != self._second:
            self._second, self._events_this_second = second, 0
        if self._events_this_second >= MAX_CANDIDATE_EVENTS_PER_SECOND:
            return True
        self._events_this_second += candidate
        return False


def combined(guards: Iterable[GuardEvidence]) -> float:
    """One e-value for all guards: their mean, so that alpha holds for all of them together. 1 without
    guards."""
    values = [guard.e_value for guard in guards]
    return sum(values) / len(values) if values else 1.0
