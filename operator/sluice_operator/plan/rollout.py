"""What a rollout does next, as an ordered tuple of small rules of which the first that matches decides.

The order is the policy: what a human says, then what the attempt is, then what is broken, then what is
missing, and only then progress. Invariants: the candidate has no traffic while it is not ready, rolled back
or aborted; an attempt that was rolled back or aborted never starts again; missing evidence holds. The
status alone suffices to go on after a restart, and without it the rollout starts over with the target
serving everything.

Example: a candidate at step 1 of weights 10, 50 becomes slow. `guard_fired` matches before `step_complete`
could: RolledBack, weight 0, its attempt in `rejected`. Editing guards, scaling or restarting does not
change that; raising ``rollout.attempt`` or naming another candidate starts anew at weight 0.

After promotion the candidate serves with weight 100 for as long as the attempt's hash matches;
`status.stable` still names the target's arm as it was. Nothing rolls back by itself then; a human can.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from datetime import datetime, timedelta

from ..api.routepolicy import Phase, Rule, RuleStatus, Transition
from ..gates import GateState
from .situation import Arms, Situation, World, situate, step_goal
from .stages import cleared, entered, fresh_stage, rejected, restarted, started, stopped, text

__all__ = ["RULES", "Arms", "Decision", "World", "decide"]

MAX_HISTORY = 20
EVIDENCE_LIFETIME = timedelta(hours=1)
"""Evidence restarts after so long, or thousands of good requests would hide a late regression."""

UNGUARDED_S = 15.0
"""A candidate whose evidence can't be heard keeps its traffic for so long, as it does at a gateway that hears
nothing of its operator: a pod that is short of CPU for some seconds is no reason to move traffic."""

_EVIDENCE_FIELDS = {"num_samples", "num_stable_samples", "guards"}
_UNDER_WAY = (Phase.SHADOWING, Phase.STEP, Phase.PROMOTED)
_OVER = (Phase.ROLLED_BACK, Phase.ABORTED)


@dataclass(frozen=True)
class Decision:
    """What shall be in force: `status.weight` and `status.shadow_percent`."""

    status: RuleStatus
    transitions: tuple[Transition, ...]
    """New lines of history (already in `status.history`); each is worth an Event."""
    reduces: bool
    """The candidate gets less than before: push to the gateway first, then write status."""
    increases: bool
    """The candidate gets more than before: write status first, then push."""
    handover: bool
    """The promoted candidate has become the target: push routes first, then the weight, or traffic dips
    to the old arm."""
    material: bool
    """More than the evidence's checkpoint has changed: write status now. Else once in a few seconds is
    enough."""


@dataclass(frozen=True)
class _Outcome:
    """What a rule decided; a reason makes it a line of history."""

    status: RuleStatus
    reason: str = ""
    message: str = ""
    handover: bool = False


def decide(
    policy: str, rule: Rule, status: RuleStatus, gate: GateState, world: World, now: datetime
) -> Decision:
    """What the rule's rollout shall do now. `policy` is ``namespace/name``; `status` is what was last
    decided.

    Calling it again with its own result changes nothing but progress that has become possible since.
    """
    situation = situate(policy, rule, status, gate, world, now)
    outcome = next(found for one in RULES if (found := one(situation)) is not None)
    return _conclude(status, outcome, now)


def no_rollout(s: Situation) -> _Outcome | None:
    """A human has removed the rollout, or there never was one: the target serves."""
    if s.rollout is not None:
        return None
    after = cleared(s).model_copy(update={"gates": ""})
    if s.status.phase is Phase.STABLE:
        return _Outcome(after)
    if s.status.phase is Phase.PROMOTED and s.status.candidate.backend == s.world.arms.stable.backend:
        return _Outcome(after, "PromotedInSpec", "the promoted candidate is the target now", handover=True)
    return _Outcome(after, "RolloutRemoved", "the rollout was removed; the target serves everything")


def aborted(s: Situation) -> _Outcome | None:
    """A human abort wins in every phase; where nothing runs it changes nothing."""
    if s.rollout is None or not s.rollout.abort:
        return None
    if s.status.phase in _OVER:
        return _Outcome(stopped(s.status, s.status.phase))
    if s.status.phase not in _UNDER_WAY:
        after = stopped(cleared(s), Phase.ABORTED)
        return _Outcome(after, "Aborted", "abort is set; nothing was under way")
    return _Outcome(rejected(s.status, Phase.ABORTED), "Aborted", "abort is set; raise attempt to try again")


def candidate_is_target(s: Situation) -> _Outcome | None:
    """Both arms are the same: there is nothing to roll out, and after a promotion traffic must not move."""
    if s.stable is None or s.candidate is None or s.rollout is None:
        return None
    changes = s.rollout.candidate.model_dump(exclude_none=True, exclude={"backend"})
    if changes or (s.stable.backend, s.stable.identity) != (s.candidate.backend, s.candidate.identity):
        return None
    after = cleared(s).model_copy(update={"held": "CandidateIsTarget"})
    if s.status.phase not in _UNDER_WAY:
        return _Outcome(after)
    handover = s.status.phase is Phase.PROMOTED and s.status.candidate.backend == s.stable.backend
    return _Outcome(after, "CandidateIsTarget", "candidate and target are the same arm", handover)


def new_target_not_ready(s: Situation) -> _Outcome | None:
    """Another target beside a promoted candidate: whoever serves goes on until the target can."""
    status = s.status
    if status.phase is not Phase.PROMOTED or s.world.arms.stable.backend == status.stable.backend:
        return None
    if s.candidate is None or s.candidate.identity != status.candidate.identity:
        return None
    if s.world.stable_ready or not s.world.candidate_ready:
        return None
    return _Outcome(status.model_copy(update={"weight": 100, "held": "StableNotReady"}))


def identity_unknown(s: Situation) -> _Outcome | None:
    """Nothing starts before it is known what would start."""
    if s.attempt:
        return None
    held = "CandidateNotReady" if s.candidate is None else "StableNotReady"
    after = cleared(s).model_copy(update={"held": held})
    if s.status.phase is Phase.STABLE:
        return _Outcome(after)
    return _Outcome(after, "AttemptChanged", "an arm was replaced; no pod of it has said what it loaded")


def attempt_rejected(s: Situation) -> _Outcome | None:
    """Sticky: neither scale nor restarts nor edits of gates bring a refused attempt back."""
    over = s.status.attempt == s.attempt and s.status.phase in _OVER
    if over:
        return _Outcome(stopped(s.status, s.status.phase))
    if s.attempt not in s.status.rejected:
        return None
    after = stopped(started(s), Phase.ROLLED_BACK)
    return _Outcome(after, "AttemptRejected", "this attempt was refused before; raise attempt to try again")


def attempt_changed(s: Situation) -> _Outcome | None:
    """A new candidate, target or attempt number starts at weight 0 with fresh evidence."""
    if s.attempt == s.status.attempt:
        return None
    after = started(s)
    return _Outcome(after, "AttemptStarted", f"{after.candidate.backend} against {after.stable.backend}")


def promoted(s: Situation) -> _Outcome | None:
    """The candidate serves until a human says otherwise, for as long as it can."""
    if s.status.phase is not Phase.PROMOTED:
        return None
    weight = 100 if s.world.candidate_ready else 0
    held = "" if weight else "CandidateNotReady"
    return _Outcome(s.status.model_copy(update={"weight": weight, "held": held, "gates": s.gates}))


def hard_gate_broken(s: Situation) -> _Outcome | None:
    """One violation is enough."""
    return _rolled_back(s) if s.verdict.reason == "HardGateBroken" else None


def guard_fired(s: Situation) -> _Outcome | None:
    """The evidence against "not worse" has reached 1/alpha."""
    return _rolled_back(s) if s.verdict.reason == "GuardFired" else None


def candidate_not_ready(s: Situation) -> _Outcome | None:
    """Leaving an arm is immediate."""
    if s.world.candidate_ready and s.world.arms.candidate is not None:
        return None
    held = "CandidateNotReady" if s.world.arms.candidate is not None else "CandidateGone"
    return _Outcome(s.status.model_copy(update={"weight": 0, "shadow_percent": 0, "held": held}))


def unguarded(s: Situation) -> _Outcome | None:
    """No candidate runs for long where nobody could tell that it is bad. Its evidence stays, and it comes
    back by itself when it is heard again."""
    if not s.in_force or s.world.evidence_live or s.world.unheard_s <= UNGUARDED_S:
        return None
    return _Outcome(
        s.status.model_copy(update={"weight": 0, "shadow_percent": 0, "held": "EvidenceNotLive"})
    )


def gates_changed(s: Situation) -> _Outcome | None:
    """What was judged by other gates does not count."""
    if s.status.gates == s.gates:
        return None
    since = text(s.now) if s.in_force else ""
    after = fresh_stage(s, s.now).model_copy(update={"gates": s.gates, "stage_since": since})
    return _Outcome(after, "GatesChanged", "guards, contract or settings were edited; evidence restarts")


def stage_edited(s: Situation) -> _Outcome | None:
    """A human edit of steps is in force at once, as a stage of its own."""
    goal, status = s.goal, s.status
    same_stage = (goal.phase, goal.step) == (status.phase, status.step)
    same_traffic = (goal.weight, goal.shadow_percent) == (status.weight, status.shadow_percent)
    if same_stage and (same_traffic or not s.in_force):
        return None
    if s.in_force:
        after = entered(s, goal)
    else:
        stage = {"phase": goal.phase, "step": goal.step, "stage_since": ""}
        after = fresh_stage(s, s.now).model_copy(update=stage)
    return _Outcome(after, "StepsEdited", f"steps were edited; weight {after.weight} % is in force")


def not_arrived(s: Situation) -> _Outcome | None:
    """Arriving waits for all that is needed to judge; a paused rollout that never began does not begin."""
    if s.in_force:
        return None
    held = _missing(s)
    if not held and s.rollout is not None and s.rollout.paused and not s.status.stage_since:
        held = "Paused"
    if held:
        return _Outcome(s.status.model_copy(update={"held": held}))
    traffic = {"weight": s.goal.weight, "shadow_percent": s.goal.shadow_percent}
    return _Outcome(s.status.model_copy(update={**traffic, "held": "", "stage_since": text(s.now)}))


def evidence_expired(s: Situation) -> _Outcome | None:
    """Wealth does not outlive the hour; samples of the stage do."""
    since = s.status.evidence_since
    if since and s.now - datetime.fromisoformat(since) < EVIDENCE_LIFETIME:
        return None
    return _Outcome(s.status.model_copy(update=restarted(s.status, s.now)))


def paused(s: Situation) -> _Outcome | None:
    """Stays where it is; the guards have been asked already."""
    return _held(s, "Paused") if s.rollout is not None and s.rollout.paused else None


def evidence_missing(s: Situation) -> _Outcome | None:
    """Without a live view of both arms no stage completes."""
    held = _missing(s)
    return _held(s, held) if held else None


def stage_incomplete(s: Situation) -> _Outcome | None:
    """Time or samples are short. Too few samples when the time is up: no evidence, which holds and never
    fails."""
    status, goal = s.status, s.goal
    if s.elapsed_s < goal.min_seconds:
        return _held(s, "")
    alone = goal.weight == 100
    if status.num_samples < goal.min_samples or (status.num_stable_samples == 0 and not alone):
        return _held(s, "NoEvidence")
    return None


def shadow_complete(s: Situation) -> _Outcome | None:
    """The mirrored answers were good enough for users to see the first ones."""
    if s.status.phase is not Phase.SHADOWING or s.rollout is None:
        return None
    return _Outcome(entered(s, step_goal(s.rollout, 0)), "ShadowComplete", _evidence(s.status))


def step_complete(s: Situation) -> _Outcome | None:
    """On to the next step; after the last the candidate is promoted."""
    if s.status.phase is not Phase.STEP or s.rollout is None:
        return None
    following = s.status.step + 1
    if following < len(s.rollout.steps):
        return _Outcome(entered(s, step_goal(s.rollout, following)), "StepComplete", _evidence(s.status))
    traffic = {"weight": 100, "shadow_percent": 0}
    after = s.status.model_copy(update={"phase": Phase.PROMOTED, "held": "", **traffic})
    return _Outcome(after, "Promoted", _evidence(s.status))


def unknown_phase(s: Situation) -> _Outcome | None:
    """A status that names the attempt but no stage of it was not written by us: start over."""
    told = f"phase {s.status.phase.value} has no attempt under way; starting over"
    return _Outcome(started(s), "StatusUnreadable", told)


RULES: tuple[Callable[[Situation], _Outcome | None], ...] = (
    no_rollout, aborted, candidate_is_target,
    new_target_not_ready, identity_unknown, attempt_rejected, attempt_changed, promoted,
    hard_gate_broken, guard_fired,
    candidate_not_ready, unguarded, gates_changed, stage_edited, not_arrived, evidence_expired,
    paused, evidence_missing, stage_incomplete,
    shadow_complete, step_complete, unknown_phase,
)


def _conclude(before: RuleStatus, outcome: _Outcome, now: datetime) -> Decision:
    after = outcome.status
    transitions: tuple[Transition, ...] = ()
    if outcome.reason:
        step = after.step if after.phase is Phase.STEP else None
        line = Transition(
            time=text(now), phase=after.phase, step=step, reason=outcome.reason, message=outcome.message
        )
        transitions = (line,)
        after = after.model_copy(update={"history": [*after.history, line][-MAX_HISTORY:]})
    increases = after.weight > before.weight or after.shadow_percent > before.shadow_percent
    decreases = after.weight < before.weight or after.shadow_percent < before.shadow_percent
    return Decision(
        status=after, transitions=transitions, increases=increases, handover=outcome.handover,
        reduces=decreases and not increases and not outcome.handover,
        material=after.model_dump(exclude=_EVIDENCE_FIELDS) != before.model_dump(exclude=_EVIDENCE_FIELDS),
    )


def _missing(s: Situation) -> str:
    """What is missing to judge the current stage; empty: nothing."""
    if not s.world.stable_ready and s.goal.weight < 100:
        return "StableNotReady"
    return "" if s.world.evidence_live else "EvidenceNotLive"


def _held(s: Situation, held: str) -> _Outcome:
    return _Outcome(s.status.model_copy(update={"held": held}))


def _rolled_back(s: Situation) -> _Outcome:
    return _Outcome(rejected(s.status, Phase.ROLLED_BACK), s.verdict.reason, s.verdict.message)


def _evidence(status: RuleStatus) -> str:
    told = f"{status.num_samples} candidate and {status.num_stable_samples} stable requests judged"
    bad = [f"{guard.name} {guard.num_bad_candidate}:{guard.num_bad_stable}" for guard in status.guards]
    return f"{told}; bad candidate:stable {', '.join(bad)}" if bad else told
