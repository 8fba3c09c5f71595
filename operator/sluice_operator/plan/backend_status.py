"""What is true of a backend: which pods are endpoints, and conditions that say what to do next.

Invariant: ``Ready=True`` means that a request sent to the gateway now would reach a pod at the recorded
identity. An ordered tuple of small rules finds why pods don't come up; the first match wins.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field
from datetime import datetime

from ..api.backend import Identity, InferenceBackend, InferenceBackendStatus
from . import backend as plan
from .conditions import Fact, Problem, merge, truth
from .observed import PodView, StreamView
from .ramp import advised_replicas
from .validate_backend import backend_problems

_MODEL_REASONS = {
    "ModelNotFound": "check spec.model, and that the volume, image or repository holds it",
    "CheckpointCorrupt": "the files don't load; fetch them again into a new backend",
    "UnsafeFormat": "only safetensors or GGUF are loaded; convert the checkpoint",
    "UnsupportedModel": "this architecture or file is not supported by the runtime image",
    "OutOfMemory": "raise spec.resources.limits.memory, or lower spec.engine.kvCacheMemory or maxModelLen, "
    "in a new backend",
    "OOMKilled": "the kernel killed it for its memory limit: raise spec.resources.limits.memory, or lower "
    "spec.engine.kvCacheMemory or maxModelLen, in a new backend",
}
_PULL_REASONS = (
    "ErrImagePull",
    "ImagePullBackOff",
    "InvalidImageName",
    "ErrImageNeverPull",
    "RegistryUnavailable",
)


OTHER_EVIDENCE = (
    "tell evidence of another version than this operator reads, so what they answer counts for no release; "
    "create an InferenceBackend of the same spec (its image, if it names one, of this operator's version) "
    "and name that in its place"
)
CREATING_S = 30
"""How long a pod may wait for its volumes before a person is told."""


@dataclass(frozen=True)
class PodState:
    """A pod together with what its admin stream tells."""

    pod: PodView
    stream: StreamView = field(default_factory=StreamView)


@dataclass(frozen=True)
class Seen:
    """All that the status of a backend follows from."""

    pods: tuple[PodState, ...] = ()
    num_endpoints: int = 0
    """Endpoints that the gateway has acknowledged."""
    gateway: bool = True
    """Whether a gateway is connected."""
    acked: bool = False
    """Whether the gateway has acknowledged the backend's cluster."""
    now: str = ""
    request_rate: float = 0.0
    """Requests/s that it got in the last minute; 0: unknown."""
    """RFC 3339; only for what has lasted too long."""
    image: str = ""
    """Image in the Deployment; empty: there is none yet."""
    failure: str = ""
    """Why the Deployment's pods are not even created."""
    problem: Problem | None = None
    """What kept the operator from applying the objects, such as a name in use."""


def record_identity(backend: InferenceBackend, pods: Iterable[PodState], now: str) -> Identity | None:
    """The digest on record; the oldest pod that tells one sets it, once."""
    if backend.status.identity is not None:
        return backend.status.identity
    told = sorted(
        (p for p in pods if p.stream.identity and not p.pod.terminating),
        key=lambda p: (p.pod.created, p.pod.name),
    )
    return Identity(digest=told[0].stream.identity, recorded_at=now) if told else None


def is_fit(state: PodState, digest: str) -> bool:
    """Whether the pod may get traffic as far as the pod itself goes: it is up, stays up, and is what it
    should be."""
    pod = state.pod
    return bool(pod.ready and not pod.terminating and pod.ip and digest and state.stream.identity == digest)


def live(pods: Iterable[PodState]) -> list[PodState]:
    """Pods that count: neither on their way out nor evicted."""
    return [p for p in pods if not p.pod.terminating and p.pod.phase not in ("Succeeded", "Failed")]


def _mismatch(seen: Seen, digest: str) -> Problem | None:
    wrong = [
        p.pod.name for p in live(seen.pods) if digest and p.stream.identity and p.stream.identity != digest
    ]
    if not wrong:
        return None
    return Problem(
        "IdentityMismatch",
        f"{len(wrong)} pod(s), {wrong[0]} among them, loaded something else than the recorded {digest[:19]}… "
        "and get no "
        "traffic; what answers is immutable: restore the model's files or image, or create a new "
        "InferenceBackend",
    )


