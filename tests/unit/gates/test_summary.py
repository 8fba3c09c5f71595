"""Figures for the ledger: each request once, quantiles within 5 %, and what a restart keeps."""

from __future__ import annotations

import numpy as np
import pytest

from sluice_operator.api.releaserecord import ArmEvidence
from sluice_operator.gates import align
from sluice_operator.gates.summary import Histogram, Summary
from unit.gates.test_gate import seen
from unit.gates.traffic import START, at, gate, rule, status


def test_quantiles_are_within_five_percent() -> None:
    values = np.random.default_rng(1).lognormal(-1.0, 1.0, 5000)
    histogram = Histogram()
    histogram.add(values)
    for percent in (50, 95, 99):
        exact = np.sort(values)[-(-percent * 5000 // 100) - 1]
        assert histogram.quantile(percent) == pytest.approx(exact, rel=0.05)
    assert Histogram().quantile(50) is None


def test_each_request_counts_once_for_its_arm() -> None:
    state = gate()
    state.take(seen(10, request_id="r", failed=True, ttft_s=None, total_s=None))
    state.take(seen(11, request_id="r", ttft_s=0.1))
    tokens = {"prompt_tokens": 100, "cached_tokens": 60, "output_tokens": 7}
    guesses = {"guessed_tokens": 5, "accepted_tokens": 4}
    state.take(seen(12, request_id="s", cost=0.5, busy_s=0.25, **tokens, **guesses))
    state.take(seen(12, request_id="s"))
    state.take(seen(13, request_id="t", censored=True))
    state.take(seen(14, candidate=False, request_id="u", truncated=True))
    found, stable = state.summary.candidate.evidence(), state.summary.stable.evidence()
    assert (found.num_requests, stable.num_requests) == (2, 1)
    assert found.counts == {"ErrorRate": 1}
    assert stable.counts == {"TruncationRate": 1}
    assert {name: getattr(found, name) for name in tokens | guesses} == tokens | guesses
    assert (stable.guessed_tokens, stable.accepted_tokens) == (0, 0)
    assert (found.busy_seconds, found.cost, found.cost_per_success) == ("0.25", "0.5", "0.5")
    assert stable.cost == ""


def test_quantiles_of_the_attempt() -> None:
    state = gate()
    state.take_all([seen(10 + row, ttft_s=0.2, total_s=2.0, verified_s=1.5) for row in range(50)])
    found = state.summary.candidate.evidence()
    assert float(found.ttft_seconds.p95) == pytest.approx(0.2, rel=0.05)
    assert float(found.total_seconds.p50) == pytest.approx(2.0, rel=0.05)
    assert float(found.time_to_verified_seconds.p99) == pytest.approx(1.5, rel=0.05)
    assert ArmEvidence.model_validate(found.model_dump(mode="json")) == found


def test_it_outlives_restarts_of_evidence_and_no_attempt() -> None:
    state = gate()
    state.take(seen(10))
    state = align(state, rule(), status(num_restarts=1), at(20))
    state.take(seen(30))
    assert state.summary.candidate.evidence().num_requests == 2
    other = status().model_copy(update={"attempt": "b"})
    assert align(state, rule(), other, at(40)).summary.candidate.evidence().num_requests == 0


def test_mirrored_feedback_and_other_attempts() -> None:
    state = gate(weight=0, shadow_percent=100)
    state.take(seen(10, mirror=True))
    state.take(seen(11, request_id="o", attempt="earlier"))
    state.take(seen(12, feedback="wrong", ttft_s=None, tpot_s=None, total_s=None))
    found = state.summary.candidate.evidence()
    assert (found.num_requests, found.num_mirrored) == (1, 1)
    assert found.counts == {"NegativeFeedbackRate": 1}


def test_a_restart_goes_on_from_the_record() -> None:
    """Counts and sums go on; quantiles are the recorded ones until a hundred requests have ended since."""
    state = gate()
    state.take_all([seen(10 + row, ttft_s=0.2, cost=0.01, failed=row == 0) for row in range(20)])
    before = state.summary.candidate.evidence()
    again = align(None, rule(), status(), START)
    again.summary.restore(ArmEvidence(), before)
    assert again.summary.candidate.evidence() == before
    again.take_all([seen(100 + row, ttft_s=0.8) for row in range(99)])
    found = again.summary.candidate.evidence()
    assert found.num_requests == 119
    assert found.counts == {"ErrorRate": 1}
    assert found.ttft_seconds == before.ttft_seconds
    again.take_all([seen(300 + row, ttft_s=0.8) for row in range(20)])
    assert float(again.summary.candidate.evidence().ttft_seconds.p50) == pytest.approx(0.8, rel=0.05)


def test_nothing_seen_is_nothing_told() -> None:
    assert Summary().stable.evidence() == ArmEvidence(busy_seconds="0")
