"""What is told of a request and when: its end, its heartbeats, and what a person says of it."""

from __future__ import annotations

from dataclasses import replace

import numpy as np
import pytest

from sluice_operator.gates import ArmName
from sluice_operator.simulation.evidence import EPOCH, FEEDBACK_S, Schedule, Teller
from sluice_operator.simulation.trace import Outcomes, Trace, Wrong


def one(ttft: float = 1.2, tpot: float = 0.1, tokens: int = 21, wrong: int = 0, beat: float = 0.5) -> Trace:
    """A single request at 10 s whose answer takes 1.2 + 20 * 0.1 = 3.2 s, beside quick ones that set the
    medians."""
    num = 5
    quick = [0.1] * (num - 1)
    arm = Outcomes(
        ttft=np.array([ttft, *quick]),
        tpot=np.array([tpot, *quick]),
        jitter=np.full(num, 0.01),
        total=np.array([ttft + 20 * tpot, *quick]),
        wrong=np.array([wrong] + [0] * (num - 1)),
    )
    zeros = np.zeros(num, np.int64)
    return Trace(
        seconds=60.0,
        times=np.array([10.0, 11.0, 12.0, 13.0, 14.0]),
        bucket=np.zeros(num),
        mirror_bucket=np.zeros(num),
        unit=zeros + 3,
        task=zeros,
        tenant=zeros,
        prompt_tokens=zeros + 40,
        cached_tokens=zeros + 20,
        output_tokens=zeros + tokens,
        beat=np.full(num, beat),
        stable=arm,
        candidate=arm,
        tasks=("chat",),
        tenants=("shop",),
    )


def told(
    trace: Trace, candidate: bool = True, mirror: bool = False, verifies: bool = False
) -> tuple[Teller, Schedule]:
    teller = Teller(trace, verifies=verifies)
    yes, no = np.ones(1, bool), np.zeros(1, bool)
    schedule = teller.schedule(
        np.array([0]), yes if candidate else no, yes if mirror else no, yes if candidate else no
    )
    return teller, schedule


def test_heartbeats_come_once_a_second_until_the_end() -> None:
    teller, schedule = told(one())
    assert schedule.at.tolist() == pytest.approx([10.5, 11.5, 12.5, 13.2])
    seen = [teller.observation(row, "a") for row in schedule.rows()]
    assert [item.censored for item in seen] == [True, True, True, False]
    assert [item.first_token for item in seen] == [False, True, True, True]
    assert [item.age_s for item in seen] == pytest.approx([0.5, 1.5, 2.5, 3.2])
    assert {item.request_id for item in seen} == {"r0"}


def test_the_end_says_all_of_it() -> None:
    teller, schedule = told(one())
    last = teller.observation(schedule.rows()[-1], "a")
    assert last.time == pytest.approx(EPOCH + 13.2)
    assert (last.arm, last.attempt, last.unit) == (ArmName.CANDIDATE, "a", "u3")
    assert (last.task, last.tenant) == ("chat", "shop")
    assert (last.ttft_s, last.tpot_s, last.total_s) == pytest.approx((1.2, 0.1, 3.2))
    assert (last.prompt_tokens, last.cached_tokens, last.output_tokens) == (40, 20, 21)
    assert not last.failed


@pytest.mark.parametrize(
    ("verifies", "wrong", "expected"),
    [(True, Wrong(0), 3.2), (False, Wrong(0), None), (True, Wrong.HARD, None), (True, Wrong.FAILED, None)],
)
def test_what_passes_its_contract_is_verified_at_its_end(
    verifies: bool, wrong: Wrong, expected: float | None
) -> None:
    teller, schedule = told(one(wrong=int(wrong)), verifies=verifies)
    assert teller.observation(schedule.rows()[-1], "a").verified_s == (expected and pytest.approx(expected))


def test_stable_is_not_of_the_attempt_unless_it_might_have_been_the_candidate() -> None:
    teller, schedule = told(one(), candidate=False)
    assert teller.observation(schedule.rows()[-1], "a").attempt == ""


def test_a_failure_before_the_first_token_has_no_times() -> None:
    teller, schedule = told(one(wrong=int(Wrong.FAILED)))
    last = teller.observation(schedule.rows()[-1], "a")
    assert (last.failed, last.ttft_s, last.tpot_s, last.jitter_s) == (True, None, None, None)


def test_flags() -> None:
    bits = Wrong.REFUSED | Wrong.SCHEMA | Wrong.TOOL | Wrong.RETRIED | Wrong.REPEATED | Wrong.TRUNCATED
    teller, schedule = told(one(wrong=int(bits)))
    last = teller.observation(schedule.rows()[-1], "a")
    flags = (last.refused, last.schema_failed, last.tool_failed, last.retried, last.repeated, last.truncated)
    assert all(flags)
    assert not last.failed
    assert not last.hard_violations


def test_a_hard_violation_names_a_check_that_needs_no_contract() -> None:
    teller, schedule = told(one(wrong=int(Wrong.HARD)))
    (check,) = teller.observation(schedule.rows()[-1], "a").hard_violations
    assert "/" in check


def test_a_complaint_comes_later_and_says_nothing_else() -> None:
    teller, schedule = told(one(wrong=int(Wrong.COMPLAINT)))
    last = teller.observation(schedule.rows()[-1], "a")
    assert last.feedback == "wrong"
    assert last.time == pytest.approx(EPOCH + 13.2 + FEEDBACK_S)
    assert last.total_s is None


def test_young_requests_send_no_heartbeat() -> None:
    """Under stable's medians, 0.1 s here, no guard could say anything."""
    trace = one(beat=0.06)
    ages = told(trace)[1].age.tolist()
    assert ages[0] > 1.0
    slow = replace(trace, stable=replace(trace.stable, total=trace.stable.total * 100))
    assert len(told(slow)[1]) <= len(ages)


def test_mirrored_copies_say_so() -> None:
    teller, schedule = told(one(), mirror=True)
    assert teller.observation(schedule.rows()[-1], "a").mirror
