"""What one InferenceBackend can get wrong beyond its schema: quantities, sources, what does not go together.

Invariant: each problem names its field; what needs more than the object itself to be judged is not here.
"""

from __future__ import annotations

from ..api.backend import InferenceBackend, ModelSource, SpeculationMethod
from .conditions import Problem
from .quantity import num_bytes, parse


def backend_problems(backend: InferenceBackend) -> tuple[Problem, ...]:
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
