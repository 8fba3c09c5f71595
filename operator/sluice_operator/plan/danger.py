"""Second of a rollout's rules: what takes traffic away from a candidate.

They come before any that could give it more.
"""

from __future__ import annotations

from ..api.rulestatus import Phase, RuleStatus
from . import holds
from .capacity import overload
from .narrow import suites_say
from .scope import automatic, current_step, nothing_left
from .situation import ARMED, Situation
from .stages import Hold, Move, held, leaked, promoted, rejected

UNGUARDED_S = 15.0
"""A candidate whose evidence can't be heard keeps its traffic for so long, as it does at a gateway that hears
nothing of its operator: a pod that is short of CPU for some seconds is no reason to move traffic."""


def serves(s: Situation) -> Move | None:
    """A promoted candidate serves until a human says otherwise, for as long as it can."""
    if s.status.phase is not Phase.PROMOTED:
        return None
    after = promoted(s).model_copy(update={"gates": s.gates})
    if s.world.candidate_ready:
        return Move(after)
    return held(after.model_copy(update={"weight": 0}), holds.candidate_not_ready(s))


def convicted(s: Situation) -> Move | None:
    """A hard gate is broken, the evidence against "not worse" has reached 1/alpha, or the user's own
    Prometheus says so. What a part alone can answer for has been taken out before."""
    said = s.verdict
    if not said.reason:
        return None
    if s.status.weight > 0 and not s.world.stable_ready and not s.rule.fallbacks and not said.hard:
        # The old arm was scaled away during the watch: a slow answer is better than none.
        hold = holds.stable_not_ready(s)
        return held(
            s.status, Hold(hold.reason, f"it is to be rolled back ({said.message}), but {hold.message}")
        )
    move = _rolled_back(s, said.reason, said.message)
    return leaked(move) if said.leak else move


def evaluation_failed(s: Situation) -> Move | None:
    """A failed hard sample, or tasks that are not good enough and can't be left out."""
    found = suites_say(s)
    if found.hard:
        some = ", ".join(found.hard[:5]) + (" …" if len(found.hard) > 5 else "")
        return _rolled_back(s, "EvaluationFailed", f"{len(found.hard)} hard sample(s) failed: {some}")
    if not found.failing:
        return None
    return _rolled_back(s, "EvaluationFailed", "; ".join(why for _, why in found.failing))


def nothing_is_left(s: Situation) -> Move | None:
    """All that the rule matches, or that the step is for, was rolled back alone."""
    if s.rollout is None or s.status.phase not in (Phase.EVALUATING, *ARMED):
        return None
    if not nothing_left(s.rule, current_step(s.rollout, s.status), automatic(s.status)):
        return None
    last = [one for one in s.status.excluded if (one.task, one.tenant) in automatic(s.status)][-1]
    return _rolled_back(s, last.reason, f"nothing is left for the candidate: {last.message}")


def _rolled_back(s: Situation, reason: str, message: str) -> Move:
    short = overload(s.world) if s.status.weight > 0 else ""
    return Move(rejected(s.status, Phase.ROLLED_BACK), reason, f"{message}; {short}" if short else message)


def candidate_not_ready(s: Situation) -> Move | None:
    """Leaving an arm is immediate."""
    if s.world.candidate_ready and s.world.arms.candidate is not None:
        return None
    return held(_no_traffic(s), holds.candidate_not_ready(s))


def unguarded(s: Situation) -> Move | None:
    """No candidate runs for long where nobody could tell that it is bad. Its evidence stays, and it comes
    back by itself when it is heard again. One that is watched has passed every step, and the old arm may
    not be large enough for all: it stays, and is not promoted before it is heard."""
    watched = s.status.phase is Phase.WATCHING
    if watched or not s.in_force or s.world.evidence_live or s.world.unheard_s <= UNGUARDED_S:
        return None
    return held(_no_traffic(s), holds.missing(s))


def _no_traffic(s: Situation) -> RuleStatus:
    return s.status.model_copy(update={"weight": 0, "shadow_percent": 0})
