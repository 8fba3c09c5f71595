"""What transformers is asked to load, and what of it is refused. The only module here that imports torch.

Invariant: `trust_remote_code` is never on, nothing is fetched, and no weight is made up that a checkpoint
lacks.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import gguf
import torch
from torch.distributed.tensor import DTensor
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GgufConfig
from transformers.distributed.configuration_utils import DistributedConfig
from transformers.utils import logging as transformers_logging

from sluice_runtime.engine.linear import pack_bfloat16, quantize, weight_bytes
from sluice_runtime.models import prequantized, sharding
from sluice_runtime.models.checkpoint import Checkpoint, ModelSource
from sluice_runtime.models.errors import CheckpointCorrupt, UnsupportedModel
from sluice_runtime.models.packing import CONFIG_NAMES, Packing


def quiet() -> None:
    """No progress bars: a pod's log is read by machines."""
    transformers_logging.disable_progress_bar()  # type: ignore[no-untyped-call]


def device(wanted: str) -> str:
    """`auto` made definite."""
    if wanted != "auto":
        return wanted
    return "cuda" if torch.cuda.is_available() else "cpu"


@contextmanager
def parsed_gguf(checkpoint: Checkpoint) -> Iterator[None]:
    """Within it a GGUF's header is what inspection has read: transformers asks for it four times, at several
    seconds each."""
    if checkpoint.gguf is None:
        yield
        return
    original = gguf.GGUFReader
    gguf.GGUFReader = lambda *_: checkpoint.gguf_reader  # type: ignore[assignment, misc]
    try:
        yield
    finally:
        gguf.GGUFReader = original  # type: ignore[misc]


def _gguf_options(checkpoint: Checkpoint) -> dict[str, Any]:
    return {} if checkpoint.gguf is None else {"gguf_file": checkpoint.gguf.name}


def load_config(checkpoint: Checkpoint) -> Any:
    config = AutoConfig.from_pretrained(
        checkpoint.directory, trust_remote_code=False, local_files_only=True, **_gguf_options(checkpoint)
    )
    _refuse_batch_dependent(config)
    return config


def load_weights(checkpoint: Checkpoint, source: ModelSource, packing: Packing | None = None) -> Any:
    options = _gguf_options(checkpoint)
    if checkpoint.gguf is not None:
        # Without this the weights stay quantised, in a form that only GPU kernels take.
        options["quantization_config"] = GgufConfig(dequantize=True)
    else:
        options["use_safetensors"] = True
    config = load_config(checkpoint)
    if packing is not None:
        for name in CONFIG_NAMES:
            config.__dict__.pop(name, None)
        options["quantization_config"] = prequantized.packed_config(checkpoint, packing)
    if source.num_ranks > 1:
        sharding.check_plan(config)
        # Each rank reads its own share of each weight, by the process group that it has joined.
        options["distributed_config"] = DistributedConfig(tp_size=source.num_ranks, tp_plan="auto")
    loaded: Any = AutoModelForCausalLM.from_pretrained(
        checkpoint.directory,
        config=config,
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
    if packing is not None:
        prequantized.refuse_leftovers(info.get("unexpected_keys", ()))
    model.requires_grad_(False)
    if source.num_ranks > 1:
        _unwrap(model)
        return model.eval()
    return model.to(source.device).eval()


def _unwrap(model: Any) -> None:
    """Make each linear product's own share an ordinary weight: transformers would otherwise unwrap it anew at
    each product. Embeddings stay as they are; their hooks need to know the whole."""
    for module in model.modules():
        if type(module) is torch.nn.Linear:
            for name, weight in list(module.named_parameters(recurse=False)):
                if isinstance(weight, DTensor):
                    setattr(module, name, torch.nn.Parameter(weight.to_local(), requires_grad=False))


def draw_weights(checkpoint: Checkpoint, source: ModelSource, seed: int) -> Any:
    """The checkpoint's model with random weights."""
    torch.manual_seed(seed)
    automatic: Any = AutoModelForCausalLM
    return automatic.from_config(load_config(checkpoint), dtype=getattr(torch, source.dtype))


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


def max_positions(config: Any) -> int:
    rope = getattr(config, "rope_parameters", None) or {}
    positions = int(getattr(config, "max_position_embeddings", None) or 2048)
    if rope.get("rope_type") == "longrope":
        # Beyond its original context longrope changes the factors of the whole batch.
        positions = min(positions, int(rope.get("original_max_position_embeddings") or positions))
    return positions


def load_tokenizer(checkpoint: Checkpoint, source: ModelSource) -> Any:
    tokenizer = AutoTokenizer.from_pretrained(
        checkpoint.directory, trust_remote_code=False, local_files_only=True, **_gguf_options(checkpoint)
    )
    if not tokenizer.is_fast:
        raise UnsupportedModel(f"{checkpoint.directory.name}: only fast tokenizers are supported")
    if source.chat_template is not None:
        tokenizer.chat_template = source.chat_template.read_text()
    return tokenizer


def eos_token_ids(model: Any) -> frozenset[int]:
    for config in (getattr(model, "generation_config", None), model.config):
        eos = getattr(config, "eos_token_id", None)
        if eos is not None:
            return frozenset([eos] if isinstance(eos, int) else eos)
    return frozenset()


def relayout(model: Any, source: ModelSource, packing: Packing | None = None) -> int:
    """Bring weights into the form that computes; what they then occupy, in bytes."""
    if source.num_ranks > 1:
        return weight_bytes(model)  # packing would replace the modules that the ranks' hooks sit on
    if packing is not None:
        prequantized.compute_packed(model, packing, getattr(torch, source.dtype))
    if source.quantization is not None:
        quantize(model, source.quantization)
    elif source.device == "cpu":
        pack_bfloat16(model)
    return weight_bytes(model)
