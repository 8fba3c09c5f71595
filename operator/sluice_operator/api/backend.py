"""InferenceBackend: one immutable, routable version of a model with its engine settings.

What changes answers is immutable (CEL rules on the spec), so nothing reaches users by an edit in
place: a new version is a new object. Replicas, cost, owner, scheduling and the card may change.
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, ClassVar, Literal

from pydantic import ConfigDict, Field
from pydantic.config import JsonDict
from typing_extensions import TypedDict

from .common import (
    MAX_SAFE_INTEGER,
    Condition,
    Cpu,
    DataClass,
    Decimal,
    DnsLabel,
    Metadata,
    Quantity,
    SecretKeyRef,
    Spec,
    TokenCaps,
    named,
)
from .declare import (
    AGE,
    MESSAGE,
    READY,
    REASON,
    SET,
    Cel,
    Column,
    Kind,
    exactly_one,
    keyed_by,
    obeys,
    unchanged,
    validations,
)

NEW_BACKEND = "create a new InferenceBackend and let a RoutePolicy's rollout bring it in"
"""What to do instead of editing what changes answers."""

MAX_NAME = 52
"""Characters of a backend's name; names of its children add to it and must stay under 63."""
LabelKey = Annotated[str, Field(min_length=1, max_length=317)]
LabelValue = Annotated[str, Field(max_length=63)]
NO_PARENT = validations(
    Cel("!self.split('/').exists(part, part == '..')", "path must stay inside its source: remove '..'")
)


def _at_least(field: str, least: str) -> JsonDict:
    """A plain number counts bytes, so a forgotten unit gives something absurdly small."""
    return validations(
        Cel(
            f"quantity(string(self)).compareTo(quantity('{least}')) >= 0",
            f"{field} must be at least {least}: was the unit (Mi, Gi) forgotten?",
        )
    )


def _within_limit(resource: str) -> Cel:
    sides = ("requests", "limits")
    both = " && ".join(f"has(self.{side}) && has(self.{side}.{resource})" for side in sides)
    request, limit = (f"quantity(string(self.{side}.{resource}))" for side in sides)
    return Cel(
        f"!({both}) || {request}.compareTo({limit}) <= 0",
        f"requests.{resource} must not exceed limits.{resource}: lower the request or raise the limit",
        ".requests",
    )


class DType(StrEnum):
    """Element type in which weights and activations are held."""

    BFLOAT16 = "bfloat16"
    FLOAT16 = "float16"
    FLOAT32 = "float32"


class Quantization(StrEnum):
    """What is done to the linear layers after loading; part of the backend's identity."""

    NONE = "None"
    INT8 = "Int8"
    INT4 = "Int4"
    W8A8 = "W8A8"


class KvCacheDtype(StrEnum):
    """What the KV cache holds; part of the backend's identity."""

    AUTO = "Auto"
    INT8 = "Int8"
    FP8 = "Fp8"


class UpdateStrategy(StrEnum):
    """How pods are replaced."""

    AUTO = "Auto"
    SURGE = "Surge"
    REPLACE = "Replace"


class HuggingFaceSource(Spec):
    """A Hugging Face repository at a revision; downloaded by the pod."""

    repo: str = Field(pattern=r"^[A-Za-z0-9._-]+/[A-Za-z0-9._-]+$", max_length=200)
    """Repository id, owner/name."""
    revision: str = Field(min_length=1, max_length=100)
    """Commit to load. A branch is allowed, but once it has moved, pods that load it are refused by digest."""
    token_secret: SecretKeyRef | None = None
    """Access token for a gated repository."""


class VolumeClaimSource(Spec):
    """A directory on a PersistentVolumeClaim in the same namespace, mounted read-only."""

    claim_name: DnsLabel
    """Name of the claim."""
    path: str = Field(default="", max_length=500, pattern=r"^([^/].*)?$", json_schema_extra=NO_PARENT)
    """Directory of the model inside the volume, relative."""


