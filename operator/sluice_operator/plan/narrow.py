"""What changes about an attempt before it is judged as a whole: other gates, and parts that it loses.

Invariant: a task or tenant that goes back to stable alone loses its place for the whole attempt, and the
rest its evidence, which was gathered with the part in it. Example: an INT4 arm fails only at `nl2sql`; it
loses `nl2sql` and nothing else.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from datetime import timedelta

from ..api.rollout import RollbackScope
from ..api.rulestatus import ExclusionStatus, Phase, Transition
from ..gates import Verdict
from ..gates.gate import SETTLE_S
from .scope import BY_PERSON, automatic, by_person, covered, exclusions, told
from .situation import ARMED, UNDER_WAY, Situation
from .stages import excluded, fresh_stage, text
from .suites import Judgement, judge


def regated(s: Situation) -> tuple[Situation, tuple[Transition, ...]]:
    """What was judged by other gates does not count: the stage begins anew, with the same traffic."""
    if s.status.gates == s.gates or s.status.phase not in (Phase.EVALUATING, *ARMED):
        return s, ()
    since = text(s.now) if s.in_force else ""
    if s.status.phase is Phase.WATCHING:
        since = s.status.stage_since  # its length is what the person has asked for
    status = fresh_stage(s, s.now).model_copy(update={"gates": s.gates, "gains": [], "stage_since": since})
    told = "guards, contract or settings were edited; evidence restarts"
    return replace(s, status=status), (_line(s, "GatesChanged", told),)


def narrowed(s: Situation) -> tuple[Situation, tuple[Transition, ...]]:
    """The situation without what a person excludes and without what the evidence speaks against alone, and
    the lines of history for it. What can't be rolled back alone is left for the rules to judge."""
    if s.rollout is None or s.status.phase not in UNDER_WAY:
        return s, ()
    persons, lines = _persons(s)
    found = [*_by_evidence(s), *_by_suites(s)]
    for one in found:
        kind = "Slice" if one.task and one.tenant else "Task" if one.task else "Tenant"
        lines.append(_line(s, f"{kind}RolledBack", f"{exclusions([one])} goes back to stable: {one.message}"))
    said = Verdict() if s.verdict.slice is not None and _alone(s) else s.verdict
    if not lines:
        return replace(s, verdict=said), ()
    kept = [one for one in s.status.excluded if one.reason != BY_PERSON]
    status = s.status.model_copy(update={"excluded": [*kept, *found, *persons]})
    after = replace(s, status=status, verdict=said)
    if status.phase in ARMED:
        # Until the gateway has it, requests of the slice still go to the candidate.
        status = fresh_stage(after, s.now + timedelta(seconds=SETTLE_S if s.in_force else 0.0))
        after = replace(after, status=status)
    return after, tuple(lines)


def _persons(s: Situation) -> tuple[list[ExclusionStatus], list[Transition]]:
    """What a person excludes by the spec as it stands, and what of that is new."""
    assert s.rollout is not None
    before = {(one.task, one.tenant): one for one in s.status.excluded if one.reason == BY_PERSON}
    wanted = dict(zip(by_person(s.rollout), s.rollout.exclude, strict=True))
    new = sorted(set(wanted) - set(before))
    gone = sorted(set(before) - set(wanted))
    lines = []
    if new:
        lines.append(_line(s, BY_PERSON, f"{told(new)} stays on stable by rollout.exclude"))
    if gone:
        lines.append(_line(s, "ExclusionWithdrawn", f"{told(gone)} is no longer in rollout.exclude"))
    return [before.get(pair) or excluded(wish, s.now) for pair, wish in wanted.items()], lines


def _alone(s: Situation) -> bool:
    """Whether a part may be rolled back without the rest."""
    return s.rollout is not None and s.rollout.rollback_scope is RollbackScope.NARROWEST


def _by_evidence(s: Situation) -> Iterator[ExclusionStatus]:
    said = s.verdict
    if said.slice is None or not said.reason or not _alone(s) or s.status.phase not in ARMED:
        return
    task, tenant = said.slice
    if not covered(automatic(s.status), task, tenant):  # late evidence of what is gone already
        yield ExclusionStatus(
            task=task,
            tenant=tenant,
            reason=said.reason,
            message=said.message,
            time=text(s.now),
            attempt=s.status.attempt,
        )


def _by_suites(s: Situation) -> Iterator[ExclusionStatus]:
    found = suites_say(s)
    if found.hard or not found.sound or not _alone(s):
        return
    for task, why in found.failing:
        yield ExclusionStatus(
            task=task, reason="EvaluationFailed", message=why, time=text(s.now), attempt=s.status.attempt
        )


def suites_say(s: Situation) -> Judgement:
    """What the newest run says of tasks that are not excluded."""
    if s.rollout is None or s.rollout.evaluation is None or s.status.phase not in (Phase.EVALUATING, *ARMED):
        return Judgement()
    found = judge(s.rollout.evaluation, s.run)
    out = [*automatic(s.status), *by_person(s.rollout)]
    return Judgement(
        found.hard,
        tuple((task, why) for task, why in found.failing if not covered(out, task, "")),
        tuple(task for task in found.sound if not covered(out, task, "")),
    )


def _line(s: Situation, reason: str, message: str) -> Transition:
    step = s.status.step if s.status.phase is Phase.STEP else None
    return Transition(time=text(s.now), phase=s.status.phase, step=step, reason=reason, message=message)
