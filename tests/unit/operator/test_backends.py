"""A backend's end, where things are wrong with it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from sluice_operator.api import InferenceBackend
from sluice_operator.control.backends import Backends
from sluice_operator.control.cache import Broken, Cache
from sluice_operator.plan.backend_status import PodState, Seen, status
from sluice_operator.plan.observed import PodView, StreamView
from unit.operator.test_book import DIGEST, backend

NOW = "2026-11-30T08:00:00Z"


async def test_an_event_tells_once_of_pods_of_another_version() -> None:
    events: list[tuple[str, str]] = []

    async def tell(about: object, reason: str, message: str, now: object, kind: str) -> None:
        events.append((reason, kind))

    backends = Backends(SimpleNamespace(recorder=SimpleNamespace(tell=tell)))  # type: ignore[arg-type]
    up = PodView("a-1", "ns", "a", ip="10.0.0.1", phase="Running", ready=True)
    known = InferenceBackend.model_validate(backend("a"))
    for unreadable in ("", "old", "old", ""):
        seen = Seen((PodState(up, StreamView(True, DIGEST, unreadable=unreadable)),), 1, acked=True)
        told = status(known, seen, NOW)
        await backends._news(known, told)
        known = known.model_copy(update={"status": told})
    assert [one for one in events if one[0] != "Routable"] == [("EvidenceUnreadable", "Warning")]


async def test_deletion_ends_also_of_what_is_not_understood() -> None:
    """A newer schema, an older operator: its finalizer must go all the same."""
    odd = backend("a")
    odd["spec"]["surprise"] = 1
    odd["metadata"] |= {"deletionTimestamp": "2026-11-30T08:00:00Z"}
    odd["metadata"] |= {"finalizers": ["x/y", "sluice.dev/drain"]}
    cache = Cache()
    cache.put("InferenceBackend", odd)
    assert isinstance(cache.backends[("ns", "a")], Broken)
    patched: list[Any] = []

    async def patch_metadata(_: object, namespace: str, name: str, metadata: Any) -> dict[str, Any]:
        patched.append(metadata["finalizers"])
        return odd

    async def answered(*_: object) -> None:
        pass

    ctx = SimpleNamespace(
        cache=cache, settings=SimpleNamespace(drain_seconds=10.0), router=SimpleNamespace(plan=None),
        kube=SimpleNamespace(patch_metadata=patch_metadata), answered=answered,
    )  # fmt: skip
    assert await Backends(ctx).reconcile(("ns", "a")) is None  # type: ignore[arg-type]
    assert patched == [["x/y"]]
