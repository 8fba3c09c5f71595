"""What a rollout does next. Skeleton: the types are final, `decide` follows."""

from __future__ import annotations

from dataclasses import dataclass
from datetime import datetime

from ..api.routepolicy import ArmStatus, Rule, RuleStatus, Transition
from ..gates import GateState


@dataclass(frozen=True)
class Arms:
    """The arms as observed now. An unknown identity is "", never a guess; an HTTP service's is any constant of its own."""

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
    """At least one endpoint acknowledged by the gateway, at the recorded identity, holding the arm's configuration."""
    evidence_live: bool
    """The streams of the candidate's pods and the gateway's access log are connected."""


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
    """The promoted candidate has become the target: push routes first, then the weight, or traffic dips to the old arm."""
    material: bool
    """More than the evidence's checkpoint has changed: write status now. Else once in a few seconds is enough."""


def decide(
    policy: str, rule: Rule, status: RuleStatus, gate: GateState, world: World, now: datetime
) -> Decision:
    """What the rule's rollout shall do now. `policy` is ``namespace/name``; `status` is what was last decided."""
    raise NotImplementedError
