"""A test that may be looked at after every event: was the bad event the candidate's more often than its
share?

Assignment to arms is random, so under "the candidate is not worse" each bad event of either arm is the
candidate's with probability at most w, its share of the traffic, whatever bursts hit both. Against that
null stand alternatives in which the candidate's odds are multiplied by k: P(candidate | bad) = kw / (kw + 1
- w). Betting on such an alternative multiplies wealth by k / (kw + 1 - w) for a candidate's event and by 1
/ (kw + 1 - w) for one of stable's; the mean of that under the null is at most 1, so wealth is a test
supermartingale and Ville's inequality bounds the chance that it ever reaches 1/alpha by alpha (Ville 1939;
Ramdas, Grünwald, Vovk and Shafer, "Game-theoretic statistics and safe anytime-valid inference", Statistical
Science 38(4), 2023). A mean over alternatives is one too (Robbins' method of mixtures, 1970).

A regression may begin late, after many good events have eaten the wealth. So only half of each
alternative's capital is bet at the first event, and a thousandth of the rest at each later one: a mixture
over the moment at which the change happens (as in Shin, Ramdas and Rinaldo, "E-detectors", 2023). Capital
not yet bet keeps its value, so nothing of the above changes.

Example, w = 0.1 and k = 30: a candidate's event is worth 30 / 3.9 = 7.69, one of stable's 1 / 3.9 = 0.256.
"""

from __future__ import annotations

import math
from collections.abc import Sequence

ODDS = (2.0, 4.0, 10.0, 30.0)
"""Alternatives: how many times its fair odds the candidate has of being the one with the bad event."""

FIRST_BET = 0.5
"""Share of the capital that is bet from the first event on."""

HAZARD = 0.001
"""Share of the remaining capital that joins at each later event."""

_MAX_LOG = 700.0


def null_share(weight: float, tolerance: float = 1.0) -> float:
    """Largest P(candidate | bad) while the candidate's rate is at most `tolerance` times stable's.

    `weight` is the candidate's share of the requests, in (0, 1).
    """
    return tolerance * weight / (tolerance * weight + 1.0 - weight)


def bet(log_wealth: Sequence[float], num_events: int, share: float, candidate: bool) -> tuple[float, ...]:
    """Log-wealth of each alternative after one more bad event; `num_events` were seen before it.

    `share` is the null's P(candidate | bad), in (0, 1). Empty `log_wealth` is the beginning.
    """
    joining = _joining(num_events)
    after = []
    for index, odds in enumerate(ODDS):
        held = math.exp(log_wealth[index]) if log_wealth else 0.0
        gain = (odds if candidate else 1.0) / (odds * share + 1.0 - share)
        after.append(min(math.log(held + joining) + math.log(gain), _MAX_LOG))
    return tuple(after)


def e_value(log_wealth: Sequence[float], num_events: int) -> float:
    """Evidence against "not worse": its expectation under the null is at most 1 at any time one may
    choose to look."""
    if not log_wealth:
        return 1.0
    return sum(math.exp(value) for value in log_wealth) / len(log_wealth) + _waiting(num_events)


def threshold(alpha: float, num_restarts: int) -> float:
    """What the e-value must reach after so many restarts of evidence; infinite for alpha 0.

    Window k = `num_restarts` + 1 gets alpha * 6 / (pi^2 k^2), which sums to alpha over all windows (Basel
    problem).
    """
    if alpha <= 0.0:
        return math.inf
    return (math.pi * (num_restarts + 1)) ** 2 / (6.0 * min(alpha, 0.5))


def _waiting(num_events: int) -> float:
    """Capital of one alternative that has not been bet after `num_events` events."""
    return 1.0 if num_events == 0 else (1.0 - FIRST_BET) * (1.0 - HAZARD) ** (num_events - 1)


def _joining(num_events: int) -> float:
    """Capital that joins at the event after `num_events`."""
    return FIRST_BET if num_events == 0 else _waiting(num_events) * HAZARD
