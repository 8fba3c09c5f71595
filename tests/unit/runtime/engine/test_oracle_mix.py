"""Every architecture against plain `generate`, with too little KV, so that requests are preempted too."""

from __future__ import annotations

import asyncio
import copy
import random
from collections import Counter
from collections.abc import AsyncIterator, Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from sluice_runtime.engine.blocks import BlockManager
from sluice_runtime.engine.engine import Engine
from sluice_runtime.engine.runner import ModelRunner
from sluice_runtime.engine.sampler import SamplerState
from sluice_runtime.engine.scheduler import Scheduler
from sluice_runtime.engine.speculation.draft import Draft
from sluice_runtime.engine.speculation.proposer import Proposer, Wanted
from sluice_runtime.engine.speculation.suffix import Suffix
from sluice_runtime.engine.speculation.verification import Guessed, verify
from sluice_runtime.engine.types import EngineRequest, FinishReason, OutputChunk, SamplingParams
from unit.runtime.engine.conftest import ARCHITECTURES, Oracle

NUM_OUTPUT = 9
GUESSES = ("none", "suffix", "random", "stranger", "same")
Get = Callable[[str], Oracle]
Request = Callable[..., EngineRequest]


def _prompts(rng: random.Random, num: int) -> list[tuple[int, ...]]:
    """Of different lengths; half of them begin like another."""
    prompts: list[tuple[int, ...]] = []
    for _ in range(num):
        head = rng.choice(prompts)[: rng.randrange(1, 24)] if prompts and rng.random() < 0.5 else ()
        prompts.append(head + tuple(rng.randrange(300) for _ in range(rng.choice([1, 2, 7, 19]))))
    return prompts


class RandomGuesses:
    """A proposer that is mostly wrong, and sometimes right by chance: of few tokens, any length."""

    def __init__(self, rng: random.Random) -> None:
        self._rng = rng

    def propose(self, wanted: Sequence[Wanted]) -> dict[str, list[int]]:
        return {w.request_id: [self._guess(w) for _ in range(self._rng.randrange(5))] for w in wanted}

    def _guess(self, wanted: Wanted) -> int:
        return self._rng.choice([*wanted.token_ids[-3:], self._rng.randrange(300)])

    def forget(self, request_id: str) -> None: ...

    num_held = 0

    def check_integrity(self) -> None: ...


def _proposer(kind: str, oracle: Oracle, rng: random.Random, num_blocks: int, size: int) -> Proposer | None:
    if kind == "none":
        return None
    if kind == "suffix":
        return Suffix()
    if kind == "random":
        return RandomGuesses(rng)
    model = copy.deepcopy(oracle.reference)
    if kind == "stranger":  # half right: the same model with noise in its head
        with torch.no_grad():
            head = model.get_output_embeddings().weight
            head += 0.1 * torch.randn(head.shape, generator=torch.Generator().manual_seed(1))
    runner = ModelRunner(model, size)
    runner.allocate_kv(num_blocks)
    blocks = BlockManager(num_blocks, size)
    return Draft(runner, blocks, vocab_size=300, max_batch_tokens=rng.choice([8, 100]))


