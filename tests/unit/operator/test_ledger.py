"""The ledger on the wire: what is written when, what survives, and that nothing waits for it."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from datetime import UTC, datetime, timedelta
from typing import Any

import pytest

from sluice_operator.api import ReleaseRecord, RuleStatus
from sluice_operator.api.common import Metadata
from sluice_operator.api.releaserecord import ArmEvidence, Outcome, ReleaseRecordSpec, ReviewOutcome
from sluice_operator.api.routepolicy import Rule
from sluice_operator.api.rulestatus import ArmStatus, Phase, Transition
from sluice_operator.control import metrics
from sluice_operator.control.ledger import Ledger, Subject
from sluice_operator.kube import KubeError

START = datetime(2026, 3, 1, 12, 0, 0, tzinfo=UTC)
RULE = Rule.model_validate(
    {
        "name": "chat",
        "target": {"backend": "old"},
        "rollout": {"candidate": {"backend": "new"}, "steps": [{"weight": 50}]},
    }
)


class World:
    """An API server that takes what it is told to take, and a clock that is set by hand."""

    def __init__(self, **settings: Any) -> None:
        self.seconds = 0.0
        self.objects: dict[tuple[str, str], dict[str, Any]] = {}
        self.num_writes = 0
        self.refusals: list[KubeError] = []
        self.num_evidence = 0
        self.ledger = self.fresh(**settings)

    def fresh(self, **settings: Any) -> Ledger:
        return Ledger(self.apply, self.delete, now=self.now, clock=lambda: self.seconds, **settings)

    def now(self) -> datetime:
        return START + timedelta(seconds=self.seconds)

    async def apply(self, obj: dict[str, Any]) -> dict[str, Any]:
        if self.refusals:
            raise self.refusals.pop()
        self.num_writes += 1
        self.objects[(obj["metadata"]["namespace"], obj["metadata"]["name"])] = obj
        return obj

    async def delete(self, namespace: str, name: str) -> None:
        if self.refusals:
            raise self.refusals.pop()
        self.objects.pop((namespace, name), None)

    def evidence(self) -> tuple[ArmEvidence, ArmEvidence]:
        self.num_evidence += 1
        return ArmEvidence(num_requests=self.num_evidence), ArmEvidence(num_requests=2 * self.num_evidence)

    def follow(self, status: RuleStatus, subject: Subject | None = None) -> None:
        self.ledger.follow(subject or SUBJECT, status, self.evidence)

    async def settle(self) -> float | None:
        """Writes what may be written now."""
        return await self.ledger._write_due()

    def records(self) -> list[ReleaseRecord]:
        return [
            ReleaseRecord.model_validate({"metadata": obj["metadata"], "spec": obj["spec"]})
            for _, obj in sorted(self.objects.items())
        ]

    def only(self) -> ReleaseRecordSpec:
        (record,) = self.records()
        return record.spec


SUBJECT = Subject(Metadata(name="assistant", namespace="demo", uid="u1"), "chat-model", RULE, {})


def status(phase: Phase = Phase.STEP, attempt: str = "a1", *, seconds: int = 0, **fields: Any) -> RuleStatus:
    time = (START + timedelta(seconds=seconds)).strftime("%Y-%m-%dT%H:%M:%SZ")
    began = START.strftime("%Y-%m-%dT%H:%M:%SZ")
    started = Transition(time=began, phase=Phase.STEP, reason="AttemptStarted", message="")
    line = Transition(time=time, phase=phase, reason=f"{phase.value}!", message=f"at {seconds}")
    return RuleStatus(
        name="chat",
        phase=phase,
        attempt=attempt,
        stable=ArmStatus(backend="old", identity="i-old"),
        candidate=ArmStatus(backend="new", identity="i-new"),
        history=[started, line],
        **fields,
    )


async def test_a_record_at_the_start_at_each_transition_and_at_the_end() -> None:
    world = World()
    world.follow(status())
    await world.settle()
    first = world.only()
    assert (first.outcome, first.candidate.backend, first.stable.identity) == (
        Outcome.RUNNING,
        "new",
        "i-old",
    )
    assert (first.policy_uid, first.model, first.attempt) == ("u1", "chat-model", "a1")
    world.follow(status(step=1, seconds=5))
    await world.settle()
    world.follow(status(Phase.ROLLED_BACK, seconds=9))
    await world.settle()
    last = world.only()
    assert (last.outcome, last.reason, last.message) == (Outcome.ROLLED_BACK, "RolledBack!", "at 9")
    assert [line.message for line in last.history] == ["", "at 0", "at 5", "at 9"]
    assert world.num_writes == 3
    (obj,) = world.objects.values()
    assert "ownerReferences" not in obj["metadata"]
    assert obj["metadata"]["labels"]["sluice.dev/policy"] == "assistant"


async def test_evidence_alone_is_written_each_thirty_seconds_at_most() -> None:
    world = World()
    for second in range(100):
        world.seconds = float(second)
        world.follow(status(num_samples=second))
        await world.settle()
    assert world.num_writes == 4
    assert world.num_evidence == 4
    assert world.only().candidate.evidence.num_requests == 8


async def test_what_comes_after_the_end_is_no_evidence() -> None:
    world = World()
    world.follow(status(Phase.PROMOTED, seconds=1))
    await world.settle()
    ended = world.only()
    world.seconds = 1000.0
    world.follow(status(Phase.PROMOTED, seconds=1))
    assert await world.settle() is None
    waived = RULE.model_copy(
        update={
            "rollout": RULE.rollout.model_copy(  # type: ignore[union-attr]
                update={"release": RULE.rollout.release.model_copy(update={"incident": "INC-1"})}  # type: ignore[union-attr]
            )
        }
    )
    world.follow(status(Phase.PROMOTED, seconds=1), replace(SUBJECT, rule=waived))
    await world.settle()
    assert (world.only().incident, world.only().ended) == ("INC-1", ended.ended)
    assert world.only().candidate.evidence == ended.candidate.evidence


async def test_no_attempt_no_record() -> None:
    world = World()
    world.follow(RuleStatus(name="chat"))
    await world.settle()
    assert world.objects == {}


async def test_another_attempt_closes_the_one_before() -> None:
    world = World()
    world.follow(status())
    world.seconds = 60.0
    world.follow(status(attempt="a2", seconds=60))
    await world.settle()
    first, second = sorted((r.spec for r in world.records()), key=lambda spec: spec.attempt)
    assert (first.outcome, first.ended) == (Outcome.SUPERSEDED, "2026-03-01T12:01:00Z")
    assert (second.attempt, second.outcome) == ("a2", Outcome.RUNNING)


async def test_a_rejected_attempt_stays_rejected_when_the_next_begins() -> None:
    world = World()
    world.follow(status(Phase.ROLLED_BACK))
    world.follow(status(attempt="a2"))
    await world.settle()
    outcomes = {r.spec.attempt: r.spec.outcome for r in world.records()}
    assert outcomes == {"a1": Outcome.ROLLED_BACK, "a2": Outcome.RUNNING}


async def test_a_policy_that_is_gone_ends_its_attempts() -> None:
    world = World()
    world.follow(status())
    world.ledger.ended("demo", "another", "PolicyDeleted", "")
    world.ledger.ended("demo", "u1", "PolicyDeleted", "the policy was deleted")
    await world.settle()
    assert (world.only().outcome, world.only().reason) == (Outcome.SUPERSEDED, "PolicyDeleted")


async def test_a_rule_that_went_while_nobody_looked_ends_its_attempt() -> None:
    world = World()
    world.follow(status())
    await restarted(world)
    world.ledger.sync({"u1": ["chat", "rest"]})
    assert await world.settle() is None
    world.ledger.sync({"u1": ["rest"]})
    await world.settle()
    assert (world.only().outcome, world.only().reason) == (Outcome.SUPERSEDED, "RuleRemoved")
    world.ledger.sync({})
    assert await world.settle() is None


async def test_before_the_first_traffic_the_record_is_there() -> None:
    world = World()
    world.follow(status())
    world.refusals = [KubeError(0, "away")]
    with pytest.raises(KubeError, match="away"):
        await world.ledger.ensure(SUBJECT, status())
    assert world.objects == {}
    await world.ledger.ensure(SUBJECT, status())
    assert world.num_writes == 1
    await world.ledger.ensure(SUBJECT, status())
    assert world.num_writes == 1


async def test_failures_are_tried_again_later_and_later_and_counted() -> None:
    world = World()
    world.follow(status())
    before = metrics.LEDGER_FAILURES._value.get()
    waits = []
    for _ in range(8):
        world.refusals = [KubeError(503, "away")]
        waits.append(await world.settle())
        world.seconds += waits[-1] or 0.0
    assert waits == [1.0, 2.0, 4.0, 8.0, 16.0, 32.0, 60.0, 60.0]
    assert metrics.LEDGER_FAILURES._value.get() - before == 8
    assert await world.settle() is None
    assert world.only().attempt == "a1"


async def test_one_record_that_is_refused_holds_up_no_other() -> None:
    world = World()
    world.follow(status())
    other = replace(SUBJECT, policy=Metadata(name="other", namespace="demo", uid="u2"))
    world.follow(status(), other)
    world.refusals = [KubeError(422, "too large")]
    await world.settle()
    assert len(world.objects) == 1


async def test_what_changes_while_it_is_written_is_written_again() -> None:
    world = World()
    release = asyncio.Event()
    apply = world.ledger._apply

    async def slow(obj: dict[str, Any]) -> Any:
        await release.wait()
        return await apply(obj)

    world.ledger._apply = slow
    world.follow(status())
    writing = asyncio.create_task(world.ledger.run())
    await asyncio.sleep(0)
    world.follow(status(Phase.ROLLED_BACK, seconds=1))
    release.set()
    async with asyncio.timeout(60):
        while not world.objects or world.only().outcome is Outcome.RUNNING:  # noqa: ASYNC110
            await asyncio.sleep(0)
    writing.cancel()


async def restarted(world: World) -> World:
    """The next operator, with what the API server holds."""
    await world.settle()
    world.ledger = world.fresh()
    world.ledger.load(world.records())
    return world


async def test_a_restart_goes_on_with_the_record() -> None:
    world = World()
    world.follow(status())
    await restarted(world)
    world.seconds = 60.0
    world.follow(status(step=1, seconds=60))
    await world.settle()
    assert [line.message for line in world.only().history] == ["", "at 0", "at 60"]
    await restarted(world)
    world.follow(status(attempt="a2", seconds=70))
    await world.settle()
    assert {r.spec.attempt: r.spec.outcome for r in world.records()}["a1"] is Outcome.SUPERSEDED


async def test_a_restarted_operator_does_not_write_less_evidence_than_there_was() -> None:
    world = World()
    for number in range(3):
        world.seconds = 31.0 * number
        world.follow(status())
        await world.settle()
    await restarted(world)
    world.num_evidence = 0
    known = world.ledger.of(SUBJECT, status())
    assert known is not None
    assert known.stable.evidence.num_requests == 3
    world.follow(status(step=1, seconds=99))
    await world.settle()
    assert world.only().stable.evidence.num_requests == 3


async def test_a_lost_status_comes_back_without_traffic() -> None:
    world = World()
    world.follow(status(weight=50, rejected=["a0"]))
    await restarted(world)
    found = world.ledger.restore("demo", "u1", "chat")
    assert found is not None
    assert (found.attempt, found.weight, found.rejected) == ("a1", 0, ["a0"])
    assert world.ledger.restore("demo", "another-uid", "chat") is None
    assert world.ledger.restore("elsewhere", "u1", "chat") is None
    world.follow(status(Phase.ROLLED_BACK, seconds=2))
    await restarted(world)
    found = world.ledger.restore("demo", "u1", "chat")
    assert found is not None
    assert (found.phase, "a1" in found.rejected) == (Phase.ROLLED_BACK, True)


async def test_a_deleted_record_is_written_again_while_it_runs_only() -> None:
    world = World()
    world.follow(status())
    await world.settle()
    (name,) = world.objects
    world.objects.clear()
    world.ledger.dropped(name)
    await world.settle()
    assert list(world.objects) == [name]
    world.follow(status(attempt="a2"))
    await world.settle()
    world.objects.pop(name)
    world.ledger.dropped(name)
    await world.settle()
    assert name not in world.objects
    assert world.ledger.get(name) is None


async def test_old_records_go_and_what_is_needed_stays() -> None:
    world = World(keep=2)
    for number in range(5):
        world.seconds = 100.0 * number
        world.follow(status(Phase.ROLLED_BACK, f"a{number}", seconds=100 * number))
        await world.settle()
    await world.settle()
    assert sorted(r.spec.attempt for r in world.records()) == ["a3", "a4"]
    world.refusals = [KubeError(0, "away")]
    world.seconds = 500.0
    world.follow(status(Phase.ROLLED_BACK, "a5", seconds=500))
    world.refusals = []
    await world.settle()
    world.refusals = [KubeError(0, "away")]
    await world.settle()
    await world.settle()
    assert sorted(r.spec.attempt for r in world.records()) == ["a4", "a5"]


async def test_a_review_is_kept_and_moves_the_next_one() -> None:
    world = World()
    world.follow(status(Phase.PROMOTED))
    await world.settle()
    (name,) = world.objects
    assert world.ledger.due() == []
    world.seconds = 90 * 86400.0 + 60
    assert world.ledger.due() == [name]
    world.ledger.reviewed(name, ReviewOutcome.LOOK_LONGER, "too little traffic")
    await world.settle()
    assert world.ledger.due() == []
    world.seconds += 7 * 86400.0
    assert world.ledger.due() == [name]
    world.ledger.reviewed(name, ReviewOutcome.KEEP, "no guard fired")
    world.follow(status(Phase.PROMOTED))
    await world.settle()
    outcomes = [review.outcome for review in world.only().reviews]
    assert outcomes == [ReviewOutcome.LOOK_LONGER, ReviewOutcome.KEEP]
    assert world.ledger.due() == []
    world.ledger.reviewed(("demo", "gone"), ReviewOutcome.KEEP, "")


async def test_only_the_newest_record_of_a_rule_that_was_judged_falls_due() -> None:
    world = World()
    world.follow(status(Phase.PROMOTED, "a1"))
    world.seconds = 10.0
    world.follow(status(Phase.ABORTED, "a2", seconds=10))
    await world.settle()
    world.seconds = 400 * 86400.0
    assert world.ledger.due() == []
