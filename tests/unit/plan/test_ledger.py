"""What is written down of an attempt, and what can be told from it."""

from __future__ import annotations

import json
import re
from datetime import timedelta
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice_operator.api.backend import InferenceBackend
from sluice_operator.api.cachescope import CacheScopeSpec
from sluice_operator.api.common import Metadata
from sluice_operator.api.guards import Ceiling, Gain, Guard, GuardMode, Metric, Query
from sluice_operator.api.releaserecord import (
    ArmEvidence,
    Outcome,
    ReleaseRecord,
    ReleaseRecordSpec,
)
from sluice_operator.api.rollout import CandidateArm, Exclusion, Release, Waiver
from sluice_operator.api.routepolicy import Fallback, Match
from sluice_operator.api.rulestatus import Phase, RuleStatus, Transition
from sluice_operator.api.tuning import Features, Sampling
from sluice_operator.plan.ledger import closed, expired, name, rebuild, record
from sluice_operator.plan.stages import text
from unit.plan.rollout_world import SUITES, WATCH, FakeWorld, rollout, run

POLICY = Metadata(name="assistant", namespace="shop", uid="uid")


def backend(name_: str, **spec: Any) -> InferenceBackend:
    return InferenceBackend.model_validate(
        {
            "metadata": {"name": name_, "namespace": "shop"},
            "spec": {"model": {"huggingFace": {"repo": "o/m", "revision": "abc"}}, **spec},
            "status": {"image": "registry/runtime@sha256:1"},
        }
    )


def written(world: FakeWorld, previous: ReleaseRecordSpec | None = None, **more: Any) -> ReleaseRecordSpec:
    given: dict[str, Any] = {
        "backends": {"old": backend("old"), "new": backend("new", owner="team-b")},
        "stable": ArmEvidence(),
        "candidate": ArmEvidence(),
        **more,
    }
    return record("shop", POLICY, "m", world.rule, world.status, previous=previous, now=world.now, **given)


# Names


