"""The engine through its public interface: streams, limits, cancellation, faults, load."""

from __future__ import annotations

import asyncio
import gc
import threading
import time
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import pytest
import torch

from sluice_runtime.engine.engine import Engine
from sluice_runtime.engine.plan import ScheduledChunk
from sluice_runtime.engine.tokenizer import Tokenizer
from sluice_runtime.engine.types import (
    EngineRequest,
    EngineStopped,
    FinishReason,
    InvalidRequest,
    OutputChunk,
    QueueFull,
    RequestTooLong,
)

Make = Callable[..., Engine]
Request = Callable[..., EngineRequest]


async def _all(stream: AsyncIterator[OutputChunk]) -> list[OutputChunk]:
    return [chunk async for chunk in stream]


def _ids(chunks: list[OutputChunk]) -> list[int]:
    return [i for c in chunks for i in c.token_ids]


def _text(chunks: list[OutputChunk]) -> str:
    return "".join(c.text for c in chunks)


async def _idle(engine: Engine) -> None:
    """Until the engine has let go of everything."""
    deadline = time.monotonic() + 60
    while engine.load().num_running or engine.load().num_waiting or engine.load().kv_blocks_used:
        assert time.monotonic() < deadline, engine.load()
        await asyncio.sleep(0.005)


async def _until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 60
    while not condition():
        assert time.monotonic() < deadline
        await asyncio.sleep(0.002)


class Script:
    """Replaces an engine's forward: each request says what its id spells, token by token; faults on
    demand."""

    def __init__(self, engine: Engine, texts: dict[str, Sequence[int]]) -> None:
        self.texts, self.engine = texts, engine
        self.poisoned: set[str] = set()
        self.nan: set[str] = set()
        self.delay = 0.0
        engine._runner.execute = self.execute  # type: ignore[method-assign]

    def execute(self, chunks: Sequence[ScheduledChunk]) -> tuple[torch.Tensor, list[str]]:
        time.sleep(self.delay)
        if any(c.request_id in self.poisoned for c in chunks):
            raise RuntimeError("secret internals")
        ids = [c.request_id for c in chunks if c.samples]
        logits = torch.full((len(ids), 300), -10.0)
        for row, request_id in enumerate(ids):
            state = self.engine._scheduler.get(request_id)
            assert state is not None
            logits[row, self.texts[request_id][state.num_output_tokens]] = 10.0
            if request_id in self.nan:
                logits[row] = float("nan")
        return logits, ids


async def test_alone_and_together_the_answer_is_that_of_generate(
    make_engine: Make, request_of: Request, llama: Any
) -> None:
    engine = make_engine(max_num_seqs=3, max_batch_tokens=7)
    prompts = {str(i): tuple(range(i, i * 5 + 3)) for i in range(6)}
    alone = {i: _ids(await _all(engine.submit(request_of("alone" + i, p)))) for i, p in prompts.items()}
    streams = {i: engine.submit(request_of(i, p)) for i, p in prompts.items()}
    together = await asyncio.gather(*(_all(s) for s in streams.values()))
    for (request_id, prompt), chunks in zip(prompts.items(), together, strict=True):
        assert _ids(chunks) == alone[request_id]
        llama.assert_same(prompt, alone[request_id])
        assert [c.finish_reason for c in chunks] == [None] * 7 + [FinishReason.LENGTH]


async def test_seeded_sampling_repeats_alone_and_together(make_engine: Make, request_of: Request) -> None:
    engine = make_engine()
    options: dict[str, Any] = {"temperature": 1.0, "seed": 5, "top_p": 0.9}
    first = await _all(engine.submit(request_of("a", (1, 2, 3), 12, **options)))
    others = [engine.submit(request_of(f"o{i}", (i, 9), 12, temperature=1.0)) for i in range(5)]
    again, *_ = await asyncio.gather(
        _all(engine.submit(request_of("b", (1, 2, 3), 12, **options))), *(_all(o) for o in others)
    )
    assert _ids(first) == _ids(again)


