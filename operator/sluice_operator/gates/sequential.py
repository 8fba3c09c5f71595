"""Tests that may be looked at after every request: was it the candidate's more often than its share?

Assignment to arms is random. Say that stable's requests fall into cells (fast … slow, good or bad) and that
the candidate's, after the tolerance has been taken off, fall into worse cells no more often. Then of the
requests that fall into a cell, the candidate's are at most its share w of the traffic, whatever bursts hit
both arms. An alternative names for each cell j the candidate's odds k_j, which never fall from a better cell
to a worse one. Betting on it multiplies wealth by

    k_j / (k_j w + 1 - w)  for the candidate's request,   1 / (k_j w + 1 - w)  for one of stable's.

Claim: wealth is a nonnegative supermartingale. With c_j and s_j the two factors, w c_j + (1 - w) s_j = 1 in
every cell, and c_j grows with j. If both arms are alike, the arm is independent of the cell and the mean
factor is exactly 1 given the cell. If the candidate's cells are stochastically better, its mean of c_j is no
more than stable's own would be, so the mean factor is at most 1. By Ville's inequality the chance that wealth
ever reaches 1/alpha is at most alpha (Ville 1939; Ramdas, Grünwald, Vovk and Shafer, "Game-theoretic
statistics and safe anytime-valid inference", Statistical Science 38(4), 2023). A mean over alternatives is a
supermartingale too (Robbins' method of mixtures, 1970), and so is one over guards, tasks and tenants.

Three kinds of cells:
- an *event* test looks at bad requests only (one cell): P(candidate | bad) <= rw / (rw + 1 - w) where the
  candidate may have r times stable's rate. Example, w = 0.1, k = 30: a candidate's event is worth 30 / 3.9 =
  7.69, one of stable's 1 / 3.9 = 0.256.
- a *ladder* looks at every request, with cells between stable's quantiles. Its alternatives are shifts of a
  normal variable, as van der Waerden's test has them ("Order tests for the two-sample problem and their
  power", Indagationes Mathematicae 14, 1952): where stable exceeds a threshold with probability p, the
  candidate does with Phi(Phi^-1(p) + d). So it is where times that are about log-normal become longer by a
  factor, whatever their spread. A good request of stable's is evidence too: stable is well at this very time.
- a *ceiling* looks at the candidate alone: each request is over an absolute limit with probability at most p.
  Betting on p' > p multiplies by p'/p or (1 - p')/(1 - p): Wald's likelihood ratio (1945), also the bet of
  Waudby-Smith and Ramdas (JRSS B 86(1), 2024) at a fixed fraction.

A regression may begin late, after many good requests have eaten the wealth. So only `FIRST_BET` of the
capital is bet from the start; the rest joins as time goes by, most of it early but some up to the hour at
which evidence restarts, and for rare events half of it as they come: a mixture over the moment at which the
change happens (as in Shin, Ramdas and Rinaldo, "E-detectors", 2023). What has not been bet keeps its value,
so nothing changes.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from statistics import NormalDist

import numpy as np
from numpy.typing import NDArray

Array = NDArray[np.float64]

ODDS = (2.0, 8.0, 30.0, 100.0)
"""Alternatives of an event test: how many times its fair odds the candidate has of having had the event."""

SHIFTS = (0.3, 0.8, 1.4, 2.2)
"""Alternatives of a ladder: by how many standard deviations of a time's logarithm the candidate is slower.
Where that is 0.6, twice as slow as is tolerated is 1.2 of them. For a shift of 2/3 to 3/2 of an
alternative's it grows more than three quarters as fast as the shift's own alternative would."""

RATIOS = (1.5, 3.0, 10.0, 30.0)
"""Alternatives of a ceiling: times the odds of the limit's rate."""

NUM_ALTERNATIVES = 4

FIRST_BET = 0.05
"""Share of the capital that is bet from the first request on: little, since a hiccup may come first."""

JOINED_S = 3600.0
"""By so many seconds after evidence began all capital has joined."""
JOIN_SCALE_S = 60.0
"""Capital joins at a rate that falls as 1 / (t + this): a stage lasts minutes more often than an hour."""

