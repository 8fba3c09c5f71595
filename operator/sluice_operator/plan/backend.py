"""An InferenceBackend as the objects that run it: Deployment, headless Service, ConfigMap and
PodDisruptionBudget.

Invariant: the pod template depends only on what is immutable in the spec (and on scheduling), so an edit
of replicas, cost or card never restarts a pod. What the operator's installation decides (image, pull policy)
was decided at creation: a new default is no reason to change what answers, or to restart it.
"""

from __future__ import annotations

import json
from dataclasses import dataclass, replace
from typing import Any

from ..api.backend import (
    ImageSource,
    InferenceBackend,
    KvCacheDtype,
    ModelSource,
    Speculation,
    SpeculationMethod,
    UpdateStrategy,
)
from ..api.common import API_VERSION, SecretKeyRef
from . import names
from .conditions import Problem
from .observed import ADMIN_PORT, API_PORT
from .quantity import num_bytes, parse

RUNTIME_USER = 65532
MODEL_DIR = "/models/model"
DRAFT_DIR = "/models/draft"
CONTAINER = "runtime"
_CONFIG_DIR = "/etc/sluice"
_HF_CACHE = "/cache/huggingface"

Manifest = dict[str, Any]


@dataclass(frozen=True)
class Defaults:
    """What the operator's installation decides."""

    image: str
    runtime_secret: str = names.RUNTIME_SECRET
    image_pull_policy: str = "IfNotPresent"


@dataclass(frozen=True)
class Running:
    """What the backend's Deployment has already of what an installation decides."""

    image: str = ""
    image_pull_policy: str = ""


def runtime_image(backend: InferenceBackend, running: Running, defaults: Defaults) -> str:
    """The image that its pods run: the spec's, else the recorded one (so that a foreign edit of the
    Deployment is undone, and a lost Deployment comes back as it was), else what runs, else the default."""
    return backend.spec.image or backend.status.image or running.image or defaults.image


def problems(backend: InferenceBackend) -> tuple[Problem, ...]:
    """What one object can get wrong beyond its schema; each names its field."""
    spec, found = backend.spec, []
    if len(backend.metadata.name) > 63:
        found.append(
            Problem("InvalidSpec", "longer than 63 characters; routes could not name it", "metadata.name")
        )
    quantities = {
        "spec.engine.kvCacheMemory": spec.engine.kv_cache_memory,
        "spec.engine.kvOffloadMemory": spec.engine.kv_offload_memory,
        "spec.scheduling.sharedMemory": spec.scheduling.shared_memory,
        "spec.resources.requests.memory": spec.resources.requests.memory,
        "spec.resources.limits.memory": spec.resources.limits.memory,
    }
    for field, text in quantities.items():
        try:
            if text is not None and num_bytes(text) <= 0:
                found.append(Problem("InvalidSpec", "must be more than zero", field))
        except ValueError as error:
            found.append(Problem("InvalidSpec", str(error), field))
    found.extend(_limit_problems(backend))
    found.extend(_source_problems(spec.model, "spec.model"))
    found.extend(_speculation_problems(backend))
    return tuple(found)


def _source_problems(model: ModelSource, field: str) -> list[Problem]:
    found = []
    sources = [s for s in ("huggingFace", "persistentVolumeClaim", "image", "hostPath") if _source(model, s)]
    if len(sources) != 1:
        told = ", ".join(sources) or "none"
        found.append(Problem("InvalidSpec", f"exactly one source is needed, given: {told}", field))
    for where, path in (
        ("persistentVolumeClaim", model.persistent_volume_claim),
        ("hostPath", model.host_path),
    ):
        if path is not None and ".." in path.path.split("/"):
            found.append(Problem("InvalidSpec", "must not contain '..'", f"{field}.{where}.path"))
    return found


