"""The parts around a decision, wired to the operator: ledger, suites, queries, load ramps, reviews.

Each knows only the few callables that it is given here. Invariant: nothing here is on the way of a rollback.
"""

from __future__ import annotations

import asyncio
import itertools
import logging
from collections.abc import Callable, Mapping
from typing import Any

from ..api import InferenceBackend, ReleaseRecord, RoutePolicy, RuleStatus
from ..api.backend import Capacity
from ..api.routepolicy import Rule
from ..gates import Observation
from ..kube import NotFound
from ..kube.client import BACKEND, CONFIG_MAP, RELEASE_RECORD
from ..plan.routed import Review, RuleKey
from . import calibrate, reviews
from .cache import Name
from .calibrate import Calibrations
from .context import Context, about, monotonic, now
from .direct import NoTarget, backend_target, serves, target
from .evaluations import Evaluations, load_suites
from .ledger import Ledger
from .queries import Prometheus, Queries
from .releases import Releases
from .reviews import Reviews
from .statuses import wire

log = logging.getLogger(__name__)
_ADVISE_S = 30


class Releasing:
    """Everything wired together; ``news`` is called when something else than a request may decide."""

    def __init__(self, ctx: Context, news: Callable[[], None]) -> None:
        self._ctx, self._news = ctx, news
        settings = ctx.settings
        self.ledger = Ledger(
            ctx.kube.apply,
            self._delete_record,
            now=now,
            clock=monotonic,
            keep=settings.ledger_keep,
            max_age_days=settings.ledger_days,
        )
        self._prometheus = (
            Prometheus(settings.prometheus_url, token_file=settings.prometheus_token_file)
            if settings.prometheus_url
            else None
        )
        self._queries = Queries(self._prometheus.value if self._prometheus else None, self._took)
        self._evaluations = Evaluations(
            lambda namespace, names: load_suites(ctx.cache.suites, self._config_map, namespace, names),
            lambda policy, rule, arm: target(ctx.router.plan, policy, rule, arm),
            lambda: ctx.credentials.gateway_credential,
            lambda policy, rule: news(),
            now,
        )
        self.releases = Releases(
            ctx.cache,
            self.ledger,
            self._evaluations,
            self._queries,
            reached=ctx.router.reached,
            kv_percent=self._kv_percent,
        )
        self._calibrations = Calibrations(
            calibrate.World(
                subject=self._subject,
                serves=lambda name: serves(ctx.book.accepted(), *name),
                credential=lambda: ctx.credentials.gateway_credential,
                capacity=self._write_capacity,
                answer=self._annotate_backend,
                tell=self._tell_backend,
                now=now,
            )
        )
        self._telling: set[asyncio.Task[Any]] = set()
        self.reviews = Reviews(
            reviews.World(
                record=self.ledger.get,
                rule=self._rule,
                problem=self._no_copies,
                reviewed=self.ledger.reviewed,
                due=self.ledger.due,
                tell_policy=lambda *told: self._tell_soon("RoutePolicy", *told),
                tell_record=lambda *told: self._tell_soon("ReleaseRecord", *told),
                changed=ctx.router.dirty.set,
                now=now,
            )
        )

    # At start and end

    def load(self) -> None:
        """Takes in the ledger, once lists are complete and before statuses are looked at."""
        self.ledger.load(r for r in self._ctx.cache.records.values() if isinstance(r, ReleaseRecord))

    async def run(self) -> None:
        """The ledger's writing, and once a second what only time brings on."""
        for name in self._ctx.cache.backends:
            self.backend_changed(name)
        for name in self._ctx.cache.policies:
            self.policy_changed(name)
        async with asyncio.TaskGroup() as group:
            group.create_task(self.ledger.run())
            group.create_task(self._ticks())

    async def _ticks(self) -> None:
        for second in itertools.count():
            await asyncio.sleep(1.0)
            self.reviews.tick()
            self.ledger.sync(self._ctx.book.recorded())
            if second % _ADVISE_S == 0:
                self._advise()

    def _advise(self) -> None:
        """Traffic has changed meanwhile, and with it how many replicas it needs."""
        for name, backend in self._ctx.cache.backends.items():
            if isinstance(backend, InferenceBackend) and backend.status.capacity is not None:
                self._ctx.dirty("backend", name)

    async def close(self) -> None:
        await self._calibrations.close()
        await self._evaluations.close()
        await self._queries.close()
        if self._prometheus is not None:
            await self._prometheus.close()

    # News

    def policy_changed(self, name: Name) -> None:
        policy = self._ctx.cache.policies.get(name)
        if policy is None:
            self.reviews.forget(name)
        elif isinstance(policy, RoutePolicy):
            self.reviews.consider(policy)

    def backend_changed(self, name: Name) -> None:
        backend = self._ctx.cache.backends.get(name)
        if isinstance(backend, InferenceBackend):
            self._calibrations.consider(backend)
        elif backend is None:
            self._calibrations.stop(name)

    def record_changed(self, name: Name) -> None:
        """We alone write records, so all that is news is one that somebody has deleted."""
        if name not in self._ctx.cache.records:
            self.ledger.dropped(name)

    def reviews_take(self, policy: str, rule: str, observations: list[Observation]) -> list[Observation]:
        """What is left for the rule's own gate."""
        return self.reviews.take((policy, rule), observations)

    def wanted_reviews(self) -> Mapping[RuleKey, Review]:
        return self.reviews.inputs()

    # What the parts are given

    def _no_copies(self, key: RuleKey) -> str:
        made = self._ctx.router.plan
        return (
            made.reviews.get(key, "no such rule serves") if made is not None else "the operator is starting"
        )

    def _rule(self, key: RuleKey) -> tuple[Rule, RuleStatus] | None:
        namespace, _, name = key[0].partition("/")
        entry = self._ctx.book.entries.get((namespace, name))
        if entry is None or entry.spec is None:
            return None
        found = next((rule for rule in entry.spec.rules if rule.name == key[1]), None)
        return (found, entry.rules.get(key[1]) or RuleStatus(name=key[1])) if found is not None else None

    def _took(
        self, policy: str, rule: str, name: str, candidate: float | None, stable: float | None, error: str
    ) -> None:
        namespace, _, policy_name = policy.partition("/")
        if self._ctx.book.take_query((namespace, policy_name), rule, name, candidate, stable, error, now()):
            self._news()

    def _subject(self, backend: Name, policy: str) -> calibrate.Subject:
        namespace, name = backend
        entry = self._ctx.book.entries.get((namespace, policy))
        found = self._ctx.cache.backends.get(backend)
        if entry is None or entry.spec is None:
            raise NoTarget(f"RoutePolicy {policy} is not in force in namespace {namespace}")
        digest = (
            found.status.identity.digest
            if isinstance(found, InferenceBackend) and found.status.identity is not None
            else ""
        )
        where = backend_target(self._ctx.router.plan, f"{namespace}/{policy}", name)
        return calibrate.Subject(where, entry.spec.model, entry.spec.slo, digest)

    def _kv_percent(self, namespace: str, backend: str) -> int:
        states = self._ctx.router.pod_states(namespace, backend)
        return max((state.stream.kv_percent for state in states), default=0)

    async def _config_map(self, namespace: str, name: str) -> dict[str, Any] | None:
        return await self._ctx.kube.find(CONFIG_MAP, namespace, name)

    async def _delete_record(self, namespace: str, name: str) -> None:
        try:
            await self._ctx.kube.delete(RELEASE_RECORD, namespace, name)
        except NotFound:
            return

    async def _write_capacity(self, name: Name, capacity: Capacity) -> None:
        answer = await self._ctx.kube.patch_status(BACKEND, *name, {"capacity": wire(capacity)})
        await self._ctx.answered("InferenceBackend", answer)
        self._ctx.dirty("backend", name)

    async def _annotate_backend(self, name: Name, annotations: dict[str, str]) -> None:
        answer = await self._ctx.kube.patch_metadata(BACKEND, *name, {"annotations": annotations})
        await self._ctx.answered("InferenceBackend", answer)

    async def _tell_backend(self, name: Name, reason: str, message: str, warn: bool) -> None:
        await self._tell("InferenceBackend", name, reason, message, warn)

    def _tell_soon(self, kind: str, name: Name, reason: str, message: str, warn: bool) -> None:
        task = asyncio.create_task(self._tell(kind, name, reason, message, warn))
        self._telling.add(task)
        task.add_done_callback(self._telling.discard)

    async def _tell(self, kind: str, name: Name, reason: str, message: str, warn: bool) -> None:
        cache = self._ctx.cache
        tables: dict[str, Mapping[Name, Any]] = {
            "InferenceBackend": cache.backends,
            "RoutePolicy": cache.policies,
            "ReleaseRecord": cache.records,
        }
        found = tables[kind].get(name)
        if found is not None:
            subject = about(kind, found.metadata)
            await self._ctx.recorder.tell(
                subject, reason, message, now(), kind="Warning" if warn else "Normal"
            )
