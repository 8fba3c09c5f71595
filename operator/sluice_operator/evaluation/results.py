"""What came of a run: rates by task, and how two arms compare. Never one average over tasks.

Invariant: a run in which something is not known (nobody could be asked) says so in ``error`` and so is never
taken for a pass.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from fractions import Fraction

from ..api.rulestatus import EvaluationStatus, TaskRate
from .reply import SampleResult
from .suite import Suite

MAX_FAILED = 50
Named = tuple[str, SampleResult]
"""A result with ``suite/sample``."""


def named(suites: Iterable[Suite], results: Iterable[SampleResult]) -> list[Named]:
    """Results of all samples of ``suites``, in their order, with their full names."""
    names = [f"{suite.name}/{sample.name}" for suite in suites for sample in suite.samples]
    return list(zip(names, results, strict=True))


def rates(results: Iterable[SampleResult]) -> list[TaskRate]:
    """Passed and run samples of each task, sorted by task."""
    counts: dict[str, list[int]] = {}
    for result in results:
        count = counts.setdefault(result.sample.task, [0, 0])
        count[0] += 1
        count[1] += result.passed
    return [
        TaskRate(task=task, num_samples=num_samples, num_passed=num_passed)
        for task, (num_samples, num_passed) in sorted(counts.items())
    ]


@dataclass(frozen=True)
class TaskComparison:
    """One task's rates in percent; ``drop`` is how many points the candidate is below stable."""

    task: str
    candidate: Fraction
    stable: Fraction | None
    drop: Fraction


def compare(candidate: Sequence[TaskRate], stable: Sequence[TaskRate] = ()) -> list[TaskComparison]:
    """Task by task; exact, so that a limit of 0 points means what it says. No stable: a drop of 0."""
    base = {rate.task: _percent(rate) for rate in stable}
    compared = []
    for rate in candidate:
        own, other = _percent(rate), base.get(rate.task)
        drop = max(Fraction(0), other - own) if other is not None else Fraction(0)
        compared.append(TaskComparison(rate.task, own, other, drop))
    return compared


def _percent(rate: TaskRate) -> Fraction:
    return Fraction(100 * rate.num_passed, rate.num_samples) if rate.num_samples else Fraction(0)


def assemble(
    suites: Sequence[Suite],
    candidate: Sequence[SampleResult],
    stable: Sequence[SampleResult] | None,
    *,
    stage: str,
    started: str,
    ended: str,
) -> EvaluationStatus:
    """The run as status holds it. Results are those of all samples of ``suites``, in their order."""
    mine = named(suites, candidate)
    failed = [(name, result) for name, result in mine if not result.passed]
    hard = [name for name, result in failed if result.sample.hard and not result.reply.out_of_reach]
    other = [name for name, result in failed if not result.sample.hard]
    return EvaluationStatus(
        stage=stage,
        suites=[suite.label for suite in suites],
        started=started,
        ended=ended,
        candidate=rates(candidate),
        stable=rates(stable) if stable is not None else [],
        failed_hard=hard,
        failed=other[:MAX_FAILED],
        error=_unknown(mine, stable),
    )


def _unknown(candidate: Sequence[Named], stable: Sequence[SampleResult] | None) -> str:
    """Why the run tells too little to be judged; empty: it tells enough."""
    if not candidate:
        return "the suites have no samples"
    away = [(name, result) for name, result in candidate if result.reply.out_of_reach]
    if len(away) == len(candidate):
        return f"candidate: no sample was answered; {away[0][0]}: {away[0][1].reply.error}"
    unasked = [(name, result) for name, result in away if result.sample.hard]
    if unasked:
        name, result = unasked[0]
        return f"candidate: hard sample {name} was not answered: {result.reply.error}"
    missed = [result for result in stable or () if result.reply.out_of_reach or not result.reply.status]
    if missed:
        told = f"{len(missed)} of {len(candidate)} samples were not answered; {missed[0].sample.name}"
        return f"stable: {told}: {missed[0].reply.error}"
    return ""
