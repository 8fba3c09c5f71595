"""Where a model's files are and whether they may be read: everything that can be said without torch.

Invariant: nothing here imports torch or transformers, or executes what a checkpoint brings. What has passed
is a `Checkpoint`; its weights may still not fit its configuration, which shows only on loading.
"""

from __future__ import annotations

import json
import struct
from collections.abc import Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, Literal

from sluice_runtime.engine.machine import memory_available
from sluice_runtime.models.errors import CheckpointCorrupt, ModelNotFound, OutOfMemory, UnsafeFormat
from sluice_runtime.models.packing import CONFIG_NAMES

Dtype = Literal["bfloat16", "float32", "float16"]
Quantization = Literal["Int8", "Int4", "W8A8"]
DTYPE_BYTES: dict[str, int] = {"bfloat16": 2, "float16": 2, "float32": 4}
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl", "*.pickle", "*.msgpack", "*.h5")
# What transformers reads of a directory, beside the weights.
_SIDE_FILES = ("*.json", "*.jinja", "*.model", "*.txt", "*.tiktoken")
_CODE_KEYS = ("auto_map", "trust_remote_code", "custom_pipelines")


@dataclass(frozen=True)
class ModelSource:
    """What to load: `path` (a directory, or a GGUF file) or `repo` at `revision`; and how.

    `gguf_file` names the GGUF inside a directory or repo. `chat_template`: a Jinja file that replaces the
    model's own. `device` may be `auto`: CUDA where there is one. `num_ranks` processes hold a share of the
    weights each (sharding.py).
    """

    path: Path | None = None
    repo: str | None = None
    revision: str | None = None
    gguf_file: str | None = None
    dtype: Dtype = "bfloat16"
    quantization: Quantization | None = None
    chat_template: Path | None = None
    device: str = "cpu"
    num_ranks: int = 1

    @property
    def name(self) -> str:
        return str(self.path or self.repo)


@dataclass(frozen=True)
class Checkpoint:
    """A checkpoint on disk that has passed inspection. `gguf_reader` is its parsed header if it is a GGUF."""

    directory: Path
    gguf: Path | None
    weights: tuple[Path, ...]
    num_parameters: int
    gguf_reader: Any = field(default=None, repr=False, compare=False)

    def files(self) -> list[Path]:
        """All that loading reads."""
        return [*self.weights, *(() if self.gguf else side_files(self.directory))]


def inspect(source: ModelSource) -> Checkpoint:
    """Find and check a checkpoint without loading it. Raises a `ModelError` subclass."""
    directory, gguf_name = locate(source)
    _refuse_code(directory)
    if gguf_name is not None:
        gguf = directory / gguf_name
        reader, num_parameters = _read_gguf(gguf)
        return Checkpoint(directory, gguf, (gguf,), num_parameters, reader)
    if not (directory / "config.json").is_file():
        raise ModelNotFound(f"there is no config.json in {directory}")
    weights = tuple(safetensors_files(directory))
    return Checkpoint(directory, None, weights, sum(_safetensors_parameters(p) for p in weights))


def check_memory(checkpoint: Checkpoint, source: ModelSource) -> None:
    """Raise `OutOfMemory` unless the peak of loading fits. A GGUF passes through float32 on its way."""
    size = checkpoint.num_parameters * DTYPE_BYTES[source.dtype]
    config = read_config(checkpoint)
    if any(config.get(name) is not None for name in CONFIG_NAMES):
        # Words of packed integers: what is read is what the files hold.
        size = sum(path.stat().st_size for path in checkpoint.weights)
    if checkpoint.gguf is not None:
        size += checkpoint.num_parameters * (4 if source.dtype != "float32" else 0)
    left = memory_available()
    if size > left:
        raise OutOfMemory(
            f"loading needs about {size / 2**20:,.0f} MiB, and {left / 2**20:,.0f} MiB are left"
        )


def locate(source: ModelSource) -> tuple[Path, str | None]:
    """The directory of the checkpoint and the name of the GGUF in it, if it is one."""
    if (source.path is None) == (source.repo is None):
        raise ModelNotFound("give either a path or a repo, not both")
    path = source.path if source.path is not None else _download(source)
    if path.is_file():
        if path.suffix != ".gguf":
            raise UnsafeFormat(f"{path.name}: a single file must be a GGUF")
        return path.parent, path.name
    if not path.is_dir():
        raise ModelNotFound(f"there is no model at {path}")
    if source.gguf_file is not None:
        if not (path / source.gguf_file).is_file():
            raise ModelNotFound(f"there is no {source.gguf_file} in {path}")
        return path, source.gguf_file
    ggufs = sorted(p.name for p in path.glob("*.gguf"))
    if ggufs and not (path / "config.json").exists():
        if len(ggufs) > 1:
            raise ModelNotFound(f"several GGUF files in {path}: say which ({', '.join(ggufs)})")
        return path, ggufs[0]
    return path, None


