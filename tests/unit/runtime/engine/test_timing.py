"""Jitter and busy time: what the loop measures of a request beside its stages."""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice_runtime.engine.engine import Engine
from sluice_runtime.engine.jitter import CAPACITY, MIN_TOKENS, Gaps
from sluice_runtime.engine.plan import ScheduledChunk
from sluice_runtime.engine.tokenizer import Tokenizer
from sluice_runtime.engine.types import EngineConfig, EngineRequest, RequestTiming
from unit.runtime.engine.conftest import loaded

Make = Callable[..., Engine]
Request = Callable[..., EngineRequest]


def jitter(gaps: list[float]) -> float | None:
    held = Gaps()
    for gap in gaps:
        held.add(gap)
    return held.jitter_s()


@given(st.lists(st.floats(0, 100), min_size=MIN_TOKENS - 1, max_size=CAPACITY))
def test_it_is_exact_while_all_gaps_are_held(gaps: list[float]) -> None:
    # Python's "inclusive" quantiles are definition 7 too.
    p95 = statistics.quantiles(gaps, n=20, method="inclusive")[18]
    assert jitter(gaps) == pytest.approx(p95 - statistics.median(gaps), abs=1e-9)


def test_by_hand() -> None:
    # 21 gaps of 10 to 30 ms: the 95th percentile is the 20th, 29 ms; the median is 20 ms.
    assert jitter([0.001 * ms for ms in range(30, 9, -1)]) == pytest.approx(0.009)
    assert jitter([0.02] * 50) == 0.0


def test_under_eight_tokens_there_is_none() -> None:
    assert jitter([0.1] * 6) is None  # seven tokens
    assert jitter([0.1] * 7) == 0.0


def test_its_memory_is_bounded_and_the_sample_fair() -> None:
    held = Gaps()
    for i in range(200 * CAPACITY):
        held.add(i / (200 * CAPACITY))
    assert len(held._held) == CAPACITY
    # Of a uniform spread from 0 to 1 it is 0.45; one sample of 512 scatters by 0.024.
    assert held.jitter_s() == pytest.approx(0.45, abs=0.1)


class Clock:
    """The engine's clock: stands still but where a test moves it."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


class Steps:
    """An engine whose loop a test turns by hand; each forward takes a second of the clock."""

    def __init__(self, engine: Engine, clock: Clock) -> None:
        self.engine, self.clock = engine, clock
        engine._thread = SimpleNamespace(is_alive=lambda: True)
        forward = engine._runner.execute

        def execute(chunks: Sequence[ScheduledChunk]) -> Any:
            clock.now += 1.0
            return forward(chunks)

        engine._runner.execute = execute

    async def answer(self, *requests: EngineRequest, between_s: float = 0.0) -> dict[str, RequestTiming]:
        streams = {request.request_id: self.engine.submit(request) for request in requests}
        self.engine._drain_inbox()
        while self.engine._active:
            self.engine._step()
            self.engine._flush_outbox()
            self.clock.now += between_s
        timings = {}
        for request_id, stream in streams.items():
            *_, last = [chunk async for chunk in stream]
            assert last.timing is not None
            timings[request_id] = last.timing
        return timings


@pytest.fixture
def steps(llama: Any, tokenizer: Tokenizer, monkeypatch: pytest.MonkeyPatch) -> Steps:
    config = EngineConfig(num_kv_blocks=256, block_size=4, num_threads=1, max_num_seqs=3, max_batch_tokens=64)
    clock = Clock()
    monkeypatch.setattr("sluice_runtime.engine.engine.time", clock)
    return Steps(Engine(loaded(llama.model, tokenizer), config), clock)


async def test_one_request_is_charged_all_of_its_steps(steps: Steps, request_of: Request) -> None:
    timings = await steps.answer(request_of("a", (1, 2, 3), 10))
    assert timings["a"].busy_s == pytest.approx(10.0)
    assert timings["a"].jitter_s == 0.0


async def test_a_step_is_shared_by_tokens(steps: Steps, request_of: Request) -> None:
    timings = await steps.answer(request_of("a", tuple(range(9)), 3), request_of("b", (1,), 5))
    # 9 of 10 tokens, then twice half; b is alone twice.
    assert timings["a"].busy_s == pytest.approx(0.9 + 0.5 + 0.5)
    assert timings["b"].busy_s == pytest.approx(0.1 + 0.5 + 0.5 + 1 + 1)


async def test_a_long_prompt_is_charged_for_every_chunk(steps: Steps, request_of: Request) -> None:
    timings = await steps.answer(request_of("a", tuple(range(150)), 1), request_of("b", (1,), 1))
    assert sum(t.busy_s or 0 for t in timings.values()) == pytest.approx(3.0)
    assert (timings["a"].busy_s or 0) > 140 * (timings["b"].busy_s or 1) / 150


async def test_what_follows_a_step_is_charged_and_idleness_is_not(steps: Steps, request_of: Request) -> None:
    first = await steps.answer(request_of("a", (1,), 4), between_s=0.25)
    assert first["a"].busy_s == pytest.approx(4 + 3 * 0.25)
    steps.clock.now += 1000
    assert (await steps.answer(request_of("b", (1,), 4)))["b"].busy_s == pytest.approx(4.0)


async def test_one_that_never_ran_was_never_busy(steps: Steps, request_of: Request) -> None:
    late = request_of("a", (1,), 4, deadline=steps.clock.now - 1)
    assert (await steps.answer(late))["a"].busy_s is None


def test_it_costs_the_loop_next_to_nothing() -> None:
    held = Gaps()
    began = time.process_time()
    for _ in range(20_000):
        held.add(0.01)
    assert (time.process_time() - began) / 20_000 < 20e-6
