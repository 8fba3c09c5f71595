"""/etc/sluice/backend.json: what this pod loads and how it runs; docs/contracts/backend.schema.json as a

type.
"""

from __future__ import annotations

import hashlib
import json
from pathlib import Path
from typing import Annotated, Literal

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


class EngineSpec(_Model):
    dtype: Literal["bfloat16", "float16", "float32"]
    quantization: Literal["None", "Int8"]
    max_model_len: Positive = Field(alias="maxModelLen")
    max_num_seqs: Positive = Field(alias="maxNumSeqs")
    max_batch_tokens: Positive = Field(alias="maxBatchTokens")
    block_size: Positive = Field(alias="blockSize")
    kv_cache_bytes: Positive = Field(alias="kvCacheBytes")
    max_queue: Annotated[int, Field(ge=0)] = Field(alias="maxQueue")
    num_threads: Positive | None = Field(default=None, alias="numThreads")


class BackendSpec(_Model):
    name: Annotated[str, Field(min_length=1)]
    model: ModelSpec
    engine: EngineSpec

    @property
    def settings_digest(self) -> str:
        """Over the engine's settings, the number of threads aside: that follows the machine."""
        return digest(self.engine.model_dump(by_alias=True, exclude={"num_threads"}))


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
