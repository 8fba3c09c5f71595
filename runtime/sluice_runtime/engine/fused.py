"""Decoders that are known to the letter, run as one call a step instead of a thousand.

At one row the modules of transformers take longer to call than their products take to compute. So for the
classes in `_DECODERS`, in bfloat16 on a CPU with our kernels, a step is one call into C over the same packed
weights; everything else runs as transformers wrote it, and so does the check at load (support.py) that
compares both. What is computed is what the modules compute; sums, norms and the residual stream are kept in
float32 in between.

Invariant: a logit does not depend on what else is in the batch, nor on how a prompt was cut into chunks, to
the last bit. The KV pages are the cache's own, so either way can go on where the other left off.
"""

from __future__ import annotations

import ctypes
from array import array
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from transformers.models.llama import modeling_llama
from transformers.models.mistral import modeling_mistral
from transformers.models.qwen2 import modeling_qwen2
from transformers.models.qwen3 import modeling_qwen3

from sluice_runtime.engine import native
from sluice_runtime.engine.attention import PagedCache
from sluice_runtime.engine.linear import PackedPart, QuantizedLinear
from sluice_runtime.engine.native_pages import MAX_HEAD_DIM, MAX_QUERIES
from sluice_runtime.engine.plan import ScheduledChunk

# A causal model's class and its layers': others may compute anything.
_DECODERS: dict[type[nn.Module], type[nn.Module]] = {
    modeling_llama.LlamaForCausalLM: modeling_llama.LlamaDecoderLayer,
    modeling_mistral.MistralForCausalLM: modeling_mistral.MistralDecoderLayer,
    modeling_qwen2.Qwen2ForCausalLM: modeling_qwen2.Qwen2DecoderLayer,
    modeling_qwen3.Qwen3ForCausalLM: modeling_qwen3.Qwen3DecoderLayer,
}


class NotFused(Exception):
    """Why a model runs by its modules."""


@dataclass(frozen=True)
class _Shape:
    hidden: int
    heads: int
    kv_heads: int
    head_dim: int
    ffn: int


