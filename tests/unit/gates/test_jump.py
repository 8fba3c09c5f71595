"""Rare events in a cluster: hand-computed, and no more false alarms than it has paid for."""

from __future__ import annotations

import math

import numpy as np
import pytest

from sluice_operator.gates.battery import battery, jump_parts
from sluice_operator.gates.jump import BEGUN, KNOWN, KNOWN_BY_SHARE, WORSE, Jump, table
from unit.gates.traffic import rule


def taken(
    jump: Jump, at: list[int], candidate: list[bool], share: float = 0.25, alpha: float = 0.01
) -> int | None:
    """Events after so many requests each."""
    num = max(at) + 1
    arms, ended = np.zeros(num, bool), np.arange(1, num + 1)
    arms[at] = candidate
    fired = jump.take(np.array(at), None, arms, ended, share, alpha)
    jump.settle(num)
    return fired


def test_score_by_hand() -> None:
    """A candidate that is 30 times worse makes 1 + 29 / 4 = 8.25 times as many at a quarter. One event in
    1,000 requests is usual at first. After 4,000 requests: events at 4,000 and 4,100. The first begins with
    0.6 ln 8.25, the other adds ln 8.25; between them go 7.25 * 100 times the usual rate, then 2 in 5,101."""
    jump = Jump(0.2)
    jump.settle(4000)
    taken(jump, [0, 100], [True, True])
    assert jump.score == pytest.approx(1.6 * math.log(8.25) - 7.25 * 100 * 2 / 5101)


def test_four_errors_of_four_fire_at_a_quarter_by_default() -> None:
    """Wealth 0.1 (10/3.25)^4 + 0.3 (30/8.25)^4 + 0.6 (100/25.75)^4 = 9.0 + 52.5 + 136.5 = 197.9; errors have
    0.6 of alpha, so it takes 1 / (0.01 * 0.6 * 0.88) = 189.4. At a tenth three do: 0.1 (10/1.9)^3 + 0.3
    (30/3.9)^3 + 0.6 (100/10.9)^3 = 14.6 + 136.6 + 463.3 = 614."""
    tests = battery(rule()).tests
    (part,) = (part for at, part in jump_parts(tests).items() if tests[at].name == "ErrorRate")
    jump = Jump(part)
    jump.settle(4000)
    assert taken(jump, [0, 80, 160], [True] * 3) is None
    assert jump.threshold(0.01) == pytest.approx(189.4, abs=0.1)
    assert taken(jump, [60], [True]) == 60
    assert jump.wealth.sum() == pytest.approx(197.9, abs=0.1)
    tenth = Jump(part)
    tenth.settle(4000)
    assert taken(tenth, [0, 80], [True] * 2, share=0.1) is None
    assert taken(tenth, [60], [True], share=0.1) == 60
    assert tenth.wealth.sum() == pytest.approx(614, abs=1)


def test_an_isolated_error_begins_anew() -> None:
    jump = Jump(0.3)
    taken(jump, [0], [True])
    taken(jump, [5000], [True])
    assert jump.score == pytest.approx(0.6 * math.log(8.25))
    assert jump.wealth.sum() == pytest.approx(float(table(0.25)[1] @ np.array([0.1, 0.3, 0.6])))


def test_an_outage_of_both_arms_does_not_fire() -> None:
    jump = Jump(0.3)
    jump.settle(4000)
    arms = (np.random.default_rng(5).random(500) < 0.25).tolist()
    assert taken(jump, list(range(500)), arms) is None
    assert jump.num_known == 1


def test_later_clusters_pay_more_and_all_of_it_is_the_part() -> None:
    """0.88, then 0.12 * 6 / pi^2 = 0.07295 and a quarter, a ninth … of it: 1 + 1/4 + 1/9 … = pi^2 / 6."""
    jump, parts = Jump(0.3), []
    for num in range(1, 20_000):
        jump.num_known = num
        parts.append(1.0 / jump.threshold(0.01) / (0.01 * 0.3))
    assert parts[:4] == pytest.approx([0.88, 0.07295, 0.07295 / 4, 0.07295 / 9], rel=1e-3)
    assert sum(parts) == pytest.approx(1.0, abs=1e-5)
    assert sum(parts) <= 1.0


def test_alpha_nought_never_fires() -> None:
    assert taken(Jump(0.3), list(range(50)), [True] * 50, alpha=0.0) is None


def test_a_restart_goes_on() -> None:
    jump = Jump(0.3)
    jump.settle(4000)
    taken(jump, [0, 40], [True] * 2)
    other = Jump(0.3)
    other.restore(jump.saved())
    assert other.saved() == jump.saved()
    assert taken(jump, [40, 80, 120], [True] * 3) == taken(other, [40, 80, 120], [True] * 3) == 120
    assert other.score == pytest.approx(jump.score, rel=1e-6)


def test_false_alarms_are_no_more_than_paid_for() -> None:
    """At alpha 0.5, all of it: errors of both arms alike, now and then ten times as many."""
    rng, num_fired, num_runs = np.random.default_rng(11), 0, 300
    for _ in range(num_runs):
        jump = Jump(1.0)
        times = np.arange(20_000)
        rate = np.where((times // 2000) % 5 == 4, 0.02, 0.002)
        rows = np.flatnonzero(rng.random(len(times)) < rate)
        arms = rng.random(len(times)) < 0.25
        num_fired += jump.take(rows, None, arms, times + 1, 0.25, 0.5) is not None
    assert num_fired / num_runs <= 0.5


@pytest.mark.parametrize("share", [0.01, 0.1, 0.25, 0.5, 0.9])
def test_one_or_two_events_are_no_cluster(share: float) -> None:
    """Not even at once: of the candidate's at 0.01 the second would fire alone."""
    jump = Jump(1.0)
    jump.settle(4000)
    assert taken(jump, [0, 1], [True] * 2, share=share) is None
    assert not jump.recognised
    rise = max(2.0, 1.0 + (WORSE - 1.0) * share)
    assert (BEGUN + 1.0) * math.log(rise) < KNOWN + KNOWN_BY_SHARE * share
