"""Conditions of RoutePolicy, CacheScope and Tenant.

Invariant: ``Ready=True`` of a policy means that the spec of its current generation is what the gateway
serves, with somebody behind every stable arm. A rollout that runs, or was rolled back, takes nothing from
that.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from ..api.common import Condition
from ..api.routepolicy import Phase, RoutePolicy, RoutePolicyStatus, RuleStatus
from .conditions import Fact, Problem, merge, truth


@dataclass(frozen=True)
class PolicySeen:
    """What the status of a policy follows from."""

    accepted: int = 0
    """Generation in force; 0: none."""
    problems: tuple[Problem, ...] = ()
    """Of the current generation."""
    rules: tuple[RuleStatus, ...] = ()
    waiting: Mapping[str, str] = field(default_factory=dict)
    """Why an arm is not where it shall be, by ``rule/arm``."""
    unserved: Mapping[str, str] = field(default_factory=dict)
    """Rules whose stable arm nobody answers, with the cluster."""
    services: tuple[Problem, ...] = ()
    """Services that rules in force name and that are not there."""
    quarantined: str = ""
    """Why the gateway does not take the policy."""
    gateway: bool = True
    """Whether a gateway is connected and has everything."""


def status(policy: RoutePolicy, seen: PolicySeen, now: str) -> RoutePolicyStatus:
    """The whole status that is true now."""
    generation = policy.metadata.generation
    stalled = _stalled(seen)
    facts = [
        _ready(seen, generation, stalled),
        _reconciling(seen),
        Fact(
            "Stalled",
            truth(stalled is not None),
            stalled.reason if stalled else "NoProblem",
            stalled.text() if stalled else "nothing to see to",
        ),
        *_rollouts(seen.rules),
    ]
    return RoutePolicyStatus(
        observed_generation=generation,
        accepted_generation=seen.accepted,
        rules=list(seen.rules),
        conditions=merge(policy.status.conditions, facts, generation=generation, now=now),
    )


def _stalled(seen: PolicySeen) -> Problem | None:
    if seen.problems:
        first, more = seen.problems[0], len(seen.problems) - 1
        text = first.message + (f" (and {more} more problem(s))" if more else "")
        return Problem(first.reason, text, first.field)
    if seen.quarantined:
        return Problem("RefusedByGateway", seen.quarantined)
    if seen.services:
        return seen.services[0]
    refused = next((text for text in seen.waiting.values() if "refused the configuration" in text), "")
    return Problem("ConfigRefused", refused) if refused else None


def _ready(seen: PolicySeen, generation: int, stalled: Problem | None) -> Fact:
    if stalled is not None and seen.accepted != generation:
        serving = f"generation {seen.accepted} serves" if seen.accepted else "nothing of it serves"
        return Fact(
            "Ready",
            "False",
            "NotAccepted",
            f"generation {generation} is not in force: {stalled.text()}; {serving}",
        )
    if stalled is not None:
        return Fact("Ready", "False", stalled.reason, stalled.text())
    if seen.unserved:
        rule, cluster = next(iter(seen.unserved.items()))
        return Fact(
            "Ready",
            "False",
            "NoEndpoints",
            f"rule {rule}: nobody answers at {cluster}; look at that backend's status",
        )
    stable = {k: v for k, v in seen.waiting.items() if k.endswith("/stable")}
    if stable:
        arm, why = next(iter(stable.items()))
        return Fact("Ready", "False", "WaitingForPods", f"{arm}: {why}; until then the arm before it serves")
    if not seen.gateway:
        return Fact("Ready", "False", "GatewayNotInForce", "the gateway has not acknowledged the routes yet")
    return Fact("Ready", "True", "InForce", f"generation {generation} is what the gateway serves")


def _reconciling(seen: PolicySeen) -> Fact:
    if seen.waiting:
        arm, why = next(iter(seen.waiting.items()))
        return Fact("Reconciling", "True", "WaitingForPods", f"{arm}: {why}")
    if not seen.gateway and not seen.problems:
        return Fact(
            "Reconciling", "True", "WaitingForGateway", "the gateway has not acknowledged the routes yet"
        )
    return Fact("Reconciling", "False", "AsDesired", "nothing is on its way")


def _rollouts(rules: Sequence[RuleStatus]) -> list[Fact]:
    facts = []
    back = [r for r in rules if r.phase is Phase.ROLLED_BACK]
    if back:
        facts.append(
            Fact(
                "RolledBack", "True", _last(back[0]).reason, f"rule {back[0].name}: {_last(back[0]).message}"
            )
        )
    promoted = [r for r in rules if r.phase is Phase.PROMOTED]
    if promoted:
        facts.append(
            Fact(
                "PromotionNotInGit",
                "True",
                "SpecNamesOldTarget",
                f"rule {promoted[0].name}: {promoted[0].candidate.backend} is promoted and serves; set "
                "target.backend to it and "
                "remove the rollout, which changes nothing in what is served",
            )
        )
    running = [r for r in rules if r.phase in (Phase.SHADOWING, Phase.STEP)]
    if running:
        one = running[0]
        held = f"held: {one.held}" if one.held else "advancing"
        facts.append(
            Fact(
                "RolloutInProgress",
                "True",
                one.held or one.phase.value,
                f"rule {one.name}: {one.candidate.backend or 'candidate'} at {one.weight} % (shadow "
                f"{one.shadow_percent} %), {held}",
            )
        )
    return facts


def _last(rule: RuleStatus) -> _Line:
    if rule.history:
        return _Line(rule.history[-1].reason, rule.history[-1].message)
    return _Line(rule.phase.value, "")


@dataclass(frozen=True)
class _Line:
    reason: str
    message: str


def simple(
    old: Sequence[Condition],
    problems: Iterable[Problem],
    waiting: str,
    ready: str,
    *,
    generation: int,
    now: str,
) -> list[Condition]:
    """Conditions of a CacheScope or Tenant: ``waiting`` says what is not there yet, ``ready`` what
    Ready=True means."""
    problem = next(iter(problems), None)
    if problem is not None:
        told = Fact("Ready", "False", problem.reason, problem.text())
    elif waiting:
        told = Fact("Ready", "False", "Waiting", waiting)
    else:
        told = Fact("Ready", "True", "InForce", ready)
    facts = [
        told,
        Fact(
            "Reconciling",
            truth(bool(waiting) and problem is None),
            "Waiting" if waiting else "AsDesired",
            waiting or "nothing is on its way",
        ),
        Fact(
            "Stalled",
            truth(problem is not None),
            problem.reason if problem else "NoProblem",
            problem.text() if problem else "nothing to see to",
        ),
    ]
    return merge(old, facts, generation=generation, now=now)
