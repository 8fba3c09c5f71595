"""Models: found, inspected, loaded, identified. safetensors or GGUF only, never pickle, never remote code.

A checkpoint is inspected before anything reads it: formats, code it would like to run, truncated or missing
files, and whether its weights fit into the memory that the pod has left. Each finding is a `ModelError` with
a reason that fits a Kubernetes condition. Invariant: all that comes before torch and transformers are
imported, which takes ten seconds; a pod without a model says so in one.

`python -m sluice_runtime.models export` turns a GGUF into an ordinary Hugging Face directory.
"""

from sluice_runtime.models.checkpoint import Checkpoint, Dtype, ModelSource, inspect
from sluice_runtime.models.conversion import export
from sluice_runtime.models.digest import identity
from sluice_runtime.models.errors import (
    CheckpointCorrupt,
    ModelError,
    ModelNotFound,
    OutOfMemory,
    UnsafeFormat,
    UnsupportedModel,
)
from sluice_runtime.models.loader import LoadedModel, inspect_and_weigh, load

__all__ = [
    "Checkpoint",
    "CheckpointCorrupt",
    "Dtype",
    "LoadedModel",
    "ModelError",
    "ModelNotFound",
    "ModelSource",
    "OutOfMemory",
    "UnsafeFormat",
    "UnsupportedModel",
    "export",
    "identity",
    "inspect",
    "inspect_and_weigh",
    "load",
]
