"""The running operator: start in order, then loops that each do one thing.

Start: lists → what pods tell → decide on what the statuses say → push → in force → only then judge
readiness. Traffic goes on meanwhile, since the gateway keeps what it has. Invariant: if a loop ends, the
process ends.
"""

from __future__ import annotations

import asyncio
import logging
from collections import defaultdict
from collections.abc import Coroutine, Iterable, Mapping
from typing import Any

from ..api import InferenceBackend
from ..evidence import Collector, Observed, from_access
from ..feedback import FeedbackServer
from ..gates import Observation
from ..kube import Kube, KubeError
from ..kube.client import (
    BACKEND,
    CONTROLLER_REVISION,
    DEPLOYMENT,
    EVAL_SUITE,
    POD,
    POLICY,
    RELEASE_RECORD,
    SCOPE,
    TENANT,
    Kind,
)
from ..kube.events import Recorder
from ..plan import access, names
from ..plan.backend_status import live
from ..plan.observed import PodView
from ..xds.server import AdsServer
from ..xds.state import AccessRecord
from ..xds.state import Tenant as GatewayTenant
from . import metrics
from .backends import Backends
from .book import Book
from .cache import Cache, Name
from .context import Context, Credentials, Settings, monotonic, now
from .others import Others
from .policies import Policies
from .queue import Key, Queue
from .releasing import Releasing
from .router import Router
from .secrets import establish
from .tenancy import Tenancy
from .verifiers import Verifying

log = logging.getLogger(__name__)
_TICK_S = 1.0
LISTED: tuple[tuple[Kind, str], ...] = (
    (TENANT, ""),
    (SCOPE, ""),
    (EVAL_SUITE, ""),
    (RELEASE_RECORD, ""),
    (BACKEND, ""),
    (DEPLOYMENT, names.BACKEND_LABEL),
    (POD, names.BACKEND_LABEL),
    (POLICY, ""),
)
_QUEUE_KINDS = {
    "InferenceBackend": "backend",
    "RoutePolicy": "policy",
    "CacheScope": "scope",
    "Tenant": "tenant",
    "EvalSuite": "suite",
}


