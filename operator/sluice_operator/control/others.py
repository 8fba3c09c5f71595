"""CacheScopes and Tenants: little to do, but their status tells when an edit is in force everywhere."""

from __future__ import annotations

import asyncio
from collections.abc import Iterator, Sequence
from typing import Any

from ..api import CacheScope, Condition, EvalSuite, RoutePolicy, Tenant
from ..api.cachescope import CacheScopeStatus
from ..api.tenant import TenantStatus
from ..evaluation.suite import Suite, SuiteRefused, parse
from ..evaluation.suite import status as suite_status
from ..kube import KubeError
from ..kube.client import CONFIG_MAP, EVAL_SUITE, SCOPE, TENANT
from ..plan import tenants as plan_tenants
from ..plan.arms import candidate_arm, stable_arm
from ..plan.conditions import Problem, find
from ..plan.policy_status import simple
from ..plan.references import Reference, references
from . import secrets
from .cache import Broken, Name
from .context import Context, stamp
from .statuses import changed, tell_broken, wire

_AGAIN_S = 30.0
"""How often a ConfigMap is looked at."""


async def _parsed(suite: EvalSuite, config_map: dict[str, Any] | None) -> Suite | Problem:
    data = (config_map.get("data") or {}) if config_map is not None else None
    try:
        # Compiling patterns and schemas may take long: not on the loop.
        return await asyncio.to_thread(parse, suite, data)
    except SuiteRefused as error:
        return error.problem