async def test_timing_and_counts(make_engine: Make, request_of: Request) -> None:
    engine = make_engine()
    before = time.monotonic()
    prompt = tuple(range(1, 20))
    await _all(engine.submit(request_of("a", prompt, 5)))
    *early, last = await _all(engine.submit(request_of("b", prompt, 5)))
    assert all(c.timing is None for c in early)
    timing = last.timing
    assert timing is not None
    assert (timing.num_prompt_tokens, timing.num_cached_tokens, timing.num_output_tokens) == (19, 16, 5)
    assert timing.queue_s is not None
    assert timing.prefill_s is not None
    assert timing.ttft_s is not None
    assert timing.tpot_s is not None
    assert timing.ttft_s == pytest.approx(timing.queue_s + timing.prefill_s)
    assert 0 < timing.tpot_s <= timing.max_itl_s
    assert timing.ttft_s + 4 * timing.tpot_s <= timing.total_s < time.monotonic() - before
    load = engine.load()
    assert load.tokens_generated_total == 10
    assert load.prompt_tokens_total == load.prefix_query_tokens_total == 38
    assert load.prefix_hit_tokens_total == 16
    assert load.num_requests_total == 2


async def test_scopes_do_not_share(make_engine: Make, request_of: Request) -> None:
    engine = make_engine()
    prompt = tuple(range(1, 20))
    cached = []
    for number, scope in enumerate(["one", "two", "one"]):
        chunks = await _all(engine.submit(request_of(str(number), prompt, 2, scope=scope)))
        assert chunks[-1].timing is not None
        cached.append(chunks[-1].timing.num_cached_tokens)
    assert cached == [0, 0, 16]


async def test_whole_characters_are_streamed(
    make_engine: Make, request_of: Request, tokenizer: Tokenizer
) -> None:
    engine = make_engine()
    text = "你好🙂 ok"
    Script(engine, {"a": tokenizer.encode_text(text)})
    chunks = await _all(engine.submit(request_of("a", (1,), len(text.encode()))))
    assert _text(chunks) == text
    assert [c.text for c in chunks[:3]] == ["", "", "你"]
    assert not any("\ufffd" in c.text for c in chunks)


async def test_stop_strings_span_tokens_and_never_show(
    make_engine: Make, request_of: Request, tokenizer: Tokenizer
) -> None:
    engine = make_engine()
    Script(engine, {i: tokenizer.encode_text("a##b### tail") for i in "ab"})
    chunks = await _all(engine.submit(request_of("a", (1,), 12, stop=("###",))))
    assert [c.text for c in chunks] == ["a", "", "", "##b", "", "", ""]
    assert chunks[-1].finish_reason is FinishReason.STOP
    chunks = await _all(engine.submit(request_of("b", (1,), 3, stop=("###",))))
    assert (_text(chunks), chunks[-1].finish_reason) == ("a##", FinishReason.LENGTH)


async def test_end_of_sequence_and_stop_ids_are_no_text(
    make_engine: Make, request_of: Request, tokenizer: Tokenizer
) -> None:
    engine = make_engine(eos=frozenset({256}))
    x = tokenizer.encode_text("x")[0]
    Script(engine, {"a": [x, 256], "b": [x, x, x], "c": [x, 256, x]})
    chunks = await _all(engine.submit(request_of("a", (1,))))
    assert (_text(chunks), chunks[-1].finish_reason, _ids(chunks)) == ("x", FinishReason.STOP, [x, 256])
    chunks = await _all(engine.submit(request_of("b", (1,), stop_token_ids=(x,))))
    assert (_text(chunks), chunks[-1].finish_reason) == ("", FinishReason.STOP)
    chunks = await _all(engine.submit(request_of("c", (1,), 3, ignore_eos=True)))
    assert (_text(chunks), chunks[-1].finish_reason) == ("xx", FinishReason.LENGTH)


async def test_logprobs_come_with_each_token(make_engine: Make, request_of: Request) -> None:
    engine = make_engine()
    chunks = await _all(engine.submit(request_of("a", (1, 2), 3, logprobs=2)))
    for chunk in chunks:
        assert chunk.logprobs is not None
        assert len(chunk.logprobs) == len(chunk.token_ids) == 1
        position = chunk.logprobs[0]
        assert position.chosen == position.top[0]
        assert position.top[0].logprob >= position.top[1].logprob


async def test_a_cancelled_request_ends_and_its_kv_returns(make_engine: Make, request_of: Request) -> None:
    engine = make_engine(max_num_seqs=2)
    Script(engine, {str(i): [65] * 200 for i in range(4)}).delay = 0.01  # none ends by itself meanwhile
    streams = [engine.submit(request_of(str(i), (1, 2, 3), 200)) for i in range(4)]
    assert (await anext(streams[0])).finish_reason is None
    for i in range(4):
        engine.cancel(str(i))
        engine.cancel(str(i))
    engine.cancel("unknown")
    for stream in streams:
        chunks = await _all(stream)
        assert chunks[-1].finish_reason is FinishReason.CANCELLED
        assert chunks[-1].timing is not None
    await _idle(engine)


