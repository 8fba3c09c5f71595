"""First of a rollout's rules: what a person says, and what the attempt is.

They come before anything that the evidence could say, so a human edit is in force in the next decision.
"""

from __future__ import annotations

from ..api.rulestatus import Phase
from . import holds
from .situation import OVER, UNDER_WAY, Situation
from .stages import Hold, Move, cleared, held, leaked, rejected, started, stopped

_SERVES = (Phase.WATCHING, Phase.PROMOTED)


def no_rollout(s: Situation) -> Move | None:
    """A human has removed the rollout, or there never was one: the target serves."""
    if s.rollout is not None:
        return None
    after = cleared(s).model_copy(update={"gates": ""})
    if s.status.phase is Phase.STABLE:
        return Move(after)
    if _taken_over(s):
        return Move(after, "PromotedInSpec", "the promoted candidate is the target now", handover=True)
    return Move(after, "RolloutRemoved", "the rollout was removed; the target serves everything")


def _taken_over(s: Situation) -> bool:
    """Whether the promoted candidate has become the target. Where both arms are of one backend, only the
    configuration tells."""
    candidate, target = s.status.candidate, s.world.arms.stable
    if s.status.phase not in _SERVES or candidate.backend != target.backend:
        return False
    return s.status.stable.backend != candidate.backend or target.config == candidate.config


def aborted(s: Situation) -> Move | None:
    """A human abort wins in every phase; where nothing runs it changes nothing."""
    if s.rollout is None or not s.rollout.abort:
        return None
    if s.status.phase in OVER:
        return Move(stopped(s.status, s.status.phase))
    if s.status.phase not in UNDER_WAY:
        after = stopped(cleared(s), Phase.ABORTED)
        return Move(after, "Aborted", "abort is set; nothing was under way")
    return Move(rejected(s.status, Phase.ABORTED), "Aborted", "abort is set; raise attempt to try again")


def leaked_late(s: Situation) -> Move | None:
    """What was left to end in peace has leaked."""
    over = s.status.phase in OVER and s.status.attempt == s.attempt
    if not (over and s.verdict.leak) or s.status.leaked:
        return None
    return leaked(Move(stopped(s.status, s.status.phase), "Leaked", s.verdict.message))


def candidate_is_target(s: Situation) -> Move | None:
    """Both arms are the same: there is nothing to roll out, and after a promotion traffic must not move."""
    if s.stable is None or s.candidate is None or s.rollout is None:
        return None
    changes = s.rollout.candidate.model_dump(exclude_none=True, exclude={"backend"})
    if changes or (s.stable.backend, s.stable.identity) != (s.candidate.backend, s.candidate.identity):
        return None
    told = "candidate and target are the same arm; remove the rollout, or name another candidate"
    after = held(cleared(s), Hold("CandidateIsTarget", told)).status
    if s.status.phase not in UNDER_WAY:
        return Move(after)
    handover = s.status.phase in _SERVES and s.status.candidate.backend == s.stable.backend
    return Move(after, "CandidateIsTarget", "candidate and target are the same arm", handover)


def new_target_not_ready(s: Situation) -> Move | None:
    """Another target beside a promoted candidate: whoever serves goes on until the target can."""
    status = s.status
    if status.phase not in _SERVES or s.world.arms.stable.backend == status.stable.backend:
        return None
    if s.candidate is None or s.candidate.identity != status.candidate.identity:
        return None
    if s.world.stable_ready or not s.world.candidate_ready:
        return None
    return held(status.model_copy(update={"weight": 100}), holds.stable_not_ready(s))


def identity_unknown(s: Situation) -> Move | None:
    """Nothing starts before it is known what would start."""
    if s.attempt:
        return None
    hold = holds.candidate_not_ready(s) if s.candidate is None else holds.stable_not_ready(s)
    after = held(cleared(s), hold).status
    if s.status.phase is Phase.STABLE:
        return Move(after)
    return Move(after, "AttemptChanged", "an arm was replaced; no pod of it has said what it loaded")


def attempt_rejected(s: Situation) -> Move | None:
    """Sticky: neither scale nor restarts nor edits of gates bring a refused attempt back."""
    if s.status.attempt == s.attempt and s.status.phase in OVER:
        return Move(stopped(s.status, s.status.phase))
    if s.attempt not in s.status.rejected:
        return None
    after = stopped(started(s), Phase.ROLLED_BACK)
    return Move(after, "AttemptRejected", "this attempt was refused before; raise attempt to try again")


def attempt_changed(s: Situation) -> Move | None:
    """A new candidate, target or attempt number starts at weight 0 with fresh evidence."""
    if s.attempt == s.status.attempt:
        return None
    after = started(s)
    return Move(after, "AttemptStarted", f"{after.candidate.backend} against {after.stable.backend}")
