"""A replica's memory from config.json: the contract's examples, by hand, and what can't be told."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice_operator.plan.budget import (
    MI,
    Budget,
    BudgetError,
    Draft,
    Engine,
    budget,
    concurrency,
    kv_bytes_per_token,
    max_kv_bytes,
    parameters,
    shape_of,
    workspace_bytes,
)

CASES = json.loads((Path(__file__).parents[3] / "docs/contracts/budget.json").read_text())["cases"]
SMOL: dict[str, Any] = CASES[0]["config"]
ENGINE = Engine("bfloat16", "None", 2048, 16, 512, 16, 256 * MI)


def _engine(case: dict[str, Any]) -> Engine:
    e = case["engine"]
    return Engine(
        e["dtype"],
        e["quantization"],
        e["maxModelLen"],
        e["maxNumSeqs"],
        e["maxBatchTokens"],
        e["blockSize"],
        e["kvCacheBytes"],
        e.get("tensorParallel", 1),
        e.get("kvCacheDtype", "Auto"),
        num_guesses=e.get("speculation", {}).get("numTokens", 0),
    )


@pytest.mark.parametrize("case", CASES, ids=lambda c: c["name"])
def test_the_contracts_examples(case: dict[str, Any]) -> None:
    draft = Draft(case["draft"]) if "draft" in case else None
    found = budget(case["config"], _engine(case), memory_bytes=case["memoryBytes"], draft=draft)
    want = case["budget"]
    assert found == Budget(
        want["bytesPerToken"],
        want["weights"],
        want["context"],
        want["activations"],
        want["workspace"],
        want["reserve"],
        want["kvCache"],
        want["numBlocks"],
        want["kvTokens"],
        want["kvBudget"],
        draft_weights=want.get("draftWeights", 0),
    )
    assert (found.total, found.fits) == (want["total"], want["fits"])


def test_by_hand() -> None:
    shape = shape_of(SMOL)
    assert kv_bytes_per_token(shape, "bfloat16") == 30 * 2 * 3 * 64 * 2 == 23_040
    # 134,515,008 is what the model's card and its safetensors header say; norms make the difference.
    assert parameters(SMOL, shape).total == pytest.approx(134_515_008, rel=1e-4)
    assert parameters(SMOL, shape, 134_515_008).total == 134_515_008


@pytest.mark.parametrize(
    ("case", "billions"), [("Llama-3.1-8B", 8.03), ("Gemma-2-2B", 2.61), ("Mixtral-8x7B", 46.7)]
)
def test_weights_of_well_known_models(case: str, billions: float) -> None:
    config = next(c["config"] for c in CASES if c["name"].startswith(case))
    assert parameters(config, shape_of(config)).total / 1e9 == pytest.approx(billions, rel=0.005)


@given(left=st.integers(0, 2**36), seqs=st.integers(1, 64), length=st.integers(16, 9000))
def test_the_largest_kv_leaves_room_for_its_workspace_and_no_block_more_would(
    left: int, seqs: int, length: int
) -> None:
    shape, engine = shape_of(SMOL), replace(ENGINE, max_num_seqs=seqs, max_model_len=length)
    per_token = kv_bytes_per_token(shape, engine.dtype)
    block = per_token * engine.block_size
    kv = max_kv_bytes(shape, engine, left)

    def taken(num_bytes: int) -> int:
        return num_bytes + workspace_bytes(shape, engine, num_bytes // per_token)

    assert taken(kv) <= left
    assert taken(kv + 2 * block) > left


@given(left=st.integers(0, 2**36), seqs=st.integers(1, 64), layers=st.integers(1, 40))
def test_so_it_does_beside_a_drafts(left: int, seqs: int, layers: int) -> None:
    small = shape_of({**SMOL, "num_hidden_layers": layers, "num_key_value_heads": 1})
    shape, engine = replace(shape_of(SMOL), draft=small), replace(ENGINE, max_num_seqs=seqs)
    per_token = kv_bytes_per_token(shape, engine.dtype)
    assert per_token == 23_040 + layers * 2 * 64 * 2
    kv = max_kv_bytes(shape, engine, left)
    own = [workspace_bytes(replace(s, draft=None), engine, kv // per_token) for s in (shape, small)]
    assert workspace_bytes(shape, engine, kv // per_token) == sum(own)
    assert kv + sum(own) <= left
    more = kv + 2 * per_token * engine.block_size
    assert more + workspace_bytes(shape, engine, more // per_token) > left


def test_a_draft_is_as_its_files_are_and_its_errors_name_it() -> None:
    alone, drafted = (
        budget(SMOL, replace(ENGINE, quantization="Int8"), memory_bytes=None, draft=draft)
        for draft in (None, Draft(SMOL))
    )
    assert drafted.draft_weights == budget(SMOL, ENGINE, memory_bytes=None).weights
    assert drafted.weights == alone.weights + drafted.draft_weights
    assert drafted.num_blocks == alone.num_blocks // 2, "both in the same memory"
    assert drafted.activations == alone.activations, "one after the other"
    for draft, engine, says in (
        (Draft({**SMOL, "hidden_size": None}), ENGINE, "^spec.engine.speculation.draft: .* no hidden_size"),
        (Draft({**SMOL, "model_type": "falcon"}), ENGINE, "speculation.draft: .* give --draft-dir with"),
        (Draft(SMOL), replace(ENGINE, tensor_parallel=3), "spec.engine.speculation.method Draft does not"),
    ):
        with pytest.raises(BudgetError, match=says):
            budget(SMOL, engine, memory_bytes=None, draft=draft)


def test_sequences_at_once() -> None:
    found = budget(SMOL, ENGINE, memory_bytes=2048 * MI)
    fits = concurrency(found, ENGINE, 512, 128)
    assert fits.certain == found.num_blocks // 40 == 16 or fits.certain == 16
    long = concurrency(found, replace(ENGINE, max_num_seqs=100), 1000, 1000)
    assert (long.certain, long.typical) == (found.num_blocks // 125, found.num_blocks // 94)
    with pytest.raises(BudgetError, match="may have 2048"):
        concurrency(found, ENGINE, 2000, 49)


@pytest.mark.parametrize(
    ("change", "says"),
    [
        ({"model_type": "falcon"}, "give --model-dir with the safetensors files"),
        ({"kv_lora_rank": 512}, "latent attention"),
        ({"hidden_size": None}, "has no hidden_size"),
        ({"model_type": "mixtral"}, "no num_experts"),
    ],
)
def test_what_can_not_be_told_is_an_error_that_says_what_to_do(change: dict[str, Any], says: str) -> None:
    with pytest.raises(BudgetError, match=says):
        budget({**SMOL, **change}, ENGINE, memory_bytes=None)


def test_no_memory_is_no_budget() -> None:
    found = budget(SMOL, ENGINE, memory_bytes=100 * MI)
    assert (found.kv_budget, found.fits) == (0, False)


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_host_memory_for_evicted_kv_is_the_pods_own_on_a_cpu_and_not_the_accelerators(num_ranks: int) -> None:
    config, memory = CASES[0]["config"], 6 * 1024 * MI
    off = replace(ENGINE, tensor_parallel=num_ranks)
    on = replace(off, kv_offload_bytes=300 * MI)
    without, found = (budget(config, engine, memory_bytes=memory) for engine in (off, on))
    assert (without.host_pool, found.host_pool) == (0, 300 * MI // num_ranks)
    assert found.total - without.total == found.host_pool
    assert without.kv_budget is not None
    assert found.kv_budget is not None
    # In whole blocks.
    assert abs(without.kv_budget - found.kv_budget - found.host_pool) < 16 * without.bytes_per_token
    told = [budget(config, engine, memory_bytes=memory, accelerated=True) for engine in (off, on)]
    assert told[0] == told[1]
