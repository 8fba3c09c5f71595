"""Loading of models: safetensors or GGUF only, never pickle, never remote code; and the digest of what was
loaded.

A checkpoint is inspected before anything reads it: formats, code it would like to run, truncated or missing
files, and whether its weights fit into the memory that the pod has left. Each finding is a `ModelError` with
a reason that fits a Kubernetes condition. Invariant: `identity` covers every byte and setting that can change
an answer.

`python -m sluice_runtime.models export` turns a GGUF into an ordinary Hugging Face directory.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import logging
import struct
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any, Literal

from sluice_runtime.engine.linear import pack_bfloat16, quantize_int8, weight_bytes
from sluice_runtime.engine.machine import memory_available
from sluice_runtime.engine.tokenizer import Tokenizer

logger = logging.getLogger(__name__)

Dtype = Literal["bfloat16", "float32", "float16"]
_DTYPE_BYTES: dict[str, int] = {"bfloat16": 2, "float16": 2, "float32": 4}
_PICKLES = ("*.bin", "*.pt", "*.pth", "*.ckpt", "*.pkl", "*.pickle", "*.msgpack", "*.h5")
# What transformers reads of a directory, beside the weights.
_SIDE_FILES = ("*.json", "*.jinja", "*.model", "*.txt", "*.tiktoken")
_CODE_KEYS = ("auto_map", "trust_remote_code", "custom_pipelines")


class ModelError(Exception):
    """A model that can't be served. `reason` is machine-readable (CamelCase, fit for a Kubernetes
    condition)."""

    reason = "ModelError"


class ModelNotFound(ModelError):
    """Nothing is there, or it can't be reached."""

    reason = "ModelNotFound"


class CheckpointCorrupt(ModelError):
    """Something is there, but it is damaged or incomplete."""

    reason = "CheckpointCorrupt"


class UnsafeFormat(ModelError):
    """Loading it would run code from the checkpoint."""

    reason = "UnsafeFormat"


class OutOfMemory(ModelError):
    """The weights, or the KV cache beside them, don't fit into the memory there is."""

    reason = "OutOfMemory"


class UnsupportedModel(ModelError):
    """An architecture or format that this engine does not run."""

    reason = "UnsupportedModel"


@dataclass(frozen=True)
class ModelSource:
    """What to load: `path` (a directory, or a GGUF file) or `repo` at `revision`; and how.

    `gguf_file` names the GGUF inside a directory or repo. `chat_template`: a Jinja file that replaces the
    model's own.
    """

    path: Path | None = None
    repo: str | None = None
    revision: str | None = None
    gguf_file: str | None = None
    dtype: Dtype = "bfloat16"
    quantization: Literal["int8"] | None = None
    chat_template: Path | None = None
    device: str = "cpu"


@dataclass(frozen=True)
class LoadedModel:
    """A model in memory. `identity` is `sha256:…` over files and settings; `weight_bytes` what the weights
    occupy."""

    model: Any
    tokenizer: Tokenizer
    identity: str
    weight_bytes: int
    max_position_embeddings: int
    eos_token_ids: frozenset[int]
    source: ModelSource


@dataclass(frozen=True)
class _Checkpoint:
    """A checkpoint on disk that has passed inspection."""

    directory: Path
    gguf: Path | None
    weights: tuple[Path, ...]
    num_parameters: int


# -- finding -------------------------------------------------------------------------------------------------


def _locate(source: ModelSource) -> tuple[Path, str | None]:
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


# -- inspecting ----------------------------------------------------------------------------------------------


def inspect(source: ModelSource) -> _Checkpoint:
    """Find and check a checkpoint without loading it. Raises a `ModelError` subclass."""
    directory, gguf_name = _locate(source)
    _refuse_code(directory)
    if gguf_name is not None:
        gguf = directory / gguf_name
        return _Checkpoint(directory, gguf, (gguf,), _gguf_parameters(gguf))
    if not (directory / "config.json").is_file():
        raise ModelNotFound(f"there is no config.json in {directory}")
    weights = tuple(_safetensors_files(directory))
    return _Checkpoint(directory, None, weights, sum(_safetensors_parameters(p) for p in weights))


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


def _safetensors_files(directory: Path) -> list[Path]:
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


def _gguf_parameters(path: Path) -> int:
    from gguf import GGUFReader

    try:
        reader = GGUFReader(str(path))
        return sum(_product([int(n) for n in tensor.shape]) for tensor in reader.tensors)
    except Exception as error:  # the reader raises whatever numpy raises on a short file
        raise CheckpointCorrupt(f"{path.name} is truncated or no GGUF file") from error


def _check_memory(checkpoint: _Checkpoint, source: ModelSource) -> None:
    """Raise `OutOfMemory` unless the peak of loading fits. A GGUF passes through float32 on its way."""
    size = checkpoint.num_parameters * _DTYPE_BYTES[source.dtype]
    if checkpoint.gguf is not None:
        size += checkpoint.num_parameters * (4 if source.dtype != "float32" else 0)
    left = memory_available()
    if size > left:
        raise OutOfMemory(
            f"loading needs about {size / 2**20:,.0f} MiB, and {left / 2**20:,.0f} MiB are left"
        )


