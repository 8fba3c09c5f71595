"""KV in quantised pages: answers do not depend on chunks, kernels agree, memory is as told."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor

from sluice_runtime.engine import attention, support
from sluice_runtime.engine.plan import ScheduledChunk
from sluice_runtime.engine.runner import ModelRunner
from sluice_runtime.engine.types import KvCacheDtype
from unit.runtime.engine.conftest import Oracle

QUANTISED = [KvCacheDtype.INT8, KvCacheDtype.FP8]
PROMPT = [(17 * i + 5) % 300 for i in range(23)]


def _runner(model: Any, kind: KvCacheDtype) -> ModelRunner:
    runner = ModelRunner(model, 4, kind)
    runner.allocate_kv(40)
    return runner


def _last_logits(runner: ModelRunner, cuts: list[int], blocks: list[int]) -> Tensor:
    """Logits after PROMPT, computed in chunks that end at `cuts`."""
    logits = torch.empty(0)
    for start, end in zip([0, *cuts], [*cuts, len(PROMPT)], strict=True):
        logits, _ = runner.execute([ScheduledChunk("a", PROMPT[start:end], start, blocks, True)])
    return logits[0]


@pytest.mark.parametrize("kind", QUANTISED)
@pytest.mark.parametrize("architecture", ["llama", "gemma2-softcap", "mistral-window"])
def test_an_answer_does_not_depend_on_how_its_prompt_was_cut(
    kind: KvCacheDtype, architecture: str, oracles: Callable[[str], Oracle]
) -> None:
    runner = _runner(oracles(architecture).model, kind)
    whole = _last_logits(runner, [], list(range(6)))
    for cuts in ([1], [11], [4, 8, 9, 22], list(range(1, 23))):
        parts = _last_logits(runner, cuts, list(range(10, 16)))
        # A value that lies between two levels may be rounded to either.
        assert float((parts - whole).norm() / whole.norm()) < 0.01, cuts


@pytest.mark.parametrize("kind", QUANTISED)
def test_kernels_agree_on_quantised_pages(
    kind: KvCacheDtype, llama: Oracle, monkeypatch: pytest.MonkeyPatch
) -> None:
    compared = 0

    def both(*arguments: Any) -> Tensor:
        nonlocal compared
        got, want = (attention.KERNELS[name](*arguments) for name in ("matmul", "oracle"))
        assert torch.allclose(got, want, atol=1e-4)
        compared += 1
        return got

    monkeypatch.setattr(attention, "select_kernel", lambda *_: both)
    runner = _runner(llama.model, kind)
    tables = [list(range(8)), list(range(8, 16))]
    for _ in range(2):
        runner.execute(
            [
                ScheduledChunk("a", PROMPT[:9], 0, tables[0], True),
                ScheduledChunk("b", PROMPT[9:20], 0, tables[1], True),
            ]
        )
        runner.execute(
            [
                ScheduledChunk("a", PROMPT[:7], 9, tables[0], True),
                ScheduledChunk("b", [1], 11, tables[1], True),
            ]
        )
        runner.execute([ScheduledChunk(i, [2], 16, t, True) for i, t in zip("ab", tables, strict=True)])
        runner.execute([ScheduledChunk("a", [3], 17, tables[0], True)])
    assert compared


@pytest.mark.parametrize("kind", QUANTISED)
def test_answers_stay_close_and_pass_the_check_at_load(kind: KvCacheDtype, llama: Oracle) -> None:
    exact, quantised = _runner(llama.model, KvCacheDtype.AUTO), _runner(llama.model, kind)
    want, got = (_last_logits(r, [11], list(range(6))) for r in (exact, quantised))
    apart = float((got - want).norm() / want.norm())
    assert 0 < apart < (0.05 if kind is KvCacheDtype.INT8 else 0.2)
    support.check_answers(quantised, 40)


@pytest.mark.parametrize("kind", QUANTISED)
def test_a_block_takes_the_bytes_that_capacity_tells(kind: KvCacheDtype, llama: Oracle) -> None:
    runner = _runner(llama.model, kind)
    cache = runner._cache
    assert cache is not None
    taken = sum(t.numel() * t.element_size() for t in cache.storage())
    assert taken == 40 * runner.bytes_per_block()
    # 2 layers, keys and values, 2 heads of 8 bytes with a scale of 2.
    assert runner.sizes().bytes_per_token == 2 * 2 * 2 * (8 + 2)
    assert runner.sizes().gathered_per_token == 2 * 2 * 2 * (8 * 4 + 8 + 2)
