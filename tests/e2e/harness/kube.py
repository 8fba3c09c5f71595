"""A thin, synchronous view of the cluster that KUBECONFIG names."""

from __future__ import annotations

import json
import os
import subprocess
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from string import Template
from typing import Any, TypeVar

import yaml
from kubernetes import client, config
from kubernetes.client.exceptions import ApiException
from kubernetes.dynamic import DynamicClient
from kubernetes.dynamic.exceptions import NotFoundError

T = TypeVar("T")
PATIENCE_S = 300.0
"""What takes seconds here may take minutes on a busy machine; who waits for what never comes fails then."""
Object = dict[str, Any]
KINDS = {
    "InferenceBackend": "sluice.dev/v1alpha1",
    "RoutePolicy": "sluice.dev/v1alpha1",
    "CacheScope": "sluice.dev/v1alpha1",
    "Tenant": "sluice.dev/v1alpha1",
    "EvalSuite": "sluice.dev/v1alpha1",
    "ReleaseRecord": "sluice.dev/v1alpha1",
    "Deployment": "apps/v1",
    "Pod": "v1",
    "Service": "v1",
    "Secret": "v1",
    "ConfigMap": "v1",
    "Event": "v1",
    "Namespace": "v1",
    "PersistentVolume": "v1",
    "PersistentVolumeClaim": "v1",
    "PodDisruptionBudget": "policy/v1",
}


def tool(name: str) -> str:
    """Path of a tool that the cluster's build left in the cache, else the name for PATH."""
    cache = Path(os.environ.get("SLUICE_CACHE", Path.home() / ".cache/sluice"))
    built = cache / "bin/current" / name
    return str(built) if built.exists() else name


def documents(path: Path, **values: str) -> Iterator[Object]:
    """The manifests of a file, with ``${NAME}`` replaced."""
    yield from (doc for doc in yaml.safe_load_all(Template(path.read_text()).safe_substitute(values)) if doc)


def until(what: str, probe: Callable[[], T | None], *, seconds: float = PATIENCE_S, every: float = 0.1) -> T:
    """The first true answer of ``probe``. Raises TimeoutError that says what was waited for and what was last
    seen."""
    deadline = time.monotonic() + seconds
    while True:
        seen = probe()
        if seen:
            return seen
        if time.monotonic() > deadline:
            raise TimeoutError(f"not within {seconds:.0f} s: {what} (last seen: {seen!r})")
        time.sleep(every)


def condition(obj: Object, kind: str) -> Object:
    """A condition of an object that speaks of its current generation; empty where there is none."""
    for item in obj.get("status", {}).get("conditions", []):
        if item["type"] == kind and item.get("observedGeneration", 0) >= obj["metadata"].get("generation", 0):
            return dict(item)
    return {}


class Kube:
    """The cluster, in one namespace by default."""

    def __init__(self, namespace: str) -> None:
        config.load_kube_config(os.environ["KUBECONFIG"])  # type: ignore[no-untyped-call]
        self.namespace = namespace
        self._dynamic = DynamicClient(client.ApiClient())  # type: ignore[no-untyped-call]

    def _api(self, kind: str) -> Any:
        return self._dynamic.resources.get(api_version=KINDS[kind], kind=kind)

    def apply(self, manifest: Object, *, manager: str = "e2e") -> Object:
        """Server-side apply, as ``kubectl apply --server-side`` does it."""
        resource = self._dynamic.resources.get(api_version=manifest["apiVersion"], kind=manifest["kind"])
        namespace = manifest["metadata"].get("namespace", self.namespace) if resource.namespaced else None
        answer = self._dynamic.server_side_apply(  # type: ignore[no-untyped-call]
            resource,
            body=manifest,
            name=manifest["metadata"]["name"],
            namespace=namespace,
            field_manager=manager,
            force_conflicts=True,
        )
        return dict(answer.to_dict())

    def apply_file(self, path: Path, **values: str) -> list[Object]:
        """Every manifest of a file."""
        return [self.apply(doc) for doc in documents(path, **values)]

    def get(self, kind: str, name: str) -> Object | None:
        """An object, or None."""
        try:
            return dict(self._api(kind).get(name=name, namespace=self.namespace).to_dict())
        except NotFoundError:
            return None

    def list(self, kind: str, selector: str = "") -> list[Object]:
        """Objects of the namespace."""
        answer = self._api(kind).get(namespace=self.namespace, label_selector=selector)
        return [dict(item) for item in answer.to_dict()["items"]]

    def patch(self, kind: str, name: str, body: Object) -> Object:
        """Merge patch."""
        answer = self._api(kind).patch(
            name=name, namespace=self.namespace, body=body, content_type="application/merge-patch+json"
        )
        return dict(answer.to_dict())

    def delete(self, kind: str, name: str, **options: Any) -> None:
        """Delete; fine where it is gone already."""
        try:
            self._api(kind).delete(name=name, namespace=self.namespace, **options)
        except NotFoundError:
            return

    def wait(
        self, kind: str, name: str, what: str, probe: Callable[[Object], Any], *, seconds: float = PATIENCE_S
    ) -> Object:
        """The object, once ``probe`` holds of it."""
        last: Object = {}

        def look() -> Object | None:
            nonlocal last
            last = self.get(kind, name) or {}
            return last if last and probe(last) else None

        try:
            return until(f"{kind} {name} {what}", look, seconds=seconds)
        except TimeoutError as late:
            seen = json.dumps(last.get("status", last), indent=1, ensure_ascii=False)[:3000]
            raise TimeoutError(f"{late}\nstatus: {seen}") from None

    def wait_condition(
        self, kind: str, name: str, which: str, status: str = "True", *, seconds: float = PATIENCE_S
    ) -> Object:
        """The condition, once it has this status for the current generation."""
        obj = self.wait(
            kind,
            name,
            f"{which}={status}",
            lambda o: condition(o, which).get("status") == status,
            seconds=seconds,
        )
        return condition(obj, which)

    def rule(self, policy: str, rule: str) -> Object:
        """A rule's status; empty where the operator has not written one."""
        obj = self.get("RoutePolicy", policy) or {}
        found: list[Object] = [
            item for item in obj.get("status", {}).get("rules", []) if item["name"] == rule
        ]
        return found[0] if found else {}

    @contextmanager
    def forward(self, pod: str, port: int) -> Iterator[str]:
        """``http://127.0.0.1:PORT`` to a port of a pod, by ``kubectl port-forward``."""
        process = subprocess.Popen(
            [
                tool("kubectl"),
                "-n",
                self.namespace,
                "port-forward",
                f"pod/{pod}",
                f":{port}",
                "--address",
                "127.0.0.1",
            ],
            stdout=subprocess.PIPE,
            stderr=subprocess.DEVNULL,
            text=True,
        )
        try:
            assert process.stdout
            line = process.stdout.readline()
            if "Forwarding from" not in line:
                raise RuntimeError(f"port-forward to {pod}:{port} did not start")
            yield "http://" + line.split("from ")[1].split(" ")[0]
        finally:
            process.terminate()
            process.wait()


def refused(apply: Callable[[], Any]) -> str:
    """The API server's message when it refuses; fails where it accepts."""
    try:
        apply()
    except ApiException as error:
        return str(json.loads(error.body or "{}")["message"])
    raise AssertionError("the API server accepted it")
