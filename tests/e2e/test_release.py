"""A release as people run it: suites, consent by the command line, feedback, the ledger, a load ramp.

The `sluice` command talks to the real cluster; runtimes are scripted.
"""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import httpx
from openai import InternalServerError, OpenAI

from e2e.harness import standin
from e2e.harness.install import NAMESPACE, Installation
from e2e.harness.kube import Object, condition, until
from e2e.test_rollouts import arms, phase
from suites import FACTS

Make = Callable[[Object], Object]


def command(*arguments: str) -> str:
    """What `sluice` prints; it must succeed."""
    program = Path(sys.executable).parent / "sluice"
    done = subprocess.run(
        [program, *arguments, "-n", NAMESPACE],
        capture_output=True,
        text=True,
        env=os.environ | {"COLUMNS": "120", "NO_COLOR": "1"},
    )
    assert done.returncode == 0, done.stdout + done.stderr
    return done.stdout


def test_a_release_from_its_suites_to_its_record(sluice: Installation, made: Make) -> None:
    kube = sluice.kube
    made(FACTS)
    kube.wait_condition("EvalSuite", "facts", "Ready")
    with arms(sluice, made, "full") as load:
        rollout = standin.rollout(
            "full-b",
            25,
            50,
            seconds=2,
            samples=5,
            evaluation={"suites": ["facts"]},
            promotion="Manual",
            release={"reason": "a trial", "owner": "inference-team"},
        )
        kube.apply(standin.policy("full", "full", "full-a", rollout=rollout))
        until("it waits for a person", lambda: kube.rule("full", "all").get("held") == "AwaitingApproval")
        told = kube.get("RoutePolicy", "full")
        assert told is not None
        assert condition(told, "AwaitingApproval")["status"] == "True"
        assert "sluice approve" in command("status", "full")
        command("approve", "full")
        phase(kube, "full", "Promoted")
        uid = told["metadata"]["uid"]
        [record] = [r for r in kube.list("ReleaseRecord") if r["spec"]["policyUid"] == uid]
        name = record["metadata"]["name"]
        until(
            "the record tells the end",
            lambda: (kube.get("ReleaseRecord", name) or record)["spec"]["outcome"] == "Promoted",
        )
        assert name in command("ledger")
        report = command("ledger", name, "-o", "markdown")
        for part in ("full-a", "full-b", "inference-team", "facts@sha256:", "Promoted"):
            assert part in report, report
        spec = json.loads(command("ledger", name, "-o", "json"))
        assert spec["candidate"]["evidence"]["numRequests"] > 10
        assert spec["stable"]["evidence"]["numRequests"] > 10
        assert spec["evaluation"]["candidate"] == [{"task": "chat", "numSamples": 1, "numPassed": 1}]
        assert all(sample.ok for sample in load.samples)
    kube.delete("ReleaseRecord", name)


def test_a_record_is_reviewed_on_copies_of_the_traffic_of_today(sluice: Installation, made: Make) -> None:
    """The candidate is as bad as it was; its copies show it again, and nobody sees an answer of theirs."""
    kube = sluice.kube
    with arms(sluice, made, "again", error_rate=0.7) as load:
        rollout = standin.rollout("again-b", 50, seconds=600, guards=[{"metric": "ErrorRate"}])
        kube.apply(standin.policy("again", "again", "again-a", rollout=rollout))
        phase(kube, "again", "RolledBack")
        policy = kube.get("RoutePolicy", "again")
        assert policy is not None

        def ended() -> list[Object]:
            records = kube.list("ReleaseRecord")
            mine = [r for r in records if r["spec"]["policyUid"] == policy["metadata"]["uid"]]
            return [r for r in mine if r["spec"].get("ended")]

        [record] = until("the record tells the end", ended)
        name = record["metadata"]["name"]
        seen = len(load.samples)
        said = command("review", name, "--wait")
        assert "GoBack: ErrorRate" in said, said
        assert "GoBack" in command("ledger", name)
        until("traffic after it", lambda: len(load.samples) > seen + 20)
        assert all(sample.ok for sample in load.samples[seen:])
        assert kube.rule("again", "all")["weight"] == 0
    kube.delete("ReleaseRecord", name)


