"""This engine as a contestant; its option is a kind of quantisation."""

from __future__ import annotations

import asyncio
import time
from pathlib import Path

from benches.engine.probe import answer
from benches.engine.work import MAX_SEQS, MAX_TOKENS, Job, Outcome, Request
from benches.peers.serve import Measure, serve, warmed

from sluice_runtime.engine import machine
from sluice_runtime.engine.engine import Engine
from sluice_runtime.engine.types import EngineConfig
from sluice_runtime.models import ModelSource, load


async def _stream(engine: Engine, name: str, request: Request, began: float) -> tuple[float, ...]:
    """When each token of a request came."""
    await asyncio.sleep(max(0.0, began + request.at - time.perf_counter()))
    times = await answer(engine, name, request.prompt, request.num_out)
    assert len(times) == request.num_out, f"{len(times)} tokens instead of {request.num_out}"
    return tuple(at - began for at in times)


async def run(engine: Engine, job: Job) -> Outcome:
    """The whole path: submit, schedule, forward, sample, detokenise, asyncio delivery."""
    began = time.perf_counter()
    times = await asyncio.gather(
        *(_stream(engine, str(i), request, began) for i, request in enumerate(job.requests))
    )
    return Outcome(time.perf_counter() - began, tuple(times))


def start(path: Path, quantization: str) -> tuple[Measure, dict[str, object]]:
    model = load(ModelSource(path=path, dtype="bfloat16", quantization=quantization or None))  # type: ignore[arg-type]
    config = EngineConfig(
        max_num_seqs=MAX_SEQS, max_model_len=MAX_TOKENS, kv_cache_bytes=1 << 29, max_queue=MAX_SEQS
    )
    engine = Engine(model, config)
    engine.start()
    about: dict[str, object] = {"threads": machine.num_threads(), "weight_bytes": model.weight_bytes}
    return warmed(lambda job: asyncio.run(run(engine, job))), about


if __name__ == "__main__":
    serve(start)
