"""Slices of a rule's traffic: everything, each task, each tenant, and both together, bounded in number.

Slot 0 is the rule as a whole with half of alpha's weight; the others get a slot in order of appearance, which
is known before their evidence is. A slice that comes too late has no evidence of its own; it is in the
rule's.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .columns import Bools, Columns, Floats, Ints, codes

MAX_SINGLES = 20
"""Tasks and tenants together."""
MAX_PAIRS = 12
"""Task and tenant at once."""
NUM_SLOTS = 1 + MAX_SINGLES + MAX_PAIRS
RULE = 0

_WHOLE, _SINGLES, _PAIRS = 0.5, 0.4, 0.1
_STRIDE = 1 << 20


def slot_weights() -> Floats:
    """Share of alpha by slot, fixed beforehand; it falls slowly, since who comes first has most traffic."""
    singles = 1.0 / np.arange(2.0, 2.0 + MAX_SINGLES)
    pairs = 1.0 / np.arange(2.0, 2.0 + MAX_PAIRS)
    return np.concatenate([[_WHOLE], _SINGLES * singles / singles.sum(), _PAIRS * pairs / pairs.sum()])


class Places:
    """Slots of each request of a batch, one on each level: whole, task, tenant, both."""

    __slots__ = ("_row", "_slot", "slots", "which")

    def __init__(self, slots: Ints, which: Ints) -> None:
        """`slots`: of each pair of task and tenant, a column a level, -1: none; `which`: each request's."""
        self.slots, self.which = slots, which
        by_level = slots.T.take(which, axis=1).ravel()
        order = np.argsort(by_level.astype(np.uint8), kind="stable")[: np.count_nonzero(by_level >= 0)]
        self._slot, self._row = by_level[order], order % max(1, len(which))

    def whole(self) -> Places:
        """The first level alone."""
        return Places(self.slots[:, :1], self.which)

    def spread(self, rows: Ints, cell: Ints) -> tuple[Ints, Ints, Ints]:
        """Slot, row and cell of these requests, once for each of their slices, by level."""
        slots = self.slots.T.take(self.which[rows], axis=1)
        keep = slots >= 0
        shape = slots.shape
        return slots[keep], np.broadcast_to(rows, shape)[keep], np.broadcast_to(cell, shape)[keep]

    def by_slot(self, rows: Ints, cell: Ints) -> tuple[Ints, Ints, Ints]:
        """The same by slot; quicker than `spread` where most of the batch is asked for."""
        cells = np.full(len(self.which), -1)
        cells[rows] = cell
        cells = cells[self._row]
        here = np.flatnonzero(cells >= 0)
        return self._slot[here], self._row[here], cells[here]

    def count(self, wanted: Bools, candidate: Bools) -> Ints:
        """Wanted requests of stable and candidate, by slot."""
        pairs = 2 * self.which[wanted] + candidate[wanted]
        counts = np.bincount(pairs, minlength=2 * len(self.slots)).reshape(-1, 2)
        found = np.zeros((NUM_SLOTS, 2), np.int64)
        for slots in self.slots.T:
            np.add.at(found, slots[slots >= 0], counts[slots >= 0])
        return found


class Slices:
    """Who has which slot."""

    __slots__ = ("_pair_slots", "_task_codes", "_task_slots", "_tenant_codes", "_tenant_slots", "names")

    def __init__(self, names: Sequence[tuple[str, str]] = ()) -> None:
        """`names`: task and tenant of the slices of an earlier run, in order of appearance."""
        self.names: dict[int, tuple[str, str]] = {RULE: ("", "")}
        self._task_codes: dict[str, int] = {"": 0}
        self._tenant_codes: dict[str, int] = {"": 0}
        self._task_slots: dict[int, int] = {0: -1}
        self._tenant_slots: dict[int, int] = {0: -1}
        self._pair_slots: dict[int, int] = {}
        for task, tenant in names:
            left = self._task_codes.setdefault(task, len(self._task_codes))
            right = self._tenant_codes.setdefault(tenant, len(self._tenant_codes))
            if task and tenant:
                self._pair(left, right, task, tenant)
            else:
                self._single(left, right, task, tenant)

    def order(self) -> list[tuple[int, str, str]]:
        """Slot, task and tenant of each slice but the whole, in order of slots."""
        return [(slot, *self.names[slot]) for slot in sorted(self.names) if slot != RULE]

    def tasks(self, texts: Sequence[str]) -> Ints:
        """Codes of tasks; 0 is none."""
        return codes(texts, self._task_codes)

    def code(self, task: str) -> int:
        """Code of one task."""
        return self._task_codes.setdefault(task, len(self._task_codes))

    def places(self, columns: Columns, task: Ints, counted: Bools) -> Places:
        """Slots of each request. `counted`: those that give a new slice its slot."""
        tenant = codes(columns.tenant, self._tenant_codes)
        pairs, which = np.unique(task * _STRIDE + tenant, return_inverse=True)
        rows = np.flatnonzero(counted)[::-1]
        first = np.full(len(pairs), columns.size)
        first[which[rows]] = rows  # of one pair the last one stays, which is the first to come
        for row in np.sort(first[first < columns.size]).tolist():
            self._admit(int(task[row]), int(tenant[row]), columns.task[row], columns.tenant[row])
        slots = [
            (
                RULE,
                self._task_slots.get(pair // _STRIDE, -1),
                self._tenant_slots.get(pair % _STRIDE, -1),
                self._pair_slots.get(pair, -1),
            )
            for pair in pairs.tolist()
        ]
        return Places(np.array(slots, np.int64), which)

    def _admit(self, task: int, tenant: int, task_name: str, tenant_name: str) -> None:
        if task not in self._task_slots:
            self._single(task, 0, task_name, "")
        if tenant not in self._tenant_slots:
            self._single(0, tenant, "", tenant_name)
        if task and tenant and task * _STRIDE + tenant not in self._pair_slots:
            self._pair(task, tenant, task_name, tenant_name)

    def _single(self, task: int, tenant: int, task_name: str, tenant_name: str) -> None:
        table, code = (self._task_slots, task) if task else (self._tenant_slots, tenant)
        num = sum(1 for slot in self.names if 1 <= slot <= MAX_SINGLES)
        table[code] = 1 + num if num < MAX_SINGLES else -1
        if table[code] > 0:
            self.names[table[code]] = (task_name, tenant_name)

    def _pair(self, task: int, tenant: int, task_name: str, tenant_name: str) -> None:
        num = sum(1 for slot in self.names if slot > MAX_SINGLES)
        slot = 1 + MAX_SINGLES + num if num < MAX_PAIRS else -1
        self._pair_slots[task * _STRIDE + tenant] = slot
        if slot > 0:
            self.names[slot] = (task_name, tenant_name)
