"""The vectorised recursion against the plain one, and blocks that end by number alone."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sluice_operator.gates.bank import Bank
from sluice_operator.gates.blocks import Blocks
from sluice_operator.gates.sequential import FIRST_BET, event_table, ladder_table, waiting
from sluice_operator.gates.slices import Places

WEIGHTS = np.array([[0.5, 0.25], [0.125, 0.125]])
HAZARDS = (0.1, 0.0)

Event = tuple[int, bool]


def plain(events: list[Event], share: float, seconds: list[float]) -> list[float]:
    """W_n = (W_{n-1} + joining_n) gain_n, an event at a time; the weighted mean after each."""
    gains = np.exp(event_table(share))
    wealth = np.full((4, 4), FIRST_BET / 4)
    unbet, num = np.full(4, 1.0 - FIRST_BET), np.zeros(4)
    found = []
    for (process, candidate), second in zip(events, seconds, strict=True):
        num[process] += 1
        left = float(waiting(num[process : process + 1], np.array([second]), HAZARDS[process % 2])[0])
        wealth[process] = (wealth[process] + (unbet[process] - left) / 4) * gains[int(candidate)]
        unbet[process] = left
        found.append(1.0 + float(WEIGHTS.ravel() @ (wealth.sum(axis=1) + unbet - 1.0)))
    return found


def batched(events: list[Event], share: float, seconds: list[float], cuts: list[int]) -> list[float]:
    bank = Bank(HAZARDS, WEIGHTS)
    table = event_table(share)
    found: list[float] = []
    for begin, end in zip([0, *cuts], [*cuts, len(events)], strict=True):
        for process in range(4):
            rows = np.array([row for row in range(begin, end) if events[row][0] == process], np.int64)
            candidate = np.array([events[row][1] for row in rows], bool)
            gains = table[candidate.astype(int)].reshape(-1, 4)
            bank.add(np.full(len(rows), process), rows - begin, gains, candidate)
        series = bank.settle(np.array(seconds[begin:end]))
        found += [] if series is None else series.tolist()
    return found


@settings(max_examples=60)
@given(
    events=st.lists(st.tuples(st.integers(0, 3), st.booleans()), min_size=1, max_size=80),
    share=st.floats(0.02, 0.6),
    gaps=st.floats(0.1, 60.0),
    data=st.data(),
)
def test_a_batch_is_its_events_one_by_one(
    events: list[Event], share: float, gaps: float, data: st.DataObject
) -> None:
    seconds = [gaps * (row + 1) for row in range(len(events))]
    cuts = sorted(data.draw(st.sets(st.integers(1, max(1, len(events) - 1)), max_size=5)) - {len(events)})
    assert batched(events, share, seconds, cuts) == pytest.approx(plain(events, share, seconds), rel=1e-6)


def test_first_event_by_hand() -> None:
    """A twentieth of it is in play: 0.95 + 0.05 * (1.8182 + 4.7059 + 7.6923 + 9.1743) / 4 = 1.2424."""
    bank = Bank((0.0,), np.ones((1, 1)))
    bank.add(np.zeros(1, np.int64), np.zeros(1, np.int64), event_table(0.1)[1:], np.ones(1, bool))
    series = bank.settle(np.zeros(1))
    assert series is not None
    assert series[0] == pytest.approx(1.2424, abs=1e-4)


def test_wealth_does_not_overflow_and_comes_back() -> None:
    bank = Bank((0.0,), np.ones((1, 1)))
    table = event_table(0.05)
    for candidate in (True, False):
        gains = np.repeat(table[int(candidate)][None], 3000, axis=0)
        bank.add(np.zeros(3000, np.int64), np.arange(3000), gains, np.full(3000, candidate))
        series = bank.settle(np.arange(3000.0))
        assert series is not None
        assert np.isfinite(series).all()
    assert bank.total < 1.0


def test_no_event_is_no_evidence() -> None:
    bank = Bank(HAZARDS, WEIGHTS)
    assert bank.settle(np.arange(5.0)) is None
    assert bank.total == 1.0
    assert bank.e_values() == pytest.approx(1.0)


def test_a_late_regression_is_found_nearly_as_soon_as_an_early_one() -> None:
    """After 3,000 bad events of stable the candidate needs a few more, not hundreds."""

    def needed(before: int) -> int:
        bank = Bank((0.0,), np.ones((1, 1)))
        table = event_table(0.1)
        for candidate, num in ((False, before), (True, 40)):
            bank.add(
                np.zeros(num, np.int64),
                np.arange(num),
                table[[int(candidate)] * num],
                np.full(num, candidate),
            )
            begin = 0.0 if candidate is False else before * 0.3
            series = bank.settle(begin + np.arange(num) * 0.3)
        assert series is not None
        return int((series >= 1000.0).argmax()) + 1

    assert needed(1) <= 6
    assert needed(3000) <= 12


@settings(max_examples=40)
@given(cells=st.lists(st.integers(0, 3), min_size=1, max_size=40), cut=st.integers(0, 40))
def test_blocks_do_not_depend_on_batches(cells: list[int], cut: int) -> None:
    """Each four requests are one bet, wherever a batch ends."""
    table = ladder_table(0.2, [0.5])

    def total(parts: list[list[int]]) -> float:
        bank = Bank((0.0,), np.ones((1, 1)))
        blocks = Blocks(0, 1, 1, 4, ([1], [3]), 4)
        for part in parts:
            if part:
                whole = Places(np.zeros((1, 1), np.int64), np.zeros(len(part), np.int64))
                blocks.add(bank, whole, np.arange(len(part)), np.array(part), table)
                bank.settle(np.zeros(len(part)))
        return bank.total

    cut = min(cut, len(cells))
    assert total([cells]) == pytest.approx(total([cells[:cut], cells[cut:]]))
    full = cells[: len(cells) - len(cells) % 4]
    product = np.exp(table[full].sum(axis=0)).mean() if full else 1.0
    assert total([cells]) == pytest.approx(1.0 - FIRST_BET + FIRST_BET * product)
