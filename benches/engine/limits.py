"""What the machine itself can do: memory read, and bfloat16 products. In the same run, since both drift."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch

from sluice_runtime.engine import machine

_READ_BYTES = 512 << 20
_ROWS, _SIZE = 256, 2048


@dataclass
class Limits:
    """The best seen so far. `read_bytes_per_s`: a sum over 512 MiB of float32. `flops_per_s`: 256 rows
    through 2048×2048 bfloat16 weights in oneDNN's own layout."""

    read_bytes_per_s: float = 0.0
    flops_per_s: float = 0.0

    def measure(self, repeats: int = 5) -> None:
        torch.set_num_threads(machine.num_threads())
        data = torch.ones(_READ_BYTES // 4)
        x, weight = torch.ones(_ROWS, _SIZE).bfloat16(), torch.ones(_SIZE, _SIZE).bfloat16()
        packed = torch.ops.mkldnn._reorder_linear_weight(weight, _ROWS)
        flops = 2.0 * _ROWS * _SIZE * _SIZE
        for _ in range(repeats):
            self.read_bytes_per_s = max(self.read_bytes_per_s, _READ_BYTES / _seconds(data.sum))
            took = _seconds(lambda: torch.ops.mkldnn._linear_pointwise(x, packed, None, "none", [], ""))
            self.flops_per_s = max(self.flops_per_s, flops / took)


def _seconds(call: Any) -> float:
    began = time.perf_counter()
    call()
    return time.perf_counter() - began


@dataclass(frozen=True)
class Cost:
    """What a token costs by the model's shape: parameters that its products use, and the head among them."""

    num_parameters: int
    num_head: int

    @classmethod
    def of(cls, config: dict[str, Any]) -> Cost:
        """From a Llama's config.json. Norms are left out: a millionth."""
        hidden, mlp, vocab = config["hidden_size"], config["intermediate_size"], config["vocab_size"]
        heads, kv_heads = config["num_attention_heads"], config["num_key_value_heads"]
        width = config.get("head_dim") or hidden // heads
        layer = hidden * width * (2 * heads + 2 * kv_heads) + 3 * hidden * mlp
        return cls(layer * config["num_hidden_layers"] + vocab * hidden, vocab * hidden)

    @property
    def bytes_per_decode(self) -> int:
        """Weights that one token at batch 1 reads, in bfloat16. Its KV, a hundredth here, is left out."""
        return 2 * self.num_parameters

    @property
    def flops_per_prefill(self) -> int:
        """Products of one prompt token; the head sees only a prompt's last. Attention is left out: at 1,024
        tokens a tenth more here, so the share told is the lower bound."""
        return 2 * (self.num_parameters - self.num_head)
