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
            self._events.append((process, row, np.clip(gains, -_MAX_GAIN, _MAX_GAIN), candidate))

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
        process, row, gains, candidate = (np.concatenate(parts) for parts in zip(*self._events, strict=True))
        self._events = []
        order = np.argsort(process.astype(np.uint16), kind="stable")
        process, row, gains, candidate = process[order], row[order], gains[order], candidate[order]
        heads = np.flatnonzero(np.diff(process, prepend=-1))
        counts = np.diff(heads, append=len(process))
        here = process[heads]
        joining, left = self._joining(process, row, heads, counts, elapsed)
        after = self._advance(here, heads, counts, gains, joining)
        e_after: Floats = np.minimum(after.sum(axis=1), MAX_WEALTH) + left
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
        nth = nth + self.totals[process].sum(axis=1)
        left = waiting(nth.astype(float), elapsed[row], self.hazard[process])
        before = np.empty_like(left)
        before[1:] = left[:-1]
        before[heads] = self.unbet[process[heads]]
        left = np.minimum(left, before)
        return before - left, left

    def _advance(self, here: Ints, heads: Ints, counts: Ints, gains: Floats, joining: Floats) -> Floats:
        """Wealth after each event."""
        num_runs = -(-counts // _RUN)
        first_run = np.cumsum(num_runs) - num_runs
        place = np.arange(len(gains)) - np.repeat(heads, counts)
        run = np.repeat(first_run, counts) + place // _RUN
        slot = place % _RUN
        shape = (int(num_runs.sum()), _RUN, NUM_ALTERNATIVES)
        log_gain = np.zeros(shape)
        log_gain[run, slot] = gains
        joins = np.zeros(shape[:2])
        joins[run, slot] = joining / NUM_ALTERNATIVES
        product = np.cumsum(log_gain, axis=1)
        joined = np.cumsum(joins[..., None] * np.exp(log_gain - product), axis=1)
        product = np.exp(product)
        begin = np.empty((shape[0], NUM_ALTERNATIVES))
        wealth = self.wealth[here]
        for nth in range(int(num_runs.max())):
            live = np.flatnonzero(num_runs > nth)
            at = first_run[live] + nth
            begin[at] = wealth[live]
            wealth[live] = np.minimum(product[at, -1] * (wealth[live] + joined[at, -1]), MAX_WEALTH)
        found: Floats = np.minimum((product * (begin[:, None] + joined))[run, slot], MAX_WEALTH)
        return found
