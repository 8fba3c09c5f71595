"""Linear layers as a CPU runs them fastest; they replace `nn.Linear` modules of a loaded model, nothing else.

bfloat16 weights are laid out once, for our own kernels (native.py) or else for oneDNN's (`PackedLinear`):
`nn.Linear` would convert them on each call.
Layers that read the same input (query, key and value; gate and up) are packed as one product and hand out its
parts: at one row half of a small product's time is waking the threads. `QuantizedLinear` runs a quantised
weight (quantized.py) by the first kernel of its kind in `PRODUCTS` that can; the last is plain torch and can
always.

Invariant: a layer's result for a row does not depend on other rows, beyond rounding.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor

from sluice_runtime.engine import native, quantized
from sluice_runtime.engine.quantized import QuantizedWeight

# Up to this many rows the int8 kernel wins; above, converting the weights and a bfloat16 product do.
_MAX_INT8_ROWS = 4
# Groups that torch's 4-bit kernel knows, and what its outputs must be whole multiples of.
_INT4PACK_GROUPS = (32, 64, 128, 256)
_INT4PACK_OUTPUTS = 16
# Layers that decoders of transformers apply to one and the same tensor. Where one does not, each still
# computes right, only not once.
_SHARING = (("q_proj", "k_proj", "v_proj"), ("gate_proj", "up_proj"))


class PackedLinear(nn.Module):
    """`nn.Linear` for bfloat16 on a CPU. Input [..., in], output [..., out]."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        self.out_features, self.in_features = linear.weight.shape
        self.bias = linear.bias
        # Not a parameter: opaque to everything but its own operator.
        self._packed: Tensor = torch.ops.mkldnn._reorder_linear_weight(linear.weight.detach(), 16)

    def forward(self, x: Tensor) -> Tensor:
        y: Tensor = torch.ops.mkldnn._linear_pointwise(x, self._packed, self.bias, "none", [], "")
        return y


class PackedPart(nn.Module):
    """A slice of a product that several layers share: `product` is computed once for each input tensor."""

    def __init__(self, product: _SharedProduct, start: int, size: int) -> None:
        super().__init__()
        self.product = product
        self.start, self.size = start, size

    def forward(self, x: Tensor) -> Tensor:
        output: Tensor = self.product(x)
        return output.narrow(-1, self.start, self.size)


class _SharedProduct(nn.Module):
    """Several layers' weights as one. Remembers its last input, by identity, until each layer has had its
    part."""

    def __init__(self, product: nn.Module, num_parts: int) -> None:
        super().__init__()
        self.product = product
        self._num_parts = num_parts
        # [input, output, parts left]. A list, since a module's own attributes cost microseconds to set.
        self._last: list[Any] = [None, None, 0]

    def forward(self, x: Tensor) -> Tensor:
        last = self._last
        # The input is held, so that no other tensor can take its place in memory and pass for it.
        if x is not last[0]:
            last[:] = x, self.product(x), self._num_parts
        output: Tensor = last[1]
        last[2] -= 1
        if last[2] == 0:
            last[:] = None, None, 0
        return output


@dataclass(frozen=True)
class Form:
    """What a bound product keeps of its weight beside what was laid out; `shape` is out, in."""

    shape: tuple[int, int]
    group: int
    bias: Tensor | None = None


@dataclass(frozen=True)
class Product:
    """A kernel for quantised weights: whether it `fits` a weight in the dtype and on the device of the
    activations, how it wants the weight laid out, and what multiplies [rows, in] with what it laid out, bound
    once for all calls."""

    fits: Callable[[QuantizedWeight, torch.dtype, torch.device], bool]
    lay_out: Callable[[QuantizedWeight, torch.dtype], dict[str, Tensor]]
    bind: Callable[[dict[str, Tensor], Form], Callable[[Tensor], Tensor]]


_scratch: dict[tuple[torch.dtype, torch.device], Tensor] = {}


def _converted(weight: Tensor, like: Tensor) -> Tensor:
    """Small integers in `like`'s dtype, in memory that all layers share: one runs at a time."""
    key, size = (like.dtype, like.device), weight.numel()
    kept = _scratch.get(key)
    if kept is None or kept.numel() < size:
        with torch.inference_mode(False):  # a tensor made in inference mode could be written only there
            kept = _scratch[key] = torch.empty(size, dtype=like.dtype, device=like.device)
    return kept[:size].view(weight.shape).copy_(weight)


