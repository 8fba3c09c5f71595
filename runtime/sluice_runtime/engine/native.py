"""The C kernels (kernels/) as Python sees them: found, checked, bound, and fed with packed weights.

They need a processor with AVX-512 and its bfloat16 and 8-bit dot products, and the OpenMP library that torch
runs on, whose threads they use: a second pool would fight with the first one. Where anything is missing
`library` is None, which is logged once, and all that has a kernel here runs as it did without.
Invariant: a structure below mirrors the one of its name in kernels/*.h, field by field.
"""

from __future__ import annotations

import ctypes
import functools
import logging
import re
from ctypes import POINTER, c_float, c_int32, c_int64, c_void_p
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn

from sluice_runtime.engine.kernels import build
from sluice_runtime.engine.quantized import QuantizedWeight

logger = logging.getLogger(__name__)

PANEL = 16
KINDS = {"BFloat16": 0, "Int8": 1, "Int4": 2, "W8A8": 3}
_FLAGS = frozenset({"avx512f", "avx512bw", "avx512dq", "avx512vl", "avx512_bf16", "avx512_vnni"})


class Linear(ctypes.Structure):
    """kernels/sluice.h."""

    _fields_ = (
        ("weight", c_void_p),
        ("scale", c_void_p),
        ("zero", c_void_p),
        ("sums", c_void_p),
        ("bias", c_void_p),
        ("kind", c_int32),
        ("in", c_int32),
        ("out", c_int32),
        ("group", c_int32),
    )


class Pages(ctypes.Structure):
    """kernels/model.h."""

    _fields_ = (
        ("keys", c_void_p),
        ("values", c_void_p),
        ("key_scales", c_void_p),
        ("value_scales", c_void_p),
        ("kind", c_int64),
        ("kv_heads", c_int64),
        ("slots", c_int64),
        ("block_size", c_int64),
        ("head_dim", c_int64),
    )


class Attention(ctypes.Structure):
    """kernels/model.h."""

    _fields_ = (
        ("pages", POINTER(Pages)),
        ("spans", c_void_p),
        ("tables", c_void_p),
        ("queries", c_void_p),
        ("attended", c_void_p),
        ("num_spans", c_int64),
        ("heads", c_int64),
        ("stride", c_int64),
        ("window", c_int64),
        ("scaling", c_float),
    )


class Layer(ctypes.Structure):
    """kernels/model.h."""

    _fields_ = (
        ("input_norm", c_void_p),
        ("post_norm", c_void_p),
        ("query_norm", c_void_p),
        ("key_norm", c_void_p),
        ("qkv", POINTER(Linear)),
        ("o", POINTER(Linear)),
        ("gate_up", POINTER(Linear)),
        ("down", POINTER(Linear)),
        ("pages", Pages),
        ("window", c_int64),
    )


class Model(ctypes.Structure):
    """kernels/model.h."""

    _fields_ = (
        ("layers", POINTER(Layer)),
        ("embedding", c_void_p),
        ("norm", c_void_p),
        ("head", POINTER(Linear)),
        ("cosines", c_void_p),
        ("sines", c_void_p),
        ("num_layers", c_int64),
        ("hidden", c_int64),
        ("heads", c_int64),
        ("kv_heads", c_int64),
        ("head_dim", c_int64),
        ("ffn", c_int64),
        ("epsilon", c_float),
        ("scaling", c_float),
    )


class Step(ctypes.Structure):
    """kernels/model.h."""

    _fields_ = (
        ("tokens", c_void_p),
        ("spans", c_void_p),
        ("tables", c_void_p),
        ("kept", c_void_p),
        ("logits", c_void_p),
        ("scratch", c_void_p),
        ("rows", c_int64),
        ("num_spans", c_int64),
        ("num_kept", c_int64),
        ("num_threads", c_int64),
    )


class _OpenMP(ctypes.Structure):
    """kernels/model.c."""

    _fields_ = (("parallel", c_void_p), ("thread_num", c_void_p), ("num_threads", c_void_p))


@functools.cache
def library() -> Any:
    """The bound library, or None; why it is None is logged, once."""
    missing = _missing()
    if missing is not None:
        logger.warning("no native kernels: %s; models run on torch's", missing)
        return None
    return _bind(ctypes.CDLL(str(build.LIBRARY)), ctypes.CDLL(_openmp_path()))


def _missing() -> str | None:
    lacking = _FLAGS - _processor_flags()
    if lacking:
        return f"the processor has no {', '.join(sorted(lacking))}"
    if not build.LIBRARY.is_file():
        return f"{build.LIBRARY.name} is not built"
    if not build.is_fresh():
        return f"{build.LIBRARY.name} is of other sources"
    return None if _openmp_path() else "torch runs on another OpenMP than GNU's"


def _processor_flags(path: Path = Path("/proc/cpuinfo")) -> frozenset[str]:
    try:
        found = re.search(r"^flags\s*:(.*)$", path.read_text(), re.MULTILINE)
    except OSError:
        return frozenset()
    return frozenset(found[1].split()) if found else frozenset()


def _openmp_path(maps: Path = Path("/proc/self/maps")) -> str | None:
    """The GNU OpenMP that this process has loaded: torch's, since torch is imported above."""
    found = re.search(r"\S*/libgomp[^/\s]*\.so\S*$", maps.read_text(), re.MULTILINE)
    return found[0] if found else None