class ImageSource(Spec):
    """An OCI image that holds the model's files; an init container copies them, so it needs `cp`."""

    reference: str = Field(min_length=1, max_length=500)
    """Image reference, best by digest."""
    path: str = Field(default="/model", max_length=500, pattern=r"^/.*$", json_schema_extra=NO_PARENT)
    """Directory of the model inside the image."""


class HostPathSource(Spec):
    """A directory of the node, mounted read-only. For test clusters and nodes with baked-in models."""

    path: str = Field(min_length=1, max_length=500, pattern=r"^/.*$", json_schema_extra=NO_PARENT)
    """Absolute directory on the node."""


class ModelSource(Spec):
    """Where the model comes from: exactly one source. Safetensors or GGUF, never pickles or remote code."""

    model_config = obeys(
        Cel(
            exactly_one("huggingFace", "persistentVolumeClaim", "image", "hostPath"),
            "model needs exactly one source: give one of huggingFace, persistentVolumeClaim, image, hostPath",
        )
    )

    hugging_face: HuggingFaceSource | None = None
    """A Hugging Face repository."""
    persistent_volume_claim: VolumeClaimSource | None = None
    """A volume claim."""
    image: ImageSource | None = None
    """An OCI image."""
    host_path: HostPathSource | None = None
    """A directory of the node."""
    gguf_file: str | None = Field(
        default=None, max_length=200, pattern=r"^[^/].*\.gguf$", json_schema_extra=NO_PARENT
    )
    """File to load inside the source, for GGUF; absent means safetensors."""


class SpeculationMethod(StrEnum):
    """Who guesses what comes next."""

    SUFFIX = "Suffix"
    DRAFT = "Draft"


class Speculation(Spec):
    """Speculative decoding: tokens are guessed and then checked together; answers stay what they are.
    Guessing goes on only while it is faster."""

    model_config = obeys(
        Cel(
            "(self.method == 'Draft') == has(self.draft)",
            "method Draft needs a draft model, and Suffix takes none: give draft, or remove it",
            ".draft",
        )
    )

    method: SpeculationMethod
    """Suffix guesses from the request's own text, Draft by a small model with the same vocabulary."""
    num_tokens: int = Field(default=4, ge=1, le=16)
    """Most tokens that are guessed for a step of a request."""
    draft: ModelSource | None = None
    """The draft model; its KV takes a part of kvCacheMemory."""


class EngineSettings(Spec):
    """How the engine runs the model. All of it is part of the backend's identity."""

    model_config = obeys(
        Cel(
            "!has(self.tensorParallel) || self.tensorParallel == 1 || self.quantization == 'None'",
            "quantization must be None with tensorParallel above 1: it is made of whole weights",
            ".quantization",
        ),
        Cel(
            "!has(self.tensorParallel) || self.tensorParallel == 1"
            " || !has(self.speculation) || self.speculation.method != 'Draft'",
            "method Draft does not go with tensorParallel above 1: use Suffix",
            ".speculation.method",
        ),
    )

    dtype: DType = DType.BFLOAT16
    """Element type of weights and activations."""
    quantization: Quantization = Quantization.NONE
    """At load: Int8 or Int4 weights (on a CPU their products round activations to 8 bits, each 32 by a scale
    of their own), or W8A8, Int8 weights and activations. None for quantised files."""
    kv_cache_dtype: KvCacheDtype = KvCacheDtype.AUTO
    """Auto is dtype; Int8 and Fp8 (e4m3) keep a byte a value, and a scale for each token of each head."""
    max_model_len: int = Field(default=2048, ge=16, le=1_048_576)
    """Longest context, prompt and answer together, in tokens."""
    max_num_seqs: int = Field(default=16, ge=1, le=1024)
    """Sequences that run at once."""
    max_batch_tokens: int = Field(default=512, ge=1, le=65_536)
    """Token budget of one step; longer prompts are prefilled in chunks."""
    block_size: int | None = Field(default=None, ge=1, le=1024)
    """Tokens in one KV block; absent: 16, or with an accelerator 256, which it must be a multiple of."""
    kv_cache_memory: Quantity = Field(default="256Mi", json_schema_extra=_at_least("kvCacheMemory", "1Mi"))
    """Memory for the paged KV cache."""
    kv_offload_memory: Quantity | None = Field(
        default=None, json_schema_extra=_at_least("kvOffloadMemory", "1Mi")
    )
    """Host memory for what the prefix cache evicts; absent: none. Of use with an accelerator."""
    max_queue: int = Field(default=64, ge=0, le=10_000)
    """Requests that may wait; one more gets 429."""
    num_threads: int | None = Field(default=None, ge=1, le=256)
    """CPU threads; absent: from the CPU limit."""
    tensor_parallel: int = Field(default=1, ge=1, le=16)
    """Processes of a pod that share the model, each with an accelerator of its own; must divide the model's
    heads."""
    speculation: Speculation | None = None
    """Speculative decoding; absent: none."""