def _model_failure(seen: Seen, digest: str) -> Problem | None:
    for state in live(seen.pods):
        step = _MODEL_REASONS.get(state.pod.failure_reason)
        if step:
            told = f": {state.pod.failure_message}" if state.pod.failure_message else ""
            return Problem(state.pod.failure_reason, f"pod {state.pod.name} ended{told}; {step}")
    return None


def _image(seen: Seen, digest: str) -> Problem | None:
    for state in live(seen.pods):
        if state.pod.waiting in _PULL_REASONS:
            return Problem(
                "ImagePullFailed",
                f"pod {state.pod.name}: {state.pod.waiting}: {state.pod.waiting_message}; "
                "check spec.image (or the operator's default) and pull credentials",
            )
        if state.pod.waiting in ("CreateContainerConfigError", "CreateContainerError", "RunContainerError"):
            return Problem(
                "ContainerNotCreated",
                f"pod {state.pod.name}: {state.pod.waiting}: {state.pod.waiting_message}",
            )
    return None


def _crash(seen: Seen, digest: str) -> Problem | None:
    for state in live(seen.pods):
        if state.pod.waiting == "CrashLoopBackOff" or (state.pod.failure_reason and state.pod.restarts > 0):
            told = state.pod.failure_message or f"exit code {state.pod.exit_code}"
            return Problem(
                "CrashLoop",
                f"pod {state.pod.name} restarted {state.pod.restarts} time(s), last reason "
                f"{state.pod.failure_reason or 'unknown'}: {told}; see `kubectl logs --previous`",
            )
    return None


def _refused(seen: Seen, digest: str) -> Problem | None:
    if not seen.failure:
        return None
    return Problem(
        "PodsRefused",
        f"the cluster creates no pod: {seen.failure}; see to the namespace's quota or pod security, or lower "
        "spec.resources or spec.replicas",
    )


def _unschedulable(seen: Seen, digest: str) -> Problem | None:
    for state in live(seen.pods):
        if state.pod.unschedulable:
            return Problem(
                "Unschedulable",
                f"pod {state.pod.name} fits on no node: {state.pod.unschedulable}; add nodes, or "
                "lower spec.resources, spec.accelerator or spec.replicas",
            )
    return None


def _mounting(seen: Seen, digest: str) -> Problem | None:
    for state in live(seen.pods):
        if state.pod.creating and seen.now and _seconds(state.pod.created, seen.now) > CREATING_S:
            return Problem(
                "ContainerCreating",
                f"pod {state.pod.name} on node {state.pod.node} has waited for its volumes for more than "
                f"{CREATING_S} s; see that what spec.model names exists there (directory, claim, token "
                "Secret), and "
                f"`kubectl describe pod {state.pod.name}`",
            )
    return None


def _unreadable(seen: Seen, digest: str) -> Problem | None:
    """A pod keeps its image as long as its backend lives, so an upgrade of the operator alone does this."""
    other = [p for p in live(seen.pods) if p.stream.unreadable]
    if not other:
        return None
    told = f"{len(other)} pod(s), {other[0].pod.name} among them (schema {other[0].stream.unreadable}),"
    return Problem("EvidenceUnreadable", f"{told} {OTHER_EVIDENCE}")


def _refuses(seen: Seen) -> Problem | None:
    """Of what no policy tells: what is refused of a configuration is told where that was made."""
    for state in live(seen.pods):
        told = state.stream.refused or state.stream.beside
        if told:
            return Problem(
                "ConfigurationRefused",
                f"pod {state.pod.name} does not take what this operator sends it: {told}; see that its image "
                "is of this operator's version",
            )
    return None


def _seconds(since: str, now: str) -> float:
    if not since:
        return 0.0
    return (datetime.fromisoformat(now) - datetime.fromisoformat(since)).total_seconds()


