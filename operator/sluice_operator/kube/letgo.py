"""What remains to be done when the operator is uninstalled: nobody is left to take its finalizer away.

Without this a backend's deletion, and that of its namespace, would wait for ever. Backends and their pods
stay as they are; an operator that is installed later takes them up again.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable

from ..api.common import FINALIZER
from .client import BACKEND, Conflict, Kube, NotFound, Object

log = logging.getLogger(__name__)
_TRIES = 5


async def let_go(kube: Kube, namespaces: Iterable[str]) -> int:
    """Takes the finalizer from all backends of ``namespaces`` (empty: all). Returns from how many."""
    freed = 0
    for namespace in tuple(namespaces) or (None,):
        for _ in range(_TRIES):
            try:
                held = [b for b in await kube.list_all(BACKEND, namespace) if _finalizers(b)]
            except NotFound:
                break  # the kind itself is gone, and all backends with it
            if not held:
                break
            for backend in held:
                freed += await _free(kube, backend)
    return freed


def _finalizers(backend: Object) -> list[str]:
    """All its finalizers where ours is among them."""
    found: list[str] = backend["metadata"].get("finalizers") or []
    return found if FINALIZER in found else []


async def _free(kube: Kube, backend: Object) -> int:
    meta = backend["metadata"]
    rest = [f for f in _finalizers(backend) if f != FINALIZER]
    told = {"finalizers": rest, "resourceVersion": meta["resourceVersion"], "uid": meta["uid"]}
    try:
        await kube.patch_metadata(BACKEND, meta["namespace"], meta["name"], told)
    except (Conflict, NotFound):
        return 0  # seen anew in the next round
    log.info("let go of a backend", extra={"backend": f"{meta['namespace']}/{meta['name']}"})
    return 1