def _speculation_problems(backend: InferenceBackend) -> list[Problem]:
    speculation = backend.spec.engine.speculation
    if speculation is None:
        return []
    field = "spec.engine.speculation.draft"
    draft = speculation.draft
    if (speculation.method is SpeculationMethod.DRAFT) != (draft is not None):
        return [Problem("InvalidSpec", "a draft model comes with method Draft, and only with it", field)]
    if draft is None:
        return []
    found = _source_problems(draft, field)
    hubs = [source.hugging_face for source in (backend.spec.model, draft)]
    tokens = {(hub.token_secret.name, hub.token_secret.key) for hub in hubs if hub and hub.token_secret}
    if len(tokens) > 1:
        where = f"{field}.huggingFace.tokenSecret"
        found.append(Problem("InvalidSpec", "a pod has one access token: give that of spec.model", where))
    return found


def _limit_problems(backend: InferenceBackend) -> list[Problem]:
    resources, found = backend.spec.resources, []
    for kind in ("cpu", "memory"):
        request, limit = getattr(resources.requests, kind), getattr(resources.limits, kind)
        try:
            if request and limit and parse(request) > parse(limit):
                found.append(
                    Problem(
                        "InvalidSpec",
                        f"{request} is more than the limit {limit}",
                        f"spec.resources.requests.{kind}",
                    )
                )
        except ValueError as error:
            found.append(Problem("InvalidSpec", str(error), f"spec.resources.*.{kind}"))
    return found


def _source(model: ModelSource, name: str) -> object:
    return {
        "huggingFace": model.hugging_face,
        "persistentVolumeClaim": model.persistent_volume_claim,
        "image": model.image,
        "hostPath": model.host_path,
    }[name]


def replaces_in_place(backend: InferenceBackend) -> bool:
    """Whether an old pod ends before a new one starts: with accelerators a surge pod would stay Pending
    for ever."""
    strategy = backend.spec.update_strategy
    return strategy is UpdateStrategy.REPLACE or (
        strategy is UpdateStrategy.AUTO and backend.spec.accelerator is not None
    )


def selector(backend: InferenceBackend) -> dict[str, str]:
    return {names.BACKEND_LABEL: names.label(backend.metadata.name)}


def selector_text(backend: InferenceBackend) -> str:
    return ",".join(f"{k}={v}" for k, v in selector(backend).items())


def block_size(backend: InferenceBackend) -> int:
    """Tokens in one KV block, chosen by where it runs unless the spec says."""
    chosen = 16 if backend.spec.accelerator is None else 256
    return backend.spec.engine.block_size or chosen


def backend_json(backend: InferenceBackend) -> dict[str, Any]:
    """What the pod finds in /etc/sluice/backend.json; see docs/contracts/backend.schema.json."""
    engine = backend.spec.engine
    settings: dict[str, Any] = {
        "dtype": engine.dtype.value,
        "quantization": engine.quantization.value,
        "maxModelLen": engine.max_model_len,
        "maxNumSeqs": engine.max_num_seqs,
        "maxBatchTokens": engine.max_batch_tokens,
        "blockSize": block_size(backend),
        "kvCacheBytes": num_bytes(engine.kv_cache_memory),
        "maxQueue": engine.max_queue,
    }
    if engine.kv_cache_dtype is not KvCacheDtype.AUTO:
        settings["kvCacheDtype"] = engine.kv_cache_dtype.value
    if engine.num_threads is not None:
        settings["numThreads"] = engine.num_threads
    if engine.kv_offload_memory is not None:
        settings["kvOffloadBytes"] = num_bytes(engine.kv_offload_memory)
    if engine.tensor_parallel > 1:
        settings["tensorParallel"] = engine.tensor_parallel
    if engine.speculation is not None:
        settings["speculation"] = _speculation_json(engine.speculation)
    return {
        "name": names.cluster(backend.metadata.namespace, backend.metadata.name),
        "model": _source_json(backend.spec.model, MODEL_DIR),
        "engine": settings,
    }


