"""All that a rollout's rules look at, gathered once.

Invariant: a situation is data; nothing in it changes while the rules are asked in turn. Example: a human
cuts five steps down to two while step 3 is in force; `goal` is then step 1, the last there is, with its
weight.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from datetime import datetime

from ..api.rollout import Rollout
from ..api.routepolicy import Rule
from ..api.rulestatus import ArmStatus, EvaluationStatus, Phase, RuleStatus
from ..gates import GateState, Verdict, belongs, checkpoint, verdict
from .attempt import attempt_hash, gates_hash, resolve
from .scope import Slice

ARMED = (Phase.SHADOWING, Phase.STEP, Phase.WATCHING)
"""Phases in which evidence is gathered and judged."""

UNDER_WAY = (Phase.EVALUATING, *ARMED, Phase.PROMOTED)
OVER = (Phase.ROLLED_BACK, Phase.ABORTED)


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
    unreadable: tuple[str, ...] = ()
    """Backends of the arms that tell, but evidence of another version than this operator reads."""
    evaluation: EvaluationStatus | None = None
    """The newest run of the suites for this attempt, running or ended; None: none that is known."""
    request_rate: float = 0.0
    """Requests/s that the rule takes, of all arms; 0: unknown."""
    slice_rates: Mapping[Slice, float] = field(default_factory=dict)
    """The same by task and tenant, where known: a step for some tenants sends the candidate less."""
    safe_rate: float | None = None
    """Tested safe throughput of one candidate replica, requests/s; None: not calibrated."""
    ready_replicas: int = 0
    """Candidate's endpoints that the gateway can reach."""
    wanted_replicas: int = 0
    """Candidate's replicas by its spec."""
    mean_seconds: float = 0.0
    """Mean time of a request at the candidate; 0: unknown."""
    stable_replicas: int = 0
    """The target's endpoints that the gateway can reach."""
    stable_safe_rate: float | None = None
    """Tested safe throughput of one replica of the target, requests/s; None: not calibrated."""


@dataclass(frozen=True)
class Goal:
    """A stage by the spec as it stands, and what it sends to the candidate."""

    phase: Phase
    step: int
    weight: int
    shadow_percent: int
    min_seconds: int = 0
    min_samples: int | None = None
    """None: as many as the guards' power asks for."""


@dataclass(frozen=True)
class Situation:
    """All that the rules look at."""

    policy: str
    """``namespace/name``."""
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
    cached: float = 0.0
    """Share of the candidate's prompt tokens that its prefix cache had; 0: none, or not known."""
    lacking: tuple[str, ...] = ()
    """Metrics of which nothing of stable's is known, so that the candidate's answers can't be judged."""

    @property
    def goal(self) -> Goal:
        """Current stage by the spec as it stands: a human may have edited it away."""
        assert self.rollout is not None
        phase, step = self.status.phase, self.status.step
        if phase is Phase.EVALUATING and self.rollout.evaluation is not None:
            return Goal(phase, 0, 0, 0)
        if phase is Phase.EVALUATING or (phase is Phase.SHADOWING and self.rollout.shadow is not None):
            return first_goal(self.rollout)
        if phase is Phase.WATCHING:
            return watch_goal(self.rollout, step, self.world.stable_ready)
        index = step if phase is Phase.STEP else 0
        return step_goal(self.rollout, min(index, len(self.rollout.steps) - 1))

    @property
    def following(self) -> Goal:
        """The stage after the current one."""
        assert self.rollout is not None
        phase, step = self.status.phase, self.status.step
        if phase is Phase.EVALUATING:
            return first_goal(self.rollout)
        index = step + 1 if phase is Phase.STEP else 0
        if phase is Phase.SHADOWING or (phase is Phase.STEP and index < len(self.rollout.steps)):
            return step_goal(self.rollout, index)
        if phase is Phase.STEP and self.rollout.watch.seconds > 0:
            return watch_goal(self.rollout, step, self.world.stable_ready)
        return Goal(Phase.PROMOTED, step, 100, 0)

    @property
    def in_force(self) -> bool:
        """Whether the candidate gets any traffic."""
        return self.status.weight > 0 or self.status.shadow_percent > 0

    @property
    def elapsed_s(self) -> float:
        """Seconds since the stage's traffic began; 0 before."""
        since = self.status.stage_since
        return (self.now - datetime.fromisoformat(since)).total_seconds() if since else 0.0

    @property
    def run(self) -> EvaluationStatus | None:
        """The newest run that has ended or that somebody still runs; one that nobody knows of any more was
        lost with an operator."""
        run = self.status.evaluation
        return run if run is not None and (run.ended or self.world.evaluation is not None) else None


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
    if status.phase in ARMED:  # what a rollout ended with stays as it was
        status = checkpoint(gate, status)
    status = status.model_copy(update={"name": rule.name})
    if attempt and attempt == status.attempt:
        status = status.model_copy(update={"stable": stable, "candidate": candidate})
        status = _told(status, world)
    ours = belongs(gate, status)
    return Situation(
        policy,
        rule,
        rule.rollout,
        status,
        stable,
        candidate,
        attempt,
        gates,
        said,
        world,
        now,
        cached=gate.summary.candidate.cached_share if ours else 0.0,
        lacking=gate.lacking if ours else (),
    )


def _told(status: RuleStatus, world: World) -> RuleStatus:
    """`status` with the newest run of the suites, if it is of this attempt."""
    run = world.evaluation
    if run is None or run.attempt not in ("", status.attempt):
        return status
    judged = status.phase in (Phase.EVALUATING, *ARMED)
    return status.model_copy(update={"evaluation": run}) if judged else status


def first_goal(rollout: Rollout) -> Goal:
    """The first stage with traffic."""
    if rollout.shadow is None:
        return step_goal(rollout, 0)
    shadow = rollout.shadow
    return Goal(Phase.SHADOWING, 0, 0, shadow.percent, shadow.min_seconds, shadow.min_samples)


def step_goal(rollout: Rollout, index: int) -> Goal:
    """A step of the canary, from 0."""
    step = rollout.steps[index]
    return Goal(Phase.STEP, index, step.weight, 0, step.min_seconds, step.min_samples)


def watch_goal(rollout: Rollout, last_step: int, stable_ready: bool) -> Goal:
    """The watch. Nobody is held back on an old arm that can't answer; and what the steps have shown need
    not be shown again, but silence is no proof, so one request must have been judged."""
    held_back = rollout.watch.holdback_percent if stable_ready else 0
    return Goal(Phase.WATCHING, last_step, 100 - held_back, 0, rollout.watch.seconds, 1)
