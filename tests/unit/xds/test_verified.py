"""From a rule's contract to the bytes at its client: the operator's configuration in a real pod, behind the
real gateway."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import pytest_asyncio

from sluice_operator.api import RoutePolicySpec
from sluice_operator.plan.arms import pod_config, stable_arm
from sluice_operator.plan.gateway_rules import longest_silence
from sluice_operator.xds.state import Arm, Cluster, Endpoint, Rule
from unit.runtime.server.support import CREDENTIAL, Pod, events, running_pod
from unit.runtime.server.test_verified import VerifierProcess, running_verifier

pytestmark = [pytest.mark.envoy, pytest.mark.asyncio(loop_scope="session")]
TEXT = "Paris is the capital."
BODY = '{"model": "m", "messages": [{"role": "user", "content": "Where?"}], "stream": true}'


@pytest_asyncio.fixture(loop_scope="session")
async def facts() -> AsyncIterator[VerifierProcess]:
    async with running_verifier() as running:
        yield running


@pytest_asyncio.fixture(loop_scope="session")
async def pod(tmp_path: Path) -> AsyncIterator[Pod]:
    async with running_pod(tmp_path) as running:
        running.engine.auto = [TEXT]
        yield running


async def serve(
    world: Any, pod: Pod, facts: VerifierProcess, path: str, streaming: str, retries: int
) -> None:
    """A policy with one rule, in force in the pod and at the gateway."""
    verifier = {"url": f"http://127.0.0.1:{facts.port}{path}"}
    contract = {"streaming": streaming, "checks": [{"name": "facts", "verifier": verifier}]}
    spec = RoutePolicySpec.model_validate(
        {
            "model": "m",
            "rules": [
                {
                    "name": "all",
                    "target": {"backend": "stable"},
                    "contract": contract,
                    "timeouts": {"idleSeconds": 1},
                }
            ],
        }
    )
    [told] = spec.rules
    arm = stable_arm(told)
    assert arm is not None
    config = pod_config("ns", "policy", spec, told, arm, {})
    assert (await pod.hold(config))["rejected"] == []
    rule = Rule(
        "all", Arm("ns/stable", config["version"]), idle_seconds=longest_silence(told), retries=retries
    )
    state = world.state(rule, credential=CREDENTIAL)
    clusters = (Cluster("ns/stable", (Endpoint("127.0.0.1", pod.api_port),)),)
    await world.push(replace(state, clusters=clusters))


async def test_a_verified_answer_through_the_gateway(world: Any, pod: Pod, facts: VerifierProcess) -> None:
    await serve(world, pod, facts, "/gate", "Verified", retries=1)
    asking = asyncio.create_task(world.chat(body=BODY))
    asked = await facts.line()
    assert asked["question"]["answer"] == TEXT
    assert asked["question"]["rule"] == "all"
    await asyncio.wait({asking}, timeout=1.5)
    assert not asking.done(), "the rule's idleSeconds are over, and the gateway waits on"
    facts.open_gate()
    answer = await asking
    assert (answer.status, answer.headers["sluice-answer"]) == (200, "verified")
    assert events(answer.text)[-1] == "[DONE]"
    record = await pod.record()
    assert record["timing"]["verify_s"] >= 1
    assert record["timing"]["gateway_s"] is not None


@pytest.mark.parametrize("retries", [0, 1])
async def test_what_fails_is_tried_as_often_as_the_rule_says(
    world: Any, pod: Pod, facts: VerifierProcess, retries: int
) -> None:
    await serve(world, pod, facts, "/fail", "Verified", retries)
    answer = await world.chat(body=BODY)
    assert (answer.status, answer.code) == (502, "contract_violation")
    assert "Paris" not in answer.text
    assert len(pod.engine.generations) == 1 + retries


async def test_a_draft_through_the_gateway(world: Any, pod: Pod, facts: VerifierProcess) -> None:
    await serve(world, pod, facts, "/fail", "Draft", retries=1)
    answer = await world.chat(body=BODY)
    assert (answer.status, answer.headers["sluice-answer"]) == (200, "draft")
    assert TEXT in answer.text
    assert events(answer.text)[-1]["error"]["code"] == "contract_violation"
    assert len(pod.engine.generations) == 1, "what was shown is never repeated"
