"""What was seen of pods, trimmed to what decisions need.

Invariant: nothing of a pod's environment, arguments or annotations is kept, so the cache holds no secret
and stays small.
"""

from __future__ import annotations

import json
from collections.abc import Collection, Mapping
from dataclasses import dataclass, field
from typing import Any

from .names import BACKEND_LABEL

API_PORT = 8000
ADMIN_PORT = 9000


@dataclass(frozen=True)
class PodView:
    """One pod as the API server tells it."""

    name: str
    namespace: str
    backend: str
    """Name of the backend it belongs to."""
    uid: str = ""
    ip: str = ""
    node: str = ""
    phase: str = "Pending"
    ready: bool = False
    terminating: bool = False
    created: str = ""
    api_port: int = API_PORT
    admin_port: int = ADMIN_PORT
    owner_uid: str = ""
    unschedulable: str = ""
    """The scheduler's message, where it found no node."""
    waiting: str = ""
    """Reason why a container is not running yet, such as ImagePullBackOff."""
    waiting_message: str = ""
    creating: bool = False
    """On a node, but its volumes or its sandbox are not there yet."""
    failure_reason: str = ""
    """Typed reason from the runtime's termination message, else the kubelet's, such as OOMKilled."""
    failure_message: str = ""
    exit_code: int = 0
    restarts: int = 0

    @property
    def key(self) -> tuple[str, str]:
        return (self.namespace, self.name)


@dataclass(frozen=True)
class StreamView:
    """What the admin stream of a pod tells; absent or disconnected: nothing is known."""

    connected: bool = False
    identity: str = ""
    versions: frozenset[str] = frozenset()
    rejected: Mapping[str, str] = field(default_factory=dict)
    """Why the pod refused a configuration, by version."""
    kv_percent: int = 0
    """How full its KV cache was when it last told."""
    unreadable: str = ""
    """Schema that its evidence is of, where that is not the one that is read here; nothing of it is read."""
    refused: str = ""
    """Why the pod did not even look at the configurations that it was sent."""
    beside: str = ""
    """Why it refused what it was sent beside configurations: limits, or what verifiers are reached with."""

    @property
    def heard(self) -> bool:
        """Whether what it tells of requests arrives and is understood."""
        return self.connected and not self.unreadable

    def settled(self, wanted: Collection[str]) -> bool:
        """Whether waiting brings no more: it holds or refuses all of ``wanted``, or can't be talked to."""
        if self.refused or (self.unreadable and not self.connected):
            return True
        return self.connected and self.versions.union(self.rejected).issuperset(wanted)


def _termination(state: Mapping[str, Any]) -> tuple[str, str, int]:
    """Reason, message and exit code of a terminated container; the runtime writes its reason as JSON."""
    ended = state.get("terminated") or {}
    if not ended or (ended.get("exitCode", 0) == 0 and ended.get("reason") == "Completed"):
        return "", "", 0
    reason, message = ended.get("reason", ""), ended.get("message", "")
    if reason == "OOMKilled":
        return reason, message, ended.get("exitCode", 0)
    try:
        told = json.loads(message)
        reason, message = str(told["reason"])[:64], str(told["message"])[:500]
    except (ValueError, TypeError, KeyError):
        pass
    return reason, message, ended.get("exitCode", 0)


def _container_state(statuses: list[Mapping[str, Any]]) -> dict[str, Any]:
    seen: dict[str, Any] = {"restarts": 0, "creating": False}
    for status in statuses:
        seen["creating"] |= ((status.get("state") or {}).get("waiting") or {}).get(
            "reason"
        ) == "ContainerCreating"
        seen["restarts"] += status.get("restartCount", 0)
        waiting = (status.get("state") or {}).get("waiting") or {}
        if waiting.get("reason") not in (None, "", "ContainerCreating", "PodInitializing"):
            seen["waiting"], seen["waiting_message"] = waiting["reason"], waiting.get("message", "")
        for state in (status.get("state") or {}, status.get("lastState") or {}):
            reason, message, code = _termination(state)
            if reason and not status.get("ready"):
                seen["failure_reason"], seen["failure_message"], seen["exit_code"] = reason, message, code
                break
    return seen


def pod_view(obj: Mapping[str, Any]) -> PodView | None:
    """The view of a Pod, or None where it is not one of ours."""
    meta, spec, status = obj["metadata"], obj.get("spec") or {}, obj.get("status") or {}
    backend = (meta.get("labels") or {}).get(BACKEND_LABEL)
    if not backend:
        return None
    conditions = {c["type"]: c for c in status.get("conditions") or []}
    scheduled = conditions.get("PodScheduled", {})
    ports = {
        p.get("name"): p["containerPort"] for c in spec.get("containers") or [] for p in c.get("ports") or []
    }
    owner: Mapping[str, Any] = next((o for o in meta.get("ownerReferences") or [] if o.get("controller")), {})
    statuses = [*(status.get("initContainerStatuses") or []), *(status.get("containerStatuses") or [])]
    return PodView(
        name=meta["name"],
        namespace=meta["namespace"],
        backend=backend,
        uid=meta.get("uid", ""),
        ip=status.get("podIP", ""),
        node=spec.get("nodeName", ""),
        phase=status.get("phase", "Pending"),
        ready=conditions.get("Ready", {}).get("status") == "True",
        terminating=bool(meta.get("deletionTimestamp")),
        created=meta.get("creationTimestamp", ""),
        api_port=ports.get("api", API_PORT),
        admin_port=ports.get("admin", ADMIN_PORT),
        owner_uid=owner.get("uid", ""),
        unschedulable=scheduled.get("message", "") if scheduled.get("reason") == "Unschedulable" else "",
        **_container_state(statuses),
    )
