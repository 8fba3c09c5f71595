"""Who is to blame when the evidence fires: the rule as a whole, or one task, one tenant, or both together.

The rule, exactly. Let h be the test that fired (of a ladder, its guard's first tail), and look at the
candidate's requests since the regression began: since that one of its last 32 bad events under h from which
on there are most too many of them (k ln(k / m) - k + m is largest, with k events where m would be fair). For
a slice and for all the others together count the requests n and bad events b. p = b/n is the slice's rate; p0
is the rate that the others should have: stable's among the others since evidence began, (bad + 1/2) /
(requests + 1), times the tolerance of a rate, or a ceiling's own rate. The slice is named if

1. it has at least 3 bad events (5 where it is a task of one tenant: fewer may be alike by chance), p > 2 p0,
   and the others have at least `MIN_OTHERS` requests;
2. the others look clean: so many bad events or more would come with a chance of at least `USUAL` at rate p0;
3. and they would not if they were like the slice: the likelihood of their b (Poisson) is at least `CLEAR`
   times higher under p0 than under p, b ln(p0/p) + n (p - p0) >= ln 20.

Of several slices the one with the fewest requests is named; of equal ones the task. None: the whole rule.
Example: an INT4 arm fails 6 of 15 requests at nl2sql and none of 45 others, stable none at all; p is 0.4, so
45 * 0.4 = 18 > 3.0: nl2sql. Two bad tasks: each finds the other's bad events among the others': the whole
rule.
"""

from __future__ import annotations

import math

from .battery import Kind
from .evidence import Evidence
from .slices import RULE

MIN_EVENTS, MIN_EVENTS_OF_BOTH = 3, 5
MIN_OTHERS = 5
USUAL = 0.02
CLEAR = 20.0


def attribute(evidence: Evidence, test: int) -> tuple[str, str] | None:
    """Task and tenant ("": any) of the slice that is to blame under the test that fired; None: all of it."""
    test = evidence.first_tail(test)
    if evidence.battery.tests[test].kind is Kind.PAIR:
        return None
    since = _began(evidence, test)
    num_all, bad_all = evidence.recent.counts(test, since)
    found: list[tuple[int, int]] = []
    for slot, task, tenant in evidence.slices.order():
        num, bad = evidence.recent.counts(test, since, slot)
        least = MIN_EVENTS_OF_BOTH if task and tenant else MIN_EVENTS
        if bad < least or num_all - num < MIN_OTHERS:
            continue
        fair = _fair(evidence, test, slot)
        if bad / num > 2.0 * fair and _clean(num_all - num, bad_all - bad, fair, bad / num):
            found.append((num, slot))
    return evidence.slices.names[min(found)[1]] if found else None


def _began(evidence: Evidence, test: int) -> float:
    """Unix seconds of the bad event from which on there are most too many."""
    fair = _fair(evidence, test, None)
    best, found = -math.inf, math.inf
    for number, (time, num) in enumerate(zip(*evidence.recent.times(test), strict=True), start=1):
        mean = max(1, num) * fair
        surprise = number * math.log(number / mean) - number + mean if number > mean else 0.0
        if surprise > best:
            best, found = surprise, time
    return found


def _fair(evidence: Evidence, test: int, slot: int | None) -> float:
    """The rate that all but this slice should have; of all, without one."""
    spec = evidence.battery.tests[test]
    if spec.kind is Kind.CEILING:
        return evidence.fair_rate(test)
    bad, num = evidence.bad(RULE, test)[0], int(evidence.ended[RULE, 0])
    if slot is not None:
        bad, num = bad - evidence.bad(slot, test)[0], num - int(evidence.ended[slot, 0])
    return (bad + 0.5) / (max(0, num) + 1.0) * (spec.tolerance if spec.kind is Kind.RATE else 1.0)


def _clean(num: int, bad: int, fair: float, like: float) -> bool:
    """Whether so many bad ones of so many are usual at rate `fair`, and not at rate `like`."""
    mean = num * fair
    fewer = sum(math.exp(-mean + nth * math.log(mean) - math.lgamma(nth + 1)) for nth in range(bad))
    return 1.0 - fewer >= USUAL and bad * math.log(fair / like) + num * (like - fair) >= math.log(CLEAR)
