"""Errors that come in a cluster: found sooner than by the hour's evidence, at a price that is paid by the
cluster.

Rare events waste capital: a test that waits all hour for a change has to spread it over the hour. But when
errors are rare, their coming at all says when to look. Let both arms' events together, whosever they are,
make a CUSUM score (Page 1954): each adds ln r, each request takes (r - 1) times the usual rate away, and from
0 it begins anew. Here r is how much more often they would come if the candidate had them `WORSE` times as
often. From one beginning to the next is a *cluster*; it is *recognised* once the score has reached `KNOWN`,
more where the candidate has a larger share. Within a cluster wealth is bet from 1 as in `sequential`, its
first events included, and a recognised one fires at 1 / (alpha a c), where a is the test's part of alpha and
of the attempt's recognised clusters the first has c = 0.88, those after it 0.12 * 6 / pi^2 / i^2 for i = 1, 2
… Nearly all is for the first: in most rollouts there is one or none.

Claim: the chance of ever firing falsely is at most alpha a. Under the null the arm of each event is a coin of
its own, with P(candidate) at most w, whatever the times of all events are. Fix these times: clusters and
their numbers are then fixed too, for no arm enters into them. Within each, wealth is a supermartingale from
1, so it reaches 1 / (alpha a c) with chance at most alpha a c (Ville); the c sum to 1. Guards' caps only
leave events out by what came before.

Example at w = 0.25, r = 8.25: four errors within 320 requests where one in a thousand is usual score 3.6 ln r
- 7.25 * 0.32 = 5.3. All four are the candidate's with chance 0.25^4 = 0.0039.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

import numpy as np

from .columns import Bools, Floats, Ints

WORSE, LEAST_RISE = 30.0, 2.0
BEGUN = 0.6
"""What a cluster's first event adds, of what others do: it may have been a usual one that came before."""
KNOWN, KNOWN_BY_SHARE = 2.3, 7.0
FIRST_PART = 0.88
"""What the first recognised cluster has of the test's part of alpha."""
_LATER_PART = (1.0 - FIRST_PART) * 6.0 / math.pi**2
"""Over the squares of 1, 2 … it is what the later ones have: the squares' inverses sum to pi^2 / 6."""
ODDS = (10.0, 30.0, 100.0)
_PRIOR = (0.1, 0.3, 0.6)
_USUAL = (1.0, 1000.0)
"""Events and requests that are thought to have been before the first."""
_LIMIT = 1e15


class Jump:
    """Clusters of one test over all requests of the rule."""

    __slots__ = (
        "_num_events",
        "_num_requests",
        "_seen_at",
        "num_known",
        "part",
        "recognised",
        "score",
        "wealth",
    )

    def __init__(self, part: float) -> None:
        self.part = part
        """Part of alpha."""
        self.num_known = 0
        """Clusters recognised in this attempt."""
        self.recognised = False
        self.score = 0.0
        self.wealth = np.array(_PRIOR)
        self._num_events, self._num_requests = _USUAL
        self._seen_at = 0.0

    @property
    def touched(self) -> bool:
        """Whether it has seen an event."""
        return self._num_events > _USUAL[0]

    def settle(self, num_requests: int) -> None:
        """So many requests have ended since the last call, after all events that were taken."""
        self._num_requests += num_requests

    def take(
        self, events: Ints, heard: Bools | None, candidate: Bools, ended: Ints, share: float, alpha: float
    ) -> int | None:
        """Takes in a batch's events. `events`: their rows; `ended`: requests of the batch that had ended by
        each row. `share`: the null's P(candidate | event). Returns the row at which it fires; None: it does
        not."""
        gains, rise = table(share), max(LEAST_RISE, 1.0 + (WORSE - 1.0) * share)
        fired: int | None = None
        for row in events.tolist():
            at = self._num_requests + float(ended[row])
            self.score -= (rise - 1.0) * (self._num_events / at) * (at - self._seen_at)
            self._seen_at = at
            self._num_events += 1.0
            if self.score <= 0.0:
                self.rest()
                self.score = BEGUN * math.log(rise)
            else:
                self.score += math.log(rise)
            if heard is None or heard[row]:
                self.wealth = np.minimum(self.wealth * gains[int(candidate[row])], _LIMIT)
            if not self.recognised and self.score >= KNOWN + KNOWN_BY_SHARE * share:
                self.recognised = True
                self.num_known += 1
            if fired is None and self.recognised and self.wealth.sum() >= self.threshold(alpha):
                fired = row
        return fired

    def threshold(self, alpha: float) -> float:
        """What the wealth of the current cluster must reach; infinite for alpha 0."""
        later = self.num_known - 1
        paid = min(alpha, 0.5) * self.part * (_LATER_PART / later**2 if later > 0 else FIRST_PART)
        return 1.0 / paid if paid > 0.0 else math.inf

    def rest(self) -> None:
        """The cluster ends. Other traffic ends it too, since the share is another."""
        self.score, self.recognised, self.wealth = 0.0, False, np.array(_PRIOR)

    def saved(self) -> list[str]:
        """For the status: logarithms of wealth, then score, clusters, events and requests."""
        logs = [f"{math.log(max(value, 1e-300)):.9g}" for value in self.wealth.tolist()]
        rest = (self.score, float(self.num_known), self._num_events, self._num_requests - self._seen_at)
        return [*logs, *(f"{value:.9g}" for value in rest), f"{self._num_requests:.9g}"]

    def restore(self, saved: Sequence[str]) -> None:
        """Goes on from there."""
        values = [float(text) for text in saved]
        if len(values) != len(ODDS) + 5:
            return
        self.wealth = np.minimum(np.exp(values[:3]), _LIMIT)
        self.score, self.num_known, self._num_events = values[3], int(values[4]), values[5]
        self._num_requests = values[7]
        self._seen_at = values[7] - values[6]
        self.recognised = False  # if it was, it will be again, at the next cluster's price


def table(share: float) -> Floats:
    """Gains of an event: row 0 if it is stable's, row 1 if it is the candidate's."""
    odds = np.array(ODDS)
    mean = odds * share + 1.0 - share
    return np.stack([1.0 / mean, odds / mean])
