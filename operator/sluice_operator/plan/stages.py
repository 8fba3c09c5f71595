"""The statuses that a rollout's rules choose between: none, begun, a stage entered, evidence restarted, over.

Invariant: whatever a status says of traffic and evidence is set here and nowhere else, so that no rule
forgets a part.
"""

from __future__ import annotations

from datetime import UTC, datetime, timedelta

from ..api.routepolicy import Phase, RuleStatus
from ..gates.gate import SETTLE_S
from .situation import Goal, Situation

MAX_REJECTED = 20


def rejected(status: RuleStatus, phase: Phase) -> RuleStatus:
    """Over, and never to start again."""
    others = [attempt for attempt in status.rejected if attempt != status.attempt]
    refused = [*others, status.attempt][-MAX_REJECTED:]
    return stopped(status, phase).model_copy(update={"rejected": refused})


def stopped(status: RuleStatus, phase: Phase) -> RuleStatus:
    """No traffic for the candidate; its last evidence stays for people to read."""
    return status.model_copy(update={"phase": phase, "weight": 0, "shadow_percent": 0, "held": ""})


def cleared(s: Situation) -> RuleStatus:
    """No attempt; only history and what was refused are kept."""
    return RuleStatus(
        name=s.rule.name, gates=s.gates, stable=s.stable or s.world.arms.stable, history=s.status.history,
        rejected=s.status.rejected,
    )


def started(s: Situation) -> RuleStatus:
    """The attempt at its very beginning: at weight 0, so that an earlier candidate has left before this
    one arrives."""
    assert s.rollout is not None
    phase = Phase.SHADOWING if s.rollout.shadow is not None else Phase.STEP
    return cleared(s).model_copy(update={
        "phase": phase, "attempt": s.attempt, "candidate": s.candidate, "evidence_since": text(s.now),
    })


def entered(s: Situation, goal: Goal) -> RuleStatus:
    """The stage begun, with fresh evidence; requests assigned under a higher weight are let pass first."""
    mirrors_less = goal.weight == 0 and goal.shadow_percent < s.status.shadow_percent
    lowered = goal.weight < s.status.weight or mirrors_less
    begins = s.now + timedelta(seconds=SETTLE_S if lowered else 0.0)
    return fresh_stage(s, begins).model_copy(update={
        "phase": goal.phase, "step": goal.step, "weight": goal.weight, "shadow_percent": goal.shadow_percent,
        "held": "", "stage_since": text(s.now),
    })


def fresh_stage(s: Situation, since: datetime) -> RuleStatus:
    """Evidence and samples from nothing; the traffic stays."""
    samples = {"num_samples": 0, "num_stable_samples": 0}
    return s.status.model_copy(update={**restarted(s.status, since), **samples})


def restarted(status: RuleStatus, since: datetime) -> dict[str, object]:
    """What changes when evidence restarts and the stage goes on. `since`: which requests count."""
    return {"guards": [], "num_restarts": status.num_restarts + 1, "evidence_since": text(since)}


def text(time: datetime) -> str:
    """RFC 3339."""
    return time.astimezone(UTC).isoformat().replace("+00:00", "Z")
