"""Loads weights that are quantised in their files: AWQ, GPTQ and compressed-tensors, into `QuantizedWeight`.

transformers reads the files. Its hook for quantisers puts a `Stored` in place of each linear layer whose
packed tensors a file has, before anything is read; afterwards each becomes a layer that computes with the
very integers and scales of the file. The layouts, by their formats' documentation (words of 32 bits, the
least significant first; b bits a value, g groups):

    AWQ gemm   qweight [in, out/8]   qzeros [g, out/8]   scales [g, out]; a word is outputs 0 2 4 6 1 3 5 7
    GPTQ       qweight [in·b/32, out]   qzeros [g, out·b/32], zero − 1 (v2: zero)   scales [g, out]
    packed     weight_packed [out, in·b/32]   weight_zero_point [out·b/32, g]   weight_scale [out, g]
               (until April 2025 weight_zero_point int8 [out, g], from −half on)
    int        weight int8 [out, in]   weight_scale [out, 1]

Where groups were made in order of activation, g_idx (packed: weight_g_idx) [in] tells each input's group.
Such a layer's weight is kept group by group, and its input is brought into that order before the product.

Invariant: nothing is dequantised or quantised anew; a tensor that would be left over is an error.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from typing import Any

import torch
from safetensors import safe_open
from torch import Tensor, nn
from transformers.quantizers.auto import register_quantization_config, register_quantizer
from transformers.quantizers.base import HfQuantizer
from transformers.utils.quantization_config import QuantizationConfigMixin

from sluice_runtime.engine.linear import QuantizedLinear, share
from sluice_runtime.engine.quantized import QuantizedWeight, joined, pack_nibbles
from sluice_runtime.models.checkpoint import Checkpoint
from sluice_runtime.models.errors import CheckpointCorrupt, UnsupportedModel
from sluice_runtime.models.packing import Packing

_METHOD = "sluice-packed"
_SUFFIXES = {
    "awq": ("qweight", "qzeros", "scales"),
    "gptq": ("qweight", "qzeros", "scales", "g_idx"),
    "pack-quantized": ("weight_packed", "weight_scale", "weight_zero_point", "weight_shape", "weight_g_idx"),
    "int-quantized": ("weight", "weight_scale"),
}
# What any of these formats may call a tensor of a layer that is no plain weight.
_PACKED_NAMES = frozenset(n for names in _SUFFIXES.values() for n in names) - {"weight"}
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)
Unpacked = tuple[Tensor, Tensor, Tensor | None]
"""Levels [out, in] from 0 on, scale [out, groups], and zero of that shape; None: half of the levels."""


class Stored(nn.Module):
    """A linear layer's tensors as a file holds them; `weight()` once they are read."""

    def __init__(
        self, name: str, packing: Packing, shapes: Mapping[str, torch.Size], linear: nn.Linear
    ) -> None:
        super().__init__()
        self.name, self.packing = name, packing
        self.in_features, self.out_features = linear.in_features, linear.out_features
        for name, shape in shapes.items():
            # float32 holds a scale of any half precision as it is.
            is_scale = name in ("scales", "weight_scale")
            dtype = torch.float32 if is_scale else torch.int32
            if name == "weight_shape":
                dtype = torch.int64
            elif name == "weight":
                dtype = torch.int8
            self.register_buffer(name, torch.empty(shape, dtype=dtype, device="meta"))
        self.bias = linear.bias

    def read(self) -> tuple[QuantizedWeight, Tensor | None]:
        """The weight, and the order of inputs that it wants: int64 [in], or None for their own. Raises
        ValueError where shapes do not fit each other, or the layer."""
        tensors = dict(self.named_buffers())
        levels, scale, zero = _READERS[_reader_of(self.packing)](tensors, self.packing)
        order = _order(tensors, levels.shape[1], self.packing)
        weight = _weight(levels if order is None else levels[:, order], scale, zero, self.packing)
        got, wanted = (weight.out_features, weight.in_features), (self.out_features, self.in_features)
        if got != wanted:
            raise ValueError(f"its tensors hold {list(got)} weights, the layer has {list(wanted)}")
        return weight, order


def _reader_of(packing: Packing) -> str:
    return packing.layout if packing.method == "compressed-tensors" else packing.method


