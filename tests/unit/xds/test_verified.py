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
from aiohttp import web

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
    world: Any,
    pod: Pod,
    facts: VerifierProcess,
    path: str,
    streaming: str,
    retries: int,
    others: tuple[Endpoint, ...] = (),
) -> None:
    """A policy with one rule, in force in the pod and at the gateway. `others` answer beside the pod."""
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
        "all", Arm("ns/stable", config["version"]), idle_seconds=longest_silence(spec, told), retries=retries
    )
    state = world.state(rule, credential=CREDENTIAL)
    clusters = (Cluster("ns/stable", (*others, Endpoint("127.0.0.1", pod.api_port))),)
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


@pytest.mark.parametrize("streaming", ["Verified", "Immediate"])
@pytest.mark.parametrize(
    ("path", "code"), [("/fail", "contract_violation"), ("/500", "verifier_unavailable")]
)
async def test_what_was_withheld_is_never_generated_again(
    world: Any, pod: Pod, facts: VerifierProcess, path: str, code: str, streaming: str
) -> None:
    await serve(world, pod, facts, path, streaming, retries=2)
    answer = await world.chat(body=BODY.replace('"stream": true', '"stream": false'))
    assert (answer.status, answer.code) == (502, code)
    assert "Paris" not in answer.text
    assert "x-envoy-ratelimited" not in answer.headers
    assert len(pod.engine.generations) == 1


async def test_a_502_of_something_else_is_tried_again(world: Any, pod: Pod, facts: VerifierProcess) -> None:
    """As of a proxy beside a pod; the header, not the status, says that an answer was withheld."""
    broken = world.pods["stable"]
    broken.answer = bad_gateway
    await serve(world, pod, facts, "/pass", "Verified", retries=1, others=(broken.endpoint,))
    num_tries = 0  # Envoy draws who is asked first
    while not broken.requests:
        assert (await world.chat(body=BODY)).status == 200
        num_tries += 1
        assert num_tries < 100, "none went there first"


async def bad_gateway(request: web.Request) -> web.Response:
    return web.Response(status=502)


async def test_a_draft_through_the_gateway(world: Any, pod: Pod, facts: VerifierProcess) -> None:
    await serve(world, pod, facts, "/fail", "Draft", retries=1)
    answer = await world.chat(body=BODY)
    assert (answer.status, answer.headers["sluice-answer"]) == (200, "draft")
    assert TEXT in answer.text
    assert events(answer.text)[-1]["error"]["code"] == "contract_violation"
    assert len(pod.engine.generations) == 1, "what was shown is never repeated"


async def test_the_trace_of_a_request_passes_the_gateway_unchanged(world: Any) -> None:
    trace = {
        "traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
        "tracestate": "vendor=opaque",
    }
    await world.push(world.state())
    await world.chat(headers=trace)
    [seen] = world.seen("stable")
    assert seen.items() >= trace.items()
