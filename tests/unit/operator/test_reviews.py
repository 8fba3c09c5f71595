"""Reviews: a recorded comparison on today's traffic; what it says, and that it disturbs nothing else."""

from __future__ import annotations

import random
from dataclasses import dataclass, field
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from sluice_operator.api import RoutePolicy, RuleStatus
from sluice_operator.api.releaserecord import ReleaseRecordSpec, Review, ReviewOutcome
from sluice_operator.api.routepolicy import Rule
from sluice_operator.api.rulestatus import Phase
from sluice_operator.control import metrics
from sluice_operator.control.reviews import ASKED, Reviews, World
from sluice_operator.gates import ArmName, Observation, Verdict
from sluice_operator.plan import review as plan_review

START = datetime(2026, 3, 1, 12, 0, 0, tzinfo=UTC)
NAME, KEY = ("demo", "assistant"), ("demo/assistant", "chat")
RECORD = ("demo", "assistant-chat-a1")
REQUEST = f"{RECORD[1]} 2026-03-01T12:00:00Z"
RULE = Rule.model_validate({"name": "chat", "target": {"backend": "new"}})


def spec(**fields: Any) -> ReleaseRecordSpec:
    return ReleaseRecordSpec.model_validate(
        {
            "policy": "assistant", "rule": "chat", "attempt": "a1", "outcome": "Promoted",
            "started": "2026-02-01T00:00:00Z", "ended": "2026-02-02T00:00:00Z",
            "stable": {"backend": "old"}, "candidate": {"backend": "new"}, **fields,
        }
    )  # fmt: skip


def policy(asked: str = REQUEST, name: str = "assistant") -> RoutePolicy:
    meta = {"name": name, "namespace": "demo", "annotations": {ASKED: asked} if asked else {}}
    told = {"model": "m", "rules": [{"name": "chat", "target": {"backend": "new"}}]}
    return RoutePolicy.model_validate({"metadata": meta, "spec": told})


@dataclass
class Operator:
    """What reviews need, with a clock that is set by hand."""

    seconds: float = 0.0
    record: ReleaseRecordSpec | None = field(default_factory=spec)
    rule: tuple[Rule, RuleStatus] | None = (RULE, RuleStatus(name="chat"))
    problem: str = ""
    found: list[tuple[ReviewOutcome, str]] = field(default_factory=list)
    events: list[tuple[str, str]] = field(default_factory=list)
    due: list[tuple[str, str]] = field(default_factory=list)
    num_changes: int = 0

    def reviews(self) -> Reviews:
        return Reviews(
            World(
                record=lambda name: self.record if name == RECORD else None,
                rule=lambda key: self.rule if key == KEY else None,
                problem=lambda key: self.problem,
                reviewed=self.reviewed,
                due=lambda: self.due,
                tell_policy=self.tell,
                tell_record=self.tell,
                changed=self.changed,
                now=lambda: START + timedelta(seconds=self.seconds),
            )
        )

    def reviewed(self, name: Any, outcome: ReviewOutcome, message: str) -> None:
        assert name == RECORD
        self.found.append((outcome, message))

    def tell(self, name: Any, reason: str, message: str, warning: bool) -> None:
        self.events.append((reason, message))

    def changed(self) -> None:
        self.num_changes += 1


def traffic(
    attempt: str, num: int, *, begin_s: float, slower: float = 1.0, only: str = "", seed: int = 1
) -> list[Observation]:
    """Copies of `num` requests, 4 a second; the candidate is `slower` times as slow, for one task or all."""
    draw, found = random.Random(seed), []
    for number in range(num):
        time, task = START.timestamp() + begin_s + number / 4, ("geo", "nl2sql")[number % 2]
        for arm in ArmName:
            worse = slower if arm is ArmName.CANDIDATE and only in ("", task) else 1.0
            total = 0.5 * draw.lognormvariate(0, 0.3) * worse
            found.append(
                Observation(
                    time=time + total, request_id=f"r{number}", arm=arm, age_s=total, attempt=attempt,
                    unit=f"u{number}", tenant="shop", task=task, mirror=True, ttft_s=total / 2,
                    tpot_s=total / 20, total_s=total, prompt_tokens=100, output_tokens=20, first_token=True,
                )
            )  # fmt: skip
    return found


