"""How much a rule is asked, of the last minute: what a step would send the candidate follows from it."""

from __future__ import annotations

from collections import Counter, deque
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field

from ..gates import ArmName, Observation
from ..gates.gate import CLOCK_SLACK_S

WINDOW_S = 60
MIN_S = 5.0
"""What was seen in less says nothing of a rate."""


@dataclass
class _Second:
    second: int
    slices: Counter[tuple[str, str]] = field(default_factory=Counter)
    arms: Counter[str] = field(default_factory=Counter)
    num_candidate: int = 0
    candidate_s: float = 0.0


class Traffic:
    """Users' requests of one rule; mirrored ones are copies and don't count."""

    def __init__(self) -> None:
        self._seconds: deque[_Second] = deque()
        self._since: float | None = None

    def take(self, observations: Iterable[Observation]) -> None:
        """Counts requests that have ended: once by the pod's record, or by the gateway where no pod lived to
        tell."""
        for seen in observations:
            ended = seen.total_s is not None or seen.failed
            if seen.mirror or seen.censored or seen.feedback or not ended:
                continue
            self._since = seen.time if self._since is None else self._since
            now = self._at(int(seen.time))
            now.slices[(seen.task, seen.tenant)] += 1
            now.arms[seen.arm.value] += 1
            if seen.arm is ArmName.CANDIDATE and seen.total_s is not None:
                now.num_candidate += 1
                now.candidate_s += seen.total_s

    def rates(self, now: float) -> Mapping[tuple[str, str], float]:
        """Requests/s by task and tenant; empty: too little was seen to tell."""
        span = self._span(now)
        if span < MIN_S:
            return {}
        total: Counter[tuple[str, str]] = Counter()
        for one in self._seconds:
            total.update(one.slices)
        return {key: num / span for key, num in total.items()}

    def arm_rate(self, arm: str, now: float) -> float:
        """Requests/s that an arm answered; 0: too little was seen to tell."""
        span = self._span(now)
        return sum(one.arms[arm] for one in self._seconds) / span if span >= MIN_S else 0.0

    def mean_seconds(self, now: float) -> float:
        """Mean time of the candidate's requests; 0: none was seen."""
        self._forget(now)
        num = sum(one.num_candidate for one in self._seconds)
        return sum(one.candidate_s for one in self._seconds) / num if num else 0.0

    def _span(self, now: float) -> float:
        self._forget(now)
        return 0.0 if self._since is None else min(float(WINDOW_S), now - self._since)

    def _at(self, second: int) -> _Second:
        if not self._seconds or self._seconds[-1].second < second:
            self._seconds.append(_Second(second))
        return self._seconds[-1]

    def _forget(self, now: float) -> None:
        if self._seconds and self._seconds[-1].second > now + CLOCK_SLACK_S:
            self._seconds.clear()  # the clock was set back: they would not pass for as long
        while self._seconds and self._seconds[0].second < now - WINDOW_S:
            self._seconds.popleft()
        if not self._seconds:
            self._since = None
