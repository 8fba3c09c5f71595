"""Wealth of every test in every slice, advanced by whole batches.

Invariant: the result does not depend on how evidence is cut into batches. The recursion is that of betting,
W_n = (W_{n-1} + joining_n) gain_n, written for runs of `_RUN` events as W_n = S_n (W_0 + sum_i joining_i /
S_{i-1}) with S_n the product of gains, so that numpy's cumulative sums can do it. Short runs, since S grows
and shrinks exponentially.

Example: one event of the candidate's at w = 0.1 multiplies the twentieth of the capital that is in play by
1.82, 4.71, 7.69 and 9.17, a quarter each; the mean is 5.85, and the e-value 0.95 + 0.05 * 5.85 = 1.24.
"""

from __future__ import annotations

from collections.abc import Sequence

import numpy as np

from .columns import Bools, Floats, Ints
from .sequential import FIRST_BET, NUM_ALTERNATIVES, waiting

_RUN = 16
_MAX_GAIN = 40.0
"""Bound of a block's log-gain, so that a run of them stays within floats; e^-40 of anything is nothing."""
_NO_GAIN = np.zeros((1, NUM_ALTERNATIVES))
"""What fills a run that ends early: it changes nothing."""
MAX_WEALTH = 1e15
"""Clipping from above only lowers an e-value; 1/alpha is far below."""


