"""Our own trimmed copy of what the API server holds.

Invariant: an object never goes back to an older resourceVersion, whichever of watch, list and answers to
our own writes comes last. Objects that don't parse are kept as ``Broken``, so that their status can say
why.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, field
from typing import Any, TypeVar

from pydantic import ValidationError

from ..api import (
    CacheScope,
    Condition,
    EvalSuite,
    InferenceBackend,
    Metadata,
    ReleaseRecord,
    RoutePolicy,
    Tenant,
)
from ..plan.conditions import Problem
from ..plan.names import BACKEND_LABEL
from ..plan.observed import PodView, pod_view

Name = tuple[str, str]
"""Namespace and name."""
T = TypeVar("T", InferenceBackend, RoutePolicy, CacheScope, Tenant, EvalSuite, ReleaseRecord)


@dataclass(frozen=True)
class Broken:
    """An object that the types refuse."""

    metadata: Metadata
    problem: Problem
    status: Mapping[str, Any]


@dataclass(frozen=True)
class DeploymentView:
    """What we need of a Deployment."""

    namespace: str
    name: str
    backend: str
    uid: str
    generation: int
    image: str
    image_pull_policy: str
    owner_uid: str
    failure: str = ""
    """Why its pods are not even created, such as a quota or a security policy."""


@dataclass
class Cache:
    """Everything, by namespace and name."""

    backends: dict[Name, InferenceBackend | Broken] = field(default_factory=dict)
    policies: dict[Name, RoutePolicy | Broken] = field(default_factory=dict)
    scopes: dict[Name, CacheScope | Broken] = field(default_factory=dict)
    tenants: dict[Name, Tenant | Broken] = field(default_factory=dict)
    suites: dict[Name, EvalSuite | Broken] = field(default_factory=dict)
    records: dict[Name, ReleaseRecord | Broken] = field(default_factory=dict)
    pods: dict[Name, PodView] = field(default_factory=dict)
    deployments: dict[Name, DeploymentView] = field(default_factory=dict)
    namespaces_ending: set[str] = field(default_factory=set)
    news: Counter[str] = field(default_factory=Counter)
    """How many times objects of each kind have changed."""
    _versions: dict[tuple[str, str, str], int] = field(default_factory=dict)

    def put(self, kind: str, obj: Mapping[str, Any]) -> bool:
        """Takes an object in. Returns whether it is news."""
        meta = obj["metadata"]
        name, version = (meta["namespace"], meta["name"]), int(meta.get("resourceVersion") or 0)
        seen = self._versions.get((kind, *name), -1)
        if version <= seen:
            return False
        self._versions[(kind, *name)] = version
        table = self._table(kind)
        parsed = _PARSERS[kind](obj)
        if parsed is None:
            return False
        known = table.get(name)
        table[name] = parsed
        changed = bool(known != parsed)
        self.news[kind] += changed
        return changed

    def answered(self, kind: str, obj: Mapping[str, Any]) -> bool:
        """Takes in the answer to a write of ours. Returns whether somebody else's edit came with it: the
        watch will not tell of that again as news, since its version is known now."""
        name = (obj["metadata"]["namespace"], obj["metadata"]["name"])
        before = self._table(kind).get(name)
        return self.put(kind, obj) and _edit(before) != _edit(self._table(kind).get(name))

    def drop(self, kind: str, name: Name, version: int = 0) -> bool:
        """Forgets an object. Returns whether it was known."""
        seen = self._versions.get((kind, *name), -1)
        if version and version < seen:
            return False
        self._versions[(kind, *name)] = max(seen, version)
        known = self._table(kind).pop(name, None) is not None
        self.news[kind] += known
        return known

    def sync(
        self, kind: str, objects: Iterable[Mapping[str, Any]], namespaces: Iterable[str] | None
    ) -> set[Name]:
        """Takes a full list in, of ``namespaces`` or of all. Returns the names of what was news, the lost
        included."""
        news, listed = set(), set()
        for obj in objects:
            name = (obj["metadata"]["namespace"], obj["metadata"]["name"])
            listed.add(name)
            if self.put(kind, obj):
                news.add(name)
        within = None if namespaces is None else set(namespaces)
        for name in [n for n in self._table(kind) if n not in listed and (within is None or n[0] in within)]:
            self.drop(kind, name)
            news.add(name)
        return news

    def backend_pods(self, namespace: str, backend: str) -> list[PodView]:
        found = (p for p in self.pods.values() if p.namespace == namespace and p.backend == backend)
        return sorted(found, key=lambda p: p.name)

    def _table(self, kind: str) -> dict[Name, Any]:
        tables: dict[str, dict[Name, Any]] = {
            "InferenceBackend": self.backends,
            "RoutePolicy": self.policies,
            "CacheScope": self.scopes,
            "Tenant": self.tenants,
            "EvalSuite": self.suites,
            "ReleaseRecord": self.records,
            "Pod": self.pods,
            "Deployment": self.deployments,
        }
        return tables[kind]


def _edit(known: Any) -> Any:
    """What tells edits apart from our own writes of status; what has no status of ours is compared whole."""
    meta: Metadata | None = getattr(known, "metadata", None)
    return (meta.uid, meta.generation, meta.deletion_timestamp) if meta is not None else known


def parse(model: type[T], obj: Mapping[str, Any]) -> T | Broken:
    """The typed object, or what is wrong with it. A status that does not parse is dropped: it can be
    rebuilt."""
    told = {k: obj[k] for k in ("metadata", "spec", "status") if k in obj}
    try:
        return model.model_validate(told)
    except ValidationError as error:
        errors = error.errors()
    if any(e["loc"][:1] == ("status",) for e in errors):
        told.pop("status", None)
        try:
            return model.model_validate(told)
        except ValidationError as error:
            errors = error.errors()
    first = errors[0]
    where = "".join(f"[{p}]" if isinstance(p, int) else f".{p}" for p in first["loc"]).lstrip(".")
    return Broken(
        Metadata.model_validate(obj["metadata"]),
        Problem("InvalidSpec", first["msg"], where),
        obj.get("status") or {},
    )


def _deployment(obj: Mapping[str, Any]) -> DeploymentView | None:
    meta = obj["metadata"]
    backend = (meta.get("labels") or {}).get(BACKEND_LABEL)
    if not backend:
        return None
    owner: Mapping[str, Any] = next((o for o in meta.get("ownerReferences") or [] if o.get("controller")), {})
    containers = obj["spec"]["template"]["spec"]["containers"]
    return DeploymentView(
        meta["namespace"],
        meta["name"],
        backend,
        meta["uid"],
        meta.get("generation", 0),
        containers[0]["image"],
        containers[0].get("imagePullPolicy", ""),
        owner.get("uid", ""),
        next(
            (
                c.get("message", "")
                for c in (obj.get("status") or {}).get("conditions") or []
                if c["type"] == "ReplicaFailure" and c["status"] == "True"
            ),
            "",
        ),
    )


_PARSERS: dict[str, Any] = {
    "InferenceBackend": lambda o: parse(InferenceBackend, o),
    "RoutePolicy": lambda o: parse(RoutePolicy, o),
    "CacheScope": lambda o: parse(CacheScope, o),
    "Tenant": lambda o: parse(Tenant, o),
    "EvalSuite": lambda o: parse(EvalSuite, o),
    "ReleaseRecord": lambda o: parse(ReleaseRecord, o),
    "Pod": pod_view,
    "Deployment": _deployment,
}


def parse_conditions(told: Iterable[Mapping[str, Any]]) -> list[Condition]:
    """Conditions of a status that was not parsed; what does not parse is left out."""
    found = []
    for condition in told:
        try:
            found.append(Condition.model_validate(condition))
        except ValidationError:
            continue
    return found
