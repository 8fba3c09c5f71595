"""Memory of the prefix cache's second tier, and the copying: host_tier.py says what goes where.

Pages are copied as they are stored, quantised ones with their scales, so what comes back is bit for bit what
went. On a CPU both tiers are the same memory, and the tier is of use only to test it.
"""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor

from sluice_runtime.engine.host_tier import KvMoves


class HostPool:
    """`num_slots` slots for blocks of `pages`: tensors [heads, blocks, …], on one device."""

    def __init__(self, pages: Sequence[Tensor], num_slots: int) -> None:
        """Allocates; pinned where `pages` are on CUDA, so that copies need no staging. Raises RuntimeError if
        there is no such memory."""
        self._pages = [_bits(tensor) for tensor in pages]
        self._slots = [
            torch.zeros(
                tensor.shape[0],
                num_slots,
                *tensor.shape[2:],
                dtype=tensor.dtype,
                pin_memory=tensor.device.type == "cuda",
            )
            for tensor in self._pages
        ]

    @torch.inference_mode()
    def move(self, moves: KvMoves) -> None:
        """Do the copies of one step: all out, then all back. On CUDA it waits for them: a slot may be read by
        the next step's copies. That is not yet run on CUDA."""
        device = self._pages[0].device
        out_blocks, out_slots = _columns(moves.out)
        back_blocks, back_slots = _columns(moves.back)
        for pages, slots in zip(self._pages, self._slots, strict=True):
            if moves.out:
                slots.index_copy_(1, out_slots, pages.index_select(1, out_blocks.to(device)).cpu())
            if moves.back:
                pages.index_copy_(1, back_blocks.to(device), slots.index_select(1, back_slots).to(device))


def _bits(pages: Tensor) -> Tensor:
    """The same memory as integers, where a byte holds a value: FP8 knows no index_copy_."""
    return pages.view(torch.int8) if pages.element_size() == 1 else pages


def _columns(pairs: Sequence[tuple[int, int]]) -> tuple[Tensor, Tensor]:
    blocks, slots = [block for block, _ in pairs], [slot for _, slot in pairs]
    return torch.tensor(blocks, dtype=torch.long), torch.tensor(slots, dtype=torch.long)
