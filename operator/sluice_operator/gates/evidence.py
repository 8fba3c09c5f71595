"""All evidence of a rule since it last restarted: what each request means to each test.

Who counts: a request that began under the evidence's own traffic, once a conversation, test and arm. Whether
a guard hears it is decided by its bucket (`cap`), what it means to each test by `meaning`. Ceilings hear all:
they compare nothing, so what a hiccup does is the candidate's own.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from ..api.guards import Metric
from . import sequential
from .bank import Bank
from .battery import Battery, Kind, Test, jump_parts
from .blocks import Blocks, add_events
from .cap import RATE_REFILL, Bucket, latency_tokens, rate_burst
from .columns import Bools, Floats, Ints
from .jump import Jump
from .meaning import NONE, Batch, Values, against_ceiling, column_of, events, flags_of, on_ladder, values_of
from .recent import Recent
from .seen import Units
from .sequential import FIRST_BET, NUM_ALTERNATIVES
from .slices import NUM_SLOTS, Places, Slices, slot_weights
from .tables import bad_cells, ceiling_rate, num_cells, table_of


class Evidence:
    """Wealth of all tests, and what has counted for them."""

    def __init__(self, battery: Battery, slices: Slices, alpha: float, since: float) -> None:
        tests = battery.tests
        self.battery, self.slices = battery, slices
        self._alpha = alpha
        self.since = since
        """Unix seconds at which evidence began."""
        weights = np.outer(slot_weights(), [test.weight for test in tests])
        self.bank = Bank([test.hazard for test in tests], weights)
        self.units = Units(len(tests))
        self.samples = np.zeros((NUM_SLOTS, 2), np.int64)
        """Answered requests judged since evidence began, by slot, of stable and candidate."""
        self.ended = np.zeros((NUM_SLOTS, 2), np.int64)
        """The same, with those that failed."""
        self.recent = Recent()
        self._buckets = [
            Bucket(rate_burst(None), RATE_REFILL) if guard.metric.is_rate else Bucket(*latency_tokens(None))
            for guard in battery.guards
        ]
        self._blocks = {
            index: Blocks(index, len(tests), NUM_SLOTS, test.block, bad_cells(test), num_cells(test))
            for index, test in enumerate(tests)
            if test.counts_all
        }
        self.jumps = {test: Jump(part) for test, part in jump_parts(tests).items()}
        """Clusters of rare events, which outlive the hour."""
        self.jumped: tuple[int, int] | None = None
        """Row of the last batch and test, where a cluster has fired in it."""
        self._tables: dict[int, Floats] = {}
        self._newest: dict[Metric, list[float]] = {}
        self._share: float | None = None
        self._by_guard: list[list[int]] = [[] for _ in battery.guards]
        self._gains = [index for index, test in enumerate(tests) if test.kind is Kind.GAIN]
        for index, test in enumerate(tests):
            if test.kind is not Kind.GAIN:
                self._by_guard[test.guard].append(index)

    def bad(self, slot: int, test: int) -> tuple[int, int]:
        """Bad requests of stable and candidate by a test; a ladder's are those of its guard's first tail."""
        spec = self.battery.tests[test]
        test = self.first_tail(test)
        blocks = self._blocks.get(test)
        if blocks is None:
            stable, candidate = self.bank.totals[slot * self.bank.num_tests + test].tolist()
            return (candidate, stable) if spec.kind is Kind.GAIN else (stable, candidate)
        cells = blocks.cells[slot]
        return int(cells[blocks.bad[0]].sum()), int(cells[blocks.bad[1]].sum())

    def set_bad(self, slot: int, test: int, stable: int, candidate: int) -> None:
        """Counts as an earlier run left them."""
        test = self.first_tail(test)
        spec, blocks = self.battery.tests[test], self._blocks.get(test)
        if blocks is None:
            counts = (candidate, stable) if spec.kind is Kind.GAIN else (stable, candidate)
            self.bank.totals[slot * self.bank.num_tests + test] = counts
            return
        for cells, num in zip(blocks.bad, (stable, candidate), strict=True):
            if cells:
                blocks.cells[slot, cells[-1]] = num

    def touched(self, slot: int, test: int) -> bool:
        """Whether a test has bet on anything."""
        process = slot * self.bank.num_tests + test
        if self.bank.totals[process].any():
            return True
        return not np.allclose(self.bank.wealth[process], FIRST_BET / NUM_ALTERNATIVES, rtol=1e-6, atol=0.0)

    def newest_limit(self, test: int) -> float | None:
        """Above what a request of the candidate's was slow by a test, as of the newest one; None: not known.
        A ladder's is that of its guard's first tail."""
        limits = self._newest.get(self.battery.tests[test].metric)
        if limits is None:
            return None
        spec = self.battery.tests[self.first_tail(test)]
        return limits[column_of(spec, self.battery)] * spec.tolerance

    def slow_percentile(self, test: int) -> int:
        """At which quantile that limit is."""
        percentiles = self.battery.tests[self.first_tail(test)].percentiles
        return percentiles[0] if percentiles else 99

    def first_tail(self, test: int) -> int:
        """Of a ladder, the first tail of its guard, which counts bad requests; else the test itself."""
        spec = self.battery.tests[test]
        if spec.kind is not Kind.LADDER:
            return test
        return next(at for at in self._by_guard[spec.guard] if self.battery.tests[at].kind is Kind.TAIL)

    def fair_rate(self, test: int) -> float:
        """Of a ceiling: how many of the candidate's requests may be over it."""
        return ceiling_rate(self.battery.tests[test])

    def keep(self, before: Evidence, metric: Metric) -> None:
        """Goes on with what `before` knew of a metric, whose evidence comes late; the rest begins anew. Both
        have the same battery, and the same slices from here on."""
        mine = [at for at, test in enumerate(self.battery.tests) if test.metric is metric]
        others = np.ones(len(self.battery.tests), bool)
        others[mine] = False
        self.slices, self.units = before.slices, before.units
        self.units.counted[:, others] = False
        for test in mine:
            processes = np.arange(NUM_SLOTS) * self.bank.num_tests + test
            self.bank.inherit(before.bank, processes)

    def take(self, batch: Batch, places: Places, task: Ints, share: float | None) -> Floats | None:
        """Judges a batch. Returns the weighted mean of e-values after each of its rows; None: nothing was
        bet.

        `share`: the candidate's; None: no stable traffic, so ceilings alone can say something.
        """
        if not batch.counted.any() and not batch.complained.any() and not batch.pairs:
            return None
        self.jumped = None
        self._follow(share)
        self._newest |= {
            metric: limits.rows[limits.at[-1]].tolist()
            for metric, limits in batch.limits.items()
            if not np.isnan(limits.rows[limits.at[-1], 0])
        }
        numbers = self.units.numbers(batch.columns)
        self.recent.end(batch.columns.time, places, np.flatnonzero(batch.ended & batch.columns.candidate))
        for index in range(len(self.battery.guards)):
            self._guard(index, batch, places, task, numbers)
        num_ended = int(batch.ended.sum())
        for jump in self.jumps.values():
            jump.settle(num_ended)
        for index in self._gains:
            test = self.battery.tests[index]
            counted = self._wanted(test, batch.counted, task)
            if share is not None:
                self._gain(index, batch, places, counted, numbers)
        return self.bank.settle(batch.columns.time - self.since)

    def _follow(self, share: float | None) -> None:
        """Odds for another share; what is pending is bet under the old one."""
        if share == self._share and self._tables:
            return
        for index, blocks in self._blocks.items():
            if index in self._tables:
                blocks.flush(self.bank, self._tables[index], 0)
        if self._tables:
            for jump in self.jumps.values():
                jump.rest()
        for guard, bucket in zip(self.battery.guards, self._buckets, strict=True):
            if guard.metric.is_rate:
                bucket.burst = rate_burst(share)
            else:
                bucket.burst, bucket.refill = latency_tokens(share)
        self._share = share
        self._tables = {
            index: table
            for index, test in enumerate(self.battery.tests)
            if (table := table_of(test, share)) is not None
        }

    def _wanted(self, test: Test, counted: Bools, task: Ints) -> Bools:
        if not test.tasks:
            return counted
        return counted & np.isin(task, [self.slices.code(name) for name in sorted(test.tasks)])

    def _guard(self, index: int, batch: Batch, places: Places, task: Ints, numbers: Ints) -> None:
        mine = self._by_guard[index]
        first = self.battery.tests[mine[0]]
        counted = self._wanted(first, batch.counted, task)
        if first.kind is Kind.PAIR:
            self._pairs(mine[0], batch, places, task)
            return
        values = None if first.metric.is_rate else values_of(first, batch)
        bad: dict[int, Ints] = {}
        for test in mine:
            rows = events(self.battery.tests[test], self.battery, batch, counted, values)
            if rows is not None:
                bad[test] = self.units.first(rows, numbers, test)
        slow = next(iter(bad.values()), NONE)
        candidate = batch.columns.candidate
        heard = self._buckets[index].heard(slow[candidate[slow]], batch.columns.time)
        for test, rows in bad.items():
            self._note(test, rows[candidate[rows]], places, batch)
            if test in self.jumps and len(rows):
                self._jump(test, rows, heard, batch)
            rows = rows if heard is None else rows[heard[rows]]
            if len(rows) and test in self._tables:
                cell = candidate[rows].astype(np.int64)
                add_events(self.bank, test, places, rows, cell, self._tables[test])
        self._correct(mine, bad, places, candidate)
        for test in mine:
            if test in self._blocks and test in self._tables:
                self._count(test, batch, places, counted, values, numbers, heard)

    def _note(self, test: int, rows: Ints, places: Places, batch: Batch) -> None:
        if len(rows):
            self.recent.fail(test, batch.columns.time, places, rows)

    def _jump(self, test: int, rows: Ints, heard: Bools | None, batch: Batch) -> None:
        """Rare events that come in a cluster."""
        if self._share is None:
            return
        share = sequential.null_share(self._share, self.battery.tests[test].tolerance)
        candidate = batch.columns.candidate
        row = self.jumps[test].take(rows, heard, candidate, np.cumsum(batch.ended), share, self._alpha)
        if row is not None and (self.jumped is None or row < self.jumped[0]):
            self.jumped = row, test

    def _count(
        self,
        test: int,
        batch: Batch,
        places: Places,
        counted: Bools,
        values: Values | None,
        numbers: Ints,
        heard: Bools | None,
    ) -> None:
        """Puts requests into the cells of a ladder or a ceiling."""
        spec = self.battery.tests[test]
        if spec.kind is Kind.CEILING:
            known, cell = against_ceiling(spec, batch, counted, values)
        else:
            assert values is not None
            known, cell = on_ladder(spec, self.battery, batch, counted, values)
        rows = self.units.first(np.flatnonzero(known), numbers, test)
        rows = rows if heard is None or spec.kind is Kind.CEILING else rows[heard[rows]]
        if spec.kind is Kind.CEILING:
            self._note(test, rows[cell[rows] > 0], places, batch)
        if len(rows):
            self._blocks[test].add(self.bank, places, rows, cell[rows], self._tables[test])

    def _correct(self, mine: Sequence[int], bad: dict[int, Ints], places: Places, arm: Bools) -> None:
        """Feedback on requests that a ceiling has counted as good."""
        for test in mine:
            spec = self.battery.tests[test]
            if spec.kind is Kind.CEILING and spec.metric is Metric.NEGATIVE_FEEDBACK_RATE:
                rows = next(iter(bad.values()), NONE)
                rows = rows[arm[rows]]
                if len(rows):
                    cell = np.full(len(rows), 2)
                    self._blocks[test].add(self.bank, places, rows, cell, self._tables[test])

    def _gain(self, test: int, batch: Batch, places: Places, counted: Bools, numbers: Ints) -> None:
        """The same tests with the arms exchanged, over all requests."""
        spec, whole = self.battery.tests[test], places.whole()
        if not spec.metric.is_rate:
            self._count(test, batch, whole, counted, values_of(spec, batch), numbers, None)
            return
        rows = self.units.first(np.flatnonzero(flags_of(spec, batch, counted)), numbers, test)
        if len(rows):
            cell = (~batch.columns.candidate[rows]).astype(np.int64)
            add_events(self.bank, test, whole, rows, cell, self._tables[test])

    def _pairs(self, test: int, batch: Batch, places: Places, task: Ints) -> None:
        wanted = self._wanted(self.battery.tests[test], np.ones(len(task), bool), task)
        found = [(row, candidate) for row, candidate in batch.pairs if wanted[row]]
        if found and test in self._tables:
            rows = np.array([row for row, _ in found])
            cell = np.array([int(candidate) for _, candidate in found])
            add_events(self.bank, test, places, rows, cell, self._tables[test])
