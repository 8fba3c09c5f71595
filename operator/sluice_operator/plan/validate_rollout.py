"""What a rollout can get wrong beyond its schema.

Invariant: what passes here can come to an end. A guard that nobody measures, a step that nobody's requests
reach and a suite that is not there would hold it for ever, or let it pass unseen.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from itertools import pairwise

from ..api.guards import Guard, GuardMode, Metric
from ..api.rollout import Rollout
from ..api.routepolicy import Rule
from .arms import candidate_arm, stable_arm
from .conditions import Problem
from .promql import NAMES, unknown_names
from .surroundings import Surroundings


def rollout_problems(index: int, rule: Rule, around: Surroundings) -> Iterator[Problem]:
    """All problems of rule ``index``'s rollout; none where it has no rollout."""
    rollout = rule.rollout
    if rollout is None:
        return
    at = f"spec.rules[{index}].rollout"
    if not 0 < float(rollout.alpha) < 0.5:
        yield Problem("InvalidSpec", f"{rollout.alpha} must be above 0 and below 0.5", f"{at}.alpha")
    if rule.target.backend is None:
        yield Problem("InvalidSpec", "a rollout needs a target with a backend to compare with", at)
    elif candidate_arm(rule) == stable_arm(rule):
        told = "differs from the target in nothing, so there is nothing to roll out"
        yield Problem("InvalidSpec", told, f"{at}.candidate")
    yield from _steps(rollout, at)
    yield from _coverage(rollout, at)
    yield from _suites(rollout, around, at)
    yield from _guards(rollout, at)
    yield from _unverified(rule, rollout, at)
    yield from _gains(rollout, at)
    yield from _queries(rollout, around, at)
    yield from _audience(rule, rollout, around, at)


def alone(rule: Rule) -> Surroundings:
    """Surroundings that have all that the rule's rollout names: what is wrong there is wrong anywhere."""
    rollout = rule.rollout
    if rollout is None:
        return Surroundings()
    tenants = {*rule.match.tenants, *(one for _, named in _tenants(rollout) for one in named)} or {"any"}
    tasks = {*rule.match.tasks, *(one for _, named in _tasks(rollout) for one in named)}
    suites = rollout.evaluation.suites if rollout.evaluation is not None else []
    return Surroundings(
        suites=frozenset(suites), tenants=dict.fromkeys(tenants, tuple(tasks)), prometheus=True
    )


def _steps(rollout: Rollout, at: str) -> Iterator[Problem]:
    for_all = [(j, step) for j, step in enumerate(rollout.steps) if not step.tenants and not step.tasks]
    for (_, earlier), (j, later) in pairwise(for_all):
        if later.weight <= earlier.weight:
            yield Problem(
                "InvalidSpec",
                f"weight {later.weight} does not exceed that of the step before, {earlier.weight}; weights"
                " ascend",
                f"{at}.steps[{j}].weight",
            )
    last = len(rollout.steps) - 1
    if (last, rollout.steps[last]) not in for_all:
        yield Problem(
            "InvalidSpec",
            "the last step is for tenants or tasks only, and the rest would meet the candidate untested; add"
            " one for all",
            f"{at}.steps[{last}]",
        )
    if rollout.approval is not None and rollout.approval.step > len(rollout.steps):
        yield Problem(
            "InvalidSpec",
            f"there is no step {rollout.approval.step}; steps count from 0, and {len(rollout.steps)} stands"
            " for the promotion",
            f"{at}.approval.step",
        )


def _coverage(rollout: Rollout, at: str) -> Iterator[Problem]:
    for j, step in enumerate(rollout.steps):
        for k, one in enumerate(step.coverage):
            if step.tasks and one.tasks and not set(step.tasks) & set(one.tasks):
                told = f"the step is for {', '.join(step.tasks)} only, so it would wait for this for ever"
                yield Problem("InvalidSpec", told, f"{at}.steps[{j}].coverage[{k}].tasks")


def _suites(rollout: Rollout, around: Surroundings, at: str) -> Iterator[Problem]:
    for j, name in enumerate(rollout.evaluation.suites if rollout.evaluation is not None else []):
        if name not in around.suites:
            told = f"EvalSuite {name!r} does not exist in this namespace; create it or correct the name"
            yield Problem("SuiteNotFound", told, f"{at}.evaluation.suites[{j}]")
    for j, step in enumerate(rollout.steps):
        if step.evaluate and rollout.evaluation is None:
            told = "no suites are named that could run; name them in rollout.evaluation"
            yield Problem("InvalidSpec", told, f"{at}.steps[{j}].evaluate")


def _guards(rollout: Rollout, at: str) -> Iterator[Problem]:
    seen: set[tuple[Metric, frozenset[str]]] = set()
    pairs = rollout.shadow is not None and rollout.shadow.pairing_percent > 0
    for j, guard in enumerate(rollout.guards):
        key = (guard.metric, frozenset(guard.tasks))
        if key in seen:
            yield Problem("InvalidSpec", "the same metric is guarded twice", f"{at}.guards[{j}]")
        seen.add(key)
        if guard.metric is Metric.DISAGREEMENT_RATE and guard.mode is not GuardMode.WATCH and not pairs:
            told = (
                "nothing is compared without a shadow stage with pairingPercent; add one, or use mode Watch"
            )
            yield Problem("InvalidSpec", told, f"{at}.guards[{j}].metric")
        yield from _silent(guard, f"{at}.guards[{j}]")