class Accelerator(Spec):
    """Accelerators of one pod."""

    resource: str = Field(default="nvidia.com/gpu", max_length=100, pattern=r"^[a-z0-9.-]+/[A-Za-z0-9._-]+$")
    """Extended resource name."""
    count: int = Field(default=1, ge=1, le=16)
    """How many one pod asks for."""


class ResourceList(Spec):
    """CPU and memory of one pod."""

    model_config = obeys(
        Cel(
            "!has(self.cpu) || quantity(string(self.cpu)).isGreaterThan(quantity('0'))",
            "cpu must be more than 0: give cores, such as 500m or 2",
            ".cpu",
        ),
    )

    cpu: Cpu | None = None
    """CPU, in cores."""
    memory: Quantity | None = Field(default=None, json_schema_extra=_at_least("memory", "16Mi"))
    """Memory, in bytes."""


class Resources(Spec):
    """Requests and limits of one pod."""

    model_config = obeys(_within_limit("cpu"), _within_limit("memory"))

    requests: ResourceList = Field(default_factory=ResourceList)
    """What the scheduler reserves."""
    limits: ResourceList = Field(default_factory=ResourceList)
    """What the pod may use at most."""


class Toleration(TypedDict, total=False):
    """A core/v1 toleration, handed on to the pod as it is; so a mapping, in Python too."""

    __pydantic_config__ = ConfigDict(extra="forbid", use_attribute_docstrings=True)  # type: ignore[misc]

    key: Annotated[str, Field(max_length=316)]
    """Key of the taint; absent with operator Exists: every taint."""
    operator: Literal["Exists", "Equal"]
    """Equal compares key and value, Exists the key alone; absent: Equal."""
    value: Annotated[str, Field(max_length=63)]
    """Value of the taint, with operator Equal."""
    effect: Literal["NoSchedule", "PreferNoSchedule", "NoExecute"]
    """Effect of the taint; absent: all effects."""
    tolerationSeconds: Annotated[int, Field(ge=0, le=MAX_SAFE_INTEGER)]
    """How long a NoExecute taint is tolerated; absent: for ever."""


class Scheduling(Spec):
    """Where pods may run."""

    node_selector: dict[LabelKey, LabelValue] = Field(default_factory=dict, max_length=32)
    """Labels a node must have."""
    tolerations: list[Toleration] = Field(default_factory=list, max_length=16)
    """core/v1 tolerations."""
    runtime_class_name: DnsLabel | None = None
    """RuntimeClass, such as nvidia."""
    priority_class_name: DnsLabel | None = None
    """PriorityClass."""
    shared_memory: Quantity | None = None
    """Size of /dev/shm, for tensor parallelism."""