def _int8_layout(weight: QuantizedWeight, dtype: torch.dtype) -> dict[str, Tensor]:
    return {"data": weight.data, "scale": weight.scale.view(-1).to(dtype)}


def _int8_product(rows: Tensor, laid: dict[str, Tensor], _: int) -> Tensor:
    data, scale = laid["data"], laid["scale"]
    if rows.shape[0] <= _MAX_INT8_ROWS and rows.device.type == "cpu":
        return torch._weight_int8pack_mm(rows, data, scale)
    # Small integers are exact in bfloat16, so the scales can follow the product.
    return nn.functional.linear(rows, _converted(data, rows)) * scale


def _int4pack_layout(weight: QuantizedWeight, dtype: torch.dtype) -> dict[str, Tensor]:
    zero = torch.full_like(weight.scale, 8) if weight.zero is None else weight.zero.float()
    # The kernel computes (level - 8) * scale + offset.
    offset = (8 - zero) * weight.scale
    scales = torch.stack((weight.scale, offset), dim=-1).transpose(0, 1).contiguous().to(dtype)
    return {"data": torch._convert_weight_to_int4pack_for_cpu(weight.levels().int(), 1), "scales": scales}


def _int4pack_product(rows: Tensor, laid: dict[str, Tensor], group: int) -> Tensor:
    return torch._weight_int4pack_mm_for_cpu(rows, laid["data"], group, laid["scales"])


def _integer_layout(weight: QuantizedWeight, _: torch.dtype) -> dict[str, Tensor]:
    return {"data": weight.data, "scale": weight.scale.view(-1)}


def _integer_product(rows: Tensor, laid: dict[str, Tensor], _: int) -> Tensor:
    levels, scale = quantized.quantize_rows(rows)
    sums = torch._int_mm(levels, laid["data"].t())
    return (sums * scale).mul_(laid["scale"]).to(rows.dtype)


@functools.cache
def integer_sums_are_exact() -> bool:
    """Whether `_int_mm` adds right on this CPU. Where that has no VNNI, oneDNN adds pairs of products in 16
    bits, which saturate, and says nothing."""
    levels = torch.full((32, 64), 127, dtype=torch.int8)
    return bool((torch._int_mm(levels, levels.t()) == 64 * 127 * 127).all())


def _kept(weight: QuantizedWeight, _: torch.dtype) -> dict[str, Tensor]:
    kept = {"data": weight.data, "scale": weight.scale}
    return kept if weight.zero is None else {**kept, "zero": weight.zero}


def _anything(*_: object) -> bool:
    return True


def _torch(
    fits: Callable[[QuantizedWeight, torch.dtype, torch.device], bool],
    lay_out: Callable[[QuantizedWeight, torch.dtype], dict[str, Tensor]],
    run: Callable[[Tensor, dict[str, Tensor], int], Tensor],
) -> Product:
    """A kernel of torch's: `run` takes rows, what was laid out, and the group."""

    def bind(laid: dict[str, Tensor], form: Form) -> Callable[[Tensor], Tensor]:
        def product(rows: Tensor) -> Tensor:
            y = run(rows, laid, form.group)
            return y if form.bias is None else y + form.bias

        return product

    return Product(fits, lay_out, bind)


def _plain(product: Callable[[Tensor, QuantizedWeight], Tensor]) -> Product:
    def run(rows: Tensor, laid: dict[str, Tensor], group: int) -> Tensor:
        bits: Any = 8 if laid["data"].dtype == torch.int8 else 4
        return product(rows, QuantizedWeight(bits, laid["data"], laid["scale"], laid.get("zero"), group))

    return _torch(_anything, _kept, run)


