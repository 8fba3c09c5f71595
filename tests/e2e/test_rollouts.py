"""Rollouts on the real gateway, operator and cluster, with scripted runtimes at 20 requests/s."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from e2e.harness import standin
from e2e.harness.evidence import Tap, arrival
from e2e.harness.install import Installation, backend_pods, kill_operator, operator_back
from e2e.harness.kube import Kube, Object, until
from e2e.harness.load import Load, chat

Make = Callable[[Object], Object]
PARIS = [{"name": "capital", "mustMatch": "Paris"}]


@contextmanager
def arms(
    sluice: Installation, made: Make, name: str, *, checks: list[Object] | None = None, **script: Any
) -> Iterator[Load]:
    """Two backends NAME-a (stable) and NAME-b (scripted), a policy NAME without a rollout, and 20
    requests/s."""
    kube = sluice.kube
    for arm, given in (("a", {}), ("b", script)):
        made(standin.backend(f"{name}-{arm}", **given))
    made(standin.policy(name, name, f"{name}-a", checks=checks))
    for arm in "ab":
        kube.wait_condition("InferenceBackend", f"{name}-{arm}", "Ready")
    kube.wait_condition("RoutePolicy", name, "Ready")
    with Load(sluice.url, sluice.key, lambda _: chat("capital?") | {"model": name}, rate=20) as load:
        until("traffic", lambda: len(load.samples) > 20)
        yield load


def phase(kube: Kube, policy: str, *wanted: str) -> Object:
    """The status of the policy's rule once it is in one of these phases."""
    return until(
        f"{policy} {wanted} (now {kube.rule(policy, 'all')})",
        lambda: (rule := kube.rule(policy, "all")).get("phase") in wanted and rule,
    )


def tap(sluice: Installation, backend: str) -> Tap:
    """The evidence of a backend's only pod."""
    return Tap(sluice.kube, backend_pods(sluice.kube, backend)[0]["metadata"]["name"], sluice.admin_token)


def test_a_sound_candidate_is_promoted_and_git_can_follow(sluice: Installation, made: Make) -> None:
    kube = sluice.kube
    with arms(sluice, made, "sound") as load:
        kube.apply(
            standin.policy(
                "sound",
                "sound",
                "sound-a",
                rollout=standin.rollout(
                    "sound-b",
                    25,
                    50,
                    seconds=3,
                    samples=5,
                    shadow={"percent": 50, "minSeconds": 2, "minSamples": 5},
                ),
            )
        )
        history = phase(kube, "sound", "Promoted")["history"]
        assert [line["phase"] for line in history][-4:] == ["Shadowing", "Step", "Step", "Promoted"]
        assert kube.rule("sound", "all")["weight"] == 100
        kube.apply(standin.policy("sound", "sound", "sound-b"))
        phase(kube, "sound", "Stable")
        with tap(sluice, "sound-b") as b:
            seen = len(b.records)
            until("traffic at the promoted one after Git has followed", lambda: len(b.records) > seen + 40)
        assert all(sample.ok for sample in load.samples)


def test_a_slow_candidate_goes_back_and_stays_back(sluice: Installation, made: Make) -> None:
    kube = sluice.kube
    with arms(sluice, made, "slow", ttft=0.3, tpot=0.02) as load:
        released = standin.policy(
            "slow", "slow", "slow-a", rollout=standin.rollout("slow-b", 10, seconds=60, samples=500)
        )
        kube.apply(released)
        rule = phase(kube, "slow", "RolledBack")
        assert rule["weight"] == 0
        attempt = rule["attempt"]
        # Neither scale nor a change of the gates brings it back.
        kube.patch("InferenceBackend", "slow-b", {"spec": {"replicas": 2}})
        released["spec"]["rules"][0]["rollout"]["guards"] = [{"metric": "TTFT", "maxIncreasePercent": 10000}]
        kube.apply(released)
        kube.wait(
            "RoutePolicy",
            "slow",
            "to see the edit",
            lambda o: o["status"]["observedGeneration"] == o["metadata"]["generation"],
        )
        kube.wait("InferenceBackend", "slow-b", "two ready", lambda o: o["status"]["readyReplicas"] == 2)
        pods = [pod["metadata"]["name"] for pod in backend_pods(kube, "slow-b")]
        with Tap(kube, pods[0], sluice.admin_token) as one, Tap(kube, pods[1], sluice.admin_token) as other:
            one.settle()
            other.settle()
            seen, sent = len(one.records + other.records), len(load.samples)
            until("more traffic", lambda: len(load.samples) > sent + 60)
            assert len(one.records + other.records) == seen
        assert kube.rule("slow", "all")["attempt"] == attempt
        # Raising `attempt` is the way to try again.
        released["spec"]["rules"][0]["rollout"]["attempt"] = 2
        kube.apply(released)
        assert phase(kube, "slow", "Step")["attempt"] != attempt
        assert all(sample.ok for sample in load.samples)


def test_a_failing_candidate_goes_back(sluice: Installation, made: Make) -> None:
    with arms(sluice, made, "fails", error_rate=0.8):
        sluice.kube.apply(
            standin.policy(
                "fails", "fails", "fails-a", rollout=standin.rollout("fails-b", 25, seconds=60, samples=500)
            )
        )
        line = phase(sluice.kube, "fails", "RolledBack")["history"][-1]
        assert "ErrorRate" in line["message"], line


