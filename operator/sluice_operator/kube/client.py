"""The few verbs that the operator needs, over ``kubernetes.aio``.

That client is young, so nothing else imports it. Invariant: every call ends within ``timeout`` seconds,
with plain data or with a ``KubeError``; a spec is never written, only whole objects that are ours and
status subresources.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import aiohttp
from kubernetes.aio import client as kubernetes_client
from kubernetes.aio import config as kubernetes_config
from kubernetes.aio.client.exceptions import ApiException

from ..api.common import API_VERSION, FIELD_MANAGER

Object = dict[str, Any]

_PLURALS = {
    "InferenceBackend": "inferencebackends",
    "RoutePolicy": "routepolicies",
    "CacheScope": "cachescopes",
    "Tenant": "tenants",
    "EvalSuite": "evalsuites",
    "ReleaseRecord": "releaserecords",
    "PodDisruptionBudget": "poddisruptionbudgets",
    "ControllerRevision": "controllerrevisions",
    "Lease": "leases",
}


class KubeError(Exception):
    """The API server refused, or could not be reached (status 0)."""

    def __init__(self, status: int, message: str) -> None:
        super().__init__(message)
        self.status = status


class NotFound(KubeError):
    """404."""


class Conflict(KubeError):
    """409."""


@dataclass(frozen=True)
class Kind:
    """Where objects of a kind live."""

    api_version: str
    kind: str

    def path(self, namespace: str | None, name: str | None = None, subresource: str | None = None) -> str:
        root = f"/api/{self.api_version}" if "/" not in self.api_version else f"/apis/{self.api_version}"
        plural = _PLURALS.get(self.kind, self.kind.lower() + "s")
        parts = [root, f"namespaces/{namespace}" if namespace else "", plural, name or "", subresource or ""]
        return "/".join(p for p in parts if p)


CONFIG_MAP, SECRET, POD, NAMESPACE = (Kind("v1", k) for k in ("ConfigMap", "Secret", "Pod", "Namespace"))
EVENT, SERVICE = Kind("v1", "Event"), Kind("v1", "Service")
DEPLOYMENT = Kind("apps/v1", "Deployment")
CONTROLLER_REVISION = Kind("apps/v1", "ControllerRevision")
LEASE = Kind("coordination.k8s.io/v1", "Lease")
BACKEND, POLICY, SCOPE, TENANT, EVAL_SUITE, RELEASE_RECORD = (
    Kind(API_VERSION, k)
    for k in ("InferenceBackend", "RoutePolicy", "CacheScope", "Tenant", "EvalSuite", "ReleaseRecord")
)


def kind_of(obj: Object) -> Kind:
    return Kind(obj["apiVersion"], obj["kind"])


class Kube:
    """A connection to the API server. Make it with ``await Kube.connect()``."""

    def __init__(self, api: kubernetes_client.ApiClient, *, timeout: float = 10.0) -> None:
        self._api = api
        self._timeout = timeout
        self.may_write: Callable[[], bool] = lambda: True
        """Asked before every write but that of the Lease: who does not hold it writes nothing."""

    @classmethod
    async def connect(cls, *, kubeconfig: str | None = None) -> Kube:
        """From ``kubeconfig``, else from the pod's service account, else from KUBECONFIG or
        ~/.kube/config."""
        try:
            if kubeconfig is not None:
                raise kubernetes_config.ConfigException("a file is named")
            kubernetes_config.load_incluster_config()  # type: ignore[no-untyped-call]
        except kubernetes_config.ConfigException:
            await kubernetes_config.load_kube_config(config_file=kubeconfig)  # type: ignore[no-untyped-call]
        return cls(kubernetes_client.ApiClient())

    async def close(self) -> None:
        await self._api.close()  # type: ignore[no-untyped-call]

    async def get(self, kind: Kind, namespace: str | None, name: str) -> Object:
        return await self._call("GET", kind.path(namespace, name))

    async def find(self, kind: Kind, namespace: str | None, name: str) -> Object | None:
        """As get, with None where there is nothing."""
        try:
            return await self.get(kind, namespace, name)
        except NotFound:
            return None

    async def list_all(self, kind: Kind, namespace: str | None, *, selector: str = "") -> list[Object]:
        """All objects of a kind, in pages, from one consistent snapshot."""
        found: list[Object] = []
        query = [("limit", "500")] + ([("labelSelector", selector)] if selector else [])
        token = ""
        while True:
            page = await self._call(
                "GET", kind.path(namespace), query=query + ([("continue", token)] if token else [])
            )
            found.extend(page.get("items") or [])
            token = (page.get("metadata") or {}).get("continue") or ""
            if not token:
                return found

    async def apply(self, obj: Object, *, dry_run: bool = False) -> Object:
        """Server-side apply of an object that is ours. ``dry_run``: only asks whether it would be taken."""
        meta = obj["metadata"]
        query = [("fieldManager", FIELD_MANAGER), ("force", "true")]
        return await self._call(
            "PATCH",
            kind_of(obj).path(meta.get("namespace"), meta["name"]),
            body=obj,
            query=[*query, ("dryRun", "All")] if dry_run else query,
            content_type="application/apply-patch+yaml",
        )

    async def create(self, obj: Object) -> Object:
        """Raises Conflict where it exists."""
        return await self._call(
            "POST",
            kind_of(obj).path(obj["metadata"].get("namespace")),
            body=obj,
            query=[("fieldManager", FIELD_MANAGER)],
        )

    async def patch_status(self, kind: Kind, namespace: str, name: str, status: Object) -> Object:
        """Replaces the fields of ``status`` that are given (JSON merge patch on the subresource)."""
        return await self._call(
            "PATCH",
            kind.path(namespace, name, "status"),
            body={"status": status},
            query=[("fieldManager", FIELD_MANAGER)],
            content_type="application/merge-patch+json",
        )

    async def patch_metadata(self, kind: Kind, namespace: str, name: str, metadata: Object) -> Object:
        """Merge patch of metadata alone: finalizers, and a ``resourceVersion`` as precondition."""
        return await self._call(
            "PATCH",
            kind.path(namespace, name),
            body={"metadata": metadata},
            query=[("fieldManager", FIELD_MANAGER)],
            content_type="application/merge-patch+json",
        )

    async def write_lease(self, obj: Object) -> Object:
        """Creates it, or replaces the very version that ``obj`` was read as. Raises Conflict otherwise."""
        meta = obj["metadata"]
        fresh = not meta.get("resourceVersion")
        return await self._call(
            "POST" if fresh else "PUT",
            LEASE.path(meta["namespace"], None if fresh else meta["name"]),
            body=obj,
            query=[("fieldManager", FIELD_MANAGER)],
            fenced=False,
        )

    async def patch_event(self, namespace: str, name: str, body: Object) -> Object:
        return await self._call(
            "PATCH", EVENT.path(namespace, name), body=body, content_type="application/merge-patch+json"
        )

    async def delete(self, kind: Kind, namespace: str, name: str) -> None:
        """Deletes; nothing there is success."""
        try:
            await self._call(
                "DELETE", kind.path(namespace, name), query=[("propagationPolicy", "Background")]
            )
        except NotFound:
            return

    async def _call(
        self,
        method: str,
        path: str,
        *,
        body: Object | None = None,
        query: list[tuple[str, str]] | None = None,
        content_type: str = "application/json",
        fenced: bool = True,
    ) -> Object:
        if fenced and method != "GET" and not self.may_write():
            raise KubeError(0, f"{method} {path}: not sent, since this process does not hold the Lease")
        try:
            request = await self._api.param_serialize(
                method,
                path,
                query_params=query or [],
                body=body,
                auth_settings=["BearerToken"],
                header_params={"Accept": "application/json", "Content-Type": content_type},
            )
            response = await self._api.call_api(*request, _request_timeout=self._timeout)
            raw = await response.read()  # type: ignore[no-untyped-call]
        except ApiException as error:
            raise _error(error.status or 0, f"{method} {path}: {error.reason}") from None
        except (aiohttp.ClientError, TimeoutError, OSError) as error:
            raise KubeError(0, f"{method} {path}: {type(error).__name__}: {error}") from None
        try:
            told: Object = json.loads(raw) if raw else {}
        except ValueError:
            # A group that does not exist (yet) is told in plain text.
            raise _error(response.status, f"{method} {path}: {raw[:200]!r}") from None
        if not 200 <= response.status <= 299:
            raise _error(response.status, str(told.get("message") or f"{method} {path}: {response.reason}"))
        return told


def _error(status: int, message: str) -> KubeError:
    return {404: NotFound, 409: Conflict}.get(status, KubeError)(status, message)
