"""Looks into an engine while it runs: what each step held and how long it took. For the benchmark only."""

from __future__ import annotations

import asyncio
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import asynccontextmanager
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from sluice_runtime.engine.engine import Engine
from sluice_runtime.engine.plan import ScheduledChunk, SchedulerOutput
from sluice_runtime.engine.request import ActiveRequest
from sluice_runtime.engine.types import EngineConfig, EngineRequest, OutputChunk, SamplingParams
from sluice_runtime.models import LoadedModel, ModelSource, load


@dataclass
class Step:
    """One step: when it ended and how long it took, in seconds, the model's part of that, and tokens by
    tenant."""

    at: float
    whole_s: float
    forward_s: float
    num_streams: int
    tokens: dict[str, int]


@dataclass
class Probe:
    """Wraps the parts of an engine that a step goes through. `put_at`: by request, when the engine had a
    chunk of its answer ready for the streams."""

    engine: Engine
    steps: list[Step] = field(default_factory=list)
    put_at: dict[str, list[float]] = field(default_factory=dict)
    _forward_s: float = 0.0
    _plan: SchedulerOutput | None = None

    def __post_init__(self) -> None:
        engine: Any = self.engine
        execute, schedule = engine._runner.execute, engine._scheduler.schedule
        step, put = engine._step, engine._outbox.put

        def timed_execute(chunks: Sequence[ScheduledChunk]) -> Any:
            began = time.perf_counter()
            try:
                return execute(chunks)
            finally:
                self._forward_s += time.perf_counter() - began

        def seen_schedule(*args: Any) -> SchedulerOutput:
            plan: SchedulerOutput = schedule(*args)
            self._plan = plan
            return plan

        def stamped_put(active: ActiveRequest, chunk: OutputChunk) -> None:
            self.put_at.setdefault(active.request.request_id, []).append(time.perf_counter())
            put(active, chunk)

        def timed_step() -> None:
            self._forward_s, self._plan, began = 0.0, None, time.perf_counter()
            step()
            engine._flush_outbox()
            if self._plan is not None and self._plan.chunks:
                self._saw(self._plan, began)

        engine._runner.execute, engine._scheduler.schedule = timed_execute, seen_schedule
        engine._step, engine._outbox.put = timed_step, stamped_put

    def _saw(self, plan: SchedulerOutput, began: float) -> None:
        now, tokens = time.perf_counter(), dict[str, int]()
        for chunk in plan.chunks:
            tenant = chunk.request_id.split("/")[0]
            tokens[tenant] = tokens.get(tenant, 0) + len(chunk.token_ids)
        self.steps.append(Step(now, now - began, self._forward_s, plan.num_streams, tokens))


@asynccontextmanager
async def running(model: LoadedModel, **limits: Any) -> AsyncIterator[Engine]:
    """A warm engine with the runtime's defaults but for `limits`."""
    engine = Engine(model, EngineConfig(**{"kv_cache_bytes": 1 << 29, "max_model_len": 2048} | limits))
    engine.start()
    try:
        await asyncio.gather(*(answer(engine, f"warm/{i}", tuple(range(20, 84)), 4) for i in range(4)))
        yield engine
    finally:
        await asyncio.to_thread(engine.stop)


async def answer(
    engine: Engine, name: str, prompt: tuple[int, ...], num_out: int, **more: Any
) -> list[float]:
    """Ask greedily for `num_out` tokens; when each came. `name` begins with the tenant: `a/7`."""
    sampling = SamplingParams(max_tokens=num_out, temperature=0.0, ignore_eos=True)
    request = EngineRequest(name, prompt, sampling, "bench", tenant=more.pop("tenant", ""), **more)
    times: list[float] = []
    stream = engine.submit(request)
    try:
        async for chunk in stream:
            times += [time.perf_counter()] * len(chunk.token_ids)
    finally:
        engine.cancel(name)
    return times


def smollm2(path: Path) -> LoadedModel:
    return load(ModelSource(path=path, dtype="bfloat16"))
