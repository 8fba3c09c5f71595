"""One InferenceBackend: its objects, its status, and its end.

Invariant: only objects that are ours are written; one of another owner under our name is told, not taken.
A deletion ends within ``drain_seconds`` whatever is missing, and at once when the namespace ends too.
"""

from __future__ import annotations

import hashlib
import json
from datetime import datetime
from typing import Any

from ..api import FINALIZER, InferenceBackend
from ..api.backend import InferenceBackendStatus
from ..kube import Conflict, Kube, KubeError, NotFound
from ..kube.client import BACKEND, DEPLOYMENT, NAMESPACE, kind_of
from ..plan import backend as plan
from ..plan import names
from ..plan.backend_status import Seen, status
from ..plan.conditions import Problem, find
from ..plan.validate_backend import backend_problems
from .cache import Broken, DeploymentView, Name
from .context import Context, about, now, stamp
from .secrets import ensure_copy
from .statuses import changed, tell_broken, wire

_REFUSALS = (400, 403, 413, 422)
"""What trying again does not change."""


class Backends:
    """Reconciles backends; remembers what was applied, so that an unchanged one costs no request."""

    def __init__(self, ctx: Context) -> None:
        self._ctx = ctx
        self._applied: dict[Name, tuple[str, str, int]] = {}

    def forget(self) -> None:
        """Applies everything again: drift in what is not watched ends here."""
        self._applied.clear()

    async def reconcile(self, name: Name) -> float | None:
        backend = self._ctx.cache.backends.get(name)
        if backend is None:
            self._applied.pop(name, None)
            return None
        if backend.metadata.deletion_timestamp:
            return await self._drain(backend)
        if isinstance(backend, Broken):
            await tell_broken(self._ctx, BACKEND, backend)
            return None
        if FINALIZER not in backend.metadata.finalizers:
            await self._finalizers(backend, (*backend.metadata.finalizers, FINALIZER))
            return 0.01
        problem = await self._apply(backend) if not backend_problems(backend) else None
        await self._tell(backend, problem)
        if problem is not None:
            return 5.0 if problem.reason == "ObjectRefused" else 1.0
        # Only time shows that a pod waits too long, and nothing tells.
        creating = any(p.creating for p in self._ctx.cache.backend_pods(*name))
        return 5.0 if creating else None

    async def _finalizers(self, backend: InferenceBackend | Broken, finalizers: tuple[str, ...]) -> None:
        meta = backend.metadata
        told = await self._ctx.kube.patch_metadata(
            BACKEND,
            meta.namespace,
            meta.name,
            {"finalizers": list(finalizers), "resourceVersion": meta.resource_version, "uid": meta.uid},
        )
        await self._ctx.answered("InferenceBackend", told)

    async def _drain(self, backend: InferenceBackend | Broken) -> float | None:
        meta, ctx = backend.metadata, self._ctx
        if FINALIZER not in meta.finalizers:
            return None
        asked = datetime.fromisoformat(str(meta.deletion_timestamp))
        left = ctx.settings.drain_seconds - (now() - asked).total_seconds()
        if (
            left > 0
            and self._named(names.cluster(meta.namespace, meta.name))
            and not await self._ending(meta.namespace)
        ):
            await ctx.recorder.tell(
                about("InferenceBackend", meta),
                "Draining",
                "routes still name this backend; it ends when they have left it, or soon anyway",
                now(),
            )
            return min(left + 0.05, 1.0)
        try:
            await self._finalizers(backend, tuple(f for f in meta.finalizers if f != FINALIZER))
        except NotFound:
            pass
        except Conflict:
            fresh = await ctx.kube.find(BACKEND, meta.namespace, meta.name)
            if fresh is not None and fresh["metadata"].get("uid") == meta.uid:
                await ctx.answered("InferenceBackend", fresh)
                return 0.05
        return None

    def _named(self, cluster: str) -> bool:
        made = self._ctx.router.plan
        return made is not None and any(cluster == arm.cluster for arm in made.arms.values())

    async def _ending(self, namespace: str) -> bool:
        try:
            found = await self._ctx.kube.find(NAMESPACE, None, namespace)
        except KubeError:
            return False  # not known is no reason to stay longer than the bound
        return found is None or bool(found["metadata"].get("deletionTimestamp"))

    async def _apply(self, backend: InferenceBackend) -> Problem | None:
        """Applies all objects where something differs from what was applied last."""
        ctx, name = self._ctx, (backend.metadata.namespace, backend.metadata.name)
        ours = self._deployment(backend)
        running = plan.Running(ours.image, ours.image_pull_policy) if ours else None
        manifests = plan.children(backend, ctx.settings.defaults, running)
        digest = hashlib.sha256(json.dumps(manifests, sort_keys=True).encode()).hexdigest()
        generation = ours.generation if ours else 0
        if self._applied.get(name) == (backend.metadata.uid, digest, generation) and ours is not None:
            return None
        await ensure_copy(ctx, name[0])
        for manifest in manifests:
            foreign = await self._foreign(ctx.kube, manifest, backend.metadata.uid)
            if foreign is not None:
                return foreign
        for manifest in manifests:
            try:
                await ctx.kube.apply(manifest, dry_run=True)
            except KubeError as error:
                if error.status not in _REFUSALS:
                    raise
                # Asked for all before any is applied, so that nothing is half applied.
                kind, child = manifest["kind"], manifest["metadata"]["name"]
                return Problem("ObjectRefused", f"the API server refuses {kind} {child}: {error}", "spec")
        for manifest in manifests:
            told = await ctx.kube.apply(manifest)
            if kind_of(manifest) == DEPLOYMENT:
                generation = told["metadata"].get("generation", 0)
                await ctx.answered("Deployment", told)
        self._applied[name] = (backend.metadata.uid, digest, generation)
        return None

    def _deployment(self, backend: InferenceBackend) -> DeploymentView | None:
        """The backend's own Deployment, not one of a predecessor or of somebody else."""
        meta = backend.metadata
        found = self._ctx.cache.deployments.get((meta.namespace, names.child(meta.name)))
        return found if found is not None and found.owner_uid == meta.uid else None

    @staticmethod
    async def _foreign(kube: Kube, manifest: dict[str, Any], uid: str) -> Problem | None:
        meta = manifest["metadata"]
        found = await kube.find(kind_of(manifest), meta["namespace"], meta["name"])
        if found is None:
            return None
        owners = found["metadata"].get("ownerReferences") or []
        if any(o["uid"] == uid for o in owners):
            return None
        if any(
            o.get("kind") == "InferenceBackend"
            and o.get("name") == manifest["metadata"]["ownerReferences"][0]["name"]
            for o in owners
        ):
            return Problem(
                "PredecessorEnding",
                f"{manifest['kind']} {meta['name']} of a deleted backend of this name is still "
                "being collected",
            )
        return Problem(
            "NameConflict",
            f"{manifest['kind']} {meta['name']} exists and belongs to somebody else; delete it, or "
            "name the backend otherwise",
            "metadata.name",
        )

    async def _tell(self, backend: InferenceBackend, problem: Problem | None) -> None:
        ctx, meta = self._ctx, backend.metadata
        cluster = names.cluster(meta.namespace, meta.name)
        reached = ctx.router.reached(cluster)
        ours = self._deployment(backend)
        releases = ctx.book.releases
        rate = releases.rate((meta.namespace, meta.name), now()) if releases is not None else 0.0
        seen = Seen(
            pods=ctx.router.pod_states(meta.namespace, meta.name),
            # A gateway that has just come and has nothing yet takes nothing away from the others.
            num_endpoints=reached,
            gateway=ctx.ads.num_gateways > 0,
            acked=reached > 0 or ctx.router.acked(cluster),
            image=ours.image if ours else "",
            failure=ours.failure if ours else "",
            problem=problem,
            now=stamp(),
            request_rate=rate,
        )
        told = status(backend, seen, stamp())
        if not changed(backend.status, told):
            return
        answer = await ctx.kube.patch_status(BACKEND, meta.namespace, meta.name, wire(told))
        await ctx.answered("InferenceBackend", answer)
        ctx.router.dirty.set()
        await self._news(backend, told)

    async def _news(self, backend: InferenceBackend, told: InferenceBackendStatus) -> None:
        for kind in ("Ready", "Stalled", "EvidenceUnreadable", "ConfigurationRefused"):
            before, after = find(backend.status.conditions, kind), find(told.conditions, kind)
            if after is None or (
                before is not None and (before.status, before.reason) == (after.status, after.reason)
            ):
                continue
            if after.status == "True" or (before is not None and before.status == "True" and kind == "Ready"):
                bad = kind != "Ready" or after.status == "False"
                await self._ctx.recorder.tell(
                    about("InferenceBackend", backend.metadata),
                    after.reason,
                    after.message,
                    now(),
                    kind="Warning" if bad else "Normal",
                )
