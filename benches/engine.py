"""`make bench-engine`: tokens a second of the engine on SmolLM2 in bfloat16, as one JSON object in the last
line.

Rows: output tokens a second, prefill included, for 1, 4 and 16 sequences of 128 random tokens in and 64 out,
and for 32 of 256 in; and input tokens a second for 8 prompts of 1024 with one token out. Greedy, warm, best
of `--runs`. The whole path is measured: submit, schedule, forward, sample, detokenise, asyncio delivery.
Prompts are new in each run, so that the prefix cache never helps.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import os
import random
import time
from pathlib import Path

from sluice_runtime.engine import machine
from sluice_runtime.engine.engine import Engine
from sluice_runtime.engine.types import EngineConfig, EngineRequest, SamplingParams
from sluice_runtime.models import ModelSource, load

ROWS = ((1, 128, 64), (4, 128, 64), (16, 128, 64), (32, 256, 64))
PREFILL = (8, 1024, 1)


async def one(engine: Engine, request_id: str, prompt: tuple[int, ...], num_out: int) -> int:
    sampling = SamplingParams(max_tokens=num_out, temperature=0.0, ignore_eos=True)
    num = 0
    async for chunk in engine.submit(EngineRequest(request_id, prompt, sampling, "bench")):
        num += len(chunk.token_ids)
    return num


async def run(engine: Engine, rng: random.Random, num: int, num_in: int, num_out: int) -> float:
    """Seconds until `num` sequences that arrive together are done."""
    prompts = [tuple(rng.randrange(20, 49152) for _ in range(num_in)) for _ in range(num)]
    started = time.perf_counter()
    counts = await asyncio.gather(*(one(engine, f"{i}", p, num_out) for i, p in enumerate(prompts)))
    seconds = time.perf_counter() - started
    assert counts == [num_out] * num, counts
    return seconds


async def measure(engine: Engine, rng: random.Random, runs: int) -> dict[str, object]:
    await run(engine, rng, 4, 128, 8)
    tokens_per_s: dict[str, float] = {}
    print(f"{'sequences':>9} {'in':>5} {'out':>4} {'best s':>8} {'tok/s':>8}   all runs (s)")
    for num, num_in, num_out in (*ROWS, PREFILL):
        seconds = [await run(engine, rng, num, num_in, num_out) for _ in range(runs)]
        counted = num * (num_in if (num, num_in, num_out) == PREFILL else num_out)
        rate = round(counted / min(seconds), 1)
        print(
            f"{num:>9} {num_in:>5} {num_out:>4} {min(seconds):>8.2f} {rate:>8.1f}   "
            + " ".join(f"{s:.2f}" for s in seconds),
            flush=True,
        )
        tokens_per_s[str(num) if num_out > 1 else "prefill"] = rate
    return {"tokens_per_s": tokens_per_s, "prefill_tokens_per_s": tokens_per_s.pop("prefill")}


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True, help="a model's directory or GGUF file")
    parser.add_argument("--quantization", choices=["int8"])
    parser.add_argument("--runs", type=int, default=3)
    parser.add_argument("--seed", type=int, default=1)
    parser.add_argument("--max-batch-tokens", type=int, default=512)
    options = parser.parse_args()
    model = load(ModelSource(path=options.model, quantization=options.quantization))
    config = EngineConfig(
        max_num_seqs=32, max_batch_tokens=options.max_batch_tokens, kv_cache_bytes=1 << 29, max_queue=64
    )
    engine = Engine(model, config)
    engine.start()
    load_1m = os.getloadavg()[0]
    print(f"threads {machine.num_threads()}, seed {options.seed}, load average before {load_1m:.1f}")
    result = asyncio.run(measure(engine, random.Random(options.seed), options.runs))
    engine.stop()
    print(json.dumps(result))


if __name__ == "__main__":
    main()
