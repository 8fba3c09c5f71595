"""What a setting costs in quality: perplexity on a held-out text, through the engine's own pages and kernels.

    python -m sluice_runtime.perplexity --model DIR --text FILE --settings None Int8 None/Int8 …

A setting is a quantisation, or quantisation/kvCacheDtype. The text is cut into windows of `--context` tokens;
each is fed in chunks of `--chunk` tokens, so that later ones read earlier ones' KV from its pages. A window's
first token is not predicted. One JSON object is printed: for each setting perplexity, its difference from the
first setting's in percent, and how often its likeliest token is the first setting's too.
"""

from __future__ import annotations

import argparse
import gc
import json
import math
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from sluice_runtime.engine import machine
from sluice_runtime.engine.plan import ScheduledChunk
from sluice_runtime.engine.runner import ModelRunner
from sluice_runtime.engine.types import KvCacheDtype
from sluice_runtime.models import ModelSource, load

BLOCK_SIZE = 16


@dataclass(frozen=True)
class Scored:
    """Mean negative log-likelihood of a token in nats, and the likeliest token at each position."""

    nll: float
    likeliest: Tensor

    @property
    def perplexity(self) -> float:
        return math.exp(self.nll)


def score(runner: ModelRunner, windows: Sequence[Sequence[int]], chunk: int) -> Scored:
    """`runner` needs KV for one window."""
    losses: list[Tensor] = []
    likeliest: list[Tensor] = []
    for window in windows:
        blocks = list(range(-(-len(window) // BLOCK_SIZE)))
        for start in range(0, len(window) - 1, chunk):
            tokens = list(window[start : start + chunk])
            planned = ScheduledChunk("text", tokens, start, blocks, True, len(tokens) - 1)
            logits, _ = runner.execute([planned])
            targets = torch.tensor(window[start + 1 : start + 1 + len(tokens)])
            rows = logits[: len(targets)].float()
            losses.append(torch.nn.functional.cross_entropy(rows, targets, reduction="none"))
            likeliest.append(rows.argmax(dim=-1))
    return Scored(float(torch.cat(losses).double().mean()), torch.cat(likeliest))


def measure(options: argparse.Namespace, setting: str) -> Scored:
    """Load the model in one setting, score the text, and let go of it."""
    weights, _, kv = setting.partition("/")
    wanted: Any = None if weights == "None" else weights
    model = load(ModelSource(path=options.model, dtype=options.dtype, quantization=wanted))
    ids = model.tokenizer.encode_text(options.text.read_text(encoding="utf-8"))
    windows = [ids[i : i + options.context] for i in range(0, len(ids) - 1, options.context)]
    runner = ModelRunner(model.model, BLOCK_SIZE, KvCacheDtype(kv or "Auto"))
    runner.allocate_kv(-(-options.context // BLOCK_SIZE))
    return score(runner, windows, options.chunk)


def main(arguments: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(
        prog="python -m sluice_runtime.perplexity", description="What a setting costs in quality."
    )
    parser.add_argument("--model", type=Path, required=True, help="a model's directory or GGUF file")
    parser.add_argument("--text", type=Path, required=True, help="held-out text, UTF-8")
    parser.add_argument("--settings", nargs="+", default=["None"], metavar="QUANTIZATION[/KV]")
    parser.add_argument("--dtype", default="bfloat16", choices=["bfloat16", "float16", "float32"])
    parser.add_argument("--context", type=int, default=512, help="tokens of a window; default %(default)s")
    parser.add_argument("--chunk", type=int, default=128, help="tokens of a step; default %(default)s")
    options = parser.parse_args(arguments)
    torch.set_num_threads(machine.num_threads())
    found: dict[str, dict[str, float]] = {}
    first: Scored | None = None
    for setting in options.settings:
        scored = measure(options, setting)
        first = first or scored
        found[setting] = {
            "perplexity": round(scored.perplexity, 4),
            "delta_percent": round(100 * (scored.perplexity / first.perplexity - 1), 2),
            "same_token_percent": round(100 * float((scored.likeliest == first.likeliest).float().mean()), 2),
        }
        print(f"{setting}: {scored.perplexity:.4f}", file=sys.stderr, flush=True)
        gc.collect()  # two models at once would need twice the memory
    num_tokens = 0 if first is None else len(first.likeliest)
    print(json.dumps({"tokens": num_tokens, "context": options.context, "settings": found}, indent=1))


if __name__ == "__main__":
    main()
