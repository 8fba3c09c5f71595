"""A hiccup contributes little, a regression is not hidden, and what is heard depends on the past only."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sluice_operator.gates.cap import (
    RATE_REFILL,
    RATE_WORTH,
    Bucket,
    latency_tokens,
    rate_burst,
)


def heard(bucket: Bucket, events: list[int], time: list[float]) -> list[bool]:
    found = bucket.heard(np.array(events, np.int64), np.array(time))
    return [True] * len(time) if found is None else found.tolist()


def test_two_at_once_and_then_one_a_token() -> None:
    """Tokens 2, 1 a second: events at 0.0 and 0.1 leave 0.1; the next is heard when 1 is there again, at
    1.0."""
    time = [0.0, 0.1, 0.2, 0.9, 1.0, 1.1]
    assert heard(Bucket(2.0, 1.0), list(range(6)), time) == [True, True, False, False, True, False]


def test_both_arms_are_unheard_while_it_is_empty() -> None:
    """Rows 2 and 3 are stable's."""
    assert heard(Bucket(2.0, 1.0), [0, 1], [0.0, 0.1, 0.2, 5.0]) == [True, True, False, True]


def test_no_event_hears_all() -> None:
    assert Bucket(2.0, 1.0).heard(np.array([], np.int64), np.arange(3.0)) is None


def test_the_candidates_share_slows_it() -> None:
    """4 and 2.5 a second at 10 %; at 50 % a fifth of it, at 5 % a quarter, at 20 % half; 2 at least."""
    found = [latency_tokens(share) for share in (0.1, 0.5, 0.05, 0.2, None)]
    assert [burst for burst, _ in found] == pytest.approx([4.0, 2.0, 2.0, 2.0, 4.0])
    assert [refill for _, refill in found] == pytest.approx([2.5, 0.5, 0.625, 1.25, 2.5])


def test_the_candidates_share_says_how_many_failures_are_too_few_to_tell() -> None:
    """ln 150 = 5.01 over ln 20 = 3.00, ln 10 = 2.30, ln 4 = 1.39: down to whole ones, and three at most."""
    assert [rate_burst(share) for share in (0.001, 0.05, 0.1, 0.25, 0.5)] == [1, 1, 2, 3, 3]
    assert rate_burst(None) == 2


def test_two_seconds_of_standstill_count_as_nine_slow_requests() -> None:
    time = np.arange(0.0, 2.0, 0.01)
    num = sum(heard(Bucket(*latency_tokens(0.1)), list(range(200)), time.tolist()))
    assert 8 <= num <= 9, "the ninth comes with the second second's end"


@pytest.mark.parametrize("share", [0.02, 0.05, 0.1, 0.25, 0.5, 0.8])
def test_two_seconds_of_failures_are_worth_less_than_a_rollback(share: float) -> None:
    """An event of the candidate's multiplies wealth by less than 1 / share."""
    time = np.arange(0.0, 2.0, 0.001)
    num = sum(heard(Bucket(rate_burst(share), RATE_REFILL), list(range(2000)), time.tolist()))
    assert share**-num <= RATE_WORTH < 1.0 / (0.01 * 0.6 * 0.88)


Steps = list[tuple[float, bool]]
steps = st.lists(st.tuples(st.floats(0.0, 2.0), st.booleans()), min_size=1, max_size=60)


def spread(found: Steps) -> tuple[list[float], list[bool]]:
    return np.cumsum([gap for gap, _ in found]).tolist(), [event for _, event in found]


@settings(max_examples=60)
@given(found=steps, cut=st.integers(0, 60))
def test_batches_make_no_difference(found: Steps, cut: int) -> None:
    time, event = spread(found)
    rows = [row for row, one in enumerate(event) if one]
    whole = heard(Bucket(2.0, 0.7), rows, time)
    bucket, cut = Bucket(2.0, 0.7), min(cut, len(time))
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
        heard(Bucket(2.0, 0.7), [at for at, one in enumerate(events) if one], time)
        for events in (event, other)
    )
    assert first[: row + 1] == second[: row + 1]


@settings(max_examples=60)
@given(found=steps)
def test_no_more_than_the_burst_and_the_refill(found: Steps) -> None:
    time, event = spread(found)
    rows = [row for row, one in enumerate(event) if one]
    ears = heard(Bucket(2.0, 0.7), rows, time)
    num = sum(ears[row] for row in rows)
    assert num <= 2.0 + 0.7 * (time[-1] - time[0]) + 1e-6
