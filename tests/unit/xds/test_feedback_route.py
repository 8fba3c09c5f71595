"""Feedback through the gateway: who may give it, and that it reaches the operator with the tenant proven."""

from __future__ import annotations

import json
import time
from collections.abc import AsyncIterator
from dataclasses import replace
from typing import Any

import pytest
import pytest_asyncio

from sluice_operator.evidence import Observed
from sluice_operator.evidence.answer_id import Answer, encode
from sluice_operator.feedback import FeedbackServer

pytestmark = [pytest.mark.envoy, pytest.mark.asyncio(loop_scope="session")]

PATH = "/v1/feedback"
CREDENTIAL = "pod-secret%"


def answer_id(request_id: str = "r1", tenant: str = "acme") -> str:
    answer = Answer(
        int(time.time()) - 60, request_id, "ns/policy", "all", "candidate", "a1", tenant, "kyc", "u1"
    )
    return encode(CREDENTIAL, request_id.encode().ljust(12), answer)


def body(request_id: str, kind: str = "wrong") -> str:
    return json.dumps({"request_id": request_id, "kind": kind})


@pytest_asyncio.fixture(loop_scope="session")
async def told(world: Any) -> AsyncIterator[list[Observed]]:
    """What the operator hears; the gateway knows where it listens."""
    found: list[Observed] = []
    server = FeedbackServer(0, lambda: CREDENTIAL, found.extend, time.time, host="127.0.0.1")
    port = await server.start()
    await world.push(replace(world.state(), feedback=("127.0.0.1", port)))
    yield found
    await server.stop()


async def test_feedback_reaches_the_operator(world: Any, told: list[Observed]) -> None:
    answer = await world.chat(path=PATH, body=body(answer_id()), headers={"x-sluice-tenant": "small"})
    assert (answer.status, answer.json) == (202, {})
    [observed] = told
    assert (observed.policy, observed.rule) == ("ns/policy", "all")
    seen = observed.observation
    assert (seen.feedback, seen.arm, seen.attempt, seen.tenant) == ("wrong", "candidate", "a1", "acme")
    assert 59 <= seen.age_s <= 70
    assert not any(pod.requests for pod in world.pods.values())


async def test_who_is_not_known_or_of_another_tenant_is_refused(world: Any, told: list[Observed]) -> None:
    for key in (None, "wrong"):
        answer = await world.chat(path=PATH, body=body(answer_id()), key=key)
        assert (answer.status, answer.code) == (401, "invalid_api_key")
    answer = await world.chat(path=PATH, body=body(answer_id()), key="key-small")
    assert (answer.status, answer.code) == (404, "unknown_request")
    answer = await world.chat(path=PATH, body=body("chatcmpl-made-up"))
    assert (answer.status, answer.code) == (404, "unknown_request")
    assert not told


@pytest.mark.parametrize(
    ("request_", "status", "code"),
    [
        ({"method": "GET"}, 405, "method_not_allowed"),
        ({"body": "{"}, 400, "invalid_body"),
        ({"body": "x" * 5000}, 413, "request_too_large"),
        ({"body": "x" * 3_000_000}, 413, "request_too_large"),
        ({"path": PATH + "/x"}, 404, "not_found"),
    ],
)
async def test_malformed(
    world: Any, told: list[Observed], request_: dict[str, Any], status: int, code: str
) -> None:
    answer = await world.chat(**{"path": PATH, "body": body(answer_id()), **request_})
    assert (answer.status, answer.code) == (status, code)
    assert not told


async def test_without_an_operator_that_takes_it_there_is_no_such_path(world: Any) -> None:
    await world.push(world.state())
    answer = await world.chat(path=PATH, body=body(answer_id()))
    assert (answer.status, answer.code) == (404, "not_found")


async def test_an_operator_that_is_away_is_told_as_such(world: Any) -> None:
    await world.push(replace(world.state(), feedback=("127.0.0.1", 1)))
    answer = await world.chat(path=PATH, body=body(answer_id()))
    assert (answer.status, answer.code) == (503, "backend_failed")
    assert (await world.chat()).status == 200


async def test_what_is_too_large_never_reaches_the_operator(world: Any, told: list[Observed]) -> None:
    await world.push(replace(world.state(), feedback=("127.0.0.1", 1)))
    answer = await world.chat(path=PATH, body="x" * 5000)
    assert (answer.status, answer.code) == (413, "request_too_large")
    assert (await world.chat(body='{"model": "m", "x": "' + "x" * 100_000 + '"}')).status == 200
