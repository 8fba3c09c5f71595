"""Weights as small integers: one container, what fills it, and plain products that are true by inspection.

    weight[o, i] ≈ scale[o, i // group] * (integer[o, i] - zero[o, i // group])

Quantisers round to nearest, without a calibration set (why groups matter at 4 bits: Dettmers and Zettlemoyer,
arXiv 2212.09720). Scales are rounded to the model's own dtype before anything is divided by them, so that a
kernel which takes them in that dtype adds no error. By hand, asymmetric: the group [-1, 2] has scale 3 / 15 =
0.2 and zero 5, so it becomes 0 and 15, and comes back as -1 and 2.

Invariant: `dequantize` is the meaning of a container; each kernel is tested against it.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal

import torch
from torch import Tensor, nn

INT4_GROUP = 32
# Neighbouring inputs of a row that share a scale where products of Int8 and Int4 sum integers.
STEP = 32
_LEAST_SCALE = 1e-12
# Weights that are quantised at once: what it takes beside the weight stays small.
_SLICE = 1 << 22


@dataclass(frozen=True)
class QuantizedWeight:
    """A weight [out, in] in 8 or 4 bits.

    `data`: int8 [out, in], or for 4 bits uint8 [out, in / 2], an even input in the low nibble, 0 to 15.
    `scale`: float32 [out, in / group]. `zero`: uint8 of the same shape, for 4 bits only; None is symmetric: 8
    for 4 bits, 0 for 8. `group`: inputs that share a scale; all of them for one scale an output. Raises
    ValueError where shapes and types do not agree.
    """

    bits: Literal[8, 4]
    data: Tensor
    scale: Tensor
    zero: Tensor | None
    group: int

    def __post_init__(self) -> None:
        kind = torch.int8 if self.bits == 8 else torch.uint8
        if self.data.dtype != kind or self.data.dim() != 2:
            raise ValueError(f"data of {self.bits} bits must be {kind} of two dimensions")
        if self.group < 1 or self.in_features % self.group:
            raise ValueError(f"{self.in_features} inputs are not whole groups of {self.group}")
        shape = (self.out_features, self.in_features // self.group)
        if self.scale.dtype != torch.float32 or self.scale.shape != shape:
            raise ValueError(f"scale must be float32 {list(shape)}, not {list(self.scale.shape)}")
        if self.zero is not None and (
            self.bits == 8 or self.zero.dtype != torch.uint8 or self.zero.shape != shape
        ):
            raise ValueError(f"zero must be uint8 {list(shape)}, and 4 bits only")

    @property
    def out_features(self) -> int:
        return self.data.shape[0]

    @property
    def in_features(self) -> int:
        return self.data.shape[1] * (8 // self.bits)

    def levels(self) -> Tensor:
        """What is stored: int8 [out, in]; 0 to 15 for 4 bits."""
        return self.data if self.bits == 8 else unpack_nibbles(self.data)

    def dequantize(self) -> Tensor:
        """float32 [out, in]."""
        grouped = self.levels().float().view(self.out_features, -1, self.group)
        zero = (0.0 if self.bits == 8 else 8.0) if self.zero is None else self.zero.float()[..., None]
        return ((grouped - zero) * self.scale[..., None]).view(self.out_features, self.in_features)


def joined(weights: Sequence[QuantizedWeight]) -> QuantizedWeight | None:
    """One product in place of several with the same input; None where their forms differ."""
    first = weights[0]
    if len({(w.bits, w.group, w.in_features, w.zero is None) for w in weights}) > 1:
        return None
    zeros = [w.zero for w in weights if w.zero is not None]
    return QuantizedWeight(
        first.bits,
        torch.cat([w.data for w in weights]),
        torch.cat([w.scale for w in weights]),
        torch.cat(zeros) if zeros else None,
        first.group,
    )


def pack_nibbles(levels: Tensor) -> Tensor:
    """[out, in] of 0 to 15 as uint8 [out, in / 2]."""
    levels = levels.to(torch.uint8)
    return levels[:, ::2] | (levels[:, 1::2] << 4)


def unpack_nibbles(data: Tensor) -> Tensor:
    """The inverse; int8."""
    return torch.stack((data & 15, data >> 4), dim=-1).flatten(-2).to(torch.int8)


def quantize_int8(weight: Tensor) -> QuantizedWeight:
    """Symmetric, one scale for each output: no value is off by more than half a scale."""
    scale = _rounded(weight.float().abs().amax(dim=1, keepdim=True) / 127, weight.dtype)
    data = (weight.float() / scale).round().clamp(-127, 127).to(torch.int8)
    return QuantizedWeight(8, data, scale, None, weight.shape[1])


def quantize_int4(weight: Tensor, group: int = INT4_GROUP, *, symmetric: bool = True) -> QuantizedWeight:
    """Groups of `group` inputs. Symmetric by default: lower perplexity (docs/engine-quantization.md). Raises
    ValueError unless inputs are whole groups."""
    if weight.shape[1] % group:
        raise ValueError(f"{weight.shape[1]} inputs are not whole groups of {group}")
    num_rows = max(1, _SLICE // weight.shape[1])
    parts = [_quantize_groups(rows, group, symmetric) for rows in torch.split(weight, num_rows)]
    data, scale, zero = (torch.cat(part) for part in zip(*parts, strict=True))
    return QuantizedWeight(4, data, scale, None if symmetric else zero.to(torch.uint8), group)


def _quantize_groups(weight: Tensor, group: int, symmetric: bool) -> tuple[Tensor, Tensor, Tensor]:
    """Packed levels, scales and zeros of some rows."""
    grouped = weight.float().view(weight.shape[0], -1, group)
    low, high = grouped.amin(dim=-1), grouped.amax(dim=-1)
    if symmetric:
        # The sign is the larger side's, negated: that side has eight steps down to level 0, the other seven.
        largest = torch.where(-low > high, low, high)
        scale = torch.where(largest > 0, -1.0, 1.0) * _rounded(largest.abs() / 8, weight.dtype)
        zero = torch.full_like(scale, 8)
    else:
        # Nothing must be representable as nothing, or a group of large values loses its small ones.
        low, high = low.clamp_max(0), high.clamp_min(0)
        scale = _rounded((high - low) / 15, weight.dtype)
        zero = (-low / scale).round_().clamp_(0, 15)
    levels = (grouped / scale[..., None]).round_().add_(zero[..., None]).clamp_(0, 15)
    return pack_nibbles(levels.view(weight.shape)), scale, zero


def _rounded(scale: Tensor, dtype: torch.dtype) -> Tensor:
    return scale.clamp_min(_LEAST_SCALE).to(dtype).float().clamp_min(_LEAST_SCALE)


def quantize_rows(x: Tensor) -> tuple[Tensor, Tensor]:
    """Activations [rows, in] as int8 and a float32 scale [rows, 1]; symmetric, each row by itself."""
    scale = x.float().abs().amax(dim=1, keepdim=True).div_(127).clamp_min_(_LEAST_SCALE)
    return (x / scale).round_().to(torch.int8), scale


def plain_product(x: Tensor, weight: QuantizedWeight) -> Tensor:
    """x [rows, in] times the weight, [rows, out] in x's dtype: the oracle of weight-only kernels."""
    return nn.functional.linear(x, weight.dequantize().to(x.dtype))


def plain_product_steps(x: Tensor, weight: QuantizedWeight) -> Tensor:
    """As above, x rounded to 8 bits for each `STEP` inputs by themselves, or as many of them as divide a
    group of 4-bit weights: the oracle of kernels that sum integers in such steps (kernels/prepare.c)."""
    size = STEP if weight.bits == 8 else math.gcd(STEP, weight.group)
    padded = nn.functional.pad(x.float(), (0, -x.shape[1] % size))
    levels, scale = quantize_rows(padded.view(-1, size))
    rounded = (levels * scale).view_as(padded)[:, : x.shape[1]]
    return nn.functional.linear(rounded, weight.dequantize()).to(x.dtype)


def plain_product_int8(x: Tensor, weight: QuantizedWeight) -> Tensor:
    """Both sides int8 (W8A8), sums in float32: the oracle of kernels that sum integers."""
    rows, scale = quantize_rows(x)
    sums = nn.functional.linear(rows.float(), weight.data.float())
    return (sums * scale * weight.scale.view(-1)).to(x.dtype)
