"""Last of a rollout's rules: edits of what is under way, arriving at a stage, and going on to the next."""

from __future__ import annotations

from datetime import datetime, timedelta

from ..api.rulestatus import Phase, RuleStatus
from ..gates.gate import CLOCK_SLACK_S
from . import holds
from .scope import exclusions, tasks_out
from .situation import UNDER_WAY, Situation
from .stages import (
    Hold,
    Move,
    arrived,
    arriving,
    entered,
    held,
    promoted,
    restarted,
    started,
    text,
)
from .suites import START, pending, rates

EVIDENCE_LIFETIME = timedelta(hours=1)
"""Evidence restarts after so long, or thousands of good requests would hide a late regression."""

_COMPLETE = {Phase.SHADOWING: "ShadowComplete", Phase.STEP: "StepComplete"}


def unknown_phase(s: Situation) -> Move | None:
    """A status that names the attempt but no stage of it was not written by us: start over."""
    if s.status.phase in UNDER_WAY:
        return None
    told = f"phase {s.status.phase.value} has no attempt under way; starting over"
    return Move(started(s), "StatusUnreadable", told)


def stage_edited(s: Situation) -> Move | None:
    """A human edit of stages is in force at once. A stage that has not begun before is waited for as ever."""
    goal, status = s.goal, s.status
    same_stage = (goal.phase, goal.step) == (status.phase, status.step)
    same_traffic = (goal.weight, goal.shadow_percent) == (status.weight, status.shadow_percent)
    if same_stage and (same_traffic or not s.in_force):
        return None
    if same_stage and goal.phase is Phase.WATCHING:
        return Move(status.model_copy(update={"weight": goal.weight}))
    new_stage = goal.phase is not status.phase
    waits = new_stage and (holds.missing(s) or holds.not_let_in(s, goal))
    after = entered(s, goal) if s.in_force and not waits else arriving(s, goal)
    return Move(after, "StepsEdited", f"stages were edited; weight {after.weight} % is in force")


def evaluating(s: Situation) -> Move | None:
    """Nobody meets a candidate that has not passed its suites."""
    if s.status.phase is not Phase.EVALUATING or s.rollout is None or s.rollout.evaluation is None:
        return None
    if not s.world.stable_ready:
        return held(s.status, holds.stable_not_ready(s))
    hold = pending(s.rollout.evaluation, s.run, [START], tasks_out(s.status.excluded), s.now)
    if s.rollout.paused and (not hold or hold.evaluate):
        hold = holds.PAUSED
    if hold:
        return held(s.status, hold)
    return Move(arriving(s, s.following), "EvaluationPassed", rates(s.run))


def not_arrived(s: Situation) -> Move | None:
    """Arriving waits for all that is needed to judge; a paused rollout that never began does not begin."""
    if s.in_force:
        return None
    if s.status.phase is Phase.WATCHING and not s.world.stable_ready:
        return Move(arrived(s))  # somebody has to serve
    hold = holds.missing(s)
    if not hold and not s.status.stage_since:
        paused = s.rollout is not None and s.rollout.paused
        hold = holds.PAUSED if paused else holds.not_let_in(s, s.goal)
    hold = hold or holds.no_room(s, s.goal)
    return held(s.status, hold) if hold else Move(arrived(s))


def clock_set_back(s: Situation) -> Move | None:
    """Evidence or stage are of a time that is still to come: until then no request would count for any
    guard, so both begin now."""
    began = [datetime.fromisoformat(one) for one in (s.status.evidence_since, s.status.stage_since) if one]
    ahead = max(((one - s.now).total_seconds() for one in began), default=0.0)
    if ahead <= CLOCK_SLACK_S:
        return None
    since = s.status.stage_since
    if since and datetime.fromisoformat(since) > s.now:
        since = text(s.now)
    after = s.status.model_copy(update={**restarted(s.status, s.now), "stage_since": since})
    told = f"by the operator's clock it began {ahead:.0f} s from now; evidence restarts"
    return Move(after, "ClockSetBack", told)


def evidence_expired(s: Situation) -> Move | None:
    """Wealth does not outlive the hour; samples of the stage do."""
    since = s.status.evidence_since
    if since and s.now - datetime.fromisoformat(since) < EVIDENCE_LIFETIME:
        return None
    return Move(s.status.model_copy(update=restarted(s.status, s.now)))


def paused(s: Situation) -> Move | None:
    """Stays where it is; the guards have been asked already."""
    return held(s.status, holds.PAUSED) if s.rollout is not None and s.rollout.paused else None


def evidence_missing(s: Situation) -> Move | None:
    """Without a live view of both arms no stage completes."""
    hold = holds.missing(s)
    return held(s.status, hold) if hold else None


def stage_incomplete(s: Situation) -> Move | None:
    """Time, samples, coverage or gains are short."""
    if s.elapsed_s < s.goal.min_seconds:
        unwatched = s.status.phase is Phase.WATCHING and not s.world.stable_ready
        return held(s.status, holds.stable_not_ready(s) if unwatched else Hold())
    hold = holds.incomplete(s)
    return held(s.status, hold) if hold else None


def next_waits(s: Situation) -> Move | None:
    """The stage is complete, and the next one can't begin yet."""
    if s.status.phase is Phase.WATCHING:
        return None
    hold = holds.not_let_in(s, s.following)
    return held(s.status, hold) if hold else None


def advance(s: Situation) -> Move | None:
    """On to the next stage; after the last the candidate is watched, then promoted."""
    goal, told = s.following, evidence(s.status)
    if goal.phase is Phase.PROMOTED:
        return Move(promoted(s), "Promoted", told)
    reason = "WatchStarted" if goal.phase is Phase.WATCHING else _COMPLETE[s.status.phase]
    return Move(entered(s, goal), reason, told)


def evidence(status: RuleStatus) -> str:
    """What the stage has shown, for people."""
    parts = [f"{status.num_samples} candidate and {status.num_stable_samples} stable requests judged"]
    bad = [
        f"{guard.name} {guard.num_bad_candidate}:{guard.num_bad_stable}"
        for guard in status.guards
        if guard.num_bad_candidate or guard.num_bad_stable
    ]
    agreed = [
        f"{one.task or 'any task'} {one.num_equal}/{one.num_pairs} (stable with itself"
        f" {one.num_baseline_equal}/{one.num_baseline_pairs})"
        for one in status.agreement
        if one.num_pairs
    ]
    shown = [gain.name for gain in status.gains if gain.shown]
    for what, found in (
        ("bad candidate:stable", bad),
        ("greedy answers equal:", agreed if status.phase is Phase.SHADOWING else []),
        ("gains shown:", shown),
        ("suites:", [rates(status.evaluation)] if status.evaluation else []),
        ("excluded:", [exclusions(status.excluded)] if status.excluded else []),
    ):
        if found:
            parts.append(f"{what} {', '.join(found)}")
    return "; ".join(parts)
