"""A fused decoder gives what transformers' modules give, to the same bits however a prompt is cut."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from sluice_runtime.engine import native
from sluice_runtime.engine.attention import PagedCache
from sluice_runtime.engine.fused import FusedDecoder, NotFused
from sluice_runtime.engine.linear import pack_bfloat16, quantize
from sluice_runtime.engine.pages import FORMATS
from sluice_runtime.engine.plan import ScheduledChunk
from sluice_runtime.engine.quantized import quantize_int4, quantize_int8
from sluice_runtime.engine.runner import ModelRunner
from sluice_runtime.engine.types import KvCacheDtype

pytestmark = [
    pytest.mark.skipif(native.library() is None, reason="no processor or library for the kernels"),
    pytest.mark.usefixtures("multiplied"),
]

_SIZES: dict[str, Any] = {
    "vocab_size": 300,
    "hidden_size": 96,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 6,
    "num_key_value_heads": 2,
    "head_dim": 32,
    "max_position_embeddings": 512,
    "initializer_range": 0.2,
    "bos_token_id": None,
    "eos_token_id": None,
    "pad_token_id": None,
}
DECODERS: dict[str, tuple[str, dict[str, Any]]] = {
    "llama": ("Llama", {}),
    "llama, untied, biases": ("Llama", {"attention_bias": True, "tie_word_embeddings": False}),
    "llama, no groups": ("Llama", {"num_key_value_heads": 6}),
    "llama, heads of 48": ("Llama", {"head_dim": 48}),
    "llama, heads of 128": ("Llama", {"head_dim": 128, "num_attention_heads": 2, "num_key_value_heads": 1}),
    "llama3 rope": (
        "Llama",
        {
            "rope_parameters": {
                "rope_type": "llama3",
                "rope_theta": 1e4,
                "factor": 4.0,
                "low_freq_factor": 1.0,
                "high_freq_factor": 4.0,
                "original_max_position_embeddings": 64,
            }
        },
    ),
    "mistral": ("Mistral", {"sliding_window": None}),
    "mistral, window": ("Mistral", {"sliding_window": 70}),
    "qwen2": ("Qwen2", {}),
    "qwen3": ("Qwen3", {}),
}
PROMPT = [(7 * i + i * i) % 300 for i in range(200)]
QUANTISED = [KvCacheDtype.INT8, KvCacheDtype.FP8]


def _model(name: str, quantization: str | None = None) -> Any:
    """In bfloat16, norms and biases random too, laid out to compute."""
    model = _plain_model(name)
    if quantization is None:
        pack_bfloat16(model)
    else:
        quantize(model, quantization)
    return model


def _plain_model(name: str) -> Any:
    kind, options = DECODERS[name]
    config = getattr(transformers, f"{kind}Config")(**{**_SIZES, **options})
    torch.manual_seed(3)
    model = getattr(transformers, f"{kind}ForCausalLM")(config).bfloat16().eval().requires_grad_(False)
    for parameter in model.parameters():
        if parameter.dim() == 1:
            parameter.add_(torch.randn_like(parameter) * 0.1)
    return model


def _runner(model: Any, block_size: int = 16, kv: KvCacheDtype = KvCacheDtype.AUTO) -> ModelRunner:
    runner = ModelRunner(model, block_size, kv)
    runner.allocate_kv(64 * 16 // block_size)
    return runner


def _by_modules(runner: ModelRunner) -> ModelRunner:
    """Attention and pages by torch's kernels too."""
    assert runner._cache is not None
    runner._fused = None
    runner._cache.native = [None] * len(runner._cache.native)
    return runner


