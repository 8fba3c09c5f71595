"""The Lease whose holder alone decides and writes.

Two operators overlap whenever a pod is deleted by force, moves, or is rolled: for those seconds both would
push to gateways and write statuses. So a process does nothing before it holds the Lease, writes nothing
once it has not been renewed for its duration (``held``, which ``Kube`` asks before every write), and ends
as soon as it sees another holder.

An API server that does not answer is no reason to end: nobody else can take the Lease then, an increase
can't be persisted and so is not pushed, and a rollback must not need an API server. Only a silence as long
as ``patience_s`` ends the process, since a human's edits may by then be served by a successor on the other
side of a partition.

Time is measured on this machine's monotonic clock alone: another holder's Lease has run out when it was
*seen* unchanged for its duration, so that clocks that differ do no harm.
"""

from __future__ import annotations

import asyncio
import logging
import time
from datetime import UTC, datetime

from .client import LEASE, Conflict, Kube, KubeError, NotFound, Object

log = logging.getLogger(__name__)
_CALL_S = 2.0
"""A renewal that takes longer is given up and sent anew: the next must come in time."""
_LOOK_S = 0.5
"""How often a process that waits looks whether the Lease is free."""


class LeaseLost(Exception):
    """Another process holds the Lease, or nothing was heard of it for too long."""


class Lease:
    """One process's hold on a Lease: ``acquire``, then ``keep`` for as long as it works, then ``release``."""

    def __init__(
        self,
        kube: Kube,
        namespace: str,
        name: str,
        identity: str,
        *,
        duration_s: int = 5,
        renew_s: float = 1.0,
        patience_s: float = 60.0,
    ) -> None:
        self._kube, self._where, self.identity = kube, (namespace, name), identity
        self._duration_s, self._renew_s, self._patience_s = duration_s, renew_s, patience_s
        self._object: Object = {}
        self._renewed = float("-inf")
        self._seen: tuple[object, ...] = ()
        self._seen_since = 0.0

    @property
    def held(self) -> bool:
        """Whether nobody else can hold it now."""
        return time.monotonic() - self._renewed < self._duration_s

    async def acquire(self) -> None:
        """Waits until the Lease is ours."""
        told = ""
        while True:
            try:
                async with asyncio.timeout(_CALL_S):
                    holder = await self._claim()
                if not holder:
                    log.info("holding the lease", extra={"identity": self.identity})
                    return
                why = f"held by {holder}"
            except (KubeError, TimeoutError) as error:
                why = f"{type(error).__name__}: {error}"
            if why != told:
                told = why
                log.info("waiting for the lease", extra={"reason": why})
            await asyncio.sleep(_LOOK_S)

    async def keep(self) -> None:
        """Renews until it is lost. Raises LeaseLost, and returns in no other way."""
        due = time.monotonic()
        while True:
            due = max(due + self._renew_s, time.monotonic())
            await asyncio.sleep(max(0.0, due - time.monotonic()))
            try:
                async with asyncio.timeout(_CALL_S):
                    await self._renew()
            except (KubeError, TimeoutError) as error:
                silent = time.monotonic() - self._renewed
                if silent > self._patience_s:
                    raise LeaseLost(f"not renewed for {silent:.0f} s: {error}") from None
                log.warning(
                    "the lease could not be renewed", extra={"error": str(error), "seconds": round(silent, 1)}
                )

    async def release(self) -> None:
        """Lets a successor in at once. Call it when nothing is decided or written any more."""
        if not self.held:
            return
        self._renewed = float("-inf")
        spec = {**self._object["spec"], "holderIdentity": "", "leaseDurationSeconds": 1}
        try:
            async with asyncio.timeout(_CALL_S):
                await self._kube.write_lease({**self._object, "spec": spec})
        except (KubeError, TimeoutError) as error:
            log.warning("the lease could not be released and will run out", extra={"error": str(error)})

    async def _claim(self) -> str:
        """Takes the Lease where it is free. Returns who holds it otherwise."""
        found = await self._kube.find(LEASE, *self._where)
        if found is not None and not self._free(found):
            return str(found["spec"]["holderIdentity"])
        try:
            await self._write(found)
        except Conflict:
            return "another process that was faster"
        return ""

    def _free(self, found: Object) -> bool:
        spec = found.get("spec") or {}
        holder = spec.get("holderIdentity") or ""
        if holder in ("", self.identity):
            return True
        seen, now = (holder, spec.get("renewTime"), found["metadata"].get("uid")), time.monotonic()
        if seen != self._seen:
            self._seen, self._seen_since = seen, now
        return now - self._seen_since > float(spec.get("leaseDurationSeconds") or self._duration_s)

    async def _renew(self) -> None:
        try:
            await self._write(self._object)
            return
        except (Conflict, NotFound):
            pass
        # Somebody has written it: a successor, or a person who added a label or deleted it.
        found = await self._kube.find(LEASE, *self._where)
        holder = ((found or {}).get("spec") or {}).get("holderIdentity") or ""
        if found is not None and holder != self.identity:
            raise LeaseLost(f"the lease is held by {holder or 'nobody'}")
        await self._write(found)

    async def _write(self, before: Object | None) -> None:
        began, stamp = time.monotonic(), datetime.now(UTC).isoformat(timespec="microseconds")[:-6] + "Z"
        old = (before or {}).get("spec") or {}
        ours = old.get("holderIdentity") == self.identity
        changes_hands = before is not None and not ours
        namespace, name = self._where
        self._object = await self._kube.write_lease(
            {
                "apiVersion": LEASE.api_version,
                "kind": LEASE.kind,
                "metadata": (before or {}).get("metadata") or {"name": name, "namespace": namespace},
                "spec": {
                    "holderIdentity": self.identity,
                    "leaseDurationSeconds": self._duration_s,
                    "acquireTime": old.get("acquireTime", stamp) if ours else stamp,
                    "renewTime": stamp,
                    "leaseTransitions": int(old.get("leaseTransitions") or 0) + changes_hands,
                },
            }
        )
        self._renewed = began
