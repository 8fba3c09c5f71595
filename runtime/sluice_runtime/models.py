"""Loading of models: safetensors or GGUF only, never pickle, never remote code; and the digest of what was loaded.

Invariant: `identity` covers every byte and setting that can change an answer, so equal identities give equal answers.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    from sluice_runtime.engine.tokenizer import Tokenizer


class ModelError(Exception):
    """A model that can't be served. `reason` is machine-readable (CamelCase, fit for a Kubernetes condition)."""

    reason = "ModelError"


class ModelNotFound(ModelError):
    reason = "ModelNotFound"


class CheckpointCorrupt(ModelError):
    reason = "CheckpointCorrupt"


class UnsafeFormat(ModelError):
    reason = "UnsafeFormat"


class OutOfMemory(ModelError):
    reason = "OutOfMemory"


class UnsupportedModel(ModelError):
    reason = "UnsupportedModel"


@dataclass(frozen=True)
class ModelSource:
    """What to load: `path` (directory or GGUF file) or `repo` at `revision`, and how."""

    path: Path | None = None
    repo: str | None = None
    revision: str | None = None
    gguf_file: str | None = None
    dtype: Literal["bfloat16", "float32", "float16"] = "bfloat16"
    quantization: Literal["int8"] | None = None
    chat_template: Path | None = None
    device: str = "cpu"


@dataclass(frozen=True)
class LoadedModel:
    """A model in memory. `identity` is `sha256:…` over files and settings; `weight_bytes` what the weights occupy."""

    model: Any
    tokenizer: Tokenizer
    identity: str
    weight_bytes: int
    max_position_embeddings: int
    eos_token_ids: frozenset[int]
    source: ModelSource


def load(source: ModelSource) -> LoadedModel:
    """Load a model for inference. Raises a `ModelError` subclass; never executes code from the checkpoint."""
    raise NotImplementedError


def identity(path: Path, settings: dict[str, str] | None = None) -> str:
    """`sha256:…` over names, sizes and contents of the files that loading `path` reads, and `settings`."""
    raise NotImplementedError