def run(operator: Operator, reviews: Reviews, **how: Any) -> None:
    """An hour of traffic in slices of ten seconds, until there is an outcome."""
    reviews.tick()
    (one,) = reviews.inputs().values()
    seen = traffic(one.attempt, 4 * 3600, begin_s=operator.seconds + 1, **how)
    for start in range(0, len(seen), 80):
        operator.seconds += 10
        assert reviews.take(KEY, seen[start : start + 80]) == []
        reviews.tick()
        if operator.found:
            return


def test_copies_go_to_the_two_recorded_backends_and_are_no_releases() -> None:
    operator = Operator()
    reviews = operator.reviews()
    reviews.consider(policy())
    (key,), (asked,) = reviews.inputs().keys(), reviews.inputs().values()
    assert (key, asked.stable, asked.candidate, asked.percent) == (KEY, "old", "new", 10)
    assert plan_review.is_review(asked.attempt)
    assert not plan_review.is_review("0f3a1b2c3d")
    assert operator.num_changes == 1
    assert operator.events[0][0] == "ReviewBegun"
    reviews.consider(policy())
    assert (len(reviews.inputs()), operator.num_changes) == (1, 1)


def test_what_is_sound_is_kept() -> None:
    operator = Operator()
    reviews = operator.reviews()
    reviews.consider(policy())
    run(operator, reviews)
    ((outcome, message),) = operator.found
    assert outcome is ReviewOutcome.KEEP, message
    assert message.startswith("no guard fired; ")
    assert operator.seconds >= plan_review.MIN_SECONDS
    assert reviews.inputs() == {}
    assert operator.num_changes == 2


def test_what_is_slow_today_goes_back() -> None:
    operator = Operator()
    reviews = operator.reviews()
    reviews.consider(policy())
    run(operator, reviews, slower=4.0)
    ((outcome, message),) = operator.found
    assert outcome is ReviewOutcome.GO_BACK, message
    assert operator.seconds < 300


def test_what_is_slow_for_one_task_is_limited() -> None:
    operator = Operator()
    reviews = operator.reviews()
    reviews.consider(policy())
    run(operator, reviews, slower=4.0, only="nl2sql")
    ((outcome, message),) = operator.found
    assert outcome is ReviewOutcome.LIMIT, message
    assert message.startswith("keep it from task nl2sql: ")


def test_no_traffic_says_nothing() -> None:
    operator = Operator()
    reviews = operator.reviews()
    reviews.consider(policy())
    reviews.tick()
    for operator.seconds in (300.0, 3599.0):
        reviews.tick()
    assert operator.found == []
    operator.seconds = 3600.0
    reviews.tick()
    ((outcome, message),) = operator.found
    assert outcome is ReviewOutcome.LOOK_LONGER
    assert message.startswith("0 and 0 copies judged")


@pytest.mark.parametrize(
    ("said", "seen", "elapsed", "outcome"),
    [
        (Verdict(), (500, 500), 299.0, None),
        (Verdict(), (500, 500), 300.0, ReviewOutcome.KEEP),
        (Verdict(), (500, 99), 3599.0, None),
        (Verdict(), (99, 500), 3600.0, ReviewOutcome.LOOK_LONGER),
        (Verdict("GuardFired", "TTFT/p95"), (0, 0), 1.0, ReviewOutcome.GO_BACK),
        (Verdict("HardGateBroken", "check json"), (500, 500), 4000.0, ReviewOutcome.GO_BACK),
    ],
)
def test_what_it_says(
    said: Verdict, seen: tuple[int, int], elapsed: float, outcome: ReviewOutcome | None
) -> None:
    status = RuleStatus(name="chat", num_samples=seen[0], num_stable_samples=seen[1])
    found = plan_review.conclude(said, status, 100, elapsed)
    assert (found[0] if found else None) is outcome


