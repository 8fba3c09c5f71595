"""An attempt that leaked, a tenant that was revoked: what runs of it is cut, and nothing else is."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import httpx
import pytest
from jsonschema import Draft202012Validator

from sluice_runtime.withdrawn import Withdrawn
from unit.runtime.server.support import (
    CHAT,
    CONTRACTS,
    Generation,
    Pod,
    chat_body,
    check,
    events,
    eventually,
    evidence_validator,
    pod_config,
    route_headers,
    soon,
)

LEAKED, OTHER = "leaked00", "other000"
HARD = [check("no-secret", "MustNotMatch", pattern="secret")]


def told(*attempts: str, tenants: tuple[str, ...] = ()) -> dict[str, list[str]]:
    return {"attempts": list(attempts), "tenants": list(tenants)}


async def withdraw(pod: Pod, *attempts: str, tenants: tuple[str, ...] = ()) -> None:
    body = {"configs": [pod_config()], "withdrawn": told(*attempts, tenants=tenants)}
    reply = await soon(pod.admin.put("/v1/configs", json=body))
    assert reply.status_code == 200, reply.text


async def streamed(pod: Pod, **route: str) -> tuple[asyncio.Task[httpx.Response], Generation]:
    """A stream that has begun, read to its end in the background."""
    headers = route_headers(**route) | ({"x-sluice-rule": ""} if route.get("rule") == "" else {})
    reading = asyncio.create_task(pod.post(chat_body(stream=True), headers=headers))
    generation = await pod.engine.next()
    generation.token("Once")
    return reading, generation


async def begun(pod: Pod, num: int) -> None:
    """The clients of so many requests have something of their answers."""
    await eventually(lambda: sum(r.first_token for r in pod.runtime.running.values()) == num)


async def test_a_stream_of_the_attempt_ends_with_an_error_and_the_others_go_on(pod: Pod) -> None:
    reading, cut = await streamed(pod, attempt=LEAKED)
    others = [
        await streamed(pod, attempt=OTHER),
        await streamed(pod, attempt=LEAKED, arm="stable"),
        await streamed(pod, attempt=""),
    ]
    await begun(pod, 4)
    await withdraw(pod, LEAKED)
    *before, last = events((await soon(reading)).text)
    assert before, "what was sent before stays sent"
    assert (last["error"]["code"], last["incomplete"]) == ("withdrawn", True)
    await soon(cut.cancelled.wait())
    for other, generation in others:
        assert not generation.cancelled.is_set()
        generation.answer(" upon", " a time.")
        assert events((await soon(other)).text)[-1] == "[DONE]"
    records = [await pod.record(seq) for seq in (1, 2, 3, 4)]
    assert [(r["attempt"], r["arm"], r["outcome"], r["status"]) for r in records] == [
        (LEAKED, "candidate", "cancelled", 200),
        (OTHER, "candidate", "ok", 200),
        (LEAKED, "stable", "ok", 200),
        ("", "candidate", "ok", 200),
    ]
    evidence_validator().validate(records[0])
    assert not pod.runtime.running


@pytest.mark.parametrize("mirror", ["", "1", "pair"])
@pytest.mark.parametrize("stream", [False, True])
async def test_one_that_waits_is_refused_and_not_tried_elsewhere(pod: Pod, stream: bool, mirror: str) -> None:
    """Not a token has come: it may be in the engine's queue."""
    headers = route_headers(attempt=LEAKED, mirror=mirror)
    waiting = asyncio.create_task(pod.post(chat_body(stream=stream), headers=headers))
    generation = await pod.engine.next()
    await withdraw(pod, LEAKED)
    reply = await soon(waiting)
    assert (reply.status_code, reply.json()["error"]["code"]) == (503, "withdrawn")
    assert reply.headers["x-envoy-ratelimited"] == "true", "the gateway would try the same arm again"
    await soon(generation.cancelled.wait())
    assert (await pod.record())["outcome"] == "cancelled"