def _native(kind: str, lay_out: Callable[[QuantizedWeight], dict[str, Tensor]]) -> Product:
    """A kernel of our own (native.py)."""

    def fits(weight: QuantizedWeight, dtype: torch.dtype, device: torch.device) -> bool:
        whole = weight.group % 8 == 0 if weight.bits == 4 else weight.group == weight.in_features
        here = dtype == torch.bfloat16 and device.type == "cpu" and native.library() is not None
        return here and whole and weight.in_features % 4 == 0

    def bind(laid: dict[str, Tensor], form: Form) -> native.Product:
        return native.Product(kind, laid, form.shape, form.group, form.bias)

    return Product(fits, lambda weight, _: lay_out(weight), bind)


# For each kind of product its kernels, the fastest first; the last is the oracle of the others. Our own of
# Int8 and Int4 round activations too: their oracle is `quantized.plain_product_steps`.
PRODUCTS: dict[str, dict[str, Product]] = {
    "Int8": {
        "native": _native("Int8", native.pack_int8),
        "int8pack": _torch(lambda w, *_: w.group == w.in_features, _int8_layout, _int8_product),
        "plain": _plain(quantized.plain_product),
    },
    "Int4": {
        "native": _native("Int4", native.pack_int4),
        "int4pack": _torch(
            lambda w, _, device: (
                device.type == "cpu"
                and w.group in _INT4PACK_GROUPS
                and w.out_features % _INT4PACK_OUTPUTS == 0
            ),
            _int4pack_layout,
            _int4pack_product,
        ),
        "plain": _plain(quantized.plain_product),
    },
    "W8A8": {
        "native": _native("W8A8", native.pack_w8a8),
        "int_mm": _torch(
            lambda w, _, device: (
                device.type == "cpu" and w.group == w.in_features and integer_sums_are_exact()
            ),
            _integer_layout,
            _integer_product,
        ),
        "plain": _plain(quantized.plain_product_int8),
    },
}


class QuantizedLinear(nn.Module):
    """A linear layer with a quantised weight. `kind` names its entry in `PRODUCTS`. Input [..., in] and
    output [..., out] are of `dtype`."""

    def __init__(
        self, weight: QuantizedWeight, kind: str, dtype: torch.dtype, bias: Tensor | None = None
    ) -> None:
        super().__init__()
        self.out_features, self.in_features = weight.out_features, weight.in_features
        self.kind = kind
        fitting = (name for name, p in PRODUCTS[kind].items() if p.fits(weight, dtype, weight.data.device))
        self.kernel = next(fitting)
        product = PRODUCTS[kind][self.kernel]
        laid = product.lay_out(weight, dtype)
        for name, tensor in laid.items():  # so that what is held is counted
            self.register_buffer(name, tensor, persistent=False)
        self.bias: Tensor | None
        self.register_buffer("bias", None if bias is None else bias.detach(), persistent=False)
        shape = (weight.out_features, weight.in_features)
        self.bound = product.bind(laid, Form(shape, weight.group, self.bias))

    def _apply(self, fn: Callable[[Tensor], Tensor], recurse: bool = True) -> QuantizedLinear:
        raise NotImplementedError("a quantised layer stays where, and as, it was laid out")

    def forward(self, x: Tensor) -> Tensor:
        y = self.bound(x.reshape(-1, self.in_features))
        return y.view(*x.shape[:-1], self.out_features)


def packs_bfloat16() -> bool:
    """Whether our kernels run on this CPU, or oneDNN has bfloat16 for it."""
    onednn = torch.backends.mkldnn.is_available() and torch.ops.mkldnn._is_mkldnn_bf16_supported()  # type: ignore[no-untyped-call]
    return bool(onednn) or native.library() is not None


def pack_bfloat16(model: nn.Module) -> None:
    """Replace each bfloat16 `nn.Linear` on the CPU, where our kernels run or oneDNN has bfloat16; otherwise
    leave the model alone."""
    if not packs_bfloat16():
        return
    share(model, nn.Linear, _join_packed)
    for parent, name, child in _linears(model):
        if child.weight.dtype == torch.bfloat16:
            setattr(parent, name, _packed(child))


