"""How a checkpoint's weights are packed, if its files are quantised already: what config.json says of it.

transformers hands such files to gptqmodel or compressed-tensors, whose fast kernels are for GPUs and which
build nothing for a CPU here; prequantized.py unpacks the three layouts itself. Invariant: nothing is guessed.
What is not known to be right is an `UnsupportedModel` that names the field of `quantization_config`.

Pure, and without torch.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Literal

from sluice_runtime.models.errors import UnsupportedModel

CONFIG_NAMES = ("quantization_config", "compression_config")
"""Where config.json tells of it; the second in files of compressed-tensors of 2024."""
Method = Literal["awq", "gptq", "compressed-tensors"]
_GPTQ_FORMATS = ("gptq", "gptq_v2")
# compressed-tensors' `actorder`, with its aliases: whether groups are of inputs that g_idx names.
_ORDERED = {None: False, False: False, "weight": False, "static": False}
_ORDERED |= {True: True, "group": True, "dynamic": True}


@dataclass(frozen=True)
class Packing:
    """`group` None is one scale an output. `layout` tells the variants of a method apart. `kind` is what
    computes: Int4, Int8 or W8A8, as in ModelSource.quantization. `ordered`: which inputs make a group is told
    by the file's g_idx; otherwise they follow each other."""

    method: Method
    layout: str
    bits: Literal[4, 8]
    group: int | None
    symmetric: bool
    kind: Literal["Int4", "Int8", "W8A8"]
    ordered: bool = False

    def __str__(self) -> str:
        groups = "one scale an output" if self.group is None else f"groups of {self.group}"
        zero = "symmetric" if self.symmetric else "asymmetric"
        return f"{self.method} {self.layout}, {self.kind}, {groups}, {zero}"


def packing_of(config: Mapping[str, Any]) -> Packing | None:
    """From a config.json; None where its weights are plain. Raises `UnsupportedModel`."""
    at, told = next(((n, config[n]) for n in CONFIG_NAMES if config.get(n) is not None), ("", None))
    if told is None:
        return None
    if not isinstance(told, Mapping):
        raise UnsupportedModel(f"{at} is no object")
    method = told.get("quant_method")
    reader = {"awq": _awq, "gptq": _gptq, "compressed-tensors": _compressed}.get(str(method))
    if reader is None:
        raise _refused("quant_method", method, "awq, gptq or compressed-tensors")
    return reader(told)


def _awq(told: Mapping[str, Any]) -> Packing:
    _only(told, "bits", 4)
    # Three names for one thing. Where zero_point is false the files have zero points too, all of them 8.
    for name in ("version", "format", "checkpoint_format"):
        _only({name: str(told.get(name) or "gemm").lower()}, name, "gemm")
    if told.get("backend") == "llm-awq":
        raise _refused("backend", "llm-awq", "autoawq's layout")
    return Packing("awq", "gemm", 4, _group(told, "group_size"), False, "Int4")


def _gptq(told: Mapping[str, Any]) -> Packing:
    bits = _one_of(told, "bits", (4, 8))
    layout = told.get("checkpoint_format") or told.get("format") or "gptq"
    if layout not in _GPTQ_FORMATS:
        raise _refused("checkpoint_format", layout, " or ".join(_GPTQ_FORMATS))
    if told.get("is_marlin_format"):
        raise _refused("is_marlin_format", True, "false")
    if told.get("pack_dtype") not in (None, "int32"):
        raise _refused("pack_dtype", told["pack_dtype"], "int32")
    symmetric = told.get("sym", True) is True
    if bits == 8 and not symmetric:
        raise _refused("sym", False, "true for 8 bits")
    group, ordered = _group(told, "group_size"), bool(told.get("desc_act"))
    return Packing("gptq", layout, bits, group, symmetric, "Int4" if bits == 4 else "Int8", ordered)


def _compressed(told: Mapping[str, Any]) -> Packing:
    nested = told.get("quantization_config")
    if isinstance(nested, Mapping):  # as transformers writes it anew
        told = {**told, **nested}
    for name in ("kv_cache_scheme", "transform_config"):
        if told.get(name):
            raise _refused(name, "given", "none")
    sparsity = told.get("sparsity_config") or {"format": "dense"}
    if not isinstance(sparsity, Mapping) or sparsity.get("format") != "dense":
        raise _refused("sparsity_config", "given", "none, or format dense,")
    groups = told.get("config_groups")
    if not isinstance(groups, Mapping) or len(groups) != 1:
        raise _refused("config_groups", f"{len(groups or ())} groups", "one")
    at, group = next(iter(groups.items()))
    at = f"config_groups.{at}"
    weights, activations = group.get("weights") or {}, group.get("input_activations")
    if group.get("output_activations"):
        raise _refused(f"{at}.output_activations", "given", "none")
    layout = group.get("format") or told.get("format")
    if layout not in ("pack-quantized", "int-quantized"):
        raise _refused("format", layout, "pack-quantized or int-quantized")
    _only(weights, "type", "int", f"{at}.weights.")
    bits = _one_of(weights, "num_bits", (4, 8) if layout == "pack-quantized" else (8,), f"{at}.weights.")
    ordered = _one_of({"actorder": None, **weights}, "actorder", tuple(_ORDERED), f"{at}.weights.")
    symmetric = weights.get("symmetric", True) is True
    if bits == 8 and not symmetric:
        raise _refused(f"{at}.weights.symmetric", False, "true for 8 bits")
    strategy = weights.get("strategy")
    if strategy not in ("channel", "group"):
        raise _refused(f"{at}.weights.strategy", strategy, "channel or group")
    size = _group(weights, "group_size", f"{at}.weights.") if strategy == "group" else None
    kind: Literal["Int4", "Int8", "W8A8"] = "Int4" if bits == 4 else "Int8"
    if activations is not None:
        _check_activations(activations, f"{at}.input_activations.")
        if bits != 8 or size is not None:
            raise _refused(f"{at}.input_activations", "given", "none, unless weights have 8 bits by channel")
        kind = "W8A8"
    return Packing("compressed-tensors", layout, bits, size, symmetric, kind, _ORDERED[ordered])


def _check_activations(told: Mapping[str, Any], at: str) -> None:
    wanted = {"num_bits": 8, "type": "int", "symmetric": True, "dynamic": True, "strategy": "token"}
    for name, value in wanted.items():
        _only(told, name, value, at)


def _group(told: Mapping[str, Any], name: str, at: str = "") -> int | None:
    size = told.get(name)
    if size in (-1, None):
        return None
    if not isinstance(size, int) or isinstance(size, bool) or size < 2 or size % 2:
        raise _refused(at + name, size, "an even number, or -1")
    return size


def _only(told: Mapping[str, Any], name: str, value: object, at: str = "") -> None:
    if told.get(name) != value:
        raise _refused(at + name, told.get(name), str(value).lower() if isinstance(value, bool) else value)


def _one_of(told: Mapping[str, Any], name: str, values: tuple[Any, ...], at: str = "") -> Any:
    if told.get(name) not in values:
        raise _refused(at + name, told.get(name), " or ".join(map(str, values)))
    return told[name]


def _refused(field: str, got: object, wanted: object) -> UnsupportedModel:
    return UnsupportedModel(
        f"quantization_config.{field} of config.json is {got!r}: only {wanted} is supported"
    )
