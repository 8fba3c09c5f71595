"""A hiccup contributes little, a regression is not hidden, and what is heard depends on the past only."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sluice_operator.gates.cap import BURST, Bucket, latency_refill


def heard(bucket: Bucket, events: list[int], time: list[float]) -> list[bool]:
    found = bucket.heard(np.array(events, np.int64), np.array(time))
    return [True] * len(time) if found is None else found.tolist()


def test_two_at_once_and_then_one_a_token() -> None:
    """Tokens 2, 1 a second: events at 0.0 and 0.1 leave 0.1; the next is heard when 1 is there again, at
    1.0."""
    time = [0.0, 0.1, 0.2, 0.9, 1.0, 1.1]
    assert heard(Bucket(1.0), list(range(6)), time) == [True, True, False, False, True, False]


def test_both_arms_are_unheard_while_it_is_empty() -> None:
    """Rows 2 and 3 are stable's."""
    assert heard(Bucket(1.0), [0, 1], [0.0, 0.1, 0.2, 5.0]) == [True, True, False, True]


def test_no_event_hears_all() -> None:
    assert Bucket(1.0).heard(np.array([], np.int64), np.arange(3.0)) is None


def test_the_candidates_share_slows_it() -> None:
    """3 a second at 10 %, a fifth of it at 50 %, a quarter at 5 %."""
    found = [latency_refill(share) for share in (0.1, 0.5, 0.05, None)]
    assert found == pytest.approx([3.0, 0.6, 0.75, 3.0])


Steps = list[tuple[float, bool]]
steps = st.lists(st.tuples(st.floats(0.0, 2.0), st.booleans()), min_size=1, max_size=60)


def spread(found: Steps) -> tuple[list[float], list[bool]]:
    return np.cumsum([gap for gap, _ in found]).tolist(), [event for _, event in found]


@settings(max_examples=60)
@given(found=steps, cut=st.integers(0, 60))
def test_batches_make_no_difference(found: Steps, cut: int) -> None:
    time, event = spread(found)
    rows = [row for row, one in enumerate(event) if one]
    whole = heard(Bucket(0.7), rows, time)
    bucket, cut = Bucket(0.7), min(cut, len(time))
    parts = heard(bucket, [row for row in rows if row < cut], time[:cut]) if cut else []
    if cut < len(time):
        parts += heard(bucket, [row - cut for row in rows if row >= cut], time[cut:])
    assert parts == whole


@settings(max_examples=60)
@given(found=steps, row=st.integers(0, 59))
def test_what_is_heard_depends_on_the_past_only(found: Steps, row: int) -> None:
    """Else it would be no bet: the arm of a request must not decide whether it counts."""
    time, event = spread(found)
    row = min(row, len(time) - 1)
    other = [*event[:row], *(not one for one in event[row:])]
    first, second = (
        heard(Bucket(0.7), [at for at, one in enumerate(events) if one], time) for events in (event, other)
    )
    assert first[: row + 1] == second[: row + 1]


@settings(max_examples=60)
@given(found=steps)
def test_no_more_than_the_burst_and_the_refill(found: Steps) -> None:
    time, event = spread(found)
    rows = [row for row, one in enumerate(event) if one]
    ears = heard(Bucket(0.7), rows, time)
    num = sum(ears[row] for row in rows)
    assert num <= BURST + 0.7 * (time[-1] - time[0]) + 1e-6