async def test_an_abandoned_stream_is_cancelled(make_engine: Make, request_of: Request) -> None:
    engine = make_engine()
    Script(engine, {i: [65] * 240 for i in "ab"}).delay = 0.01
    stream = engine.submit(request_of("a", (1, 2, 3), 240))
    await anext(stream)
    del stream
    closed = engine.submit(request_of("b", (1, 2, 3), 240))
    await closed.aclose()
    gc.collect()
    await _idle(engine)
    assert engine.load().tokens_generated_total < 200


async def test_an_id_may_be_used_again_and_a_late_cancel_does_not_reach_its_successor(
    make_engine: Make, request_of: Request
) -> None:
    engine = make_engine()
    for _ in range(20):
        await _all(engine.submit(request_of("same", (1, 2), 2)))
        engine.cancel("same")
        chunks = await _all(engine.submit(request_of("same", (1, 2), 2)))
        assert chunks[-1].finish_reason is FinishReason.LENGTH
    first = engine.submit(request_of("same", (1, 2), 100))
    with pytest.raises(InvalidRequest, match="in use"):
        engine.submit(request_of("same", (1, 2), 2))
    await first.aclose()


async def test_a_deadline_ends_a_running_request(make_engine: Make, request_of: Request) -> None:
    engine = make_engine()
    Script(engine, {"a": [65] * 300}).delay = 0.01
    stream = engine.submit(request_of("a", (1,), 200, deadline=time.monotonic() + 1.0))
    chunks = await _all(stream)
    assert chunks[-1].finish_reason is FinishReason.DEADLINE
    assert 1 < len(chunks) < 150


@pytest.mark.parametrize(
    ("prompt", "options", "param"),
    [
        ((), {}, "prompt"),
        ((1, 300), {}, "prompt"),
        ((-1,), {}, "prompt"),
        ((1,), {"max_tokens": 0}, "max_tokens"),
        ((1,), {"temperature": -0.1}, "temperature"),
        ((1,), {"temperature": float("nan")}, "temperature"),
        ((1,), {"top_p": 0.0}, "top_p"),
        ((1,), {"top_p": 1.1}, "top_p"),
        ((1,), {"top_k": -1}, "top_k"),
        ((1,), {"min_p": 2.0}, "min_p"),
        ((1,), {"presence_penalty": 3.0}, "presence_penalty"),
        ((1,), {"frequency_penalty": float("nan")}, "frequency_penalty"),
        ((1,), {"logprobs": 21}, "logprobs"),
        ((1,), {"stop": ("",)}, "stop"),
        ((1,), {"stop": ("a",) * 17}, "stop"),
        ((1,), {"logit_bias": {300: 1.0}}, "logit_bias"),
        ((1,), {"logit_bias": {1: float("inf")}}, "logit_bias"),
    ],
)
async def test_what_can_not_run_is_refused_before_it_is_queued(
    prompt: tuple[int, ...], options: dict[str, Any], param: str, make_engine: Make, request_of: Request
) -> None:
    engine = make_engine()
    with pytest.raises(InvalidRequest) as caught:
        engine.submit(request_of("a", prompt, options.pop("max_tokens", 4), **options))
    assert caught.value.param == param
    assert engine.load().num_requests_total == 0


async def test_too_long_a_request_is_refused_with_the_right_counts(
    make_engine: Make, request_of: Request
) -> None:
    engine = make_engine(max_model_len=32)
    with pytest.raises(RequestTooLong) as caught:
        engine.submit(request_of("a", (1,) * 30, 3))
    error = caught.value
    assert (error.num_prompt_tokens, error.max_tokens, error.max_model_len) == (30, 3, 32)
    assert "33 tokens" in str(error)
    chunks = await _all(engine.submit(request_of("a", (1,) * 30, 2)))
    assert chunks[-1].finish_reason is FinishReason.LENGTH


async def test_a_small_kv_cache_limits_a_request_and_says_so(make_engine: Make, request_of: Request) -> None:
    engine = make_engine(num_kv_blocks=4)
    assert engine.max_model_len == 16
    with pytest.raises(RequestTooLong):
        engine.submit(request_of("a", (1,) * 10, 7))
    streams = [engine.submit(request_of(str(i), (1, i), 10)) for i in range(6)]
    for chunks in await asyncio.gather(*(_all(s) for s in streams)):
        assert chunks[-1].finish_reason is FinishReason.LENGTH


