"""Kinds of traffic that a step must have seen, and how much of each it has."""

from __future__ import annotations

from collections.abc import Iterable, Sequence

import numpy as np

from ..api.guards import Coverage
from ..api.routepolicy import Rule
from ..api.rulestatus import CoverageStatus, Phase, RuleStatus
from .columns import Bools, Columns


class Counters:
    """Of one step."""

    __slots__ = ("_wanted", "num")

    def __init__(self, wanted: Sequence[Coverage], before: Iterable[CoverageStatus]) -> None:
        known = {one.name: one.num_samples for one in before}
        self._wanted = wanted
        self.num = [known.get(one.name, 0) for one in wanted]

    def follow(self, wanted: Sequence[Coverage]) -> None:
        """Counts these from now on, after an edit: what is as it was goes on, what is not begins at 0."""
        before = list(zip(self._wanted, self.num, strict=True))
        self.num = [next((num for old, num in before if old == one), 0) for one in wanted]
        self._wanted = wanted

    def take(self, columns: Columns, samples: Bools) -> None:
        """Counts the candidate's judged requests. A request belongs to the hour in which it began, UTC."""
        for index, wanted in enumerate(self._wanted):
            kind = samples
            if wanted.tasks:
                names = frozenset(wanted.tasks)
                kind = kind & np.fromiter((task in names for task in columns.task), bool, columns.size)
            if wanted.min_prompt_tokens:
                kind = kind & (columns.tokens["prompt_tokens"] >= wanted.min_prompt_tokens)
            if wanted.hours_utc:
                begin, end = (int(part) for part in wanted.hours_utc.split("-"))
                hour = columns.begin % 86_400.0 // 3600.0
                inside = (hour >= begin) & (hour < end) if begin < end else (hour >= begin) | (hour < end)
                kind = kind & inside
            self.num[index] += int(kind.sum())

    def status(self) -> list[CoverageStatus]:
        """For the status."""
        return [
            CoverageStatus(name=wanted.name, num_samples=num)
            for wanted, num in zip(self._wanted, self.num, strict=True)
        ]


def counters(rule: Rule, status: RuleStatus) -> Counters:
    """Those of the step that `status` is in; none elsewhere."""
    return Counters(wanted_of(rule, status), status.coverage)


def wanted_of(rule: Rule, status: RuleStatus) -> Sequence[Coverage]:
    """What the step that `status` is in must have seen, by the spec as it stands."""
    rollout = rule.rollout
    if rollout is None or status.phase is not Phase.STEP or status.step >= len(rollout.steps):
        return ()
    return rollout.steps[status.step].coverage
