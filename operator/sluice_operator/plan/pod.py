"""The pod of a backend: the container that serves, what is mounted there, and how a model gets into it.

Invariant: it may write to emptyDirs alone, never runs as root, and names secrets as files, never as values.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from ..api.backend import ImageSource, InferenceBackend, ModelSource
from ..api.common import SecretKeyRef
from . import names
from .observed import ADMIN_PORT, API_PORT

RUNTIME_USER = 65532
MODEL_DIR = "/models/model"
DRAFT_DIR = "/models/draft"
CONTAINER = "runtime"
_CONFIG_DIR = "/etc/sluice"
_HF_CACHE = "/cache/huggingface"


@dataclass(frozen=True)
class Defaults:
    """What the operator's installation decides."""

    image: str
    runtime_secret: str = names.RUNTIME_SECRET
    image_pull_policy: str = "IfNotPresent"


def pod_spec(backend: InferenceBackend, defaults: Defaults) -> dict[str, Any]:
    """As in the Deployment's template; ``defaults`` with the image that it shall run."""
    spec, scheduling = backend.spec, backend.spec.scheduling
    volumes, mounts = _volumes(backend, defaults)
    pod: dict[str, Any] = {
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": spec.termination_grace_period_seconds,
        "securityContext": {
            "runAsNonRoot": True,
            "runAsUser": RUNTIME_USER,
            "runAsGroup": RUNTIME_USER,
            "fsGroup": RUNTIME_USER,
            "seccompProfile": {"type": "RuntimeDefault"},
        },
        "containers": [_container(backend, defaults, mounts)],
        "volumes": volumes,
    }
    copies = [
        _copy_model(source.image, name, directory)
        for source, name, directory in _sources(backend)
        if source.image is not None
    ]
    if copies:
        pod["initContainers"] = copies
    optional = {
        "nodeSelector": scheduling.node_selector,
        "tolerations": scheduling.tolerations,
        "runtimeClassName": scheduling.runtime_class_name,
        "priorityClassName": scheduling.priority_class_name,
    }
    return pod | {key: value for key, value in optional.items() if value}


def _container_security() -> dict[str, Any]:
    return {
        "allowPrivilegeEscalation": False,
        "readOnlyRootFilesystem": True,
        "capabilities": {"drop": ["ALL"]},
    }


def _container(backend: InferenceBackend, defaults: Defaults, mounts: list[dict[str, Any]]) -> dict[str, Any]:
    container: dict[str, Any] = {
        "name": CONTAINER,
        "image": defaults.image,
        "imagePullPolicy": defaults.image_pull_policy,
        "ports": [
            {"name": "api", "containerPort": API_PORT, "protocol": "TCP"},
            {"name": "admin", "containerPort": ADMIN_PORT, "protocol": "TCP"},
        ],
        "env": _environment(backend),
        "resources": _resources(backend),
        "volumeMounts": mounts,
        "securityContext": _container_security(),
        # Half an hour to download and load; from then on liveness asks the engine loop.
        "startupProbe": _probe("/healthz", period=2, timeout=5, failures=900),
        "livenessProbe": _probe("/healthz", period=10, timeout=5, failures=6),
        "readinessProbe": _probe("/readyz", period=1, timeout=3, failures=3),
        # The endpoint leaves the gateway before the process is told to stop.
        "lifecycle": {"preStop": {"sleep": {"seconds": 2}}},
    }
    if backend.spec.args:
        container["args"] = list(backend.spec.args)
        if backend.spec.args[0] == "-m":
            # Python's own options, whatever module the image would start by itself.
            container["command"] = ["python"]
    return container


def _probe(path: str, *, period: int, timeout: int, failures: int) -> dict[str, Any]:
    return {
        "httpGet": {"path": path, "port": "api", "scheme": "HTTP"},
        "periodSeconds": period,
        "timeoutSeconds": timeout,
        "failureThreshold": failures,
    }


def _environment(backend: InferenceBackend) -> list[dict[str, str]]:
    env = {"HOME": "/tmp", "HF_HOME": _HF_CACHE, "TMPDIR": "/tmp"}  # noqa: S108 (an emptyDir of the pod)
    if all(source.hugging_face is None for source, _, _ in _sources(backend)):
        env["HF_HUB_OFFLINE"] = "1"
    elif _hub_token(backend) is not None:
        env["HF_TOKEN_PATH"] = f"{_CONFIG_DIR}/huggingface/token"
    return [{"name": key, "value": value} for key, value in env.items()]