class App:
    """Everything wired together. ``event`` is what watches call, ``run`` what the process does."""

    def __init__(self, settings: Settings, kube: Kube, ads_options: Mapping[str, Any]) -> None:
        cache = Cache()
        self._tenancy = Tenancy(cache, lambda: self.ctx.secrets, monotonic)
        book = Book(cache)
        self._verifying = Verifying(
            book.accepted,
            lambda: self.ctx.secrets,
            lambda: self.ctx.config_maps,
            lambda: self.ctx.offered,
        )
        ads = AdsServer(on_record=self._accessed, on_quarantine=self._quarantined, **ads_options)
        collector = Collector(
            lambda: self.ctx.credentials.admin_token,
            observed=self._observed,
            changed=self._pod_told,
            gap=self._gap,
            unread=self._unread,
            price=self._price,
        )
        router = Router(
            cache,
            collector,
            ads,
            accepted=book.accepted,
            tenants=self._resolve_tenants,
            limits=lambda: self._tenancy.known().limits,
            access=self._resolve_access,
            revoked=self._tenancy.revoked,
            credential=lambda: self.ctx.credentials.gateway_credential,
            in_force=self._in_force,
            feedback=(settings.feedback_host, settings.feedback_address[1])
            if settings.feedback_host
            else None,
            reviews=lambda: self._releases.wanted_reviews(),
        )
        book.router, book.prometheus = router, bool(settings.prometheus_url)
        queue = Queue(self._work, failed=lambda key: metrics.RECONCILE_ERRORS.labels(key[0]).inc())
        self.ctx = Context(
            settings,
            kube,
            Recorder(kube),
            cache,
            book,
            collector,
            ads,
            router,
            queue,
            credentials=Credentials(),
            react=self._react,
        )
        self._backends, self._policies, self._others = (
            Backends(self.ctx),
            Policies(self.ctx),
            Others(self.ctx),
        )
        self._releases = Releasing(self.ctx, self._decide_soon)
        book.releases = self._releases.releases
        self._feedback = FeedbackServer(
            settings.feedback_address[1],
            lambda: self.ctx.credentials.gateway_credential,
            self._fed_back,
            lambda: now().timestamp(),
            host=settings.feedback_address[0],
        )
        self._evidence: list[Observed] = []
        self._arrived = asyncio.Event()
        self._started = False
        self._begun = asyncio.Event()
        self._last_tick = monotonic()

    @property
    def ready(self) -> bool:
        return self._started

    @property
    def healthy(self) -> bool:
        """The decision loop has come round lately."""
        return not self._started or monotonic() - self._last_tick < 15 * _TICK_S

    async def run(self) -> None:
        """Runs until cancelled, or until something that should not end ends."""
        port = await self.ctx.ads.start()
        if self.ctx.settings.feedback_host:
            await self._feedback.start()
        log.info("listening for gateways", extra={"port": port})
        try:
            async with asyncio.TaskGroup() as group:
                group.create_task(self._start())
                for loop in (
                    self._ticks(),
                    self._decisions(),
                    self.ctx.queue.run(),
                    self.ctx.router.run(),
                    self._resyncs(),
                    self._releases.run(),
                ):
                    group.create_task(self._after_start(loop))
        finally:
            await self._feedback.stop()
            await self._releases.close()
            await self.ctx.collector.close()
            await self.ctx.ads.stop()

    async def _after_start(self, loop: Coroutine[Any, Any, None]) -> None:
        try:
            await self._begun.wait()
        except asyncio.CancelledError:
            loop.close()
            raise
        await loop
        raise RuntimeError("a loop that never ends has ended")

    # Start

    async def _start(self) -> None:
        ctx = self.ctx
        ctx.credentials = await _patiently(
            lambda: establish(ctx.kube, ctx.settings.namespace, ctx.settings.defaults.runtime_secret)
        )
        await _patiently(self._list)
        self._releases.load()
        ctx.book.restore(
            await _patiently(lambda: self._each_namespace(CONTROLLER_REVISION, names.POLICY_LABEL))
        )
        for name in sorted(
            ctx.cache.policies, key=lambda n: ctx.cache.policies[n].metadata.creation_timestamp
        ):
            ctx.book.consider(name)
        await _patiently(self._others.load_secrets)
        ctx.collector.sync(ctx.cache.pods.values())
        await self._until_pods_told()
        for entry in ctx.book.entries.values():
            ctx.book.decide(entry, now())
        ctx.router.open = True
        await ctx.router.flush()
        self._started = True
        self._begun.set()
        for name in ctx.cache.backends:
            ctx.dirty("backend", name)
        self._all_dirty()
        ctx.dirty("secrets", ("", ""))  # from now on again and again, where ConfigMaps are among them
        log.info(
            "started",
            extra={
                "policies": len(ctx.cache.policies),
                "backends": len(ctx.cache.backends),
                "pods": len(ctx.cache.pods),
            },
        )

    async def _until_pods_told(self) -> None:
        """Until every ready pod has said what it is and holds what it shall, or for a bounded time."""
        deadline = monotonic() + self.ctx.settings.start_seconds
        while True:
            await self.ctx.router.flush()
            if self._pods_complete() or monotonic() > deadline:
                return
            await asyncio.sleep(0.05)

    def _pods_complete(self) -> bool:
        made, router = self.ctx.router.plan, self.ctx.router
        for namespace, name in self.ctx.cache.backends:
            wanted = made.configs.get(names.cluster(namespace, name), {}) if made else {}
            for state in live(router.pod_states(namespace, name)):
                if state.pod.ready and not state.stream.settled(wanted.keys()):
                    return False
        return True

    async def _each_namespace(self, kind: Kind, selector: str) -> list[dict[str, Any]]:
        watched: Iterable[str | None] = self.ctx.settings.namespaces or (None,)
        return [
            obj
            for namespace in watched
            for obj in await self.ctx.kube.list_all(kind, namespace, selector=selector)
        ]

    async def _list(self) -> None:
        for kind, selector in LISTED:
            objects = await self._each_namespace(kind, selector)
            news = self.ctx.cache.sync(kind.kind, objects, self.ctx.settings.namespaces or None)
            for name in news if self._started else ():
                await self._react(kind.kind, name)

    # Watches

    async def event(self, kind: str, change: str | None, obj: Mapping[str, Any]) -> None:
        """One event of a watch."""
        meta = obj["metadata"]
        name = (meta["namespace"], meta["name"])
        if kind == "Secret":
            if self._started and self._others.seeks(name):
                self.ctx.dirty("secrets", ("", ""))
            return
        pod = self.ctx.cache.pods.get(name) if kind == "Pod" else None
        if change == "DELETED":
            news = self.ctx.cache.drop(kind, name, int(meta.get("resourceVersion") or 0))
        else:
            news = self.ctx.cache.put(kind, obj)
        if news and self._started:
            await self._react(kind, name, pod)

    async def _react(self, kind: str, name: Name, gone: PodView | None = None) -> None:
        ctx = self.ctx
        if kind == "Pod":
            pod = ctx.cache.pods.get(name) or gone
            ctx.collector.sync(ctx.cache.pods.values())
            ctx.router.dirty.set()
            if pod is not None:
                ctx.dirty("backend", (pod.namespace, pod.backend))
            return
        if kind == "Deployment":
            for backend in [
                b for b in ctx.cache.backends if b[0] == name[0] and names.child(b[1]) == name[1]
            ]:
                ctx.dirty("backend", backend)
            return
        if kind == "ReleaseRecord":
            self._releases.record_changed(name)
            return
        if kind == "InferenceBackend":
            self._releases.backend_changed(name)
        if kind == "RoutePolicy":
            await self._policy_edited(name)
            self._releases.policy_changed(name)
        elif kind in ("CacheScope", "Tenant"):
            # It may take something away; and its status must not follow from a plan that does not know it.
            await ctx.router.flush()
        else:
            ctx.router.dirty.set()
        if kind == "Tenant":
            ctx.dirty("secrets", ("", ""))  # and then its status: what it names may be a new Secret
        else:
            ctx.dirty(_QUEUE_KINDS[kind], name)
        ctx.dirty("surroundings", ("", ""))

    async def _policy_edited(self, name: Name) -> None:
        """A human's edit is in force before anything else is done with it."""
        ctx = self.ctx
        ctx.book.consider(name)
        entry = ctx.book.entries.get(name)
        if entry is not None:
            ctx.book.decide(entry, now())
        # Or else routes would name verifiers that pods can't reach yet, and answers would be withheld.
        await self._others.read_for(name)
        await ctx.router.flush()
        self._settle()

    # Work

    async def _work(self, key: Key) -> float | None:
        kind, name = key[0], (key[1], key[2])
        if kind == "backend":
            return await self._backends.reconcile(name)
        if kind == "policy":
            return await self._policies.reconcile(name)
        if kind == "scope":
            await self._others.scope(name)
        elif kind == "tenant":
            await self._others.tenant(name)
        elif kind == "suite":
            return await self._others.suite(name)
        elif kind == "secrets":
            return await self._others.load_secrets()
        elif kind == "surroundings":
            await self._reconsider()
        return None

    async def _reconsider(self) -> None:
        """Backends, scopes, tenants or other policies have changed: so may what a policy gets wrong."""
        ctx, changed = self.ctx, False
        for name in [*ctx.cache.policies, *(n for n in ctx.book.entries if n not in ctx.cache.policies)]:
            before = ctx.book.entries[name].problems if name in ctx.book.entries else None
            in_force = ctx.book.consider(name)
            entry = ctx.book.entries.get(name)
            if in_force and entry is not None:
                ctx.book.decide(entry, now())
            changed |= in_force
            if entry is not None and (in_force or entry.problems != before):
                ctx.dirty("policy", name)
        if changed:
            await ctx.router.flush()
        self._settle()

    def _all_dirty(self) -> None:
        for kind, table in (
            ("policy", self.ctx.cache.policies),
            ("scope", self.ctx.cache.scopes),
            ("tenant", self.ctx.cache.tenants),
            ("suite", self.ctx.cache.suites),
            ("backend", self.ctx.cache.backends),
        ):
            for name in table:
                self.ctx.dirty(kind, name)

    async def _resyncs(self) -> None:
        """Compares the cache with the truth now and then: watches lose deletions, and can fall silent."""
        while True:
            jitter = 0.9 + 0.2 * (hash(self) % 997 / 997)
            await asyncio.sleep(self.ctx.settings.resync_seconds * jitter)
            await _patiently(self._list)
            self._backends.forget()
            self.ctx.collector.sync(self.ctx.cache.pods.values())
            self.ctx.router.dirty.set()
            self.ctx.dirty("secrets", ("", ""))
            self._all_dirty()

    # News from pods and gateways

    def _pod_told(self, pod: PodView) -> None:
        self.ctx.router.dirty.set()
        if self._started:
            self.ctx.dirty("backend", (pod.namespace, pod.backend))

    def _gap(self, pod: PodView, num_lost: int) -> None:
        metrics.GAPS.inc(num_lost)
        log.warning("evidence was lost", extra={"pod": pod.name, "records": num_lost})

    def _unread(self, pod: PodView) -> None:
        metrics.UNREAD.labels(pod.namespace, pod.backend).inc()

    def _observed(self, told: list[Observed]) -> None:
        metrics.EVIDENCE.labels("pod").inc(len(told))
        self._evidence.extend(told)
        self._arrived.set()

    def _fed_back(self, told: list[Observed]) -> None:
        metrics.EVIDENCE.labels("feedback").inc(len(told))
        self._evidence.extend(told)
        self._arrived.set()

    def _price(self, pod: PodView) -> float | None:
        backend = self.ctx.cache.backends.get((pod.namespace, pod.backend))
        cost = backend.spec.cost if isinstance(backend, InferenceBackend) else None
        return float(cost.per_replica_hour) if cost is not None else None

    def _decide_soon(self) -> None:
        """Something else than requests has news: a suite, a query."""
        self._arrived.set()

    def _accessed(self, record: AccessRecord) -> None:
        told = from_access(record, now().timestamp())
        if told is not None:
            metrics.EVIDENCE.labels("gateway").inc()
            self._evidence.append(told)
            self._arrived.set()

    def _quarantined(self, name: str, message: str) -> None:
        kind, _, rest = name.partition("/")
        metrics.NACKS.labels(kind).inc()
        log.warning("the gateway can't take an object", extra={"object": name, "reason": message})
        namespace, _, policy = rest.partition("/")
        if kind == "policy" and self._started:
            self.ctx.dirty("policy", (namespace, policy))
        if kind == "tenant" and self._started:
            for tenant in [t for t in self.ctx.cache.tenants if t[1] == rest]:
                self.ctx.dirty("tenant", tenant)

    def _in_force(self) -> None:
        """A push has arrived everywhere (or not, for seconds): statuses may say so, rollouts may go on."""
        if self.ctx.router.settled:
            self.ctx.book.warm = True
        self._settle()
        if self._started:
            self._arrived.set()
            self._all_dirty()

    def _settle(self) -> None:
        """What every gateway has is in force; so is an edit that changes nothing there, as an approval."""
        if self.ctx.router.settled:
            for entry in self.ctx.book.entries.values():
                entry.in_force = entry.accepted

    def _resolve_tenants(self) -> tuple[GatewayTenant, ...]:
        known = self._tenancy.known()
        self.ctx.tenant_problems = known.problems
        return known.told

    def _resolve_access(self) -> access.Known:
        known = self._verifying.known()
        self.ctx.access_problems = known.problems
        return known

    # Decisions

    async def _decisions(self) -> None:
        """Evidence is folded in and judged as it arrives."""
        while True:
            await self._arrived.wait()
            self._arrived.clear()
            batch, self._evidence = self._evidence, []
            began = monotonic()
            grouped: dict[tuple[str, str], list[Observation]] = defaultdict(list)
            for told in batch:
                grouped[(told.policy, told.rule)].append(told.observation)
            changed = False
            for (policy, rule), observations in grouped.items():
                changed |= self._judge(policy, rule, observations)
            if not batch:
                changed |= self._decide_running()
            if changed:
                await self.ctx.router.flush()
                metrics.EVIDENCE_LATENCY.observe(monotonic() - began)

    def _judge(self, policy: str, rule_name: str, observations: list[Observation]) -> bool:
        namespace, _, name = policy.partition("/")
        entry = self.ctx.book.entries.get((namespace, name))
        rule = (
            next((r for r in entry.spec.rules if r.name == rule_name), None) if entry and entry.spec else None
        )
        if entry is None or rule is None:
            return False
        observations = self._releases.reviews_take(policy, rule_name, observations)
        self.ctx.book.observe(entry, rule, observations, now())
        if rule.rollout is None:
            return False
        changed = self.ctx.book.decide(entry, now(), only=rule_name)
        self.ctx.dirty("policy", entry.name, 0.0 if entry.urgent or entry.pending else 1.0)
        return changed

    def _decide_running(self) -> bool:
        changed = False
        for entry in self.ctx.book.entries.values():
            if self.ctx.book.running(entry):
                changed |= self.ctx.book.decide(entry, now())
                self.ctx.dirty("policy", entry.name)
        return changed

    async def _ticks(self) -> None:
        """Once a second for what only time brings on."""
        due = monotonic() + _TICK_S
        while True:
            await asyncio.sleep(max(0.0, due - monotonic()))
            metrics.LOOP_LATENESS.observe(max(0.0, monotonic() - due))
            metrics.QUEUE_DEPTH.set(self.ctx.queue.depth)
            self._last_tick = monotonic()
            due = max(due + _TICK_S, self._last_tick)
            self.ctx.router.look_at_gateways()
            if self._decide_running():
                await self.ctx.router.flush()


async def _patiently(work: Any) -> Any:
    """Tries until it succeeds: without the API server there is nothing to do but wait for it."""
    delay = 0.2
    while True:
        try:
            return await work()
        except KubeError as error:
            log.warning("the API server does not answer as it should", extra={"error": str(error)})
            await asyncio.sleep(delay)
            delay = min(delay * 2, 5.0)
