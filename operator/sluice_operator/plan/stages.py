"""The statuses that a rollout's rules choose between: none, begun, a stage entered, evidence restarted, over.

Invariant: whatever a status says of traffic and evidence is set here and nowhere else, so that no rule
forgets a part.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from datetime import UTC, datetime, timedelta

from ..api.rollout import Exclusion
from ..api.rulestatus import ExclusionStatus, Phase, RuleStatus
from ..gates.gate import SETTLE_S
from ..gates.power import detects, min_samples
from .scope import BY_PERSON
from .situation import Goal, Situation, first_goal

MAX_REJECTED = 100
MAX_EXCLUDED_BEFORE = 64


@dataclass(frozen=True)
class Hold:
    """Why a rollout does not advance."""

    reason: str = ""
    """Machine-readable; empty: it advances."""
    message: str = ""
    """What would let it go on, for people."""
    evaluate: str = ""
    """Stage for which a run of the suites is wanted."""

    def __bool__(self) -> bool:
        return bool(self.reason)


@dataclass(frozen=True)
class Move:
    """What a rule decided; a reason makes it a line of history."""

    status: RuleStatus
    reason: str = ""
    message: str = ""
    handover: bool = False
    evaluate: str = ""


def held(status: RuleStatus, hold: Hold) -> Move:
    """Stays as it is, and says why."""
    after = status.model_copy(update={"held": hold.reason, "held_message": hold.message})
    return Move(after, evaluate=hold.evaluate)


def rejected(status: RuleStatus, phase: Phase) -> RuleStatus:
    """Over, and never to start again."""
    others = [attempt for attempt in status.rejected if attempt != status.attempt]
    refused = [*others, status.attempt][-MAX_REJECTED:]
    return stopped(status, phase).model_copy(update={"rejected": refused})


def stopped(status: RuleStatus, phase: Phase) -> RuleStatus:
    """No traffic for the candidate; its last evidence stays for people to read."""
    return status.model_copy(
        update={
            "phase": phase,
            "weight": 0,
            "shadow_percent": 0,
            "watch_until": "",
            "held": "",
            "held_message": "",
        }
    )


def leaked(move: Move) -> Move:
    """The move, of which pods cut what still runs of the candidate's."""
    after = move.status.model_copy(update={"leaked": True})
    told = f"{move.message}; that is a leak, so what still runs of the candidate's requests is cut"
    return replace(move, status=after, message=told)


def cleared(s: Situation) -> RuleStatus:
    """No attempt; only history and what was refused are kept."""
    ended = [
        one.model_copy(update={"attempt": one.attempt or s.status.attempt})
        for one in s.status.excluded
        if one.reason != BY_PERSON and s.status.attempt
    ]
    kept = [one for one in s.status.excluded_before if one not in ended]
    return RuleStatus(
        name=s.rule.name,
        gates=s.gates,
        stable=s.stable or s.world.arms.stable,
        history=s.status.history,
        rejected=s.status.rejected,
        excluded_before=[*kept, *ended][-MAX_EXCLUDED_BEFORE:],
    )


def started(s: Situation) -> RuleStatus:
    """The attempt at its very beginning: at weight 0, so that an earlier candidate has left before this
    one arrives."""
    assert s.rollout is not None
    after = cleared(s)
    phase = Phase.EVALUATING if s.rollout.evaluation is not None else first_goal(s.rollout).phase
    back = [one for one in after.excluded_before if one.attempt == s.attempt]
    return _asking(
        s,
        after.model_copy(
            update={
                "phase": phase,
                "attempt": s.attempt,
                "candidate": s.candidate,
                "evidence_since": text(s.now),
                "excluded": [*back, *(excluded(one, s.now) for one in s.rollout.exclude)],
                "excluded_before": [one for one in after.excluded_before if one not in back],
            }
        ),
        first_goal(s.rollout),
    )


def excluded(wish: Exclusion, now: datetime) -> ExclusionStatus:
    """A person's exclusion as the status tells it."""
    told = "by rollout.exclude; remove it there to let the candidate in"
    return ExclusionStatus(
        task=wish.task or "", tenant=wish.tenant or "", reason=BY_PERSON, message=told, time=text(now)
    )


