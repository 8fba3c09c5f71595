"""Scheduler and runner against plain `generate`, token for token, whatever is in the batch."""

from __future__ import annotations

import copy
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from sluice_runtime.engine import attention
from sluice_runtime.engine.attention import UnsupportedAttention
from sluice_runtime.engine.blocks import BlockManager
from sluice_runtime.engine.runner import ModelRunner
from sluice_runtime.engine.scheduler import Scheduler
from sluice_runtime.engine.types import EngineRequest, SamplingParams

NUM_BLOCKS = 64
ARCHITECTURES = ["llama", "qwen2", "qwen3", "mistral-window", "gemma2-softcap"]
Get = Callable[[str], Any]


def _serve(
    model: Any,
    prompts: dict[str, tuple[int, ...]],
    arrivals: dict[str, int],
    cancels: dict[str, int],
    *,
    max_tokens: int = 10,
    block_size: int = 4,
    max_batch_tokens: int = 16,
    max_num_seqs: int = 4,
) -> dict[str, list[int]]:
    """Greedy output of each request; `arrivals` and `cancels` are step numbers."""
    runner = ModelRunner(model, block_size)
    runner.allocate_kv(NUM_BLOCKS)
    scheduler = Scheduler(
        BlockManager(NUM_BLOCKS, block_size),
        max_num_seqs=max_num_seqs,
        max_batch_tokens=max_batch_tokens,
        max_model_len=256,
    )
    output: dict[str, list[int]] = {i: [] for i in prompts}
    left = dict(arrivals)
    for step in range(10_000):
        for request_id in [i for i, at in left.items() if at <= step]:
            del left[request_id]
            sampling = SamplingParams(max_tokens=max_tokens, temperature=0.0)
            scheduler.add(EngineRequest(request_id, prompts[request_id], sampling, "s"))
        for request_id in [i for i, at in cancels.items() if at == step]:
            scheduler.finish(request_id)
        plan = scheduler.schedule(0.0)
        if plan.chunks:
            logits, ids = runner.execute(plan.chunks)
            tokens = dict(zip(ids, ([i] for i in logits.argmax(-1).tolist()), strict=True))
            for event in scheduler.update_from_output(plan, tokens):
                output[event.request_id] += event.token_ids
        scheduler.check_integrity()
        if not left and not scheduler.num_running and not scheduler.num_waiting:
            break
    assert scheduler.blocks.num_used == 0
    return output


def _prompts(seed: int, num: int) -> dict[str, tuple[int, ...]]:
    rng = random.Random(seed)
    prompts: list[tuple[int, ...]] = []
    for _ in range(num):
        head = rng.choice(prompts)[: rng.randrange(1, 30)] if prompts and rng.random() < 0.5 else ()
        prompts.append(head + tuple(rng.randrange(300) for _ in range(rng.choice([1, 2, 7, 23]))))
    return {str(i): p for i, p in enumerate(prompts)}


@pytest.mark.parametrize("architecture", ARCHITECTURES)
@pytest.mark.parametrize("max_batch_tokens", [5, 64])
def test_batched_staggered_and_chunked_output_is_that_of_generate(
    architecture: str, max_batch_tokens: int, oracles: Get
) -> None:
    oracle = oracles(architecture)
    prompts = _prompts(1, 8)
    arrivals = {i: int(i) * 2 for i in prompts}
    output = _serve(oracle.model, prompts, arrivals, {"3": 9}, max_batch_tokens=max_batch_tokens)
    for request_id, tokens in output.items():
        assert len(tokens) == 10 or request_id == "3"
        oracle.assert_same(prompts[request_id], tokens)


@given(
    seed=st.integers(0, 5),
    num=st.integers(1, 7),
    block_size=st.sampled_from([1, 3, 8]),
    max_num_seqs=st.integers(1, 5),
    extra_budget=st.sampled_from([0, 1, 9, 60]),
    data=st.data(),
)
@settings(max_examples=25)
def test_any_mix_of_arrivals_chunks_prefixes_and_cancellations(
    llama: Any,
    seed: int,
    num: int,
    block_size: int,
    max_num_seqs: int,
    extra_budget: int,
    data: st.DataObject,
) -> None:
    prompts = {i: p[: NUM_BLOCKS * block_size - 10] for i, p in _prompts(seed, num).items()}
    arrivals = {i: data.draw(st.integers(0, 12)) for i in prompts}
    cancels = {i: data.draw(st.integers(0, 25)) for i in prompts if data.draw(st.booleans())}
    output = _serve(
        llama.model,
        prompts,
        arrivals,
        cancels,
        block_size=block_size,
        max_num_seqs=max_num_seqs,
        max_batch_tokens=max_num_seqs + extra_budget,
    )
    for request_id, tokens in output.items():
        assert len(tokens) == 10 or request_id in cancels
        llama.assert_same(prompts[request_id], tokens)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_the_matmul_kernel_agrees_with_the_oracle_kernel(
    dtype: torch.dtype, oracles: Get, monkeypatch: pytest.MonkeyPatch
) -> None:
    seen: list[float] = []
    tolerance = 1e-5 if dtype == torch.float32 else 1e-1

    def both(query: Any, key: Any, value: Any, cache: Any, layer: int, options: Any) -> torch.Tensor:
        a = attention.KERNELS["matmul"](query, key, value, cache, layer, options)
        b = attention.KERNELS["oracle"](query, key, value, cache, layer, options)
        seen.append(float((a.float() - b.float()).abs().max()))
        return a

    monkeypatch.setattr(attention, "select_kernel", lambda *_: both)
    model = copy.deepcopy(oracles("llama").model).to(dtype)
    _serve(model, _prompts(2, 6), {str(i): i for i in range(6)}, {}, max_batch_tokens=9)
    assert len(seen) > 20
    assert max(seen) < tolerance


def test_a_bucket_of_very_different_lengths_is_cut_and_still_right(llama: Any) -> None:
    prompts = {"short": (5, 6), "long": tuple(i % 290 for i in range(240)), "middle": tuple(range(40))}
    output = _serve(llama.model, prompts, dict.fromkeys(prompts, 0), {}, max_batch_tokens=300)
    for request_id, tokens in output.items():
        llama.assert_same(prompts[request_id], tokens)


def test_models_with_other_state_than_kv_are_refused() -> None:
    import transformers

    config = transformers.MambaConfig(vocab_size=50, hidden_size=16, num_hidden_layers=1, state_size=4)
    with pytest.raises(UnsupportedAttention):
        ModelRunner(transformers.MambaForCausalLM(config).eval(), 4)


def test_kv_is_allocated_once(llama: Any) -> None:
    runner = ModelRunner(llama.model, 4)
    assert runner.bytes_per_block() == 2 * 2 * 8 * 2 * 4 * 4  # layers, kv heads, dim, k and v, tokens, bytes
    runner.allocate_kv(8)
    cache = runner._cache
    assert cache is not None
    pointers = [t.data_ptr() for t in (*cache.keys, *cache.values)]
    scheduler = Scheduler(BlockManager(8, 4), max_num_seqs=2, max_batch_tokens=8, max_model_len=32)
    scheduler.add(EngineRequest("a", (1, 2, 3), SamplingParams(max_tokens=4), "s"))
    while scheduler.num_waiting or scheduler.num_running:
        plan = scheduler.schedule(0.0)
        runner.execute(plan.chunks)
        scheduler.update_from_output(plan, {"a": [1]})
    assert pointers == [t.data_ptr() for t in (*cache.keys, *cache.values)]
