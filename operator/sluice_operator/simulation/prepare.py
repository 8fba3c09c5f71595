"""The rule as it can be simulated: what needs people, suites or another Prometheus is left out, and said so.

Invariant: guards, steps, alpha and scope are the policy's own.
"""

from __future__ import annotations

from dataclasses import dataclass

from ..api.rollout import Consent
from ..api.routepolicy import RoutePolicySpec, Rule
from .traffic import Traffic

LONGEST_WATCH_S = 600


class PrepareError(ValueError):
    """There is nothing to simulate; the message says what to name."""


@dataclass(frozen=True)
class Prepared:
    """What is run."""

    rule: Rule
    notes: tuple[str, ...]
    """What differs from the policy, for people."""
    min_seconds: float
    """Shortest time from start to promotion by the rule."""


def pick_rule(spec: RoutePolicySpec, name: str) -> Rule:
    """The rule of that name, or the only one with a rollout. Raises PrepareError."""
    with_rollout = [rule for rule in spec.rules if rule.rollout is not None]
    found = [rule for rule in with_rollout if name in ("", rule.name)]
    if len(found) == 1:
        return found[0]
    names = ", ".join(rule.name for rule in with_rollout)
    if not with_rollout:
        raise PrepareError("the policy has no rule with a rollout: add one to simulate it")
    raise PrepareError(
        f"name the rule with --rule: {names}" if not name else f"no rollout in {name}: {names}"
    )


def prepare(rule: Rule, watch_seconds: int = LONGEST_WATCH_S) -> Prepared:
    """The rule with a watch of at most `watch_seconds`."""
    rollout = rule.rollout
    if rollout is None:
        raise PrepareError(f"rule {rule.name} has no rollout")
    notes = []
    if rollout.evaluation is not None:
        notes.append("evaluation suites are taken as passed")
    if rollout.queries:
        notes.append("PromQL guards are left out")
    if rollout.paused or rollout.abort:
        notes.append("paused and abort are ignored")
    manual = rollout.promotion is Consent.MANUAL or any(
        one.consent is Consent.MANUAL for one in rollout.steps
    )
    if manual:
        notes.append("approval is given at once")
    if rollout.shadow is not None and rollout.shadow.pairing_percent:
        notes.append("greedy pairs of the shadow stage are left out")
    watch = min(rollout.watch.seconds, watch_seconds)
    if watch < rollout.watch.seconds:
        notes.append(f"watching ends after {watch} s instead of {rollout.watch.seconds} s")
    steps = [
        one.model_copy(update={"consent": Consent.AUTOMATIC, "evaluate": False}) for one in rollout.steps
    ]
    changed = rollout.model_copy(
        update={
            "evaluation": None,
            "queries": [],
            "paused": False,
            "abort": False,
            "promotion": Consent.AUTOMATIC,
            "steps": steps,
            "watch": rollout.watch.model_copy(update={"seconds": watch}),
        }
    )
    shadow = rollout.shadow.min_seconds if rollout.shadow is not None else 0
    shortest = shadow + sum(one.min_seconds for one in steps) + watch
    return Prepared(rule.model_copy(update={"rollout": changed}), tuple(notes), float(shortest))


def unknown_tasks(rule: Rule, traffic: Traffic) -> list[str]:
    """Tasks and tenants that the rollout names and the traffic does not have, for a warning."""
    rollout = rule.rollout
    if rollout is None:
        return []
    tasks = {task for guard in rollout.guards for task in guard.tasks}
    tasks |= {task for step in rollout.steps for task in step.tasks}
    tenants = {tenant for step in rollout.steps for tenant in step.tenants}
    return sorted((tasks - set(traffic.tasks)) | (tenants - set(traffic.tenants)))
