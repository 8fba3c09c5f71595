"""The words for what is wrong with a candidate, and what they do to its outcomes alone."""

from __future__ import annotations

import numpy as np
import pytest

from sluice_operator.simulation.regression import Change, RegressionError, parse_regression, regress
from sluice_operator.simulation.trace import Wrong
from sluice_operator.simulation.traffic import Traffic, make_trace

TRACE = make_trace(Traffic(tasks={"chat": 0.5, "nl2sql": 0.5}), 300.0, seed=1)


@pytest.mark.parametrize(
    ("text", "change"),
    [
        ("p95 x2", Change(ttft=2.0, tpot=2.0)),
        ("p95 ×1.5", Change(ttft=1.5, tpot=1.5)),
        ("ttft x5", Change(ttft=5.0)),
        ("tpot x 1.5", Change(tpot=1.5)),
        ("3% x100", Change(ttft=100.0, tpot=100.0, share=0.03)),
        ("errors 5%", Change(share=0.05, wrong=Wrong.FAILED)),
        ("schema failures 1 %", Change(share=0.01, wrong=Wrong.SCHEMA)),
        ("hard 0.5%", Change(share=0.005, wrong=Wrong.HARD)),
        ("p95 x2 for nl2sql", Change(ttft=2.0, tpot=2.0, task="nl2sql")),
        ("P95 x2 only for nl2sql from 5m", Change(ttft=2.0, tpot=2.0, task="nl2sql", start=300.0)),
        ("errors 5% from 90", Change(share=0.05, wrong=Wrong.FAILED, start=90.0)),
    ],
)
def test_words(text: str, change: Change) -> None:
    assert parse_regression(text).changes == (change,)


def test_several_at_once_with_a_common_beginning() -> None:
    both = parse_regression("p95 x2, errors 5% from 10s", start=60.0)
    assert [change.start for change in both.changes] == [60.0, 10.0]
    assert both.start == 10.0


@pytest.mark.parametrize("text", ["none", "", "A/A"])
def test_nothing(text: str) -> None:
    assert parse_regression(text).changes == ()


@pytest.mark.parametrize("text", ["p95", "slow", "errors", "errors 120%", "p95 x0", "p95 x2 for Nobody!"])
def test_what_is_no_regression_is_refused(text: str) -> None:
    with pytest.raises(RegressionError):
        parse_regression(text)


def test_only_the_candidate_changes_and_only_from_then_on() -> None:
    after = regress(TRACE, parse_regression("p95 x2 from 100s"), seed=1)
    early = TRACE.times < 100.0
    assert np.array_equal(after.stable.total, TRACE.stable.total)
    assert np.array_equal(after.candidate.ttft[early], TRACE.candidate.ttft[early])
    assert np.allclose(after.candidate.ttft[~early], 2.0 * TRACE.candidate.ttft[~early])


def test_only_one_task() -> None:
    after = regress(TRACE, parse_regression("ttft x3 for nl2sql"), seed=1)
    chat = TRACE.task == TRACE.tasks.index("chat")
    assert np.array_equal(after.candidate.ttft[chat], TRACE.candidate.ttft[chat])


def test_a_share_of_requests() -> None:
    after = regress(TRACE, parse_regression("errors 5%"), seed=1)
    failed = (after.candidate.wrong[TRACE.times >= 0.0] & Wrong.FAILED) > 0
    assert 0.04 < failed.mean() < 0.065


def test_a_task_that_nobody_asks_for_is_named() -> None:
    with pytest.raises(RegressionError, match="nobody asks for task code: there is chat, nl2sql"):
        regress(TRACE, parse_regression("p95 x2 for code"), seed=1)