class Bank:
    """State of `num_slots` slices times so many tests. Process `slot * num_tests + test`."""

    __slots__ = (
        "_events",
        "_path",
        "hazard",
        "num_tests",
        "size",
        "total",
        "totals",
        "unbet",
        "wealth",
        "weight",
    )

    def __init__(self, hazards: Sequence[float], weights: Floats) -> None:
        """`weights`: of each slot and test, (slots, tests); they sum to at most 1."""
        self.num_tests, self.size = len(hazards), weights.size
        self.weight = weights.ravel()
        self.hazard = np.tile(np.array(hazards, float), len(weights))
        self.wealth = np.full((self.size, NUM_ALTERNATIVES), FIRST_BET / NUM_ALTERNATIVES)
        """In play, by alternative."""
        self.unbet = np.full(self.size, 1.0 - FIRST_BET)
        """Not yet in play."""
        self.totals = np.zeros((self.size, 2), np.int64)
        """Bad events (event tests) or evaluations of stable and candidate that have been bet on."""
        self.total = 1.0
        """Weighted mean of all e-values, as of the last event; what has no weight counts as 1."""
        self._events: list[tuple[Ints, Ints, Floats, Bools]] = []
        self._path: tuple[Floats, Ints, Ints, Floats] | None = None

    def add(self, process: Ints, row: Ints, gains: Floats, candidate: Bools) -> None:
        """Events to be bet on at the next `settle`: of one process in order of arrival. `row`: the request in
        its batch; `gains`: log-gains, a column an alternative."""
        if len(process):
            self._events.append((process, row, gains, candidate))

    def e_values(self) -> Floats:
        """Of each process: its expectation is at most 1 under the null, at any time one may look."""
        found: Floats = self.wealth.sum(axis=1) + self.unbet
        return found

    def refresh(self) -> None:
        """The total anew, after somebody has put wealth in."""
        self.total = 1.0 + float(self.weight @ (self.e_values() - 1.0))

    def inherit(self, before: Bank, processes: Ints) -> None:
        """Takes over these processes as `before` left them."""
        for mine, other in (
            (self.wealth, before.wealth),
            (self.unbet, before.unbet),
            (self.totals, before.totals),
        ):
            mine[processes] = other[processes]
        self.refresh()

    def settle(self, elapsed: Floats) -> Floats | None:
        """Bets on what was added. `elapsed`: seconds since evidence began, by request. Returns the weighted
        mean of e-values after each request; None: nothing happened."""
        if not self._events:
            return None
        processes, rows, gains, arms = zip(*self._events, strict=True)
        self._events = []
        process = np.concatenate(processes)
        order = np.argsort(process.astype(np.uint16), kind="stable")
        process, row, candidate = process[order], np.concatenate(rows)[order], np.concatenate(arms)[order]
        counts = np.bincount(process)
        here = np.flatnonzero(counts)
        counts = counts[here]
        heads = np.cumsum(counts) - counts
        joining, left = self._joining(process, row, heads, counts, elapsed)
        after = self._advance(here, counts, np.concatenate([*gains, _NO_GAIN]), order, joining)
        e_after: Floats = np.minimum(sum(after.T), MAX_WEALTH) + left
        e_before = np.empty(len(e_after))
        e_before[1:] = e_after[:-1]
        e_before[heads] = self.wealth[here].sum(axis=1) + self.unbet[here]
        tails = heads + counts - 1
        self._path = self.e_values(), process, row, e_after
        self.wealth[here], self.unbet[here] = after[tails], left[tails]
        self.totals += np.bincount(2 * process + candidate, minlength=2 * self.size).reshape(-1, 2)
        change = np.bincount(row, self.weight[process] * (e_after - e_before), len(elapsed))
        series = self.total + np.cumsum(change, dtype=np.float64)
        self.refresh()
        return series

    def hottest(self, row: int) -> int:
        """Process with the most weighted evidence as of a row of the last batch."""
        assert self._path is not None
        found, process, rows, e_values = self._path
        found = found.copy()
        past = rows <= row
        found[process[past]] = e_values[past]  # of one process the last counts: they are in order
        return int((self.weight * found).argmax())

    def _joining(
        self, process: Ints, row: Ints, heads: Ints, counts: Ints, elapsed: Floats
    ) -> tuple[Floats, Floats]:
        """Capital that joins at each event, of all alternatives together, and what is left after it."""
        nth = np.arange(1, len(process) + 1) - np.repeat(heads, counts)
        nth += self.totals.sum(axis=1)[process]
        left = waiting(nth.astype(float), elapsed[row], self.hazard[process])
        before = np.empty_like(left)
        before[1:] = left[:-1]
        before[heads] = self.unbet[process[heads]]
        left = np.minimum(left, before)
        return before - left, left

    def _advance(self, here: Ints, counts: Ints, gains: Floats, order: Ints, joining: Floats) -> Floats:
        """Wealth after each event. `gains`: as they were added, and last `_NO_GAIN`; `order`: of the events,
        by process."""
        num_runs = -(-counts // _RUN)
        first_run = np.cumsum(num_runs) - num_runs
        place = np.arange(len(order)) + np.repeat(_RUN * first_run - np.cumsum(counts) + counts, counts)
        shape = (int(num_runs.sum()), _RUN, NUM_ALTERNATIVES)
        source, joins = np.full(shape[0] * _RUN, -1), np.zeros(shape[0] * _RUN)
        source[place], joins[place] = order, joining / NUM_ALTERNATIVES
        log_gain = np.clip(gains, -_MAX_GAIN, _MAX_GAIN).take(source, axis=0).reshape(shape)
        product = np.cumsum(log_gain, axis=1)
        log_gain -= product
        joined = np.exp(log_gain, out=log_gain)
        joined *= joins.reshape(*shape[:2], 1)
        joined = np.cumsum(joined, axis=1)
        np.exp(product, out=product)
        joined += self._begins(here, num_runs, first_run, product[:, -1], joined[:, -1])[:, None]
        joined *= product
        found: Floats = np.minimum(joined.reshape(-1, NUM_ALTERNATIVES).take(place, axis=0), MAX_WEALTH)
        return found

    def _begins(self, here: Ints, num_runs: Ints, first_run: Ints, product: Floats, joined: Floats) -> Floats:
        """Wealth before each run. `product`, `joined`: of whole runs."""
        longest = np.argsort(-num_runs, kind="stable")  # first, so that those with runs left are a head
        num_runs, first_run, wealth = num_runs[longest], first_run[longest], self.wealth[here[longest]]
        begins = np.empty_like(product)
        for nth, num in enumerate(np.searchsorted(-num_runs, -np.arange(num_runs[0])).tolist()):
            run, before = first_run[:num] + nth, wealth[:num]
            begins[run] = before
            wealth[:num] = np.minimum(product[run] * (before + joined[run]), MAX_WEALTH)
        return begins