class FusedDecoder:
    """A model and its KV, bound to the kernels. For one thread at a time."""

    def __init__(self, model: Any, windows: Mapping[int, int | None], cache: PagedCache) -> None:
        """`windows`: each layer's sliding window. Raises `NotFused`."""
        shape = _shape_of(model)
        self._vocab_size = int(model.get_input_embeddings().num_embeddings)
        self._block_size = cache.block_size
        # All that the kernels read through pointers.
        self._kept: list[Any] = [cache]
        layers = [
            self._layer(layer, windows.get(i), cache, i, shape) for i, layer in enumerate(model.model.layers)
        ]
        angles = _angles(model, min(cache.num_blocks * cache.block_size, _positions(model)))
        self._num_positions = len(angles[0])
        self._kept += [*angles, (native.Layer * len(layers))(*layers)]
        attention = model.model.layers[0].self_attn
        self._model = native.Model(
            self._kept[-1],
            self._pointer(model.model.embed_tokens.weight),
            self._pointer(model.model.norm.weight),
            self._product(model.lm_head),
            angles[0].data_ptr(),
            angles[1].data_ptr(),
            len(layers),
            shape.hidden,
            shape.heads,
            shape.kv_heads,
            shape.head_dim,
            shape.ffn,
            float(model.config.rms_norm_eps),
            float(attention.scaling),
        )
        self._kernels = native.library()
        self._scratch = torch.empty(0, dtype=torch.uint8)

    def _pointer(self, tensor: Tensor) -> int:
        if tensor.dtype != torch.bfloat16 or not tensor.is_contiguous() or tensor.device.type != "cpu":
            raise NotFused("a weight is not bfloat16 in the CPU's memory")
        self._kept.append(tensor)
        return tensor.data_ptr()

    def _product(self, module: nn.Module) -> Any:
        if isinstance(module, PackedPart):
            module = module.product.product
        if isinstance(module, QuantizedLinear) and isinstance(module.bound, native.Product):
            found = module.bound
        elif isinstance(module, native.NativeLinear):
            found = module.native
        else:
            raise NotFused(f"a {type(module).__name__} has no native kernel")
        self._kept.append(found)
        return ctypes.pointer(found.linear)

    def _layer(
        self, layer: Any, window: int | None, cache: PagedCache, index: int, shape: _Shape
    ) -> native.Layer:
        attention, mlp = layer.self_attn, layer.mlp
        norms = [getattr(attention, name, None) for name in ("q_norm", "k_norm")]
        return native.Layer(
            self._pointer(layer.input_layernorm.weight),
            self._pointer(layer.post_attention_layernorm.weight),
            *(None if norm is None else self._pointer(norm.weight) for norm in norms),
            self._shared(
                attention, ("q_proj", "k_proj", "v_proj"), (shape.heads, shape.kv_heads, shape.kv_heads)
            ),
            self._product(attention.o_proj),
            self._shared(mlp, ("gate_proj", "up_proj"), (1, 1)),
            self._product(mlp.down_proj),
            _pages(cache, index, shape),
            window or 0,
        )

    def _shared(self, parent: Any, names: Sequence[str], ratio: Sequence[int]) -> Any:
        """The one product whose parts, in this order, the modules of these names are."""
        parts = [getattr(parent, name) for name in names]
        if any(type(part) is not PackedPart or part.product is not parts[0].product for part in parts):
            raise NotFused(f"{', '.join(names)} are not one product")
        unit, start = parts[0].size // ratio[0], 0
        for part, share in zip(parts, ratio, strict=True):
            if (part.start, part.size) != (start, unit * share):
                raise NotFused(f"{', '.join(names)} have unexpected sizes")
            start += part.size
        return self._product(parts[0])

    def step(self, chunks: Sequence[ScheduledChunk]) -> Tensor:
        """Compute all chunks, KV included; float32 logits [rows, vocabulary] of the last `num_sampled` tokens
        of each, in order."""
        tokens, spans, tables, kept = array("i"), array("i"), array("i"), array("i")
        for chunk in chunks:
            num = len(chunk.token_ids)
            spans.extend((len(tokens), num, chunk.start, len(tables)))
            tokens.extend(chunk.token_ids)
            tables.extend(chunk.block_table[: -(-(chunk.start + num) // self._block_size)])
            kept.extend(range(len(tokens) - chunk.num_sampled, len(tokens)))
        # What the kernels index by must be in range: they don't look.
        if min(tokens) < 0 or max(tokens) >= self._vocab_size:
            raise ValueError("a token id is beyond the vocabulary")
        if max(c.start + len(c.token_ids) for c in chunks) > self._num_positions:
            raise ValueError("a position is beyond the context")
        logits = torch.empty(len(kept), self._vocab_size)
        num_threads = torch.get_num_threads()
        size = self._kernels.sluice_scratch_bytes(self._model, len(tokens), num_threads)
        if len(self._scratch) < size:
            self._scratch = torch.empty(size, dtype=torch.uint8)
        step = native.Step(
            *(values.buffer_info()[0] for values in (tokens, spans, tables, kept)),
            logits.data_ptr(),
            self._scratch.data_ptr(),
            len(tokens),
            len(chunks),
            len(kept),
            num_threads,
        )
        self._kernels.sluice_step(self._model, step)
        return logits


def _positions(model: Any) -> int:
    return int(getattr(model.config, "max_position_embeddings", None) or 2048)


def _shape_of(model: Any) -> _Shape:
    """Raises `NotFused` where the model is none that is known, or has sizes that kernels don't take."""
    layer_type = _DECODERS.get(type(model))
    if native.library() is None or layer_type is None:
        raise NotFused(f"{type(model).__name__} has no fused form here")
    config, layers = model.config, model.model.layers
    if any(type(layer) is not layer_type for layer in layers) or len(layers) != config.num_hidden_layers:
        raise NotFused("a layer is of another class than the model's")
    # Ranks' collectives sit in a `forward` of the instance (parallel.py).
    if any(m._forward_hooks or m._forward_pre_hooks or "forward" in vars(m) for m in model.modules()):
        raise NotFused("hooks sit on its modules")
    if config.hidden_act != "silu":
        raise NotFused(f"activation {config.hidden_act} has no kernel")
    heads, kv_heads = config.num_attention_heads, config.num_key_value_heads
    head_dim = int(layers[0].self_attn.head_dim)
    shape = _Shape(config.hidden_size, heads, kv_heads, head_dim, config.intermediate_size)
    whole = all(size % native.PANEL == 0 for size in (shape.hidden, shape.head_dim, shape.ffn))
    if not whole or head_dim > MAX_HEAD_DIM or heads % kv_heads or heads // kv_heads > MAX_QUERIES:
        raise NotFused(f"{shape} is not what kernels take")
    return shape


def _pages(cache: PagedCache, index: int, shape: _Shape) -> native.Pages:
    found = cache.native[index]
    if found is None or (found.kv_heads, found.head_dim) != (shape.kv_heads, shape.head_dim):
        raise NotFused("the KV cache is not what kernels read")
    return found.pages


def _angles(model: Any, num_positions: int) -> tuple[Tensor, Tensor]:
    """Cosines and sines [positions, head_dim / 2] in float32, of the model's own rotary embedding."""
    at = torch.arange(num_positions)[None]
    cosines, sines = model.model.rotary_emb(torch.zeros(1, 1), position_ids=at)
    half = cosines.shape[-1] // 2
    if half * 2 != int(model.model.layers[0].self_attn.head_dim):
        raise NotFused("only a part of each head is rotated")
    return cosines[0, :, :half].float().contiguous(), sines[0, :, :half].float().contiguous()
