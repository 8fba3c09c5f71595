"""What only a GPU can tell; `make gpu-check` runs it on a CUDA device, in under ten minutes. Nothing here has
been run yet: docs/engine-parallel.md says so, row by row.

Models are tiny and random, in half precision: what is compared with another path of this engine may differ by
rounding, and is bounded as such.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers

from sluice_runtime.engine import support, varlen
from sluice_runtime.engine.plan import ScheduledChunk
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


async def test_the_engine_serves(engine_of: Callable[[Any], Any]) -> None:
    """Scheduler, sampler and streams on the device: the same greedy answer alone and among others."""
    from sluice_runtime.engine.types import EngineRequest, SamplingParams

    engine = engine_of(_model("Llama", torch.bfloat16))

    async def answer(name: str, prompt: tuple[int, ...]) -> int:
        sampling = SamplingParams(max_tokens=32, temperature=0.0)
        stream = engine.submit(EngineRequest(name, prompt, sampling, "s"))
        return sum([len(chunk.token_ids) async for chunk in stream])

    prompts = [tuple(range(i + 1, i + 300)) for i in range(12)]
    assert await answer("alone", prompts[0]) == 32
    counts = await asyncio.gather(*(answer(str(i), p) for i, p in enumerate(prompts)))
    assert counts == [32] * 12
