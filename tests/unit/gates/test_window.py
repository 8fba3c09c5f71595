"""Stable's values: order statistics, from before only, by stratum."""

from __future__ import annotations

import itertools

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sluice_operator.gates.columns import Floats
from sluice_operator.gates.window import Limits, Strata, Stream, length_bucket, quantile_rank


def both(values: list[float]) -> Floats:
    """As judged and as measured: the same, where nothing went wrong."""
    return np.stack([values, values])


def rows(found: Limits) -> Floats:
    """Of each request its thresholds."""
    return found.rows[found.at]


def limits(
    values: list[float], times: list[float], ask_at: float, percentiles: tuple[int, ...]
) -> list[float]:
    """Thresholds for a candidate's request after these values of stable."""
    num = len(values)
    samples = np.array([True] * num + [False])
    found = Stream().take(samples, both([*values, 0.0]), np.array([*times, ask_at]), percentiles)
    return [float(one) for one in rows(found)[-1, :-1]]


def test_quantile_is_an_order_statistic() -> None:
    """Of 1, 2 … 20 the 95 % quantile is 19: the smallest value that 95 % do not exceed."""
    values = [float(value) for value in range(1, 21)]
    assert limits(values, [0.0] * 20, 1.0, (50, 95, 99)) == [10.0, 19.0, 20.0]
    assert [quantile_rank(percent, 20) for percent in (50, 95, 99)] == [9, 18, 19]


def test_quantile_needs_samples_that_are_concurrent() -> None:
    values = [float(value) for value in range(20)]
    assert np.isnan(limits(values[:19], [0.0] * 19, 1.0, (95,))[0])
    assert np.isnan(limits(values, [0.0] * 20, 700.0, (95,))[0])
    old_and_new = limits(values, [0.0] * 10 + [900.0] * 10, 901.0, (95,))
    assert np.isnan(old_and_new[0]), "ten of them are too old, and ten are too few"


def test_what_went_wrong_is_above_every_limit_and_no_far_tail() -> None:
    """2 of 40 were cut off: p95 is the 38th, p99 infinite; the far tail begins at 3 times the worst of 38."""
    good = [float(value) for value in range(1, 39)]
    value = np.stack([[*good, np.inf, np.inf, 0.0], [*good, np.nan, np.nan, 0.0]])
    samples = np.array([True] * 40 + [False])
    found = Stream().take(samples, value, np.arange(41.0), (95, 99))
    assert rows(found)[-1].tolist() == [38.0, np.inf, 3 * 38.0]


@settings(max_examples=40)
@given(
    values=st.lists(st.floats(0.01, 10.0), min_size=30, max_size=400),
    cuts=st.lists(st.integers(0, 400), max_size=4),
    samples=st.randoms(use_true_random=False),
)
def test_thresholds_do_not_depend_on_batches(values: list[float], cuts: list[int], samples: object) -> None:
    num = len(values)
    mask = np.array([samples.random() < 0.8 for _ in range(num)])  # type: ignore[attr-defined]
    array, times = both(values), np.arange(num) * 0.5
    whole = rows(Stream().take(mask, array, times, (50, 95)))
    stream, parts = Stream(), []
    edges = sorted({0, num, *(cut for cut in cuts if cut < num)})
    for begin, end in itertools.pairwise(edges):
        parts.append(rows(stream.take(mask[begin:end], array[:, begin:end], times[begin:end], (50, 95))))
    np.testing.assert_array_equal(whole, np.concatenate(parts))


@settings(max_examples=40)
@given(
    values=st.lists(st.one_of(st.floats(0.01, 10.0), st.just(np.inf)), min_size=40, max_size=800),
    pause=st.sampled_from([0.0, 300.0, 590.0]),
)
def test_thresholds_are_those_of_the_window_before(values: list[float], pause: float) -> None:
    """Against the plain rule: sort what is left of the last 500 values and 600 s, as of the last mark."""
    num = len(values)
    measured = [value if value < np.inf else 50.0 for value in values]
    array = np.stack([values, measured])
    times = np.arange(num) * 1.0 + np.where(np.arange(num) > num // 2, pause, 0.0)
    found = rows(Stream().take(np.ones(num, bool), array, times, (50, 95)))
    for row in range(1, num):
        mark = row - row % (20 if row < 200 else 100)
        window = [at for at in range(max(0, mark - 500), mark) if times[at] >= times[mark - 1] - 600.0]
        judged = sorted(values[at] for at in window)
        good = [value for value in judged if value < np.inf]
        good = good if len(good) >= 20 else sorted(measured[at] for at in window)
        expected = [
            judged[quantile_rank(50, len(judged))] if len(judged) >= 20 else np.nan,
            judged[quantile_rank(95, len(judged))] if len(judged) >= 20 else np.nan,
            3.0 * good[quantile_rank(99, len(good))] if len(good) >= 20 else np.nan,
        ]
        np.testing.assert_array_equal(found[row], expected)


@settings(max_examples=30)
@given(values=st.lists(st.floats(0.01, 10.0), min_size=60, max_size=200), row=st.integers(0, 59))
def test_a_threshold_does_not_depend_on_what_comes_after(values: list[float], row: int) -> None:
    array, times = both(values), np.arange(len(values)) * 1.0
    mask = np.ones(len(values), bool)
    before = rows(Stream().take(mask, array, times, (50, 95)))
    changed = array.copy()
    changed[:, row:] = 1000.0
    after = rows(Stream().take(mask, changed, times, (50, 95)))
    np.testing.assert_array_equal(before[: row + 1], after[: row + 1])


def test_a_short_stratum_is_merged_with_all_others() -> None:
    strata = Strata()
    stratum = np.array([0] * 30 + [1] * 5 + [0, 1])
    value = both([1.0] * 30 + [9.0] * 5 + [0.0, 0.0])
    samples = np.array([True] * 35 + [False] * 2)
    found = strata.take(stratum, samples, value, np.arange(37.0), (50,))
    assert found.column(0)[-2:].tolist() == [1.0, 1.0]
    more = strata.take(np.ones(31, np.int64), np.array([True] * 30 + [False]), both([9.0] * 31),
                       np.arange(40.0, 71.0), (50,))  # fmt: skip
    assert more.column(0)[-1] == 9.0


@pytest.mark.parametrize(
    ("prompt", "cached", "bucket"), [(10, 0, 0), (255, 255, 1), (256, 0, 2), (2000, 999, 4), (2000, 1000, 5)]
)
def test_time_to_first_token_is_compared_by_length_and_cache(
    prompt: float, cached: float, bucket: int
) -> None:
    assert length_bucket(np.array([prompt]), np.array([cached]))[0] == bucket