def _serve(
    oracle: Oracle,
    requests: list[EngineRequest],
    rng: random.Random,
    cancelled: set[str],
    guesses: str = "none",
    **limits: int,
) -> tuple[dict[str, list[int]], Counter[str]]:
    """Greedy output of each request; arrivals, cancels and the prompt budget of each step are drawn."""
    model = oracle.model
    proposer = _proposer(guesses, oracle, rng, limits["num_blocks"], limits["block_size"])
    seen = Counter[str]()
    runner = ModelRunner(model, limits["block_size"])
    runner.allocate_kv(limits["num_blocks"])
    scheduler = Scheduler(
        BlockManager(limits["num_blocks"], limits["block_size"]),
        max_num_seqs=limits["max_num_seqs"],
        max_batch_tokens=limits["max_batch_tokens"],
        max_model_len=256,
        burst_tokens=8,
    )
    output: dict[str, list[int]] = {r.request_id: [] for r in requests}
    params_of = {r.request_id: r.sampling for r in requests}
    arrivals = {r.request_id: rng.randrange(14) for r in requests}
    cancels = {i: arrivals[i] + rng.randrange(1, 20) for i in sorted(cancelled)}
    for step in range(5000):
        for request in requests:
            if arrivals[request.request_id] == step:
                scheduler.add(request)
        for request_id, at in cancels.items():
            if at == step:
                scheduler.finish(request_id)
        drafts: dict[str, list[int]] = {}
        if proposer is not None:
            streams = [s for s in scheduler.running() if s.num_lacking == 1]
            params = SamplingParams(max_tokens=NUM_OUTPUT, temperature=0.0)
            drafts = proposer.propose(
                [Wanted(s.request_id, s.token_ids, 3, params, lambda _: 0.0) for s in streams]
            )
            proposer.check_integrity()
        plan = scheduler.schedule(float(step), rng.choice([None, 1, 5]), drafts)
        if plan.chunks:
            logits, rows = runner.execute(plan.chunks)
            chunk_of = {c.request_id: c for c in plan.chunks}
            ids = list(dict.fromkeys(rows))
            guessed = [Guessed(SamplerState(params_of[i]), chunk_of[i].drafted) for i in ids]
            tokens = {
                i: [each.token_id for each in own]
                for i, own in zip(ids, verify(logits, guessed), strict=True)
                if isinstance(own, list)
            }
            for event in scheduler.update_from_output(plan, tokens):
                output[event.request_id] += event.token_ids
                seen["drafted"] += chunk_of[event.request_id].num_drafted
                seen["right"] += len(event.token_ids) - 1
        scheduler.check_integrity()
        if proposer is not None:
            for request_id in output.keys() - {s.request_id for s in scheduler.running()}:
                if scheduler.get(request_id) is None:
                    proposer.forget(request_id)
            proposer.check_integrity()
        if step > 13 and not scheduler.num_running and not scheduler.num_waiting:
            break
    assert scheduler.blocks.num_used == 0
    if isinstance(proposer, Draft):
        assert proposer.blocks.num_used == 0
    seen += Counter(
        preempted=scheduler.num_preemptions_total,
        recomputed=scheduler.num_recomputed_tokens_total,
        hits=scheduler.prefix_hit_tokens_total,
    )
    return output, seen


