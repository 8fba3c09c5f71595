"""Traffic follows from the seed, has the rate and the shares asked for, and each shape does what it says."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from sluice_operator.simulation.trace import Wrong
from sluice_operator.simulation.traffic import Shape, Traffic, make_trace

SECONDS = 600.0


@pytest.mark.parametrize("shape", Shape)
def test_the_same_seed_makes_the_same_traffic_and_another_index_another(shape: Shape) -> None:
    traffic = Traffic(shape=shape)
    one, same, other = (make_trace(traffic, 60.0, 7, index) for index in (1, 1, 2))
    assert np.array_equal(one.times, same.times)
    assert np.array_equal(one.candidate.total, same.candidate.total)
    assert len(one.times) != len(other.times) or not np.array_equal(one.times, other.times)


@pytest.mark.parametrize("shape", Shape)
def test_rate_and_order(shape: Shape) -> None:
    trace = make_trace(Traffic(shape=shape, day_s=300.0), SECONDS, 3)
    assert np.all(np.diff(trace.times) >= 0.0)
    assert trace.times[0] < 0.0
    assert trace.times[-1] < SECONDS
    wide = 0.3 if shape is Shape.BURSTY else 0.1
    assert trace.num_requests / (SECONDS + 60.0) == pytest.approx(20.0, rel=wide)


def test_both_arms_are_alike_and_each_bucket_is_as_likely() -> None:
    trace = make_trace(Traffic(), SECONDS, 5)
    assert np.median(trace.stable.total) == pytest.approx(np.median(trace.candidate.total), rel=0.05)
    assert (trace.bucket < 0.1).mean() == pytest.approx(0.1, abs=0.01)


def test_latencies_are_what_was_asked_for() -> None:
    traffic = Traffic()
    trace = make_trace(traffic, SECONDS, 5)
    for percent in (50, 95):
        found = float(np.percentile(trace.stable.ttft, percent))
        assert found == pytest.approx(traffic.ttft.quantile(percent), rel=0.06)


def test_shares_of_tasks_and_tenants() -> None:
    trace = make_trace(Traffic(tasks={"a": 3.0, "b": 1.0}, tenants={"x": 1.0, "y": 1.0}), SECONDS, 5)
    assert (trace.task == 0).mean() == pytest.approx(0.75, abs=0.02)
    assert (trace.tenant == 0).mean() == pytest.approx(0.5, abs=0.02)


def test_a_failure_ends_early_and_an_interruption_half_way() -> None:
    trace = make_trace(Traffic(wrong={Wrong.INTERRUPTED: 0.5}), 60.0, 5)
    arm = trace.stable
    broken = (arm.wrong & Wrong.INTERRUPTED) > 0
    assert np.all((arm.wrong[broken] & Wrong.FAILED) > 0)
    whole = arm.ttft + arm.tpot * (trace.output_tokens - 1)
    assert np.allclose(arm.total[broken], (arm.ttft + 0.5 * (whole - arm.ttft))[broken])
    assert np.allclose(arm.total[~broken], whole[~broken])


def test_a_conversation_keeps_its_arm_task_and_tenant() -> None:
    trace = make_trace(Traffic(shape=Shape.AUTOCORRELATED, tasks={"a": 0.5, "b": 0.5}), SECONDS, 5)
    for column in (trace.bucket, trace.task, trace.tenant):
        pairs = {(int(unit), float(value)) for unit, value in zip(trace.unit, column, strict=True)}
        assert len(pairs) == len(np.unique(trace.unit))
    assert trace.num_requests / len(np.unique(trace.unit)) > 3.0


def test_bursts_hit_both_arms_and_hiccups_one() -> None:
    def by_minute(shape: Shape, arm: str) -> np.ndarray:
        trace = make_trace(Traffic(shape=shape, rate=50.0), SECONDS, 11)
        slow = getattr(trace, arm).ttft
        second = (trace.times + 60.0).astype(int) // 2
        return np.array([np.median(slow[second == one]) for one in range(30, 300)])

    bursts = np.corrcoef(by_minute(Shape.BURSTY, "stable"), by_minute(Shape.BURSTY, "candidate"))
    assert bursts[0, 1] > 0.8
    hiccups = np.corrcoef(by_minute(Shape.HICCUPS, "stable"), by_minute(Shape.HICCUPS, "candidate"))
    assert abs(hiccups[0, 1]) < 0.3


def test_a_heavy_tail_is_heavier() -> None:
    light, heavy = (
        make_trace(Traffic(shape=shape), SECONDS, 5) for shape in (Shape.POISSON, Shape.HEAVY_TAILED)
    )
    assert np.max(heavy.stable.total) > 3.0 * np.max(light.stable.total)
    assert np.median(heavy.stable.total) == pytest.approx(np.median(light.stable.total), rel=0.1)


def test_a_day_has_a_quiet_time() -> None:
    trace = make_trace(replace(Traffic(shape=Shape.DIURNAL), day_s=600.0), SECONDS, 5)
    counts, _ = np.histogram(trace.times, bins=10, range=(0.0, SECONDS))
    assert counts.max() > 3 * counts.min()


def test_cut_short_it_is_the_same_traffic() -> None:
    trace = make_trace(Traffic(), SECONDS, 5)
    short = trace.until(100.0)
    assert short.seconds == 100.0
    assert short.times[-1] < 100.0
    assert np.array_equal(short.candidate.total, trace.candidate.total[: short.num_requests])
    assert len(short.beat) == len(short.unit) == short.num_requests