class Others:
    """Reconciles scopes, tenants and suites."""

    def __init__(self, ctx: Context) -> None:
        self._ctx = ctx
        self._looked: set[Name] = set()
        """Secrets that were looked for: of others nobody knows yet whether they are there."""
        self._sought: set[Name] = set()
        """Those, and what is being looked for."""
        self._loading = asyncio.Lock()
        """One at a time: a reading that began before an edit must not forget what the edit names."""

    async def scope(self, name: Name) -> None:
        ctx, scope = self._ctx, self._ctx.cache.scopes.get(name)
        if scope is None:
            return
        if isinstance(scope, Broken):
            await tell_broken(ctx, SCOPE, scope)
            return
        meta, waiting = scope.metadata, self._scope_waiting(scope)
        told = CacheScopeStatus(
            observed_generation=meta.generation,
            conditions=simple(
                scope.status.conditions,
                (),
                waiting,
                "every pod that serves a rule with this scope holds this epoch",
                generation=meta.generation,
                now=stamp(),
            ),
        )
        if changed(scope.status, told):
            await ctx.answered("CacheScope", await ctx.kube.patch_status(SCOPE, *name, wire(told)))

    def _scope_waiting(self, scope: CacheScope) -> str:
        made = self._ctx.router.plan
        for entry in self._ctx.book.accepted():
            if entry.namespace != scope.metadata.namespace:
                continue
            for rule in entry.spec.rules:
                arms = [a for a in (stable_arm(rule), candidate_arm(rule)) if a is not None]
                if all(a.cache_scope != scope.metadata.name for a in arms):
                    continue
                for role in ("stable", "candidate"):
                    why = (
                        made.waiting.get((entry.key, rule.name, role)) if made else "the operator is starting"
                    )
                    if why:
                        return f"policy {entry.name}, rule {rule.name}: {why}"
        settled = self._settled(scope.status.conditions, scope.metadata.generation)
        return "" if settled else "the gateway has not acknowledged the routes yet"

    def _settled(self, conditions: Sequence[Condition], generation: int) -> bool:
        """Whether every gateway has, or had, this generation: later pushes take nothing from that."""
        ready = find(conditions, "Ready")
        before = ready is not None and ready.status == "True" and ready.observed_generation == generation
        return self._ctx.router.settled or (before and self._ctx.ads.num_gateways > 0)

    async def suite(self, name: Name) -> float | None:
        """Looked at again now and then where its samples stand in a ConfigMap, which nobody watches."""
        ctx, suite = self._ctx, self._ctx.cache.suites.get(name)
        if suite is None:
            return None
        if isinstance(suite, Broken):
            await tell_broken(ctx, EVAL_SUITE, suite)
            return None
        source = suite.spec.samples_from
        found = await ctx.kube.find(CONFIG_MAP, name[0], source.name) if source is not None else None
        told = suite_status(suite, await _parsed(suite, found), stamp())
        if changed(suite.status, told):
            await ctx.answered("EvalSuite", await ctx.kube.patch_status(EVAL_SUITE, *name, wire(told)))
        return _AGAIN_S if source is not None else None

    async def tenant(self, name: Name) -> None:
        ctx, tenant = self._ctx, self._ctx.cache.tenants.get(name)
        if tenant is None:
            return
        if isinstance(tenant, Broken):
            await tell_broken(ctx, TENANT, tenant)
            return
        if not set(plan_tenants.referenced_secrets(tenant)) <= self._looked:
            ctx.dirty("secrets", ("", ""))  # which comes back to it
            return
        meta = tenant.metadata
        settled = self._settled(tenant.status.conditions, meta.generation)
        waiting = "" if settled else "the gateway has not acknowledged its keys yet"
        told = TenantStatus(
            observed_generation=meta.generation,
            conditions=simple(
                tenant.status.conditions,
                self._tenant_problems(name),
                waiting,
                "the gateway knows this tenant",
                generation=meta.generation,
                now=stamp(),
            ),
        )
        if changed(tenant.status, told):
            await ctx.answered("Tenant", await ctx.kube.patch_status(TENANT, *name, wire(told)))

    def _tenant_problems(self, name: Name) -> tuple[Problem, ...]:
        """What is wrong with it by itself, else what the gateway would not take."""
        found = self._ctx.tenant_problems.get(name, ())
        refused = self._ctx.ads.quarantined.get(f"tenant/{name[1]}", "")
        return found or ((Problem("RefusedByGateway", refused, "spec"),) if refused else ())

    async def load_secrets(self) -> float | None:
        """Reads what tenants and verifiers name; news goes to gateway and pods at once, since it may be a
        revocation. ConfigMaps, which nobody watches, are read again now and then."""
        async with self._loading:
            wanted = {ref for t in self.tenants() for ref in plan_tenants.referenced_secrets(t)}
            named = [ref for name in self._ctx.cache.policies for ref in self._references(name)]
            wanted |= {ref.object for ref in named if ref.kind == "Secret"}
            config_maps = {ref.object for ref in named if ref.kind == "ConfigMap"}
            self._sought = wanted
            news = await secrets.load(self._ctx, wanted, config_maps)
            self._looked = wanted
        if news:
            await self._ctx.router.flush()
        for name in self._ctx.cache.tenants:
            self._ctx.dirty("tenant", name)
        for name in self._ctx.cache.policies:
            if any(self._references(name)):
                self._ctx.dirty("policy", name)
        return _AGAIN_S if config_maps else None

    async def read_for(self, policy: Name) -> None:
        """Reads if a policy's verifiers name what nobody has looked for yet."""
        if not self._unread(policy):
            return
        try:
            again = await self.load_secrets()
        except KubeError:
            self._ctx.dirty("secrets", ("", ""))  # whose worker tries until it succeeds
        else:
            if again is not None:
                self._ctx.dirty("secrets", ("", ""), again)

    def seeks(self, secret: Name) -> bool:
        """Whether its news matter: also of one that is just being looked for, and was not there yet."""
        return secret in self._sought

    def _unread(self, policy: Name) -> bool:
        known = {"Secret": self._ctx.secrets, "ConfigMap": self._ctx.config_maps}
        return any(ref.object not in known[ref.kind] for ref in self._references(policy))

    def _references(self, name: Name) -> Iterator[Reference]:
        """What a policy's verifiers need: by its spec, and by the one in force where that is another."""
        policy, entry = self._ctx.cache.policies.get(name), self._ctx.book.entries.get(name)
        if isinstance(policy, RoutePolicy):
            yield from references(name[0], policy.spec)
        if entry is not None and entry.spec is not None:
            yield from references(name[0], entry.spec)

    def tenants(self) -> list[Tenant]:
        return [t for t in self._ctx.cache.tenants.values() if isinstance(t, Tenant)]