def _all_logits(runner: ModelRunner, tokens: list[int], cuts: list[int]) -> Tensor:
    """Of every position, the prompt computed in chunks that end at `cuts`; a stranger is in each step."""
    rows, start = [], 0
    size = runner.block_size
    table = list(range(3, 3 + -(-len(tokens) // size)))
    stranger = [table[-1] + 1 + i for i in range(-(-5 // size))]
    for end in [*cuts, len(tokens)]:
        if end == start:
            continue
        drafted = end - start - 1
        chunk = ScheduledChunk("a", tokens[start:end], start, table, True, drafted)
        other = ScheduledChunk("b", [1, 2, 3, 4, 5], 0, stranger, True)
        logits, rows_of = runner.execute([other, chunk] if end % 2 else [chunk, other])
        rows += [row.float() for row, whose in zip(logits, rows_of, strict=True) if whose == "a"]
        start = end
    return torch.stack(rows)


@pytest.mark.parametrize("name", sorted(DECODERS))
@torch.inference_mode()
def test_whole_models(name: str) -> None:
    model = _model(name)
    fused = _runner(model)
    assert fused._fused is not None
    got = _all_logits(fused, PROMPT, [])
    want = _all_logits(_by_modules(_runner(model)), PROMPT, [])
    exact_logits = _plain_model(name).float()(input_ids=torch.tensor([PROMPT])).logits[0]
    apart, modules_apart = ((x - exact_logits).norm() / exact_logits.norm() for x in (got, want))
    # Both are rounded; ours, rounding less often, is at most a little farther from the truth.
    assert apart < 0.05
    assert apart < 1.1 * modules_apart


@pytest.mark.parametrize("kv", QUANTISED)
@pytest.mark.parametrize("name", ["llama", "llama, heads of 48", "mistral, window", "qwen2", "qwen3"])
@torch.inference_mode()
def test_quantised_pages(name: str, kv: KvCacheDtype) -> None:
    model = _model(name)
    fused = _runner(model, kv=kv)
    assert fused._fused is not None
    got = _all_logits(fused, PROMPT, [])
    want = _all_logits(_by_modules(_runner(model, kv=kv)), PROMPT, [])
    plain = _all_logits(_runner(model), PROMPT, [])
    exact_logits = _plain_model(name).float()(input_ids=torch.tensor([PROMPT])).logits[0]
    apart, modules_apart = ((x - exact_logits).norm() / exact_logits.norm() for x in (got, want))
    assert 0 < (got - plain).norm() < (0.06 if kv is KvCacheDtype.INT8 else 0.2) * plain.norm()
    assert apart < 1.1 * modules_apart


@pytest.mark.parametrize("kv", QUANTISED)
@torch.inference_mode()
def test_pages_hold_what_torch_would_store(kv: KvCacheDtype) -> None:
    """The first layer's KV does not depend on how KV is kept: here it is that of plain pages, encoded."""
    model, page_format = _model("qwen3"), FORMATS[kv]
    runners = [_runner(model), _runner(model, kv=kv)]
    for runner in runners:
        _all_logits(runner, PROMPT[:50], [20])
    plain, quantised = (runner._cache for runner in runners)
    assert page_format is not None
    assert plain is not None
    assert quantised is not None
    for pages, stored, scales in (
        (plain.keys_by_head[0], quantised.keys_by_head[0], quantised.key_scales[0]),
        (plain.values_by_head[0], quantised.values_by_head[0], quantised.value_scales[0]),
    ):
        levels, scale = page_format.encode(pages)
        written = pages.any(dim=-1)
        assert scales is not None
        assert written.sum() == 2 * 55
        assert torch.equal(stored.view(torch.int8)[written], levels.view(torch.int8)[written])
        assert torch.equal(scales[written], scale[written])


@pytest.mark.parametrize("kv", list(KvCacheDtype))
@torch.inference_mode()
def test_pages_of_a_prefix_are_used_again(kv: KvCacheDtype) -> None:
    runner = _runner(_model("llama"), kv=kv)
    want, _ = runner.execute([ScheduledChunk("a", PROMPT[:70], 0, [0, 1, 2, 3, 4], True)])
    got, _ = runner.execute([ScheduledChunk("b", PROMPT[48:70], 48, [0, 1, 2, 9, 8], True)])
    assert torch.equal(got, want)


@pytest.mark.parametrize("quantization", ["Int8", "Int4", "W8A8"])
@torch.inference_mode()
def test_quantised_models(quantization: str) -> None:
    model = _model("qwen2", quantization)
    fused = _runner(model)
    assert fused._fused is not None
    got, want = _all_logits(fused, PROMPT, []), _all_logits(_by_modules(_runner(model)), PROMPT, [])
    exact = _plain_model("qwen2").float()
    for name, module in exact.named_modules():
        if isinstance(module, torch.nn.Linear):
            quantizer = quantize_int4 if quantization == "Int4" and name != "lm_head" else quantize_int8
            module.weight.copy_(quantizer(module.weight.bfloat16()).dequantize())
    exact_logits = exact(input_ids=torch.tensor([PROMPT])).logits[0]
    apart, modules_apart = ((x - exact_logits).norm() / exact_logits.norm() for x in (got, want))
    assert apart < (0.2 if quantization == "W8A8" else 0.1)
    assert apart < 1.15 * modules_apart


@pytest.mark.parametrize(
    ("quantization", "kv"),
    [
        *((kind, KvCacheDtype.AUTO) for kind in (None, "Int8", "Int4", "W8A8")),
        *((None, kv) for kv in QUANTISED),
    ],
)
@pytest.mark.parametrize("name", ["llama", "mistral, window"])
@settings(max_examples=12)
@given(
    cuts=st.lists(st.integers(1, 159), max_size=6).map(sorted),
    block_size=st.sampled_from([1, 4, 16, 48]),
)
@torch.inference_mode()
def test_bits_do_not_depend_on_chunks_neighbours_or_pages(
    name: str, quantization: str | None, kv: KvCacheDtype, cuts: list[int], block_size: int
) -> None:
    model = _MODELS.setdefault((name, quantization), _model(name, quantization))
    whole = _all_logits(_runner(model, kv=kv), PROMPT[:160], [])
    assert torch.equal(_all_logits(_runner(model, block_size, kv), PROMPT[:160], cuts), whole)


_MODELS: dict[tuple[str, str | None], Any] = {}


@pytest.mark.parametrize("kv", list(KvCacheDtype))
@torch.inference_mode()
def test_either_way_goes_on_where_the_other_left_off(kv: KvCacheDtype) -> None:
    runner = _runner(_model("llama"), kv=kv)
    assert runner._cache is not None
    fused, bound = runner._fused, runner._cache.native
    table = list(range(10))
    prompt = [ScheduledChunk("a", PROMPT[:100], 0, table, True)]
    token = [ScheduledChunk("a", [PROMPT[100]], 100, table, True)]
    runner.execute(prompt)
    got, _ = runner.execute(token)
    _by_modules(runner)
    by_modules, _ = runner.execute(token)
    assert (got - by_modules.float()).norm() < 0.05 * got.norm()
    runner.execute(prompt)
    by_modules, _ = runner.execute(token)
    runner._fused, runner._cache.native = fused, bound
    got, _ = runner.execute(token)
    assert (got - by_modules.float()).norm() < 0.05 * got.norm()


@pytest.mark.parametrize("kv", list(KvCacheDtype))
@torch.inference_mode()
def test_what_strangers_left_in_a_page_is_never_read(kv: KvCacheDtype) -> None:
    runner = _runner(_model("llama"), kv=kv)
    want, _ = runner.execute([ScheduledChunk("a", PROMPT[:21], 0, [5, 9], True)])
    assert runner._cache is not None
    for pages in runner._cache.storage():
        pages.view(torch.uint8).fill_(0xFF)  # no number in bfloat16, nor in e4m3
    got, _ = runner.execute([ScheduledChunk("a", PROMPT[:21], 0, [5, 9], True)])
    assert torch.equal(got, want)


@torch.inference_mode()
def test_nothing_sampled_and_ids_out_of_range() -> None:
    runner = _runner(_model("llama"))
    logits, rows = runner.execute([ScheduledChunk("a", PROMPT[:8], 0, [0], False)])
    assert logits.shape == (0, 300)
    assert rows == []
    for token in (-1, 300):
        with pytest.raises(ValueError, match="beyond the vocabulary"):
            runner.execute([ScheduledChunk("a", [token], 0, [0], True)])
    with pytest.raises(ValueError, match="beyond the context"):
        runner.execute([ScheduledChunk("a", [1], 512, list(range(33)), True)])


def _refused(model: Any) -> str:
    runner = _runner(model)
    assert runner._fused is None
    assert runner._cache is not None
    with pytest.raises(NotFused) as caught:
        FusedDecoder(model, {}, runner._cache)
    return str(caught.value)


def test_what_is_not_known_to_the_letter_runs_by_its_modules(monkeypatch: pytest.MonkeyPatch) -> None:
    class Other(transformers.LlamaForCausalLM):
        pass

    other = _model("llama")
    other.__class__ = Other
    assert "Other has no fused form" in _refused(other)
    hooked = _model("llama")
    hooked.model.layers[1].register_forward_hook(lambda *_: None)
    assert "hooks" in _refused(hooked)
    layer = _model("llama")
    layer.model.layers[1].__class__ = type("Other", (type(layer.model.layers[1]),), {})
    assert "another class" in _refused(layer)
    for heads, width, dtype in ((2, 32, torch.float32), (1, 32, torch.bfloat16), (2, 64, torch.bfloat16)):
        cache = PagedCache([(heads, width, width)] * 3, 4, 16, dtype, "cpu")
        with pytest.raises(NotFused, match="KV cache"):
            FusedDecoder(_model("llama"), {}, cache)
    act = _model("llama")
    act.config.hidden_act = "gelu"
    assert "gelu" in _refused(act)
    odd = _model("llama")
    odd.config.intermediate_size = 100
    assert "not what kernels take" in _refused(odd)
    monkeypatch.setattr(native, "library", lambda: None)
    assert "no fused form" in _refused(_model("llama"))


@pytest.mark.parametrize("num_threads", [1, 2, 3])
@torch.inference_mode()
def test_bits_do_not_depend_on_threads(num_threads: int, threads: Callable[[int], None]) -> None:
    model = _MODELS.setdefault(("llama", None), _model("llama"))
    want = _all_logits(_runner(model), PROMPT, [50])
    threads(num_threads)
    assert torch.equal(_all_logits(_runner(model), PROMPT, [50]), want)
