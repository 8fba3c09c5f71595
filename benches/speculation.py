"""Speculative decoding on and off, interleaved, on a text that repeats itself and on one that does not.

    python benches/speculation.py MODEL_DIR [--out FILE] [--repeat N]

One sequence, or four at once, greedy. Each round serves the same prompts with every engine, in an order that
turns, and the least time of each is what counts: the machine's other work only ever adds. `Draft` is the
model itself cut to its first layers, not a trained draft: it shows the mechanics, and is expected to lose.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import random
import time
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import torch

from sluice_runtime.engine.engine import Engine
from sluice_runtime.engine.types import (
    EngineConfig,
    EngineRequest,
    OutputChunk,
    SamplingParams,
    Speculation,
    SpeculationMethod,
)
from sluice_runtime.models import LoadedModel, ModelSource, load

NUM_OUTPUT = 64
KINDS = ("repeating", "random")
RECORD = '{"id": %d, "name": "item-%d", "tags": ["small", "blue"], "price": 12.50, "stock": true},\n'


def prompts(model: LoadedModel, kind: str, num: int, seed: int) -> list[tuple[int, ...]]:
    """`repeating`: records of one form, to be gone on with. `random`: tokens drawn at random."""
    rng = random.Random(seed)
    if kind == "random":
        return [
            tuple(rng.randrange(1000, model.tokenizer.vocab_size) for _ in range(200)) for _ in range(num)
        ]
    texts = ["".join(RECORD % (n * 100 + i, n * 100 + i) for i in range(8)) for n in range(1, num + 1)]
    return [tuple(model.tokenizer.encode_text(text)) for text in texts]


async def serve(engine: Engine, ids: list[tuple[int, ...]], label: str) -> tuple[float, list[list[int]]]:
    """Seconds from the first token to the last of all, and the answers."""
    params = SamplingParams(max_tokens=NUM_OUTPUT, temperature=0.0, ignore_eos=True)

    async def one(stream: AsyncIterator[OutputChunk]) -> tuple[float, float, list[int]]:
        tokens: list[int] = []
        first = last = 0.0
        async for chunk in stream:
            last = time.perf_counter()
            first = first or last
            tokens += chunk.token_ids
        return first, last, tokens

    streams = [
        engine.submit(EngineRequest(f"{label}-{i}", prompt, params, "bench")) for i, prompt in enumerate(ids)
    ]
    ended = await asyncio.gather(*map(one, streams))
    return max(e[1] for e in ended) - min(e[0] for e in ended), [e[2] for e in ended]


def truncated(model: LoadedModel, num_layers: int) -> LoadedModel:
    """The model's first layers with its own head, as a draft."""
    inner: Any = model.model
    inner.model.layers = inner.model.layers[:num_layers]
    inner.config.num_hidden_layers = num_layers
    return model


def engines(source: ModelSource, num_layers: int) -> dict[str, Engine]:
    def make(speculation: Speculation | None, draft: LoadedModel | None = None) -> Engine:
        config = EngineConfig(max_num_seqs=4, num_kv_blocks=256, max_model_len=1024, speculation=speculation)
        engine = Engine(load(source), config, draft=draft)
        engine.start()
        return engine

    suffix, draft = SpeculationMethod.SUFFIX, SpeculationMethod.DRAFT
    made = {
        "off": make(None),
        "Suffix, 4": make(Speculation(suffix, 4, always=True)),
    }
    if num_layers:
        cut = truncated(load(source), num_layers)
        made[f"Draft of {num_layers} layers, 3"] = make(Speculation(draft, 3, always=True), cut)
    return made


async def measure(
    source: ModelSource, repeat: int, num_layers: int, sequences: Sequence[int]
) -> dict[str, Any]:
    made = engines(source, num_layers)
    model = made["off"].model
    rows: dict[str, Any] = {}
    for kind in KINDS:
        for num in sequences:
            ids = prompts(model, kind, num, seed=num)
            least = dict.fromkeys(made, float("inf"))
            answers: dict[str, list[list[int]]] = {}
            before = {name: engine.load().speculation for name, engine in made.items()}
            names = list(made)
            for turn in range(repeat):
                for name in names[turn % len(names) :] + names[: turn % len(names)]:
                    seconds, answers[name] = await serve(made[name], ids, f"{kind}-{num}-{turn}")
                    least[name] = min(least[name], seconds)
            for name, engine in made.items():
                row: dict[str, Any] = {
                    "tokens_per_s": round(num * (NUM_OUTPUT - 1) / least[name], 1),
                    "vs_off": round(least["off"] / least[name], 2),
                    "same_answers": sum(a == b for a, b in zip(answers[name], answers["off"], strict=True)),
                }
                now, then = engine.load().speculation, before[name]
                if now is not None and then is not None:
                    right, drafted = sum(now.right) - sum(then.right), sum(now.drafted) - sum(then.drafted)
                    forwards = now.num_stream_forwards - then.num_stream_forwards
                    row["acceptance"] = round(right / drafted, 2) if drafted else None
                    row["tokens_per_forward"] = round(
                        (now.num_stream_tokens - then.num_stream_tokens) / forwards, 2
                    )
                    row["by_position"] = [
                        round((r - r0) / (d - d0), 2) if d > d0 else None
                        for r, r0, d, d0 in zip(now.right, then.right, now.drafted, then.drafted, strict=True)
                    ]
                rows[f"{kind} {num}× {name}"] = row
                print(f"{kind:10} {num}× {name:28} {row}", flush=True)
    for engine in made.values():
        engine.stop()
    return rows


def main() -> None:
    parser = argparse.ArgumentParser(
        description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("model", type=Path)
    parser.add_argument("--out", type=Path)
    parser.add_argument("--repeat", type=int, default=5)
    parser.add_argument("--draft-layers", type=int, default=10, help="0: no draft; default %(default)s")
    parser.add_argument("--sequences", type=int, nargs="+", default=[1, 4])
    parser.add_argument("--dtype", choices=["bfloat16", "float32"], default="bfloat16")
    options = parser.parse_args()
    torch.manual_seed(0)
    source = ModelSource(path=options.model, dtype=options.dtype, device="cpu")
    rows = asyncio.run(measure(source, options.repeat, options.draft_layers, options.sequences))
    if options.out is not None:
        options.out.write_text(json.dumps(rows, indent=1, ensure_ascii=False) + "\n")


if __name__ == "__main__":
    main()
