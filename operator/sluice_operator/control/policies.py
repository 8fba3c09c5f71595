"""RoutePolicies on the wire: revisions that keep accepted specs, status, events, and increases let in once
persisted.

Invariant: a status that says generation G is accepted is written only after the ControllerRevision that
keeps G's spec.
"""

from __future__ import annotations

from ..api import RoutePolicy, RuleStatus
from ..api.rulestatus import Phase
from ..kube import Conflict, NotFound
from ..kube.client import CONTROLLER_REVISION, POLICY, SERVICE
from ..plan import backend as plan_backend
from ..plan import names
from ..plan.arms import STABLE
from ..plan.policy_status import PolicySeen, status
from ..plan.rollout import EVIDENCE_FIELDS
from ..plan.validate import service_problem
from .book import Entry
from .cache import Broken, Name
from .context import Context, about, monotonic, now, stamp
from .statuses import changed, tell_broken, wire

_CHECKPOINT_S = 2.0
_LOOK_S = 10.0
_KEPT_REVISIONS = 3


class Policies:
    """Reconciles policies."""

    def __init__(self, ctx: Context) -> None:
        self._ctx = ctx

    async def reconcile(self, name: Name) -> float | None:
        ctx = self._ctx
        policy, entry = ctx.cache.policies.get(name), ctx.book.entries.get(name)
        if policy is None or entry is None:
            return None
        await self._keep(policy, entry)
        if isinstance(policy, Broken):
            await tell_broken(ctx, POLICY, policy)
            await self._keep_rules(policy, entry)
            return None
        named = await self._look_for_services(entry)
        since = monotonic() - entry.written
        told_before = policy.status
        pending = dict(entry.pending)
        told = status(policy, self._seen(entry, pending), stamp())
        if changed(told_before, told):
            if not (entry.urgent or pending) and since < _CHECKPOINT_S and not _shown(told_before, told):
                return _CHECKPOINT_S - since
            entry.urgent = False
            try:
                answer = await ctx.kube.patch_status(POLICY, *name, wire(told))
            except NotFound:
                return None
            except BaseException:
                entry.urgent = True
                raise
            entry.written = monotonic()
            await ctx.answered("RoutePolicy", answer)
        else:
            entry.urgent = False
        if pending:
            await self._on_record(policy, entry, pending)
        if pending and ctx.book.apply_pending(entry, pending, now()):
            await ctx.router.flush()
        await self._news(policy, entry)
        return 0.01 if entry.pending or entry.urgent else _LOOK_S if named else None

    async def _on_record(self, policy: RoutePolicy, entry: Entry, pending: dict[str, RuleStatus]) -> None:
        """No candidate gets traffic for an attempt that nobody would find in the ledger."""
        releases = self._ctx.book.releases
        if releases is None or entry.spec is None:
            return
        for rule in entry.spec.rules:
            if rule.name in pending:
                subject = releases.subject(policy.metadata, entry.spec, rule)
                await releases.ledger.ensure(subject, pending[rule.name])

    async def _keep_rules(self, policy: Broken, entry: Entry) -> None:
        """What was taken from a candidate stays taken over a restart, also where the spec is not understood.
        (Increases wait until it is.)"""
        if not entry.urgent:
            return
        entry.urgent = False
        name, rules = entry.name, [wire(rule) for rule in entry.rules.values()]
        if rules == (policy.status.get("rules") or []):
            return
        try:
            answer = await self._ctx.kube.patch_status(POLICY, *name, {"rules": rules})
            await self._ctx.answered("RoutePolicy", answer)
        except BaseException:
            entry.urgent = True
            raise

    async def _look_for_services(self, entry: Entry) -> bool:
        """Services are not watched: those that a policy names are looked for now and then. Returns whether
        there are any."""
        rules = entry.spec.rules if entry.spec is not None else []
        named = [(i, r.target.service) for i, r in enumerate(rules) if r.target.service is not None]
        generation, when = entry.looked
        if not named:
            entry.services = ()
        elif generation != entry.accepted or monotonic() - when > _LOOK_S * 0.9:
            entry.looked = (entry.accepted, monotonic())
            found = [
                service_problem(i, s, await self._ctx.kube.find(SERVICE, entry.name[0], s.name))
                for i, s in named
            ]
            entry.services = tuple(p for p in found if p is not None)
        return bool(named)

    async def _keep(self, policy: RoutePolicy | Broken, entry: Entry) -> None:
        """Keeps the accepted spec where a restart finds it."""
        if entry.whole is None or entry.accepted <= entry.kept:
            return
        meta = policy.metadata
        revision = {
            "apiVersion": "apps/v1",
            "kind": "ControllerRevision",
            "metadata": {
                "name": names.revision(meta.name, entry.accepted),
                "namespace": meta.namespace,
                "labels": {
                    names.POLICY_LABEL: names.label(meta.name),
                    "app.kubernetes.io/managed-by": "sluice",
                },
                "ownerReferences": [plan_backend.owner_reference("RoutePolicy", meta.name, meta.uid)],
            },
            "revision": entry.accepted,
            "data": {"spec": wire(entry.whole)},
        }
        generation = entry.accepted
        try:
            await self._ctx.kube.create(revision)
        except Conflict:
            found = await self._ctx.kube.find(
                CONTROLLER_REVISION, meta.namespace, names.revision(meta.name, generation)
            )
            owners = (found or {"metadata": {}})["metadata"].get("ownerReferences") or []
            if not any(o["uid"] == meta.uid for o in owners):
                await self._ctx.kube.delete(
                    CONTROLLER_REVISION, meta.namespace, names.revision(meta.name, generation)
                )
                raise
        entry.kept = generation
        old = await self._ctx.kube.list_all(
            CONTROLLER_REVISION, meta.namespace, selector=f"{names.POLICY_LABEL}={names.label(meta.name)}"
        )
        for gone in sorted(old, key=lambda r: -int(r["revision"]))[_KEPT_REVISIONS:]:
            await self._ctx.kube.delete(CONTROLLER_REVISION, meta.namespace, gone["metadata"]["name"])

    def _seen(self, entry: Entry, pending: dict[str, RuleStatus]) -> PolicySeen:
        router = self._ctx.router
        rules = {**entry.rules, **pending}
        order = [r.name for r in entry.spec.rules] if entry.spec else []
        waiting, unserved = {}, {}
        if router.plan is not None:
            waiting = {
                f"{rule}/{role}": why
                for (policy, rule, role), why in router.plan.waiting.items()
                if policy == entry.key
            }
            for name in order:
                arm = router.plan.arms.get((entry.key, name, STABLE))
                if arm is not None and "/svc:" not in arm.cluster and not router.reached(arm.cluster):
                    unserved[name] = arm.cluster
        return PolicySeen(
            accepted=entry.accepted,
            problems=entry.problems,
            withdrawn=entry.withdrawn,
            rules=tuple(rules[n] for n in order if n in rules),
            waiting=waiting,
            unserved=unserved,
            services=entry.services,
            access=self._ctx.access_problems.get(entry.name, ()),
            quarantined=self._ctx.ads.quarantined.get(f"policy/{entry.key}", ""),
            gateway=self._ctx.ads.num_gateways > 0 and entry.in_force == entry.accepted,
        )

    async def _news(self, policy: RoutePolicy, entry: Entry) -> None:
        news, entry.news = entry.news, []
        for rule, line in news:
            bad = line.phase is Phase.ROLLED_BACK or line.reason.endswith("RolledBack")
            step = f" step {line.step}" if line.step is not None else ""
            await self._ctx.recorder.tell(
                about("RoutePolicy", policy.metadata),
                line.reason,
                f"rule {rule}: {line.phase}{step}: {line.message}",
                now(),
                kind="Warning" if bad else "Normal",
            )
        # Once, and not at each checkpoint of a rollout that goes on under them.
        access = self._ctx.access_problems.get(entry.name, ())
        before, entry.told = entry.told, entry.problems or entry.services or access
        if entry.told and entry.told != before:
            await self._ctx.recorder.tell(
                about("RoutePolicy", policy.metadata),
                entry.told[0].reason,
                entry.told[0].text(),
                now(),
                kind="Warning",
            )


def _shown(before: object, after: object) -> bool:
    """Whether more than counters of evidence differs."""

    def rest(status: object) -> object:
        told = status.model_dump(mode="json")  # type: ignore[attr-defined]
        for rule in told["rules"]:
            for field in EVIDENCE_FIELDS:
                rule.pop(field, None)
        return told

    return rest(before) != rest(after)
