"""Each kernel in C gives what its plain oracle gives, and a row the same bits beside any others."""

from __future__ import annotations

import ctypes
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import Tensor, nn

from sluice_runtime.engine import native
from sluice_runtime.engine.kernels import build
from sluice_runtime.engine.linear import PRODUCTS
from sluice_runtime.engine.quantized import (
    QuantizedWeight,
    plain_product_int8,
    plain_product_steps,
    quantize_int4,
    quantize_int8,
)

needs_kernels = pytest.mark.skipif(native.library() is None, reason="no processor or library for the kernels")

# Whole panels and parts of one, one thread's share and none.
SHAPES = ((16, 32), (5, 64), (100, 96), (192, 160))
ROWS = (*range(1, 15), 33, 70)


def _in_steps(x: Tensor, weight: QuantizedWeight) -> Tensor:
    return plain_product_steps(x.float(), weight)


def _int4(symmetric: bool, group: int | None = 32) -> Callable[[Tensor], QuantizedWeight]:
    return lambda weight: quantize_int4(weight, group or weight.shape[1], symmetric=symmetric)


QUANTIZED = {
    "Int8": ("Int8", quantize_int8, native.pack_int8, _in_steps),
    "Int4": ("Int4", _int4(False), native.pack_int4, _in_steps),
    "Int4, no zeros": ("Int4", _int4(True), native.pack_int4, _in_steps),
    "Int4, groups of 8": ("Int4", _int4(False, 8), native.pack_int4, _in_steps),
    "Int4, one group": ("Int4", _int4(False, None), native.pack_int4, _in_steps),
    "Int4, one group, no zeros": ("Int4", _int4(True, None), native.pack_int4, _in_steps),
    "W8A8": ("W8A8", quantize_int8, native.pack_w8a8, lambda x, w: plain_product_int8(x.float(), w)),
}


def _assert_close(got: Tensor, want: Tensor) -> None:
    assert got.shape == want.shape
    assert (got.float() - want).abs().max() <= 0.01 * want.abs().max()


@needs_kernels
@pytest.mark.usefixtures("multiplied")
@pytest.mark.parametrize("num_threads", [1, 2, 5])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("bias", [False, True])
@torch.inference_mode()
def test_bfloat16(
    shape: tuple[int, int], bias: bool, num_threads: int, threads: Callable[[int], None]
) -> None:
    torch.manual_seed(0)
    threads(num_threads)
    linear = nn.Linear(shape[1], shape[0], bias=bias).bfloat16()
    packed = native.NativeLinear(linear)
    for num_rows in ROWS:
        x = torch.randn(num_rows, shape[1]).bfloat16()
        got = packed(x)
        offset = linear.bias.float() if bias else 0
        _assert_close(got, x.float() @ linear.weight.float().t() + offset)
        assert torch.equal(got, torch.cat([packed(row[None]) for row in x]))


@needs_kernels
@pytest.mark.parametrize("num_threads", [1, 2, 5])
@pytest.mark.parametrize("shape", SHAPES)
@pytest.mark.parametrize("name", sorted(QUANTIZED))
@torch.inference_mode()
def test_quantised(
    name: str, shape: tuple[int, int], num_threads: int, threads: Callable[[int], None]
) -> None:
    torch.manual_seed(0)
    threads(num_threads)
    kind, quantize, pack, oracle = QUANTIZED[name]
    weight = quantize(torch.randn(*shape).bfloat16())
    product = native.Product(kind, pack(weight), shape, weight.group)
    for num_rows in ROWS:
        x = torch.randn(num_rows, shape[1]).bfloat16()
        got = product(x)
        _assert_close(got, oracle(x, weight))
        assert torch.equal(got, torch.cat([product(row[None]) for row in x]))


@needs_kernels
@pytest.mark.parametrize("name", sorted(QUANTIZED.keys() - {"W8A8"}))
@torch.inference_mode()
def test_each_step_of_a_row_has_a_scale_of_its_own(name: str) -> None:
    # Whole numbers that 8 bits hold, every other 32 of them 128 times as large and with weights of nothing:
    # by one scale for all, what is left would round to almost nothing.
    levels = torch.arange(128) * 37 % 255 - 127
    levels[::8] = 127
    large = torch.arange(128) // 32 % 2 == 0
    x = torch.where(large, 128 * levels, levels)[None].bfloat16()
    kind, quantize, pack, _ = QUANTIZED[name]
    weight = quantize(torch.randn(48, 128, generator=torch.Generator().manual_seed(1)).bfloat16() * ~large)
    got = native.Product(kind, pack(weight), (48, 128), weight.group)(x)
    want = x.float() @ weight.dequantize().t()
    assert torch.allclose(got.float(), want, rtol=2**-8, atol=1e-4 * float(want.abs().max()))


