"""Tests that count every request: requests of a slice are gathered in blocks, each of which is one bet.

A block ends by number alone, never by what is in it, so the product of its gains is a bet like any other.
"""

from __future__ import annotations

import numpy as np

from .bank import Bank
from .columns import Floats, Ints
from .slices import Places


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

    def add(self, bank: Bank, places: Places, rows: Ints, cell: Ints, table: Floats) -> None:
        """Puts requests into their blocks; full ones go to the bank. `cell`: of each of `rows`, which are in
        order of arrival."""
        slot, row, cell = places.by_slot(rows, cell)
        counts = np.diff(np.searchsorted(slot, np.arange(len(self.cells) + 1)))
        here = np.flatnonzero(counts)
        counts, held = counts[here], self._pending[here]
        num_held = held.sum(axis=1)
        num_full = (num_held + counts) // self._block
        last = np.cumsum(num_full + 1) - 1  # of each slot's blocks: what stays pending
        first = last - num_full
        shift = first * self._block + num_held - (np.cumsum(counts) - counts)
        block = (np.arange(len(slot)) + np.repeat(shift, counts)) // self._block
        num_blocks = int(last[-1]) + 1
        found = np.bincount(block * self._num_cells + cell, minlength=num_blocks * self._num_cells)
        found = found.reshape(num_blocks, self._num_cells)
        self.cells[here] += np.add.reduceat(found, first)
        found[first] += held
        self._pending[here] = found[last]
        full = np.delete(np.arange(num_blocks), last)
        if len(full):
            ends = (full + 1) * self._block - 1 - np.repeat(shift, num_full)
            process = np.repeat(self._process[here], num_full)
            bank.add(process, row[ends], found.take(full, axis=0) @ table, np.ones(len(full), bool))

    def flush(self, bank: Bank, table: Floats, row: int) -> None:
        """Bets what is pending as it is: its odds are about to change."""
        here = np.flatnonzero(self._pending.any(axis=1))
        if len(here):
            gains = self._pending[here] @ table
            bank.add(self._process[here], np.full(len(here), row), gains, np.ones(len(here), bool))
            self._pending[:] = 0


def add_events(bank: Bank, test: int, places: Places, rows: Ints, cell: Ints, table: Floats) -> None:
    """Bets on each of these events in all its slices. `cell`: row of the table, 1 for the candidate."""
    slot, row, cell = places.spread(rows, cell)
    bank.add(slot * bank.num_tests + test, row, table.take(cell, axis=0), cell == 1)
