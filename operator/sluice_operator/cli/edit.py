"""The edits that a person would make, as JSON patches. Pure.

Invariant: a patch tests the name of the rule that it touches, so that it fails rather than hit
another rule when somebody has changed the list in the meantime.
"""

from __future__ import annotations

from typing import Any

from ..api import RoutePolicy

JsonPatch = list[dict[str, Any]]


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


def abort_patch(policy: RoutePolicy, index: int) -> JsonPatch:
    """`abort: true`. Setting it again is harmless, so it is always set."""
    return [_same_rule(policy, index), _set(index, "abort", True)]


def retry_patch(policy: RoutePolicy, index: int) -> JsonPatch:
    """The next attempt, not aborted. Refused while an attempt is under way."""
    rule = policy.spec.rules[index]
    if rule.rollout is None:
        raise EditError(f"rule {rule.name} has no rollout")
    phase = next((status.phase.value for status in policy.status.rules if status.name == rule.name), "Stable")
    if phase in ("Shadowing", "Step") and not rule.rollout.abort:
        raise EditError(f"rule {rule.name} has an attempt under way ({phase}): `sluice rollback` ends it")
    patch = [_same_rule(policy, index), _set(index, "attempt", rule.rollout.attempt + 1)]
    return [*patch, _set(index, "abort", False)] if rule.rollout.abort else patch


def _same_rule(policy: RoutePolicy, index: int) -> dict[str, Any]:
    return {"op": "test", "path": f"/spec/rules/{index}/name", "value": policy.spec.rules[index].name}


def _set(index: int, field: str, value: Any) -> dict[str, Any]:
    return {"op": "add", "path": f"/spec/rules/{index}/rollout/{field}", "value": value}