def _resources(backend: InferenceBackend) -> dict[str, Any]:
    given = backend.spec.resources
    requests = given.requests.model_dump(exclude_none=True)
    limits = given.limits.model_dump(exclude_none=True)
    if backend.spec.accelerator is not None:
        # Extended resources can't be overcommitted: request and limit are equal.
        count = str(backend.spec.accelerator.count)
        requests[backend.spec.accelerator.resource] = limits[backend.spec.accelerator.resource] = count
    return {key: value for key, value in (("requests", requests), ("limits", limits)) if value}


def _volumes(
    backend: InferenceBackend, defaults: Defaults
) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
    """Volumes of the pod and mounts of the runtime container."""
    scheduling = backend.spec.scheduling
    volumes: list[dict[str, Any]] = [
        {"name": "config", "configMap": {"name": names.child(backend.metadata.name), "defaultMode": 0o444}},
        {"name": "secrets", "secret": {"secretName": defaults.runtime_secret, "defaultMode": 0o440}},
        {"name": "tmp", "emptyDir": {}},
    ]
    mounts: list[dict[str, Any]] = [
        {
            "name": "config",
            "mountPath": f"{_CONFIG_DIR}/backend.json",
            "subPath": "backend.json",
            "readOnly": True,
        },
        {"name": "secrets", "mountPath": f"{_CONFIG_DIR}/secrets", "readOnly": True},
        {"name": "tmp", "mountPath": "/tmp"},  # noqa: S108
    ]
    if scheduling.shared_memory is not None or backend.spec.accelerator is not None:
        shm: dict[str, Any] = {"medium": "Memory"}
        if scheduling.shared_memory is not None:
            shm["sizeLimit"] = scheduling.shared_memory
        volumes.append({"name": "shm", "emptyDir": shm})
        mounts.append({"name": "shm", "mountPath": "/dev/shm"})  # noqa: S108
    for source, name, directory in _sources(backend):
        volume, mount = _model_volume(source, name, directory)
        # Both from the hub: one cache holds them.
        if mount["mountPath"] not in {m["mountPath"] for m in mounts}:
            volumes.append(volume)
            mounts.append(mount)
    secret = _hub_token(backend)
    if secret is not None:
        volumes.append(
            {
                "name": "token",
                "secret": {
                    "secretName": secret.name,
                    "defaultMode": 0o440,
                    "items": [{"key": secret.key, "path": "token"}],
                },
            }
        )
        mounts.append({"name": "token", "mountPath": f"{_CONFIG_DIR}/huggingface", "readOnly": True})
    return volumes, mounts


def _sources(backend: InferenceBackend) -> list[tuple[ModelSource, str, str]]:
    """The models of a pod: each with the name of its volume, and its directory."""
    sources = [(backend.spec.model, "model", MODEL_DIR)]
    speculation = backend.spec.engine.speculation
    if speculation is not None and speculation.draft is not None:
        sources.append((speculation.draft, "draft", DRAFT_DIR))
    return sources


def _hub_token(backend: InferenceBackend) -> SecretKeyRef | None:
    """The access token of the pod's downloads: `problems` refuses two that differ."""
    given = (source.hugging_face for source, _, _ in _sources(backend))
    return next((hub.token_secret for hub in given if hub is not None and hub.token_secret is not None), None)


def _model_volume(model: ModelSource, name: str, directory: str) -> tuple[dict[str, Any], dict[str, Any]]:
    mount: dict[str, Any] = {"name": name, "mountPath": directory, "readOnly": True}
    if model.host_path is not None:
        return {"name": name, "hostPath": {"path": model.host_path.path, "type": "Directory"}}, mount
    if model.persistent_volume_claim is not None:
        claim = model.persistent_volume_claim
        if claim.path:
            mount["subPath"] = claim.path
        return {
            "name": name,
            "persistentVolumeClaim": {"claimName": claim.claim_name, "readOnly": True},
        }, mount
    if model.image is not None:
        return {"name": name, "emptyDir": {}}, mount
    return {"name": name, "emptyDir": {}}, {"name": name, "mountPath": _HF_CACHE}


def _copy_model(image: ImageSource, name: str, directory: str) -> dict[str, Any]:
    return {
        "name": name,
        "image": image.reference,
        "command": ["cp", "-rL", f"{image.path.rstrip('/')}/.", directory],
        "volumeMounts": [{"name": name, "mountPath": directory}],
        "securityContext": _container_security(),
    }