def test_one_broken_contract_is_enough(sluice: Installation, made: Make) -> None:
    with arms(sluice, made, "breaks", checks=PARIS, text="The capital of France is Rome.") as load:
        sluice.kube.apply(
            standin.policy(
                "breaks",
                "breaks",
                "breaks-a",
                checks=PARIS,
                rollout=standin.rollout("breaks-b", 10, seconds=60, samples=500),
            )
        )
        line = phase(sluice.kube, "breaks", "RolledBack")["history"][-1]
        assert line["reason"] == "HardGateBroken", line
        assert "capital" in line["message"], line
        sent = len(load.samples)
        until("more traffic", lambda: len(load.samples) > sent + 60)
        bad = [sample for sample in load.samples if not sample.ok]
        # The first, and what chance sends beside it until the gateway knows: two a second.
        assert len(bad) <= 10, len(bad)


def test_in_the_shadow_nobody_sees_it(sluice: Installation, made: Make) -> None:
    with arms(sluice, made, "shadow", checks=PARIS, text="Rome.") as load, tap(sluice, "shadow-b") as b:
        sluice.kube.apply(
            standin.policy(
                "shadow",
                "shadow",
                "shadow-a",
                checks=PARIS,
                rollout=standin.rollout(
                    "shadow-b", 10, shadow={"percent": 50, "minSeconds": 30, "minSamples": 100}
                ),
            )
        )
        phase(sluice.kube, "shadow", "RolledBack")
        # The operator heard of the violation while the answer was under way.
        until("the pod's own record", lambda: b.records)
        assert all(record["mirror"] for record in b.records)
        assert all(sample.ok for sample in load.samples)


def test_no_traffic_holds(sluice: Installation, made: Make) -> None:
    kube = sluice.kube
    with arms(sluice, made, "night"):
        pass
    kube.apply(
        standin.policy(
            "night", "night", "night-a", rollout=standin.rollout("night-b", 50, seconds=1, samples=3)
        )
    )
    rule = until("held", lambda: (r := kube.rule("night", "all")).get("held") == "NoEvidence" and r)
    assert rule["phase"] == "Step"
    assert rule["weight"] == 50


def test_an_edit_wins_in_the_middle(sluice: Installation, made: Make) -> None:
    kube = sluice.kube
    with arms(sluice, made, "edit") as load, tap(sluice, "edit-b") as b:
        released = standin.policy(
            "edit", "edit", "edit-a", rollout=standin.rollout("edit-b", 50, seconds=300, samples=5)
        )
        kube.apply(released)
        until("candidate traffic", lambda: len(b.records) > 10)
        released["spec"]["rules"][0]["rollout"]["abort"] = True
        kube.apply(released)
        assert phase(kube, "edit", "Aborted")["weight"] == 0
        told, sent = time.time(), len(load.samples)
        until("more traffic", lambda: len(load.samples) > sent + 120)
        assert max(map(arrival, b.records)) < told + 2
        assert all(sample.ok for sample in load.samples)


def test_a_third_version_in_the_middle_starts_clean(sluice: Installation, made: Make) -> None:
    kube = sluice.kube
    made(standin.backend("third-c"))
    kube.wait_condition("InferenceBackend", "third-c", "Ready")
    with arms(sluice, made, "third") as load:
        kube.apply(
            standin.policy(
                "third", "third", "third-a", rollout=standin.rollout("third-b", 25, 50, seconds=2, samples=5)
            )
        )
        first = until("second step", lambda: (r := kube.rule("third", "all")).get("step") == 1 and r)
        kube.apply(
            standin.policy(
                "third", "third", "third-a", rollout=standin.rollout("third-c", 25, 50, seconds=60, samples=5)
            )
        )
        second = until(
            "another attempt",
            lambda: (r := kube.rule("third", "all")).get("attempt", "") not in ("", first["attempt"]) and r,
        )
        assert second["step"] == 0
        assert second["weight"] in (0, 25)
        assert all(sample.ok for sample in load.samples)


def test_a_killed_operator_and_a_killed_candidate(sluice: Installation, made: Make) -> None:
    kube = sluice.kube
    with arms(sluice, made, "kill") as load:
        kube.apply(
            standin.policy(
                "kill", "kill", "kill-a", rollout=standin.rollout("kill-b", 25, seconds=300, samples=5)
            )
        )
        before = until("samples", lambda: (r := kube.rule("kill", "all")).get("numSamples", 0) > 5 and r)
        kill_operator(kube)
        operator_back(kube)
        before = kube.rule("kill", "all")
        after = until(
            "it goes on",
            lambda: (r := kube.rule("kill", "all")).get("numSamples", 0) > before.get("numSamples", 0) and r,
        )
        assert (after["attempt"], after["step"]) == (before["attempt"], before["step"])
        assert all(sample.ok for sample in load.samples), [s for s in load.samples if not s.ok][:3]
        kube.delete("Pod", backend_pods(kube, "kill-b")[0]["metadata"]["name"], grace_period_seconds=0)
        rule = until(
            "a word on it",
            lambda: (
                (r := kube.rule("kill", "all")).get("held") == "CandidateNotReady"
                or r["phase"] == "RolledBack"
                or (r["weight"] == 25 and r)
            ),
        )
        assert rule


def test_a_serving_backend_can_always_be_deleted(sluice: Installation, made: Make) -> None:
    kube = sluice.kube
    made(standin.backend("gone"))
    made(standin.policy("gone", "gone", "gone"))
    kube.wait_condition("RoutePolicy", "gone", "Ready")
    kube.delete("InferenceBackend", "gone")
    until("deleted", lambda: kube.get("InferenceBackend", "gone") is None)
    assert "gone" in kube.wait_condition("RoutePolicy", "gone", "Ready", "False")["message"]