async def test_an_answer_that_is_held_for_its_verdict_is_never_shown(pod: Pod) -> None:
    await pod.hold(pod_config(contract=HARD, streaming="Verified"))
    headers = route_headers(attempt=LEAKED)
    held = asyncio.create_task(pod.post(chat_body(stream=True), headers=headers))
    (await pod.engine.next()).token("Half of it")
    await begun(pod, 1)
    await withdraw(pod, LEAKED)
    reply = await soon(held)
    assert (reply.status_code, reply.json()["error"]["code"]) == (503, "withdrawn")
    assert "Half" not in reply.text


async def test_one_that_arrives_later_is_refused_for_as_long_as_it_is_said(pod: Pod) -> None:
    pod.engine.auto = ["fine"]
    headers = route_headers(attempt=LEAKED)
    await withdraw(pod, LEAKED, OTHER)
    for _ in range(2):
        reply = await pod.post(chat_body(), headers=headers)
        assert (reply.status_code, reply.json()["error"]["code"]) == (503, "withdrawn")
        await withdraw(pod, LEAKED)  # the same once more changes nothing
    await pod.hold(pod_config())
    assert (await pod.post(chat_body(), headers=headers)).status_code == 200


async def test_one_whose_body_was_on_its_way_is_refused_when_it_is_there(pod: Pod) -> None:
    withdrawn = asyncio.Event()

    async def body() -> AsyncIterator[bytes]:
        data = json.dumps(chat_body()).encode()
        yield data[:10]
        await withdrawn.wait()
        yield data[10:]

    headers = {**route_headers(attempt=LEAKED), "content-type": "application/json"}
    asked = asyncio.create_task(pod.api.post(CHAT, content=body(), headers=headers))
    await eventually(lambda: len(pod.runtime.running) == 1)
    await withdraw(pod, LEAKED)
    withdrawn.set()
    reply = await soon(asked)
    assert (reply.status_code, reply.json()["error"]["code"]) == (503, "withdrawn")
    assert not pod.engine.generations


async def test_a_revoked_tenants_requests_are_cut_whatever_answers_and_no_others(pod: Pod) -> None:
    reading, cut = await streamed(pod, arm="stable", tenant="gone")
    waiting = asyncio.create_task(pod.post(chat_body(), headers=route_headers(tenant="gone", mirror="1")))
    await pod.engine.next()
    other, goes_on = await streamed(pod)
    suite, goes_on_too = await streamed(pod, rule="", tenant="gone")
    await begun(pod, 3)
    await withdraw(pod, tenants=("gone",))
    assert events((await soon(reading)).text)[-1]["error"]["code"] == "withdrawn"
    await soon(cut.cancelled.wait())
    assert (await soon(waiting)).json()["error"]["code"] == "withdrawn"
    for stream, generation in ((other, goes_on), (suite, goes_on_too)):
        generation.answer("Fine.")
        assert events((await soon(stream)).text)[-1] == "[DONE]"


WRONG = [
    (None, "withdrawn"),
    ([LEAKED], "withdrawn"),
    ({"attempts": [LEAKED]}, "withdrawn.tenants"),
    ({"attempts": [1], "tenants": []}, "withdrawn.attempts[0]"),
    ({"attempts": [], "tenants": [""]}, "withdrawn.tenants[0]"),
    ({"attempts": [], "tenants": "acme"}, "withdrawn.tenants"),
    ({"attempts": [], "tenants": [], "users": []}, "withdrawn.users"),
]


@pytest.mark.parametrize(("wrong", "field"), WRONG)
async def test_what_can_not_be_read_changes_nothing_and_names_the_field(
    pod: Pod, wrong: Any, field: str
) -> None:
    await withdraw(pod, LEAKED)
    reply = await soon(pod.admin.put("/v1/configs", json={"configs": [], "withdrawn": wrong}))
    assert (reply.status_code, reply.json()["error"]["param"]) == (400, field)
    assert pod.runtime.withdrawn.attempts == {LEAKED}
    assert pod.runtime.configs.versions == ["v1"]


def test_the_type_and_the_schema_agree() -> None:
    schema = json.loads((CONTRACTS / "withdrawn.schema.json").read_text())
    full = told(LEAKED, tenants=("acme",))
    Draft202012Validator(schema).validate(full)
    assert Withdrawn.model_validate_json(json.dumps(full)).model_dump(mode="json") == full
    assert set(schema["properties"]) == set(schema["required"]) == set(Withdrawn.model_fields)
