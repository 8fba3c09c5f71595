"""All that a rollout's rules look at, gathered once.

Invariant: a situation is data; nothing in it changes while the rules are asked in turn. Example: a human
cuts five steps down to two while step 3 is in force; `goal` is then step 1, the last there is, with its
weight.
"""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from ..api.routepolicy import ArmStatus, Phase, Rollout, Rule, RuleStatus
from ..gates import GateState, Verdict, belongs, checkpoint, verdict
from .attempt import attempt_hash, gates_hash, resolve


@dataclass(frozen=True)
class Arms:
    """The arms as observed now. An unknown identity is "", never a guess; an HTTP service's is any
    constant of its own."""

    stable: ArmStatus
    """The rule's target."""
    candidate: ArmStatus | None
    """The candidate; None: no rollout, or its backend does not exist."""


@dataclass(frozen=True)
class World:
    """What can be seen of the world now."""

    arms: Arms
    stable_ready: bool
    """At least one endpoint of the rule's target is acknowledged by the gateway."""
    candidate_ready: bool
    """At least one endpoint acknowledged by the gateway, at the recorded identity, holding the arm's
    configuration."""
    evidence_live: bool
    """The candidate's pods are there and tell what they do, and so does every pod of the target."""
    unheard_s: float = 0.0
    """For how long they have not been, seconds."""


@dataclass(frozen=True)
class Goal:
    """The stage that the spec asks for now, and what it sends to the candidate."""

    phase: Phase
    step: int
    weight: int
    shadow_percent: int
    min_seconds: int
    min_samples: int


@dataclass(frozen=True)
class Situation:
    """All that the rules look at."""

    rule: Rule
    rollout: Rollout | None
    status: RuleStatus
    """As last decided, with the evidence since."""
    stable: ArmStatus | None
    candidate: ArmStatus | None
    """The arms with their identities, where known."""
    attempt: str
    """Empty: an identity is unknown."""
    gates: str
    verdict: Verdict
    world: World
    now: datetime

    @property
    def goal(self) -> Goal:
        """Current stage by the spec as it stands: a human may have edited steps away."""
        assert self.rollout is not None
        if self.status.phase is Phase.SHADOWING and self.rollout.shadow is not None:
            return shadow_goal(self.rollout)
        index = self.status.step if self.status.phase is Phase.STEP else 0
        return step_goal(self.rollout, min(index, len(self.rollout.steps) - 1))

    @property
    def in_force(self) -> bool:
        """Whether the candidate gets any traffic."""
        return self.status.weight > 0 or self.status.shadow_percent > 0

    @property
    def elapsed_s(self) -> float:
        """Seconds since the stage's traffic began; 0 before."""
        since = self.status.stage_since
        return (self.now - datetime.fromisoformat(since)).total_seconds() if since else 0.0


def situate(
    policy: str, rule: Rule, status: RuleStatus, gate: GateState, world: World, now: datetime
) -> Situation:
    """Gathers what the rules look at; evidence gathered under other gates or another attempt says nothing."""
    gates = gates_hash(rule)
    said = verdict(gate, now) if belongs(gate, status) and status.gates == gates else Verdict()
    stable = resolve(world.arms.stable, status.stable, world.arms.stable.backend)
    candidate, attempt = None, ""
    if rule.rollout is not None:
        named = rule.rollout.candidate.backend or rule.target.backend
        candidate = resolve(world.arms.candidate, status.candidate, named)
        if stable is not None and candidate is not None:
            attempt = attempt_hash(policy, rule, stable, candidate)
    if status.phase in (Phase.SHADOWING, Phase.STEP):  # what a rollout ended with stays as it was
        status = checkpoint(gate, status)
    status = status.model_copy(update={"name": rule.name})
    if attempt and attempt == status.attempt:
        status = status.model_copy(update={"stable": stable, "candidate": candidate})
    return Situation(rule, rule.rollout, status, stable, candidate, attempt, gates, said, world, now)


def shadow_goal(rollout: Rollout) -> Goal:
    """The shadow stage; there must be one."""
    assert rollout.shadow is not None
    shadow = rollout.shadow
    return Goal(Phase.SHADOWING, 0, 0, shadow.percent, shadow.min_seconds, shadow.min_samples)


def step_goal(rollout: Rollout, index: int) -> Goal:
    """A step of the canary, from 0."""
    step = rollout.steps[index]
    return Goal(Phase.STEP, index, step.weight, 0, step.min_seconds, step.min_samples)
