"""The CPU's own linear layers give what `nn.Linear` gives."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from sluice_runtime.engine.linear import PackedPart, pack_bfloat16, packs_bfloat16, quantize, weight_bytes


class Block(nn.Module):
    """As a decoder has them: three layers that share an input, one that does not."""

    def __init__(self, bias: bool) -> None:
        super().__init__()
        self.q_proj, self.k_proj = nn.Linear(32, 48, bias=bias), nn.Linear(32, 16, bias=bias)
        self.v_proj, self.o_proj = nn.Linear(32, 16, bias=bias), nn.Linear(80, 32, bias=bias)

    def forward(self, x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
        parts = [self.q_proj(x), self.k_proj(x), self.v_proj(y)]
        return torch.as_tensor(self.o_proj(torch.cat(parts, dim=-1)))


@pytest.mark.skipif(not packs_bfloat16(), reason="no processor for bfloat16")
@pytest.mark.parametrize("bias", [False, True])
@pytest.mark.parametrize("num_rows", [1, 3, 16, 200])
@torch.inference_mode()
def test_packed_layers_agree_also_where_inputs_differ(num_rows: int, bias: bool) -> None:
    torch.manual_seed(0)
    plain = Block(bias).bfloat16()
    packed: Any = copy.deepcopy(plain)
    pack_bfloat16(packed)
    assert isinstance(packed.q_proj, PackedPart)
    assert weight_bytes(packed) >= weight_bytes(plain)
    x, y = torch.randn(2, 1, num_rows, 32).bfloat16()
    for first, second in ((x, x), (x, y), (y, y), (x, x)):
        want, got = plain(first, second), packed(first, second)
        assert torch.allclose(want.float(), got.float(), atol=2e-2), (want - got).abs().max()


@torch.inference_mode()
def test_other_dtypes_are_left_alone() -> None:
    model = Block(False)
    pack_bfloat16(model)
    assert type(model.q_proj) is nn.Linear


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("num_rows", [1, 4, 5, 64])
@torch.inference_mode()
def test_int8_is_close_and_a_row_does_not_see_its_neighbours(num_rows: int, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    plain = nn.Sequential(nn.Linear(64, 96)).to(dtype)
    int8 = copy.deepcopy(plain)
    quantize(int8, "Int8")
    x = torch.randn(num_rows, 64).to(dtype)
    error = (plain(x) - int8(x)).abs().max() / plain(x).abs().max()
    assert error < 0.02
    alone = torch.cat([int8(row[None]) for row in x])
    assert torch.allclose(alone.float(), int8(x).float(), atol=2e-2)
