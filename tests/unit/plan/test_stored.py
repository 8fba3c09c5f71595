"""Published ways to say that weights are quantised in their files, and those that must not be misjudged."""

from __future__ import annotations

import json
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sluice_operator.plan.budget import MI, BudgetError, Draft, Engine, budget
from sluice_operator.plan.stored import CONFIG_NAMES, stored_form, unread_file

SMOL: dict[str, Any] = json.loads((Path(__file__).parents[3] / "docs/contracts/budget.json").read_text())[
    "cases"
][0]["config"]
ENGINE = Engine("bfloat16", "None", 2048, 16, 512, 16, 256 * MI)
# Qwen's AWQ releases, config.json.
AWQ = {
    "bits": 4, "group_size": 128, "modules_to_not_convert": None, "quant_method": "awq", "version": "gemm",
    "zero_point": True,
}  # fmt: skip
# Qwen's GPTQ releases, config.json.
GPTQ = {
    "batch_size": 1, "bits": 8, "block_name_to_quantize": None, "desc_act": False, "group_size": 128,
    "modules_in_block_to_quantize": None, "quant_method": "gptq", "sym": True,
}  # fmt: skip
# Pull request 680 of vllm-project/llm-compressor, shortened.
W4A16: dict[str, Any] = {
    "config_groups": {
        "group_0": {
            "input_activations": None,
            "targets": ["Linear"],
            "weights": {"num_bits": 4, "group_size": 128, "strategy": "group", "type": "int"},
        }
    },
    "format": "pack-quantized",
    "ignore": ["lm_head"],
    "quant_method": "compressed-tensors",
    "sparsity_config": {"format": "dense"},
}
W8A8 = {
    **W4A16,
    "format": "int-quantized",
    "config_groups": {"group_0": {"weights": {"num_bits": 8, "group_size": None, "strategy": "channel"}}},
}
# Pull request 73 of vllm-project/compressed-tensors, "Old Format".
NESTED = {"sparsity_config": {"format": "dense"}, "quantization_config": W4A16}


@pytest.mark.parametrize("name", CONFIG_NAMES)
@pytest.mark.parametrize(
    ("told", "wanted"),
    [
        (AWQ, (4, 128)),
        (GPTQ, (8, 128)),
        ({**GPTQ, "group_size": -1}, (8, 0)),
        (W4A16, (4, 128)),
        (W8A8, (8, 0)),
        (NESTED, (4, 128)),
        ({**AWQ, "modules_to_not_convert": ["lm_head"]}, (4, 128)),
        ({**GPTQ, "dynamic": {}}, (8, 128)),
        ({**W4A16, "ignore": ["re:.*lm_head", "model.embed_tokens"]}, (4, 128)),
    ],
)
def test_a_published_form_is_read(told: dict[str, Any], wanted: tuple[int, int], name: str) -> None:
    assert stored_form({**SMOL, name: told}) == wanted


@pytest.mark.parametrize("config", [{}, {"quantization_config": None}, {"compression_config": None}])
def test_plain_weights_are_no_form(config: dict[str, Any]) -> None:
    assert stored_form(config) is None


@pytest.mark.parametrize(
    ("told", "field"),
    [
        ("awq", "quantization_config of config.json is no object"),
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "config of config.json tells no"),
        ({"quant_method": "fp8", "weight_block_size": [128, 128]}, "tells no number of bits"),
        ({**AWQ, "bits": 3}, "tells no number of bits"),
        ({**AWQ, "modules_to_not_convert": ["mlp"]}, "modules_to_not_convert of config.json treats mlp"),
        ({**GPTQ, "modules_in_block_to_quantize": [["mlp.down_proj"]]}, "modules_in_block_to_quantize"),
        ({**GPTQ, "dynamic": {"-:.*mlp.*": {}}}, "quantization_config.dynamic of config.json treats -:.*mlp"),
        ({**W4A16, "ignore": ["lm_head", "re:.*mlp"]}, "_config.ignore of config.json treats re:"),
        ({**W4A16, "ignore": "re:.*down_proj"}, "quantization_config.ignore"),
        ({**W4A16, "config_groups": {}}, "quantization_config.config_groups of config.json is not one group"),
        ({**W4A16, "config_groups": {"a": {}, "b": {}}}, "config_groups of config.json is not one group"),
        ({**W4A16, "config_groups": {"a": None}}, "config_groups.a.weights of config.json tells no"),
    ],
)  # fmt: skip
def test_what_memory_does_not_follow_from_is_refused_by_its_field(told: Any, field: str) -> None:
    with pytest.raises(ValueError, match=re.escape(field)):
        stored_form({**SMOL, "quantization_config": told})
    with pytest.raises(BudgetError, match=re.escape(field)):
        budget({**SMOL, "quantization_config": told}, ENGINE, memory_bytes=None)
    draft = Draft({**SMOL, "quantization_config": told})
    with pytest.raises(BudgetError, match=r"^spec\.engine\.speculation\.draft: .*config\.json"):
        budget(SMOL, ENGINE, memory_bytes=None, draft=draft)


@pytest.mark.parametrize(
    ("files", "config", "found"),
    [
        (["config.json", "model.safetensors"], {}, ""),
        (["config.json", "quantize_config.json"], {}, "quantize_config.json"),
        (["config.json", "quant_config.json"], {}, "quant_config.json"),
        (["config.json", "quantize_config.json"], {"quantization_config": GPTQ}, ""),
        (["config.json", "quant_config.json"], {"compression_config": W4A16}, ""),
    ],
)
def test_a_file_beside_config_json_that_alone_tells_is_found(
    files: list[str], config: dict[str, Any], found: str
) -> None:
    assert unread_file(config, files) == found


@pytest.mark.parametrize(
    ("change", "field"),
    [
        ({"quantization": "Int4"}, "spec.engine.quantization"),
        ({"tensor_parallel": 3}, "spec.engine.tensorParallel"),
    ],
)
def test_what_does_not_go_with_packed_weights_is_refused(change: dict[str, Any], field: str) -> None:
    """The runtime says the same at its start; counted on, both would take them for plain weights."""
    packed = {**SMOL, "compression_config": W4A16}
    budget(packed, ENGINE, memory_bytes=None)
    with pytest.raises(BudgetError, match=re.escape(field)):
        budget(packed, replace(ENGINE, **change), memory_bytes=None)


def test_packed_words_are_not_counted_as_weights() -> None:
    """By hand: 30 layers of 576 × 64 × (2 × 9 + 2 × 3) + 3 × 576 × 1536 weights, 8 of them in a word; the
    embedding is laid out a second time as the head, in bfloat16."""
    linear, embedding, norms = 30 * (576 * 64 * 24 + 3 * 576 * 1536), 49152 * 576, 30 * 2 * 576
    packed = {**SMOL, "quantization_config": AWQ}
    by_config = budget(packed, ENGINE, memory_bytes=None)
    assert by_config.weights == linear // 2 + linear * 4 // 128 + 2 * (2 * embedding + norms)
    assert budget(packed, ENGINE, memory_bytes=None, num_parameters=linear // 8 + embedding) == by_config
    with pytest.raises(BudgetError, match="are packed, and can't be counted"):
        budget({**packed, "model_type": "other"}, ENGINE, memory_bytes=None, num_parameters=10**9)
