"""What only a GPU can tell; `make gpu-check` runs it on a CUDA device, in under ten minutes. Nothing here has
been run yet: docs/engine-parallel.md says so, row by row.

Models are tiny and random, in half precision: what is compared with another path of this engine may differ by
rounding, and is bounded as such.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch
import transformers

from sluice_runtime.engine import support, varlen
from sluice_runtime.engine.host_tier import KvMoves
from sluice_runtime.engine.plan import ScheduledChunk
from sluice_runtime.engine.sampler import Sampled, SamplerState, sample
from sluice_runtime.engine.types import EngineRequest, KvCacheDtype, SamplingParams
from sluice_runtime.engine.varlen import PAGE_TOKENS, VarlenRunner

pytestmark = pytest.mark.cuda

SIZES: dict[str, Any] = {
    "vocab_size": 1024,
    "hidden_size": 512,
    "intermediate_size": 1024,
    "num_hidden_layers": 4,
    "num_attention_heads": 8,
    "num_key_value_heads": 2,
    "head_dim": 64,
    "max_position_embeddings": 4096,
    "eos_token_id": None,
    "pad_token_id": None,
}
KINDS: dict[str, dict[str, Any]] = {
    "Llama": {},
    "Qwen3": {},
    "Mistral": {"sliding_window": 300},
    "Gemma2": {"query_pre_attn_scalar": 64},  # a soft cap: the way of the plain runner
}


def _model(kind: str, dtype: torch.dtype) -> Any:
    torch.manual_seed(7)
    config = getattr(transformers, f"{kind}Config")(**SIZES, **KINDS[kind])
    return getattr(transformers, f"{kind}ForCausalLM")(config).to("cuda", dtype).eval()


def _steps(num_seqs: int, lengths: range) -> list[list[ScheduledChunk]]:
    """Prompts in two chunks each, then single tokens of all of them together."""
    tables = [[i * 16 + j for j in range(16)] for i in range(num_seqs)]
    long = [lengths.start + i * lengths.step for i in range(num_seqs)]
    steps = []
    for i, (table, length) in enumerate(zip(tables, long, strict=True)):
        ids = [(i * 31 + j * 7) % 1000 for j in range(length)]
        cut = length // 3 + 1
        steps.append([ScheduledChunk(str(i), ids[:cut], 0, table, False)])
        steps.append([ScheduledChunk(str(i), ids[cut:], cut, table, True)])
    for step in range(6):
        steps.append(
            [
                ScheduledChunk(str(i), [(i + step) % 1000], length + step, table, True)
                for i, (table, length) in enumerate(zip(tables, long, strict=True))
                if (i + step) % 3  # each step another size, so stale rows would show
            ]
        )
    return steps


def _run(runner: VarlenRunner, steps: list[list[ScheduledChunk]]) -> list[dict[str, torch.Tensor]]:
    found = []
    for chunks in steps:
        logits, ids = runner.execute(chunks)
        found.append({i: row.float().cpu() for i, row in zip(ids, logits, strict=True)})
    return found


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("kind", sorted(KINDS))
def test_kernel_and_graphs_agree_with_the_oracle(
    kind: str, dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch
) -> None:
    model, steps, results = _model(kind, dtype), _steps(9, range(5, 1500, 190)), {}
    for way in ("oracle", "kernel", "graphs"):
        with monkeypatch.context() as patch:
            if way == "oracle":
                patch.setattr(varlen, "refusal", lambda *_, **__: "for comparison")
            runner = VarlenRunner(model, PAGE_TOKENS)
        runner.allocate_kv(160)
        support.check_answers(runner, 160)
        if way == "graphs":
            runner.prepare(16, 4096)
            assert (runner._graphs is not None) == (kind != "Gemma2")
        results[way] = _run(runner, steps)
    for way in ("kernel", "graphs"):
        for want, got in zip(results["oracle"], results[way], strict=True):
            assert want.keys() == got.keys()
            for request_id, logits in want.items():
                apart = (got[request_id] - logits).norm() / (logits - logits.mean()).norm()
                assert float(apart) < 0.05, (way, request_id)


def test_a_replay_waits_for_nothing() -> None:
    runner = VarlenRunner(_model("Llama", torch.bfloat16), PAGE_TOKENS)
    runner.allocate_kv(160)
    runner.prepare(16, 4096)
    chunks = [ScheduledChunk(str(i), [i], 40, [i], True) for i in range(5)]
    prompt = [ScheduledChunk("p", list(range(100)), 0, [9], True)]
    for step in (chunks, prompt):
        runner.execute(step)
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        for step in (chunks, prompt, chunks):
            runner.execute(step)
    finally:
        torch.cuda.set_sync_debug_mode("default")


@pytest.mark.parametrize(
    ("dtype", "pages", "most"),
    [
        (torch.float32, KvCacheDtype.AUTO, 1e-4),
        (torch.bfloat16, KvCacheDtype.INT8, 0.1),
        (torch.float16, KvCacheDtype.FP8, 0.25),
    ],
)
def test_what_the_kernel_can_not_do_runs_on_the_device_too(
    dtype: torch.dtype, pages: KvCacheDtype, most: float
) -> None:
    model, steps = _model("Llama", dtype), _steps(5, range(5, 1500, 290))
    runner = VarlenRunner(model, PAGE_TOKENS, pages)
    runner.allocate_kv(160)
    support.check_answers(runner, 160)
    found = _run(runner, steps)
    ids = [(i * 7) % 1000 for i in range(5)]  # the first prompt, whole
    want = runner.plain_logits([ids])[0].cpu()
    apart = (found[1]["0"] - want).norm() / (want - want.mean()).norm()
    assert float(apart) < most


@pytest.mark.parametrize("pages", list(KvCacheDtype))
def test_what_is_offloaded_comes_back_bit_for_bit(pages: KvCacheDtype) -> None:
    runner = VarlenRunner(_model("Llama", torch.bfloat16), PAGE_TOKENS, pages)
    runner.allocate_kv(8)
    runner.allocate_host(3)
    ids = [(i * 7) % 1000 for i in range(2 * PAGE_TOKENS)]
    again = [ScheduledChunk("a", [9], 2 * PAGE_TOKENS, [0, 1, 2], True)]
    runner.execute([ScheduledChunk("a", ids, 0, [0, 1, 2], True)])
    want, _ = runner.execute(again)
    want = want.clone()
    runner.move_kv(KvMoves(out=((0, 2), (1, 0))))
    runner.execute([ScheduledChunk("b", [9] * len(ids), 0, [0, 1, 2], True)])
    runner.move_kv(KvMoves(back=((5, 2), (1, 0))))
    got, _ = runner.execute([replace(again[0], block_table=[5, 1, 2])])
    assert torch.equal(got, want)


@pytest.mark.parametrize(
    "options",
    [
        {"temperature": 0.0},
        {"temperature": 0.8},
        {"temperature": 0.8, "top_k": 7},
        {"temperature": 1.3, "top_p": 0.9, "min_p": 0.01},
        {"temperature": 0.7, "repetition_penalty": 1.3, "frequency_penalty": 0.5, "logit_bias": {3: 2.0}},
        {"temperature": 0.0, "logprobs": 5},
    ],
    ids=str,
)
def test_what_is_drawn_on_the_device_is_what_the_cpu_draws(options: dict[str, Any]) -> None:
    logits = 3 * torch.randn(64, 2048, generator=torch.Generator().manual_seed(1))
    results = []
    for device in ("cpu", "cuda"):
        params = [SamplingParams(max_tokens=9, seed=seed, **options) for seed in range(64)]
        states = [SamplerState(own, (1, 2, 3), device=device) for own in params]
        for state in states:
            state.observe(7)
        results.append(sample(logits.to(device), states))
    # A number drawn may lie on the border of two tokens, whose probabilities the device sums otherwise.
    same = [a.token_id == b.token_id for a, b in zip(*results, strict=True)]  # type: ignore[union-attr]
    assert sum(same) >= 62
    for a, b in zip(*results, strict=True):
        assert isinstance(a, Sampled)
        assert isinstance(b, Sampled)
        assert (a.chosen_logprob is None) == ("logprobs" not in options)
        assert [i for i, _ in a.top] == [i for i, _ in b.top]
        assert [v for _, v in a.top] == pytest.approx([v for _, v in b.top], abs=1e-4)


async def test_the_engine_serves(engine_of: Callable[[Any], Any]) -> None:
    """Scheduler, sampler and streams on the device: the same greedy answer alone and among others."""
    engine = engine_of(_model("Llama", torch.bfloat16))

    async def answer(name: str, prompt: tuple[int, ...]) -> int:
        sampling = SamplingParams(max_tokens=32, temperature=0.0)
        stream = engine.submit(EngineRequest(name, prompt, sampling, "s"))
        return sum([len(chunk.token_ids) async for chunk in stream])

    prompts = [tuple(range(i + 1, i + 300)) for i in range(12)]
    assert await answer("alone", prompts[0]) == 32
    counts = await asyncio.gather(*(answer(str(i), p) for i, p in enumerate(prompts)))
    assert counts == [32] * 12
