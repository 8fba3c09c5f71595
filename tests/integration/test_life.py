"""The whole life of a release through a real gateway: suites, approval, the watch, one task alone, ledger."""

from __future__ import annotations

from typing import Any

import aiohttp
import pytest

from integration.test_rollouts import in_phase
from integration.world import Load, World, condition, policy_manifest, rollout, until
from sluice_operator.kube.client import EVENT, POLICY, RELEASE_RECORD
from suites import FACTS

pytestmark = pytest.mark.apiserver
Object = dict[str, Any]


async def two_arms(world: World, **candidate: Any) -> tuple[Any, Any]:
    """Stable `a` and candidate `b`, with policy `m` on `a`."""
    a = await world.serve("a")
    b = await world.serve("b", **candidate)
    await world.apply(policy_manifest("m", "a"))
    await world.wait_condition(POLICY, "m", "Ready")
    return a, b


async def held(world: World, why: str, policy: str = "m") -> Object:
    async def probe() -> Object | None:
        rule = await world.rule(policy)
        return rule if rule.get("held") == why else None

    return await until(f"held {why}", probe)


async def records(world: World) -> list[Object]:
    found = await world.kube.list_all(RELEASE_RECORD, world.namespace)
    return sorted(found, key=lambda r: str(r["spec"]["started"]))


async def ended(world: World) -> Object:
    """The only record, once it tells the end: no rollback waits for the ledger."""

    async def probe() -> Object | None:
        found = await records(world)
        assert len(found) <= 1, found
        return next((record for record in found if record["spec"].get("ended")), None)

    return await until("the record tells the end", probe)


async def arms_of(world: World, task: str, num: int) -> list[str]:
    """Who answers this task now: the stand-ins are told apart by their answers."""
    async with aiohttp.ClientSession() as http:
        answers = [await world.chat(http, "m", task=task) for _ in range(num)]
    assert all(status == 200 for status, _ in answers), answers
    return [body["choices"][0]["message"]["content"] for _, body in answers]


async def test_a_candidate_that_fails_at_one_task_loses_only_that(world: World) -> None:
    await two_arms(world, text="From the candidate.", by_task={"nl2sql": {"error_rate": 0.6}})
    async with Load(world, "m", rate=40, tasks=("nl2sql", "summary", "chat")):
        guards = [{"metric": "ErrorRate"}]
        await world.apply(policy_manifest("m", "a", rollout=rollout("b", 50, seconds=600, guards=guards)))

        async def excluded() -> list[Object]:
            return (await world.rule("m")).get("excluded") or []

        [gone] = await until("nl2sql goes back alone", excluded)
        assert (gone["task"], gone.get("tenant", "")) == ("nl2sql", "")
        assert gone["reason"] == "GuardFired"
        rule = await world.rule("m")
        assert (rule["phase"], rule["weight"]) == ("Step", 50)
        assert "nl2sql" in rule["history"][-1]["message"]

        async def by_stable() -> bool:
            async with aiohttp.ClientSession() as http:
                answers = [await world.chat(http, "m", task="nl2sql") for _ in range(12)]
            return all(status == 200 and "Paris" in str(body) for status, body in answers)

        await until("the gateway knows it", by_stable)
        assert set(await arms_of(world, "nl2sql", 20)) == {"The capital of France is Paris."}
        assert "From the candidate." in await arms_of(world, "summary", 20)
    events = await world.kube.list_all(EVENT, world.namespace)
    assert any("nl2sql" in e["message"] and e["type"] == "Warning" for e in events)

    async def recorded() -> bool:
        [record] = await records(world)
        return [one["task"] for one in record["spec"]["excluded"]] == ["nl2sql"]

    await until("the record names what went back", recorded)


async def test_a_person_takes_one_task_back_in_one_edit(world: World) -> None:
    await two_arms(world, text="From the candidate.")
    async with Load(world, "m", tasks=("nl2sql", "summary")):
        spec = rollout("b", 50, seconds=600)
        await world.apply(policy_manifest("m", "a", rollout=spec))
        await in_phase(world, "m", "Step")
        await world.apply(policy_manifest("m", "a", rollout={**spec, "exclude": [{"task": "nl2sql"}]}))

        async def gone() -> bool:
            return set(await arms_of(world, "nl2sql", 12)) == {"The capital of France is Paris."}

        await until("nl2sql is back on stable", gone)
        assert "From the candidate." in await arms_of(world, "summary", 20)
        await world.apply(policy_manifest("m", "a", rollout=spec))

        async def back() -> bool:
            return "From the candidate." in await arms_of(world, "nl2sql", 12)

        await until("what a person took away a person gives back", back)


