"""Each number worked out by hand, beside the formula's source."""

from __future__ import annotations

import itertools
import math

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sluice_operator.gates.sequential import (
    FIRST_BET,
    JOIN_SCALE_S,
    JOINED_S,
    ODDS,
    SHIFTS,
    ceiling_table,
    event_table,
    ladder_table,
    null_share,
    spent,
    swapped,
    threshold,
    waiting,
)

LEVELS = (0.5, 0.1, 0.05, 0.01, 0.002)


def test_event_at_a_tenth() -> None:
    """k / (kw + 1 - w) and 1 / (kw + 1 - w) with w = 0.1: for k = 30 that is 30/3.9 and 1/3.9 (Wald's
    likelihood ratio of P(candidate | bad) = kw / (kw + 1 - w) against w)."""
    table = np.exp(event_table(0.1))
    divisors = {2.0: 1.1, 8.0: 1.7, 30.0: 3.9, 100.0: 10.9}
    for column, odds in enumerate(ODDS):
        assert table[1, column] == pytest.approx(odds / divisors[odds])
        assert table[0, column] == pytest.approx(1.0 / divisors[odds])


def test_ladder_of_one_threshold() -> None:
    """Stable exceeds its p90, 1.28155 standard deviations up, with 0.1; a candidate that is 0.8 of them
    slower exceeds what is 0.48155 up: 0.31506 by the normal table. Odds 3.1506 above and 0.68494 / 0.9 =
    0.76104 below; at w = 0.1 the factors are 3.1506/1.21506 and 0.76104/0.976104."""
    table = np.exp(ladder_table(0.1, [0.1]))
    column = SHIFTS.index(0.8)
    assert table[:, column] == pytest.approx(
        [1 / 0.976104, 1 / 1.21506, 0.76104 / 0.976104, 3.1506 / 1.21506], rel=1e-4
    )


def test_ceiling_of_five_percent() -> None:
    """Odds of 0.05 are 1/19; three times as much is 3/22: over is worth 0.13636/0.05, below 0.86364/0.95."""
    table = np.exp(ceiling_table(0.05))
    assert table[1, 1] == pytest.approx(3 / 22 / 0.05)
    assert table[0, 1] == pytest.approx(19 / 22 / 0.95)
    assert table[2] == pytest.approx(table[1] / table[0])


@pytest.mark.parametrize("share", [0.01, 0.1, 0.5, 0.9])
def test_every_table_is_a_fair_bet_at_the_null(share: float) -> None:
    """w c_j + (1 - w) s_j = 1 in each cell, so the mean factor is 1 whatever the cells' chances: what Ville's
    inequality needs (Ville 1939)."""
    events = np.exp(event_table(share))
    assert share * events[1] + (1 - share) * events[0] == pytest.approx(1.0)
    ladder = np.exp(ladder_table(share, LEVELS))
    half = len(ladder) // 2
    assert share * ladder[half:] + (1 - share) * ladder[:half] == pytest.approx(1.0)
    ceiling = np.exp(ceiling_table(share))
    rate = min(share, 0.9)
    assert rate * ceiling[1] + (1 - rate) * ceiling[0] == pytest.approx(1.0)


def test_worse_cells_are_worth_more_of_the_candidate() -> None:
    """The proof for a candidate that is better than stable needs it: its factor grows from cell to cell."""
    ladder = ladder_table(0.2, LEVELS)
    half = len(ladder) // 2
    assert (np.diff(ladder[half:], axis=0) > 0).all()
    assert (np.diff(ladder[:half], axis=0) < 0).all()


@given(
    share=st.floats(0.02, 0.9),
    stable=st.lists(st.floats(0.01, 1.0), min_size=6, max_size=6),
    moved=st.lists(st.floats(0.0, 1.0), min_size=5, max_size=5),
)
def test_a_better_candidate_only_loses_wealth(share: float, stable: list[float], moved: list[float]) -> None:
    """Move any part of the candidate's chance of each cell to the next better one: the mean factor is at most
    1."""
    chances = np.array(stable) / sum(stable)
    candidate = chances.copy()
    for cell, part in enumerate(moved, start=1):
        candidate[cell - 1] += part * candidate[cell]
        candidate[cell] *= 1.0 - part
    table = np.exp(ladder_table(share, LEVELS))
    mean = share * candidate @ table[6:] + (1 - share) * chances @ table[:6]
    assert (mean <= 1.0 + 1e-9).all()


def test_swapped_arms() -> None:
    table = ladder_table(0.3, [0.5])
    assert (swapped(table)[:2] == table[2:]).all()
    assert (swapped(table)[2:] == table[:2]).all()


def test_tolerated_odds() -> None:
    """At 10 % and a rate allowed to be twice stable's, 2 of 11 errors may be the candidate's."""
    assert null_share(0.1, 2.0) == pytest.approx(2 / 11)
    assert null_share(0.1) == pytest.approx(0.1)


def test_waiting_capital_by_hand() -> None:
    """0.95 at first; after a minute ln 2 / ln 61 of it has joined, after an hour all. At hazard 0.1 half goes
    by events: after 3 of them 0.5 + 0.5 * 0.729 = 0.8645 of it is left."""
    none, some = np.zeros(1), np.full(1, 3.0)
    assert waiting(none, none, 0.0)[0] == pytest.approx(1.0 - FIRST_BET)
    minute = waiting(none, np.full(1, JOIN_SCALE_S), 0.0)[0]
    assert minute == pytest.approx(0.95 * (1.0 - math.log(2) / math.log(61)))
    assert waiting(none, np.full(1, JOINED_S), 0.0)[0] == pytest.approx(0.0)
    assert waiting(some, none, 0.1)[0] == pytest.approx(0.95 * 0.8645)


@settings(max_examples=50)
@given(steps=st.lists(st.tuples(st.integers(0, 5), st.floats(0, 500)), min_size=2, max_size=20))
def test_waiting_capital_never_grows(steps: list[tuple[int, float]]) -> None:
    events = np.cumsum([one for one, _ in steps]).astype(float)
    elapsed = np.cumsum([one for _, one in steps])
    for hazard in (0.0, 0.1):
        left = waiting(events, elapsed, hazard)
        assert (np.diff(left) <= 1e-12).all()
        assert (left >= 0.0).all()


def test_alpha_is_shared_over_all_restarts() -> None:
    """zeta(1.5) = 2.612375; with four stages the first has 0.6 / 4 + 0.4 / 2.612375 = 0.30312 of alpha."""
    assert spent(0, 4) == pytest.approx(0.30312, abs=1e-5)
    assert threshold(0.01, 0, 4) == pytest.approx(100 / 0.30312, rel=1e-4)
    assert spent(4, 4) == pytest.approx(0.4 * 5**-1.5 / 2.612375, rel=1e-5)
    assert threshold(0.0, 0) == math.inf
    total = sum(spent(restart, 4) for restart in range(200_000))
    assert total == pytest.approx(1.0, abs=1e-3)
    assert total <= 1.0


def test_mean_over_all_outcomes_is_one() -> None:
    """E[wealth after n events] = 1 exactly, over all 2^n outcomes."""
    table, share = np.exp(event_table(0.2)), 0.2
    mean = 0.0
    for outcome in itertools.product([0, 1], repeat=8):
        chance = math.prod(share if one else 1.0 - share for one in outcome)
        mean += chance * float(np.prod(table[list(outcome)], axis=0).mean())
    assert mean == pytest.approx(1.0)
