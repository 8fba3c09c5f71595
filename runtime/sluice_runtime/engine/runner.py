"""Runs a scheduler's plan through the unmodified transformers model; the only module that touches KV tensors.

All tokens of a step are packed into one row [1, tokens]; which keys each may see is told to our attention
function (attention.py), positions are explicit, and only the positions that sample reach the output head.
Invariant: KV memory is allocated once, here; a step allocates only activations.
"""

from __future__ import annotations

import logging
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from sluice_runtime.capacity import Limits, Sizes, activation_bytes, kv_budget, sizes_of
from sluice_runtime.engine import machine, support
from sluice_runtime.engine.attention import (
    IMPLEMENTATION,
    DecodeBucket,
    PagedBatch,
    PagedCache,
    PrefillSpan,
    ProbeCache,
    UnsupportedAttention,
)
from sluice_runtime.engine.fused import FusedDecoder, NotFused
from sluice_runtime.engine.host_pool import HostPool
from sluice_runtime.engine.host_tier import KvMoves
from sluice_runtime.engine.pages import FORMATS
from sluice_runtime.engine.plan import ScheduledChunk
from sluice_runtime.engine.types import EngineConfig, KvCacheDtype
from sluice_runtime.models.errors import OutOfMemory

logger = logging.getLogger(__name__)

# A decode bucket is cut when padding would exceed this many tokens a request: a cut costs one more call a
# layer.
_MAX_PADDING_TOKENS = 128