def _silent(guard: Guard, at: str) -> Iterator[Problem]:
    """What would never say anything, whatever happens."""
    ceiling, rate = guard.ceiling, guard.metric.is_rate
    if guard.metric is Metric.DISAGREEMENT_RATE and guard.mode is GuardMode.HARD:
        told = "two answers that differ are no violation: how often they do is compared; use mode Guard"
        yield Problem("InvalidSpec", told, f"{at}.mode")
    if guard.metric is Metric.DISAGREEMENT_RATE and ceiling is not None:
        told = "the candidate is compared with how often stable differs from itself; remove the ceiling"
        yield Problem("InvalidSpec", told, f"{at}.ceiling")
    elif ceiling is not None and rate and float(ceiling.value) >= 100:
        told = f"no rate is above {ceiling.value} %; give percent of the requests below 100"
        yield Problem("InvalidSpec", told, f"{at}.ceiling.value")
    elif ceiling is not None and not rate and float(ceiling.value) == 0:
        told = "every request is above 0; give the highest value that is acceptable"
        yield Problem("InvalidSpec", told, f"{at}.ceiling.value")
    if not rate and not guard.percentiles and ceiling is None:
        told = "without a percentile nothing is compared; name one, such as 95, or give a ceiling"
        yield Problem("InvalidSpec", told, f"{at}.percentiles")


def _gains(rollout: Rollout, at: str) -> Iterator[Problem]:
    seen: set[tuple[Metric, int, frozenset[str]]] = set()
    for j, gain in enumerate(rollout.gains):
        key = (gain.metric, 0 if gain.metric.is_rate else gain.percentile, frozenset(gain.tasks))
        if key in seen:
            yield Problem("InvalidSpec", "the same gain is expected twice", f"{at}.gains[{j}]")
        seen.add(key)
        if gain.metric is Metric.DISAGREEMENT_RATE:
            told = (
                "answers are compared in the shadow stage alone, so no step could show it; guard it instead"
            )
            yield Problem("InvalidSpec", told, f"{at}.gains[{j}].metric")


def _unverified(rule: Rule, rollout: Rollout, at: str) -> Iterator[Problem]:
    """Nothing is verified where no check can fail, so there is no time to it."""
    if rule.contract.can_fail:
        return
    asked = [(f"guards[{j}]", guard.metric) for j, guard in enumerate(rollout.guards)]
    asked += [(f"gains[{j}]", gain.metric) for j, gain in enumerate(rollout.gains)]
    for where, metric in asked:
        if metric is Metric.TIME_TO_VERIFIED:
            told = "nothing is verified without a check of severity Hard; add one, or name another metric"
            yield Problem("InvalidSpec", told, f"{at}.{where}.metric")


def _queries(rollout: Rollout, around: Surroundings, at: str) -> Iterator[Problem]:
    for j, query in enumerate(rollout.queries):
        if not around.prometheus:
            told = "the operator was installed without a Prometheus; install it with one, or remove the query"
            yield Problem("PrometheusNotFound", told, f"{at}.queries[{j}]")
        unknown = unknown_names(query.query)
        if unknown:
            known = ", ".join(f"${name}" for name in NAMES)
            told = f"${', $'.join(unknown)} stands for nothing; {known} are filled in"
            yield Problem("InvalidSpec", told, f"{at}.queries[{j}].query")


def _audience(rule: Rule, rollout: Rollout, around: Surroundings, at: str) -> Iterator[Problem]:
    """Tenants and tasks that are named, of which the rule takes no request."""
    for where, names in _tenants(rollout):
        for name in names:
            if name not in around.tenants:
                told = f"Tenant {name!r} does not exist; create it or correct the name"
                yield Problem("TenantNotFound", told, f"{at}.{where}")
            elif rule.match.tenants and name not in rule.match.tenants:
                told = f"the rule takes no requests of tenant {name!r}; add it to match.tenants or correct it"
                yield Problem("InvalidSpec", told, f"{at}.{where}")
    matched = rule.match.tenants or list(around.tenants)
    claimable = {task for tenant in matched for task in around.tenants.get(tenant, ())}
    for where, names in _tasks(rollout):
        for name in names:
            if rule.match.tasks and name not in rule.match.tasks:
                told = f"the rule takes no requests of task {name!r}; add it to match.tasks or correct it"
                yield Problem("InvalidSpec", told, f"{at}.{where}")
            elif name not in claimable:
                told = f"no tenant of this rule may claim task {name!r}; add it to a Tenant or correct it"
                yield Problem("InvalidSpec", told, f"{at}.{where}")


def _tenants(rollout: Rollout) -> Iterator[tuple[str, Iterable[str]]]:
    for j, step in enumerate(rollout.steps):
        yield f"steps[{j}].tenants", step.tenants
    for j, one in enumerate(rollout.exclude):
        yield f"exclude[{j}].tenant", [one.tenant] if one.tenant else []


def _tasks(rollout: Rollout) -> Iterator[tuple[str, Iterable[str]]]:
    for j, step in enumerate(rollout.steps):
        yield f"steps[{j}].tasks", step.tasks
        for k, coverage in enumerate(step.coverage):
            yield f"steps[{j}].coverage[{k}].tasks", coverage.tasks
    for j, one in enumerate(rollout.exclude):
        yield f"exclude[{j}].task", [one.task] if one.task else []
    for j, guard in enumerate(rollout.guards):
        yield f"guards[{j}].tasks", guard.tasks
    for j, gain in enumerate(rollout.gains):
        yield f"gains[{j}].tasks", gain.tasks
