"""Quantised weights and pages of KV: by hand, within their bounds, and each kernel against its oracle."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from sluice_runtime.engine import native
from sluice_runtime.engine.linear import (
    PRODUCTS,
    Form,
    Product,
    QuantizedLinear,
    integer_sums_are_exact,
    quantize,
)
from sluice_runtime.engine.pages import FORMATS
from sluice_runtime.engine.quantized import (
    QuantizedWeight,
    joined,
    pack_nibbles,
    plain_product,
    plain_product_steps,
    quantize_int4,
    quantize_int8,
    quantize_rows,
    unpack_nibbles,
)
from sluice_runtime.engine.types import KvCacheDtype


def _normal(*shape: int, seed: int = 1, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def test_int8_by_hand() -> None:
    found = quantize_int8(torch.tensor([[2.54, 1.0, -0.01, 0.0], [0.0, 0.0, 0.0, 0.0]]))
    assert found.data.tolist() == [[127, 50, 0, 0], [0, 0, 0, 0]]
    assert found.scale[0].tolist() == pytest.approx([0.02])
    assert found.dequantize()[0].tolist() == pytest.approx([2.54, 1.0, 0.0, 0.0])


def test_int4_by_hand() -> None:
    # 15 steps of 0.2 reach from -1 to 2, and 0 is the fifth.
    found = quantize_int4(torch.tensor([[-1.0, 2.0, 0.4, 0.0]]), group=4, symmetric=False)
    assert found.levels().tolist() == [[0, 15, 7, 5]]
    assert found.data.tolist() == [[0 | 15 << 4, 7 | 5 << 4]]
    assert found.zero is not None
    assert (found.zero.tolist(), found.scale[0].tolist()) == ([[5]], pytest.approx([0.2]))
    # The larger side is 2.4: eight steps of 0.3, so that it has level 0 and its sign is the scale's, negated.
    found = quantize_int4(torch.tensor([[2.4, -2.1, 0.3, 0.0]]), group=4, symmetric=True)
    assert found.scale[0].tolist() == pytest.approx([-0.3])
    assert found.levels().tolist() == [[0, 15, 7, 8]]
    assert found.dequantize()[0].tolist() == pytest.approx([2.4, -2.1, 0.3, 0.0])


@given(
    seed=st.integers(0, 1000),
    dtype=st.sampled_from([torch.float32, torch.bfloat16, torch.float16]),
    scale=st.floats(1e-3, 1e3),
)
def test_int8_is_off_by_half_a_step_at_most(seed: int, dtype: torch.dtype, scale: float) -> None:
    weight = (_normal(5, 64, seed=seed) * scale).to(dtype)
    found = quantize_int8(weight)
    # The scale is rounded to the dtype, so the largest value may lie a little beyond 127 steps.
    bound = found.scale * (0.5 + 127 * torch.finfo(dtype).eps)
    assert ((found.dequantize() - weight.float()).abs() <= bound + 1e-6 * scale).all()


@pytest.mark.parametrize("symmetric", [True, False])
@pytest.mark.parametrize("seed", range(5))
def test_int4_stays_within_its_bounds(symmetric: bool, seed: int) -> None:
    weight = _normal(7, 96, seed=seed)
    grouped = weight.view(7, -1, 32)
    error = (
        (quantize_int4(weight, symmetric=symmetric).dequantize().view_as(grouped) - grouped).square().sum(-1)
    )
    low, high = grouped.amin(-1).clamp_max(0), grouped.amax(-1).clamp_min(0)
    step = torch.maximum(-low, high) / 8 if symmetric else (high - low) / 15
    # Round to nearest over the whole range: half a step each, one step where seven of them end; and for the
    # asymmetric half a step more, since its zero is rounded.
    assert (error <= 32 * step.square()).all()
    assert float(error.sum() / grouped.square().sum()) < 0.02


@given(st.lists(st.integers(0, 15), min_size=2, max_size=64).filter(lambda x: len(x) % 2 == 0))
def test_nibbles_come_back(values: list[int]) -> None:
    levels = torch.tensor([values])
    assert unpack_nibbles(pack_nibbles(levels)).tolist() == [values]


def test_one_product_of_several_is_theirs() -> None:
    weights = [quantize_int4(_normal(n, 64, seed=n)) for n in (16, 8)]
    both = joined(weights)
    assert both is not None
    assert torch.equal(both.dequantize(), torch.cat([w.dequantize() for w in weights]))
    assert joined([weights[0], quantize_int8(_normal(8, 64))]) is None


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"data": torch.zeros(2, 8, dtype=torch.int8)}, "data of 4 bits"),
        ({"group": 5}, "whole groups of 5"),
        ({"scale": torch.ones(2, 3)}, "scale must be"),
        ({"scale": torch.ones(2, 2, dtype=torch.float16)}, "scale must be"),
        ({"zero": torch.zeros(2, 2, dtype=torch.int8)}, "zero must be"),
    ],
)
def test_a_container_holds_only_what_fits(change: dict[str, Any], says: str) -> None:
    good: dict[str, Any] = {
        "bits": 4,
        "data": torch.zeros(2, 8, dtype=torch.uint8),
        "scale": torch.ones(2, 2),
        "zero": None,
        "group": 8,
    }
    QuantizedWeight(**good)
    with pytest.raises(ValueError, match=says):
        QuantizedWeight(**(good | change))


def _weight(kind: str, group: int | None, symmetric: bool, dtype: torch.dtype) -> QuantizedWeight:
    weight = _normal(48, 128, dtype=dtype)
    if kind == "Int4":
        return quantize_int4(weight, group or 32, symmetric=symmetric)
    return quantize_int8(weight)


def _run(product: Product, rows: torch.Tensor, weight: QuantizedWeight) -> torch.Tensor:
    form = Form((weight.out_features, weight.in_features), weight.group)
    return product.bind(product.lay_out(weight, rows.dtype), form)(rows)


@pytest.mark.parametrize("num_rows", [1, 2, 4, 5, 33])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize(
    ("kind", "group", "symmetric"),
    [("Int8", None, True), ("Int4", 32, True), ("Int4", 64, False), ("W8A8", None, True)],
)
def test_each_kernel_gives_what_the_oracle_gives(
    kind: str, group: int | None, symmetric: bool, dtype: torch.dtype, num_rows: int
) -> None:
    weight, device = _weight(kind, group, symmetric, dtype), torch.device("cpu")
    rows = _normal(num_rows, 128, seed=2, dtype=dtype)
    # In float32 from the same numbers, so that only the kernel's own rounding is judged.
    plain = _run(PRODUCTS[kind]["plain"], rows.float(), weight)
    tolerance = {torch.float32: 1e-5, torch.float16: 2e-3, torch.bfloat16: 1e-2}[dtype]
    fitting = [name for name, p in PRODUCTS[kind].items() if p.fits(weight, dtype, device)]
    if kind != "W8A8" or integer_sums_are_exact():
        assert len(fitting) >= 2, "an oracle alone is no comparison"
    for name in fitting:
        got = _run(PRODUCTS[kind][name], rows, weight)
        in_steps = name == "native" and kind != "W8A8"
        want = plain_product_steps(rows.float(), weight) if in_steps else plain
        assert got.dtype == dtype
        assert float((got.float() - want).abs().max() / want.abs().max()) < tolerance, name


def test_a_product_that_saturates_on_this_processor_is_not_used(monkeypatch: pytest.MonkeyPatch) -> None:
    """As oneDNN's without VNNI: rows are shifted to be unsigned, and pairs of products added in 16 bits."""

    def saturating(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        pairs = ((a.int() + 128)[:, :, None] * b.int()).view(len(a), -1, 2, b.shape[1]).sum(2)
        return pairs.clamp(-(2**15), 2**15 - 1).sum(1) - 128 * b.int().sum(0)

    monkeypatch.setattr(torch, "_int_mm", saturating)
    integer_sums_are_exact.cache_clear()
    try:
        layer = QuantizedLinear(_weight("W8A8", None, True, torch.float32), "W8A8", torch.float32)
        assert layer.kernel == "plain"
    finally:
        integer_sums_are_exact.cache_clear()


@pytest.mark.parametrize("kind", ["Int8", "Int4", "W8A8"])
def test_a_row_does_not_see_its_neighbours(kind: str) -> None:
    layer = QuantizedLinear(_weight(kind, None, True, torch.float32), kind, torch.float32, torch.ones(48))
    x = _normal(9, 128, seed=4)
    alone = torch.cat([layer(row[None]) for row in x])
    assert torch.allclose(alone, layer(x), atol=1e-4)
    assert torch.allclose(layer(x.view(3, 3, 128)).view(9, 48), layer(x))


@pytest.mark.parametrize(("bits", "group", "size"), [(8, 40, 32), (4, 8, 8), (4, 20, 4), (4, 40, 8)])
def test_activations_are_rounded_in_steps(bits: int, group: int, size: int) -> None:
    weight, x = torch.eye(40), _normal(3, 40, seed=6)
    found = quantize_int8(weight) if bits == 8 else quantize_int4(weight, group)
    # A weight of ones on the diagonal shows what became of x.
    assert torch.equal(found.dequantize(), weight)
    steps = torch.split(x, size, dim=1)
    peaks = torch.cat([step.abs().amax(1, keepdim=True).expand_as(step) for step in steps], 1)
    want = (x / peaks * 127).round() / 127 * peaks
    assert torch.allclose(plain_product_steps(x, found), want, atol=1e-6)
    assert not torch.equal(want, x)


@pytest.mark.parametrize("kind", ["Int8", "Int4", "W8A8"])
def test_a_layer_adds_its_bias_in_each_form(kind: str) -> None:
    weight, bias = _weight(kind, None, True, torch.bfloat16), _normal(48, seed=5).bfloat16()
    rows = _normal(3, 128, seed=2, dtype=torch.bfloat16)
    for dtype in (torch.bfloat16, torch.float32):
        layer = QuantizedLinear(weight, kind, dtype, bias.to(dtype))
        without = QuantizedLinear(weight, kind, dtype)
        apart = layer(rows.to(dtype)).float() - without(rows.to(dtype)).float() - bias.float()
        assert apart.abs().max() < 0.2


@pytest.mark.parametrize("kind", ["Int8", "Int4", "W8A8"])
def test_a_layer_binds_its_product_once(kind: str, monkeypatch: pytest.MonkeyPatch) -> None:
    layer = QuantizedLinear(_weight(kind, None, True, torch.bfloat16), kind, torch.bfloat16)
    monkeypatch.setattr(native, "Product", None)  # to make one more would fail
    rows = _normal(3, 128, seed=2, dtype=torch.bfloat16)
    assert torch.equal(layer(rows), layer(rows))
    # Ours reads the very buffers that the layer holds, and is counted by.
    used = getattr(layer.bound, "tensors", dict(layer.named_buffers()))
    assert {t.data_ptr() for t in used.values()} == {t.data_ptr() for t in layer.buffers()}


def test_a_row_of_activations_has_its_own_scale() -> None:
    levels, scale = quantize_rows(torch.tensor([[1.27, -0.5], [254.0, 0.0], [0.0, 0.0]]))
    assert levels.tolist() == [[127, -50], [127, 0], [0, 0]]
    assert scale.view(-1).tolist() == pytest.approx([0.01, 2.0, 0.0], abs=1e-9)


class _Decoder(nn.Module):
    def __init__(self, width: int) -> None:
        super().__init__()
        self.q_proj, self.k_proj, self.v_proj = (nn.Linear(width, n) for n in (32, 16, 16))
        self.o_proj = nn.Linear(width, 16, bias=False)
        self.lm_head = nn.Linear(width, 64, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        parts = [self.q_proj(x), self.k_proj(x), self.v_proj(x), self.o_proj(x), self.lm_head(x)]
        return torch.cat(parts, -1)


@pytest.mark.parametrize("kind", ["Int8", "Int4", "W8A8"])
@torch.inference_mode()
def test_a_model_keeps_its_answers(kind: str) -> None:
    torch.manual_seed(0)
    plain, x = _Decoder(64), _normal(6, 64)
    want = plain(x)
    quantize(plain, kind)
    got = plain(x)
    assert not [m for m in plain.modules() if type(m) is nn.Linear]
    assert float((got - want).norm() / want.norm()) < (0.12 if kind == "Int4" else 0.02)


def test_int4_refuses_inputs_that_are_no_whole_groups() -> None:
    with pytest.raises(ValueError, match=r"quantization Int4: .*: 48 inputs are not whole groups of 32"):
        quantize(_Decoder(48), "Int4")


@pytest.mark.parametrize("kind", [KvCacheDtype.INT8, KvCacheDtype.FP8])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@given(seed=st.integers(0, 100), size=st.floats(1e-3, 1e3))
def test_kv_comes_back_within_its_bound(
    kind: KvCacheDtype, dtype: torch.dtype, seed: int, size: float
) -> None:
    page_format = FORMATS[kind]
    assert page_format is not None
    new = (_normal(2, 5, 16, seed=seed) * size).to(dtype)
    new[0, 0] = 0
    stored, scale = page_format.encode(new)
    back = page_format.decode(stored, scale, torch.empty_like(new))
    largest = new.abs().amax(-1, keepdim=True).float()
    # int8: half of 1/127 of the largest. e4m3: 3 bits behind the point, or its smallest step. And what
    # rounding the scale cuts off at the top, and rounding to the dtype.
    step = largest / 254 if kind is KvCacheDtype.INT8 else new.float().abs() / 16 + largest / 448 / 1024
    bound = step * 1.01 + largest * 2**-8 + new.float().abs() * torch.finfo(dtype).eps
    assert ((back.float() - new.float()).abs() <= bound).all()
    assert not back[0, 0].any()


def test_int8_kv_by_hand() -> None:
    page_format = FORMATS[KvCacheDtype.INT8]
    assert page_format is not None
    # A scale that bfloat16 holds: 4 / 127 would be rounded.
    stored, scale = page_format.encode(torch.tensor([[127.0 / 32, -1.0, 0.02]]))
    assert (stored.tolist(), scale.tolist()) == ([[127, -32, 1]], [1 / 32])


def test_a_product_of_plain_weights_is_the_weights() -> None:
    weight = quantize_int8(_normal(4, 8))
    assert torch.allclose(plain_product(torch.eye(8), weight).t(), weight.dequantize())
