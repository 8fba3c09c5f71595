"""What has counted already: each request once as a sample, each conversation once for each test and arm.

The conversation is what assignment is random over, so more of it would be no more evidence. Memory is
bounded: the oldest half is forgotten when it is full, long after what was running then has ended.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import compress

import numpy as np

from .columns import Bools, Columns, Ints, bools, codes

MAX_UNITS = 65_536
MAX_ANSWERED = 40_000


class Units:
    """Conversations of both arms, and for which tests they have counted."""

    __slots__ = ("_known", "counted")

    def __init__(self, num_tests: int) -> None:
        self._known: tuple[dict[str, int], dict[str, int]] = ({}, {})
        self.counted: Bools = np.zeros((1024, num_tests), bool)

    def numbers(self, columns: Columns) -> Ints:
        """A number for each row's conversation and arm."""
        if sum(map(len, self._known)) > MAX_UNITS:
            self._forget()
        names = [unit or request for unit, request in zip(columns.unit, columns.request, strict=True)]
        found = np.empty(columns.size, np.int64)
        stable, candidate = self._known
        for known, other, mine in (
            (stable, candidate, ~columns.candidate),
            (candidate, stable, columns.candidate),
        ):
            found[mine] = codes(list(compress(names, mine.tolist())), known, len(other))
        number = sum(map(len, self._known))
        if number > len(self.counted):
            more = np.zeros(
                (max(number, 2 * len(self.counted)) - len(self.counted), self.counted.shape[1]), bool
            )
            self.counted = np.concatenate([self.counted, more])
        return found

    def first(self, rows: Ints, numbers: Ints, test: int) -> Ints:
        """Of these rows, the first of each conversation that has not counted for the test; now it has."""
        column = self.counted[:, test]
        units = numbers[rows]
        new = ~column[units]
        rows, units = rows[new], units[new]
        if len(rows) > 1:
            place = np.empty(len(self.counted), np.int64)
            place[units[::-1]] = rows[::-1]
            keep = place[units] == rows
            rows, units = rows[keep], units[keep]
        column[units] = True
        return rows

    def _forget(self) -> None:
        kept = [dict(list(table.items())[len(table) // 2 :]) for table in self._known]
        old = np.array([number for table in kept for number in table.values()], np.int64)
        numbers = iter(range(len(old)))
        self._known = ({name: next(numbers) for name in kept[0]}, {name: next(numbers) for name in kept[1]})
        counted = np.zeros((max(1024, 2 * len(old)), self.counted.shape[1]), bool)
        counted[: len(old)] = self.counted[old]
        self.counted = counted


class Answered:
    """Requests that have ended, by arm; the oldest are forgotten."""

    __slots__ = ("_ids",)

    def __init__(self) -> None:
        self._ids: tuple[dict[str, None], dict[str, None]] = ({}, {})

    def __len__(self) -> int:
        return len(self._ids[0]) + len(self._ids[1])

    def __contains__(self, key: tuple[bool, str]) -> bool:
        return key[1] in self._ids[key[0]]

    def known(self, rows: Ints, candidate: Bools, request: Sequence[str]) -> Bools:
        """Of which of these rows the request has ended."""
        ids, arms = self._ids, candidate[rows].tolist()
        return bools([request[row] in ids[arm] for row, arm in zip(rows.tolist(), arms, strict=True)])

    def new(self, rows: Ints, candidate: Bools, request: Sequence[str]) -> Ints:
        """Of these rows, those whose request had not ended before; now it has."""
        kept, ids = [], self._ids
        for row, arm in zip(rows.tolist(), candidate[rows].tolist(), strict=True):
            name, table = request[row], ids[arm]
            if name not in table:
                table[name] = None
                kept.append(row)
        for table in self._ids:
            if len(table) > MAX_ANSWERED:
                for name in list(table)[: len(table) - MAX_ANSWERED // 2]:
                    del table[name]
        return np.array(kept, np.int64)
