"""Attention over paged KV; exists because transformers' models call an attention function that we register.

A step's tokens of all requests are packed in one row. Each request's queries attend to its own keys in the
paged cache, causally, and to nothing else. Shapes: query [1, heads, tokens, dim]; caches [blocks, block_size,
kv_heads, dim].

Kernels stand in one table, the plain-torch oracle among them. Invariant: each kernel gives what the oracle
gives, up to rounding; what a kernel can't do (soft-capping, a window, devices) goes to the oracle, and what
the oracle can't do is refused, never ignored. In bfloat16 on a CPU the C kernel (native_pages.py) writes and
reads pages of every format; torch's decode quantised ones before a product.

`_varlen` is written from torch's source and is not yet run on CUDA.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from typing import Any

import torch
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn
from transformers import AttentionInterface

from sluice_runtime.engine import native_pages
from sluice_runtime.engine.pages import SCALE_DTYPE, PageFormat

IMPLEMENTATION = "sluice_paged"
_IGNORABLE = frozenset(
    {
        "dropout",
        "position_ids",
        "use_cache",
        "is_causal",
        "output_attentions",
        "output_hidden_states",
        "output_router_logits",
    }
)


# Queries of a prefill that are computed at once; 64 to 128 were the fastest here, 256 half as fast.
_TILE = 128


class UnsupportedAttention(Exception):
    """The model asks its attention for something that no kernel here does."""


@dataclass(frozen=True)
class DecodeBucket:
    """Requests with one query each and similar context lengths: rows `first` to `first + size` of the batch.

    `blocks` [size * width] are their block tables, padded to one width. `bias` [size, 1, width * block_size]
    is 0 on their keys and -inf on padding.
    """

    first: int
    size: int
    width: int
    blocks: Tensor
    bias: Tensor
    context_lens: list[int]


@dataclass(frozen=True)
class PrefillSpan:
    """One request with several queries: rows `first` to `first + num_queries`, positions from `start`.

    `blocks` covers its context.
    """

    first: int
    num_queries: int
    start: int
    blocks: Tensor


@dataclass
class PagedBatch:
    """All that attention needs to know about a step: where new KV goes (`slots` [tokens]) and who attends to
    what."""

    slots: Tensor
    only_slot: int | None
    decodes: Sequence[DecodeBucket]
    prefills: Sequence[PrefillSpan]
    max_queries: int
    max_context: int
    scratch: dict[str, Tensor] = field(default_factory=dict)
    # Instead of buckets and spans (varlen.py): tables [requests, width], lengths [requests], cumulative query
    # counts [requests + 1], all int32.
    block_tables: Tensor | None = None
    context_lens: Tensor | None = None
    query_starts: Tensor | None = None

    @cached_property
    def spans(self) -> native_pages.Spans:
        """Buckets and spans as the C kernel takes them, made once for all layers."""
        rows: list[tuple[int, int, int, int]] = []
        tables: list[Tensor] = []
        at = 0
        for bucket in self.decodes:
            for i, length in enumerate(bucket.context_lens):
                rows.append((bucket.first + i, 1, length - 1, at + i * bucket.width))
            tables.append(bucket.blocks)
            at += len(bucket.blocks)
        for span in self.prefills:
            rows.append((span.first, span.num_queries, span.start, at))
            tables.append(span.blocks)
            at += len(span.blocks)
        return native_pages.Spans(torch.tensor(rows, dtype=torch.int32), torch.cat(tables).int())


class PagedCache:
    """KV of all requests: one tensor of keys and one of values for each layer, allocated once.

    Stands in for transformers' Cache: models call `update`, which writes the new KV into its slots and
    returns it. On a CPU the memory is laid out by KV head, so that what attention gathers is ready for a
    batched product (measured here at 32 requests of 320 tokens: 1.0 ms against 5.6 ms); on CUDA by block, as
    its kernel wants. `keys` and `values` are [blocks, block_size, kv_heads, dim] either way, `keys_by_head`
    and `values_by_head` the same memory as [kv_heads, blocks, block_size, dim]. With a `format` (pages.py)
    they hold its dtype, and `key_scales` and `value_scales` are [kv_heads, blocks, block_size]; else None.
    `native` are each layer's pages for the C kernels, None where these don't take them.
    """

    def __init__(
        self,
        shapes: Sequence[tuple[int, int, int]],
        num_blocks: int,
        block_size: int,
        dtype: torch.dtype,
        device: str,
        page_format: PageFormat | None = None,
    ) -> None:
        """`shapes`: for each layer KV heads, key dim, value dim. `dtype` is the model's."""
        self.num_blocks, self.block_size = num_blocks, block_size
        self.format, self.compute_dtype = page_format, dtype
        dtype = dtype if page_format is None else page_format.dtype

        def allocate(heads: int, dim: int) -> tuple[Tensor, Tensor]:
            if device == "cpu":
                by_head = torch.zeros(heads, num_blocks, block_size, dim, dtype=dtype)
                return by_head.permute(1, 2, 0, 3), by_head
            by_block = torch.zeros(num_blocks, block_size, heads, dim, dtype=dtype, device=device)
            return by_block, by_block.permute(2, 0, 1, 3)

        keys = [allocate(heads, key_dim) for heads, key_dim, _ in shapes]
        values = [allocate(heads, value_dim) for heads, _, value_dim in shapes]
        self.keys, self.keys_by_head = [k for k, _ in keys], [k for _, k in keys]
        self.values, self.values_by_head = [v for v, _ in values], [v for _, v in values]
        self._key_slots = [k.flatten(1, 2) for k in self.keys_by_head]
        self._value_slots = [v.flatten(1, 2) for v in self.values_by_head]

        def scales(heads: int) -> Tensor | None:
            if page_format is None:
                return None
            return torch.zeros(heads, num_blocks, block_size, dtype=SCALE_DTYPE, device=device)

        self.key_scales = [scales(heads) for heads, _, _ in shapes]
        self.value_scales = [scales(heads) for heads, _, _ in shapes]
        self.native = [self._bound(layer) for layer in range(len(shapes))]
        self.batch: PagedBatch | None = None

    def _bound(self, layer: int) -> native_pages.NativePages | None:
        if self.compute_dtype != torch.bfloat16:
            return None
        of_keys, of_values = self.key_scales[layer], self.value_scales[layer]
        scales = None if of_keys is None or of_values is None else (of_keys, of_values)
        return native_pages.bind(self.keys_by_head[layer], self.values_by_head[layer], scales)

    def storage(self) -> list[Tensor]:
        """All that a block's KV is made of: views [kv_heads, blocks, block_size, …] of the memory."""
        scales = [tensor for tensor in (*self.key_scales, *self.value_scales) if tensor is not None]
        return [*self.keys_by_head, *self.values_by_head, *scales]

    def update(self, key: Tensor, value: Tensor, layer_idx: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        batch = self.batch
        assert batch is not None, "update outside a step"
        native, new_key, new_value = self.native[layer_idx], key[0], value[0]
        if native is not None and key.dtype == value.dtype == self.compute_dtype:
            native.write(new_key.transpose(0, 1), new_value.transpose(0, 1), batch.slots)
            return key, value
        new_key = self._encode(new_key, self.key_scales[layer_idx], batch)
        new_value = self._encode(new_value, self.value_scales[layer_idx], batch)
        for slots, new in ((self._key_slots[layer_idx], new_key), (self._value_slots[layer_idx], new_value)):
            if batch.only_slot is None:
                # Bytes are copied as bytes: FP8 has no index_copy_.
                bits = torch.int8 if slots.element_size() == 1 else slots.dtype
                slots.view(bits).index_copy_(1, batch.slots, new.view(bits))
            else:
                slots[:, batch.only_slot].copy_(new[:, 0])
        return key, value

    def _encode(self, new: Tensor, scales: Tensor | None, batch: PagedBatch) -> Tensor:
        """New KV [heads, tokens, dim] as stored. Its scales go into their slots."""
        if self.format is None or scales is None:
            return new
        stored, scale = self.format.encode(new)
        scales.flatten(1, 2).index_copy_(1, batch.slots, scale)
        return stored

    def read(self, layer: int, blocks: Tensor, dtype: torch.dtype) -> tuple[Tensor, Tensor]:
        """Keys and values of `blocks`, [kv_heads, len(blocks) * block_size, dim] in `dtype`. Plain, for the
        oracle."""
        both = []
        for pages, scales in (
            (self.keys_by_head[layer], self.key_scales[layer]),
            (self.values_by_head[layer], self.value_scales[layer]),
        ):
            found = pages[:, blocks]
            if self.format is not None and scales is not None:
                found = self.format.decode(found, scales[:, blocks], torch.empty_like(found, dtype=dtype))
            both.append(found.flatten(1, 2))
        return both[0], both[1]

    def get_seq_length(self, layer_idx: int = 0) -> int:
        """Part of transformers' interface; positions are always passed, so nothing depends on it."""
        return 0


class ProbeCache:
    """Learns each layer's KV shape from one forward instead of guessing it from field names of
    configurations."""

    def __init__(self) -> None:
        self.shapes: dict[int, tuple[int, int, int]] = {}
        self.attended: list[int] = []
        self.windows: dict[int, int | None] = {}
        self.has_softcap = False

    def update(self, key: Tensor, value: Tensor, layer_idx: int, *_: Any, **__: Any) -> tuple[Tensor, Tensor]:
        if layer_idx in self.shapes:
            raise UnsupportedAttention(f"layer {layer_idx} writes its KV twice")
        self.shapes[layer_idx] = (key.shape[1], key.shape[3], value.shape[3])
        return key, value

    def get_seq_length(self, layer_idx: int = 0) -> int:
        return 0


@dataclass(frozen=True)
class AttentionOptions:
    """What a layer asks for: score scale, window of visible positions (None: all), soft cap of scores (None:
    none)."""

    scaling: float
    window: int | None = None
    softcap: float | None = None


Kernel = Callable[[Tensor, Tensor, Tensor, PagedCache, int, AttentionOptions], Tensor]


def paged_attention(
    module: Any,
    query: Tensor,
    key: Tensor,
    value: Tensor,
    attention_mask: Tensor | None,
    scaling: float | None = None,
    sliding_window: int | None = None,
    softcap: float | None = None,
    paged_cache: PagedCache | ProbeCache | None = None,
    **others: Any,
) -> tuple[Tensor, None]:
    """The function transformers calls. Returns [1, tokens, heads, dim]."""
    unknown = {k for k, v in others.items() if v is not None and k not in _IGNORABLE}
    if attention_mask is not None or unknown:
        raise UnsupportedAttention(
            f"attention arguments {sorted(unknown) or ['attention_mask']} are not supported"
        )
    if not getattr(module, "is_causal", True):
        raise UnsupportedAttention("only causal attention is supported")
    layer = int(module.layer_idx)
    options = AttentionOptions(
        query.shape[-1] ** -0.5 if scaling is None else scaling, sliding_window, softcap
    )
    if isinstance(paged_cache, ProbeCache):
        paged_cache.attended.append(layer)
        paged_cache.windows[layer] = sliding_window
        paged_cache.has_softcap |= softcap is not None
        return query.transpose(1, 2).new_zeros(1, query.shape[2], query.shape[1], value.shape[3]), None
    if paged_cache is None:
        raise UnsupportedAttention("this model does not hand keyword arguments on to its attention")
    batch = paged_cache.batch
    assert batch is not None, "attention outside a step"
    if sliding_window is not None and batch.max_context <= sliding_window:
        options = AttentionOptions(options.scaling, None, softcap)
    kernel = select_kernel(query, options, paged_cache.native[layer], batch.block_tables is not None)
    return kernel(query, key, value, paged_cache, layer, options).unsqueeze(0), None


def select_kernel(
    query: Tensor,
    options: AttentionOptions,
    pages: native_pages.NativePages | None = None,
    has_tables: bool = False,
) -> Kernel:
    """The fastest kernel that can do it; the oracle can do everything. `pages`: the layer's, where the C
    kernel reads them. `has_tables`: the batch is one for `_varlen` (varlen.py has seen to it that it can)."""
    if has_tables:
        return _varlen
    if pages is not None and options.softcap is None and pages.attends(query):
        return _native
    if options.window is not None or options.softcap is not None:
        return oracle
    return _matmul


def oracle(
    query: Tensor, key: Tensor, value: Tensor, cache: PagedCache, layer: int, options: AttentionOptions
) -> Tensor:
    """Plain torch, request by request, softmax in float32. Returns [tokens, heads, dim]."""
    del key
    batch = cache.batch
    assert batch is not None
    out = query.new_empty(query.shape[2], query.shape[1], value.shape[3])
    spans: list[tuple[int, int, int, Tensor]] = [
        (p.first, p.num_queries, p.start, p.blocks) for p in batch.prefills
    ]
    for bucket in batch.decodes:
        tables = bucket.blocks.view(bucket.size, bucket.width)
        spans += [(bucket.first + i, 1, bucket.context_lens[i] - 1, tables[i]) for i in range(bucket.size)]
    for first, num_queries, start, blocks in spans:
        context = start + num_queries
        k, v = (kv[:, :context] for kv in cache.read(layer, blocks, query.dtype))
        q = query[0, :, first : first + num_queries]
        groups = q.shape[0] // k.shape[0]
        k, v = k.repeat_interleave(groups, 0), v.repeat_interleave(groups, 0)
        scores = (q @ k.transpose(1, 2)).float() * options.scaling
        if options.softcap is not None:
            scores = options.softcap * torch.tanh(scores / options.softcap)
        at = torch.arange(start, context, device=q.device)[:, None]
        seen = torch.arange(context, device=q.device)[None, :]
        hidden = seen > at if options.window is None else (seen > at) | (seen <= at - options.window)
        weights = scores.masked_fill(hidden, float("-inf")).softmax(dim=-1).to(q.dtype)
        out[first : first + num_queries] = (weights @ v).transpose(0, 1)
    return out


def _matmul(
    query: Tensor, key: Tensor, value: Tensor, cache: PagedCache, layer: int, options: AttentionOptions
) -> Tensor:
    """Batched products over gathered pages: one pair for a bucket of decodes, one for each tile of a prefill.

    Two to five times as fast as torch's flash attention on a CPU in bfloat16, whose products do not use its
    matrix instructions well. Scores are rounded to the model's dtype, as in transformers' own eager
    attention.
    """
    batch = cache.batch
    assert batch is not None
    num_heads, kv_heads, value_dim = query.shape[1], key.shape[1], value.shape[3]
    out = query.new_empty(query.shape[2], num_heads, value_dim)
    # The query heads of a KV head stand where a sequence would: no key is copied for grouped heads.
    groups, num_tokens = num_heads // kv_heads, query.shape[2]
    grouped = (query[0] * options.scaling).view(kv_heads, groups, num_tokens, -1)
    attended = out.view(num_tokens, kv_heads, groups, value_dim)
    for bucket in batch.decodes:
        rows = slice(bucket.first, bucket.first + bucket.size)
        k = _gather(cache, cache.keys_by_head[layer], cache.key_scales[layer], bucket.blocks, "k").view(
            kv_heads * bucket.size, -1, key.shape[3]
        )
        v = _gather(cache, cache.values_by_head[layer], cache.value_scales[layer], bucket.blocks, "v").view(
            kv_heads * bucket.size, -1, value_dim
        )
        q = grouped[:, :, rows].transpose(1, 2).flatten(0, 1)
        scores = torch.bmm(q, k.transpose(1, 2)).view(kv_heads, bucket.size, groups, -1).add_(bucket.bias)
        product = torch.bmm(scores.softmax(dim=-1).flatten(0, 1), v)
        attended[rows] = product.view(kv_heads, bucket.size, groups, -1).transpose(0, 1)
    for span in batch.prefills:
        rows = slice(span.first, span.first + span.num_queries)
        if span.start == 0 and cache.format is None:
            k, v = key[0, :, rows], value[0, :, rows]
        else:
            k = _gather(cache, cache.keys_by_head[layer], cache.key_scales[layer], span.blocks, "k").flatten(
                1, 2
            )
            v = _gather(
                cache, cache.values_by_head[layer], cache.value_scales[layer], span.blocks, "v"
            ).flatten(1, 2)
        _prefill(grouped[:, :, rows], k, v, span.start, attended[rows], batch)
    return out


def _prefill(q: Tensor, k: Tensor, v: Tensor, start: int, out: Tensor, batch: PagedBatch) -> None:
    """Causal attention of q [kv_heads, groups, queries, dim], tile by tile: scores stay in the processor's
    cache, and only a tile's own square needs a mask.

        keys      0 ···· start ··· | tile |
        queries   i  [ all visible | ◣    ]
    """
    kv_heads, groups, num_queries, _ = q.shape
    hidden = batch.scratch.get("hidden")
    if hidden is None:
        square = torch.full((_TILE, _TILE), float("-inf"), dtype=q.dtype, device=q.device)
        hidden = batch.scratch["hidden"] = square.triu_(1)
    for i in range(0, num_queries, _TILE):
        size = min(_TILE, num_queries - i)
        context = start + i + size
        tile = q[:, :, i : i + size].flatten(1, 2)
        scores = torch.bmm(tile, k[:, :context].transpose(1, 2)).view(kv_heads, groups, size, context)
        scores[..., context - size :] += hidden[:size, :size]
        product = torch.bmm(scores.softmax(dim=-1).flatten(1, 2), v[:, :context])
        out[i : i + size] = product.view(kv_heads, groups, size, -1).permute(2, 0, 1, 3)


def _gather(cache: PagedCache, pages: Tensor, scales: Tensor | None, blocks: Tensor, name: str) -> Tensor:
    """`pages[:, blocks]` in the model's dtype, in memory that is kept between steps: fresh memory would cost
    more than the copy."""
    if scales is None:
        return _selected(cache, pages, blocks, name, pages.dtype)
    assert cache.format is not None
    # One byte a value: FP8 has no index_select.
    stored = _selected(cache, pages.view(torch.int8), blocks, f"{name} stored", torch.int8)
    scale = scales.index_select(1, blocks)
    out = _kept(cache, stored.shape, f"{name} decoded", cache.compute_dtype)
    return cache.format.decode(stored.view(cache.format.dtype), scale, out)


def _selected(cache: PagedCache, pages: Tensor, blocks: Tensor, name: str, dtype: torch.dtype) -> Tensor:
    num_heads, _, block_size, dim = pages.shape
    out = _kept(cache, torch.Size((num_heads, len(blocks), block_size, dim)), name, dtype)
    return torch.index_select(pages, 1, blocks, out=out)


def _kept(cache: PagedCache, shape: torch.Size, name: str, dtype: torch.dtype) -> Tensor:
    assert cache.batch is not None
    scratch, num_values = cache.batch.scratch, shape.numel()
    kept = scratch.get(name)
    if kept is None or kept.numel() < num_values:
        device = cache.keys[0].device
        kept = scratch[name] = torch.empty(num_values * 5 // 4, dtype=dtype, device=device)
    return kept[:num_values].view(shape)


def _varlen(
    query: Tensor, key: Tensor, value: Tensor, cache: PagedCache, layer: int, options: AttentionOptions
) -> Tensor:
    """torch's variable-length attention straight on the pages. Not yet run on CUDA; there is no other."""
    del key, value
    batch = cache.batch
    assert batch is not None
    assert batch.query_starts is not None
    # Its window counts the keys before a query; ours, as transformers', counts the query's own too.
    before = -1 if options.window is None else options.window - 1
    attended = varlen_attn(
        query[0].transpose(0, 1),
        cache.keys[layer],
        cache.values[layer],
        batch.query_starts,
        None,
        batch.max_queries,
        batch.max_context,
        scale=options.scaling,
        window_size=(before, 0),
        enable_gqa=query.shape[1] != cache.keys[layer].shape[2],
        seqused_k=batch.context_lens,
        block_table=batch.block_tables,
    )
    assert isinstance(attended, Tensor)
    return attended


def _native(
    query: Tensor, key: Tensor, value: Tensor, cache: PagedCache, layer: int, options: AttentionOptions
) -> Tensor:
    """The C kernel of whole decoders (kernels/attention.c), straight on pages of any format."""
    del key, value
    batch, pages = cache.batch, cache.native[layer]
    assert batch is not None
    assert pages is not None
    return pages.attend(query[0].transpose(0, 1), batch.spans, options.scaling, options.window)


KERNELS: dict[str, Kernel] = {"oracle": oracle, "matmul": _matmul, "varlen": _varlen, "native": _native}

AttentionInterface.register(IMPLEMENTATION, paged_attention)
