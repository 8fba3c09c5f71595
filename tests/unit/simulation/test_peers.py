"""The models of today's tools, on traffic made by hand: every number can be checked with a pencil."""

from __future__ import annotations

import math
from dataclasses import replace

import numpy as np
import pytest

from sluice_operator.simulation.peers import (
    ARGO_DOCUMENTED,
    ARGO_FASTEST,
    ARGO_QUICK,
    FLAGGER_DOCUMENTED,
    FLAGGER_FASTEST,
    run_argo,
    run_flagger,
)
from sluice_operator.simulation.peers.prometheus import Candidate, histogram_quantile
from sluice_operator.simulation.trace import Outcomes, Trace, Wrong


def steady(
    seconds: float,
    every: float = 0.1,
    total: float = 0.1,
    bad_from: float = math.inf,
    wrong: int = 0,
    slow: float = 0.1,
    buckets: float = 10.0,
) -> Trace:
    """A request every `every` seconds; each tenth goes to the candidate per 10 % of weight, evenly. From
    `bad_from` on it takes `slow` seconds and has the bits `wrong`."""
    times = np.arange(0.0, seconds, every)
    num = len(times)
    bad = times >= bad_from
    zeros = np.zeros(num, np.int64)
    arm = Outcomes(
        ttft=np.full(num, 0.05),
        tpot=np.full(num, 0.01),
        jitter=np.full(num, 0.001),
        total=np.where(bad, slow, total),
        wrong=np.where(bad, wrong, 0),
    )
    return Trace(
        seconds=seconds,
        times=times,
        bucket=(np.arange(num) % buckets) / buckets,
        mirror_bucket=np.ones(num),
        unit=np.arange(num),
        task=zeros,
        tenant=zeros,
        prompt_tokens=zeros + 10,
        cached_tokens=zeros,
        output_tokens=zeros + 5,
        beat=np.zeros(num),
        stable=arm,
        candidate=arm,
        tasks=("chat",),
        tenants=("t",),
    )


# ── Prometheus ────────────────────────────────────────────────────────────────────────────────────────────


def test_quantile_is_linear_within_its_bucket() -> None:
    """90 of 100 up to 1000 ms, the rest up to 2500: 1000 + 1500 * (99 - 90) / 10 = 2350 ms."""
    durations = np.array([0.9] * 90 + [2.0] * 10)
    assert histogram_quantile(0.99, durations) == pytest.approx(2.35)


def test_quantile_of_nothing_is_no_number() -> None:
    assert math.isnan(histogram_quantile(0.99, np.zeros(0)))


def test_quantile_in_the_first_bucket_begins_at_zero() -> None:
    """All under 0.5 ms: 0.5 * 0.99."""
    assert histogram_quantile(0.99, np.full(10, 0.0001)) == pytest.approx(0.5e-3 * 0.99)


def test_no_value_before_two_scrapes() -> None:
    """First end at 0.1 s; scrapes at 5 and 10 s see it, so the first rate is to be had at 10 s."""
    candidate = Candidate(steady(60.0))
    candidate.weigh(10, 0.0)
    assert candidate.success_share(4.0, 60.0, instant=False) is None
    assert candidate.success_share(9.0, 60.0, instant=False) is None
    assert candidate.success_share(10.0, 60.0, instant=False) == 1.0


def test_success_counts_what_ended_between_the_scrapes() -> None:
    """Ten requests a second, all to the candidate, failing from 7.5 s on: between 5 and 10 s 24 or 25 of 50
    are bad."""
    candidate = Candidate(steady(60.0, bad_from=7.5, wrong=int(Wrong.FAILED)))
    candidate.weigh(100, 0.0)
    assert candidate.success_share(10.0, 60.0, instant=True) == pytest.approx(0.5, abs=0.02)


def test_what_breaks_off_has_said_200() -> None:
    candidate = Candidate(steady(60.0, bad_from=0.0, wrong=int(Wrong.FAILED | Wrong.INTERRUPTED)))
    candidate.weigh(100, 0.0)
    assert candidate.success_share(10.0, 60.0, instant=True) == 1.0


def test_an_idle_candidate_has_no_number() -> None:
    """One request in 60 s: after it the counters stand still."""
    candidate = Candidate(steady(60.0, every=59.0))
    candidate.weigh(100, 0.0)
    value = candidate.success_share(30.0, 60.0, instant=True)
    assert value is not None
    assert math.isnan(value)


def test_weights_choose_by_conversation_and_are_counted() -> None:
    candidate = Candidate(steady(60.0))
    candidate.weigh(10, 0.0)
    candidate.weigh(50, 30.0)
    assert candidate.num_sent(0.0, 30.0) == 30
    assert candidate.num_sent(0.0, 60.0) == 30 + 150
    assert candidate.num_sent(40.0, 50.0) == 50


# ── Flagger ───────────────────────────────────────────────────────────────────────────────────────────────