def _source_json(source: ModelSource, directory: str) -> dict[str, Any]:
    """Where the pod finds a model that is not on the hub: in `directory`."""
    model = {"path": directory}
    if source.hugging_face is not None:
        model = {"repo": source.hugging_face.repo, "revision": source.hugging_face.revision}
    if source.gguf_file is not None:
        model["file"] = source.gguf_file
    return model


def _speculation_json(speculation: Speculation) -> dict[str, Any]:
    told: dict[str, Any] = {"method": speculation.method.value, "numTokens": speculation.num_tokens}
    if speculation.draft is not None:
        told["draft"] = _source_json(speculation.draft, DRAFT_DIR)
    return told


def children(
    backend: InferenceBackend, defaults: Defaults, running: Running | None = None
) -> tuple[Manifest, ...]:
    """All objects of a valid backend, in the order in which they are to be applied."""
    known = running or Running()
    defaults = replace(
        defaults,
        image=runtime_image(backend, known, defaults),
        image_pull_policy=known.image_pull_policy or defaults.image_pull_policy,
    )
    config = json.dumps(backend_json(backend), indent=1, sort_keys=True)
    return (
        _object(backend, "v1", "ConfigMap", data={"backend.json": config}),
        _object(backend, "v1", "Service", spec=_service_spec(backend)),
        _object(
            backend,
            "policy/v1",
            "PodDisruptionBudget",
            spec={"maxUnavailable": 1, "selector": {"matchLabels": selector(backend)}},
        ),
        _object(backend, "apps/v1", "Deployment", spec=_deployment_spec(backend, defaults, config)),
    )


def _labels(backend: InferenceBackend) -> dict[str, str]:
    return {
        **selector(backend),
        "app.kubernetes.io/name": "sluice-runtime",
        "app.kubernetes.io/component": "runtime",
        "app.kubernetes.io/instance": names.label(backend.metadata.name),
        "app.kubernetes.io/managed-by": "sluice",
        "app.kubernetes.io/part-of": "sluice",
    }


def owner_reference(kind: str, name: str, uid: str) -> dict[str, Any]:
    return {
        "apiVersion": API_VERSION,
        "kind": kind,
        "name": name,
        "uid": uid,
        "controller": True,
        "blockOwnerDeletion": True,
    }


def _object(backend: InferenceBackend, api_version: str, kind: str, **content: Any) -> Manifest:
    meta = backend.metadata
    return {
        "apiVersion": api_version,
        "kind": kind,
        "metadata": {
            "name": names.child(meta.name),
            "namespace": meta.namespace,
            "labels": _labels(backend),
            "ownerReferences": [owner_reference("InferenceBackend", meta.name, meta.uid)],
        },
        **content,
    }


def _service_spec(backend: InferenceBackend) -> dict[str, Any]:
    return {
        "clusterIP": "None",
        "selector": selector(backend),
        "ports": [
            {"name": "api", "port": API_PORT, "targetPort": "api", "protocol": "TCP"},
            {"name": "admin", "port": ADMIN_PORT, "targetPort": "admin", "protocol": "TCP"},
        ],
    }


def _deployment_spec(backend: InferenceBackend, defaults: Defaults, config: str) -> dict[str, Any]:
    return {
        "replicas": backend.spec.replicas,
        "selector": {"matchLabels": selector(backend)},
        "revisionHistoryLimit": 1,
        "progressDeadlineSeconds": 3600,
        "strategy": _strategy(backend),
        "template": {
            "metadata": {
                "labels": _labels(backend),
                "annotations": {"sluice.dev/config-digest": names.digest(config, 16)},
            },
            "spec": _pod_spec(backend, defaults),
        },
    }


def _strategy(backend: InferenceBackend) -> dict[str, Any]:
    if not replaces_in_place(backend):
        return {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0}}
    if backend.spec.replicas <= 1:
        return {"type": "Recreate"}
    return {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 0, "maxUnavailable": 1}}


def _pod_spec(backend: InferenceBackend, defaults: Defaults) -> dict[str, Any]:
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