def _required(packing: Packing) -> set[str]:
    """Names of tensors that a packed layer has in any case."""
    needless = set[str]() if packing.ordered else {"g_idx", "weight_g_idx"}
    if packing.symmetric:
        needless.add("weight_zero_point")
    return set(_SUFFIXES[_reader_of(packing)]) - needless


def unpack_words(words: Tensor, bits: int) -> Tensor:
    """int32 [..., n] as int32 [..., n * 32 / bits], from the least significant bits on."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32, device=words.device)
    return ((words[..., None] >> shifts) & ((1 << bits) - 1)).flatten(-2)


def _awq(tensors: Mapping[str, Tensor], packing: Packing) -> Unpacked:
    # Where in a word the outputs 0 to 7 stand.
    places = [_AWQ_ORDER.index(i) for i in range(8)]

    def unpack(words: Tensor) -> Tensor:
        return unpack_words(words, 4).view(words.shape[0], -1, 8)[..., places].flatten(1).t()

    return unpack(tensors["qweight"]), tensors["scales"].t(), unpack(tensors["qzeros"])


def _gptq(tensors: Mapping[str, Tensor], packing: Packing) -> Unpacked:
    levels = unpack_words(tensors["qweight"].t().contiguous(), packing.bits)
    zero = unpack_words(tensors["qzeros"], packing.bits).t()
    if packing.layout == "gptq":
        if bool((zero == (1 << packing.bits) - 1).any()):
            # One less than 0, or 15 to be raised to 16? Programs disagree; gptq_v2 was made for that.
            raise ValueError(
                "qzeros holds a zero point that checkpoint_format gptq leaves open; save as gptq_v2"
            )
        zero = zero + 1
    return levels, tensors["scales"].t(), zero


def _pack_quantized(tensors: Mapping[str, Tensor], packing: Packing) -> Unpacked:
    packed, scale = tensors["weight_packed"], tensors["weight_scale"]
    shape = tuple(int(n) for n in tensors["weight_shape"])
    levels = unpack_words(packed, packing.bits)
    if shape != tuple(levels.shape):
        raise ValueError(f"weight_shape {list(shape)} is not that of weight_packed, {list(levels.shape)}")
    zero = tensors.get("weight_zero_point")
    if zero is not None and zero.shape == scale.shape:
        zero = zero + (1 << (packing.bits - 1))
    elif zero is not None:
        zero = unpack_words(zero.t().contiguous(), packing.bits).t()[: shape[0]]
    return levels, scale, zero


def _int_quantized(tensors: Mapping[str, Tensor], packing: Packing) -> Unpacked:
    weight = tensors["weight"]
    return weight.to(torch.int16) + 128, tensors["weight_scale"].view(weight.shape[0], -1), None


def _order(tensors: Mapping[str, Tensor], inputs: int, packing: Packing) -> Tensor | None:
    """Inputs group by group, int64 [in]; None where they are so already."""
    g_idx = tensors.get("g_idx", tensors.get("weight_g_idx"))
    if g_idx is None:
        return None
    wanted = torch.arange(inputs, dtype=g_idx.dtype, device=g_idx.device) // (packing.group or inputs)
    if torch.equal(g_idx, wanted):
        return None
    if not packing.ordered:
        raise ValueError("g_idx orders groups by activation, which quantization_config does not say")
    order = torch.argsort(g_idx, stable=True)
    if not torch.equal(g_idx[order], wanted):
        raise ValueError(f"g_idx does not make {inputs} inputs groups of {packing.group or inputs}")
    return order


def _weight(levels: Tensor, scale: Tensor, zero: Tensor | None, packing: Packing) -> QuantizedWeight:
    half, group = 1 << (packing.bits - 1), packing.group or levels.shape[1]
    symmetric = zero is None or bool((zero == half).all())
    scale = scale.contiguous()
    if packing.bits == 8:
        if not symmetric:
            raise ValueError("zero points other than 128 are not supported for 8 bits")
        return QuantizedWeight(8, (levels - half).to(torch.int8), scale, None, group)
    kept = None if symmetric or zero is None else zero.to(torch.uint8).contiguous()
    return QuantizedWeight(4, pack_nibbles(levels), scale, kept, group)


_READERS: dict[str, Callable[[Mapping[str, Tensor], Packing], Unpacked]] = {
    "awq": _awq,
    "gptq": _gptq,
    "pack-quantized": _pack_quantized,
    "int-quantized": _int_quantized,
}


class Ordered(nn.Module):
    """A product that wants its input [..., in] in another order: int64 [in]."""

    order: Tensor

    def __init__(self, product: QuantizedLinear, order: Tensor) -> None:
        super().__init__()
        self.product = product
        self.register_buffer("order", order, persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.product(x.index_select(-1, self.order))
        return output


@register_quantization_config(_METHOD)
class PackedConfig(QuantizationConfigMixin):
    """What transformers hands on to its quantiser. `shapes`: of all tensors of the checkpoint."""

    def __init__(self, packing: Packing, shapes: Mapping[str, torch.Size]) -> None:
        super().__init__(quant_method=_METHOD)  # type: ignore[arg-type]
        self.packing, self.shapes = packing, shapes


@register_quantizer(_METHOD)
class PackedQuantizer(HfQuantizer):
    """Puts `Stored` in the place of linear layers before weights are read."""

    def _process_model_before_weight_loading(self, model: Any, **_: Any) -> Any:
        config: Any = self.quantization_config
        suffixes, found = _SUFFIXES[_reader_of(config.packing)], 0
        for name, module in list(model.named_modules()):
            shapes = {s: config.shapes[f"{name}.{s}"] for s in suffixes if f"{name}.{s}" in config.shapes}
            if type(module) is not nn.Linear or not shapes.keys() - {"weight"}:
                continue
            missing = _required(config.packing) - shapes.keys()
            if missing:
                raise CheckpointCorrupt(f"{name} is packed, but has no {min(missing)}")
            if module is model.get_output_embeddings():
                raise UnsupportedModel(f"{name} is quantised: only plain output heads are supported")
            parent, _, last = name.rpartition(".")
            setattr(model.get_submodule(parent), last, Stored(name, config.packing, shapes, module))
            found += 1
        if not found:
            raise UnsupportedModel(
                f"quantization_config names {config.packing.method}, but no layer is so packed"
            )
        return model

    def is_serializable(self, *_: Any, **__: Any) -> bool:
        return False

    @property
    def is_trainable(self) -> bool:
        return False


def packed_config(checkpoint: Checkpoint, packing: Packing) -> PackedConfig:
    shapes: dict[str, torch.Size] = {}
    for path in checkpoint.weights:
        with safe_open(path, framework="pt") as file:
            shapes |= {name: torch.Size(file.get_slice(name).get_shape()) for name in file.keys()}  # noqa: SIM118
    return PackedConfig(packing, shapes)


def refuse_leftovers(names: Iterable[str]) -> None:
    """Packed tensors that went into no layer would be missing from the answers."""
    left = sorted(n for n in names if n.rpartition(".")[2] in _PACKED_NAMES)
    if left:
        raise UnsupportedModel(
            f"{len(left)} packed tensors belong to no layer known here, {left[0]} among them"
        )


def compute_packed(model: nn.Module, packing: Packing, dtype: torch.dtype) -> None:
    """Each `Stored` becomes the layer that computes, layers with the same input as one."""

    def read(stored: Stored) -> tuple[QuantizedWeight, Tensor | None]:
        try:
            return stored.read()
        except (ValueError, RuntimeError) as error:  # the latter where sizes differ
            raise CheckpointCorrupt(f"{stored.name}: {error}") from error

    def layer(weight: QuantizedWeight, order: Tensor | None, bias: Tensor | None) -> nn.Module:
        product = QuantizedLinear(weight, packing.kind, dtype, bias)
        return product if order is None else Ordered(product, order)

    def join(layers: list[Any]) -> nn.Module | None:
        weights, orders = zip(*map(read, layers), strict=True)
        weight = joined(weights) if all(_same(order, orders[0]) for order in orders) else None
        if weight is None:
            return None
        bias = None if layers[0].bias is None else torch.cat([stored.bias for stored in layers])
        return layer(weight, orders[0], bias)

    share(model, Stored, join)
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, Stored):
                setattr(parent, name, layer(*read(child), child.bias))


def _same(a: Tensor | None, b: Tensor | None) -> bool:
    return a is b if a is None or b is None else torch.equal(a, b)
