"""Why a rollout does not advance, and what would let it: evidence, suites, consent, replicas, capacity.

Invariant: nothing here moves traffic or rolls back. Whatever is missing or unknown holds.
"""

from __future__ import annotations

from ..api.guards import GuardMode
from ..api.rollout import Consent
from ..api.rulestatus import Phase
from ..gates.battery import gain_names
from ..gates.window import MAX_AGE_S, MIN_SAMPLES
from .backend_status import OTHER_EVIDENCE
from .capacity import shortage
from .scope import Eligibility, automatic, by_person, exclusions, nothing_left, tasks_out
from .situation import Goal, Situation
from .stages import Hold, needed, since_stage
from .suites import START, pending, step_stage

PAUSED = Hold("Paused", "rollout.paused is set; set it to false to go on")


def stable_not_ready(s: Situation) -> Hold:
    """There is nobody to compare with, nor to go back to."""
    backend = s.world.arms.stable.backend
    told = f"no endpoint of the target {backend} is ready; look at that backend's status"
    return Hold("StableNotReady", told)


def candidate_not_ready(s: Situation) -> Hold:
    """There is nobody to send requests to."""
    arm = s.world.arms.candidate
    if arm is None:
        named = s.rollout.candidate.backend if s.rollout is not None else ""
        return Hold("CandidateGone", f"backend {named} does not exist; create it or name another candidate")
    told = f"no endpoint of {arm.backend} holds the arm's configuration; look at that backend's status"
    return Hold("CandidateNotReady", told)


def missing(s: Situation) -> Hold:
    """What is missing to judge the current stage."""
    if not s.world.stable_ready and s.goal.weight < 100:
        return stable_not_ready(s)
    if s.world.evidence_live:
        return Hold()
    if s.world.unreadable:
        named = " and ".join(dict.fromkeys(s.world.unreadable))
        return Hold("EvidenceUnreadable", f"pods of {named} {OTHER_EVIDENCE}")
    return Hold(
        "EvidenceNotLive",
        "pods of the candidate or of the target can't be heard; look whether the operator reaches them",
    )


def incomplete(s: Situation) -> Hold:
    """What the current stage's evidence lacks. Too little when the time is up holds and never fails."""
    return _samples(s) or _queries(s) or _coverage(s) or _gains(s)


def _samples(s: Situation) -> Hold:
    status, least = s.status, needed(s, s.goal)
    alone = s.goal.weight == 100 or s.goal.phase is Phase.WATCHING
    enough = status.num_samples >= least and (status.num_stable_samples > 0 or alone)
    if enough or s.rollout is None:
        return Hold()
    out = exclusions(status.excluded)
    step = s.rollout.steps[s.goal.step] if s.goal.phase is Phase.STEP else None
    if nothing_left(s.rule, step, [*automatic(status), *by_person(s.rollout)]):
        told = f"nobody is left to meet the candidate here: {out} excluded; take that out of rollout.exclude"
        return Hold("NoEvidence", told)
    told = f"the stage asks for {least} judged requests of the candidate"
    told += "" if alone else ", and for some of stable"
    if s.lacking:
        told += (
            f"; nothing of stable's {', '.join(s.lacking)} is known to compare with: {MIN_SAMPLES} of its"
            f" requests within {MAX_AGE_S / 60:.0f} minutes are needed"
        )
    return Hold("NoEvidence", f"{told}{f'; excluded: {out}' if out else ''}")


def _coverage(s: Situation) -> Hold:
    if s.status.phase is not Phase.STEP or s.rollout is None:
        return Hold()
    seen = {one.name: one.num_samples for one in s.status.coverage}
    short = [one for one in s.rollout.steps[s.goal.step].coverage if seen.get(one.name, 0) < one.min_samples]
    told = ", ".join(f"{one.name} ({one.min_samples} requests)" for one in short)
    return Hold("CoverageMissing", f"traffic of these kinds is still to come: {told}") if short else Hold()


