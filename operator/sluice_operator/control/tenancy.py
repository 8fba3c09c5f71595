"""What gateway and pods must know of tenants: derived when a Tenant or Secret has changed, not at each plan.

Invariant: what `Tenancy.known` gives is what `plan.tenants` and `plan.limits` make of the cache as it is now.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass

from ..api import Tenant
from ..plan import limits, tenants
from ..plan.conditions import Problem
from ..xds import state as gateway
from .cache import Cache, Name


@dataclass(frozen=True)
class Known:
    """`told`: for the gateway. `problems`: what is wrong with each Tenant. `limits`: for pods, by tenant."""

    told: tuple[gateway.Tenant, ...]
    problems: Mapping[Name, tuple[Problem, ...]]
    limits: dict[str, dict[str, int]]


class Tenancy:
    """`secrets`: those that are known now."""

    def __init__(self, cache: Cache, secrets: Callable[[], tenants.Secrets]) -> None:
        self._cache, self._secrets = cache, secrets
        self._made_from: tuple[int, tenants.Secrets] | None = None
        self._known = Known((), {}, {})

    def known(self) -> Known:
        secrets = self._secrets()
        made_from = (self._cache.news["Tenant"], secrets)
        if self._made_from != made_from:
            found = [t for t in self._cache.tenants.values() if isinstance(t, Tenant)]
            told, problems = tenants.resolve(found, secrets)
            self._known = Known(told, problems, limits.tenant_limits(found))
            self._made_from = (made_from[0], dict(secrets))  # a copy: the original changes in place
        return self._known
