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

    def levels(self, columns: Columns, task: Ints, counted: Bools) -> list[Ints]:
        """Slots of each request by level (whole, task, tenant, both); -1: none. `counted`: those that give a
        new slice its slot."""
        tenant = codes(columns.tenant, self._tenant_codes)
        pair = task * _STRIDE + tenant
        self._admit(columns, task, tenant, pair, counted)
        return [
            np.zeros(columns.size, np.int64),
            _looked_up(task, self._task_slots),
            _looked_up(tenant, self._tenant_slots),
            _looked_up(pair, self._pair_slots),
        ]

    def _admit(self, columns: Columns, task: Ints, tenant: Ints, pair: Ints, counted: Bools) -> None:
        rows = np.flatnonzero(counted)
        if not len(rows):
            return
        _, first = np.unique(pair[rows], return_index=True)
        for at in first[np.argsort(first)].tolist():
            row = int(rows[at])
            left, right = int(task[row]), int(tenant[row])
            if left not in self._task_slots:
                self._single(left, 0, columns.task[row], "")
            if right not in self._tenant_slots:
                self._single(0, right, "", columns.tenant[row])
            if left and right and left * _STRIDE + right not in self._pair_slots:
                self._pair(left, right, columns.task[row], columns.tenant[row])

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


def _looked_up(code: Ints, table: dict[int, int]) -> Ints:
    values, inverse = np.unique(code, return_inverse=True)
    slots = np.array([table.get(value, -1) for value in values.tolist()], np.int64)
    found: Ints = slots[inverse]
    return found
