"""What config.json says of weights that are quantised in their files, as far as memory follows from it.

Read are `quantization_config`, which AutoAWQ, GPTQModel and compressed-tensors write, and the older name of
the last, `compression_config`, where its parts are nested in another `quantization_config` (its pull request
73). Older writers told it beside config.json alone: AutoGPTQ in quantize_config.json (its issue 462), AutoAWQ
in quant_config.json, where bits and group have other names. The runtime reads neither: `unread_file` is for a
refusal, since such words of 32 bits would be counted as weights.

Pure. Invariant: one number of bits and one group for all plain products, or a `ValueError` that names the
field. Whether the runtime can load them it tells itself.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping
from typing import Any

CONFIG_NAMES = ("quantization_config", "compression_config")
FILES = ("quantize_config.json", "quant_config.json")
_IN_PARTS = ("ignore", "modules_to_not_convert", "modules_in_block_to_quantize", "dynamic")
"""Of compressed-tensors, AutoAWQ, optimum and GPTQModel: layers that are plain, that alone are quantised, or
that have bits of their own."""
_PLAIN = ("lm_head", "embed_tokens")
"""What is plain in any such checkpoint that the runtime loads."""


def stored_form(config: Mapping[str, Any]) -> tuple[int, int] | None:
    """Bits and group (0: all inputs) of the weights; None where they are plain. Raises ValueError."""
    at = next((name for name in CONFIG_NAMES if config.get(name) is not None), "")
    if not at:
        return None
    told = config[at]
    if not isinstance(told, Mapping):
        raise ValueError(f"{at} of config.json is no object")
    nested = told.get("quantization_config")
    if isinstance(nested, Mapping):
        told = {**told, **nested}
    for name in _IN_PARTS:
        _refuse_parts(told.get(name), f"{at}.{name}")
    where, weights = at, told
    if told.get("config_groups") is not None:
        where, weights = _only_group(told["config_groups"], f"{at}.config_groups")
    bits, group = weights.get("bits", weights.get("num_bits")), weights.get("group_size")
    if bits not in (4, 8):
        raise ValueError(f"{where} of config.json tells no number of bits that the runtime loads: 4 or 8")
    return bits, group if isinstance(group, int) and group > 0 else 0


def unread_file(config: Mapping[str, Any], names: Collection[str]) -> str:
    """Of the files beside config.json one that tells what it does not; empty: there is none."""
    told = any(config.get(name) is not None for name in CONFIG_NAMES)
    return "" if told else next((name for name in FILES if name in names), "")


def _refuse_parts(told: object, at: str) -> None:
    named = [told] if isinstance(told, str) else told if isinstance(told, Collection) else []
    parts = [str(one) for one in named if not str(one).endswith(_PLAIN)]
    if parts:
        raise ValueError(
            f"{at} of config.json treats {parts[0]} in another way: what memory that takes can't be told"
            " before it is loaded"
        )


def _only_group(told: object, at: str) -> tuple[str, Mapping[str, Any]]:
    if not isinstance(told, Mapping) or len(told) != 1:
        raise ValueError(f"{at} of config.json is not one group: only one for all layers is supported")
    name, group = next(iter(told.items()))
    weights = group.get("weights") if isinstance(group, Mapping) else None
    return f"{at}.{name}.weights", weights if isinstance(weights, Mapping) else {}
