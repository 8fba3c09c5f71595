"""What a run of the evaluation suites says: by task, never as one average.

Invariant: an unfinished, lost or empty run is no pass; it holds. One failed hard sample ends the attempt,
also while the run goes on.
"""

from __future__ import annotations

from collections.abc import Collection, Iterable
from dataclasses import dataclass
from datetime import datetime

from ..api.guards import Evaluation
from ..api.rulestatus import EvaluationStatus, TaskRate
from .stages import Hold

START = "Start"
"""The run before any traffic."""

RETRY_S = 60.0
"""A run that could not be finished is wanted again after so long, from its end."""


def step_stage(index: int) -> str:
    """The run before the step, from 0."""
    return f"Step/{index}"


@dataclass(frozen=True)
class Judgement:
    """What a finished run says; of one that runs only `hard`."""

    hard: tuple[str, ...] = ()
    """Hard samples that the candidate failed."""
    failing: tuple[tuple[str, str], ...] = ()
    """Tasks that are not good enough, each with why."""
    sound: tuple[str, ...] = ()
    """Tasks that are."""


def judge(evaluation: Evaluation, run: EvaluationStatus | None) -> Judgement:
    """What `run` says of the candidate."""
    if run is None:
        return Judgement()
    if run.failed_hard or not run.ended or unfinished(run):
        return Judgement(tuple(run.failed_hard))
    stable = {rate.task: rate for rate in run.stable}
    told = [(rate.task, _complaint(evaluation, rate, stable[rate.task])) for rate in run.candidate]
    failing = tuple((task, why) for task, why in told if why)
    return Judgement((), failing, tuple(task for task, why in told if not why))


def _complaint(evaluation: Evaluation, candidate: TaskRate, stable: TaskRate) -> str:
    """Why the task's rate is not good enough, in whole numbers so that no rounding decides."""
    passed = f"{candidate.task}: {candidate.num_passed} of {candidate.num_samples} samples passed"
    if candidate.num_passed * 100 < evaluation.min_pass_percent * candidate.num_samples:
        return f"{passed}, and {evaluation.min_pass_percent} % are asked for"
    both = candidate.num_samples * stable.num_samples
    drop = stable.num_passed * candidate.num_samples - candidate.num_passed * stable.num_samples
    if drop * 100 > evaluation.max_drop_percent * both:
        return (
            f"{passed}, of stable's {stable.num_passed} of {stable.num_samples}; a drop of"
            f" {evaluation.max_drop_percent} points is tolerated"
        )
    return ""


def pending(
    evaluation: Evaluation,
    run: EvaluationStatus | None,
    stages: Iterable[str],
    out: Collection[str],
    now: datetime,
) -> Hold:
    """What the suites still have to do before the first of `stages` may begin; a run for any of them counts.
    Nothing: the run is finished, and has been judged. `out`: tasks that the candidate does not get."""
    wanted, *others = stages
    named = ", ".join(evaluation.suites)
    if run is None or run.stage not in (wanted, *others) or not _covers(evaluation, run, out):
        return Hold("EvaluationRunning", f"suites {named} are to run for {wanted}", wanted)
    if not run.ended:
        return Hold("EvaluationRunning", f"suites {named} run for {run.stage} since {run.started}")
    why = unfinished(run)
    if not why:
        return Hold()
    age = (now - datetime.fromisoformat(run.ended)).total_seconds()
    again = not 0.0 <= age < RETRY_S  # below 0: the clock was set back
    return Hold(
        "EvaluationIncomplete",
        f"the run for {run.stage} proves nothing: {why}; it is tried again",
        wanted if again else "",
    )


def _covers(evaluation: Evaluation, run: EvaluationStatus, out: Collection[str]) -> bool:
    """Whether all suites that are named now were in the run, and all tasks that the candidate gets; one that
    broke off may not say which were."""
    ran = {suite.partition("@")[0] for suite in run.suites}
    whole = set(evaluation.suites) <= ran and set(run.without) <= set(out)
    return bool(run.error) or whole or not run.ended


def unfinished(run: EvaluationStatus) -> str:
    """Why a run that has ended proves nothing; empty: it proves something."""
    if run.error:
        return run.error
    answered = {rate.task for rate in run.stable if rate.num_samples > 0}
    if not run.candidate and not run.without:
        return "no sample was answered"
    both = {rate.task for rate in run.candidate if rate.num_samples > 0 and rate.task in answered}
    missing = sorted({rate.task for rate in (*run.candidate, *run.stable)} - both)
    return f"no answers to compare for {', '.join(missing)}" if missing else ""


def rates(run: EvaluationStatus | None) -> str:
    """For people: summary 9/10 (stable 10/10)."""
    if run is None:
        return ""
    if not run.candidate and run.without:
        return f"all samples are of tasks that the candidate does not get: {', '.join(run.without)}"
    stable = {rate.task: f" (stable {rate.num_passed}/{rate.num_samples})" for rate in run.stable}
    return ", ".join(
        f"{rate.task} {rate.num_passed}/{rate.num_samples}{stable.get(rate.task, '')}"
        for rate in run.candidate
    )
