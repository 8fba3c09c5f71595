"""Checkpoints that are quantised in their files: what was packed computes, what is not understood is refused.

The packers here place one value at a time, by their formats' documentation; the readers shift whole words.
"""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file
from torch import Tensor

from sluice_runtime.models import CheckpointCorrupt, LoadedModel, ModelSource, UnsupportedModel, load
from sluice_runtime.models.packing import packing_of

GROUP = 16
Tensors = dict[str, Tensor]


def _word(values: list[int], bits: int) -> int:
    word = sum(value << (bits * i) for i, value in enumerate(values))
    return word - (1 << 32) if word >= 1 << 31 else word


def _words(levels: Tensor, bits: int) -> Tensor:
    """[rows, n] as int32 [rows, n * bits / 32], the first value in the lowest bits."""
    per = 32 // bits
    rows = [[_word(row[i : i + per], bits) for i in range(0, len(row), per)] for row in levels.tolist()]
    return torch.tensor(rows, dtype=torch.int32)


def _awq(levels: Tensor, zero: Tensor, scale: Tensor, bits: int) -> Tensors:
    def interleaved(t: Tensor) -> Tensor:
        # Nibble i of a word holds output 0, 2, 4, 6, 1, 3, 5, 7.
        order = [8 * w + i for w in range(t.shape[0] // 8) for i in (0, 2, 4, 6, 1, 3, 5, 7)]
        return _words(t[order].t(), bits)

    return {
        "qweight": interleaved(levels),
        "qzeros": interleaved(zero),
        "scales": scale.t().contiguous().half(),
    }


def _gptq(levels: Tensor, zero: Tensor, scale: Tensor, bits: int, less: int = 1) -> Tensors:
    inputs = levels.shape[1]
    return {
        "qweight": _words(levels, bits).t().contiguous(),
        "qzeros": _words(zero.t() - less, bits),
        "scales": scale.t().contiguous().half(),
        "g_idx": torch.arange(inputs, dtype=torch.int32) // (inputs // scale.shape[1]),
    }


def _gptq_v2(levels: Tensor, zero: Tensor, scale: Tensor, bits: int) -> Tensors:
    return _gptq(levels, zero, scale, bits, less=0)


def _packed(levels: Tensor, zero: Tensor, scale: Tensor, bits: int) -> Tensors:
    return {
        "weight_packed": _words(levels, bits),
        "weight_scale": scale.bfloat16(),
        "weight_shape": torch.tensor(levels.shape),
    }


def _packed_asymmetric(levels: Tensor, zero: Tensor, scale: Tensor, bits: int) -> Tensors:
    return {
        **_packed(levels, zero, scale, bits),
        "weight_zero_point": _words(zero.t(), bits).t().contiguous(),
    }


def _packed_plain_zeros(levels: Tensor, zero: Tensor, scale: Tensor, bits: int) -> Tensors:
    return {**_packed(levels, zero, scale, bits), "weight_zero_point": (zero - 8).to(torch.int8)}


def _int(levels: Tensor, zero: Tensor, scale: Tensor, bits: int) -> Tensors:
    return {"weight": (levels - zero).to(torch.int8), "weight_scale": scale}


def _group_of(
    bits: int, group: int | None, symmetric: bool = True, actorder: str | None = None, **more: Any
) -> dict[str, Any]:
    weights = {
        "num_bits": bits,
        "type": "int",
        "symmetric": symmetric,
        "dynamic": False,
        "actorder": actorder,
    }
    strategy = {"strategy": "channel"} if group is None else {"strategy": "group", "group_size": group}
    found = {"targets": ["Linear"], "weights": weights | strategy, "input_activations": None}
    return {"config_groups": {"group_0": found | more}, "ignore": ["lm_head"]}


_CT = {"quant_method": "compressed-tensors", "quantization_status": "compressed"}
_PACK, _INT = _CT | {"format": "pack-quantized"}, _CT | {"format": "int-quantized"}
_TOKENS = {"num_bits": 8, "type": "int", "symmetric": True, "dynamic": True, "strategy": "token"}
_AWQ = {"quant_method": "awq", "bits": 4, "group_size": GROUP, "zero_point": True, "version": "gemm"}
_GPTQ = {"quant_method": "gptq", "bits": 4, "group_size": GROUP, "sym": True, "desc_act": False}

# Name: config, packer, bits, inputs that share a scale (None: all), symmetric, what computes.
FORMS: dict[str, tuple[dict[str, Any], Callable[..., Tensors], int, int | None, bool, str]] = {
    "awq": (_AWQ, _awq, 4, GROUP, False, "Int4"),
    "awq-symmetric": (_AWQ | {"zero_point": False}, _awq, 4, GROUP, True, "Int4"),
    "gptq": (_GPTQ, _gptq, 4, GROUP, True, "Int4"),
    "gptq-asymmetric": (_GPTQ | {"sym": False}, _gptq, 4, GROUP, False, "Int4"),
    "gptq-v2": (_GPTQ | {"checkpoint_format": "gptq_v2", "sym": False}, _gptq_v2, 4, GROUP, False, "Int4"),
    "gptq-ordered": (_GPTQ | {"desc_act": True}, _gptq, 4, GROUP, True, "Int4"),
    "gptq-8-ordered": (_GPTQ | {"bits": 8, "desc_act": True}, _gptq, 8, GROUP, True, "Int8"),
    "gptq-ordered-one-group": (_GPTQ | {"desc_act": True, "group_size": -1}, _gptq, 4, None, True, "Int4"),
    "gptq-8": (_GPTQ | {"bits": 8, "group_size": -1}, _gptq, 8, None, True, "Int8"),
    "gptq-8-grouped": (_GPTQ | {"bits": 8}, _gptq, 8, GROUP, True, "Int8"),
    "packed": (_PACK | _group_of(4, GROUP), _packed, 4, GROUP, True, "Int4"),
    "packed-asymmetric": (_PACK | _group_of(4, GROUP, False), _packed_asymmetric, 4, GROUP, False, "Int4"),
    "packed-asymmetric-plain-zeros": (
        *(_PACK | _group_of(4, GROUP, False), _packed_plain_zeros, 4, GROUP, False, "Int4"),
    ),
    "packed-ordered": (_PACK | _group_of(4, GROUP, actorder="group"), _packed, 4, GROUP, True, "Int4"),
    "packed-channel": (_PACK | _group_of(4, None), _packed, 4, None, True, "Int4"),
    "packed-8": (_PACK | _group_of(8, None), _packed, 8, None, True, "Int8"),
    "int": (_INT | _group_of(8, None), _int, 8, None, True, "Int8"),
    "int-w8a8": (_INT | _group_of(8, None, input_activations=_TOKENS), _int, 8, None, True, "W8A8"),
}


def _draw(
    weight: Tensor, bits: int, group: int | None, symmetric: bool
) -> tuple[Tensor, Tensor, Tensor, Tensor]:
    """Levels, zeros, scales of a weight, and the float weight that they mean. Zeros stay within 1 to 15: what
    GPTQ's first format can say."""
    rows, inputs = weight.shape
    grouped = weight.view(rows, -1, group or inputs)
    half, top = 1 << (bits - 1), (1 << bits) - 1
    scale = (grouped.abs().amax(-1) / (half - 1)).half().bfloat16().float()
    zero = torch.full(scale.shape, half)
    if not symmetric:
        zero = torch.randint(1, 15, scale.shape, generator=torch.Generator().manual_seed(3))
    levels = ((grouped / scale[..., None]).round() + zero[..., None]).clamp(0, top)
    meant = ((levels - zero[..., None]) * scale[..., None]).view(rows, inputs)
    return levels.view(rows, inputs).long(), zero, scale, meant


def _order_of_inputs(config: dict[str, Any], name: str, inputs: int) -> Tensor:
    """Which inputs are in the first group, the second …; the same for layers whose names are equally long, as
    are those of queries, keys and values, but not those of gate and up."""
    packing = packing_of({"quantization_config": config})
    if packing is None or not packing.ordered:
        return torch.arange(inputs)
    return torch.randperm(inputs, generator=torch.Generator().manual_seed(len(name)))


def _write(out: Path, plain: Path, form: str) -> Tensors:
    """The checkpoint in `plain` in a packed form; its weights as they are then meant, by name."""
    config, pack, bits, group, symmetric, _ = FORMS[form]
    tensors, meant = load_file(plain / "model.safetensors"), {}
    for name in [n for n in tensors if "_proj.weight" in n]:
        weight, at = tensors.pop(name), name.removesuffix("weight")
        order = _order_of_inputs(config, name, weight.shape[1])
        back = order.argsort()
        levels, zero, scale, ordered = _draw(weight[:, order], bits, group, symmetric)
        meant[name] = ordered[:, back]
        packed = pack(levels[:, back], zero, scale, bits)
        if not torch.equal(order, back):
            packed["g_idx" if pack is _gptq else "weight_g_idx"] = (back // (group or len(back))).int()
        tensors |= {at + key: value.contiguous() for key, value in packed.items()}
    for file in plain.iterdir():
        if file.suffix != ".safetensors":
            (out / file.name).write_bytes(file.read_bytes())
    _edit(out, quantization_config=config)
    save_file(tensors, out / "model.safetensors", metadata={"format": "pt"})
    return meant


def _edit(directory: Path, **values: Any) -> None:
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | values))


@pytest.fixture(scope="module")
def plain(tmp_path_factory: pytest.TempPathFactory, llama: Any, hf_tokenizer: Any) -> Path:
    path = tmp_path_factory.mktemp("plain")
    llama.reference.save_pretrained(path)
    hf_tokenizer.save_pretrained(path)
    return path


def _load(path: Path, **options: Any) -> LoadedModel:
    return load(ModelSource(path=path, **({"dtype": "float32"} | options)))


@pytest.mark.parametrize("form", FORMS)
def test_what_was_packed_computes(form: str, plain: Path, tmp_path: Path) -> None:
    meant = _write(tmp_path, plain, form)
    model, reference = _load(tmp_path), _load(plain).model
    for name, weight in meant.items():
        reference.get_submodule(name.removesuffix(".weight")).weight.copy_(weight)
    ids = torch.arange(3, 40)[None]
    with torch.inference_mode():
        got, want = model.model(ids).logits, reference(ids).logits
    # W8A8 rounds activations too.
    tolerance = 0.05 if FORMS[form][-1] == "W8A8" else 1e-4
    assert (got - want).norm() / want.norm() < tolerance
    assert model.packing is not None
    assert model.packing.kind == FORMS[form][-1]
    assert model.weight_bytes < sum(p.numel() * 4 for p in reference.parameters())


def test_each_form_is_another_identity(plain: Path, tmp_path: Path) -> None:
    found = {_load(plain).identity}
    for form in ("awq", "gptq", "packed", "int"):
        (tmp_path / form).mkdir()
        _write(tmp_path / form, plain, form)
        found.add(_load(tmp_path / form).identity)
    assert len(found) == 5


def test_quantised_files_are_never_quantised_again(plain: Path, tmp_path: Path) -> None:
    _write(tmp_path, plain, "awq")
    with pytest.raises(
        UnsupportedModel, match=r"quantization is Int8, but the files are quantised already \(awq"
    ):
        _load(tmp_path, quantization="Int8")
    with pytest.raises(UnsupportedModel, match="tensorParallel 2"):
        _load(tmp_path, num_ranks=2)


def _without(name: str) -> Callable[[Tensors], None]:
    def change(tensors: Tensors) -> None:
        for key in [k for k in tensors if k.endswith(name)]:
            del tensors[key]

    return change


def _ordered_by_activation(tensors: Tensors) -> None:
    for key in [k for k in tensors if k.endswith("g_idx")]:
        tensors[key] = tensors[key].flip(0).contiguous()


def _uneven_groups(tensors: Tensors) -> None:
    for key in [k for k in tensors if k.endswith("g_idx")]:
        tensors[key] = torch.zeros_like(tensors[key])


def _open_zero(tensors: Tensors) -> None:
    for key in [k for k in tensors if k.endswith("qzeros")]:
        tensors[key] = torch.full_like(tensors[key], -1)


def _packed_head(tensors: Tensors) -> None:
    rows = tensors["lm_head.weight"]
    levels, zero, scale, _ = _draw(rows[: rows.shape[0] // 8 * 8].float(), 4, GROUP, False)
    tensors |= {f"lm_head.{k}": v for k, v in _awq(levels, zero, scale, 4).items()}


def _stranger(tensors: Tensors) -> None:
    tensors["model.layers.0.mlp.experts.0.up_proj.qweight"] = torch.zeros(4, 4, dtype=torch.int32)


def _short(tensors: Tensors) -> None:
    key = "model.layers.0.mlp.down_proj.qweight"
    tensors[key] = tensors[key][:-1].contiguous()


@pytest.mark.parametrize(
    ("form", "change", "error", "says"),
    [
        ("awq", _packed_head, UnsupportedModel, "lm_head is quantised"),
        ("awq", _stranger, UnsupportedModel, "experts.0.up_proj.qweight"),
        ("awq", _without("down_proj.qweight"), CheckpointCorrupt, "down_proj is packed, but has no qweight"),
        ("packed-asymmetric", _without("weight_zero_point"), CheckpointCorrupt, "has no weight_zero_point"),
        ("awq", _short, CheckpointCorrupt, "down_proj"),
        ("gptq", _ordered_by_activation, CheckpointCorrupt, "g_idx"),
        ("gptq-asymmetric", _open_zero, CheckpointCorrupt, "save as gptq_v2"),
        ("gptq-ordered", _without("g_idx"), CheckpointCorrupt, "is packed, but has no g_idx"),
        ("gptq-ordered", _uneven_groups, CheckpointCorrupt, "g_idx does not make 32 inputs groups of 16"),
        ("packed-ordered", _without("weight_g_idx"), CheckpointCorrupt, "has no weight_g_idx"),
        ("packed", _without("weight_shape"), CheckpointCorrupt, "weight_shape"),
    ],
)
def test_tensors_that_do_not_fit_are_refused(
    form: str, change: Callable[[Tensors], None], error: type, says: str, plain: Path, tmp_path: Path
) -> None:
    _write(tmp_path, plain, form)
    tensors = load_file(tmp_path / "model.safetensors")
    change(tensors)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    with pytest.raises(error, match=says):
        _load(tmp_path)


def test_gptq_without_g_idx_is_in_order(plain: Path, tmp_path: Path) -> None:
    _write(tmp_path, plain, "gptq")
    want = _load(tmp_path)
    tensors = load_file(tmp_path / "model.safetensors")
    _without("g_idx")(tensors)
    save_file(tensors, tmp_path / "model.safetensors", metadata={"format": "pt"})
    ids = torch.arange(9)[None]
    with torch.inference_mode():
        assert torch.equal(_load(tmp_path).model(ids).logits, want.model(ids).logits)


def _weights(bits: int, **change: Any) -> dict[str, Any]:
    told = _group_of(bits, GROUP if bits == 4 else None)
    told["config_groups"]["group_0"]["weights"] |= change
    return told


@pytest.mark.parametrize(
    ("told", "field"),
    [
        ({"quant_method": "bitsandbytes"}, "quant_method"),
        ({}, "quant_method"),
        (_AWQ | {"bits": 8}, "bits"),
        (_AWQ | {"version": "gemv"}, "version"),
        (_AWQ | {"checkpoint_format": "gemv_fast"}, "checkpoint_format"),
        (_AWQ | {"backend": "llm-awq"}, "backend"),
        (_AWQ | {"group_size": "x"}, "group_size"),
        (_GPTQ | {"bits": 3}, "bits"),
        (_GPTQ | {"is_marlin_format": True}, "is_marlin_format"),
        (_GPTQ | {"pack_dtype": "int64"}, "pack_dtype"),
        (_GPTQ | {"format": "gptq_p"}, "checkpoint_format"),
        (_GPTQ | {"bits": 8, "sym": False}, "sym"),
        (_GPTQ | {"checkpoint_format": "marlin"}, "checkpoint_format"),
        (_PACK | _weights(4, num_bits=2), "config_groups.group_0.weights.num_bits"),
        (_PACK | _weights(4, type="float"), "config_groups.group_0.weights.type"),
        (_PACK | _weights(4, actorder="column"), "config_groups.group_0.weights.actorder"),
        (_PACK | _weights(4, strategy="block"), "config_groups.group_0.weights.strategy"),
        (_PACK | _weights(8, symmetric=False), "config_groups.group_0.weights.symmetric"),
        (_PACK | _group_of(4, GROUP, input_activations=_TOKENS), "config_groups.group_0.input_activations"),
        (
            _INT | _group_of(8, None, input_activations=_TOKENS | {"dynamic": False}),
            "input_activations.dynamic",
        ),
        (_INT | _group_of(8, None, output_activations=_TOKENS), "output_activations"),
        (_PACK | _group_of(4, GROUP) | {"kv_cache_scheme": {"num_bits": 8}}, "kv_cache_scheme"),
        (
            _PACK | _group_of(4, GROUP) | {"sparsity_config": {"format": "sparse-24-bitmask"}},
            "sparsity_config",
        ),
        (_PACK | {"config_groups": {}}, "config_groups"),
        (_PACK | _group_of(4, GROUP) | {"format": "float-quantized"}, "format"),
    ],
)
def test_what_is_not_understood_is_refused_by_its_field(told: dict[str, Any], field: str) -> None:
    with pytest.raises(UnsupportedModel, match=rf"quantization_config\.{field}|{field} of config\.json"):
        packing_of({"quantization_config": told})


def test_a_config_under_its_older_name_is_no_less_read(plain: Path, tmp_path: Path) -> None:
    _write(tmp_path, plain, "packed")
    want = _load(tmp_path)
    config = json.loads((tmp_path / "config.json").read_text())
    config["compression_config"] = config.pop("quantization_config")
    (tmp_path / "config.json").write_text(json.dumps(config))
    got, ids = _load(tmp_path), torch.arange(9)[None]
    assert got.packing == want.packing
    with torch.inference_mode():
        assert torch.equal(got.model(ids).logits, want.model(ids).logits)


def test_plain_weights_have_no_packing() -> None:
    assert packing_of({}) is None
    assert packing_of({"quantization_config": None}) is None
