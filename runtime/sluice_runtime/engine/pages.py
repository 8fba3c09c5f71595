"""How a page of KV holds its numbers: in the model's dtype, or as int8 or FP8 (e4m3) with a scale.

    page    [kv_heads, blocks, block_size, dim]    int8 or float8_e4m3fn
    scale   [kv_heads, blocks, block_size]         bfloat16, one for each token of each head

A scale for each token needs no calibration, and a token's KV never changes once it is written: a page can be
filled token by token. Scales are rounded to bfloat16 before values are divided by them, so that rounding them
costs no more than the cut at the largest value. By hand, int8: (127/32, -1) has scale 1/32, is kept as
(127, -32), and comes back as it was.

Invariant: whoever attends reads what the page holds, in the step that writes it too. An answer therefore does
not depend on how its prompt was cut into chunks, or on whether a prefix was found in the cache.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor

from sluice_runtime.engine.types import KvCacheDtype

_LEAST_SCALE = 1e-12
SCALE_DTYPE = torch.bfloat16


@dataclass(frozen=True)
class PageFormat:
    """A dtype of pages and the `largest` value that it is used for."""

    dtype: torch.dtype
    largest: float

    def encode(self, new: Tensor) -> tuple[Tensor, Tensor]:
        """[..., dim] as stored, and its scales [...]."""
        scale = new.abs().amax(dim=-1).float().div_(self.largest).clamp_min_(_LEAST_SCALE).to(SCALE_DTYPE)
        levels = new.float() / scale.float()[..., None]
        if not self.dtype.is_floating_point:
            levels.round_()
        return levels.clamp_(-self.largest, self.largest).to(self.dtype), scale

    def decode(self, stored: Tensor, scale: Tensor, out: Tensor) -> Tensor:
        """The inverse, into `out` and in its dtype."""
        return out.copy_(stored).mul_(scale[..., None])


FORMATS: dict[KvCacheDtype, PageFormat | None] = {
    KvCacheDtype.AUTO: None,
    KvCacheDtype.INT8: PageFormat(torch.int8, 127),
    KvCacheDtype.FP8: PageFormat(torch.float8_e4m3fn, 448),
}
