"""Conditions of RoutePolicy, CacheScope and Tenant.

Invariant: ``Ready=True`` of a policy means that the spec of its current generation is what the gateway
serves, with somebody behind every stable arm. A rollout that runs, or was rolled back, takes nothing from
that.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field

from ..api.common import Condition
from ..api.routepolicy import RoutePolicy, RoutePolicyStatus
from ..api.rulestatus import Phase, RuleStatus
from .conditions import Fact, Problem, merge, truth
from .scope import BY_PERSON, exclusions


@dataclass(frozen=True)
class PolicySeen:
    """What the status of a policy follows from."""

    accepted: int = 0
    """Generation in force; 0: none."""
    problems: tuple[Problem, ...] = ()
    """Of the current generation."""
    withdrawn: tuple[str, ...] = ()
    """What of it is in force although it is not accepted, since it only takes from candidates."""
    rules: tuple[RuleStatus, ...] = ()
    waiting: Mapping[str, str] = field(default_factory=dict)
    """Why an arm is not where it shall be, by ``rule/arm``."""
    unserved: Mapping[str, str] = field(default_factory=dict)
    """Rules whose stable arm nobody answers, with the cluster."""
    services: tuple[Problem, ...] = ()
    """Services that rules in force name and that are not there."""
    access: tuple[Problem, ...] = ()
    """Tokens and authorities that verifiers in force name and that are not there, or are none."""
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
    if seen.services or seen.access:
        return (*seen.services, *seen.access)[0]
    refused = next((text for text in seen.waiting.values() if "refused the configuration" in text), "")
    return Problem("ConfigRefused", refused) if refused else None


def _ready(seen: PolicySeen, generation: int, stalled: Problem | None) -> Fact:
    if stalled is not None and seen.accepted != generation:
        serving = f"generation {seen.accepted} serves" if seen.accepted else "nothing of it serves"
        if seen.withdrawn:
            serving += f", with {', '.join(seen.withdrawn)}"
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
    """What rollouts have come to, each condition by the first rule that it is true of."""
    told = (_rolled_back, _partly_rolled_back, _not_in_git, _awaiting, _in_progress)
    return [fact for one in told if (fact := next(filter(None, map(one, rules)), None)) is not None]


def _rolled_back(one: RuleStatus) -> Fact | None:
    if one.phase is not Phase.ROLLED_BACK:
        return None
    last = _last(one)
    return Fact("RolledBack", "True", last.reason, f"rule {one.name}: {last.message}")


def _partly_rolled_back(one: RuleStatus) -> Fact | None:
    apart = [part for part in one.excluded if part.reason != BY_PERSON]
    if not apart or one.phase in (Phase.ROLLED_BACK, Phase.ABORTED):
        return None
    return Fact(
        "PartlyRolledBack",
        "True",
        apart[-1].reason,
        f"rule {one.name}: {exclusions(apart)} stays on {one.stable.backend}: {apart[-1].message}",
    )


def _not_in_git(one: RuleStatus) -> Fact | None:
    """The spec names the old target still; nobody but its owner may change that."""
    if one.phase not in (Phase.WATCHING, Phase.PROMOTED):
        return None
    edit = f"set target.backend to {one.candidate.backend}"
    if one.candidate.backend == one.stable.backend:
        edit = "move what rollout.candidate changes into the rule"
    edit += " and remove the rollout, which changes nothing in what is served"
    if one.phase is Phase.WATCHING:
        told = f"{one.candidate.backend} serves {one.weight} % and is watched until {one.watch_until}; then"
        told += f" {edit} (doing it now ends the watch)"
    else:
        told = f"{one.candidate.backend} is promoted and serves; {edit}"
    if one.excluded:
        told += (
            f". But {exclusions(one.excluded)} would then go to it too: first give that a rule of its own"
            f" with target {one.stable.backend}"
        )
    return Fact("PromotionNotInGit", "True", "SpecNamesOldTarget", f"rule {one.name}: {told}")


def _awaiting(one: RuleStatus) -> Fact | None:
    if one.held != "AwaitingApproval":
        return None
    return Fact("AwaitingApproval", "True", one.held, f"rule {one.name}: {one.held_message}")


def _in_progress(one: RuleStatus) -> Fact | None:
    if one.phase not in (Phase.EVALUATING, Phase.SHADOWING, Phase.STEP, Phase.WATCHING):
        return None
    # Its figures follow the traffic, and a condition is written whenever it changes.
    why = "" if one.held == "CandidateTooSmall" else f" ({one.held_message})" if one.held_message else ""
    held = f"held: {one.held}{why}" if one.held else "advancing"
    who = f"{one.candidate.backend or 'candidate'} at {one.weight} % (shadow {one.shadow_percent} %)"
    out = f"; excluded: {exclusions(one.excluded)}" if one.excluded else ""
    return Fact(
        "RolloutInProgress", "True", one.held or one.phase.value, f"rule {one.name}: {who}, {held}{out}"
    )


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