async def test_a_full_queue_refuses(make_engine: Make, request_of: Request) -> None:
    engine = make_engine(max_num_seqs=2, max_queue=1)
    script = Script(engine, {i: [65] * 50 for i in "012x"})
    script.delay = 0.1
    streams = [engine.submit(request_of(str(i), (1,), 50)) for i in range(3)]
    with pytest.raises(QueueFull):
        engine.submit(request_of("x", (1,), 50))
    ages = engine.running_ages()
    assert [a.request_id for a in ages] == ["0", "1", "2"]
    script.delay = 0.0
    for chunks in await asyncio.gather(*(_all(s) for s in streams)):
        assert chunks[-1].finish_reason is FinishReason.LENGTH
    await _all(engine.submit(request_of("x", (1,), 2)))


class Gate:
    """Holds an engine's forward until it is opened."""

    def __init__(self, engine: Engine) -> None:
        self.execute, self.opened = engine._runner.execute, threading.Event()
        engine._runner.execute = self._execute  # type: ignore[method-assign]

    def _execute(self, chunks: Sequence[ScheduledChunk]) -> tuple[torch.Tensor, list[str]]:
        assert self.opened.wait(60)
        return self.execute(chunks)


async def test_a_full_queue_has_room_for_another_tenant(make_engine: Make, request_of: Request) -> None:
    engine = make_engine(max_num_seqs=1, max_queue=2)
    gate = Gate(engine)
    streams = {"a0": engine.submit(request_of("a0", (1,), tenant="a"))}
    await _until(lambda: engine.load().num_running == 1)
    for i in ("a1", "a2"):
        streams[i] = engine.submit(request_of(i, (1,), tenant="a"))
    streams["b0"] = engine.submit(request_of("b0", (1,), tenant="b"))
    for tenant in ("a", "b"):
        with pytest.raises(QueueFull, match="2 requests waiting"):
            engine.submit(request_of("x", (1,), tenant=tenant))
    with pytest.raises(InvalidRequest, match="in use"):
        engine.submit(request_of("a2", (1,), tenant="c"))
    load = engine.load()
    assert (load.num_running, load.num_waiting, load.num_displaced_total) == (1, 2, 1)
    gate.opened.set()
    chunks = dict(zip(streams, await asyncio.gather(*map(_all, streams.values())), strict=True))
    assert {i: c[-1].finish_reason for i, c in chunks.items()} == {
        "a0": FinishReason.LENGTH,
        "a1": FinishReason.LENGTH,
        "a2": FinishReason.REFUSED,
        "b0": FinishReason.LENGTH,
    }
    [refused] = chunks["a2"]
    assert (refused.text, refused.token_ids, refused.error) == ("", (), None)
    assert refused.timing is not None
    assert refused.timing.queue_s is None
    await _all(engine.submit(request_of("a2", (1,), tenant="a")))


async def test_a_place_that_is_lost_meanwhile_is_not_lost_twice(
    make_engine: Make, request_of: Request
) -> None:
    engine = make_engine(max_num_seqs=1, max_queue=2)
    gate = Gate(engine)
    running = engine.submit(request_of("a0", (1,), tenant="a"))
    await _until(lambda: engine.load().num_running == 1)
    waiting = [engine.submit(request_of(i, (1,), tenant="a")) for i in ("a1", "a2")]
    heavy = engine.submit(request_of("b0", (1,), tenant="b"))
    engine.cancel("a2")  # its client leaves before it is told
    gate.opened.set()
    ended = [(await _all(s))[-1].finish_reason for s in (running, *waiting, heavy)]
    assert ended == [FinishReason.LENGTH, FinishReason.LENGTH, FinishReason.CANCELLED, FinishReason.LENGTH]
    streams = [engine.submit(request_of(i, (1,), tenant="a")) for i in ("a0", "a1", "a2")]
    assert [(await _all(s))[-1].finish_reason for s in streams] == [FinishReason.LENGTH] * 3