async def test_low_risk_tasks_first_then_all(world: World) -> None:
    await two_arms(world, text="From the candidate.")
    async with Load(world, "m", tasks=("nl2sql", "summary")):
        steps = [
            {"weight": 100, "tasks": ["summary"], "minSeconds": 600, "minSamples": 1},
            {"weight": 50, "minSeconds": 1, "minSamples": 3},
        ]
        await world.apply(policy_manifest("m", "a", rollout=rollout("b") | {"steps": steps}))
        await in_phase(world, "m", "Step")

        async def only() -> bool:
            return set(await arms_of(world, "summary", 10)) == {"From the candidate."}

        await until("summaries are the candidate's", only)
        assert set(await arms_of(world, "nl2sql", 10)) == {"The capital of France is Paris."}


async def test_nothing_goes_on_without_the_consent_that_it_asks_for(world: World) -> None:
    await two_arms(world)
    async with Load(world, "m"):
        spec = rollout("b", 25, 50, promotion="Manual")
        spec["steps"][1]["consent"] = "Manual"
        await world.apply(policy_manifest("m", "a", rollout=spec))
        rule = await held(world, "AwaitingApproval")
        assert (rule["step"], rule["weight"]) == (0, 25)
        assert "kubectl sluice approve" in rule["heldMessage"]
        stale = {"attempt": "of-another-time", "step": 2}
        await world.apply(policy_manifest("m", "a", rollout={**spec, "approval": stale}))
        told = await world.wait_condition(POLICY, "m", "Ready")
        assert told["status"] == "True"
        assert (await world.rule("m"))["step"] == 0, "an approval is for one attempt"
        given = {"attempt": rule["attempt"], "step": 1}
        await world.apply(policy_manifest("m", "a", rollout={**spec, "approval": given}))

        async def second() -> Object | None:
            now = await world.rule("m")
            return now if now["weight"] == 50 and now.get("held") == "AwaitingApproval" else None

        await until("the second step waits for the promotion's approval", second)
        await world.apply(policy_manifest("m", "a", rollout={**spec, "approval": given | {"step": 2}}))
        await in_phase(world, "m", "Promoted")


async def test_the_watch_keeps_a_holdback_and_rollback_armed(world: World) -> None:
    _, b = await two_arms(world)
    async with Load(world, "m"):
        spec = rollout("b", 50) | {"watch": {"seconds": 600, "holdbackPercent": 50}}
        spec["guards"] = [{"metric": "ErrorRate"}]
        await world.apply(policy_manifest("m", "a", rollout=spec))
        rule = await in_phase(world, "m", "Watching")
        assert rule["weight"] == 50
        assert rule["watchUntil"]
        obj = await world.get(POLICY, "m")
        assert condition(obj, "Ready")["status"] == "True"
        await world.script(b, error_rate=1.0)
        rule = await in_phase(world, "m", "RolledBack")
        assert rule["weight"] == 0
        record = await ended(world)
        assert record["spec"]["outcome"] == "RolledBack"
        assert record["spec"]["reason"] == "GuardFired"
        assert record["spec"]["candidate"]["evidence"]["counts"]["ErrorRate"] > 0
        assert "ownerReferences" not in record["metadata"]


@pytest.mark.parametrize("right", [True, False], ids=["right", "wrong"])
async def test_a_suite_runs_before_any_traffic(world: World, right: bool) -> None:
    await two_arms(world, text="Paris." if right else "Rome.")
    await world.apply(FACTS)
    async with Load(world, "m"):
        spec = rollout("b", 50, evaluation={"suites": ["facts"]})
        await world.apply(policy_manifest("m", "a", rollout=spec))
        rule = await in_phase(world, "m", "Promoted" if right else "RolledBack")
        told = rule["evaluation"]
        assert told["candidate"] == [{"task": "chat", "numSamples": 1, "numPassed": int(right)}]
        assert told["stable"] == [{"task": "chat", "numSamples": 1, "numPassed": 1}]
        assert told.get("failedHard", []) == ([] if right else ["facts/capital"])
        phases = [line["phase"] for line in rule["history"]]
        if not right:
            assert "Step" not in phases, "no user saw it"
            assert rule["history"][-1]["reason"] == "EvaluationFailed"
    record = await ended(world)
    assert record["spec"]["gates"]["suites"][0].startswith("facts@")


async def test_an_unknown_suite_is_refused_by_name(world: World) -> None:
    await two_arms(world)
    spec = rollout("b", 50, evaluation={"suites": ["none-such"]})
    await world.apply(policy_manifest("m", "a", rollout=spec))
    told = await world.wait_condition(POLICY, "m", "Stalled")
    assert "rollout.evaluation.suites[0]" in told["message"]
    assert "none-such" in told["message"]


