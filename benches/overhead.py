"""The share of a step that is not the model's: scheduler, sampler, detokeniser and streams together.

    python benches/overhead.py --model DIR --sequences 32 --tokens 64

Prints one line of JSON; under 10 % at 32 sequences is the aim.
"""

from __future__ import annotations

import argparse
import asyncio
import json
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from sluice_runtime.engine.engine import Engine
from sluice_runtime.engine.plan import ScheduledChunk
from sluice_runtime.engine.types import EngineConfig, EngineRequest, SamplingParams
from sluice_runtime.models import ModelSource, load


async def overhead(
    engine: Engine, num_sequences: int, num_tokens: int, temperature: float = 0.0
) -> dict[str, float]:
    """Decode `num_tokens` of `num_sequences` at once; times are means of the steps in which all of them run,
    in milliseconds. `share`: what is left of a step without its forward."""
    forward_s, steps = 0.0, list[tuple[float, float]]()
    execute, step = engine._runner.execute, engine._step

    def timed_execute(chunks: Sequence[ScheduledChunk]) -> Any:
        nonlocal forward_s
        began = time.perf_counter()
        result = execute(chunks)
        forward_s += time.perf_counter() - began
        return result

    def timed_step() -> None:
        nonlocal forward_s
        forward_s, began = 0.0, time.perf_counter()
        full = sum(s.num_lacking == 1 for s in engine._scheduler.running()) == num_sequences
        step()
        engine._flush_outbox()
        if full:
            steps.append((time.perf_counter() - began, forward_s))

    engine._runner.execute, engine._step = timed_execute, timed_step  # type: ignore[method-assign]
    sampling = SamplingParams(num_tokens, temperature=temperature, top_p=0.95, seed=1, ignore_eos=True)
    streams = [
        engine.submit(EngineRequest(f"r{i}", tuple(range(i + 1, i + 17)), sampling, "bench"))
        for i in range(num_sequences)
    ]

    async def read(stream: Any) -> None:
        async for _ in stream:
            pass

    await asyncio.gather(*(read(stream) for stream in streams))
    whole, forward = (sum(times) / len(steps) for times in zip(*steps, strict=True))
    return {
        "sequences": num_sequences,
        "steps": len(steps),
        "step_ms": whole * 1e3,
        "forward_ms": forward * 1e3,
        "share": 1 - forward / whole,
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", type=Path, required=True)
    parser.add_argument("--sequences", type=int, default=32)
    parser.add_argument("--tokens", type=int, default=64)
    parser.add_argument("--temperature", type=float, default=0.0)
    options = parser.parse_args()
    config = EngineConfig(max_num_seqs=options.sequences, kv_cache_bytes=256 << 20)
    engine = Engine(load(ModelSource(path=options.model)), config)
    engine.start()
    try:
        told = asyncio.run(overhead(engine, options.sequences, options.tokens, options.temperature))
    finally:
        engine.stop()
    print(json.dumps({name: round(value, 4) for name, value in told.items()}))


if __name__ == "__main__":
    main()