def _bind(kernels: ctypes.CDLL, openmp: ctypes.CDLL) -> ctypes.CDLL:
    names = ("GOMP_parallel", "omp_get_thread_num", "omp_get_num_threads")
    functions = _OpenMP(*(ctypes.cast(getattr(openmp, name), c_void_p).value for name in names))
    kernels.sluice_use_openmp.argtypes = [POINTER(_OpenMP)]
    kernels.sluice_use_openmp(functions)
    kernels.sluice_choose_products.argtypes = [c_int32]
    wide = bool(kernels.sluice_choose_products(-1))
    logger.info("native kernels: bfloat16 is multiplied %s", "as float32" if wide else "in pairs")
    kernels.sluice_step.argtypes = [POINTER(Model), POINTER(Step)]
    kernels.sluice_step.restype = None
    kernels.sluice_scratch_bytes.argtypes = [POINTER(Model), c_int64, c_int64]
    kernels.sluice_scratch_bytes.restype = c_int64
    kernels.sluice_write_kv.argtypes = [POINTER(Pages), c_void_p, c_void_p, c_void_p, c_int64]
    kernels.sluice_write_kv.restype = None
    kernels.sluice_attend.argtypes = [POINTER(Attention), c_int64, c_int64, c_void_p]
    kernels.sluice_attend.restype = None
    kernels.sluice_product.argtypes = [POINTER(Linear), c_void_p, c_void_p, c_int64, c_int64, c_void_p]
    kernels.sluice_product.restype = None
    kernels.sluice_product_bytes.argtypes = [POINTER(Linear), c_int64, c_int64]
    kernels.sluice_product_bytes.restype = c_int64
    return kernels


# -- weights in panels ---------------------------------------------------------------------------------------


def _panels(values: Tensor, depth: int, fill: int = 0) -> Tensor:
    """[out, in] as [panels, in / depth, 16, depth], outputs padded to whole panels."""
    lacking = -len(values) % PANEL
    if lacking:
        values = torch.cat([values, values.new_full((lacking, values.shape[1]), fill)])
    return values.view(-1, PANEL, values.shape[1] // depth, depth).transpose(1, 2).contiguous()


def pack_bfloat16(weight: Tensor) -> dict[str, Tensor]:
    """[out, in] of bfloat16; `in` even."""
    return {"weight": _panels(weight, 2)}


def pack_int8(weight: QuantizedWeight) -> dict[str, Tensor]:
    """One scale for each output; `in` a multiple of 4. The kernel wants weights without a sign: 1 to 255."""
    return {
        "weight": _panels(weight.data, 4).view(torch.uint8).bitwise_xor_(128),
        "scale": _panels(weight.scale, 1).view(-1),
    }


def pack_w8a8(weight: QuantizedWeight) -> dict[str, Tensor]:
    """One scale for each output; `in` a multiple of 4."""
    sums = 128 * weight.data.sum(dim=1, dtype=torch.int32, keepdim=True)
    return {
        "weight": _panels(weight.data, 4),
        "scale": _panels(weight.scale, 1).view(-1),
        "sums": _panels(sums, 1).view(-1),
    }


def pack_int4(weight: QuantizedWeight) -> dict[str, Tensor]:
    """Groups of a multiple of 8 inputs. Scales become bfloat16."""
    levels = _panels(weight.levels().view(torch.uint8), 8, 8)
    packed = {
        "weight": levels[..., :4] | (levels[..., 4:] << 4),
        "scale": _panels(weight.scale.bfloat16(), 1),
    }
    return packed if weight.zero is None else {**packed, "zero": _panels(weight.zero, 1)}


class Product:
    """A packed weight, bound. Call it with [rows, in] of bfloat16 for [rows, out]."""

    def __init__(
        self,
        kind: str,
        packed: dict[str, Tensor],
        shape: tuple[int, int],
        group: int,
        bias: Tensor | None = None,
    ) -> None:
        """`shape`: out, in."""
        self.out_features, self.in_features = shape
        self.kind = kind
        self.tensors = dict(packed)
        if bias is not None:
            self.tensors["bias"] = _panels(bias.detach().float()[:, None], 1).view(-1)
        pointers = {name: tensor.data_ptr() for name, tensor in self.tensors.items()}
        names = ("weight", "scale", "zero", "sums", "bias")
        self.linear = Linear(*(pointers.get(name) for name in names), KINDS[kind], shape[1], shape[0], group)

    def __call__(self, rows: Tensor) -> Tensor:
        rows = rows.contiguous()
        num_rows, num_threads = rows.shape[0], torch.get_num_threads()
        product = rows.new_empty(num_rows, self.out_features)
        kernels = library()
        size = kernels.sluice_product_bytes(self.linear, num_rows, num_threads)
        scratch = torch.empty(size, dtype=torch.uint8)
        kernels.sluice_product(
            self.linear, rows.data_ptr(), product.data_ptr(), num_rows, num_threads, scratch.data_ptr()
        )
        return product


def takes(weight: Tensor) -> bool:
    """Whether a bfloat16 weight [out, in] has a kernel."""
    on_cpu = weight.device.type == "cpu" and weight.dtype == torch.bfloat16
    return on_cpu and weight.shape[1] % 2 == 0 and library() is not None


class NativeLinear(nn.Module):
    """`nn.Linear` for bfloat16, weights in panels. Input [..., in], output [..., out]."""

    def __init__(self, linear: nn.Linear) -> None:
        super().__init__()
        weight = linear.weight.detach()
        self.out_features, self.in_features = weight.shape
        shape = (self.out_features, self.in_features)
        self.native = Product("BFloat16", pack_bfloat16(weight), shape, self.in_features, linear.bias)
        for name, tensor in self.native.tensors.items():  # so that what is held is counted
            self.register_buffer(f"packed_{name}", tensor, persistent=False)

    def _apply(self, fn: Any, recurse: bool = True) -> NativeLinear:
        raise NotImplementedError("a packed layer stays where, and as, it was laid out")

    def forward(self, x: Tensor) -> Tensor:
        y = self.native(x.reshape(-1, self.in_features))
        return y.view(*x.shape[:-1], self.out_features)