# -- identity ------------------------------------------------------------------------------------------------


def identity(path: Path, settings: Mapping[str, str] | None = None) -> str:
    """`sha256:…` over names, sizes and contents of the files that loading `path` reads, and over `settings`.

    `path` is a model's directory or a GGUF file. Worked example: the same files elsewhere give the same
    digest; one byte of the chat template, or `dtype`, changed gives another.
    """
    directory, gguf_name = _locate(ModelSource(path=path))
    if gguf_name is not None:
        return _digest([directory / gguf_name], settings or {})
    return _digest([*_safetensors_files(directory), *_side_files(directory)], settings or {})


def _side_files(directory: Path) -> list[Path]:
    return [p for pattern in _SIDE_FILES for p in directory.glob(pattern) if p.is_file()]


def _digest(files: Sequence[Path], settings: Mapping[str, str]) -> str:
    digest = hashlib.sha256()

    def field(data: bytes) -> None:
        digest.update(len(data).to_bytes(8, "little"))
        digest.update(data)

    for path in sorted(set(files), key=lambda p: p.name):
        field(path.name.encode())
        field(path.stat().st_size.to_bytes(8, "little"))
        with path.open("rb") as file:
            field(hashlib.file_digest(file, "sha256").digest())
    for key in sorted(settings):
        field(key.encode())
        field(settings[key].encode())
    return f"sha256:{digest.hexdigest()}"


def _settings(source: ModelSource) -> dict[str, str]:
    settings: dict[str, str] = {"dtype": source.dtype, "quantization": source.quantization or "none"}
    if source.chat_template is not None:
        settings["chat_template"] = hashlib.sha256(source.chat_template.read_bytes()).hexdigest()
    return settings


# -- loading -------------------------------------------------------------------------------------------------


def load(source: ModelSource) -> LoadedModel:
    """Load a model for inference. Raises a `ModelError` subclass; never executes code from the checkpoint."""
    if source.chat_template is not None and not source.chat_template.is_file():
        raise ModelNotFound(f"there is no chat template at {source.chat_template}")
    _quiet()
    with _typed_errors(str(source.path or source.repo)), _parse_gguf_once():
        checkpoint = inspect(source)
        _check_memory(checkpoint, source)
        files = [*checkpoint.weights, *(() if checkpoint.gguf else _side_files(checkpoint.directory))]
        digest = _digest(files, _settings(source))
        model = _load_weights(checkpoint, source)
        hf_tokenizer = _load_tokenizer(checkpoint, source)
    if source.quantization == "int8":
        quantize_int8(model)
    elif source.device == "cpu":
        pack_bfloat16(model)
    eos = _eos_token_ids(model)
    return LoadedModel(
        model=model,
        tokenizer=Tokenizer(hf_tokenizer, eos),
        identity=digest,
        weight_bytes=weight_bytes(model),
        max_position_embeddings=_max_positions(model.config),
        eos_token_ids=eos,
        source=source,
    )


@contextmanager
def _typed_errors(name: str) -> Iterator[None]:
    """Turn what transformers raises into a `ModelError` that says which and why."""
    try:
        yield
    except ModelError:
        raise
    except MemoryError as error:
        raise OutOfMemory(f"{name}: memory ran out while loading") from error
    except Exception as error:
        text = f"{name}: {error}".split("\n")[0][:300]
        kind = type(error).__name__
        if "SafetensorError" in kind:
            raise CheckpointCorrupt(text) from error
        if "can't allocate memory" in str(error) or "out of memory" in str(error):
            raise OutOfMemory(f"{name}: memory ran out while loading") from error
        raise UnsupportedModel(f"{text} ({kind})") from error


def _gguf_options(checkpoint: _Checkpoint) -> dict[str, Any]:
    return {} if checkpoint.gguf is None else {"gguf_file": checkpoint.gguf.name}


def _quiet() -> None:
    """No progress bars: a pod's log is read by machines."""
    from transformers.utils import logging as transformers_logging

    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]


@contextmanager
def _parse_gguf_once() -> Iterator[None]:
    """Within it a GGUF's header is read once: transformers asks for it four times, at several seconds
    each."""
    import gguf

    original = gguf.GGUFReader
    gguf.GGUFReader = cache(original)  # type: ignore[assignment, misc]
    try:
        yield
    finally:
        gguf.GGUFReader = original  # type: ignore[misc]


def _load_config(checkpoint: _Checkpoint) -> Any:
    from transformers import AutoConfig

    config = AutoConfig.from_pretrained(
        checkpoint.directory, trust_remote_code=False, local_files_only=True, **_gguf_options(checkpoint)
    )
    _refuse_batch_dependent(config)
    return config


