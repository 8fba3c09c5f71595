"""Whether a rule can send a backend what it is not fit for: a task, a data class or a tenant.

Two uses. Validation refuses such a rule (``complaint``). And since a backend's fitness or a tenant's tasks
may change after a policy was accepted, the gateway gets guards in front of each rule (``unfit``): what is
unfit is refused there.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from ..api.backend import Fitness
from ..api.common import DataClass
from ..api.routepolicy import Match


@dataclass(frozen=True)
class Unfit:
    """What of a rule's match a backend must not get. ``everything``: it can't be told apart, so all of it."""

    tasks: tuple[str, ...] = ()
    data_classes: tuple[DataClass, ...] = ()
    tenants: tuple[str, ...] = ()
    everything: bool = False


def unfit(match: Match, fitness: Fitness) -> Unfit:
    """What ``match`` alone lets through, whoever claims it."""
    allowed = fitness.allowed_tasks
    tasks = {t for t in fitness.forbidden_tasks if not match.tasks or t in match.tasks}
    if allowed is not None:
        tasks |= {t for t in match.tasks if t not in allowed}
    classes = tuple(c for c in (match.data_classes or list(DataClass)) if c not in fitness.data_classes)
    tenants = tuple(t for t in match.tenants if fitness.tenants is not None and t not in fitness.tenants)
    unnamed = (allowed is not None and not match.tasks) or (fitness.tenants is not None and not match.tenants)
    return Unfit(tuple(sorted(tasks)), classes, tenants, unnamed)


def _taken(earlier: Iterable[Match], dimension: str) -> set[str]:
    """Values that earlier rules take wholly: those of a match that asks for nothing else."""
    kinds = ("tasks", "tenants", "data_classes", "risks", "input_bytes")
    alone = (m for m in earlier if [k for k in kinds if getattr(m, k)] == [dimension])
    return {str(value) for match in alone for value in getattr(match, dimension)}


def complaint(match: Match, earlier: Sequence[Match], fitness: Fitness, claimable: set[str]) -> str:
    """What is wrong with sending ``match`` to the backend, with the next step; empty where nothing is.

    ``claimable``: tasks that the matched tenants may claim. Earlier rules count, since the first match wins.
    """
    found = unfit(match, fitness)
    classes = [c.value for c in found.data_classes if c.value not in _taken(earlier, "data_classes")]
    if classes:
        return (
            f"data classes {', '.join(classes)}; name others in match.dataClasses, or add them to the "
            "backend's "
            "fitness.dataClasses (a request that claims none is Restricted)"
        )
    if fitness.allowed_tasks is not None and not match.tasks:
        may = ", ".join(fitness.allowed_tasks) or "none"
        return f"any task, where only {may} may be; name them in match.tasks"
    taken = _taken(earlier, "tasks")
    tasks = [t for t in found.tasks if t not in taken and (t in match.tasks or t in claimable)]
    if tasks:
        return (
            f"tasks {', '.join(tasks)}, which its fitness excludes; name others in match.tasks, or let an "
            "earlier "
            "rule take them"
        )
    if fitness.tenants is not None and not match.tenants:
        may = ", ".join(fitness.tenants) or "none"
        return f"any tenant, where only {may} may be; name them in match.tenants"
    return f"tenants {', '.join(found.tenants)}, which are not among its own" if found.tenants else ""