def test_copies_are_no_evidence_of_the_rules_own_rollout() -> None:
    operator = Operator()
    reviews = operator.reviews()
    own = traffic("a2", 2, begin_s=0)
    assert reviews.take(KEY, own) == own
    late = traffic(plan_review.attempt("another", "t"), 2, begin_s=0)
    assert reviews.take(KEY, [*own, *late]) == own
    reviews.consider(policy())
    assert reviews.take(("demo/other", "chat"), [*own, *late]) == own


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"record": None}, "there is no ReleaseRecord"),
        ({"record": spec(ended="")}, "the attempt goes on"),
        ({"record": spec(policy="other")}, "it is of policy other: ask there"),
        ({"record": spec(stable={"backend": "new"})}, "differed in settings"),
        ({"record": spec(stable={})}, "names no two backends"),
        ({"rule": None}, "has no rule chat any more"),
        ({"rule": (RULE, RuleStatus(name="chat", phase=Phase.STEP))}, "has a rollout under way"),
    ],
)
def test_what_makes_no_sense_is_refused_once(change: dict[str, Any], why: str) -> None:
    operator = Operator(**change)
    reviews = operator.reviews()
    for _ in range(3):
        reviews.consider(policy())
    ((reason, message),) = operator.events
    assert reason == "ReviewRefused"
    assert why in message
    assert reviews.inputs() == {}


def test_what_was_answered_is_not_run_again_after_a_restart() -> None:
    done = Review(time="2026-03-01T12:30:00Z", outcome=ReviewOutcome.KEEP, message="")
    operator = Operator(record=spec(reviews=[done.model_dump()]))
    reviews = operator.reviews()
    reviews.consider(policy())
    assert reviews.inputs() == {}
    reviews.consider(policy(f"{RECORD[1]} 2026-03-01T13:00:00Z"))
    assert len(reviews.inputs()) == 1


@pytest.mark.parametrize(
    ("change", "why"),
    [
        ({"rule": None}, "rule chat is gone"),
        ({"rule": (RULE, RuleStatus(name="chat", phase=Phase.SHADOWING))}, "a rollout has begun"),
    ],
)
def test_it_gives_way(change: dict[str, Any], why: str) -> None:
    operator = Operator()
    reviews = operator.reviews()
    reviews.consider(policy())
    for name, value in change.items():
        setattr(operator, name, value)
    reviews.tick()
    ((outcome, message),) = operator.found
    assert (outcome, why in message) == (ReviewOutcome.LOOK_LONGER, True)


def test_pods_have_a_minute_to_get_ready_and_the_time_counts_from_then() -> None:
    operator = Operator(problem="backend old does not exist")
    reviews = operator.reviews()
    reviews.consider(policy())
    operator.seconds = 59.0
    reviews.tick()
    assert operator.found == []
    operator.problem = ""
    reviews.tick()
    operator.seconds = 59.0 + 3599.0
    reviews.tick()
    assert operator.found == []
    operator.problem = "no endpoint"
    operator.seconds += 1.0
    reviews.tick()
    ((outcome, message),) = operator.found
    assert (outcome, message) == (ReviewOutcome.LOOK_LONGER, "copies can't be sent: no endpoint")


def test_taking_the_request_back_ends_it_without_an_outcome() -> None:
    operator = Operator()
    reviews = operator.reviews()
    reviews.consider(policy())
    reviews.consider(policy(""))
    assert (reviews.inputs(), operator.found, operator.num_changes) == ({}, [], 2)
    reviews.consider(policy())
    reviews.forget(NAME)
    assert reviews.inputs() == {}


def test_what_is_due_is_told_once_and_measured() -> None:
    operator = Operator(due=[RECORD])
    reviews = operator.reviews()
    for _ in range(3):
        reviews.tick()
    assert [reason for reason, _ in operator.events] == ["ReviewDue"]
    assert "kubectl sluice review assistant-chat-a1 -n demo" in operator.events[0][1]
    labels = {"namespace": "demo", "record": "assistant-chat-a1"}
    assert metrics.REGISTRY.get_sample_value("sluice_review_due", labels) == 1.0
    operator.due = []
    reviews.tick()
    assert metrics.REGISTRY.get_sample_value("sluice_review_due", labels) is None