RESTART_POWER = 1.5
_PLANNED = 0.6
_ZETA = 2.6123753486854883  # Riemann's zeta(1.5): the sum of k^-1.5 over k >= 1
_NORMAL = NormalDist()


def null_share(weight: float, tolerance: float = 1.0) -> float:
    """Largest P(candidate | bad) while the candidate's rate is at most `tolerance` times stable's.

    `weight` is the candidate's share of the requests, in (0, 1).
    """
    return tolerance * weight / (tolerance * weight + 1.0 - weight)


def event_table(share: float) -> Array:
    """Log-gains of one bad event: row 0 if it is stable's, row 1 if it is the candidate's; a column an
    alternative. `share` is the null's P(candidate | bad)."""
    odds = np.array(ODDS)
    mean = odds * share + 1.0 - share
    return np.stack([-np.log(mean), np.log(odds / mean)])


def ladder_table(share: float, exceeded: Sequence[float]) -> Array:
    """Log-gains of one request: rows are stable's cells from the best to the worst, then the candidate's.

    `exceeded`: for each threshold, ascending, how often stable exceeds it. It need not be exact.
    """
    odds = np.stack([_shifted(exceeded, shift) for shift in SHIFTS], axis=1)
    mean = odds * share + 1.0 - share
    return np.concatenate([-np.log(mean), np.log(odds / mean)])


def ceiling_table(rate: float) -> Array:
    """Log-gains of one request of the candidate: row 0 if it stayed below the limit, row 1 if it did not; row
    2 turns the first into the second."""
    rate = min(max(rate, 1e-6), 0.9)
    odds = np.array(RATIOS) * rate
    worse = odds / (1.0 - rate + odds)
    below, over = np.log((1.0 - worse) / (1.0 - rate)), np.log(worse / rate)
    return np.stack([below, over, over - below])


def swapped(table: Array) -> Array:
    """The same test with the arms exchanged: is stable the worse one?"""
    half = len(table) // 2
    return np.concatenate([table[half:], table[:half]])


def waiting(num_events: Array, elapsed: Array, hazard: Array | float) -> Array:
    """Capital of a test that has not been bet after so many events and seconds; never grows.

    `hazard`: share of half of it that joins at each event; 0: time alone.
    """
    whole = math.log1p(JOINED_S / JOIN_SCALE_S)
    left = np.clip(1.0 - np.log1p(np.maximum(elapsed, 0.0) / JOIN_SCALE_S) / whole, 0.0, 1.0)
    rate = np.where(np.asarray(hazard) > 0.0, 0.5 + 0.5 * (1.0 - np.asarray(hazard)) ** num_events, 1.0)
    found: Array = (1.0 - FIRST_BET) * left * rate
    return found


def spent(num_restarts: int, num_stages: int = 1) -> float:
    """Share of alpha for the evidence after so many restarts; over all restarts they sum to 1.

    Each of the stages that the rollout is known to have gets an equal part of 0.6; what restarts beyond that
    (hours, edits, a slice rolled back) is given by k^-1.5 / zeta(1.5) of the rest, half as steep as the Basel
    series, so that an hour late in a long watch is not deaf. (Editing steps changes the number of stages, and
    with it what later ones get; alpha is exact for steps as they stand.)
    """
    planned = _PLANNED / num_stages if num_restarts < num_stages else 0.0
    return planned + (1.0 - _PLANNED) * float((num_restarts + 1.0) ** -RESTART_POWER / _ZETA)


def threshold(alpha: float, num_restarts: int, num_stages: int = 1) -> float:
    """What the e-value must reach after so many restarts of evidence; infinite for alpha 0."""
    if alpha <= 0.0:
        return math.inf
    return 1.0 / (min(alpha, 0.5) * spent(num_restarts, num_stages))


def _shifted(exceeded: Sequence[float], shift: float) -> Array:
    """Odds of each cell: how often the candidate would fall into it for once that stable does. They grow from
    cell to cell, as the normal shift's likelihood ratio does."""
    stable = np.array([1.0, *exceeded, 0.0])
    candidate = np.array([1.0, *(_NORMAL.cdf(_NORMAL.inv_cdf(rate) + shift) for rate in exceeded), 0.0])
    odds: Array = (candidate[:-1] - candidate[1:]) / np.maximum(stable[:-1] - stable[1:], 1e-12)
    return odds