def arriving(s: Situation, goal: Goal) -> RuleStatus:
    """The stage named, without traffic yet; `entered` and `arrived` send it some."""
    after = fresh_stage(s, s.now, goal)
    return after.model_copy(
        update={
            "phase": goal.phase,
            "step": goal.step,
            "weight": 0,
            "shadow_percent": 0,
            "stage_since": "",
            "held": "",
            "held_message": "",
        }
    )


def arrived(s: Situation) -> RuleStatus:
    """The stage's traffic, which was named before, begins. A watch goes on where it was interrupted."""
    goes_on = s.goal.phase is Phase.WATCHING and s.status.stage_since
    return s.status.model_copy(
        update={
            "weight": s.goal.weight,
            "shadow_percent": s.goal.shadow_percent,
            "held": "",
            "held_message": "",
            "stage_since": s.status.stage_since if goes_on else text(s.now),
        }
    )


def entered(s: Situation, goal: Goal) -> RuleStatus:
    """The stage begun, with fresh evidence; requests assigned under a higher weight are let pass first."""
    mirrors_less = goal.weight == 0 and goal.shadow_percent < s.status.shadow_percent
    lowered = goal.weight < s.status.weight or mirrors_less
    begins = s.now + timedelta(seconds=SETTLE_S if lowered else 0.0)
    return fresh_stage(s, begins, goal).model_copy(
        update={
            "phase": goal.phase,
            "step": goal.step,
            "weight": goal.weight,
            "shadow_percent": goal.shadow_percent,
            "held": "",
            "held_message": "",
            "stage_since": text(s.now),
        }
    )


def promoted(s: Situation) -> RuleStatus:
    """The candidate serves all that is not excluded; the evidence that led there stays to be read."""
    return s.status.model_copy(
        update={
            "phase": Phase.PROMOTED,
            "weight": 100,
            "shadow_percent": 0,
            "held": "",
            "held_message": "",
            "watch_until": "",
        }
    )


def fresh_stage(s: Situation, since: datetime, goal: Goal | None = None) -> RuleStatus:
    """Evidence and samples from nothing, for the current stage or for `goal`; the traffic stays."""
    after = s.status.model_copy(
        update={
            **restarted(s.status, since),
            "num_samples": 0,
            "num_stable_samples": 0,
            "coverage": [],
        }
    )
    return _asking(s, after, goal or s.goal)


def restarted(status: RuleStatus, since: datetime) -> dict[str, object]:
    """What changes when evidence restarts and the stage goes on. `since`: which requests count. A gain that
    was shown need not be shown again."""
    return {
        "guards": [],
        "slices": [],
        "gains": [gain for gain in status.gains if gain.shown],
        "num_restarts": status.num_restarts + 1,
        "evidence_since": text(since),
    }


def _asking(s: Situation, after: RuleStatus, goal: Goal) -> RuleStatus:
    """With the samples that the stage asks for, and what it would notice."""
    if goal.phase is Phase.EVALUATING:
        return after.model_copy(update={"min_samples": 0, "detects": ""})
    least = needed(s, goal)
    share = share_percent(goal)
    found = detects(s.rule, share, least) if share < 100 else ""
    return after.model_copy(update={"min_samples": least, "detects": found})


def needed(s: Situation, goal: Goal) -> int:
    """Candidate requests that must have been judged in the stage."""
    return goal.min_samples if goal.min_samples is not None else min_samples(s.rule, share_percent(goal))


def share_percent(goal: Goal) -> float:
    """The candidate's share of all requests seen, in percent: a mirror is a copy, so of 100 mirrored
    requests 200 are seen."""
    mirrored = goal.shadow_percent
    return 100 * mirrored / (100 + mirrored) if mirrored else float(goal.weight)


def since_stage(status: RuleStatus, time: str) -> bool:
    """Whether `time` is of this stage: what was measured before it began judges another one."""
    since = status.stage_since
    return bool(since and time) and datetime.fromisoformat(time) >= datetime.fromisoformat(since)


def text(time: datetime) -> str:
    """RFC 3339."""
    return time.astimezone(UTC).isoformat().replace("+00:00", "Z")
