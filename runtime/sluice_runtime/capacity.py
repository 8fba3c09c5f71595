"""How much memory KV and a step take; the figures that `sluice capacity` prints, enforced here before KV is
allocated.

The operator computes the same from config.json (it and the runtime never import each other); the examples of
docs/contracts/budget.json bind both. Weights and the process itself need no estimate here: they are in memory
already. Pure; all sizes are bytes.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from typing import Any

RESERVE_PERCENT = 5
TILE = 128
SCALE_BYTES = 2
"""Of the scale that each key and each value of a KV head has where KV is quantised to a byte."""


@dataclass(frozen=True, slots=True)
class Sizes:
    """What a step's memory follows from. `layers`: for each its KV heads, key width and value width; `ffn` is
    the widest that one token's feed-forward part becomes; `dtype_bytes` of weights and activations.
    `quantized_kv`: pages hold a byte a value, and scales (engine/pages.py). `draft`: of a model that guesses
    for this one; its KV holds the same tokens, in as many blocks."""

    hidden: int
    heads: int
    ffn: int
    vocab: int
    layers: tuple[tuple[int, int, int], ...]
    dtype_bytes: int
    quantized_kv: bool = False
    draft: Sizes | None = None

    @property
    def bytes_per_token(self) -> int:
        """KV of one token in all layers, the draft's too."""
        return self.own_per_token + (0 if self.draft is None else self.draft.bytes_per_token)

    @property
    def own_per_token(self) -> int:
        """KV of one token in the model's own layers."""
        if self.quantized_kv:
            return sum(heads * (key + value + 2 * SCALE_BYTES) for heads, key, value in self.layers)
        return self.computed_per_token

    @property
    def computed_per_token(self) -> int:
        """The same in the dtype that attention computes in."""
        return sum(heads * (key + value) for heads, key, value in self.layers) * self.dtype_bytes

    @property
    def gathered_per_token(self) -> int:
        """What gathering a token of each own layer takes: quantised pages as they are, and then decoded."""
        return self.computed_per_token + (self.own_per_token if self.quantized_kv else 0)


@dataclass(frozen=True, slots=True)
class Limits:
    """The engine's settings that memory follows from."""

    max_model_len: int
    max_num_seqs: int
    max_batch_tokens: int
    block_size: int
    num_guesses: int = 0


def sizes_of(
    config: Any, layers: Sequence[tuple[int, int, int]], vocab: int, dtype_bytes: int, num_ranks: int = 1
) -> Sizes:
    """From a configuration of transformers, or anything with its fields, and what probing found of layers. Of
    one rank, where `num_ranks` share the heads and the feed-forward width."""

    def number(name: str, default: int) -> int:
        value = getattr(config, name, None)
        return value if isinstance(value, int) and value > 0 else default

    hidden = number("hidden_size", 1)
    dense = number("intermediate_size", 4 * hidden)
    experts = number("num_experts_per_tok", 0)
    ffn = dense
    if experts:
        ffn = experts * number("moe_intermediate_size", dense) + number("shared_expert_intermediate_size", 0)
    heads = number("num_attention_heads", 1)
    return Sizes(hidden, heads // num_ranks, ffn // num_ranks, vocab, tuple(layers), dtype_bytes)


def activation_bytes(sizes: Sizes, limits: Limits) -> int:
    """The most that one step holds beside KV: a layer's intermediate values of every token, scores of a tile
    of a prompt's queries, and logits of every sequence, also in float32. A draft runs before its model, not
    beside it."""
    if sizes.draft is not None:
        guessing = activation_bytes(sizes.draft, replace(limits, num_guesses=0))
        return max(guessing, activation_bytes(replace(sizes, draft=None), limits))
    size, tokens = sizes.dtype_bytes, limits.max_batch_tokens
    kv_heads, key, _ = max(sizes.layers)
    width = 4 * sizes.hidden + 3 * sizes.ffn + 2 * (sizes.heads + 2 * kv_heads) * key
    scores = 2 * sizes.heads * min(TILE, tokens) * limits.max_model_len
    # Each guess of speculative decoding is one more row of logits.
    rows = min(limits.max_num_seqs * (1 + limits.num_guesses), max(tokens, limits.max_num_seqs))
    return (tokens * width + scores) * size + rows * sizes.vocab * (size + 4)


def workspace_bytes(sizes: Sizes, limits: Limits, kv_tokens: int) -> int:
    """Pages of one layer, gathered for attention: the context of all that run, half as much again for
    padding, a quarter for growth. A draft keeps its own."""
    tokens = min(limits.max_num_seqs * limits.max_model_len, kv_tokens)
    own = tokens * sizes.gathered_per_token // len(sizes.layers) * 15 // 8
    return own + (0 if sizes.draft is None else workspace_bytes(sizes.draft, limits, kv_tokens))


def max_kv_bytes(sizes: Sizes, limits: Limits, left: int) -> int:
    """The most KV that fits into `left` beside the workspace that grows with it, in whole blocks."""
    most = workspace_bytes(sizes, limits, limits.max_num_seqs * limits.max_model_len)
    # Either the workspace has its full size, or it is 15/8 of what a layer's share of the KV becomes.
    num_layers, gathered = len(sizes.layers), sizes.gathered_per_token
    if sizes.draft is not None:
        gathered = gathered * len(sizes.draft.layers) + sizes.draft.gathered_per_token * num_layers
        num_layers *= len(sizes.draft.layers)
    kv_share, workspace_share = num_layers * 8 * sizes.bytes_per_token, 15 * gathered
    kv = max(left - most, left * kv_share // (kv_share + workspace_share))
    block = sizes.bytes_per_token * limits.block_size
    return max(0, kv) // block * block


def kv_budget(sizes: Sizes, limits: Limits, available: int, limit: int) -> int:
    """The most KV in a process that may still take `available` of its `limit`."""
    left = available - activation_bytes(sizes, limits) - limit * RESERVE_PERCENT // 100
    return max_kv_bytes(sizes, limits, max(0, left))