def _download(source: ModelSource) -> Path:
    """A snapshot of the repo at the revision: from the local cache, else from the hub."""
    from huggingface_hub import snapshot_download

    assert source.repo is not None
    weights = ["*.safetensors"] if source.gguf_file is None else [source.gguf_file]
    options: dict[str, Any] = {"revision": source.revision, "allow_patterns": [*weights, *_SIDE_FILES]}
    try:
        return Path(snapshot_download(source.repo, **options))
    except Exception as online:
        try:
            return Path(snapshot_download(source.repo, local_files_only=True, **options))
        except Exception:
            at = f" at revision {source.revision}" if source.revision else ""
            raise ModelNotFound(f"repo {source.repo}{at} can't be had: {type(online).__name__}") from online


def read_config(checkpoint: Checkpoint) -> dict[str, Any]:
    """config.json of the checkpoint; empty beside a GGUF that has none."""
    return _read_json(checkpoint.directory / "config.json")


def side_files(directory: Path) -> list[Path]:
    return [p for pattern in _SIDE_FILES for p in directory.glob(pattern) if p.is_file()]


def _refuse_code(directory: Path) -> None:
    for name in ("config.json", "tokenizer_config.json", "generation_config.json"):
        settings = _read_json(directory / name)
        found = [key for key in _CODE_KEYS if settings.get(key)]
        if found:
            raise UnsafeFormat(
                f"{name} wants to run code from the checkpoint ({found[0]}); that is never done"
            )


def _read_json(path: Path) -> dict[str, Any]:
    if not path.is_file():
        return {}
    try:
        value = json.loads(path.read_text())
    except (ValueError, OSError) as error:
        raise CheckpointCorrupt(f"{path.name} is not readable JSON: {error}") from error
    if not isinstance(value, dict):
        raise CheckpointCorrupt(f"{path.name} is not a JSON object")
    return value


def safetensors_files(directory: Path) -> list[Path]:
    index = _read_json(directory / "model.safetensors.index.json")
    if index:
        shards = index.get("weight_map")
        if not isinstance(shards, dict):
            raise CheckpointCorrupt("model.safetensors.index.json has no weight_map")
        names = sorted({str(name) for name in shards.values()})
        if any(Path(name).name != name for name in names):
            raise UnsafeFormat("model.safetensors.index.json names files outside the model's directory")
        missing = [name for name in names if not (directory / name).is_file()]
        if missing:
            raise CheckpointCorrupt(f"shards are missing: {', '.join(missing)}")
        return [directory / name for name in names]
    if (directory / "model.safetensors").is_file():
        return [directory / "model.safetensors"]
    pickles = sorted(p.name for pattern in _PICKLES for p in directory.glob(pattern))
    if pickles:
        raise UnsafeFormat(f"weights only as pickle or the like ({pickles[0]}); convert them to safetensors")
    raise ModelNotFound(f"there are no safetensors or GGUF weights in {directory}")


def _safetensors_parameters(path: Path) -> int:
    """Number of values in a file whose header agrees with its size."""
    size = path.stat().st_size
    with path.open("rb") as file:
        prefix = file.read(8)
        header_size = struct.unpack("<Q", prefix)[0] if len(prefix) == 8 else size
        if not 2 <= header_size <= min(size - 8, 100_000_000):
            raise CheckpointCorrupt(f"{path.name} is truncated or no safetensors file")
        try:
            header: dict[str, Any] = json.loads(file.read(header_size))
            tensors = [value for key, value in header.items() if key != "__metadata__"]
            end = max((int(t["data_offsets"][1]) for t in tensors), default=0)
            num_values = sum(_product(t["shape"]) for t in tensors)
        except (ValueError, KeyError, TypeError, AttributeError, IndexError) as error:
            raise CheckpointCorrupt(f"{path.name} has a damaged header") from error
    if end != size - 8 - header_size:
        raise CheckpointCorrupt(f"{path.name} has {size:,} bytes; its header says {end + 8 + header_size:,}")
    return num_values


def _product(shape: Sequence[int]) -> int:
    total = 1
    for size in shape:
        total *= int(size)
    return total


def _read_gguf(path: Path) -> tuple[Any, int]:
    """The parsed header, and the number of values it announces."""
    from gguf import GGUFReader

    try:
        reader = GGUFReader(str(path))
        return reader, sum(_product([int(n) for n in tensor.shape]) for tensor in reader.tensors)
    except Exception as error:  # the reader raises whatever numpy raises on a short file
        raise CheckpointCorrupt(f"{path.name} is truncated or no GGUF file") from error
