"""The runtime's side of the budget: the same figures as the operator's, and nothing starts beyond them."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from sluice_runtime.capacity import (
    Limits,
    Sizes,
    activation_bytes,
    kv_budget,
    max_kv_bytes,
    sizes_of,
    workspace_bytes,
)
from sluice_runtime.engine import machine
from sluice_runtime.engine.runner import ModelRunner, num_host_slots, num_kv_blocks
from sluice_runtime.engine.types import EngineConfig
from sluice_runtime.models import OutOfMemory
from unit.runtime.engine.conftest import ARCHITECTURES, Oracle

CASES = json.loads((Path(__file__).parents[4] / "docs/contracts/budget.json").read_text())["cases"]
MI = 2**20


def _sizes(config: dict[str, Any], engine: dict[str, Any]) -> Sizes:
    head_dim = config.get("head_dim") or config["hidden_size"] // config["num_attention_heads"]
    num_ranks = engine.get("tensorParallel", 1)
    layers = [(config["num_key_value_heads"] // num_ranks, head_dim, head_dim)] * config["num_hidden_layers"]
    dtype_bytes = {"bfloat16": 2, "float32": 4}[engine["dtype"]]
    sizes = sizes_of(SimpleNamespace(**config), layers, config["vocab_size"], dtype_bytes, num_ranks)
    return replace(sizes, quantized_kv=engine.get("kvCacheDtype", "Auto") != "Auto")


def _of(case: dict[str, Any]) -> tuple[Any, Limits]:
    engine = case["engine"]
    sizes = _sizes(case["config"], engine)
    if "draft" in case:
        sizes = replace(sizes, draft=_sizes(case["draft"], engine))
    return sizes, Limits(
        engine["maxModelLen"],
        engine["maxNumSeqs"],
        engine["maxBatchTokens"],
        engine["blockSize"],
        engine.get("speculation", {}).get("numTokens", 0),
    )


@pytest.mark.parametrize("case", CASES, ids=lambda c: c["name"])
def test_the_contracts_examples(case: dict[str, Any]) -> None:
    (sizes, limits), want = _of(case), case["budget"]
    assert sizes.bytes_per_token == want["bytesPerToken"]
    assert activation_bytes(sizes, limits) == want["activations"]
    assert workspace_bytes(sizes, limits, want["kvTokens"]) == want["workspace"]
    num_ranks = case["engine"].get("tensorParallel", 1)
    num_blocks = case["engine"]["kvCacheBytes"] // num_ranks // (sizes.bytes_per_token * limits.block_size)
    assert num_blocks == want["numBlocks"]
    if case["memoryBytes"] is not None:
        # What is left once weights and the process are in memory.
        limit = case["memoryBytes"] // num_ranks
        available = limit - want["weights"] - want["context"]
        assert kv_budget(sizes, limits, available, limit) == want["kvBudget"]


def test_the_least_that_is_left_is_nothing() -> None:
    sizes, limits = _of(CASES[0])
    assert kv_budget(sizes, limits, 0, 2**30) == max_kv_bytes(sizes, limits, 0) == 0


@pytest.mark.parametrize("architecture", sorted(ARCHITECTURES))
def test_a_loaded_model_has_the_sizes_of_its_configuration(
    architecture: str, oracles: Callable[[str], Oracle]
) -> None:
    sizes = ModelRunner(oracles(architecture).model, 4).sizes()
    assert sizes.layers == ((2, 8, 8), (2, 8, 8))
    assert (sizes.hidden, sizes.heads, sizes.vocab, sizes.dtype_bytes) == (32, 4, 300, 4)
    assert sizes.ffn == {"mixtral": 128, "qwen2-moe": 96, "qwen3-moe": 64}.get(architecture, 64)
    assert sizes.bytes_per_token == 2 * 2 * 2 * 8 * 4


def test_kv_beyond_the_budget_does_not_start(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes, limits = _of(CASES[0])
    monkeypatch.setattr(machine, "memory_available", lambda **_: 1000 * MI)
    monkeypatch.setattr(machine, "memory_limit", lambda: 2048 * MI)
    most = kv_budget(sizes, limits, 1000 * MI, 2048 * MI)
    assert 600 * MI < most < 900 * MI
    options: dict[str, Any] = {"max_num_seqs": 16, "max_batch_tokens": 512, "block_size": 16}
    block = sizes.bytes_per_token * 16
    assert num_kv_blocks(EngineConfig(kv_cache_bytes=most, **options), sizes, 2048) == most // block
    with pytest.raises(OutOfMemory, match="lower kvCacheMemory, maxNumSeqs or maxBatchTokens"):
        num_kv_blocks(EngineConfig(kv_cache_bytes=most + block, **options), sizes, 2048)
    wide = EngineConfig(**(options | {"max_num_seqs": 32}))
    left = kv_budget(sizes, Limits(2048, 32, 512, 16), 1000 * MI, 2048 * MI)
    assert num_kv_blocks(wide, sizes, 2048) == left // block, "all that is left"
    assert num_kv_blocks(EngineConfig(**(options | {"max_num_seqs": 2})), sizes, 2048) == 2 * 128


def test_the_host_pool_is_taken_off_what_kv_may_have(monkeypatch: pytest.MonkeyPatch) -> None:
    sizes, limits = _of(CASES[0])
    monkeypatch.setattr(machine, "memory_available", lambda **_: 1000 * MI)
    monkeypatch.setattr(machine, "memory_limit", lambda: 2048 * MI)
    options: dict[str, Any] = {"max_num_seqs": 16, "max_batch_tokens": 512, "block_size": 16}
    most = kv_budget(sizes, limits, 700 * MI, 2048 * MI)
    config = EngineConfig(kv_cache_bytes=most, kv_offload_bytes=300 * MI, **options)
    block = sizes.bytes_per_token * 16
    assert num_kv_blocks(config, sizes, 2048) == most // block
    assert num_host_slots(config, sizes) == 300 * MI // block
    assert num_host_slots(replace(config, num_ranks=3), sizes) == 100 * MI // block
    with pytest.raises(OutOfMemory, match="lower kvCacheMemory"):
        num_kv_blocks(replace(config, kv_offload_bytes=301 * MI), sizes, 2048)
    with pytest.raises(OutOfMemory, match="kvOffloadMemory needs 1,001 MiB and 1,000 MiB of memory are left"):
        num_kv_blocks(replace(config, kv_offload_bytes=1001 * MI), sizes, 2048)