def quantize(model: nn.Module, kind: str) -> None:
    """Replace each `nn.Linear` by its quantised form, `Int8`, `Int4` or `W8A8`, one by one, so that memory
    never holds both of all. Raises ValueError where a layer can't be brought into that form."""

    def weight_of(linear: nn.Linear, name: str) -> QuantizedWeight:
        try:
            return _QUANTIZERS[kind](linear.weight.detach())
        except ValueError as error:
            raise ValueError(f"quantization {kind}: {name}: {error}") from None

    def join(linears: list[nn.Linear]) -> nn.Module | None:
        weight = quantized.joined([weight_of(m, "a shared product") for m in linears])
        if weight is None:
            return None
        return QuantizedLinear(weight, kind, linears[0].weight.dtype, _joined_bias(linears))

    share(model, nn.Linear, join)
    head = getattr(model, "lm_head", None)
    for parent, name, child in _linears(model):
        used = _HEADS.get(kind, kind) if child is head else kind
        weight = _QUANTIZERS[used](child.weight.detach()) if used != kind else weight_of(child, name)
        setattr(parent, name, QuantizedLinear(weight, used, child.weight.dtype, child.bias))


_QUANTIZERS: dict[str, Callable[[Tensor], QuantizedWeight]] = {
    "Int8": quantized.quantize_int8,
    "Int4": quantized.quantize_int4,
    "W8A8": quantized.quantize_int8,
}
# The output head decides between tokens: it keeps 8 bits, by custom; 4 were not compared yet.
_HEADS = {"Int4": "Int8"}


def _parents(model: nn.Module) -> list[nn.Module]:
    # No linear layer is held here: what is replaced must be freed at once.
    return [m for m in model.modules() if not isinstance(m, nn.Linear)]


def _linears(model: nn.Module) -> Iterator[tuple[nn.Module, str, nn.Linear]]:
    """Plain linear layers with their parents and names; subclasses of Linear compute something else."""
    for parent in _parents(model):
        for name in [name for name, _ in parent.named_children()]:
            child = getattr(parent, name)
            if type(child) is nn.Linear:
                yield parent, name, child


def share(model: nn.Module, kind: type[nn.Module], join: Callable[[list[Any]], nn.Module | None]) -> None:
    """Where layers of `kind` read the same input, one product for all of them, if `join` gives one."""
    for parent in _parents(model):
        for names in _SHARING:
            layers: list[Any] = [m for name in names if type(m := getattr(parent, name, None)) is kind]
            same = {
                (m.in_features, m.bias is None, getattr(getattr(m, "weight", None), "dtype", None))
                for m in layers
            }
            if len(layers) < len(names) or len(same) > 1:
                continue
            joined = join(layers)
            if joined is not None:
                _hand_out(parent, names, joined, [m.out_features for m in layers])


def _hand_out(parent: nn.Module, names: tuple[str, ...], joined: nn.Module, sizes: list[int]) -> None:
    """Put the parts of one product in place of the layers that it joins."""
    product, start = _SharedProduct(joined, len(names)), 0
    for name, size in zip(names, sizes, strict=True):
        setattr(parent, name, PackedPart(product, start, size))
        start += size


def _packed(linear: nn.Linear) -> nn.Module:
    return native.NativeLinear(linear) if native.takes(linear.weight) else PackedLinear(linear)


def _join_packed(linears: list[nn.Linear]) -> nn.Module | None:
    if linears[0].weight.dtype != torch.bfloat16:
        return None
    joined = nn.Linear(linears[0].in_features, 1, bias=False, dtype=torch.bfloat16)
    joined.weight = nn.Parameter(torch.cat([m.weight for m in linears]), requires_grad=False)
    bias = _joined_bias(linears)
    if bias is not None:
        joined.bias = nn.Parameter(bias, requires_grad=False)
    return _packed(joined)


def _joined_bias(linears: list[nn.Linear]) -> Tensor | None:
    return None if linears[0].bias is None else torch.cat([m.bias for m in linears])


def weight_bytes(model: nn.Module) -> int:
    """Bytes of all weights that this process holds, shared ones once."""
    tensors = [t.to_local() if isinstance(t, DTensor) else t for t in (*model.parameters(), *model.buffers())]
    total = sum({t.data_ptr(): t.numel() * t.element_size() for t in tensors}.values())
    packed = [m for m in model.modules() if isinstance(m, PackedLinear)]
    return total + sum(m.in_features * m.out_features * 2 for m in packed)
