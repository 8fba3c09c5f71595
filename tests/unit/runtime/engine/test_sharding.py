"""What can't be split over processes is refused before any is started, by name."""

from __future__ import annotations

import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers

from sluice_runtime.engine import parallel
from sluice_runtime.models import Checkpoint, ModelSource, UnsupportedModel, sharding

CASES = json.loads((Path(__file__).parents[4] / "docs/contracts/budget.json").read_text())["cases"]
SMOL: dict[str, Any] = CASES[0]["config"]
WHOLE = Checkpoint(Path("model"), None, (), 0)


@pytest.mark.parametrize(
    ("changes", "num_ranks", "says"),
    [
        (
            {},
            2,
            "tensorParallel 2 does not divide this model's num_attention_heads 9 and num_key_value_heads 3:"
            " set it to 1 or 3",
        ),
        ({"num_attention_heads": 8, "num_key_value_heads": 2}, 4, "num_key_value_heads 2: set it to 1 or 2"),
        ({"intermediate_size": 1537}, 3, "intermediate_size 1537: set it to 1"),
        ({"moe_intermediate_size": 100}, 3, "moe_intermediate_size 100: set it to 1"),
        ({"shared_expert_intermediate_size": 50}, 3, "shared_expert_intermediate_size 50: set it to 1"),
        (
            {"num_attention_heads": None},
            3,
            "no num_attention_heads: tensorParallel 3 can't be checked, so set",
        ),
    ],
)
def test_what_does_not_divide(changes: dict[str, Any], num_ranks: int, says: str) -> None:
    for config in (SMOL | changes, {"text_config": SMOL | changes}):
        with pytest.raises(UnsupportedModel) as caught:
            sharding.check_sizes(config, num_ranks)
        assert says in str(caught.value)


def test_what_divides() -> None:
    for num_ranks in (1, 3):
        sharding.check_sizes(SMOL, num_ranks)
    without = {k: v for k, v in SMOL.items() if k != "num_key_value_heads"}
    sharding.check_sizes({**without, "num_attention_heads": 16}, 16)


def test_forms_of_weights() -> None:
    sharding.check_source(ModelSource(num_ranks=2), WHOLE)
    sharding.check_source(ModelSource(quantization="Int8"), WHOLE)
    with pytest.raises(UnsupportedModel, match=r"quantization Int8 .* tensorParallel 2"):
        sharding.check_source(ModelSource(quantization="Int8", num_ranks=2), WHOLE)
    gguf = Checkpoint(Path("model"), Path("model/a.gguf"), (), 0)
    with pytest.raises(UnsupportedModel, match=r"a\.gguf: .* export it as safetensors"):
        sharding.check_source(ModelSource(num_ranks=2), gguf)


@pytest.mark.parametrize(
    ("plan", "says"),
    [
        ({"layers.*.self_attn.k_proj": "colwise"}, None),
        (None, "some: transformers has no tensor-parallel plan for it: set tensorParallel to 1"),
        (
            {"layers.*.self_attn.qkv_proj": "colwise_gather_output"},
            "whole on each rank, which saves no KV: set tensorParallel to 1",
        ),
    ],
)
def test_plans(plan: dict[str, str] | None, says: str | None) -> None:
    text = SimpleNamespace(model_type="some", base_model_tp_plan=plan)
    config = SimpleNamespace(get_text_config=lambda: text)
    if says is None:
        sharding.check_plan(config)
        return
    with pytest.raises(UnsupportedModel, match=says):
        sharding.check_plan(config)


@pytest.mark.parametrize(
    ("config", "says"),
    [
        (transformers.LlamaConfig, None),
        (transformers.MixtralConfig, None),
        (transformers.Qwen3MoeConfig, None),
        (transformers.Gemma3Config, None),
        (transformers.StableLmConfig, "stablelm: transformers has no tensor-parallel plan"),
        (transformers.Phi3Config, "phi3: .* whole on each rank"),
        (transformers.DeepseekV3Config, "deepseek_v3: .* whole on each rank"),
    ],
)
def test_plans_of_transformers(config: Any, says: str | None) -> None:
    """Of the installed version: a plan that changes its words would else be found out by wrong answers."""
    if says is None:
        sharding.check_plan(config())
        return
    with pytest.raises(UnsupportedModel, match=says):
        sharding.check_plan(config())


@pytest.mark.parametrize(
    ("device", "num_devices", "gives"),
    [
        ("auto", 0, "cpu"),
        ("cpu", 0, "cpu"),
        ("auto", 2, "cuda"),
        ("cuda", 4, "cuda"),
        ("cuda", 1, "needs as many CUDA devices, and 1 are visible"),
        ("cuda", 0, "needs as many CUDA devices, and 0 are visible"),
        ("cuda:1", 2, "--device cuda:1: .* leave it at auto"),
        ("cpu", 2, "--device cpu .* set CUDA_VISIBLE_DEVICES to nothing"),
    ],
)
def test_devices(device: str, num_devices: int, gives: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "device_count", lambda: num_devices)
    source = ModelSource(device=device, num_ranks=2)
    if " " not in gives:
        assert parallel.check_devices(source) == gives
        return
    with pytest.raises(UnsupportedModel, match=gives):
        parallel.check_devices(source)


def test_threads_are_shared() -> None:
    assert [parallel.threads_of_rank(n, 2) for n in (1, 2, 5, 16)] == [1, 1, 2, 8]
