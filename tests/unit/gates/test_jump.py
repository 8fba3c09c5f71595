"""Rare events in a cluster: hand-computed, and no more false alarms than it has paid for."""

from __future__ import annotations

import math

import numpy as np
import pytest

from sluice_operator.gates.jump import FIRST_PART, KNOWN, KNOWN_BY_SHARE, NEXT_PART, RISE, Jump, table


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
    """One event in 1,000 requests is usual at first. After 4,000 requests: events at 4,000 and 4,100. Both
    add ln 8; between them go 7 * 100 times the usual rate, which is then 2 in 5,101."""
    jump = Jump(0.2)
    jump.settle(4000)
    taken(jump, [0, 100], [True, True])
    assert jump.score == pytest.approx(2 * math.log(RISE) - 7 * 100 * 2 / 5101)


def test_five_of_five_fire_at_a_quarter() -> None:
    """Wealth 0.15 (10/3.25)^5 + 0.35 (30/8.25)^5 + 0.5 (100/25.75)^5 = 706; 1 / (0.01 * 0.3 * 0.6) = 556."""
    jump = Jump(0.3)
    jump.settle(4000)
    assert taken(jump, [0, 80, 160, 240], [True] * 4) is None
    assert jump.threshold(0.01) == pytest.approx(556, rel=1e-2)
    assert taken(jump, [60], [True]) == 60
    assert jump.wealth.sum() == pytest.approx(706, rel=1e-2)


def test_an_isolated_error_begins_anew() -> None:
    jump = Jump(0.3)
    taken(jump, [0], [True])
    taken(jump, [5000], [True])
    assert jump.score == pytest.approx(math.log(RISE))
    assert jump.wealth.sum() == pytest.approx(float(table(0.25)[1] @ np.array([0.15, 0.35, 0.5])))


def test_an_outage_of_both_arms_does_not_fire() -> None:
    jump = Jump(0.3)
    jump.settle(4000)
    arms = (np.random.default_rng(5).random(500) < 0.25).tolist()
    assert taken(jump, list(range(500)), arms) is None
    assert jump.num_known == 1


def test_later_clusters_pay_more_and_all_of_it_is_the_part() -> None:
    jump, parts = Jump(0.3), []
    for num in range(1, 40):
        jump.num_known = num
        parts.append(1.0 / jump.threshold(0.01))
    assert parts[1] == pytest.approx(NEXT_PART * parts[0])
    assert sum(parts) == pytest.approx(0.01 * 0.3)
    assert pytest.approx(1.0) == FIRST_PART / (1.0 - NEXT_PART)


def test_alpha_nought_never_fires() -> None:
    assert taken(Jump(0.3), list(range(50)), [True] * 50, alpha=0.0) is None


def test_a_restart_goes_on() -> None:
    jump = Jump(0.3)
    jump.settle(4000)
    taken(jump, [0, 40, 80], [True] * 3)
    other = Jump(0.3)
    other.restore(jump.saved())
    assert other.saved() == jump.saved()
    assert taken(jump, [40, 80], [True] * 2) == taken(other, [40, 80], [True] * 2) == 80
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
    assert math.log(RISE) < KNOWN + KNOWN_BY_SHARE
