"""Events that a person can read with ``kubectl describe``: one object for each kind of news, counted.

Invariant: the same news about the same object within ten minutes is one Event with a count, whatever
repeats it.
"""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from dataclasses import dataclass
from datetime import datetime, timedelta
from typing import Any, Literal

from .client import Kube, KubeError, NotFound

_WINDOW = timedelta(minutes=10)
_KEPT = 2000


@dataclass
class _Told:
    name: str
    count: int
    last: datetime


class Recorder:
    """Writes Events; never raises, since news must not stop what it is about."""

    def __init__(self, kube: Kube) -> None:
        self._kube = kube
        self._told: OrderedDict[str, _Told] = OrderedDict()

    async def tell(
        self,
        about: dict[str, Any],
        reason: str,
        message: str,
        now: datetime,
        *,
        kind: Literal["Normal", "Warning"] = "Normal",
    ) -> bool:
        """``about`` needs apiVersion, kind, metadata. Returns whether it was written."""
        meta = about["metadata"]
        stamp = now.strftime("%Y-%m-%dT%H:%M:%SZ")
        key = hashlib.sha256(
            "\0".join((meta.get("uid", ""), meta["name"], reason, message)).encode()
        ).hexdigest()[:16]
        told = self._told.get(key)
        try:
            if told is not None and now - told.last < _WINDOW:
                told.count, told.last = told.count + 1, now
                try:
                    await self._kube.patch_event(
                        meta["namespace"], told.name, {"count": told.count, "lastTimestamp": stamp}
                    )
                    return True
                except NotFound:
                    pass
            name = f"{meta['name'][:200]}.{key}.{int(now.timestamp()):x}"
            await self._kube.create(_event(about, name, reason, message, stamp, kind))
        except KubeError:
            return False
        self._told[key] = _Told(name, 1, now)
        while len(self._told) > _KEPT:
            self._told.popitem(last=False)
        return True


def _event(
    about: dict[str, Any], name: str, reason: str, message: str, stamp: str, kind: str
) -> dict[str, Any]:
    meta = about["metadata"]
    return {
        "apiVersion": "v1",
        "kind": "Event",
        "metadata": {"name": name, "namespace": meta["namespace"]},
        "involvedObject": {
            "apiVersion": about["apiVersion"],
            "kind": about["kind"],
            "name": meta["name"],
            "namespace": meta["namespace"],
            "uid": meta.get("uid", ""),
            "resourceVersion": meta.get("resourceVersion", ""),
        },
        "reason": reason,
        "message": message[:1024],
        "type": kind,
        "count": 1,
        "firstTimestamp": stamp,
        "lastTimestamp": stamp,
        "source": {"component": "sluice-operator"},
        "reportingComponent": "sluice-operator",
        "reportingInstance": "sluice-operator",
    }