def _load_weights(checkpoint: _Checkpoint, source: ModelSource) -> Any:
    import torch
    from transformers import AutoModelForCausalLM, GgufConfig

    options = _gguf_options(checkpoint)
    if checkpoint.gguf is not None:
        # Without this the weights stay quantised, in a form that only GPU kernels take.
        options["quantization_config"] = GgufConfig(dequantize=True)
    else:
        options["use_safetensors"] = True
    loaded: Any = AutoModelForCausalLM.from_pretrained(
        checkpoint.directory,
        config=_load_config(checkpoint),
        dtype=getattr(torch, source.dtype),
        trust_remote_code=False,
        local_files_only=True,
        output_loading_info=True,
        ignore_mismatched_sizes=True,  # reported below, with names
        **options,
    )
    model, info = loaded
    # transformers would go on with random values in their place.
    for kind in ("missing", "mismatched"):
        names = sorted(str(key) for key in info.get(f"{kind}_keys", ()))
        if names:
            raise CheckpointCorrupt(f"{len(names)} weights are {kind}, {names[0]} among them")
    model.requires_grad_(False)
    return model.to(source.device).eval()


def _refuse_batch_dependent(config: Any) -> None:
    """Refuse what would make an answer depend on its neighbours in the batch, or needs more than a causal
    decoder."""
    if getattr(config, "is_encoder_decoder", False):
        raise UnsupportedModel(f"{config.model_type}: encoder-decoder models are not supported")
    rope = getattr(config, "rope_parameters", None) or {}
    if rope.get("rope_type") == "dynamic":
        raise UnsupportedModel(
            f"{config.model_type}: dynamic RoPE depends on the longest request in the batch"
        )


def _max_positions(config: Any) -> int:
    rope = getattr(config, "rope_parameters", None) or {}
    positions = int(getattr(config, "max_position_embeddings", None) or 2048)
    if rope.get("rope_type") == "longrope":
        # Beyond its original context longrope changes the factors of the whole batch.
        positions = min(positions, int(rope.get("original_max_position_embeddings") or positions))
    return positions


def _load_tokenizer(checkpoint: _Checkpoint, source: ModelSource) -> Any:
    from transformers import AutoTokenizer

    tokenizer = AutoTokenizer.from_pretrained(
        checkpoint.directory, trust_remote_code=False, local_files_only=True, **_gguf_options(checkpoint)
    )
    if not tokenizer.is_fast:
        raise UnsupportedModel(f"{checkpoint.directory.name}: only fast tokenizers are supported")
    if source.chat_template is not None:
        tokenizer.chat_template = source.chat_template.read_text()
    return tokenizer


def _eos_token_ids(model: Any) -> frozenset[int]:
    for config in (getattr(model, "generation_config", None), model.config):
        eos = getattr(config, "eos_token_id", None)
        if eos is not None:
            return frozenset([eos] if isinstance(eos, int) else eos)
    return frozenset()


# -- exporting -----------------------------------------------------------------------------------------------


def export(gguf: Path, out: Path, dtype: Dtype = "bfloat16", random_weights: int | None = None) -> str:
    """Write a GGUF as a Hugging Face directory: safetensors, tokenizer, chat template. Returns its identity.

    With `random_weights` (a seed) the weights are drawn anew: the same model in form, a broken one in
    content.
    """
    import torch
    from transformers import AutoModelForCausalLM

    source = ModelSource(path=gguf, dtype=dtype)
    _quiet()
    with _typed_errors(gguf.name), _parse_gguf_once():
        checkpoint = inspect(source)
        _check_memory(checkpoint, source)
        tokenizer = _load_tokenizer(checkpoint, source)
        if random_weights is None:
            model = _load_weights(checkpoint, source)
        else:
            torch.manual_seed(random_weights)
            automatic: Any = AutoModelForCausalLM
            model = automatic.from_config(_load_config(checkpoint), dtype=getattr(torch, dtype))
    for name in ("quantization_config", "_pre_quantization_dtype"):
        if hasattr(model.config, name):
            delattr(model.config, name)
    out.mkdir(parents=True, exist_ok=True)
    model.save_pretrained(out)
    tokenizer.save_pretrained(out)
    for path in out.iterdir():
        path.chmod(0o644)  # safetensors writes 0600; the pod that reads it is another user
    return identity(out)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(
        prog="python -m sluice_runtime.models", description="Model files for Sluice."
    )
    commands = parser.add_subparsers(dest="command", required=True)
    exporting = commands.add_parser("export", help="write a GGUF as a Hugging Face directory")
    exporting.add_argument("--gguf", type=Path, required=True)
    exporting.add_argument("--out", type=Path, required=True)
    exporting.add_argument("--dtype", choices=sorted(_DTYPE_BYTES), default="bfloat16")
    exporting.add_argument(
        "--random-weights", type=int, metavar="SEED", help="draw new weights: a broken model"
    )
    identifying = commands.add_parser("identity", help="print the digest of a model's files")
    identifying.add_argument("path", type=Path)
    options = parser.parse_args(arguments)
    _quiet()
    try:
        if options.command == "export":
            print(export(options.gguf, options.out, options.dtype, options.random_weights))
        else:
            print(identity(options.path))
    except ModelError as error:
        print(f"{error.reason}: {error}", file=sys.stderr)
        return 1
    return 0


if __name__ == "__main__":
    sys.exit(main())
