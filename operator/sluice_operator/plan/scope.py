"""Whose requests the candidate may get, and whether anybody's are left.

An exclusion is a pair (task, tenant) in which "" stands for any. Invariant: what was rolled back alone
stays so for its attempt, over restarts and edits; what a person excluded is in force as the spec has it now.
Example: the evidence turns against task `nl2sql`; ("nl2sql", "") goes back to stable, the rest goes on.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from ..api.rollout import Rollout, Step
from ..api.routepolicy import Rule
from ..api.rulestatus import ExclusionStatus, Phase, RuleStatus

BY_PERSON = "Excluded"
"""Reason of an exclusion that a person made; all others are the operator's, and nobody takes them back."""

Slice = tuple[str, str]
"""Task and tenant; "" is any."""


@dataclass(frozen=True)
class Eligibility:
    """Who may get the candidate: requests of `tasks` and `tenants` (empty: all) that no exclusion covers."""

    excluded: tuple[Slice, ...] = ()
    """Pairs of task and tenant, "" for any, sorted."""
    tenants: tuple[str, ...] = ()
    """Only these; empty: all that the rule matches."""
    tasks: tuple[str, ...] = ()
    """Only these; empty: all that the rule matches."""

    def allows(self, task: str, tenant: str) -> bool:
        """Whether a request of `task` and `tenant` may go to the candidate."""
        if self.tasks and task not in self.tasks:
            return False
        if self.tenants and tenant not in self.tenants:
            return False
        return not covered(self.excluded, task, tenant)


def eligibility(rule: Rule, status: RuleStatus) -> Eligibility:
    """Who may get the candidate now: by the step in force, and by what is excluded.

    Limits of a step end with it, so while watching and once promoted only exclusions are left; their requests
    stay on the old arm. A person's exclusions are read from the spec, so that an edit needs no decision.
    """
    rollout = rule.rollout
    if rollout is None:
        return Eligibility()
    step = current_step(rollout, status)
    return Eligibility(
        tuple(sorted({*automatic(status), *by_person(rollout)})),
        tuple(step.tenants) if step is not None else (),
        tuple(step.tasks) if step is not None else (),
    )


def current_step(rollout: Rollout, status: RuleStatus) -> Step | None:
    """The step in force, by the spec as it stands; None outside of the steps."""
    if status.phase is not Phase.STEP:
        return None
    return rollout.steps[min(status.step, len(rollout.steps) - 1)]


def automatic(status: RuleStatus) -> list[Slice]:
    """What the operator has rolled back alone in this attempt."""
    return [(one.task, one.tenant) for one in status.excluded if one.reason != BY_PERSON]


def by_person(rollout: Rollout) -> list[Slice]:
    """What a person excludes."""
    return [(one.task or "", one.tenant or "") for one in rollout.exclude]


def tasks_out(entries: Iterable[ExclusionStatus]) -> frozenset[str]:
    """Tasks that the candidate gets from nobody."""
    return frozenset(one.task for one in entries if one.task and not one.tenant)


def covered(excluded: Iterable[Slice], task: str, tenant: str) -> bool:
    """Whether an exclusion holds for all requests of `task` and `tenant` ("" is any of them)."""
    return any(a in ("", task) and b in ("", tenant) for a, b in excluded)


def nothing_left(rule: Rule, step: Step | None, excluded: Iterable[Slice]) -> bool:
    """Whether `excluded` covers all that the rule matches, or all that the step is for."""
    pairs = list(excluded)
    tasks = (step.tasks if step is not None else []) or rule.match.tasks or [""]
    tenants = (step.tenants if step is not None else []) or rule.match.tenants or [""]
    return bool(pairs) and all(covered(pairs, task, tenant) for task in tasks for tenant in tenants)


def widens(before: Eligibility, after: Eligibility) -> bool:
    """Whether somebody may get the candidate who could not before."""
    more = any(
        old and (not new or not set(new) <= set(old))
        for old, new in ((before.tenants, after.tenants), (before.tasks, after.tasks))
    )
    return more or not all(covered(after.excluded, *one) for one in before.excluded)


def narrows(before: Eligibility, after: Eligibility) -> bool:
    """Whether somebody may no longer get the candidate who could before."""
    return widens(after, before)


def told(slices: Iterable[Slice]) -> str:
    """For people: task nl2sql, tenant a, task code of tenant b."""
    return ", ".join(
        " of ".join(filter(None, (task and f"task {task}", tenant and f"tenant {tenant}")))
        for task, tenant in slices
    )


def exclusions(entries: Iterable[ExclusionStatus]) -> str:
    """For people, who is excluded."""
    return told((one.task, one.tenant) for one in entries)