@needs_kernels
@pytest.mark.parametrize("name", ["Int8", "W8A8"])
@pytest.mark.parametrize("width", [4, 36, 100])
@torch.inference_mode()
def test_a_row_may_end_within_a_step(name: str, width: int) -> None:
    torch.manual_seed(0)
    kind, quantize, pack, oracle = QUANTIZED[name]
    weight = quantize(torch.randn(20, width).bfloat16())
    product, x = native.Product(kind, pack(weight), (20, width), width), torch.randn(7, width).bfloat16()
    got = product(x)
    _assert_close(got, oracle(x, weight))
    assert torch.equal(got, torch.cat([product(row[None]) for row in x]))


@needs_kernels
@pytest.mark.parametrize("kind", sorted(PRODUCTS))
def test_ours_is_the_first_of_its_kind_in_bfloat16_on_a_cpu_only(kind: str) -> None:
    product, weight = PRODUCTS[kind]["native"], quantize_int8(torch.randn(16, 64))
    if kind == "Int4":
        weight = quantize_int4(torch.randn(16, 64))
    assert next(iter(PRODUCTS[kind])) == "native"
    assert product.fits(weight, torch.bfloat16, torch.device("cpu"))
    assert not product.fits(weight, torch.float32, torch.device("cpu"))
    assert not product.fits(weight, torch.bfloat16, torch.device("cuda"))


@needs_kernels
@pytest.mark.parametrize("name", [None, *sorted(QUANTIZED)])
@torch.inference_mode()
def test_an_empty_row_and_a_broken_one_stay_their_own(name: str | None) -> None:
    torch.manual_seed(0)
    linear = nn.Linear(64, 48, bias=False).bfloat16()
    product: Callable[[Tensor], Tensor] = native.NativeLinear(linear)
    if name is not None:
        kind, quantize, pack, _ = QUANTIZED[name]
        weight = quantize(linear.weight.detach())
        product = native.Product(kind, pack(weight), (48, 64), weight.group)
    x = torch.randn(15, 64).bfloat16()
    x[7] = 0
    broken = x.clone()
    broken[4] = float("nan")
    broken[14, 40] = float("inf")
    got = product(broken)
    assert not got[[4, 14]].isfinite().any()
    assert not got[7].any()
    others = [row for row in range(15) if row not in (4, 14)]
    assert torch.equal(got[others], product(x)[others])


def test_a_processor_without_the_instructions_is_told_which(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    cpuinfo = tmp_path / "cpuinfo"
    cpuinfo.write_text("processor : 0\nflags\t\t: fpu avx2 avx512f\n")
    flags = native._processor_flags(cpuinfo)
    assert flags == {"fpu", "avx2", "avx512f"}
    assert native._processor_flags(tmp_path / "none") == frozenset()
    monkeypatch.setattr(native, "_processor_flags", lambda: flags)
    assert "avx512_bf16" in str(native._missing())


def test_a_library_of_other_sources_is_not_loaded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(native, "_processor_flags", lambda: native._FLAGS)
    library = tmp_path / "libsluice.so"
    monkeypatch.setattr(build, "LIBRARY", library)
    assert native._missing() == "libsluice.so is not built"
    library.write_bytes(b"something else")
    monkeypatch.setattr(build, "is_fresh", lambda: build.sources_digest().encode() in library.read_bytes())
    assert native._missing() == "libsluice.so is of other sources"


def test_sources_are_told_apart(tmp_path: Path) -> None:
    for name in ("a.c", "b.h", "build.py"):
        (tmp_path / name).write_text(name)
    before = build.sources_digest(tmp_path)
    (tmp_path / "b.h").write_text("b.H")
    assert build.sources_digest(tmp_path) != before
    (tmp_path / "b.h").rename(tmp_path / "c.h")
    assert build.sources_digest(tmp_path) not in (before, build.sources_digest())


@pytest.mark.parametrize("structure", [native.Linear, native.Layer, native.Model, native.Step])
def test_structures_name_the_fields_of_their_headers_in_order(structure: type[ctypes.Structure]) -> None:
    text = "".join((build.DIRECTORY / name).read_text() for name in ("sluice.h", "model.h"))
    body = text[: text.index(f"}} {structure.__name__};")].rsplit("typedef struct {", 1)[1]
    lines = [line.split("/*")[0].strip() for line in body.splitlines()]
    names = [
        name.split()[-1].lstrip("*") for line in lines for name in line.rstrip(";").split(",") if name.strip()
    ]
    assert names == [name for name, *_ in structure._fields_]