class Fitness(Spec):
    """What the backend may serve; a route that breaks this is refused before it takes traffic."""

    model_config = obeys(
        Cel(
            "!has(self.allowedTasks) || !has(self.forbiddenTasks)"
            " || !self.allowedTasks.exists(task, task in self.forbiddenTasks)",
            "forbiddenTasks holds a task that allowedTasks holds too: remove it from one of them",
            ".forbiddenTasks",
        )
    )

    allowed_tasks: list[DnsLabel] | None = Field(default=None, max_length=64, json_schema_extra=SET)
    """Tasks it may serve; absent: any but the forbidden."""
    forbidden_tasks: list[DnsLabel] = Field(default_factory=list, max_length=64, json_schema_extra=SET)
    """Tasks it must never serve."""
    data_classes: list[DataClass] = Field(
        default_factory=lambda: [DataClass.PUBLIC, DataClass.INTERNAL], max_length=4
    )
    """Data classes it may see."""
    tenants: list[DnsLabel] | None = Field(default=None, max_length=256, json_schema_extra=SET)
    """Tenants it may serve; absent: any."""
    region: str | None = Field(default=None, max_length=63)
    """Where it runs, for people and policies."""


class Cost(Spec):
    """What a replica costs, for cost per task."""

    per_replica_hour: Decimal
    """Price of one replica for one hour, idle or busy."""
    currency: str = Field(default="EUR", min_length=3, max_length=3)
    """ISO 4217 code."""


class ModelCard(Spec):
    """What people should know of this version."""

    summary: str = Field(default="", max_length=2000)
    """In a few sentences: what it is and what changed."""
    url: str | None = Field(default=None, max_length=500, pattern=r"^https?://")
    """The full card."""
    quantization: str = Field(default="", max_length=500)
    """Method, calibration set and evaluation set, where weights are quantised."""


class InferenceBackendSpec(Spec):
    """Desired state of one model version."""

    model_config = obeys(
        unchanged("model", optional=False, advice=NEW_BACKEND),
        unchanged("engine", optional=False, advice=NEW_BACKEND),
        unchanged("image", optional=True, advice=NEW_BACKEND),
        unchanged("args", optional=True, advice=NEW_BACKEND),
        unchanged("resources", optional=True, advice=NEW_BACKEND),
        unchanged("accelerator", optional=True, advice=NEW_BACKEND),
        Cel(
            "!has(self.accelerator) || (has(self.args) && self.args.size() > 0)"
            " || self.accelerator.count == self.engine.tensorParallel",
            "accelerator.count must equal engine.tensorParallel: each process computes on one accelerator,"
            " and others would stand idle",
            ".accelerator.count",
        ),
        Cel(
            "!has(self.accelerator) || (has(self.args) && self.args.size() > 0)"
            " || !has(self.engine.blockSize) || self.engine.blockSize % 256 == 0",
            "engine.blockSize must be a multiple of 256 with an accelerator: its attention kernel reads no"
            " other blocks",
            ".engine.blockSize",
        ),
    )

    model: ModelSource
    """Where the model comes from. Immutable."""
    engine: EngineSettings = Field(default_factory=EngineSettings)
    """How the engine runs it. Immutable."""
    image: str | None = Field(default=None, min_length=1, max_length=500)
    """Runtime image; absent: the operator's default at creation. Immutable."""
    args: list[Annotated[str, Field(max_length=1000)]] = Field(default_factory=list, max_length=32)
    """Arguments in place of the runtime image's own, for images that are not Sluice's. Immutable."""
    replicas: int = Field(default=1, ge=0, le=1000)
    """Pods wanted; autoscalers use the scale subresource."""
    resources: Resources = Field(default_factory=Resources)
    """CPU and memory of a pod. Immutable, since batch limits and speed follow from them."""
    accelerator: Accelerator | None = None
    """GPUs of a pod; absent: CPU. Immutable."""
    scheduling: Scheduling = Field(default_factory=Scheduling)
    """Where pods may run."""
    update_strategy: UpdateStrategy = UpdateStrategy.AUTO
    """Surge starts a new pod before an old one ends, Replace ends it first, Auto surges if there is room."""
    fitness: Fitness = Field(default_factory=Fitness)
    """What it may serve."""
    limits: TokenCaps = Field(default_factory=TokenCaps)
    """Bounds of a request, beside engine.maxModelLen. In force in seconds, without a restart."""
    cost: Cost | None = None
    """What it costs."""
    owner: str = Field(default="", max_length=200)
    """Who answers for it."""
    card: ModelCard = Field(default_factory=ModelCard)
    """What people should know of it."""
    termination_grace_period_seconds: int = Field(default=120, ge=5, le=3600)
    """How long a stopping pod may finish its streams."""


