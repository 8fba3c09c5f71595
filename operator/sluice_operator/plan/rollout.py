"""What a rollout does next, as an ordered tuple of small rules of which the first that matches decides.

The order is the policy: what a human says and what the attempt is (`given`), then what is broken (`danger`),
then what is missing, and only then progress (`progress`). Invariants: the candidate has no traffic while it
is not ready, rolled back or aborted; an attempt, or a slice of it, that was rolled back never starts again;
missing evidence holds. The status alone suffices to go on after a restart, and without it the rollout
starts over with the target serving everything.

Example: a candidate at step 1 of weights 10, 50 becomes slow. `convicted` matches before any progress
could: RolledBack, weight 0, its attempt in `rejected`. Editing guards, scaling or restarting does not
change that; raising ``rollout.attempt`` or naming another candidate starts anew at weight 0. Had it been
slow for one tenant alone, that tenant would be in `excluded`, and the step would go on for the others.

After the last step the candidate is watched with its guards armed, then promoted: it serves with weight 100
for as long as the attempt's hash matches; `status.stable` still names the target's arm as it was. Nothing
rolls back by itself then; a human can.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass
from datetime import datetime, timedelta

from ..api.routepolicy import Rule
from ..api.rulestatus import Phase, RuleStatus, Transition
from ..gates import GateState
from . import danger, given, progress
from .capacity import rollback_cost
from .narrow import narrowed, regated
from .scope import eligibility, narrows, widens
from .situation import ARMED, Arms, Situation, World, situate
from .stages import Move, text

__all__ = ["Arms", "Decision", "World", "decide"]

MAX_HISTORY = 20

EVIDENCE_FIELDS = {
    "num_samples",
    "num_stable_samples",
    "guards",
    "slices",
    "gains",
    "coverage",
    "queries",
    "agreement",
    "differing",
    "held_message",
    "rollback_cost",
}
"""What grows with each request, or is told in figures that do: a checkpoint of it once in a few seconds is
enough."""

Rules = tuple[Callable[[Situation], Move | None], ...]

GIVEN: Rules = (
    given.no_rollout,
    given.leaked_late,
    given.aborted,
    given.candidate_is_target,
    given.new_target_not_ready,
    given.identity_unknown,
    given.attempt_rejected,
    given.attempt_changed,
)
"""Asked first."""

JUDGED: Rules = (
    progress.unknown_phase,
    danger.serves,
    danger.convicted,
    danger.evaluation_failed,
    danger.nothing_is_left,
    danger.candidate_not_ready,
    danger.unguarded,
    progress.stage_edited,
    progress.evaluating,
    progress.not_arrived,
    progress.clock_set_back,
    progress.evidence_expired,
    progress.paused,
    progress.evidence_missing,
    progress.stage_incomplete,
    progress.next_waits,
    progress.advance,
)
"""Asked of what is left once parts have been rolled back alone."""


@dataclass(frozen=True)
class Decision:
    """What shall be in force: `status.weight` and `status.shadow_percent`, for whom `eligibility` names."""

    status: RuleStatus
    transitions: tuple[Transition, ...]
    """New lines of history (already in `status.history`); each is worth an Event."""
    reduces: bool
    """The candidate gets less than before: push to the gateway first, then write status."""
    increases: bool
    """The candidate gets more than before, or somebody new gets it: write status first, then push."""
    handover: bool
    """The promoted candidate has become the target: push routes first, then the weight, or traffic dips
    to the old arm."""
    material: bool
    """More than the evidence's checkpoint has changed: write status now. Else once in a few seconds is
    enough."""
    evaluate: str = ""
    """Stage for which a run of the suites is wanted: start one if none is running. Empty: none."""


def decide(
    policy: str, rule: Rule, status: RuleStatus, gate: GateState, world: World, now: datetime
) -> Decision:
    """What the rule's rollout shall do now. `policy` is ``namespace/name``; `status` is what was last
    decided.

    Calling it again with its own result changes nothing but progress that has become possible since.
    """
    situation = situate(policy, rule, status, gate, world, now)
    lines: tuple[Transition, ...] = ()
    move = _first(GIVEN, situation)
    if move is None:
        situation, edited = regated(situation)
        situation, lost = narrowed(situation)
        lines = (*edited, *lost)
        move = _first(JUDGED, situation)
    assert move is not None, "the last rule always matches"
    return _conclude(situation, status, move, lines)


def _first(rules: Iterable[Callable[[Situation], Move | None]], situation: Situation) -> Move | None:
    return next((move for one in rules if (move := one(situation)) is not None), None)


def _conclude(s: Situation, before: RuleStatus, move: Move, lines: tuple[Transition, ...]) -> Decision:
    after = move.status
    if move.reason:
        step = after.step if after.phase is Phase.STEP else None
        lines += (
            Transition(
                time=text(s.now), phase=after.phase, step=step, reason=move.reason, message=move.message
            ),
        )
    after = after.model_copy(
        update={
            "history": [*after.history, *lines][-MAX_HISTORY:],
            "watch_until": _watch_until(s, after),
            "rollback_cost": _rollback_cost(s, after),
        }
    )
    more, less = _compare(s.rule, before, after)
    return Decision(
        status=after,
        transitions=lines,
        increases=more,
        handover=move.handover,
        reduces=less and not more and not move.handover,
        material=after.model_dump(exclude=EVIDENCE_FIELDS) != before.model_dump(exclude=EVIDENCE_FIELDS),
        evaluate=move.evaluate,
    )


def _compare(rule: Rule, before: RuleStatus, after: RuleStatus) -> tuple[bool, bool]:
    """Whether the candidate gets more than before, and whether it gets less."""
    more = after.weight > before.weight or after.shadow_percent > before.shadow_percent
    less = after.weight < before.weight or after.shadow_percent < before.shadow_percent
    both = (before.weight or before.shadow_percent) and (after.weight or after.shadow_percent)
    if both and before.attempt == after.attempt:
        old, new = eligibility(rule, before), eligibility(rule, after)
        more, less = more or widens(old, new), less or narrows(old, new)
    return more, less


def _rollback_cost(s: Situation, after: RuleStatus) -> str:
    if after.phase not in (*ARMED, Phase.PROMOTED):
        return ""
    return rollback_cost(s.world, after.weight, eligibility(s.rule, after), s.cached)


def _watch_until(s: Situation, after: RuleStatus) -> str:
    """By the spec as it stands, so that an edit of the watch is in force at once."""
    if after.phase is not Phase.WATCHING or not after.stage_since or s.rollout is None:
        return ""
    return text(datetime.fromisoformat(after.stage_since) + timedelta(seconds=s.rollout.watch.seconds))
