"""What published checkpoints say of themselves, word for word, and what is made of it. Their files can't be
had here; that tensors so described are read as they are meant is test_prequantized.py's."""

from __future__ import annotations

import json
from typing import Any

import pytest
import transformers

from sluice_runtime.models.packing import Packing, packing_of

QWEN_GPTQ = """
{"batch_size": 1, "bits": 4, "block_name_to_quantize": null, "cache_block_outputs": true,
 "damp_percent": 0.01, "dataset": null, "desc_act": false, "exllama_config": {"version": 1},
 "group_size": 128,
 "max_input_length": null, "model_seqlen": null, "module_name_preceding_first_block": null,
 "modules_in_block_to_quantize": null, "pad_token_id": null, "quant_method": "gptq", "sym": true,
 "tokenizer": null, "true_sequential": true, "use_cuda_fp16": false, "use_exllama": true}
"""
THE_BLOKE_GPTQ = """
{"bits": 4, "group_size": 128, "damp_percent": 0.01, "desc_act": true, "sym": true, "true_sequential": true,
 "model_name_or_path": null, "model_file_base_name": "model", "quant_method": "gptq"}
"""
OPTIMUM_GPTQ_V2 = """
{"act_group_aware": true, "backend": "auto", "batch_size": 1, "bits": 4, "block_name_to_quantize": null,
 "cache_block_outputs": true, "checkpoint_format": "gptq_v2", "damp_percent": 0.1, "desc_act": false,
 "format": "gptq_v2", "group_size": 128, "max_input_length": null,
 "meta": {"quantizer": ["optimum:2.1.0", "gptqmodel:6.0.3"]}, "model_seqlen": null,
 "module_name_preceding_first_block": null, "modules_in_block_to_quantize": null, "pad_token_id": null,
 "quant_method": "gptq", "sym": true, "tokenizer": null, "true_sequential": true}
"""
GPTQMODEL = """
{"bits": 4, "checkpoint_format": "gptq", "desc_act": false, "group_size": 128, "lm_head": false,
 "meta": {"damp_auto_increment": 0.0, "damp_percent": 0.1, "mse": 0.0, "quantizer": [],
          "static_groups": false, "true_sequential": false, "uri": ""},
 "pack_dtype": "int32", "quant_method": "gptq", "sym": true}
"""
ANGELSLIM_GPTQ = """
{"bits": 4, "checkpoint_format": "gptq", "desc_act": true, "group_size": 128, "quant_method": "gptq",
 "static_groups": true, "sym": true, "true_sequential": true}
"""
QWEN_AWQ = """
{"bits": 4, "group_size": 128, "modules_to_not_convert": null, "quant_method": "awq", "version": "gemm",
 "zero_point": true}
"""
LLM_COMPRESSOR_W4A16 = """
{"config_groups": {"group_0": {"input_activations": null, "output_activations": null, "targets": ["Linear"],
   "weights": {"actorder": null, "block_structure": null, "dynamic": false, "group_size": 128, "num_bits": 4,
               "observer": "minmax", "observer_kwargs": {}, "strategy": "group", "symmetric": true,
               "type": "int"}}},
 "format": "pack-quantized", "global_compression_ratio": 1.883165566487463, "ignore": ["lm_head"],
 "kv_cache_scheme": null, "quant_method": "compressed-tensors", "quantization_status": "compressed",
 "sparsity_config": {"format": "dense", "global_sparsity": 0.14297135853065746,
                     "ignore": ["model.layers.0.self_attn.o_proj"]}}
"""
LLM_COMPRESSOR_W8A8 = """
{"config_groups": {"group_0": {"format": "int-quantized",
   "input_activations": {"actorder": null, "block_structure": null, "dynamic": true, "group_size": null,
                         "num_bits": 8, "observer": null, "observer_kwargs": {}, "scale_dtype": null,
                         "strategy": "token", "symmetric": true, "type": "int", "zp_dtype": null},
   "output_activations": null, "targets": ["Linear"],
   "weights": {"actorder": null, "block_structure": null, "dynamic": false, "group_size": null, "num_bits": 8,
               "observer": "minmax", "observer_kwargs": {}, "scale_dtype": null, "strategy": "channel",
               "symmetric": true, "type": "int", "zp_dtype": null}}},
 "format": "int-quantized", "global_compression_ratio": null, "ignore": ["lm_head"], "kv_cache_scheme": null,
 "quant_method": "compressed-tensors", "quantization_status": "compressed", "sparsity_config": {},
 "transform_config": {}, "version": "0.12.2"}
"""
COMPRESSED_ORDERED = """
{"quant_method": "compressed-tensors", "format": "pack-quantized", "quantization_status": "compressed",
 "ignore": ["lm_head"], "kv_cache_scheme": null, "sparsity_config": {}, "transform_config": {},
 "global_compression_ratio": 2.3, "version": "0.10.0",
 "config_groups": {"group_0": {"targets": ["Linear"], "input_activations": null, "output_activations": null,
   "weights": {"num_bits": 4, "type": "int", "symmetric": false, "strategy": "group", "group_size": 128,
               "actorder": "group", "dynamic": false, "observer": "minmax"}}}}
"""