_RULES: tuple[Callable[[Seen, str], Problem | None], ...] = (
    _model_failure,
    _mismatch,
    _image,
    _crash,
    _refused,
    _unschedulable,
    _mounting,
    _unreadable,
)


def why_not_up(seen: Seen, digest: str) -> Problem | None:
    """The first reason that a person must see to, or None while pods are merely on their way."""
    return next((p for rule in _RULES if (p := rule(seen, digest))), None)


def _ready(backend: InferenceBackend, seen: Seen, stalled: Problem | None) -> Fact:
    def no(reason: str, message: str) -> Fact:
        return Fact("Ready", "False", reason, message)

    if seen.num_endpoints > 0 and seen.acked and seen.gateway:
        return Fact(
            "Ready", "True", "Routable", f"{seen.num_endpoints} endpoint(s) that the gateway reaches now"
        )
    if stalled is not None:
        return no(stalled.reason, stalled.text())
    if backend.spec.replicas == 0:
        return no("ScaledToZero", "spec.replicas is 0, so nobody answers; raise it")
    if not seen.gateway:
        return no(
            "GatewayNotConnected", "no gateway is connected to the operator; look at the gateway's Deployment"
        )
    if not any(p.pod.ready for p in live(seen.pods)):
        return no(
            "PodsNotReady",
            f"{len(live(seen.pods))} of {backend.spec.replicas} pod(s) exist, none is ready yet",
        )
    if seen.num_endpoints == 0:
        return no(
            "PodsNotVerified",
            "pods are ready, but have not yet told what they loaded or don't hold their configuration yet",
        )
    return no("GatewayNotAcknowledged", "the gateway has not acknowledged the cluster yet")


def status(backend: InferenceBackend, seen: Seen, now: str) -> InferenceBackendStatus:
    """The whole status that is true now."""
    invalid = backend_problems(backend)
    identity = record_identity(backend, seen.pods, now)
    digest = identity.digest if identity else ""
    complete = seen.num_endpoints >= backend.spec.replicas
    stalled = (
        seen.problem or (invalid[0] if invalid else None) or (None if complete else why_not_up(seen, digest))
    )
    surplus = len([p for p in seen.pods if p.pod.terminating])
    going = not complete or surplus > 0 or len(live(seen.pods)) != backend.spec.replicas
    facts = [
        _ready(backend, seen, stalled),
        Fact(
            "Reconciling",
            truth(going),
            "Progressing" if going else "AsDesired",
            f"{seen.num_endpoints} of {backend.spec.replicas} replica(s) routable"
            + (f", {surplus} ending" if surplus else ""),
        ),
        Fact(
            "Stalled",
            truth(stalled is not None),
            stalled.reason if stalled else "NoProblem",
            stalled.text() if stalled else "nothing to see to",
        ),
    ]
    facts.extend(_particulars(backend, seen, digest))
    return InferenceBackendStatus(
        observed_generation=backend.metadata.generation,
        replicas=len(live(seen.pods)),
        ready_replicas=seen.num_endpoints,
        selector=plan.selector_text(backend),
        image=backend.status.image or seen.image,
        identity=identity,
        capacity=backend.status.capacity,
        advised_replicas=advised_replicas(seen.request_rate, backend.status.capacity, digest),
        conditions=merge(backend.status.conditions, facts, generation=backend.metadata.generation, now=now),
    )


def _particulars(backend: InferenceBackend, seen: Seen, digest: str) -> Sequence[Fact]:
    facts = []
    if (wrong := _mismatch(seen, digest)) is not None:
        facts.append(Fact("IdentityMismatch", "True", wrong.reason, wrong.message))
    for other in (_unreadable(seen, digest), _refuses(seen)):
        if other is not None:
            facts.append(Fact(other.reason, "True", other.reason, other.message))
    if plan.replaces_in_place(backend):
        facts.append(
            Fact(
                "ReplacesInPlace",
                "True",
                "NoRoomToSurge",
                "an old pod ends before its successor starts, since accelerators leave no room for both; "
                "with one "
                "replica nobody answers meanwhile",
            )
        )
    return facts