async def test_a_lost_status_is_rebuilt_from_the_ledger(world: World) -> None:
    await two_arms(world, text="Rome.")
    contract = {"checks": [{"name": "capital", "mustMatch": "Paris"}]}
    spec = policy_manifest("m", "a", contract=contract, rollout=rollout("b", 50, seconds=600))
    async with Load(world, "m"):
        await world.apply(spec)
        before = await in_phase(world, "m", "RolledBack")
        await ended(world)
        await world.kill_operator()
        await world.kube._call(
            "PATCH",
            POLICY.path(world.namespace, "m") + "/status",
            body=[{"op": "remove", "path": "/status"}],
            content_type="application/json-patch+json",
        )
        await world.start_operator()
        after = await in_phase(world, "m", "RolledBack")
        assert after["attempt"] == before["attempt"]
        assert after["weight"] == 0
        assert len(await records(world)) == 1


async def test_feedback_goes_to_the_arm_that_answered(world: World) -> None:
    await two_arms(world, text="From the candidate.")
    spec = rollout("b", 50, seconds=600, guards=[{"metric": "NegativeFeedbackRate"}])
    await world.apply(policy_manifest("m", "a", rollout=spec))
    await in_phase(world, "m", "Step")
    url = f"http://127.0.0.1:{world.gateway_port}/v1/feedback"
    headers = {"Authorization": f"Bearer {world.key}"}
    async with aiohttp.ClientSession() as http:
        async with http.post(url, json={"request_id": "chatcmpl-none", "kind": "wrong"}) as answer:
            assert answer.status == 401
        async with http.post(
            url, json={"request_id": "chatcmpl-none", "kind": "wrong"}, headers=headers
        ) as answer:
            assert answer.status == 404

        async def complain() -> Object | None:
            _, body = await world.chat(http, "m")
            kind = "wrong" if body["choices"][0]["message"]["content"].startswith("From") else "helpful"
            told = {"request_id": body["id"], "kind": kind}
            async with http.post(url, json=told, headers=headers) as answer:
                assert answer.status == 202, await answer.text()
            rule = await world.rule("m")
            return rule if rule["phase"] == "RolledBack" else None

        rule = await until("people's complaints roll it back", complain)
    assert "NegativeFeedbackRate" in rule["history"][-1]["message"]


async def test_greedy_answers_are_compared_without_a_word_of_them(world: World) -> None:
    await two_arms(world, text="Something else.")
    shadow = {"percent": 100, "pairingPercent": 100, "minSeconds": 600, "minSamples": 5}
    async with Load(world, "m", tasks=("chat", "summary")):
        await world.apply(policy_manifest("m", "a", rollout=rollout("b", 50, shadow=shadow)))

        async def compared() -> Object | None:
            rule = await world.rule("m")
            seen = {one["task"]: one for one in rule.get("agreement") or []}
            enough = all(seen.get(task, {}).get("numPairs", 0) >= 5 for task in ("chat", "summary"))
            return rule if enough else None

        rule = await until("pairs of both tasks", compared)
    for one in rule["agreement"]:
        assert one["numEqual"] == 0
        assert one["numBaselineEqual"] == one["numBaselinePairs"] > 0
    assert rule["differing"]
    assert "Something else" not in str(await world.get(POLICY, "m"))
    assert "Something else" not in str(await records(world))
    assert "Something else" not in world.log()


async def test_suites_run_again_when_a_person_asks(world: World) -> None:
    _, b = await two_arms(world, text="Paris.")
    await world.apply(FACTS)
    async with Load(world, "m"):
        spec = policy_manifest(
            "m", "a", rollout=rollout("b", 50, seconds=600, evaluation={"suites": ["facts"]})
        )
        await world.apply(spec)
        await in_phase(world, "m", "Step")
        await world.script(b, text="Rome.")
        asked = {"annotations": {"sluice.dev/evaluate": "2026-11-30T12:00:00Z"}}
        await world.kube.patch_metadata(POLICY, world.namespace, "m", asked)
        assert (await world.rule("m"))["evaluation"]["stage"] == "Start"
        asked = {"annotations": {"sluice.dev/evaluate": "2099-01-01T00:00:00Z"}}
        await world.kube.patch_metadata(POLICY, world.namespace, "m", asked)
        rule = await in_phase(world, "m", "RolledBack")
    assert rule["evaluation"]["stage"] == "OnDemand/2099-01-01T00:00:00Z"
    assert rule["evaluation"]["failedHard"] == ["facts/capital"]
    assert rule["history"][-1]["reason"] == "EvaluationFailed"