COMPRESSED: Any = "compressed-tensors"
PUBLISHED: dict[str, tuple[str, Packing]] = {
    # Qwen/Qwen2.5-Coder-1.5B-Instruct-GPTQ-Int4, config.json
    "qwen-gptq": (QWEN_GPTQ, Packing("gptq", "gptq", 4, 128, True, "Int4")),
    # TheBloke/Llama-2-7B-Chat-GPTQ, config.json, as intel/neural-compressor repeats it
    "thebloke-gptq": (THE_BLOKE_GPTQ, Packing("gptq", "gptq", 4, 128, True, "Int4", ordered=True)),
    # Llama 3 8B by transformers 5.4 with optimum 2.1 and GPTQModel 6.0.3: an issue of GPTQModel
    "optimum-gptq-v2": (OPTIMUM_GPTQ_V2, Packing("gptq", "gptq_v2", 4, 128, True, "Int4")),
    # what GPTQModel writes: a test of trymirai/lalamo
    "gptqmodel": (GPTQMODEL, Packing("gptq", "gptq", 4, 128, True, "Int4")),
    # what Tencent/AngelSlim writes: ordered by activation within groups that stay where they are
    "angelslim-gptq": (ANGELSLIM_GPTQ, Packing("gptq", "gptq", 4, 128, True, "Int4", ordered=True)),
    # Qwen/Qwen3-4B-AWQ and other AWQ releases of Qwen, config.json; AutoAWQ's AwqConfig.to_transformers_dict
    "qwen-awq": (QWEN_AWQ, Packing("awq", "gemm", 4, 128, False, "Int4")),
    # pull request 680 of vllm-project/llm-compressor; its `ignore` shortened
    "llm-compressor-w4a16": (
        LLM_COMPRESSOR_W4A16,
        Packing(COMPRESSED, "pack-quantized", 4, 128, True, "Int4"),
    ),
    # issue 2078 of vllm-project/llm-compressor, its weights by the writer of compressed-tensors 0.12.2
    "llm-compressor-w8a8": (LLM_COMPRESSOR_W8A8, Packing(COMPRESSED, "int-quantized", 8, None, True, "W8A8")),
    # W4A16_ASYM of compressed-tensors 0.10.0 with `actorder`
    "compressed-ordered": (
        COMPRESSED_ORDERED,
        Packing(COMPRESSED, "pack-quantized", 4, 128, False, "Int4", ordered=True),
    ),
}


@pytest.mark.parametrize("name", PUBLISHED)
def test_a_published_config_is_understood(name: str) -> None:
    text, wanted = PUBLISHED[name]
    assert packing_of({"quantization_config": json.loads(text)}) == wanted


def test_the_older_name_of_compressed_tensors() -> None:
    told = json.loads(LLM_COMPRESSOR_W4A16)
    assert packing_of({"compression_config": told}) == packing_of({"quantization_config": told})


def test_what_transformers_nests_when_it_saves_anew() -> None:
    told = json.loads(LLM_COMPRESSOR_W4A16)
    sparsity = told.pop("sparsity_config")
    inner = told | {"quant_method": "sparseml", "quantization_status": "frozen"}
    nested = {"quantization_config": inner, "sparsity_config": sparsity, "quant_method": COMPRESSED}
    assert packing_of({"quantization_config": nested}) == packing_of({"quantization_config": told})


@pytest.mark.parametrize("desc_act", [False, True])
def test_what_transformers_writes_itself(desc_act: bool) -> None:
    configs: Any = transformers
    gptq = json.loads(json.dumps(configs.GPTQConfig(bits=4, desc_act=desc_act).to_dict()))
    assert packing_of({"quantization_config": gptq}) == Packing(
        "gptq", "gptq", 4, 128, True, "Int4", ordered=desc_act
    )
    awq = json.loads(json.dumps(configs.AwqConfig().to_dict()))
    assert packing_of({"quantization_config": awq}) == Packing("awq", "gemm", 4, 128, False, "Int4")
