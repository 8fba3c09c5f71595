"""Do two arms say the same? A request answered greedily by the candidate once and by stable twice.

Stable against itself is the baseline: greedy decoding need not repeat itself bit by bit. Of three answers of
which exactly one differs, each is the odd one with chance 1/3 if the arms are alike, whoever's answer came
first. Invariant: digests only; nothing here can tell what was said. Example: c = 7f…, s = 7f…, 7f… agree in
everything; c = 01…, s = 7f…, 7f… is a bad event of the candidate's.
"""

from __future__ import annotations

from collections.abc import Iterable

from ..api.rulestatus import RuleStatus, TaskAgreement
from .observation import ArmName, Observation

MAX_OPEN = 2000
MAX_TASKS = 32
MAX_DIFFERING = 20


class Agreement:
    """Pairs of one attempt."""

    __slots__ = ("_done", "_open", "differing", "tasks")

    def __init__(self, tasks: Iterable[TaskAgreement] = (), differing: Iterable[str] = ()) -> None:
        self._open: dict[str, tuple[list[str], list[str]]] = {}
        self._done: dict[str, None] = {}
        self.tasks: dict[str, list[int]] = {
            one.task: [one.num_pairs, one.num_equal, one.num_baseline_pairs, one.num_baseline_equal]
            for one in tasks
        }
        self.differing = list(differing)

    def take(self, seen: Observation) -> bool | None:
        """One greedy answer. Returns whether the odd one of three was the candidate's; None: not known, or
        none was odd."""
        name = seen.request_id
        if seen.failed or seen.censored or not seen.digest or name in self._done:
            return None
        stable, candidate = self._open.setdefault(name, ([], []))
        mine, most = (candidate, 1) if seen.arm is ArmName.CANDIDATE else (stable, 2)
        if len(mine) < most:
            mine.append(seen.digest)
        if len(self._open) > MAX_OPEN:
            del self._open[next(iter(self._open))]
        if len(stable) < 2 or not candidate:
            return None
        del self._open[name]
        self._done[name] = None
        if len(self._done) > MAX_OPEN:
            del self._done[next(iter(self._done))]
        return self._judge(seen, candidate[0], stable[0], stable[1])

    def _judge(self, seen: Observation, candidate: str, first: str, second: str) -> bool | None:
        if seen.task in self.tasks or len(self.tasks) < MAX_TASKS:
            counts = self.tasks.setdefault(seen.task, [0, 0, 0, 0])
            counts[0] += 1
            counts[1] += candidate == first
            counts[2] += 1
            counts[3] += first == second
        if candidate not in (first, second):
            self.differing = [*self.differing, seen.request_id][-MAX_DIFFERING:]
        if first == second:
            return True if candidate != first else None
        return False if candidate in (first, second) else None

    def status(self) -> list[TaskAgreement]:
        """By task, for the status."""
        return [
            TaskAgreement(
                task=task,
                num_pairs=counts[0],
                num_equal=counts[1],
                num_baseline_pairs=counts[2],
                num_baseline_equal=counts[3],
            )
            for task, counts in self.tasks.items()
        ]


def restored(status: RuleStatus) -> Agreement:
    """As the status remembers it."""
    return Agreement(status.agreement, status.differing)
