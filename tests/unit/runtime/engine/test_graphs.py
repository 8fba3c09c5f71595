"""Sizes, static inputs and replays, without CUDA: that each value is written anew, whatever was there."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import Tensor

from sluice_runtime.engine.graphs import DecodeGraphs, Inputs, Layout, is_decode, size_for, sizes_up_to
from sluice_runtime.engine.plan import ScheduledChunk

CPU = torch.device("cpu")


def repeat(compute: Callable[[], Tensor]) -> tuple[Callable[[], object], Tensor]:
    """A capture that calls the function again, into the same output. It shows nothing of CUDA."""
    output = compute().clone()
    return lambda: output.copy_(compute()), output


def chunk(token: int, start: int, table: list[int], **more: Any) -> ScheduledChunk:
    return ScheduledChunk(f"r{start}", [token], start, table, **{"samples": True, **more})


@given(most=st.integers(1, 1024), num=st.integers(1, 1024))
def test_each_number_of_rows_has_a_size_with_little_padding(most: int, num: int) -> None:
    sizes = sizes_up_to(most)
    assert list(sizes) == sorted(set(sizes))
    assert sizes[-1] == most
    size = size_for(sizes, num)
    if num > most:
        assert size is None
        return
    assert size is not None
    assert num <= size <= max(2 * num - 1, 1)
    if num >= 32:
        assert size - num < 32


def test_a_size_is_the_smallest_that_holds() -> None:
    assert sizes_up_to(48) == (1, 2, 4, 8, 16, 24, 32, 40, 48)
    assert [size_for((1, 2, 4, 6), n) for n in (1, 3, 5, 6, 7)] == [1, 4, 6, 6, None]


def test_what_is_no_decode_is_not_replayed() -> None:
    one = chunk(1, 3, [0])
    assert is_decode([one])
    assert not is_decode([])
    assert not is_decode([one, ScheduledChunk("p", [1, 2], 0, [0], True)])
    assert not is_decode([chunk(1, 3, [0], samples=False)])


@st.composite
def steps(draw: st.DrawFn) -> list[ScheduledChunk]:
    contexts = draw(st.lists(st.integers(0, 31), min_size=0, max_size=6))
    return [
        # Tables may be longer than the context, and than the layout.
        chunk(
            draw(st.integers(0, 99)),
            at,
            draw(st.permutations(range(40)))[: at // 4 + 1 + draw(st.integers(0, 9))],
        )
        for at in contexts
    ]


@given(before=steps(), now=steps(), poison=st.integers(-(2**31), 2**31 - 1))
def test_nothing_of_an_earlier_step_is_left(
    before: list[ScheduledChunk], now: list[ScheduledChunk], poison: int
) -> None:
    layout = Layout(block_size=4, width=8, spare=40)
    fresh, used = (np.full(layout.num_values(6), poison, dtype=np.int32) for _ in range(2))
    layout.write(used, before)
    layout.write(used, now)
    layout.write(fresh, now)
    assert (used == fresh).all()
    clean = np.zeros_like(fresh)
    layout.write(clean, now)
    assert (clean == fresh).all()


@given(now=steps())
def test_inputs_say_what_the_chunks_say(now: list[ScheduledChunk]) -> None:
    inputs = Inputs(Layout(block_size=4, width=8, spare=40), 6, CPU)
    inputs.write(now)
    for row, c in enumerate(now):
        context = int(inputs.context_lens[row])
        assert context == c.start + 1
        assert (int(inputs.token_ids[row]), int(inputs.positions[row])) == (c.token_ids[0], c.start)
        used = -(-context // 4)
        table = inputs.block_tables[row].tolist()
        assert table == c.block_table[:used] + [40] * (8 - used)
        assert int(inputs.slots[row]) == table[c.start // 4] * 4 + c.start % 4
    padding = slice(len(now), 6)
    assert inputs.context_lens[padding].tolist() == [1] * (6 - len(now))
    assert inputs.slots[padding].tolist() == [160] * (6 - len(now))
    assert (inputs.block_tables[padding] == 40).all()
    assert inputs.query_starts.tolist() == [0, 1, 2, 3, 4, 5, 6]


def test_each_size_is_captured_once_largest_first_and_replayed_into_its_own_output() -> None:
    seen: list[int] = []

    def compute(inputs: Inputs) -> Tensor:
        seen.append(inputs.num_rows)
        return inputs.token_ids[:, None] * torch.tensor([1.0, 10.0])

    graphs = DecodeGraphs(compute, Layout(4, 8, 40), (1, 2, 4), CPU, repeat)
    assert seen == [4, 2, 1]
    first = graphs.run([chunk(7, 0, [0]), chunk(8, 1, [1]), chunk(9, 2, [2])])
    assert first is not None
    assert first.tolist() == [[7.0, 70.0], [8.0, 80.0], [9.0, 90.0]]
    alone = graphs.run([chunk(5, 0, [0])])
    assert alone is not None
    assert alone.tolist() == [[5.0, 50.0]]
    assert first.tolist()[0] == [7.0, 70.0], "another size has another output"
    assert seen == [4, 2, 1, 4, 1]
    assert graphs.run([chunk(i, 0, [0]) for i in range(5)]) is None
    assert graphs.run([ScheduledChunk("p", [1, 2], 0, [0], True)]) is None


def test_a_request_outside_the_layout_fails_by_itself() -> None:
    layout = Layout(block_size=4, width=2, spare=9)
    with pytest.raises((IndexError, ValueError)):
        layout.write(np.zeros(layout.num_values(1), dtype=np.int32), [chunk(1, 8, [0, 1, 2])])
