"""The C kernels on pages of every format: they store what pages.py stores, and read what it reads."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch
import transformers
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from sluice_runtime.engine import native
from sluice_runtime.engine.attention import (
    KERNELS,
    AttentionOptions,
    DecodeBucket,
    PagedBatch,
    PagedCache,
    PrefillSpan,
    oracle,
    select_kernel,
)
from sluice_runtime.engine.native_pages import NativePages, Spans, bind
from sluice_runtime.engine.pages import FORMATS, PageFormat
from sluice_runtime.engine.plan import ScheduledChunk
from sluice_runtime.engine.runner import ModelRunner
from sluice_runtime.engine.types import KvCacheDtype

pytestmark = [
    pytest.mark.skipif(native.library() is None, reason="no processor or library for the kernels"),
    pytest.mark.usefixtures("multiplied"),
]

KINDS = list(KvCacheDtype)
QUANTISED = [KvCacheDtype.INT8, KvCacheDtype.FP8]
_CONTEXT = 150


def _format(kind: KvCacheDtype) -> PageFormat:
    found = FORMATS[kind]
    assert found is not None
    return found


def _cache(kind: KvCacheDtype, kv_heads: int, dim: int, block_size: int, num_blocks: int) -> PagedCache:
    return PagedCache([(kv_heads, dim, dim)], num_blocks, block_size, torch.bfloat16, "cpu", FORMATS[kind])


def _pages(cache: PagedCache) -> NativePages:
    pages = cache.native[0]
    assert pages is not None
    return pages


# -- what is stored ------------------------------------------------------------------------------------------


def _assert_stored_alike(kind: KvCacheDtype, rows: Tensor) -> None:
    """`rows` [n, dim] as keys, reversed as values: bytes and scales of the kernel and of pages.py."""
    cache = _cache(kind, 1, rows.shape[1], 1, len(rows))
    slots = torch.arange(len(rows)).flip(0)
    _pages(cache).write(rows[:, None], rows.flip(0)[:, None], slots)
    stored, scales = _format(kind).encode(rows)
    key_scales, value_scales = cache.key_scales[0], cache.value_scales[0]
    assert key_scales is not None
    assert value_scales is not None
    assert torch.equal(key_scales[0, :, 0].view(torch.int16), scales.flip(0).view(torch.int16))
    assert torch.equal(value_scales[0, :, 0].view(torch.int16), scales.view(torch.int16))
    assert torch.equal(cache.keys_by_head[0][0, :, 0].view(torch.uint8), stored.flip(0).view(torch.uint8))
    assert torch.equal(cache.values_by_head[0][0, :, 0].view(torch.uint8), stored.view(torch.uint8))


@pytest.mark.parametrize("kind", QUANTISED)
def test_every_number_is_stored_as_torch_stores_it(kind: KvCacheDtype) -> None:
    """Each magnitude of bfloat16 as the largest of its head; and each below, where its levels are all met."""
    finite = torch.arange(0x7F80, dtype=torch.int16).view(torch.bfloat16)
    part = torch.linspace(-1, 1, 31)[None]
    below = (finite.float()[:, None] * part).bfloat16()
    _assert_stored_alike(kind, torch.cat([finite[:, None], below], dim=1))
    # Ties between levels: the scale is 1, or whatever rounds to it.
    top = _format(kind).largest
    halves = torch.arange(-2 * int(top), 2 * int(top) + 1).float() / 2
    tiny = torch.arange(-64, 64).float() / 2**13
    values = torch.cat([halves, tiny])
    values = torch.cat([values, values.new_zeros(-len(values) % 15)]).view(-1, 15)
    _assert_stored_alike(kind, torch.cat([torch.full((len(values), 1), top), values], dim=1).bfloat16())


@pytest.mark.parametrize("kind", QUANTISED)
@settings(max_examples=60)
@given(
    seed=st.integers(0, 10**6),
    dim=st.sampled_from([16, 48, 64, 256]),
    spread=st.sampled_from([1e-38, 1e-12, 1e-3, 1.0, 1e30]),
    skew=st.integers(1, 5),
)
def test_rows_are_stored_as_torch_stores_them(
    kind: KvCacheDtype, seed: int, dim: int, spread: float, skew: int
) -> None:
    torch.manual_seed(seed)
    rows = torch.randn(9, dim) ** skew * spread
    rows[0] = 0
    _assert_stored_alike(kind, rows.bfloat16())


@pytest.mark.parametrize("kind", QUANTISED)
@pytest.mark.parametrize("odd", [float("nan"), float("inf"), float("-inf")])
def test_what_is_no_number_stays_none(kind: KvCacheDtype, odd: float) -> None:
    cache = _cache(kind, 1, 16, 1, 2)
    rows = torch.ones(2, 1, 16).bfloat16()
    rows[0, 0, 3] = odd
    _pages(cache).write(rows, rows, torch.arange(2))
    keys, _ = cache.read(0, torch.arange(2), torch.bfloat16)
    assert not keys[0, 0].isfinite().any()
    assert torch.equal(keys[0, 1], torch.ones(16).bfloat16())


# -- what is read --------------------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Case:
    kind: KvCacheDtype
    groups: int
    kv_heads: int
    dim: int
    block_size: int
    window: int | None


_CASES = st.builds(
    _Case,
    kind=st.sampled_from(KINDS),
    groups=st.sampled_from([1, 3, 8, 60]),
    kv_heads=st.sampled_from([1, 2]),
    dim=st.sampled_from([16, 48, 64, 80, 128]),
    block_size=st.sampled_from([1, 7, 16, 256]),
    window=st.one_of(st.none(), st.integers(1, _CONTEXT)),
)


class _Request:
    """One request's queries, keys and values, and the blocks that hold them, backwards."""

    def __init__(self, case: _Case, seed: int, length: int, first_block: int) -> None:
        torch.manual_seed(seed)
        self.case, self.length = case, length
        self.query = torch.randn(length, case.groups * case.kv_heads, case.dim).bfloat16()
        self.key, self.value = (torch.randn(length, case.kv_heads, case.dim).bfloat16() for _ in "kv")
        self.value *= torch.logspace(-2, 2, length)[:, None, None]
        self.blocks = list(range(first_block, first_block - (-length // case.block_size)))[::-1]

    def write(self, pages: NativePages, start: int, end: int) -> None:
        at = range(start, end)
        size = self.case.block_size
        slots = torch.tensor([self.blocks[p // size] * size + p % size for p in at])
        pages.write(self.key[start:end], self.value[start:end], slots)


def _attend(pages: NativePages, window: int | None, parts: list[tuple[_Request, int, int]]) -> list[Tensor]:
    """Queries `start` to `end` of each request, in one call."""
    rows, tables, first = [], [], 0
    for request, start, end in parts:
        rows.append((first, end - start, start, len(tables)))
        tables += request.blocks
        first += end - start
    spans = Spans(*(torch.tensor(x, dtype=torch.int32) for x in (rows, tables)))
    query = torch.cat([request.query[start:end] for request, start, end in parts])
    scaling = query.shape[-1] ** -0.5
    return list(pages.attend(query, spans, scaling, window).split([end - start for _, start, end in parts]))


def _exact(cache: PagedCache, request: _Request) -> Tensor:
    """In float32, of what the pages hold: [length, heads, dim]."""
    read = cache.read(0, torch.tensor(request.blocks), torch.float32)
    k, v = (kv[:, : request.length].float() for kv in read)
    groups, window = request.case.groups, request.case.window
    k, v = k.repeat_interleave(groups, 0), v.repeat_interleave(groups, 0)
    scores = request.query.float().transpose(0, 1) @ k.transpose(1, 2) * request.case.dim**-0.5
    at = torch.arange(request.length)
    hidden = at[None] > at[:, None]
    if window is not None:
        hidden |= at[None] <= at[:, None] - window
    return (scores.masked_fill(hidden, float("-inf")).softmax(-1) @ v).transpose(0, 1)


@settings(max_examples=80)
@given(
    case=_CASES,
    lengths=st.tuples(st.integers(1, _CONTEXT), st.integers(1, _CONTEXT)),
    cuts=st.lists(st.integers(1, _CONTEXT - 1), max_size=5),
    seed=st.integers(0, 10**6),
)
def test_reads_what_pages_hold_to_the_same_bits_however_it_is_called(
    case: _Case, lengths: tuple[int, int], cuts: list[int], seed: int
) -> None:
    width = -(-_CONTEXT // case.block_size)
    cache = _cache(case.kind, case.kv_heads, case.dim, case.block_size, 2 * width)
    for tensor in cache.storage():  # what strangers left: 0xff is no number in any of them
        tensor.view(torch.uint8).fill_(0xFF)
    pages = _pages(cache)
    one, other = (_Request(case, seed + i, length, i * width) for i, length in enumerate(lengths))
    for request in (one, other):
        request.write(pages, 0, request.length)
    whole = _attend(pages, case.window, [(one, 0, one.length), (other, 0, other.length)])
    for request, got in zip((one, other), whole, strict=True):
        want = _exact(cache, request)
        assert float((got.float() - want).norm() / want.norm()) < 0.01
    # Again, written and asked for in pieces, each beside some of the other's.
    for tensor in cache.storage():
        tensor.view(torch.uint8).fill_(0xFF)
    other.write(pages, 0, other.length)
    ends = sorted({c for c in cuts if c < one.length} | {one.length})
    for start, end in zip([0, *ends], ends, strict=False):
        one.write(pages, start, end)
        stranger = (other, min(start, other.length - 1), other.length)
        parts = [(one, start, end), stranger] if end % 2 else [stranger, (one, start, end)]
        got = _attend(pages, case.window, parts)[0 if end % 2 else 1]
        assert torch.equal(got, whole[0][start:end])


@pytest.mark.parametrize("kind", QUANTISED)
def test_every_level_is_read_as_what_it_is(kind: KvCacheDtype) -> None:
    """One key has all the weight, so what comes out is its value."""
    cache = _cache(kind, 1, 256, 1, 1)
    for pages in (cache.keys_by_head[0], cache.values_by_head[0]):
        pages.view(torch.uint8).copy_(torch.arange(256, dtype=torch.uint8))
    levels = cache.values_by_head[0].view(256)
    # e4m3 has two bytes that are no number; they are never stored.
    levels.view(torch.uint8)[levels.float().isnan()] = 0
    for scales in (cache.key_scales[0], cache.value_scales[0]):
        assert scales is not None
        scales.fill_(0.25)
    spans = Spans(torch.tensor([[0, 1, 0, 0]], dtype=torch.int32), torch.zeros(1, dtype=torch.int32))
    got = _pages(cache).attend(torch.zeros(1, 1, 256).bfloat16(), spans, 1.0, None)
    assert torch.equal(got.view(256).float(), levels.float() / 4)


@pytest.mark.parametrize("window", [None, 9])
@pytest.mark.parametrize("kind", KINDS)
def test_kernels_of_one_table_agree(kind: KvCacheDtype, window: int | None) -> None:
    """On a batch as the runner makes it: two single tokens in a bucket, one of them padded, and a chunk."""
    torch.manual_seed(1)
    cache = _cache(kind, 2, 32, 4, 20)
    tables = [list(range(5)), list(range(5, 8)), list(range(8, 12))]
    starts, sizes = [17, 9, 3], [1, 1, 10]
    cache.batch = _batch(list(range(80)), [], [])
    cache.update(*(torch.randn(1, 2, 80, 32).bfloat16() for _ in "kv"), 0)
    bias = torch.zeros(2, 1, 20).bfloat16()
    bias[0, :, 18:] = bias[1, :, 10:] = float("-inf")
    padded = torch.tensor(tables[0] + tables[1] + [tables[1][0]] * 2)
    slots = [
        t[p // 4] * 4 + p % 4
        for t, start, size in zip(tables, starts, sizes, strict=True)
        for p in range(start, start + size)
    ]
    cache.batch = _batch(
        slots,
        [DecodeBucket(0, 2, 5, padded, bias, [18, 10])],
        [PrefillSpan(2, 10, 3, torch.tensor(tables[2]))],
    )
    query = torch.randn(1, 4, 12, 32).bfloat16()
    key, value = cache.update(*(torch.randn(1, 2, 12, 32).bfloat16() for _ in "kv"), 0)
    options = AttentionOptions(32**-0.5, window)
    assert select_kernel(query, options, _pages(cache)) is KERNELS["native"]
    names = ["native", "oracle"] if window else ["native", "oracle", "matmul"]
    native_, *others = (KERNELS[name](query, key, value, cache, 0, options).float() for name in names)
    for other in others:
        assert float((native_ - other).norm() / other.norm()) < 0.02


def _batch(slots: list[int], decodes: list[DecodeBucket], prefills: list[PrefillSpan]) -> PagedBatch:
    return PagedBatch(torch.tensor(slots), None, decodes, prefills, max_queries=10, max_context=18)


@pytest.mark.parametrize("window", [None, 8])
@pytest.mark.parametrize("kind", KINDS)
@torch.inference_mode()
def test_models_run_by_their_modules_attend_here_too(
    kind: KvCacheDtype, window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    sizes = {"hidden_size": 64, "num_attention_heads": 4, "num_key_value_heads": 2, "sliding_window": window}
    sizes |= {"vocab_size": 300, "intermediate_size": 64, "num_hidden_layers": 2, "initializer_range": 0.2}
    torch.manual_seed(5)
    model = transformers.Phi3ForCausalLM(transformers.Phi3Config(**sizes, pad_token_id=0)).bfloat16().eval()
    calls = 0

    def counted(self: NativePages, *arguments: Any) -> Tensor:
        nonlocal calls
        calls += 1
        return attend(self, *arguments)

    attend = NativePages.attend
    monkeypatch.setattr(NativePages, "attend", counted)
    tokens = [(7 * i + 3) % 300 for i in range(60)]
    logits = []
    for is_native in (True, False):
        runner = ModelRunner(model, 4, kind)
        runner.allocate_kv(40)
        assert runner._fused is None
        assert runner._cache is not None
        if not is_native:
            runner._cache.native = [None, None]
        for start, end in ((0, 20), (20, 50), (50, 59)):
            runner.execute([ScheduledChunk("a", tokens[start:end], start, list(range(15)), True)])
        other = ScheduledChunk("b", [5, 6, 7], 0, [20], True)
        got, owners = runner.execute([other, ScheduledChunk("a", tokens[59:], 59, list(range(15)), True)])
        logits.append(got[owners.index("a")].float())
    assert calls == 2 * 4
    assert float((logits[0] - logits[1]).norm() / logits[1].norm()) < 0.05


def test_what_the_kernel_does_not_take_goes_elsewhere() -> None:
    query = torch.zeros(1, 4, 1, 32).bfloat16()
    pages = _pages(_cache(KvCacheDtype.INT8, 2, 32, 4, 2))
    plain = AttentionOptions(1.0)
    assert select_kernel(query, AttentionOptions(1.0, softcap=5.0), pages) is oracle
    assert select_kernel(query.float(), plain, pages) is KERNELS["matmul"]
    assert select_kernel(torch.zeros(1, 130, 1, 32).bfloat16(), plain, pages) is KERNELS["matmul"]
    assert select_kernel(query, plain, None) is KERNELS["matmul"]
    assert PagedCache([(2, 32, 32)], 2, 4, torch.float32, "cpu", FORMATS[KvCacheDtype.INT8]).native == [None]
    for key_dim, value_dim in ((32, 16), (24, 24), (272, 272)):
        keys, values = (torch.zeros(2, 2, 4, dim).bfloat16() for dim in (key_dim, value_dim))
        assert bind(keys, values, None) is None
    assert bind(torch.zeros(2, 2, 4, 32), torch.zeros(2, 2, 4, 32), None) is None
