"""/etc/sluice/backend.json: what this pod loads and how it runs; docs/contracts/backend.schema.json as a

type.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Annotated, Any, Literal

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from sluice_runtime.podconfig import dotted

Positive = Annotated[int, Field(ge=1)]


class BackendInvalid(ValueError):
    """backend.json is missing or wrong; the message names file and field."""

    reason = "InvalidConfig"


class _Model(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, populate_by_name=True)


class ModelSpec(_Model):
    path: str | None = None
    repo: str | None = None
    revision: str | None = None
    file: str | None = None

    @model_validator(mode="after")
    def _one_source(self) -> ModelSpec:
        if (self.path is None) == (self.repo is None):
            raise ValueError("give exactly one of path and repo")
        return self


class SpeculationSpec(_Model):
    method: Literal["Suffix", "Draft"]
    num_tokens: Annotated[int, Field(ge=1, le=16)] = Field(default=4, alias="numTokens")
    draft: ModelSpec | None = None

    @model_validator(mode="after")
    def _draft_with_its_method(self) -> SpeculationSpec:
        if (self.method == "Draft") != (self.draft is not None):
            raise ValueError("a draft model comes with method Draft, and only with it")
        return self


class EngineSpec(_Model):
    dtype: Literal["bfloat16", "float16", "float32"]
    quantization: Literal["None", "Int8", "Int4", "W8A8"]
    kv_cache_dtype: Literal["Auto", "Int8", "Fp8"] = Field(default="Auto", alias="kvCacheDtype")
    max_model_len: Positive = Field(alias="maxModelLen")
    max_num_seqs: Positive = Field(alias="maxNumSeqs")
    max_batch_tokens: Positive = Field(alias="maxBatchTokens")
    block_size: Positive = Field(alias="blockSize")
    kv_cache_bytes: Positive = Field(alias="kvCacheBytes")
    kv_offload_bytes: Positive | None = Field(default=None, alias="kvOffloadBytes")
    max_queue: Annotated[int, Field(ge=0)] = Field(alias="maxQueue")
    num_threads: Positive | None = Field(default=None, alias="numThreads")
    tensor_parallel: Annotated[int, Field(ge=1, le=16)] = Field(default=1, alias="tensorParallel")
    speculation: SpeculationSpec | None = None

    @model_validator(mode="after")
    def _draft_on_one_rank(self) -> EngineSpec:
        drafts = self.speculation is not None and self.speculation.draft is not None
        if drafts and self.tensor_parallel > 1:
            raise ValueError("speculation by a draft model does not go with tensorParallel above 1")
        return self


class BackendSpec(_Model):
    name: Annotated[str, Field(min_length=1)]
    model: ModelSpec
    engine: EngineSpec

    @property
    def settings_digest(self) -> str:
        """Over the engine's settings, the number of threads aside: that follows the machine; and where a
        draft lies: what it holds is told apart by the model's digest."""
        left_out: dict[str, Any] = {"num_threads": True, "speculation": {"draft"}}
        return digest(self.engine.model_dump(by_alias=True, exclude=left_out))


def digest(body: object) -> str:
    """`sha256:…` over canonical JSON."""
    data = json.dumps(body, sort_keys=True, separators=(",", ":")).encode()
    return f"sha256:{hashlib.sha256(data).hexdigest()}"


def read_backend(path: Path) -> BackendSpec:
    """Read and validate; BackendInvalid says what is wrong where."""
    try:
        return BackendSpec.model_validate_json(path.read_bytes())
    except OSError as e:
        raise BackendInvalid(f"{path}: {e.strerror or 'can not be read'}") from None
    except ValidationError as e:
        first = e.errors(include_url=False, include_input=False)[0]
        at = dotted(first["loc"])
        raise BackendInvalid(f"{path}: {at + ': ' if at else ''}{first['msg']}") from None
