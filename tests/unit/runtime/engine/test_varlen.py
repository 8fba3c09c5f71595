"""The CUDA runner's packing, kernel arguments and graphs, on a CPU: a plain function stands in for torch's
kernel, and calling it again for a replay. That proves nothing of CUDA itself (tests/gpu does)."""

from __future__ import annotations

import inspect
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.nn.attention.varlen import varlen_attn

from sluice_runtime.engine import attention, support, varlen
from sluice_runtime.engine.attention import UnsupportedAttention
from sluice_runtime.engine.plan import ScheduledChunk
from sluice_runtime.engine.types import EngineRequest, SamplingParams
from sluice_runtime.engine.varlen import PAGE_TOKENS, VarlenRunner, refusal
from unit.runtime.engine import test_oracle_mix as mix
from unit.runtime.engine.conftest import Oracle
from unit.runtime.engine.test_graphs import repeat

PAGE = 4
ARCHITECTURES = ["llama", "qwen3", "mistral-window", "gemma3-window", "mixtral"]


def plain_varlen(
    query: Tensor,
    key: Tensor,
    value: Tensor,
    cu_seq_q: Tensor,
    cu_seq_k: Tensor | None,
    max_q: int,
    max_k: int,
    *,
    scale: float,
    window_size: tuple[int, int],
    enable_gqa: bool,
    seqused_k: Tensor,
    block_table: Tensor,
) -> Tensor:
    """What torch documents of `varlen_attn` on pages, request by request, with what it demands asserted."""
    assert cu_seq_k is None
    assert key.shape[1] % PAGE == 0
    assert cu_seq_q.dtype == seqused_k.dtype == block_table.dtype == torch.int32
    assert block_table.is_contiguous()
    assert window_size[1] == 0
    assert enable_gqa == (query.shape[1] != key.shape[2])
    assert scale > 0
    assert int(seqused_k.max()) <= max_k <= block_table.shape[1] * key.shape[1]
    assert int(cu_seq_q.diff().max()) <= max_q
    assert int(cu_seq_q[-1]) == len(query)
    out = torch.empty(*query.shape[:2], value.shape[3], dtype=query.dtype)
    groups = query.shape[1] // key.shape[2]
    for row, context in enumerate(seqused_k.tolist()):
        first, end = int(cu_seq_q[row]), int(cu_seq_q[row + 1])
        blocks = block_table[row, : -(-context // key.shape[1])].long()
        k = key[blocks].flatten(0, 1)[:context].repeat_interleave(groups, 1)
        v = value[blocks].flatten(0, 1)[:context].repeat_interleave(groups, 1)
        scores = torch.einsum("qhd,khd->hqk", query[first:end], k) * scale
        # The last query is the last key's; the window counts the keys before a query.
        at = torch.arange(context - (end - first), context)[:, None]
        seen = torch.arange(context)[None, :]
        hidden = seen > at
        if window_size[0] >= 0:
            hidden |= seen < at - window_size[0]
        weights = scores.masked_fill(hidden, float("-inf")).softmax(-1)
        out[first:end] = torch.einsum("hqk,khd->qhd", weights, v)
    return out


def test_the_stand_in_has_the_kernels_parameters() -> None:
    real = inspect.signature(varlen_attn).parameters
    ours = inspect.signature(plain_varlen).parameters
    assert list(ours)[:7] == list(real)[:7]
    assert set(ours) <= set(real)


@pytest.fixture
def runner_of(monkeypatch: pytest.MonkeyPatch) -> Callable[..., VarlenRunner]:
    monkeypatch.setattr(attention, "varlen_attn", plain_varlen)
    monkeypatch.setattr(varlen, "refusal", lambda *_, **__: None)
    monkeypatch.setattr(varlen, "PAGE_TOKENS", PAGE)
    monkeypatch.setattr(VarlenRunner, "make_capture", lambda _: repeat)

    def make(model: Any, graphs: bool, max_num_seqs: int = 5) -> VarlenRunner:
        runner = VarlenRunner(model, PAGE)
        allocate = runner.allocate_kv

        def allocated(num_blocks: int) -> None:
            allocate(num_blocks)
            if graphs:
                runner.prepare(max_num_seqs, 256)

        runner.allocate_kv = allocated  # type: ignore[method-assign]
        return runner

    return make


@pytest.mark.parametrize("graphs", [False, True])
@pytest.mark.parametrize("architecture", ARCHITECTURES)
def test_any_mix_gives_what_generate_gives(
    architecture: str,
    graphs: bool,
    oracles: Callable[[str], Oracle],
    runner_of: Callable[..., VarlenRunner],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    oracle = oracles(architecture)
    runner = runner_of(oracle.model, graphs)
    replayed: list[int] = []
    if graphs:
        run = varlen.DecodeGraphs.run

        def counted(self: Any, chunks: Any) -> Tensor | None:
            found = run(self, chunks)
            is_check = chunks[0].request_id == ""  # of `prepare`
            replayed.append(0 if found is None or is_check else len(chunks))
            return found

        monkeypatch.setattr(varlen.DecodeGraphs, "run", counted)
    monkeypatch.setattr(mix, "ModelRunner", lambda *_: runner)
    for seed in range(2):
        rng = random.Random(seed)
        prompts = mix._prompts(rng, 7)
        requests = [
            EngineRequest(
                str(i), p, SamplingParams(max_tokens=mix.NUM_OUTPUT, temperature=0.0), "s", tenant=t
            )
            for i, (p, t) in enumerate(zip(prompts, "abababa", strict=True))
        ]
        output, seen = mix._serve(
            oracle.model,
            requests,
            rng,
            {"3"},
            block_size=PAGE,
            max_num_seqs=5,
            max_batch_tokens=20,
            num_blocks=22,
        )
        assert seen["preempted"] + seen["hits"] > 0
        for request in requests:
            oracle.assert_same(request.prompt_ids, output[request.request_id])
    assert not graphs or max(replayed) > 2


def test_the_self_check_passes_and_sees_a_wrong_window(
    oracles: Callable[[str], Oracle], runner_of: Callable[..., VarlenRunner], monkeypatch: pytest.MonkeyPatch
) -> None:
    runner = runner_of(oracles("mistral-window").model, True)
    runner.allocate_kv(64)
    support.check_answers(runner, 64)
    monkeypatch.setattr(
        attention, "varlen_attn", lambda *a, **k: plain_varlen(*a, **{**k, "window_size": (2, 0)})
    )
    with pytest.raises(UnsupportedAttention, match="computed in pages"):
        support.check_answers(runner, 64)


def test_padding_touches_nobodys_kv(llama: Oracle, runner_of: Callable[..., VarlenRunner]) -> None:
    runner = runner_of(llama.model, True)
    runner.allocate_kv(8)
    cache = runner._cache
    assert cache is not None
    assert cache.num_blocks == 9
    for pages in cache.keys:
        pages[:8].fill_(7.0)
    runner.execute([ScheduledChunk(str(i), [i], 0, [i], True) for i in range(3)])  # padded to 4
    for pages in cache.keys:
        assert (pages[3:8] == 7.0).all()
        assert (pages[:3, 1:] == 7.0).all()


def test_what_can_not_be_captured_runs_all_the_same(
    llama: Oracle, runner_of: Callable[..., VarlenRunner], monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(_: Callable[[], Tensor]) -> Any:
        raise RuntimeError("operation not permitted when stream is capturing")

    runner = runner_of(llama.model, False)
    runner.allocate_kv(8)
    monkeypatch.setattr(VarlenRunner, "make_capture", lambda _: refuse)
    runner.prepare(4, 16)
    logits, _ = runner.execute([ScheduledChunk("a", [5], 0, [0], True)])
    with torch.inference_mode():
        want = llama.reference(torch.tensor([[5]])).logits[0]
    assert torch.allclose(logits, want, atol=1e-4)


def test_a_capture_that_went_wrong_unnoticed_is_not_used(
    llama: Oracle, runner_of: Callable[..., VarlenRunner], monkeypatch: pytest.MonkeyPatch
) -> None:
    def nothing_was_captured(compute: Callable[[], Tensor]) -> tuple[Callable[[], object], Tensor]:
        return lambda: None, compute().clone()

    runner = runner_of(llama.model, False)
    runner.allocate_kv(8)
    monkeypatch.setattr(VarlenRunner, "make_capture", lambda _: nothing_was_captured)
    runner.prepare(6, 16)
    assert runner._graphs is None
    monkeypatch.setattr(VarlenRunner, "make_capture", lambda _: repeat)
    runner.prepare(6, 16)
    assert runner._graphs is not None


@pytest.mark.parametrize(
    ("device", "dtype", "dims", "options", "says"),
    [
        ("cuda", torch.bfloat16, (64, 64), {}, None),
        ("cuda", torch.float16, (256, 256), {}, None),
        ("cpu", torch.bfloat16, (64, 64), {}, "no kernel for cpu"),
        ("cuda", torch.float32, (64, 64), {}, "half precision"),
        ("cuda", torch.bfloat16, (64, 64), {"has_softcap": True}, "soft cap"),
        ("cuda", torch.bfloat16, (64, 64), {"is_quantized": True}, "own dtype"),
        ("cuda", torch.bfloat16, (68, 68), {}, "width 68"),
        ("cuda", torch.bfloat16, (512, 512), {}, "width 512"),
        ("cuda", torch.bfloat16, (192, 128), {}, "width 192 and 128"),
    ],
)
def test_what_the_kernel_can_not_do_has_its_reason(
    device: str, dtype: torch.dtype, dims: tuple[int, int], options: dict[str, bool], says: str | None
) -> None:
    told = refusal(device, dtype, [(2, *dims)], **{"has_softcap": False, "is_quantized": False, **options})
    assert told == says if says is None else says in (told or "")


def test_blocks_that_the_kernel_can_not_read_are_refused_by_name(
    llama: Oracle, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(varlen, "refusal", lambda *_, **__: None)
    with pytest.raises(UnsupportedAttention, match=rf"engine.blockSize 16: .* multiple of {PAGE_TOKENS}"):
        VarlenRunner(llama.model, 16)


def test_on_a_cpu_it_is_the_plain_runner(oracles: Callable[[str], Oracle]) -> None:
    for architecture in ("llama", "gemma2-softcap"):
        runner = VarlenRunner(oracles(architecture).model, PAGE)
        assert runner.has_softcap == (architecture == "gemma2-softcap")
        runner.allocate_kv(16)
        support.check_answers(runner, 16)
        assert runner._cache is not None
        assert runner._cache.num_blocks == 16