def test_what_people_say_reaches_the_arm_that_answered(sluice: Installation, made: Make) -> None:
    kube = sluice.kube
    with arms(sluice, made, "said", text="From the candidate."):
        guards = [{"metric": "NegativeFeedbackRate"}]
        rollout = standin.rollout("said-b", 50, seconds=600, guards=guards)
        kube.apply(standin.policy("said", "said", "said-a", rollout=rollout))
        phase(kube, "said", "Step")
        client = OpenAI(base_url=sluice.url + "/v1", api_key=sluice.key, max_retries=0)
        headers = {"Authorization": f"Bearer {sluice.key}"}

        def complain() -> bool:
            answer = client.chat.completions.create(
                model="said", messages=[{"role": "user", "content": "?"}], max_tokens=16
            )
            kind = "wrong" if str(answer.choices[0].message.content).startswith("From") else "helpful"
            said = {"request_id": answer.id, "kind": kind}
            told = httpx.post(f"{sluice.url}/v1/feedback", json=said, headers=headers, timeout=60)
            assert told.status_code == 202, told.text
            return bool(kube.rule("said", "all")["phase"] == "RolledBack")

        until("complaints roll it back", complain)
        assert "NegativeFeedbackRate" in kube.rule("said", "all")["history"][-1]["message"]


def test_one_task_goes_back_alone(sluice: Installation, made: Make) -> None:
    kube = sluice.kube
    script = {"text": "From the candidate.", "by_task": {"summary": {"error_rate": 0.7}}}
    with arms(sluice, made, "alone", **script):
        rollout = standin.rollout("alone-b", 50, seconds=600, guards=[{"metric": "ErrorRate"}])
        kube.apply(standin.policy("alone", "alone", "alone-a", rollout=rollout))
        phase(kube, "alone", "Step")
        client = OpenAI(base_url=sluice.url + "/v1", api_key=sluice.key, max_retries=0)

        def ask(task: str) -> str:
            try:
                answer = client.with_options(default_headers={"sluice-task": task}).chat.completions.create(
                    model="alone", messages=[{"role": "user", "content": "?"}], max_tokens=16
                )
            except InternalServerError:
                return "failed"  # the script's own failure, and what rolls the task back
            return str(answer.choices[0].message.content)

        def excluded() -> list[Object]:
            ask("summary")
            ask("kb-qa")
            return list(kube.rule("alone", "all").get("excluded") or [])

        [gone] = until("summary goes back alone", excluded)
        assert gone["task"] == "summary"

        def by_stable() -> bool:
            return {ask("summary") for _ in range(12)} == {"The capital of France is Paris."}

        until("the gateway knows it", by_stable)
        assert by_stable(), "and keeps to it"
        assert "From the candidate." in {ask("kb-qa") for _ in range(20)}
        assert kube.rule("alone", "all")["phase"] == "Step"


def test_a_load_ramp_gives_the_safe_throughput(sluice: Installation, made: Make) -> None:
    """Four places of 0.26 s each: fifteen a second are where it collapses, so what is safe is below."""
    kube = sluice.kube
    made(standin.backend("ramp-a"))
    slow = standin.backend("ramp-b", ttft=0.05, tpot=0.03, sigma=0.0)
    slow["spec"]["engine"] |= {"maxNumSeqs": 4}
    made(slow)
    policy = standin.policy(
        "ramp", "ramp", "ramp-a", rollout=standin.rollout("ramp-b", 50) | {"paused": True}
    )
    policy["spec"]["slo"] = {"ttftSeconds": "0.4"}
    made(policy)
    for arm in "ab":
        kube.wait_condition("InferenceBackend", f"ramp-{arm}", "Ready")
    kube.wait_condition("RoutePolicy", "ramp", "Ready")
    command(
        "calibrate", "ramp-b", "--policy", "ramp", "--prompt-tokens", "16", "--output-tokens", "8", "--wait"
    )
    backend = kube.get("InferenceBackend", "ramp-b")
    assert backend is not None
    capacity = backend["status"]["capacity"]
    assert 2 <= float(capacity["safeRequestsPerSecond"]) <= 17
    assert capacity["identity"] == backend["status"]["identity"]["digest"]