def _queries(s: Situation) -> Hold:
    """A guard of the user's own that has had no value in this stage has not been asked."""
    if s.rollout is None:
        return Hold()
    told = {one.name: one for one in s.status.queries if one.candidate and since_stage(s.status, one.time)}
    open_ = [
        one.name for one in s.rollout.queries if one.mode is not GuardMode.WATCH and one.name not in told
    ]
    if not open_:
        return Hold()
    why = next((one.error for one in s.status.queries if one.name == open_[0] and one.error), "not asked yet")
    return Hold("NoEvidence", f"query {open_[0]} has no value in this stage: {why}")


def _gains(s: Situation) -> Hold:
    if s.status.phase is not Phase.STEP or s.rollout is None or not s.rollout.gains:
        return Hold()
    shown = {one.name for one in s.status.gains if one.shown}
    met = set(s.rollout.steps[s.goal.step].tasks)
    open_ = [
        name
        for name, gain in zip(gain_names(s.rule), s.rollout.gains, strict=True)
        # A step for other tasks can't show it; one for all comes after.
        if name not in shown and not (met and gain.tasks and met.isdisjoint(gain.tasks))
    ]
    out = exclusions(s.status.excluded)
    told = f"not shown yet: {', '.join(open_)}; it goes on once it is, or when rollout.gains asks for less"
    return Hold("NoGain", f"{told}{f'; excluded: {out}' if out else ''}") if open_ else Hold()


def not_let_in(s: Situation, goal: Goal) -> Hold:
    """What `goal` waits for before it begins for the first time: suites, a person, replicas."""
    return _evaluation(s, goal) or _consent(s, goal) or no_room(s, goal)


def _evaluation(s: Situation, goal: Goal) -> Hold:
    if s.rollout is None or s.rollout.evaluation is None or goal.phase is not Phase.STEP:
        return Hold()
    if not s.rollout.steps[goal.step].evaluate:
        return Hold()
    stages = [step_stage(goal.step)]
    if goal.step == 0 and s.rollout.shadow is None:
        stages.append(START)  # it has only just ended
    return pending(s.rollout.evaluation, s.run, stages, tasks_out(s.status.excluded), s.now)


def _consent(s: Situation, goal: Goal) -> Hold:
    if s.rollout is None or goal.phase not in (Phase.STEP, Phase.WATCHING, Phase.PROMOTED):
        return Hold()
    step = goal.step if goal.phase is Phase.STEP else len(s.rollout.steps)
    manual = s.rollout.promotion if goal.phase is not Phase.STEP else s.rollout.steps[step].consent
    given = s.rollout.approval
    if manual is not Consent.MANUAL or (given and given.attempt == s.attempt and given.step >= step):
        return Hold()
    namespace, _, policy = s.policy.partition("/")
    what = f"step {step}, weight {goal.weight} %" if goal.phase is Phase.STEP else "the promotion"
    return Hold(
        "AwaitingApproval",
        f"{what} waits for a person: kubectl sluice approve {policy} {s.rule.name} -n {namespace}"
        f" (or rollout.approval with attempt {s.attempt}, step {step})",
    )


def no_room(s: Situation, goal: Goal) -> Hold:
    """Replicas that `goal` waits for, also when it comes back after an interruption."""
    world = s.world
    if world.ready_replicas < world.wanted_replicas:
        told = f"{world.ready_replicas} of {world.wanted_replicas} replicas of the candidate are ready"
        return Hold("WaitingForReplicas", f"{told}; look at that backend's status, or lower its replicas")
    short = shortage(world, max(goal.weight, goal.shadow_percent), _audience(s, goal))
    return Hold("CandidateTooSmall", short) if short else Hold()


def _audience(s: Situation, goal: Goal) -> Eligibility:
    """Whose requests `goal` sends to the candidate."""
    assert s.rollout is not None
    step = s.rollout.steps[goal.step] if goal.phase is Phase.STEP else None
    return Eligibility(
        (*automatic(s.status), *by_person(s.rollout)),
        tuple(step.tenants) if step is not None else (),
        tuple(step.tasks) if step is not None else (),
    )
