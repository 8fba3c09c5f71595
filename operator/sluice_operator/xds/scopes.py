"""A rule as an ordered list of rules that share its name, where its candidate may not have everybody.

First what is excluded, then what the candidate may get, then the rest; so no match needs a "not". All of
them but one are without the candidate and carry no attempt, so what they serve counts for no test. The
candidate's weight hangs on the rule (see ``runtime``), not on a part of it.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import replace

from .state import Rule, Scope

Slice = tuple[tuple[str, ...], tuple[str, ...]]
"""Tasks and tenants, empty for any."""


def parts(rule: Rule) -> tuple[Rule, ...]:
    """The rules to match in turn; together they take what ``rule`` takes."""
    if rule.scope == Scope() or (rule.candidate is None and rule.aside is None):
        return (rule,)
    without = replace(
        rule,
        stable=rule.aside or rule.stable,
        aside=None,
        candidate=None,
        attempt="",
        weight=0,
        shadow_percent=0,
        pair_percent=0,
        scope=Scope(),
    )
    found = [part for one in _excluded(rule.scope.excluded) if (part := _narrowed(without, one))]
    allowed = _narrowed(rule, (rule.scope.tasks, rule.scope.tenants))
    if allowed is not None:
        found.append(allowed)
    if rule.scope.tasks or rule.scope.tenants:
        found.append(without)
    return tuple(found)


def _excluded(pairs: Iterable[tuple[str, str]]) -> list[Slice]:
    """Few slices for many pairs: whole tasks, whole tenants, and for each tenant the tasks it loses."""
    tasks = tuple(sorted({task for task, tenant in pairs if task and not tenant}))
    tenants = tuple(sorted({tenant for task, tenant in pairs if tenant and not task}))
    both: dict[str, set[str]] = {}
    for task, tenant in pairs:
        if task and tenant:
            both.setdefault(tenant, set()).add(task)
    return [
        *([(tasks, ())] if tasks else []),
        *([((), tenants)] if tenants else []),
        *((tuple(sorted(both[tenant])), (tenant,)) for tenant in sorted(both)),
    ]


def _narrowed(rule: Rule, to: Slice) -> Rule | None:
    """The rule for these tasks and tenants alone; None where it takes none of them."""
    tasks, tenants = _both(rule.tasks, to[0]), _both(rule.tenants, to[1])
    return None if tasks is None or tenants is None else replace(rule, tasks=tasks, tenants=tenants)


def _both(ours: tuple[str, ...], theirs: tuple[str, ...]) -> tuple[str, ...] | None:
    if not ours or not theirs:
        return ours or theirs
    return tuple(v for v in ours if v in theirs) or None
