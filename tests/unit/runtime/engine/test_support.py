"""What this engine would run wrong is refused at load, with a reason."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers

from sluice_runtime.engine import attention, support
from sluice_runtime.engine.attention import UnsupportedAttention
from sluice_runtime.engine.engine import Engine
from sluice_runtime.engine.runner import ModelRunner
from sluice_runtime.engine.tokenizer import Tokenizer
from sluice_runtime.engine.types import EngineConfig
from sluice_runtime.models import UnsupportedModel
from unit.runtime.engine.conftest import _SIZES, ARCHITECTURES, loaded, make_oracle


def _model(kind: str, **options: Any) -> Any:
    sizes = {**_SIZES, **options}
    config = getattr(transformers, kind.replace("ForCausalLM", "") + "Config")(**sizes)
    name = kind.removesuffix("Text") + "ForCausalLM"
    return getattr(transformers, name)(config).eval()


@pytest.mark.parametrize(
    ("kind", "options", "says"),
    [
        ("Bloom", {"n_layer": 2, "n_head": 4}, "does not let its attention be replaced"),
        ("Mamba", {"state_size": 4}, "does not let its attention be replaced"),
        ("GptOss", {"num_local_experts": 2, "num_experts_per_tok": 1}, "s_aux"),
        ("Llama4Text", {"intermediate_size_mlp": 64, "num_local_experts": 2}, "chunked_attention"),
        ("RecurrentGemma", {"lru_width": 32}, "other state than keys and values"),
        ("Nemotron", {}, "does not hand keyword arguments on"),
        ("Doge", {}, "attention_mask"),
        ("MiniMax", {"num_local_experts": 2}, "takes no cache but its own"),
    ],
)
def test_each_kind_of_model_that_can_not_run_has_its_reason(
    kind: str, options: dict[str, Any], says: str, tokenizer: Tokenizer
) -> None:
    with pytest.raises(UnsupportedModel, match=says) as caught:
        Engine(loaded(_model(kind, **options), tokenizer), EngineConfig(num_kv_blocks=16, num_threads=1))
    assert caught.value.reason == "UnsupportedModel"


@pytest.mark.parametrize("architecture", sorted(ARCHITECTURES))
def test_what_runs_right_passes(architecture: str) -> None:
    runner = ModelRunner(make_oracle(architecture).model, 4)
    runner.allocate_kv(16)
    support.check_answers(runner, 16)


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_half_precision_passes(dtype: torch.dtype) -> None:
    runner = ModelRunner(make_oracle("llama").model.to(dtype), 4)
    runner.allocate_kv(16)
    support.check_answers(runner, 16)


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_attention_that_sees_the_future_is_found(dtype: torch.dtype, monkeypatch: pytest.MonkeyPatch) -> None:
    """transformers 48296: paged attention was silently bidirectional."""

    def bidirectional(query: Any, key: Any, value: Any, *_: Any) -> torch.Tensor:
        groups = query.shape[1] // key.shape[1]
        k, v = (x[0].repeat_interleave(groups, 0) for x in (key, value))
        weights = (query[0] @ k.transpose(1, 2) * query.shape[-1] ** -0.5).softmax(-1)
        return (weights @ v).transpose(0, 1)

    runner = ModelRunner(make_oracle("llama").model.to(dtype), 4)
    runner.allocate_kv(16)
    monkeypatch.setattr(attention, "select_kernel", lambda *_: bidirectional)
    with pytest.raises(UnsupportedAttention, match="does not run it right"):
        support.check_answers(runner, 16)


def test_a_window_that_is_not_handed_on_is_found() -> None:
    config = transformers.MistralConfig(**{**_SIZES, "sliding_window": 8})
    config.layer_types = None
    with pytest.raises(UnsupportedAttention, match="sliding window that it does not hand on"):
        support.check_layers(config, {0: None, 1: None})
    support.check_layers(config, {0: 8, 1: 8})
    config.layer_types = ["full_attention", "sliding_attention"]
    with pytest.raises(UnsupportedAttention, match="layer 1 has"):
        support.check_layers(config, {0: None, 1: None})
    support.check_layers(config, {0: None, 1: 8})


def test_a_cache_too_small_for_the_check_is_no_fault() -> None:
    runner = ModelRunner(make_oracle("llama").model, 4)
    runner.allocate_kv(2)
    support.check_answers(runner, 2)
