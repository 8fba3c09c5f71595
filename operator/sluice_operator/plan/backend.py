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
    InferenceBackend,
    KvCacheDtype,
    ModelSource,
    Speculation,
    UpdateStrategy,
)
from ..api.common import API_VERSION
from . import names
from .observed import ADMIN_PORT, API_PORT
from .pod import DRAFT_DIR, MODEL_DIR, Defaults, pod_spec
from .quantity import num_bytes

Manifest = dict[str, Any]


@dataclass(frozen=True)
class Running:
    """What the backend's Deployment has already of what an installation decides."""

    image: str = ""
    image_pull_policy: str = ""


def runtime_image(backend: InferenceBackend, running: Running, defaults: Defaults) -> str:
    """The image that its pods run: the spec's, else the recorded one (so that a foreign edit of the
    Deployment is undone, and a lost Deployment comes back as it was), else what runs, else the default."""
    return backend.spec.image or backend.status.image or running.image or defaults.image


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
            "spec": pod_spec(backend, defaults),
        },
    }


def _strategy(backend: InferenceBackend) -> dict[str, Any]:
    if not replaces_in_place(backend):
        return {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 1, "maxUnavailable": 0}}
    if backend.spec.replicas <= 1:
        return {"type": "Recreate"}
    return {"type": "RollingUpdate", "rollingUpdate": {"maxSurge": 0, "maxUnavailable": 1}}