@given(seed=st.integers(0, 10_000), num=st.integers(1, 7), data=st.data())
@settings(
    max_examples=4,
    suppress_health_check=[*settings.default.suppress_health_check, HealthCheck.function_scoped_fixture],
)
@pytest.mark.parametrize("architecture", sorted(ARCHITECTURES))
def test_any_mix_gives_what_generate_gives_each_request_alone(
    architecture: str, oracles: Get, seed: int, num: int, data: st.DataObject
) -> None:
    oracle, rng = oracles(architecture), random.Random(seed)
    prompts = _prompts(rng, num)
    requests = [
        EngineRequest(
            str(i),
            prompt,
            SamplingParams(max_tokens=NUM_OUTPUT, temperature=0.0),
            data.draw(st.sampled_from("st")),
            data.draw(st.booleans()),
            tenant=data.draw(st.sampled_from("ab")),
            weight=data.draw(st.sampled_from([0.5, 1.0])),
            priority=data.draw(st.sampled_from([-1, 0])),
        )
        for i, prompt in enumerate(prompts)
    ]
    cancelled = {r.request_id for r in requests if data.draw(st.integers(0, 4)) == 0}
    block_size, max_num_seqs = data.draw(st.sampled_from([1, 3, 8])), data.draw(st.integers(1, 5))
    longest = max(map(len, prompts)) + NUM_OUTPUT
    output, _ = _serve(
        oracle,
        requests,
        rng,
        cancelled,
        data.draw(st.sampled_from(GUESSES)),
        block_size=block_size,
        max_num_seqs=max_num_seqs,
        max_batch_tokens=max_num_seqs + data.draw(st.sampled_from([0, 1, 9, 60])),
        num_blocks=-(-longest // block_size) + data.draw(st.sampled_from([0, 1, 6, 60])),
    )
    for request in requests:
        tokens = output[request.request_id]
        assert len(tokens) == NUM_OUTPUT or request.request_id in cancelled
        oracle.assert_same(request.prompt_ids, tokens)


@pytest.mark.parametrize("architecture", sorted(ARCHITECTURES))
def test_near_ties_are_rare_and_preemptions_and_hits_are_met(architecture: str, oracles: Get) -> None:
    oracle, total, before = oracles(architecture), Counter[str](), oracles(architecture).num_near_ties
    num_answers = 0
    for seed in range(2):
        rng = random.Random(seed)
        requests = [
            EngineRequest(str(i), p, SamplingParams(max_tokens=NUM_OUTPUT, temperature=0.0), "s", tenant=t)
            for i, (p, t) in enumerate(zip(_prompts(rng, 8), "abababab", strict=True))
        ]
        output, seen = _serve(
            oracle,
            requests,
            rng,
            set(),
            "stranger" if seed else "none",
            block_size=4,
            max_num_seqs=5,
            max_batch_tokens=20,
            num_blocks=22,
        )
        total += seen
        num_answers += len(requests)
        for request in requests:
            oracle.assert_same(request.prompt_ids, output[request.request_id])
    assert total["preempted"] > 0
    assert total["recomputed"] > 0
    assert total["hits"] > 0
    assert 0 < total["right"] < total["drafted"]
    assert oracle.num_near_ties - before <= num_answers // 16


# -- through the engine --------------------------------------------------------------------------------------


async def _until(reached: Callable[[], bool]) -> None:
    for _ in range(10_000):
        if reached():
            return
        await asyncio.sleep(0.001)
    pytest.fail("it never came to that")


async def _all(stream: AsyncIterator[OutputChunk]) -> list[OutputChunk]:
    return [chunk async for chunk in stream]


async def test_a_client_does_not_notice_a_preemption(
    make_engine: Callable[..., Engine], request_of: Request, llama: Oracle
) -> None:
    engine = make_engine(num_kv_blocks=14, block_size=4, max_num_seqs=6, max_batch_tokens=32)
    prompts = {str(i): tuple(range(i, i + 5)) for i in range(6)}
    streams = {i: engine.submit(request_of(i, p, 30, prefix_cache=False)) for i, p in prompts.items()}
    answers = await asyncio.gather(*(_all(s) for s in streams.values()))
    assert engine.load().num_preemptions_total > 0
    assert engine.load().num_recomputed_tokens_total > 0
    for prompt, chunks in zip(prompts.values(), answers, strict=True):
        llama.assert_same(prompt, [i for c in chunks for i in c.token_ids])
        assert [c.finish_reason for c in chunks] == [None] * 29 + [FinishReason.LENGTH]
        timing = chunks[-1].timing
        assert timing is not None
        assert (timing.num_prompt_tokens, timing.num_output_tokens, timing.num_cached_tokens) == (5, 30, 0)
    assert engine.load().prompt_tokens_total == 30, "counted once"
    assert engine.load().tokens_generated_total == 180


async def test_a_seed_keeps_its_stream_through_preemptions(
    make_engine: Callable[..., Engine], request_of: Request
) -> None:
    options: dict[str, Any] = {"temperature": 1.0, "top_p": 0.95, "frequency_penalty": 0.5}
    roomy, tight = make_engine(), make_engine(num_kv_blocks=14, block_size=4)
    texts = []
    for engine in (roomy, tight):
        requests = [request_of(str(i), (i, 2, 3), 30, seed=i, **options) for i in range(6)]
        streams = [engine.submit(r) for r in requests]
        answers = await asyncio.gather(*(_all(s) for s in streams))
        texts.append([[i for c in chunks for i in c.token_ids] for chunks in answers])
    assert texts[0] == texts[1]
    assert roomy.load().num_preemptions_total == 0 < tight.load().num_preemptions_total


async def test_a_preempted_request_can_be_cancelled(
    make_engine: Callable[..., Engine], request_of: Request
) -> None:
    engine = make_engine(num_kv_blocks=14, block_size=4, max_num_seqs=6)
    streams = [engine.submit(request_of(str(i), tuple(range(5)), 40)) for i in range(6)]
    await anext(streams[5])
    await _until(lambda: engine.load().num_preemptions_total > 0)
    for i in range(6):
        engine.cancel(str(i))
    for stream in streams:
        assert (await _all(stream))[-1].finish_reason in (FinishReason.CANCELLED, FinishReason.LENGTH)
    await _until(lambda: engine.load().kv_blocks_used == 0)
