"""The identity of a model: a digest of what was loaded, and how.

Invariant: it covers every byte and setting that can change an answer, and nothing else, such as where the
files lie.
"""

from __future__ import annotations

import hashlib
from collections.abc import Mapping, Sequence
from pathlib import Path

from sluice_runtime.models.checkpoint import ModelSource, locate, safetensors_files, side_files
from sluice_runtime.models.packing import Packing


def identity(path: Path, settings: Mapping[str, str] | None = None) -> str:
    """`sha256:…` over names, sizes and contents of the files that loading `path` reads, and over `settings`.

    `path` is a model's directory or a GGUF file. Worked example: the same files elsewhere give the same
    digest; one byte of the chat template, or `dtype`, changed gives another.
    """
    directory, gguf_name = locate(ModelSource(path=path))
    if gguf_name is not None:
        return digest_of([directory / gguf_name], settings or {})
    return digest_of([*safetensors_files(directory), *side_files(directory)], settings or {})


def digest_of(files: Sequence[Path], settings: Mapping[str, str]) -> str:
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


def load_settings(source: ModelSource, packing: Packing | None = None) -> dict[str, str]:
    quantization = source.quantization or ("none" if packing is None else str(packing))
    settings: dict[str, str] = {"dtype": source.dtype, "quantization": quantization}
    if source.chat_template is not None:
        settings["chat_template"] = hashlib.sha256(source.chat_template.read_bytes()).hexdigest()
    return settings
