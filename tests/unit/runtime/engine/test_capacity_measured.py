"""What `sluice capacity` predicts against what a process then holds: within 5 %, tiny model and real one."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import AutoConfig, AutoModelForCausalLM, AutoTokenizer, GenerationConfig

from sluice_operator.plan.budget import Draft, Engine, budget
from unit.runtime.engine.conftest import Oracle

pytestmark = pytest.mark.model
_PROGRAM = Path(__file__).parent / "occupied.py"


def _compare(
    directory: Path,
    dtype: str,
    quantization: str,
    num_seqs: int,
    kv_mib: int,
    length: int,
    kv_cache_dtype: str = "Auto",
    draft: tuple[Path, int] | None = None,
) -> None:
    """`draft`: where it lies, and how many tokens it guesses."""
    num_guesses = 0 if draft is None else draft[1]
    settings: dict[str, Any] = {
        "dtype": dtype,
        "quantization": quantization,
        "maxModelLen": length,
        "maxNumSeqs": num_seqs,
        "maxBatchTokens": 256,
        "blockSize": 16,
        "kvCacheBytes": kv_mib * 2**20,
        "kvCacheDtype": kv_cache_dtype,
        "numGuesses": num_guesses,
    }
    environment = {**os.environ, "OMP_NUM_THREADS": "1"}
    run = subprocess.run(
        [sys.executable, str(_PROGRAM), str(directory), json.dumps(settings), *map(str, (draft or ())[:1])],
        capture_output=True,
        text=True,
        env=environment,
        check=False,
    )
    assert run.returncode == 0, run.stderr[-2000:]
    measured = json.loads(run.stdout.splitlines()[-1])
    kv_bytes = settings["kvCacheBytes"]
    engine = Engine(
        dtype,
        quantization,
        length,
        num_seqs,
        256,
        16,
        kv_bytes,
        kv_cache_dtype=kv_cache_dtype,
        num_guesses=num_guesses,
    )
    found = budget(
        _config(directory),
        engine,
        memory_bytes=None,
        draft=None if draft is None else Draft(_config(draft[0])),
    )
    off = found.total / measured["bytes"] - 1
    print(
        f"{dtype} {quantization}: {found.total >> 20} MiB told, {measured['bytes'] >> 20} found, {off:+.1%}"
    )
    assert measured["blocks"] == found.num_blocks
    assert abs(off) <= 0.05


def _config(directory: Path) -> dict[str, Any]:
    config: dict[str, Any] = json.loads((directory / "config.json").read_text())
    return config


@pytest.mark.parametrize(
    ("dtype", "quantization", "num_seqs", "kv_mib", "kv_cache_dtype"),
    [
        ("bfloat16", "None", 8, 64, "Auto"),
        ("bfloat16", "None", 16, 256, "Auto"),
        ("float32", "None", 8, 256, "Auto"),
        ("bfloat16", "Int8", 8, 128, "Auto"),
        ("bfloat16", "Int4", 8, 64, "Auto"),
        ("bfloat16", "W8A8", 8, 64, "Auto"),
        ("bfloat16", "None", 8, 128, "Int8"),
        ("bfloat16", "None", 8, 128, "Fp8"),
    ],
)
def test_the_real_model(
    smollm2: Path, dtype: str, quantization: str, num_seqs: int, kv_mib: int, kv_cache_dtype: str
) -> None:
    _compare(smollm2, dtype, quantization, num_seqs, kv_mib, 2048, kv_cache_dtype)


@pytest.mark.parametrize(("dtype", "kv_mib"), [("float32", 64), ("bfloat16", 200)])
def test_a_tiny_model(tmp_path: Path, llama: Oracle, hf_tokenizer: Any, dtype: str, kv_mib: int) -> None:
    llama.reference.save_pretrained(tmp_path)
    hf_tokenizer.save_pretrained(tmp_path)
    _compare(tmp_path, dtype, "None", 8, kv_mib, 256)


@pytest.fixture
def small_draft(tmp_path: Path, smollm2: Path) -> Path:
    """A fifth of SmolLM2's layers, of half its width, with its vocabulary and random weights."""
    config = AutoConfig.from_pretrained(smollm2)
    config.update({"num_hidden_layers": 6, "hidden_size": 288, "intermediate_size": 768})
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.generation_config = GenerationConfig.from_pretrained(smollm2)
    model.save_pretrained(tmp_path)
    AutoTokenizer.from_pretrained(smollm2).save_pretrained(tmp_path)
    return tmp_path


@pytest.mark.parametrize(("quantization", "kv_mib"), [("None", 192), ("Int8", 128)])
def test_the_real_model_with_a_small_draft(
    smollm2: Path, small_draft: Path, quantization: str, kv_mib: int
) -> None:
    _compare(smollm2, "bfloat16", quantization, 8, kv_mib, 2048, draft=(small_draft, 4))
