"""The edits that a person would make, as JSON patches. Pure.

Invariant: a patch tests the name of the rule that it touches, and what else it was decided on, so that it
fails rather than hit another rule or another attempt when something has changed in the meantime.
"""

from __future__ import annotations

from typing import Any

from pydantic import ValidationError

from ..api import Phase, RoutePolicy, RuleStatus
from ..api.rollout import Exclusion, Rollout

JsonPatch = list[dict[str, Any]]
ATTEMPT_UNDER_WAY = (Phase.EVALUATING, Phase.SHADOWING, Phase.STEP, Phase.WATCHING)
AWAITING = "AwaitingApproval"


class EditError(Exception):
    """The edit makes no sense; the message says why and what does."""


def rule_with_rollout(policy: RoutePolicy, name: str) -> int:
    """Index of the rule `name`, or of the only rule with a rollout where `name` is empty."""
    rules = policy.spec.rules
    with_rollout = [index for index, rule in enumerate(rules) if rule.rollout is not None]
    if name:
        found = [index for index, rule in enumerate(rules) if rule.name == name]
        if not found:
            names = ", ".join(rule.name for rule in rules)
            raise EditError(f"RoutePolicy {policy.metadata.name} has no rule {name}; it has {names}")
        if found[0] not in with_rollout:
            raise EditError(f"rule {name} has no rollout: its target serves everybody already")
        return found[0]
    if not with_rollout:
        raise EditError(
            f"RoutePolicy {policy.metadata.name} has no rollout: its targets serve everybody already"
        )
    if len(with_rollout) > 1:
        names = ", ".join(rules[index].name for index in with_rollout)
        raise EditError(f"RoutePolicy {policy.metadata.name} has several rollouts; name the rule: {names}")
    return with_rollout[0]


def rollout_of(policy: RoutePolicy, index: int) -> Rollout:
    """The rollout of a rule that has one."""
    rollout = policy.spec.rules[index].rollout
    if rollout is None:
        raise EditError(f"rule {policy.spec.rules[index].name} has no rollout")
    return rollout


def status_of(policy: RoutePolicy, index: int) -> RuleStatus:
    """Where the rule stands; of one that no operator has seen: nowhere."""
    name = policy.spec.rules[index].name
    return next((status for status in policy.status.rules if status.name == name), RuleStatus(name=name))


def abort_patch(policy: RoutePolicy, index: int) -> JsonPatch:
    """`abort: true`. Setting it again is harmless, so it is always set."""
    return [_same_rule(policy, index), _set(index, "abort", True)]


def retry_patch(policy: RoutePolicy, index: int) -> JsonPatch:
    """The next attempt, not aborted. Refused while an attempt is under way."""
    rollout, phase = rollout_of(policy, index), status_of(policy, index).phase
    name = policy.spec.rules[index].name
    if phase is Phase.PROMOTED and not rollout.abort:
        raise EditError(
            f"rule {name} has promoted its candidate, and a new attempt would take it out of service first:"
            " `sluice rollback` does that, too"
        )
    if phase in ATTEMPT_UNDER_WAY and not rollout.abort:
        raise EditError(f"rule {name} has an attempt under way ({phase.value}): `sluice rollback` ends it")
    patch = [_same_rule(policy, index), _set(index, "attempt", rollout.attempt + 1)]
    return [*patch, _set(index, "abort", False)] if rollout.abort else patch


def awaited_step(policy: RoutePolicy, index: int) -> int | None:
    """The step that waits for a person, counted from 0; the number of steps stands for the promotion. None:
    nothing does."""
    rollout, status = rollout_of(policy, index), status_of(policy, index)
    if status.held != AWAITING:
        return None
    if status.phase is Phase.STEP:
        # A stage that has not begun waits for itself, else the next one does.
        return min(status.step + bool(status.stage_since), len(rollout.steps))
    return len(rollout.steps) if status.phase is Phase.WATCHING else 0


def approve_patch(policy: RoutePolicy, index: int) -> JsonPatch:
    """Consent to the step that waits, for this attempt alone."""
    name, status = policy.spec.rules[index].name, status_of(policy, index)
    step = awaited_step(policy, index)
    if step is None:
        why = f" ({status.held})" if status.held else ""
        raise EditError(f"rule {name} waits for no approval; it is at {status.phase.value}{why}")
    place = [one.name for one in policy.status.rules].index(name)
    return [
        _same_rule(policy, index),
        {"op": "test", "path": f"/status/rules/{place}/attempt", "value": status.attempt},
        _set(index, "approval", {"attempt": status.attempt, "step": step}),
    ]


def exclude_patch(policy: RoutePolicy, index: int, task: str, tenant: str) -> JsonPatch:
    """Keeps requests of a task, of a tenant, or of both together from the candidate."""
    if not task and not tenant:
        raise EditError("say what to exclude: --task, --tenant, or both for requests that are of both")
    try:
        wish = Exclusion(task=task or None, tenant=tenant or None)
    except ValidationError as error:
        field = error.errors()[0]["loc"][0]
        raise EditError(f"no {field} is named so: names are of a-z, 0-9 and '-', 63 at most") from None
    rule, known = policy.spec.rules[index], rollout_of(policy, index).exclude
    for kind, name, met in (("task", task, rule.match.tasks), ("tenant", tenant, rule.match.tenants)):
        if name and met and name not in met:
            raise EditError(f"rule {rule.name} takes requests of {kind} {', '.join(met)}, and none of {name}")
    if wish in known:
        raise EditError(f"rule {rule.name} excludes {exclusion(wish)} already")
    told = [one.model_dump(exclude_none=True) for one in (*known, wish)]
    patch = [_same_rule(policy, index)]
    if known:
        patch.append({"op": "test", "path": f"/spec/rules/{index}/rollout/exclude", "value": told[:-1]})
    return [*patch, _set(index, "exclude", told)]


def exclusion(wish: Exclusion) -> str:
    """In words: `task nl2sql of tenant shop`."""
    parts = (wish.task and f"task {wish.task}", wish.tenant and f"tenant {wish.tenant}")
    return " of ".join(part for part in parts if part)


def _same_rule(policy: RoutePolicy, index: int) -> dict[str, Any]:
    return {"op": "test", "path": f"/spec/rules/{index}/name", "value": policy.spec.rules[index].name}


def _set(index: int, field: str, value: Any) -> dict[str, Any]:
    return {"op": "add", "path": f"/spec/rules/{index}/rollout/{field}", "value": value}