class Identity(Spec):
    """Digest of what pods really loaded."""

    digest: str
    """sha256 over model files, settings and runtime."""
    recorded_at: str
    """RFC 3339 time of the first pod that reported it."""


class Capacity(Spec):
    """What one replica carried within the SLO, measured by `sluice calibrate`: not where it collapsed."""

    safe_requests_per_second: Decimal
    """Highest rate at which the 95th percentiles stayed within the SLO, a replica."""
    mean_seconds: Decimal
    """Mean time of a request at that rate."""
    concurrency: Decimal
    """Requests in flight at that rate: rate times mean time (Little's law)."""
    slo: str = ""
    """The SLO that it was measured at, for people."""
    shape: str = ""
    """Prompt and answer lengths that were sent, for people."""
    measured_at: str = ""
    """RFC 3339."""
    identity: str = ""
    """Digest of what was measured; of another one it says nothing."""


class InferenceBackendStatus(Spec):
    """Observed state, kstatus style."""

    observed_generation: int = 0
    """Generation that this status speaks of."""
    replicas: int = 0
    """Pods that exist."""
    ready_replicas: int = 0
    """Pods that the gateway can reach now, at the recorded identity."""
    selector: str = ""
    """Label selector of the pods, for the scale subresource."""
    image: str = ""
    """Runtime image of the pods, recorded at creation: a later default of the operator changes no backend."""
    identity: Identity | None = None
    """What the first pod loaded; pods that differ are never endpoints."""
    capacity: Capacity | None = None
    """Tested safe throughput; absent: not calibrated."""
    advised_replicas: int = 0
    """Replicas for recent traffic at the tested safe throughput, with a quarter to spare; 0: unknown."""
    conditions: list[Condition] = Field(default_factory=list, json_schema_extra=keyed_by("type"))
    """Ready, Reconciling, Stalled, and particulars."""


class InferenceBackend(Spec):
    """One immutable, routable version of a model."""

    KIND: ClassVar = Kind(
        plural="inferencebackends",
        short_names=("ib",),
        columns=(
            READY,
            REASON,
            Column("Replicas", ".spec.replicas", "Pods wanted.", "integer"),
            Column("Available", ".status.readyReplicas", "Pods that the gateway can reach now.", "integer"),
            AGE,
            Column("DType", ".spec.engine.dtype", "Element type of weights and activations.", priority=1),
            Column(
                "Quantization",
                ".spec.engine.quantization",
                "Weight quantisation applied at load.",
                priority=1,
            ),
            Column("Owner", ".spec.owner", "Who answers for it.", priority=1),
            Column("Digest", ".status.identity.digest", "What its pods really loaded.", priority=1),
            MESSAGE,
        ),
        scale={
            "specReplicasPath": ".spec.replicas",
            "statusReplicasPath": ".status.replicas",
            "labelSelectorPath": ".status.selector",
        },
    )
    model_config = obeys(named(MAX_NAME))

    metadata: Metadata
    spec: InferenceBackendSpec
    status: InferenceBackendStatus = Field(default_factory=InferenceBackendStatus)