def test_flagger_promotes_after_interval_times_steps() -> None:
    """Documentation: interval * (maxWeight / stepWeight) = 10 minutes, and the first check is at 0."""
    done = run_flagger(FLAGGER_DOCUMENTED, steady(900.0))
    assert (done.outcome, done.seconds) == ("promoted", 600.0)


def test_flagger_rolls_back_after_threshold_times_interval() -> None:
    """Bad from 0 s: ten checks fail, at 60 to 600 s, and the next look, at 660 s, rolls back. At 5 % of ten a
    second, 330 users have met it."""
    trace = steady(900.0, bad_from=0.0, wrong=int(Wrong.FAILED), buckets=20.0)
    done = run_flagger(FLAGGER_DOCUMENTED, trace)
    assert (done.outcome, done.seconds, done.reason) == ("rolled-back", 660.0, "request-success-rate")
    assert done.num_exposed == 330


def test_flagger_at_its_fastest_needs_one_failed_check() -> None:
    """Slow from 60 s on. At 70 s the window of 10 s (scrapes at 65 and 70) is all slow; at 80 s it goes."""
    trace = steady(900.0, bad_from=60.0, slow=2.0, buckets=50.0)
    done = run_flagger(FLAGGER_FASTEST, trace, onset=60.0)
    assert (done.outcome, done.seconds, done.reason) == ("rolled-back", 80.0, "request-duration")


def test_flagger_takes_shorter_intervals_as_10_s() -> None:
    quick = replace(FLAGGER_FASTEST, interval_s=1.0, step_weight=25)
    done = run_flagger(quick, steady(900.0))
    assert (done.outcome, done.seconds) == ("promoted", 20.0)


def test_flagger_takes_silence_as_failure() -> None:
    """No request at all: ten checks without values, and back (flagger issue 1035)."""
    done = run_flagger(FLAGGER_DOCUMENTED, _empty(900.0))
    assert (done.outcome, done.reason) == ("rolled-back", "no values found")


# ── Argo Rollouts ─────────────────────────────────────────────────────────────────────────────────────────


def test_argo_promotes_after_its_pauses() -> None:
    done = run_argo(ARGO_DOCUMENTED, steady(2500.0))
    assert (done.outcome, done.seconds) == ("promoted", 2400.0)


def test_argo_aborts_at_the_fourth_failed_measurement() -> None:
    """At 0 s there is no data: an error, retried at 10 s, which is the first good measurement; then every
    300 s. Bad from 100 s on: failed at 310, 610, 910 and 1210 s, and four are more than failureLimit 3."""
    done = run_argo(ARGO_DOCUMENTED, steady(2500.0, bad_from=100.0, wrong=int(Wrong.FAILED)), onset=100.0)
    assert (done.outcome, done.seconds, done.reason) == ("rolled-back", 1210.0, "success-rate")


def test_argo_at_its_fastest_aborts_at_the_first() -> None:
    """Measured at 10, 20, 30 … s over the last minute; all bad from 31 s on: at 40 s more than 1 % is."""
    done = run_argo(ARGO_FASTEST, steady(400.0, bad_from=31.0, wrong=int(Wrong.FAILED)), onset=31.0)
    assert (done.outcome, done.seconds) == ("rolled-back", 40.0)


def test_argo_every_10_s_needs_four_of_them() -> None:
    """Bad from 31 s on: failed at 40, 50, 60 and 70 s."""
    done = run_argo(ARGO_QUICK, steady(400.0, bad_from=31.0, wrong=int(Wrong.FAILED)), onset=31.0)
    assert (done.outcome, done.seconds) == ("rolled-back", 70.0)


def test_argo_errs_out_without_data() -> None:
    """No request ever: errors at 0, 10, 20, 30 and 40 s; the fifth in a row is more than 4."""
    done = run_argo(ARGO_DOCUMENTED, _empty(900.0))
    assert (done.outcome, done.seconds, done.reason) == ("rolled-back", 40.0, "success-rate: no data")


def test_argo_takes_an_idle_candidate_as_failed() -> None:
    """Not a number meets no success condition (argo-rollouts issue 1905)."""
    idle = replace(ARGO_DOCUMENTED, failure_limit=0)
    done = run_argo(idle, steady(900.0, every=899.0))
    assert (done.outcome, done.reason) == ("rolled-back", "success-rate")


def test_argo_as_a_step_blocks_until_count_measurements_are_taken() -> None:
    """Two steps of 60 s, each followed by 5 measurements, 60 s apart: 60 + 240 + 60 + 240."""
    steps = replace(
        ARGO_DOCUMENTED,
        steps=((10, 60.0), (20, 60.0)),
        interval_s=60.0,
        window_s=60.0,
        count=5,
        failure_limit=0,
    )
    done = run_argo(steps, steady(900.0))
    assert (done.outcome, done.seconds) == ("promoted", 600.0)


def _empty(seconds: float) -> Trace:
    return replace(steady(1.0).until(0.0), seconds=seconds)
