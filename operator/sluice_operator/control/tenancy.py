"""What gateway and pods must know of tenants: derived when a Tenant or Secret has changed, not at each plan.

Invariant: what `Tenancy.known` gives is what `plan.tenants` and `plan.limits` make of the cache as it is now.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from dataclasses import dataclass

from ..api import Tenant
from ..plan import limits, tenants
from ..plan.conditions import Problem
from ..xds import state as gateway
from .cache import Cache, Name

REVOKED_S = 60.0
"""For so long pods are told of a revoked tenant, seconds; the gateway knows no such tenant at once."""


@dataclass(frozen=True)
class Known:
    """`told`: for the gateway. `problems`: what is wrong with each Tenant. `limits`: for pods, by tenant."""

    told: tuple[gateway.Tenant, ...]
    problems: Mapping[Name, tuple[Problem, ...]]
    limits: dict[str, dict[str, int]]


class Tenancy:
    """`secrets`: those that are known now; `clock`: in seconds."""

    def __init__(
        self, cache: Cache, secrets: Callable[[], tenants.Secrets], clock: Callable[[], float]
    ) -> None:
        self._cache, self._secrets, self._clock = cache, secrets, clock
        self._proven: frozenset[str] = frozenset()
        self._revoked: dict[str, float] = {}
        """By name, with the time until which it is told."""
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
            self._compare(told, problems, secrets)
        return self._known

    def revoked(self) -> frozenset[str]:
        """Tenants that were there within the last minute, and were deleted or have no key or token left."""
        self.known()
        return frozenset(name for name, until in self._revoked.items() if self._clock() < until)

    def _compare(
        self,
        told: Iterable[gateway.Tenant],
        problems: Mapping[Name, tuple[Problem, ...]],
        secrets: tenants.Secrets,
    ) -> None:
        now, proven = self._clock(), {one.name for one in told if one.api_keys or one.jwt}
        # A mistake is no revocation, nor is a Secret that was not looked for yet.
        unsure = {
            one.metadata.name
            for name, one in self._cache.tenants.items()
            if not isinstance(one, Tenant)
            or not tenants.referenced_secrets(one) <= secrets.keys()
            or any(problem.reason != "SecretNotFound" for problem in problems[name])
        }
        lost = self._proven - proven - unsure
        kept = {n: until for n, until in self._revoked.items() if now < until and n not in proven}
        self._revoked = {**kept, **dict.fromkeys(lost, now + REVOKED_S)}
        self._proven = frozenset(proven | (self._proven & unsure))
