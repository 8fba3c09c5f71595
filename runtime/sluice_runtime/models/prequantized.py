"""Loads weights that are quantised in their files: AWQ, GPTQ and compressed-tensors, into `QuantizedWeight`.

transformers reads the files. Its hook for quantisers puts a `Stored` in place of each linear layer whose
packed tensors a file has, before anything is read; afterwards each becomes a layer that computes with the
very integers and scales of the file. The layouts, by their formats' documentation (words of 32 bits, the
least significant first; b bits a value, g groups):

    AWQ gemm   qweight [in, out/8]   qzeros [g, out/8]   scales [g, out]; a word is outputs 0 2 4 6 1 3 5 7
    GPTQ       qweight [in·b/32, out]   qzeros [g, out·b/32], zero − 1 (v2: zero)   scales [g, out]
    packed     weight_packed [out, in·b/32]   weight_zero_point [out·b/32, g]   weight_scale [out, g]
    int        weight int8 [out, in]   weight_scale [out, 1]

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
    "pack-quantized": ("weight_packed", "weight_scale", "weight_zero_point", "weight_shape"),
    "int-quantized": ("weight", "weight_scale"),
}
# What any of these formats may call a tensor of a layer that is no plain weight.
_PACKED_NAMES = frozenset(n for names in _SUFFIXES.values() for n in names) - {"weight"} | {"weight_g_idx"}
_AWQ_ORDER = (0, 2, 4, 6, 1, 3, 5, 7)


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

    def read(self) -> QuantizedWeight:
        """Raises ValueError where shapes do not fit each other, or the layer."""
        weight = _READERS[_reader_of(self.packing)](dict(self.named_buffers()), self.packing)
        got, wanted = (weight.out_features, weight.in_features), (self.out_features, self.in_features)
        if got != wanted:
            raise ValueError(f"its tensors hold {list(got)} weights, the layer has {list(wanted)}")
        return weight


def _reader_of(packing: Packing) -> str:
    return packing.layout if packing.method == "compressed-tensors" else packing.method


def _required(packing: Packing) -> set[str]:
    """Names of tensors that a packed layer has in any case."""
    needless = {"g_idx"} | ({"weight_zero_point"} if packing.symmetric else set())
    return set(_SUFFIXES[_reader_of(packing)]) - needless


def unpack_words(words: Tensor, bits: int) -> Tensor:
    """int32 [..., n] as int32 [..., n * 32 / bits], from the least significant bits on."""
    shifts = torch.arange(0, 32, bits, dtype=torch.int32, device=words.device)
    return ((words[..., None] >> shifts) & ((1 << bits) - 1)).flatten(-2)


def _awq(tensors: Mapping[str, Tensor], packing: Packing) -> QuantizedWeight:
    # Where in a word the outputs 0 to 7 stand.
    places = [_AWQ_ORDER.index(i) for i in range(8)]

    def unpack(words: Tensor) -> Tensor:
        return unpack_words(words, 4).view(words.shape[0], -1, 8)[..., places].flatten(1).t()

    levels, zero = unpack(tensors["qweight"]), unpack(tensors["qzeros"])
    return _grouped(levels, tensors["scales"].t(), zero, packing)


def _gptq(tensors: Mapping[str, Tensor], packing: Packing) -> QuantizedWeight:
    levels = unpack_words(tensors["qweight"].t().contiguous(), packing.bits)
    zero = unpack_words(tensors["qzeros"], packing.bits).t()
    if packing.layout == "gptq":
        if bool((zero == (1 << packing.bits) - 1).any()):
            # One less than 0, or 15 to be raised to 16? Programs disagree; gptq_v2 was made for that.
            raise ValueError(
                "qzeros holds a zero point that checkpoint_format gptq leaves open; save as gptq_v2"
            )
        zero = zero + 1
    inputs = levels.shape[1]
    g_idx = tensors.get("g_idx")
    if g_idx is not None and not torch.equal(
        g_idx, torch.arange(inputs, dtype=torch.int32) // (packing.group or inputs)
    ):
        raise ValueError("g_idx orders groups by activation (desc_act)")
    return _grouped(levels, tensors["scales"].t(), zero, packing)


def _pack_quantized(tensors: Mapping[str, Tensor], packing: Packing) -> QuantizedWeight:
    packed, scale = tensors["weight_packed"], tensors["weight_scale"]
    shape = tuple(int(n) for n in tensors["weight_shape"])
    levels = unpack_words(packed, packing.bits)
    if shape != tuple(levels.shape):
        raise ValueError(f"weight_shape {list(shape)} is not that of weight_packed, {list(levels.shape)}")
    zero = tensors.get("weight_zero_point")
    if zero is not None:
        zero = unpack_words(zero.t().contiguous(), packing.bits).t()[: shape[0]]
    return _grouped(levels, scale, zero, packing)


def _int_quantized(tensors: Mapping[str, Tensor], packing: Packing) -> QuantizedWeight:
    scale = tensors["weight_scale"].view(tensors["weight"].shape[0], -1)
    return QuantizedWeight(
        8, tensors["weight"], scale.contiguous(), None, _group_size(tensors["weight"], packing)
    )


def _group_size(levels: Tensor, packing: Packing) -> int:
    return packing.group or levels.shape[1]


def _grouped(levels: Tensor, scale: Tensor, zero: Tensor | None, packing: Packing) -> QuantizedWeight:
    """`levels` [out, in] from 0 on, `scale` and `zero` [out, groups]."""
    half, group = 1 << (packing.bits - 1), _group_size(levels, packing)
    symmetric = zero is None or bool((zero == half).all())
    scale = scale.contiguous()
    if packing.bits == 8:
        if not symmetric:
            raise ValueError("zero points other than 128 are not supported for 8 bits")
        return QuantizedWeight(8, (levels - half).to(torch.int8), scale, None, group)
    kept = None if symmetric or zero is None else zero.to(torch.uint8).contiguous()
    return QuantizedWeight(4, pack_nibbles(levels), scale, kept, group)


_READERS: dict[str, Callable[[Mapping[str, Tensor], Packing], QuantizedWeight]] = {
    "awq": _awq,
    "gptq": _gptq,
    "pack-quantized": _pack_quantized,
    "int-quantized": _int_quantized,
}


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

    def read(stored: Stored) -> QuantizedWeight:
        try:
            return stored.read()
        except (ValueError, RuntimeError) as error:  # the latter where sizes differ
            raise CheckpointCorrupt(f"{stored.name}: {error}") from error

    def join(layers: list[Any]) -> nn.Module | None:
        weight = joined([read(layer) for layer in layers])
        if weight is None:
            return None
        bias = None if layers[0].bias is None else torch.cat([layer.bias for layer in layers])
        return QuantizedLinear(weight, packing.kind, dtype, bias)

    share(model, Stored, join)
    for parent in list(model.modules()):
        for name, child in list(parent.named_children()):
            if isinstance(child, Stored):
                setattr(parent, name, QuantizedLinear(read(child), packing.kind, dtype, child.bias))
