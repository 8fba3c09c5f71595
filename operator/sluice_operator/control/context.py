"""What the reconcilers share."""

from __future__ import annotations

import time
from collections.abc import Awaitable, Callable, Mapping
from dataclasses import dataclass, field
from datetime import UTC, datetime
from typing import Any

from ..evidence import Collector
from ..kube import Kube
from ..kube.events import Recorder
from ..plan.conditions import Problem
from ..plan.pod import Defaults
from ..xds.server import AdsServer
from .book import Book
from .cache import Cache, Name
from .queue import Key, Queue
from .router import Router


@dataclass(frozen=True)
class Settings:
    """What the installation decides; see ``--help``."""

    namespace: str
    """The operator's own namespace, which holds the secret shared with gateway and pods."""
    namespaces: tuple[str, ...]
    """Watched namespaces; empty: all."""
    defaults: Defaults
    resync_seconds: float = 300.0
    start_seconds: float = 60.0
    """Longest wait after a start for pods to tell what they are."""
    drain_seconds: float = 10.0
    """Longest wait of a deleted backend for routes to leave it."""
    feedback_host: str = ""
    """Where the gateway reaches the operator with feedback; empty: no feedback is taken."""
    feedback_address: tuple[str, int] = ("0.0.0.0", 8082)  # noqa: S104
    """Where it listens for that."""
    prometheus_url: str = ""
    """Where PromQL guards are asked; empty: policies with queries are refused."""
    prometheus_token_file: str = ""
    ledger_keep: int = 50
    """ReleaseRecords kept of one policy."""
    ledger_days: int = 400
    """Age in days at which a record goes."""


@dataclass
class Credentials:
    """The two secrets between operator, gateway and pods."""

    admin_token: str = field(default="", repr=False)
    gateway_credential: str = field(default="", repr=False)

    def data(self) -> dict[str, str]:
        return {"admin-token": self.admin_token, "gateway-credential": self.gateway_credential}


@dataclass
class Context:
    """Handles of the running operator."""

    settings: Settings
    kube: Kube
    recorder: Recorder
    cache: Cache
    book: Book
    collector: Collector
    ads: AdsServer
    router: Router
    queue: Queue
    credentials: Credentials
    react: Callable[[str, Name], Awaitable[None]]
    """What follows from news of an object."""
    secrets: dict[Name, Mapping[str, str]] = field(default_factory=dict, repr=False)
    """Decoded data of the Secrets that tenants and verifiers name."""
    config_maps: dict[Name, Mapping[str, str]] = field(default_factory=dict)
    offered: set[Name] = field(default_factory=set)
    """Secrets of the type that says that verifiers may be sent them."""
    """Data of the ConfigMaps that verifiers name."""
    access_problems: Mapping[Name, tuple[Problem, ...]] = field(default_factory=dict)
    """What is wrong with what a policy's verifiers name."""
    tenant_problems: Mapping[Name, tuple[Problem, ...]] = field(default_factory=dict)

    async def answered(self, kind: str, obj: Mapping[str, Any]) -> None:
        """Takes in the answer to a write of ours, and what others wrote before it."""
        if self.cache.answered(kind, obj):
            await self.react(kind, (obj["metadata"]["namespace"], obj["metadata"]["name"]))

    def dirty(self, kind: str, name: Name, delay: float = 0.0) -> None:
        key: Key = (kind, *name)
        self.queue.add(key, delay)


def now() -> datetime:
    return datetime.now(UTC)


def stamp() -> str:
    return now().strftime("%Y-%m-%dT%H:%M:%SZ")


def monotonic() -> float:
    return time.monotonic()


def about(kind: str, metadata: Any) -> dict[str, Any]:
    """The reference that an Event carries."""
    return {
        "apiVersion": "sluice.dev/v1alpha1",
        "kind": kind,
        "metadata": {
            "name": metadata.name,
            "namespace": metadata.namespace,
            "uid": metadata.uid,
            "resourceVersion": metadata.resource_version,
        },
    }