class ModelRunner:
    """`model` is a causal language model of transformers in evaluation mode; it is switched to our
    attention."""

    def __init__(self, model: Any, block_size: int, kv_cache_dtype: KvCacheDtype = KvCacheDtype.AUTO) -> None:
        """Raises `UnsupportedAttention` for models whose layers can't run on paged KV."""
        self.model = model
        self.block_size = block_size
        self._page_format = FORMATS[kv_cache_dtype]
        self.is_kv_exact = self._page_format is None
        self.device = next(model.parameters()).device
        self.dtype: torch.dtype = next(p.dtype for p in model.parameters() if p.is_floating_point())
        if not getattr(model, "_supports_attention_backend", False):
            raise UnsupportedAttention(f"{type(model).__name__} does not let its attention be replaced")
        model.set_attn_implementation(IMPLEMENTATION)
        self.layer_shapes = self._probe()
        self._cache: PagedCache | None = None
        self._host: HostPool | None = None
        self._fused: FusedDecoder | None = None
        self._scratch: dict[str, Tensor] = {}

    @torch.inference_mode()
    def _probe(self) -> list[tuple[int, int, int]]:
        probe = ProbeCache()
        ids = torch.zeros(1, 1, dtype=torch.long, device=self.device)
        try:
            self.model(
                input_ids=ids,
                position_ids=ids,
                cache=probe,
                paged_cache=probe,
                use_cache=True,
                logits_to_keep=1,
            )
        except UnsupportedAttention:
            raise
        except Exception as error:  # whatever a model makes of a cache that it does not know
            raise UnsupportedAttention(f"{type(self.model).__name__} takes no cache but its own") from error
        layers = sorted(probe.shapes)
        if not layers or layers != list(range(len(layers))) or sorted(probe.attended) != layers:
            raise UnsupportedAttention("some layers keep other state than keys and values")
        support.check_layers(self.model.config, probe.windows)
        self._windows = probe.windows
        self.has_softcap = probe.has_softcap
        return [probe.shapes[layer] for layer in layers]

    def bytes_per_block(self) -> int:
        """KV bytes of one block, all layers."""
        return self.sizes().bytes_per_token * self.block_size

    def sizes(self) -> Sizes:
        """What memory follows from, for capacity.py."""
        vocab_size = int(self.model.get_input_embeddings().num_embeddings)
        element = torch.empty((), dtype=self.dtype).element_size()
        config = getattr(self.model.config, "text_config", None) or self.model.config
        num_ranks = int(getattr(self.model, "_tp_size", None) or 1)
        sizes = sizes_of(config, self.layer_shapes, vocab_size, element, num_ranks)
        return sizes if self.is_kv_exact else replace(sizes, quantized_kv=True)

    def allocate_kv(self, num_blocks: int) -> None:
        self._cache = PagedCache(
            self.layer_shapes, num_blocks, self.block_size, self.dtype, str(self.device), self._page_format
        )
        try:
            self._fused = FusedDecoder(self.model, self._windows, self._cache)
        except NotFused as reason:
            self._fused = None
            logger.info("the model runs by its modules: %s", reason)

    def allocate_host(self, num_slots: int) -> None:
        """Host memory for so many blocks that the prefix cache evicts; after `allocate_kv`."""
        assert self._cache is not None, "allocate_kv first"
        self._host = HostPool(self._cache.storage(), num_slots)

    def move_kv(self, moves: KvMoves) -> None:
        """Do a step's copies between device and host, before its `execute`."""
        assert self._host is not None, "allocate_host first"
        self._host.move(moves)

    def plain_logits(self, prompts: Sequence[Sequence[int]]) -> list[Tensor]:
        """The model's own last logits of each prompt, what ours are checked against."""
        return support.plain_logits(self.model, self.device, prompts)

    def prepare(self, max_num_seqs: int, max_model_len: int) -> None:
        """Before the first request, with KV allocated: for those that compute faster when prepared."""

    def close(self) -> None:
        """Nothing is computed any more. Idempotent."""

    @torch.inference_mode()
    def execute(self, chunks: Sequence[ScheduledChunk]) -> tuple[Tensor, list[str]]:
        """Compute all chunks. Returns logits [samples, vocabulary] and whose row is whose: `num_sampled` rows
        for each chunk, together and in order."""
        cache = self._cache
        assert cache is not None, "allocate_kv first"
        if self._fused is not None:
            return self._fused.step(chunks), [c.request_id for c in chunks for _ in range(c.num_sampled)]
        # Single tokens first, by context length: neighbours share a bucket with little padding.
        ordered = sorted(chunks, key=lambda c: (len(c.token_ids) > 1, c.start))
        num_decodes = sum(len(c.token_ids) == 1 for c in ordered)
        input_ids = self._tensor([t for c in ordered for t in c.token_ids])
        positions, slots, last_rows = self._positions(ordered)
        batch = PagedBatch(
            self._tensor(slots),
            slots[0] if len(slots) == 1 else None,
            self._decode_buckets(ordered[:num_decodes]),
            self._prefill_spans(ordered[num_decodes:], num_decodes),
            max_queries=max(len(c.token_ids) for c in ordered),
            max_context=max(c.start + len(c.token_ids) for c in ordered),
            scratch=self._scratch,
        )
        sampling = [
            (row, c.request_id)
            for last, c in zip(last_rows, ordered, strict=True)
            for row in range(last + 1 - c.num_sampled, last + 1)
        ]
        # With nothing to sample the head still runs on one row: "keep none" can't be said.
        keep = self._tensor([row for row, _ in sampling] or [0])
        logits = self._forward(batch, input_ids, self._tensor(positions), keep)
        return logits[: len(sampling)], [request_id for _, request_id in sampling]

    def _forward(self, batch: PagedBatch, token_ids: Tensor, positions: Tensor, keep: Tensor | int) -> Tensor:
        """The model by its modules over one packed row: logits [kept, vocabulary]."""
        cache = self._cache
        assert cache is not None, "allocate_kv first"
        cache.batch = batch
        try:
            output = self.model(
                input_ids=token_ids[None],
                position_ids=positions[None],
                cache=cache,
                paged_cache=cache,
                use_cache=True,
                logits_to_keep=keep,
            )
        finally:
            cache.batch = None
        logits: Tensor = output.logits[0]
        return logits

    def _tensor(self, values: list[int], dtype: torch.dtype = torch.long) -> Tensor:
        return torch.tensor(values, dtype=dtype, device=self.device)

    def _positions(self, chunks: Sequence[ScheduledChunk]) -> tuple[list[int], list[int], list[int]]:
        """For each token its position and its slot in the flat KV; for each chunk its last row."""
        positions: list[int] = []
        slots: list[int] = []
        last_rows: list[int] = []
        size = self.block_size
        for chunk in chunks:
            table = chunk.block_table
            at = range(chunk.start, chunk.start + len(chunk.token_ids))
            positions += at
            slots += [table[p // size] * size + p % size for p in at]
            last_rows.append(len(positions) - 1)
        return positions, slots, last_rows

    def _decode_buckets(self, chunks: Sequence[ScheduledChunk]) -> list[DecodeBucket]:
        """Cut decodes, sorted by context length, into buckets of bounded padding."""
        buckets: list[DecodeBucket] = []
        first = 0
        while first < len(chunks):
            shortest = chunks[first].start
            end = first + 1
            while end < len(chunks) and chunks[end].start - shortest <= max(
                _MAX_PADDING_TOKENS, shortest // 2
            ):
                end += 1
            buckets.append(self._bucket(chunks[first:end], first))
            first = end
        return buckets

    def _bucket(self, chunks: Sequence[ScheduledChunk], first: int) -> DecodeBucket:
        lens = [c.start + 1 for c in chunks]
        width = -(-max(lens) // self.block_size)
        blocks: list[int] = []
        for chunk, length in zip(chunks, lens, strict=True):
            used = -(-length // self.block_size)
            # Padding repeats a block of the request's own: another's KV is never even read.
            blocks += chunk.block_table[:used] + [chunk.block_table[0]] * (width - used)
        hidden = (
            torch.arange(width * self.block_size, device=self.device)[None, :] >= self._tensor(lens)[:, None]
        )
        bias = torch.zeros(hidden.shape, dtype=self.dtype, device=self.device).masked_fill_(
            hidden, float("-inf")
        )
        return DecodeBucket(first, len(chunks), width, self._tensor(blocks), bias[:, None, :], lens)

    def _prefill_spans(self, chunks: Sequence[ScheduledChunk], first: int) -> list[PrefillSpan]:
        spans: list[PrefillSpan] = []
        for chunk in chunks:
            num_queries, context = len(chunk.token_ids), chunk.start + len(chunk.token_ids)
            blocks = self._tensor(chunk.block_table[: -(-context // self.block_size)])
            spans.append(PrefillSpan(first, num_queries, chunk.start, blocks))
            first += num_queries
        return spans


def _memory(config: EngineConfig) -> tuple[int, int]:
    """Bytes that this rank may still take beside its part of the host pool, and its limit in all: of its
    device, or its part of the pod's. Raises `OutOfMemory` if the pool alone is too much."""
    pool = config.kv_offload_bytes // config.num_ranks
    available = machine.memory_available(num_sharing=config.num_ranks)
    if pool > available:
        raise OutOfMemory(
            f"kvOffloadMemory needs {pool / 2**20:,.0f} MiB and {available / 2**20:,.0f} MiB of memory are"
            " left: lower it, or raise the memory limit"
        )
    if config.device.startswith("cuda"):
        return torch.cuda.mem_get_info(config.device)
    return available - pool, machine.memory_limit() // config.num_ranks


def num_host_slots(config: EngineConfig, sizes: Sizes) -> int:
    """Blocks that `kv_offload_bytes` hold, on each rank its share of them. Raises ValueError if none."""
    if config.kv_offload_bytes == 0:
        return 0
    bytes_per_block = sizes.bytes_per_token * config.block_size
    num_slots = config.kv_offload_bytes // config.num_ranks // bytes_per_block
    if num_slots < 1:
        raise ValueError(f"kvOffloadMemory is less than one block of {bytes_per_block:,} bytes on each rank")
    return num_slots


def num_kv_blocks(config: EngineConfig, sizes: Sizes, context: int) -> int:
    """Blocks of the KV cache, as many on each rank. Raises `OutOfMemory` if they, and a step's memory beside
    them, can't be had."""
    num_guesses = 0 if config.speculation is None else config.speculation.num_tokens
    limits = Limits(context, config.max_num_seqs, config.max_batch_tokens, config.block_size, num_guesses)
    bytes_per_block = sizes.bytes_per_token * config.block_size
    budget = kv_budget(sizes, limits, *_memory(config))
    num_blocks = config.num_kv_blocks
    if num_blocks is None and config.kv_cache_bytes is not None:
        num_blocks = config.kv_cache_bytes // config.num_ranks // bytes_per_block
    if num_blocks is None:
        wanted = config.max_num_seqs * -(-context // config.block_size)
        num_blocks = min(wanted, budget // bytes_per_block)
    if num_blocks < 2:
        raise OutOfMemory(
            f"the KV cache has room for {num_blocks} blocks of {bytes_per_block:,} bytes; 2 are the least"
        )
    if num_blocks * bytes_per_block > budget:
        needed = num_blocks * bytes_per_block / 2**20
        raise OutOfMemory(
            f"the KV cache needs {needed:,.0f} MiB, and {budget / 2**20:,.0f} MiB are left for it beside"
            f" {activation_bytes(sizes, limits) / 2**20:,.0f} MiB for a step, its workspace and the reserve:"
            " lower kvCacheMemory, maxNumSeqs or maxBatchTokens, or raise the memory limit"
        )
    return num_blocks
