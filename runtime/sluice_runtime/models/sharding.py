"""Whether a model can be split over several processes (tensor parallelism), said before anything is started.

Each rank computes its share of the heads and of the feed-forward width; transformers' `tp_plan` says of each
product whether it is cut by rows or columns. What can't be cut evenly is refused by name. Worked example:
SmolLM2-135M has 9 heads and 3 KV heads, so 1 and 3 are the numbers that divide both.

Pure, and without torch.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from typing import Any

from sluice_runtime.models.checkpoint import Checkpoint, ModelSource
from sluice_runtime.models.errors import UnsupportedModel

MAX_RANKS = 16
_WIDTHS = ("intermediate_size", "moe_intermediate_size", "shared_expert_intermediate_size")


def check_source(source: ModelSource, checkpoint: Checkpoint) -> None:
    """Raise `UnsupportedModel` for forms of weights that are only known whole."""
    if source.num_ranks == 1:
        return
    if source.quantization is not None:
        raise UnsupportedModel(
            f"quantization {source.quantization} is made of whole weights, and tensorParallel"
            f" {source.num_ranks} splits them: set quantization to None, or tensorParallel to 1"
        )
    if checkpoint.gguf is not None:
        raise UnsupportedModel(
            f"{checkpoint.gguf.name}: a GGUF file can't be split over tensorParallel {source.num_ranks}"
            " processes: export it as safetensors (python -m sluice_runtime.models export)"
        )


def check_sizes(config: Mapping[str, Any], num_ranks: int) -> None:
    """Raise `UnsupportedModel` unless `num_ranks` divides heads, KV heads and feed-forward widths of a
    config.json."""
    if num_ranks == 1:
        return
    text = config.get("text_config")
    found = text if isinstance(text, Mapping) else config
    heads = found.get("num_attention_heads") or found.get("n_head")
    if not isinstance(heads, int):
        raise UnsupportedModel(
            f"config.json has no num_attention_heads: tensorParallel {num_ranks} can't be checked, so set it"
            " to 1"
        )
    kv_heads = found.get("num_key_value_heads") or heads
    sizes = {"num_attention_heads": heads, "num_key_value_heads": kv_heads}
    sizes |= {name: found[name] for name in _WIDTHS if isinstance(found.get(name), int) and found[name] > 0}
    wrong = {name: size for name, size in sizes.items() if size % num_ranks}
    if wrong:
        divisors = [n for n in range(1, MAX_RANKS + 1) if math.gcd(*sizes.values()) % n == 0]
        told = " and ".join(f"{name} {size}" for name, size in wrong.items())
        raise UnsupportedModel(
            f"tensorParallel {num_ranks} does not divide this model's {told}: set it to"
            f" {' or '.join(map(str, divisors))}"
        )


def check_plan(config: Any) -> None:
    """Raise `UnsupportedModel` unless transformers' plan for the model splits its keys and values. `config`:
    transformers' configuration."""
    text = config.get_text_config()
    plan = getattr(text, "base_model_tp_plan", None) or {}
    if not plan:
        raise UnsupportedModel(
            f"{text.model_type}: transformers has no tensor-parallel plan for it: set tensorParallel to 1"
        )
    if not any(name.endswith("k_proj") and style == "colwise" for name, style in plan.items()):
        raise UnsupportedModel(
            f"{text.model_type}: transformers' tensor-parallel plan keeps its keys and values whole on each"
            " rank, which saves no KV: set tensorParallel to 1"
        )
