"""Block ownership and the prefix cache's key."""

from __future__ import annotations

import pytest

from sluice_runtime.engine.blocks import ROOT_KEY, BlockManager, block_key


def _fill(blocks: BlockManager, scope: str, tokens: list[int]) -> tuple[list[int], list[bytes]]:
    """A table for `tokens`, all of its full blocks published."""
    size = blocks.block_size
    table = blocks.allocate(blocks.num_blocks_for(len(tokens)))
    assert table is not None
    keys: list[bytes] = []
    for i in range(len(tokens) // size):
        parent = keys[-1] if keys else ROOT_KEY
        part = tokens[i * size : (i + 1) * size]
        keys.append(block_key(scope, parent, part))
        blocks.publish(table[i], keys[i], scope, parent, part)
    return table, keys


def test_blocks_are_handed_out_in_order_and_come_back() -> None:
    blocks = BlockManager(4, 2)
    assert blocks.allocate(3) == [0, 1, 2]
    assert blocks.allocate(2) is None
    assert blocks.num_used == 3
    blocks.release([0, 1, 2])
    assert blocks.num_used == 0
    blocks.check_integrity([])


def test_a_released_prefix_is_found_again_and_shared() -> None:
    blocks = BlockManager(8, 2)
    table, keys = _fill(blocks, "a", [1, 2, 3, 4])
    blocks.release(table)
    assert blocks.num_used == 0
    found = blocks.find_prefix("a", keys, [1, 2, 3, 4])
    assert found == table
    first, second = blocks.allocate(3, found), blocks.allocate(3, found)
    assert first is not None
    assert second is not None
    assert first[:2] == second[:2] == table
    assert first[2] != second[2]
    blocks.check_integrity([first, second])


def test_another_scope_finds_nothing() -> None:
    blocks = BlockManager(8, 2)
    table, keys = _fill(blocks, "a", [1, 2, 3, 4])
    assert blocks.find_prefix("b", [block_key("b", ROOT_KEY, [1, 2])], [1, 2]) == []
    # Even with the very key of the other scope: contents are compared.
    assert blocks.find_prefix("b", keys, [1, 2, 3, 4]) == []
    assert blocks.find_prefix("a", keys, [1, 2, 3, 5]) == table[:1]


def test_fields_of_a_key_can_not_be_shifted_into_one_another() -> None:
    assert block_key("ab", b"c", [1]) != block_key("a", b"bc", [1])
    assert block_key("a", b"", [1, 2]) != block_key("a", b"", [1]) != block_key("a", b"", [2])


def test_the_least_recently_used_prefix_is_evicted_tail_first() -> None:
    blocks = BlockManager(4, 2)
    old, old_keys = _fill(blocks, "a", [1, 2, 3, 4])
    new, new_keys = _fill(blocks, "a", [5, 6, 7, 8])
    blocks.release(old)
    blocks.release(new)
    assert blocks.allocate(1) == [old[1]]
    assert blocks.find_prefix("a", old_keys, [1, 2, 3, 4]) == [old[0]]
    assert blocks.find_prefix("a", new_keys, [5, 6, 7, 8]) == new
    blocks.check_integrity([[old[1]]])


def test_a_prefix_that_is_about_to_be_reused_is_not_evicted_for_the_rest() -> None:
    blocks = BlockManager(3, 2)
    table, keys = _fill(blocks, "a", [1, 2, 3, 4])
    blocks.release(table)
    found = blocks.find_prefix("a", keys, [1, 2, 3, 4])
    assert blocks.allocate(4, found) is None
    blocks.check_integrity([])
    assert blocks.allocate(3, found) == [*table, 2]


def test_a_double_release_is_an_error_at_once() -> None:
    blocks = BlockManager(2, 2)
    table = blocks.allocate(1)
    assert table is not None
    blocks.release(table)
    with pytest.raises(AssertionError, match="released more often"):
        blocks.release(table)


def test_clearing_the_cache_keeps_what_is_in_use() -> None:
    blocks = BlockManager(4, 2)
    used, keys = _fill(blocks, "a", [1, 2])
    idle, _ = _fill(blocks, "a", [3, 4])
    blocks.release(idle)
    blocks.clear_cache()
    assert blocks.find_prefix("a", keys, [1, 2]) == []
    blocks.check_integrity([used])
