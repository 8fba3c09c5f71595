"""KV pages as the C kernels read and write them, for whole decoders and for models run by their modules.

One layer's pages are bound once. What the kernels store is what `pages.py` stores, to the last bit, so pages
may be written by one and read by the other. Invariant: a kernel reads nothing beyond a request's own
positions, whatever lies in the rest of its last block.
"""

from __future__ import annotations

import ctypes
from dataclasses import dataclass

import torch
from torch import Tensor

from sluice_runtime.engine import native

# Of kernels/model.h.
MAX_HEAD_DIM = 256
MAX_QUERIES = 64
"""Query heads that may share a key head."""
_KINDS = {torch.bfloat16: 0, torch.int8: 1, torch.float8_e4m3fn: 2}


@dataclass(frozen=True)
class Spans:
    """Who attends to what, int32: `spans` [requests, 4] are first row, number of queries, first position, and
    where in `tables` the request's blocks stand. Each row is in one of them."""

    spans: Tensor
    tables: Tensor


class NativePages:
    """One layer's keys and values [kv_heads, blocks, block_size, dim], and scales where they have some."""

    def __init__(self, keys: Tensor, values: Tensor, scales: tuple[Tensor, Tensor] | None) -> None:
        kv_heads, num_blocks, block_size, dim = keys.shape
        self.kv_heads, self.head_dim = kv_heads, dim
        self._kept = (keys, values, scales)
        pointers = (None, None) if scales is None else tuple(scale.data_ptr() for scale in scales)
        self.pages = native.Pages(
            keys.data_ptr(),
            values.data_ptr(),
            *pointers,
            _KINDS[keys.dtype],
            kv_heads,
            num_blocks * block_size,
            block_size,
            dim,
        )

    def write(self, keys: Tensor, values: Tensor, slots: Tensor) -> None:
        """Keys and values [tokens, kv_heads, dim] in bfloat16 into their slots [tokens] (int64)."""
        keys, values = keys.contiguous(), values.contiguous()
        native.library().sluice_write_kv(
            self.pages, keys.data_ptr(), values.data_ptr(), slots.data_ptr(), len(slots)
        )

    def attends(self, query: Tensor) -> bool:
        """Whether the kernel takes a query [1, heads, tokens, dim]."""
        num_heads = query.shape[1]
        fits = num_heads % self.kv_heads == 0 and num_heads // self.kv_heads <= MAX_QUERIES
        return fits and query.dtype == torch.bfloat16 and query.device.type == "cpu"

    def attend(self, query: Tensor, spans: Spans, scaling: float, window: int | None) -> Tensor:
        """Causal attention of `query` [tokens, heads, dim], which the kernel must take; a query sees `window`
        positions, its own included (None: all). Returns the same shape."""
        query = query.contiguous()
        num_tokens, num_heads, dim = query.shape
        attended = torch.empty_like(query)
        scratch = torch.empty(2 * num_tokens, dtype=torch.int32)
        attention = native.Attention(
            ctypes.pointer(self.pages),
            spans.spans.data_ptr(),
            spans.tables.data_ptr(),
            query.data_ptr(),
            attended.data_ptr(),
            len(spans.spans),
            num_heads,
            num_heads * dim,
            window or 0,
            scaling,
        )
        native.library().sluice_attend(attention, num_tokens, torch.get_num_threads(), scratch.data_ptr())
        return attended


def bind(keys: Tensor, values: Tensor, scales: tuple[Tensor, Tensor] | None) -> NativePages | None:
    """None where the kernels don't take such pages: they are elsewhere than in the CPU's memory, of another
    dtype, or odd in width; or there are no kernels."""
    fits = keys.device.type == "cpu" and keys.dtype in _KINDS and keys.shape == values.shape
    dim = keys.shape[-1]
    if not fits or dim % native.PANEL or dim > MAX_HEAD_DIM or native.library() is None:
        return None
    return NativePages(keys, values, scales)
