"""A backend's end, where things are wrong with it."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

from sluice_operator.control.backends import Backends
from sluice_operator.control.cache import Broken, Cache
from unit.operator.test_book import backend


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
