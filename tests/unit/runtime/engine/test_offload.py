"""Host memory as the prefix cache's second tier: the policy on shadow memory, the copying, whole answers."""

from __future__ import annotations

import asyncio
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest
import torch
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule

from sluice_runtime.engine.attention import PagedCache
from sluice_runtime.engine.blocks import ROOT_KEY, BlockManager, block_key
from sluice_runtime.engine.engine import Engine
from sluice_runtime.engine.host_pool import HostPool
from sluice_runtime.engine.host_tier import NO_MOVES, KvMoves
from sluice_runtime.engine.pages import FORMATS
from sluice_runtime.engine.types import EngineConfig, EngineRequest, KvCacheDtype
from sluice_runtime.models import OutOfMemory
from unit.runtime.engine.conftest import Oracle

SIZE = 2


def _keys(scope: str, tokens: Sequence[int]) -> list[bytes]:
    keys: list[bytes] = []
    for i in range(len(tokens) // SIZE):
        parent = keys[-1] if keys else ROOT_KEY
        keys.append(block_key(scope, parent, tokens[i * SIZE : (i + 1) * SIZE]))
    return keys


def _fill(
    blocks: BlockManager, scope: str, tokens: Sequence[int], *, low_priority: bool = False
) -> list[int]:
    """A table whose full blocks are published, as if computed."""
    table = blocks.allocate(blocks.num_blocks_for(len(tokens)))
    assert table is not None
    keys = _keys(scope, tokens)
    for i, key in enumerate(keys):
        part, parent = tokens[i * SIZE : (i + 1) * SIZE], keys[i - 1] if i else ROOT_KEY
        blocks.publish(table[i], key, scope, parent, part, low_priority=low_priority)
    return table


def _found(blocks: BlockManager, scope: str, tokens: Sequence[int]) -> tuple[list[int], list[int]]:
    keys = _keys(scope, tokens)
    prefix = blocks.find_prefix(scope, keys, tokens)
    return prefix, blocks.find_offloaded(scope, keys, tokens, len(prefix))


def _evict_all(blocks: BlockManager) -> KvMoves:
    table = blocks.allocate(blocks.num_available)
    assert table is not None
    blocks.release(table)
    return blocks.take_moves()


def test_what_is_evicted_is_found_again_and_copied_back() -> None:
    blocks = BlockManager(3, SIZE, num_host_slots=4)
    table = _fill(blocks, "a", [1, 2, 3, 4])
    blocks.release(table)
    assert blocks.take_moves() is NO_MOVES
    moves = _evict_all(blocks)
    assert moves.back == ()
    assert sorted(block for block, _ in moves.out) == sorted(table)
    slot_of = dict(moves.out)
    prefix, slots = _found(blocks, "a", [1, 2, 3, 4])
    assert (prefix, slots) == ([], [slot_of[block] for block in table])
    restored = blocks.restore(slots)
    assert blocks.take_moves() == KvMoves(back=tuple(zip(restored, slots, strict=True)))
    assert _found(blocks, "a", [1, 2, 3, 4]) == (restored, [])
    blocks.check_integrity([restored])
    blocks.release(restored)
    # Its copy is still there: to evict it once more takes no copy.
    assert _evict_all(blocks) == NO_MOVES
    assert blocks.host.num_restored_total == blocks.host.num_offloaded_total == 2
    blocks.check_integrity([])


def test_another_scope_finds_nothing_in_either_tier() -> None:
    blocks = BlockManager(2, SIZE, num_host_slots=4)
    blocks.release(_fill(blocks, "tenant-a", [1, 2, 3, 4]))
    _evict_all(blocks)
    assert _found(blocks, "tenant-b", [1, 2, 3, 4]) == ([], [])
    # Even with the very keys of the other scope, and with other tokens under them: contents are compared.
    keys = _keys("tenant-a", [1, 2, 3, 4])
    assert blocks.find_offloaded("tenant-b", keys, [1, 2, 3, 4], 0) == []
    assert blocks.find_offloaded("tenant-a", keys, [1, 9, 3, 4], 0) == []
    assert len(blocks.find_offloaded("tenant-a", keys, [1, 2, 3, 9], 0)) == 1
    assert len(_found(blocks, "tenant-a", [1, 2, 3, 4])[1]) == 2


def test_a_prefix_may_begin_here_and_go_on_there() -> None:
    blocks = BlockManager(4, SIZE, num_host_slots=4)
    table = _fill(blocks, "a", [1, 2, 3, 4, 5, 6])
    blocks.release(table)
    taken = blocks.allocate(2)  # one was free, the tail was evicted
    assert taken is not None
    prefix, slots = _found(blocks, "a", [1, 2, 3, 4, 5, 6])
    assert (prefix, len(slots)) == (table[:2], 1)
    blocks.release(taken)
    whole = blocks.allocate(2, prefix)
    assert whole is not None
    whole += blocks.restore(slots)
    assert _found(blocks, "a", [1, 2, 3, 4, 5, 6]) == (whole, [])
    blocks.check_integrity([whole])


def test_slots_go_by_value() -> None:
    blocks = BlockManager(2, SIZE, num_host_slots=2)
    shared = _fill(blocks, "a", [1, 2])
    blocks.release(shared)
    again = blocks.allocate(1, shared)
    assert again == shared
    blocks.release(shared)
    _evict_all(blocks)
    for first in (3, 5, 7):
        blocks.release(_fill(blocks, "a", [first, first + 1]))
        _evict_all(blocks)
    kept = [first for first in (1, 3, 5, 7) if _found(blocks, "a", [first, first + 1])[1]]
    assert kept == [1, 7], "the shared one outlives younger ones that nobody asked for again"
    blocks.release(_fill(blocks, "a", [9, 10], low_priority=True))
    assert _evict_all(blocks) == NO_MOVES
    assert blocks.host.num_used == 2


def test_no_slot_that_a_copy_of_this_step_needs_is_given_away() -> None:
    blocks = BlockManager(2, SIZE, num_host_slots=1)
    blocks.release(_fill(blocks, "a", [1, 2]))
    blocks.release(_fill(blocks, "a", [3, 4]))
    moves = _evict_all(blocks)
    assert len(moves.out) == 1, "the only slot is taken once a step"
    held = next(first for first in (1, 3) if _found(blocks, "a", [first, first + 1])[1])
    blocks.release(_fill(blocks, "a", [5, 6]))
    blocks.take_moves()
    other = blocks.allocate(1)
    assert other is not None
    (restored,) = blocks.restore(_found(blocks, "a", [held, held + 1])[1])  # evicts 5, 6
    moves = blocks.take_moves()
    assert (moves.out, [block for block, _ in moves.back]) == ((), [restored])
    blocks.check_integrity([other, [restored]])


def test_what_one_admission_restores_another_of_the_same_step_does_not_displace() -> None:
    blocks = BlockManager(4, SIZE, num_host_slots=2)
    for first in (1, 3):
        blocks.release(_fill(blocks, "a", [first, first + 1]))
    _evict_all(blocks)
    for first in (5, 7):
        blocks.release(_fill(blocks, "a", [first, first + 1]))
    tables = [blocks.restore(_found(blocks, "a", [first, first + 1])[1]) for first in (1, 3)]
    more = blocks.allocate(2)  # evicts 5, 6 and 7, 8
    assert more is not None
    moves = blocks.take_moves()
    assert (moves.out, len(moves.back)) == ((), 2)
    blocks.check_integrity([*tables, more])


def test_to_clear_the_cache_takes_nothing_from_who_is_being_served() -> None:
    blocks = BlockManager(2, SIZE, num_host_slots=2)
    blocks.release(_fill(blocks, "a", [1, 2]))
    evicting = blocks.allocate(2)  # out
    assert evicting is not None
    blocks.release(evicting)
    table = blocks.restore(_found(blocks, "a", [1, 2])[1])  # and back
    blocks.clear_cache()
    blocks.release(_fill(blocks, "a", [3, 4]))
    moves = blocks.take_moves()
    assert [slot for _, slot in moves.out] == [slot for _, slot in moves.back]
    assert [block for block, _ in moves.back] == table
    assert _found(blocks, "a", [1, 2]) == ([], [])
    blocks.check_integrity([table])


class Tiers(RuleBasedStateMachine):
    """Blocks and slots whose bytes are the prefixes they stand for: what is found must be there, always.

    A step is any number of admissions, endings and preemptions, then the copies, then the writes of those
    admitted, then their publication: as the scheduler and the engine do it.
    """

    def __init__(self) -> None:
        super().__init__()
        self.blocks = BlockManager(5, SIZE, num_host_slots=4)
        self.device: list[Any] = [None] * 5
        self.host: list[Any] = [None] * 4
        self.tables: list[tuple[str, tuple[int, ...], list[int], int]] = []
        self.begun: list[tuple[str, tuple[int, ...], list[int], int]] = []

    @rule(
        scope=st.sampled_from("ab"),
        tokens=st.lists(st.integers(0, 1), min_size=SIZE, max_size=4 * SIZE),
        again=st.booleans(),
    )
    def admit(self, scope: str, tokens: list[int], again: bool) -> None:
        prefix, slots = _found(self.blocks, scope, tokens)
        num_blocks = self.blocks.num_blocks_for(len(tokens))
        if num_blocks - len(prefix) + self.blocks.num_idle(prefix) > self.blocks.num_available:
            return
        table = self.blocks.allocate(len(prefix), prefix, asked_again=again)
        assert table is not None
        table += self.blocks.restore(slots, asked_again=again)
        num_found = len(table)
        more = self.blocks.allocate(num_blocks - num_found)
        assert more is not None
        self.begun.append((scope, tuple(tokens), table + more, num_found))

    @precondition(lambda self: self.begun)
    @rule(data=st.data())
    def preempt_in_the_same_step(self, data: Any) -> None:
        *_, table, _ = self.begun.pop(data.draw(st.integers(0, len(self.begun) - 1)))
        self.blocks.release(table)

    @precondition(lambda self: self.tables)
    @rule(data=st.data())
    def end(self, data: Any) -> None:
        *_, table, _ = self.tables.pop(data.draw(st.integers(0, len(self.tables) - 1)))
        self.blocks.release(table)

    @rule()
    def clear(self) -> None:
        self.blocks.clear_cache()

    @rule(low_priority=st.booleans())
    def step(self, low_priority: bool) -> None:
        moves = self.blocks.take_moves()
        assert len({slot for _, slot in moves.out}) == len(moves.out), "a slot is written twice"
        assert len({block for block, _ in moves.back}) == len(moves.back), "a block is written twice"
        for block, slot in moves.out:
            self.host[slot] = self.device[block]
        for block, slot in moves.back:
            self.device[block] = self.host[slot]
        for scope, tokens, table, num_found in self.begun:
            for i, block in enumerate(table):
                truth = (scope, tokens[: (i + 1) * SIZE])
                if i < num_found:
                    assert self.device[block] == truth, f"block {i} of {tokens} is not what was found"
                else:
                    self.device[block] = truth
        for scope, tokens, table, num_found in self.begun:
            keys = _keys(scope, tokens)
            for i in range(num_found, len(keys)):
                part, parent = tokens[i * SIZE : (i + 1) * SIZE], keys[i - 1] if i else ROOT_KEY
                self.blocks.publish(table[i], keys[i], scope, parent, part, low_priority=low_priority)
        self.tables += self.begun
        self.begun = []

    @invariant()
    def books_are_right(self) -> None:
        self.blocks.check_integrity([entry[2] for entry in (*self.tables, *self.begun)])


TestTiers = Tiers.TestCase
TestTiers.settings = settings(max_examples=150, stateful_step_count=40)


@pytest.mark.parametrize("kind", list(KvCacheDtype))
def test_pages_come_back_bit_for_bit_however_they_are_stored(kind: KvCacheDtype) -> None:
    torch.manual_seed(1)
    cache = PagedCache([(2, 8, 4), (1, 8, 8)], 6, 4, torch.float32, "cpu", FORMATS[kind])
    storage = cache.storage()
    assert len(storage) == (4 if FORMATS[kind] is None else 8)
    for tensor in storage:
        tensor.view(torch.uint8).random_(0, 100)
    before = [tensor.view(torch.uint8).clone() for tensor in storage]
    pool = HostPool(storage, 3)
    pool.move(KvMoves(out=((4, 0), (1, 2))))
    for tensor in storage:
        tensor.view(torch.uint8).zero_()
    pool.move(KvMoves(back=((5, 2), (0, 0))))
    for tensor, old in zip(storage, before, strict=True):
        now = tensor.view(torch.uint8)
        assert torch.equal(now[:, 5], old[:, 1])
        assert torch.equal(now[:, 0], old[:, 4])
        assert not now[:, 1:5].any()


def test_in_one_step_what_goes_out_can_come_back_and_its_block_can_be_filled() -> None:
    pages = torch.arange(4.0).reshape(1, 4, 1)
    pool = HostPool([pages], 2)
    pool.move(KvMoves(out=((0, 0),)))
    pool.move(KvMoves(out=((1, 1),), back=((1, 0), (2, 1))))
    assert pages.flatten().tolist() == [0.0, 0.0, 1.0, 3.0]


async def _answer(engine: Engine, request: EngineRequest) -> tuple[list[int], int]:
    token_ids: list[int] = []
    async for chunk in engine.submit(request):
        token_ids += chunk.token_ids
        if chunk.timing is not None:
            return token_ids, chunk.timing.num_cached_tokens
    raise AssertionError("a stream without an end")


def _prompts(num_prefixes: int, length: int) -> list[tuple[int, ...]]:
    rng = random.Random(5)
    return [tuple(rng.randrange(256) for _ in range(length)) for _ in range(num_prefixes)]


BYTES_PER_BLOCK = 1024
"""Of the tiny Llama: 2 layers × 2 heads × (8 + 8) values × 4 bytes × 4 tokens."""


async def test_a_cache_that_thrashes_answers_as_generate_does(
    llama: Oracle, make_engine: Callable[..., Engine], request_of: Callable[..., EngineRequest]
) -> None:
    """Twelve prefixes of 10 blocks where 30 blocks are, with requests side by side and preemptions."""
    engine = make_engine(
        num_kv_blocks=30, kv_offload_bytes=90 * BYTES_PER_BLOCK, max_num_seqs=4, max_batch_tokens=24
    )
    prefixes, rng = _prompts(12, 40), random.Random(3)
    gate = asyncio.Semaphore(6)

    async def ask(i: int) -> None:
        prompt = (*prefixes[rng.randrange(len(prefixes))], *(rng.randrange(256) for _ in range(1 + i % 5)))
        async with gate:
            got, _ = await _answer(engine, request_of(f"r{i}", prompt, 6 + 7 * i % 40, scope="s"))
        llama.assert_same(prompt, got)

    await asyncio.gather(*(ask(i) for i in range(70)))
    load = engine.load()
    assert load.num_restored_blocks_total > 50
    assert load.num_offloaded_blocks_total > 50
    assert load.num_preemptions_total > 0
    assert 0 < load.host_blocks_used <= load.host_blocks_total == 90


async def test_another_tenants_prefix_is_not_found_there_and_ones_own_is(
    llama: Oracle, make_engine: Callable[..., Engine], request_of: Callable[..., EngineRequest]
) -> None:
    engine = make_engine(num_kv_blocks=16, kv_offload_bytes=64 * BYTES_PER_BLOCK, max_num_seqs=2)
    prompt, *others = _prompts(4, 41)
    await _answer(engine, request_of("first", prompt, 3, scope="a"))
    for i, other in enumerate(others):
        await _answer(engine, request_of(f"other-{i}", other, 3, scope="a"))
    restored = engine.load().num_restored_blocks_total
    _, cached = await _answer(engine, request_of("b", prompt, 3, scope="b"))
    assert (cached, engine.load().num_restored_blocks_total) == (0, restored)
    got, cached = await _answer(engine, request_of("a", prompt, 3, scope="a"))
    assert (cached, engine.load().num_restored_blocks_total) == (40, restored + 10)
    llama.assert_same(prompt, got)


async def test_without_the_setting_nothing_is_kept(
    make_engine: Callable[..., Engine], request_of: Callable[..., EngineRequest]
) -> None:
    engine = make_engine(num_kv_blocks=16)
    for i, prompt in enumerate(_prompts(4, 41) * 2):
        _, cached = await _answer(engine, request_of(f"r{i}", prompt, 3))
        assert cached == 0
    load = engine.load()
    assert load.num_evictions_total > 0
    assert (load.host_blocks_total, load.num_offloaded_blocks_total, load.num_restored_blocks_total) == (
        0,
        0,
        0,
    )


def test_a_pool_that_can_not_be_had_is_refused(make_engine: Callable[..., Engine]) -> None:
    with pytest.raises(OutOfMemory, match="kvOffloadMemory"):
        make_engine(kv_offload_bytes=2**50)
    with pytest.raises(ValueError, match="kvOffloadMemory is less than one block of 1,024 bytes"):
        make_engine(kv_offload_bytes=BYTES_PER_BLOCK - 1)
    with pytest.raises(ValueError, match="kv_offload_bytes"):
        EngineConfig(kv_offload_bytes=-1)