LABELS = st.from_regex(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?", fullmatch=True)


@given(LABELS, LABELS, st.text("0123456789abcdef", min_size=16, max_size=16))
def test_a_name_is_a_dns_label_and_always_the_same(policy: str, rule_: str, attempt: str) -> None:
    found = name(policy, rule_, attempt)
    assert re.fullmatch(r"[a-z0-9]([-a-z0-9]{0,61}[a-z0-9])?", found)
    assert found == name(policy, rule_, attempt)


def test_names_are_told_apart() -> None:
    attempt = "0123456789abcdef"
    parts = [
        ("a-b", "c", attempt, ""),
        ("a", "b-c", attempt, ""),
        ("a-b", "c", attempt, "uid"),
        ("a-b", "c", "0123456789ffffff", ""),
        ("x" * 63, "y" * 62, attempt, ""),
        ("x" * 63, "y" * 63, attempt, ""),
    ]
    assert len({name(*one) for one in parts}) == len(parts)
    assert name("assistant", "all", attempt).startswith("assistant-all-0123456789-")


# What is recorded


def test_everything_that_makes_an_arm_is_there_with_where_it_is_from() -> None:
    change = rollout(
        candidate=CandidateArm(backend="new", features=Features(prefix_cache=False), cache_scope="team"),
        evaluation=SUITES,
    )
    world = FakeWorld(change, sampling=Sampling(temperature="0.7"), fallbacks=[Fallback(backend="spare")])
    world.rule = world.rule.model_copy(update={"match": Match(tasks=["qa"])})
    world.settle()
    quantized = backend(
        "new",
        engine={"quantization": "Int8", "maxNumSeqs": 4},
        accelerator={"count": 1},
        scheduling={"nodeSelector": {"pool": "gpu"}},
        card={"quantization": "GPTQ on c4, 128 samples"},
        cost={"perReplicaHour": "2"},
    )
    scopes = {"team": CacheScopeSpec(versions={"knowledge": "7"}, epoch=3)}
    found = written(world, backends={"old": backend("old"), "new": quantized}, scopes=scopes)
    new, old = found.candidate.parameters, found.stable.parameters
    assert new["model"]["values"]["huggingFace"] == {"repo": "o/m", "revision": "abc"}
    assert new["model"]["from"] == "InferenceBackend new spec.model"
    assert new["engine"]["values"]["maxNumSeqs"] == 4
    assert new["precision"]["values"] == {
        "weights": "Int8",
        "activations": "bfloat16",
        "kvCache": "bfloat16",
        "calibration": "GPTQ on c4, 128 samples",
    }
    assert new["hardware"]["values"]["scheduling"]["nodeSelector"] == {"pool": "gpu"}
    assert new["hardware"]["values"]["accelerator"]["resource"] == "nvidia.com/gpu"
    assert old["hardware"]["values"]["accelerator"] == {}
    assert new["image"]["values"]["image"] == "registry/runtime@sha256:1"
    assert new["features"]["from"] == "rule all rollout.candidate.features"
    assert new["features"]["values"] == {"prefixCache": False}
    assert old["features"] == {"from": "rule all features", "values": {}}
    assert new["cacheScope"]["values"]["versions"] == {"knowledge": "7"}
    assert new["cacheScope"]["values"]["epoch"] == 3
    assert new["sampling"] == {"from": "rule all sampling", "values": {"temperature": "0.7"}}
    assert new["route"]["values"]["timeouts"] == {"idleSeconds": 120}
    assert new["cost"]["values"] == {"perReplicaHour": "2", "currency": "EUR"}
    assert (found.fallbacks, found.tasks) == (["spare"], ["qa"])
    assert (found.stable.identity, found.candidate.identity) == ("sha256:old", "sha256:new")


def test_gates_in_words() -> None:
    guards = [
        Guard(metric=Metric.TTFT, percentiles=[95], ceiling=Ceiling(value="2.5")),
        Guard(metric=Metric.ERROR_RATE, mode=GuardMode.HARD, tasks=["qa"]),
    ]
    query = Query(name="gpu", query="x", max="0.9")
    gain = Gain(metric=Metric.TOTAL, min_decrease_percent=20, tasks=["qa"])
    world = FakeWorld(rollout(guards=guards, queries=[query], gains=[gain])).settle()
    gates = written(world).gates
    assert gates.alpha == "0.01"
    assert gates.guards == [
        "TTFT at p95: at most 20 % above stable, and at most 2.5 at p95; statistics decide",
        "ErrorRate: at most 20 % above stable, for qa; one such request rolls back",
        "query gpu: at most 0.9, every 15 s; 3 in a row decide",
    ]
    assert gates.checks == ["json: answers are JSON of its schema (Hard)"]
    assert gates.gains == ["Total at p50 at least 20 % below stable, for qa: not shown"]


def test_people_and_times() -> None:
    release = Release(
        reason="cheaper",
        incident="INC-7",
        waivers=[Waiver(risk="longer answers", by="ann")],
        review_after_days=10,
    )
    world = FakeWorld(rollout(release=release)).settle()
    found = written(world)
    assert (found.why, found.owner, found.incident) == ("cheaper", "team-b", "INC-7")
    assert found.waivers[0].by == "ann"
    assert (found.started, found.ended) == ("2026-01-01T00:00:00Z", "")
    assert found.next_review == "2026-01-11T00:00:00Z"
    world.roll_back()
    world.now += timedelta(days=1)
    ended = written(world, found)
    assert (ended.ended, ended.next_review) == (text(world.now), "2026-01-12T00:00:00.500000Z")
    world.now += timedelta(days=1)
    assert written(world, ended).ended == ended.ended, "it ends once"


@pytest.mark.parametrize(
    ("phase", "outcome"),
    [
        (Phase.EVALUATING, Outcome.RUNNING),
        (Phase.WATCHING, Outcome.RUNNING),
        (Phase.PROMOTED, Outcome.PROMOTED),
        (Phase.ROLLED_BACK, Outcome.ROLLED_BACK),
        (Phase.ABORTED, Outcome.ABORTED),
    ],
)
def test_outcomes(phase: Phase, outcome: Outcome) -> None:
    world = FakeWorld().settle()
    world.saved = world.status.model_copy(update={"phase": phase}).model_dump_json(by_alias=True)
    assert written(world).outcome is outcome


def test_the_decision_is_the_line_that_caused_it() -> None:
    world = FakeWorld().roll_back()
    found = written(world)
    assert (found.outcome, found.reason) == (Outcome.ROLLED_BACK, "HardGateBroken")
    assert "json" in found.message


def test_history_only_grows_and_is_of_this_attempt_alone() -> None:
    world = FakeWorld().roll_back()
    world.edit(candidate=CandidateArm(backend="newer"))
    world.settle()
    found = written(world)
    assert [line.reason for line in found.history] == ["AttemptStarted"]
    for i in range(30):
        world.edit(exclude=[Exclusion(task="x")] if i % 2 == 0 else [])
        world.tick(1)
        found = written(world, found)
    assert len(world.status.history) == 20
    assert len(found.history) == 31, "the status keeps fewer"
    assert found.history[0].reason == "AttemptStarted"
    assert written(world, found).history == found.history, "writing it again adds nothing"
    long = [Transition(time=str(i), phase=Phase.STEP, reason="x", message="") for i in range(250)]
    assert len(written(world, found.model_copy(update={"history": long})).history) == 200


def test_without_an_attempt_there_is_nothing_to_record() -> None:
    world = FakeWorld()
    with pytest.raises(ValueError, match="no attempt"):
        written(world)


def test_a_record_survives_the_api_server() -> None:
    world = FakeWorld(rollout(evaluation=SUITES)).settle()
    world.evaluation = run(failed=["qa/a"])
    world.settle()
    found = written(world)
    again = ReleaseRecordSpec.model_validate(json.loads(found.model_dump_json(by_alias=True)))
    assert again == found
    assert RuleStatus.model_validate(again.rule_status) == world.status


# An attempt that the spec names no longer


def test_an_attempt_that_is_left_is_superseded_and_one_that_ended_stays_as_it_ended() -> None:
    world = FakeWorld().settle()
    running = written(world)
    left = closed(running, "AttemptStarted", "newer against old", world.now)
    assert (left.outcome, left.ended, left.history[-1].reason) == (
        Outcome.SUPERSEDED,
        text(world.now),
        "AttemptStarted",
    )
    assert closed(running, "PromotedInSpec", "", world.now).outcome is Outcome.PROMOTED
    refused = written(FakeWorld().roll_back())
    assert closed(refused, "RolloutRemoved", "", world.now) == refused


# Rebuilding


def test_no_record_of_this_policy_no_status() -> None:
    found = written(FakeWorld().settle())
    assert rebuild([], "uid", "all") is None
    assert rebuild([found], "another uid", "all") is None
    assert rebuild([found], "uid", "another rule") is None


def test_refused_attempts_of_the_past_stay_refused() -> None:
    world = FakeWorld().roll_back()
    first = written(world)
    world.edit(candidate=CandidateArm(backend="newer"))
    world.now += timedelta(hours=1)
    world.settle()
    second = written(world)
    forgotten = second.model_copy(update={"rule_status": {**second.rule_status, "rejected": []}})
    found = rebuild([forgotten, first], "uid", "all")
    assert found is not None
    assert found.rejected == [first.attempt]
    world.lose_status(found)
    world.edit(candidate=CandidateArm(backend="new"))
    world.settle()
    assert (world.status.phase, world.weight) == (Phase.ROLLED_BACK, 0)


def test_a_superseded_attempt_starts_over_without_what_it_had_lost() -> None:
    world = FakeWorld().settle()
    world.says("GuardFired", "sql").tick()
    left = closed(written(world), "RolloutRemoved", "", world.now)
    found = rebuild([left], "uid", "all")
    assert found is not None
    assert (found.phase, found.weight, found.attempt) == (Phase.STABLE, 0, "")
    world.lose_status(found)
    world.settle()
    assert (world.weight, [one.task for one in world.status.excluded]) == (10, ["sql"])


@pytest.mark.parametrize("phase", ["step", "watch"])
def test_a_running_attempt_comes_back_in_its_stage_at_weight_0_with_fresh_evidence(phase: str) -> None:
    world = FakeWorld(rollout(watch=WATCH)).settle().complete_stage()
    if phase == "watch":
        world.complete_stage()
    world.serve(30)
    world.tick()
    before = world.status
    found = rebuild([written(world)], "uid", "all")
    assert found is not None
    assert (found.phase, found.step, found.weight) == (before.phase, before.step, 0)
    assert (found.num_samples, found.guards, found.num_restarts) == (0, [], before.num_restarts + 1)
    world.lose_status(found)
    world.settle()
    assert world.weight == before.weight
    if phase == "watch":
        assert world.status.watch_until == before.watch_until


# Keeping


def kept(name_: str, started: int, outcome: Outcome = Outcome.ROLLED_BACK, **spec: Any) -> ReleaseRecord:
    begun = FakeWorld().now + timedelta(days=started)
    ended = "" if outcome is Outcome.RUNNING else text(begun)
    body = {"policy": "p", "policy_uid": "u", "rule": "r", "attempt": name_, "outcome": outcome, **spec}
    return ReleaseRecord(
        metadata=Metadata(name=name_, namespace="shop"),
        spec=ReleaseRecordSpec(**body, started=text(begun), ended=ended),
    )


def test_records_go_by_count_and_by_age() -> None:
    now = FakeWorld().now + timedelta(days=100)
    many = [kept(f"a{i:02}", i) for i in range(10)]
    assert set(expired(many, 3, 10_000, now)) == {f"a{i:02}" for i in range(7)}
    assert set(expired(many, 99, 95, now)) == {f"a{i:02}" for i in range(5)}
    assert expired(many, 99, 10_000, now) == ()
    others = [kept(f"b{i}", i, policy="q") for i in range(3)]
    assert set(expired([*many[:3], *others], 3, 10_000, now)) == set(), "of each policy"


def test_never_one_that_runs_nor_the_newest_of_a_rule() -> None:
    now = FakeWorld().now + timedelta(days=10_000)
    found = [
        kept("runs", 0, Outcome.RUNNING),
        kept("old", 1),
        kept("newest", 2),
        kept("other-rule", 0, rule="s"),
        kept("dead-policy", 0, policy_uid="gone"),
    ]
    assert set(expired(found, 1, 1, now)) == {"old", "dead-policy"}
