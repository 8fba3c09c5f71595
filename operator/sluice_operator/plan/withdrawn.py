"""What a spec that is refused takes from candidates all the same.

A bad edit leaves the last accepted spec in force. But who aborts at night has not broken what is wrong with
the spec since the evening, such as a suite that somebody has deleted: a person's edit that only takes from
candidates is in force whatever else its spec holds. Invariant: no request goes anywhere that it may not go by
the accepted spec, except to a refusal.
"""

from __future__ import annotations

from typing import Any

from ..api.routepolicy import RoutePolicySpec, Rule


def withdrawn(accepted: RoutePolicySpec, refused: RoutePolicySpec) -> tuple[RoutePolicySpec, tuple[str, ...]]:
    """`accepted` without what `refused` takes from its candidates, and what that is, for people."""
    wanted = {rule.name: rule for rule in refused.rules}
    told: list[str] = []
    rules = []
    for rule in accepted.rules:
        change, what = _taken(rule, wanted[rule.name]) if rule.name in wanted else ({}, ())
        rules.append(rule.model_copy(update=change) if change else rule)
        told += [f"{one} of rule {rule.name}" for one in what]
    return (accepted.model_copy(update={"rules": rules}) if told else accepted), tuple(told)


def _taken(rule: Rule, wanted: Rule) -> tuple[dict[str, Any], tuple[str, ...]]:
    """What changes in the rule, and what that is."""
    if wanted.target.refusal is not None and rule.target.refusal is None:
        return {"target": wanted.target, "rollout": None, "fallbacks": []}, ("the refusal",)
    if rule.rollout is None:
        return {}, ()
    if wanted.rollout is None:
        # With another target it may hand over to a promoted candidate.
        removed = wanted.target == rule.target
        return ({"rollout": None}, ("the removed rollout",)) if removed else ({}, ())
    flags = [
        name
        for name in ("abort", "paused")
        if getattr(wanted.rollout, name) and not getattr(rule.rollout, name)
    ]
    change: dict[str, Any] = dict.fromkeys(flags, True)
    new = [one for one in wanted.rollout.exclude if one not in rule.rollout.exclude]
    if new:
        change["exclude"] = [*rule.rollout.exclude, *new]
    if not change:
        return {}, ()
    return {"rollout": rule.rollout.model_copy(update=change)}, tuple(change)
