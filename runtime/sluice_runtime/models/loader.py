"""From a `ModelSource` to a model in memory, in the order that finds faults soonest.

Inspect, import torch and transformers, load. Invariant: a fault that inspection can see costs no import.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

from sluice_runtime.engine.tokenizer import Tokenizer
from sluice_runtime.models import sharding
from sluice_runtime.models.checkpoint import Checkpoint, ModelSource, check_memory, inspect, read_config
from sluice_runtime.models.digest import digest_of, load_settings
from sluice_runtime.models.errors import ModelNotFound, UnsupportedModel, typed_errors
from sluice_runtime.models.packing import Packing, packing_of


@dataclass(frozen=True)
class LoadedModel:
    """A model in memory. `identity` is `sha256:…` over files and settings; `weight_bytes` what the weights
    occupy; in `source` the device is never `auto`. `packing`: how its files were quantised, if they were."""

    model: Any
    tokenizer: Tokenizer
    identity: str
    weight_bytes: int
    max_position_embeddings: int
    eos_token_ids: frozenset[int]
    source: ModelSource
    packing: Packing | None = None


def load(source: ModelSource) -> LoadedModel:
    """Load a model for inference. Raises a `ModelError` subclass; never executes code from the checkpoint."""
    if source.chat_template is not None and not source.chat_template.is_file():
        raise ModelNotFound(f"there is no chat template at {source.chat_template}")
    checkpoint = inspect_and_weigh(source)
    from sluice_runtime.models import pretrained  # torch and transformers, so after inspection

    pretrained.quiet()
    source = replace(source, device=pretrained.device(source.device))
    with typed_errors(source.name):
        check_memory(checkpoint, source)  # again: the libraries have taken their share
        packing = packing_of(read_config(checkpoint))
        identity = digest_of(checkpoint.files(), load_settings(source, packing))
        with pretrained.parsed_gguf(checkpoint):
            model = pretrained.load_weights(checkpoint, source, packing)
            tokenizer = pretrained.load_tokenizer(checkpoint, source)
    del checkpoint  # a GGUF's header is large
    with typed_errors(source.name):
        num_bytes = pretrained.relayout(model, source, packing)
    eos = pretrained.eos_token_ids(model)
    return LoadedModel(
        model=model,
        tokenizer=Tokenizer(tokenizer, eos),
        identity=identity,
        weight_bytes=num_bytes,
        max_position_embeddings=pretrained.max_positions(model.config),
        eos_token_ids=eos,
        source=source,
        packing=packing,
    )


def inspect_and_weigh(source: ModelSource) -> Checkpoint:
    """A checkpoint that is sound and fits into memory. Raises a `ModelError` subclass; needs no torch."""
    with typed_errors(source.name):
        checkpoint = inspect(source)
        _check_packing(source, packing_of(read_config(checkpoint)))
        sharding.check_source(source, checkpoint)
        sharding.check_sizes(read_config(checkpoint), source.num_ranks)
        check_memory(checkpoint, source)
    return checkpoint


def _check_packing(source: ModelSource, packing: Packing | None) -> None:
    """Refuse what would quantise twice, or split what is known only whole."""
    if packing is None:
        return
    if source.quantization is not None:
        raise UnsupportedModel(
            f"quantization is {source.quantization}, but the files are quantised already ({packing}): set it"
            " to None"
        )
    if source.num_ranks > 1:
        raise UnsupportedModel(
            f"the files are quantised ({packing}), and tensorParallel {source.num_ranks} splits whole weights"
            " only: set it to 1"
        )
