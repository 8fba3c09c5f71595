"""Tests that count every request: requests of a slice are gathered in blocks, each of which is one bet.

A block ends by number alone, never by what is in it, so the product of its gains is a bet like any other.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .bank import Bank
from .columns import Floats, Ints


class Blocks:
    """Blocks of one test, in every slice."""

    __slots__ = ("_block", "_num_cells", "_pending", "_process", "bad", "cells")

    def __init__(
        self,
        test: int,
        num_tests: int,
        num_slots: int,
        block: int,
        bad: tuple[list[int], list[int]],
        num_cells: int,
    ) -> None:
        """`bad`: cells of stable's and of the candidate's bad requests, to be counted for people."""
        self._block, self._num_cells, self.bad = block, num_cells, bad
        self._process = np.arange(num_slots) * num_tests + test
        self._pending = np.zeros((num_slots, num_cells), np.int64)
        self.cells = np.zeros((num_slots, num_cells), np.int64)
        """Requests by slot and cell since evidence began."""

    def add(self, bank: Bank, levels: Sequence[Ints], rows: Ints, cell: Ints, table: Floats) -> None:
        """Puts requests into their blocks; full ones go to the bank. `levels`: slots of all rows of the
        batch; `cell`: of each of `rows`, which are in order of arrival."""
        slot, row, cell = _spread(levels, rows, cell)
        order = np.argsort(slot.astype(np.uint8), kind="stable")
        slot, row, cell = slot[order], row[order], cell[order]
        counts = np.bincount(slot, minlength=len(self.cells))
        here = np.flatnonzero(counts)
        counts = counts[here]
        heads = np.cumsum(counts) - counts
        held = self._pending[here].sum(axis=1)
        place = np.arange(len(slot)) - np.repeat(heads - held, counts)
        ends = held + counts
        num_blocks = ends // self._block + 1
        base = np.cumsum(num_blocks) - num_blocks
        block = np.repeat(base, counts) + place // self._block
        found = np.bincount(block * self._num_cells + cell, minlength=int(num_blocks.sum()) * self._num_cells)
        found = found.reshape(-1, self._num_cells)
        found[base] += self._pending[here]
        self._pending[here] = found[base + num_blocks - 1]
        self.cells += np.bincount(slot * self._num_cells + cell, minlength=self.cells.size).reshape(
            self.cells.shape
        )
        full = place % self._block == self._block - 1
        if full.any():
            bank.add(
                self._process[slot[full]],
                row[full],
                found[block[full]] @ table,
                np.ones(int(full.sum()), bool),
            )

    def flush(self, bank: Bank, table: Floats, row: int) -> None:
        """Bets what is pending as it is: its odds are about to change."""
        here = np.flatnonzero(self._pending.any(axis=1))
        if len(here):
            gains = self._pending[here] @ table
            bank.add(self._process[here], np.full(len(here), row), gains, np.ones(len(here), bool))
            self._pending[:] = 0


def add_events(bank: Bank, test: int, levels: Sequence[Ints], rows: Ints, cell: Ints, table: Floats) -> None:
    """Bets on each of these events in all its slices. `cell`: row of the table, 1 for the candidate."""
    slot, row, cell = _spread(levels, rows, cell)
    bank.add(slot * bank.num_tests + test, row, table[cell], cell == 1)


def _spread(levels: Sequence[Ints], rows: Ints, cell: Ints) -> tuple[Ints, Ints, Ints]:
    """Each request once for each of its slices."""
    slots = np.concatenate([level[rows] for level in levels])
    keep = slots >= 0
    return slots[keep], np.tile(rows, len(levels))[keep], np.tile(cell, len(levels))[keep]