async def test_nobody_who_starts_loses_a_place(
    make_engine: Make, request_of: Request, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine(max_num_seqs=1, max_queue=0)
    schedule, loop = engine._scheduler.schedule, asyncio.get_running_loop()
    asked = threading.Event()
    told: asyncio.Future[str] = loop.create_future()

    def submit() -> None:
        try:
            engine.submit(request_of("heavy", (1,), tenant="b", weight=9.0))
            told.set_result("taken")
        except QueueFull:
            told.set_result("full")
        asked.set()

    def scheduled(*args: Any) -> Any:
        plan = schedule(*args)
        if plan.admitted:
            loop.call_soon_threadsafe(submit)
            asked.wait(0.1)  # where it could come between, it does
        return plan

    monkeypatch.setattr(engine._scheduler, "schedule", scheduled)
    chunks = await _all(engine.submit(request_of("a", (1,), tenant="a")))
    assert chunks[-1].finish_reason is FinishReason.LENGTH
    assert await told == "full"


async def test_a_request_that_breaks_the_forward_fails_alone(
    make_engine: Make, request_of: Request, tokenizer: Tokenizer
) -> None:
    engine = make_engine()
    script = Script(engine, {i: tokenizer.encode_text("hello") for i in ("good", "bad", "nan")})
    script.poisoned, script.nan = {"bad"}, {"nan"}
    streams = [engine.submit(request_of(i, (1, 2), 5)) for i in ("good", "bad", "nan")]
    good, bad, nan = await asyncio.gather(*(_all(s) for s in streams))
    assert (_text(good), good[-1].finish_reason) == ("hello", FinishReason.LENGTH)
    assert bad[-1].finish_reason is nan[-1].finish_reason is FinishReason.ERROR
    assert bad[-1].error == "internal error (RuntimeError)"
    assert nan[-1].error == "the model produced no finite logits"


async def test_a_fault_of_the_engine_itself_ends_requests_but_not_the_loop(
    make_engine: Make, request_of: Request, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine()
    monkeypatch.setattr(engine._scheduler, "schedule", lambda *_: 1 / 0)
    chunks = await _all(engine.submit(request_of("a", (1, 2), 5)))
    assert (chunks[-1].finish_reason, chunks[-1].error) == (FinishReason.ERROR, "internal error")
    chunks = await _all(engine.submit(request_of("b", (1, 2), 5)))
    assert chunks[-1].finish_reason is FinishReason.LENGTH


async def test_health_asks_the_loop(
    make_engine: Make, request_of: Request, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = make_engine()
    async with asyncio.timeout(60):
        last = 0.0
        while last <= (age := engine.last_step_age()):
            last = age
            await asyncio.sleep(0.005)
    assert engine.healthy()
    monkeypatch.setattr("sluice_runtime.engine.engine._HEALTHY_AGE_S", 0.05)
    script = Script(engine, {"a": [65] * 9})
    script.delay = 0.3
    stream = engine.submit(request_of("a", (1,), 9))
    async with asyncio.timeout(60):
        while engine.healthy():  # noqa: ASYNC110 (a step that hangs is not healthy)
            await asyncio.sleep(0.005)
    script.delay = 0.0
    await _all(stream)
    monkeypatch.setattr("sluice_runtime.engine.engine._HEALTHY_AGE_S", 30.0)


async def test_stopping_ends_streams_and_refuses_more(
    make_engine: Make, request_of: Request, llama: Any, tokenizer: Tokenizer
) -> None:
    from sluice_runtime.engine.types import EngineConfig
    from sluice_runtime.models import LoadedModel, ModelSource

    model = LoadedModel(llama.model, tokenizer, "sha256:x", 0, 256, frozenset(), ModelSource())
    engine = Engine(model, EngineConfig(num_kv_blocks=64, block_size=4, num_threads=1))
    with pytest.raises(EngineStopped):
        engine.submit(request_of("early", (1,), 2))
    engine.start()
    Script(engine, {"a": [65] * 200}).delay = 0.01
    stream = engine.submit(request_of("a", (1, 2), 200))
    await anext(stream)
    await asyncio.to_thread(engine.stop)
    chunks = await _all(stream)
    assert chunks[-1].finish_reason is FinishReason.ERROR
    assert not engine.healthy()
    with pytest.raises(EngineStopped):
        engine.submit(request_of("late", (1,), 2))


async def test_hundreds_of_requests_come_and_go(make_engine: Make, request_of: Request) -> None:
    engine = make_engine(max_num_seqs=16, max_queue=2000, max_batch_tokens=64, num_kv_blocks=128)
    streams = [engine.submit(request_of(str(i), (i % 7, i % 3, 1, 2, 3), 1 + i % 3)) for i in range(300)]
    for i in range(0, 300, 3):
        engine.cancel(str(i))
    results = await asyncio.gather(*(_all(s) for s in streams))
    assert all(c[-1].finish_reason in (FinishReason.LENGTH, FinishReason.CANCELLED) for c in results)
    await _idle(engine)
