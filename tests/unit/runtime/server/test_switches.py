"""Features switched by task and tenant: the last that applies wins, for requests that begin from now on."""

from __future__ import annotations

import asyncio
from typing import Any

import pytest

from sluice_runtime.podconfig import PodConfig
from unit.runtime.server.support import Pod, chat_body, check, events, pod_config, route_headers


def switch(on: bool | None, tasks: tuple[str, ...] = (), tenants: tuple[str, ...] = ()) -> dict[str, Any]:
    features = {} if on is None else {"prefixCache": on}
    return {"tasks": list(tasks), "tenants": list(tenants), "features": features}


@pytest.mark.parametrize(
    ("arm", "switches", "expected"),
    [
        (True, [], True),
        (False, [], False),
        (True, [switch(False)], False),
        (False, [switch(True)], True),
        (True, [switch(None)], True),
        (True, [switch(False, ("nl2sql",))], False),
        (True, [switch(False, ("code",))], True),
        (True, [switch(False, (), ("acme",))], False),
        (True, [switch(False, (), ("beta",))], True),
        (True, [switch(False, ("nl2sql",), ("beta",))], True),
        (True, [switch(False, ("code", "nl2sql"), ("beta", "acme"))], False),
        (True, [switch(False), switch(True, ("nl2sql",))], True),
        (True, [switch(False, ("nl2sql",)), switch(True)], True),
        (True, [switch(True), switch(False, (), ("acme",)), switch(None)], False),
        (True, [switch(False, ("nl2sql",)), switch(True, ("code",))], False),
    ],
)
def test_the_last_that_applies_wins(arm: bool, switches: list[dict[str, Any]], expected: bool) -> None:
    config = pod_config(features={"prefixCache": arm}, switches=switches)
    features = PodConfig.model_validate(config).features_for("nl2sql", "acme")
    assert features.prefix_cache is expected


def test_a_request_without_a_task_is_of_no_task() -> None:
    config = PodConfig.model_validate(pod_config(switches=[switch(False, ("nl2sql",))]))
    assert config.features_for("", "acme").prefix_cache is True


def test_features_are_switched_apart() -> None:
    config = pod_config(
        switches=[
            {"tasks": ["nl2sql"], "tenants": [], "features": {"speculation": False}},
            {"tasks": [], "tenants": ["acme"], "features": {"prefixCache": False}},
        ]
    )
    of = PodConfig.model_validate(config).features_for
    told = {who: (f := of(*who)).prefix_cache * 2 + f.speculation for who in WHO}
    assert told == {WHO[0]: 0, WHO[1]: 2, WHO[2]: 1, WHO[3]: 3}


WHO = [("nl2sql", "acme"), ("nl2sql", "beta"), ("code", "acme"), ("code", "beta")]


async def test_speculation_is_switched_off_by_one_edit(pod: Pod) -> None:
    async def asked(version: str) -> tuple[bool, str]:
        pod.engine.auto = ["x"]
        await pod.post(chat_body(), headers=route_headers(version, task="nl2sql"))
        request = (await pod.engine.next()).request
        return request.speculation, request.task

    assert await asked("v1") == (True, "nl2sql")
    off = {"tasks": [], "tenants": [], "features": {"speculation": False}}
    await pod.hold(pod_config("v2", switches=[off]), pod_config("v3", features=NO_SPECULATION))
    assert await asked("v2") == (False, "nl2sql")
    assert await asked("v3") == (False, "nl2sql")


NO_SPECULATION = {"prefixCache": True, "speculation": False}


async def test_it_is_in_force_without_a_restart(pod: Pod) -> None:
    async def cached(version: str, **headers: str) -> bool:
        pod.engine.auto = ["x"]
        await pod.post(chat_body(), headers=route_headers(version, **headers))
        return (await pod.engine.next()).request.prefix_cache

    assert await cached("v1", task="nl2sql")
    pod.engine.auto = None
    before = asyncio.create_task(pod.post(chat_body(), headers=route_headers("v1", task="nl2sql")))
    running = await pod.engine.next()
    await pod.hold(pod_config("v2", switches=[switch(False, ("nl2sql",))]))
    assert running.request.prefix_cache
    running.answer("x")
    assert (await before).status_code == 200
    assert not await cached("v2", task="nl2sql")
    assert await cached("v2", task="summary")


# Direct streaming

HOLDS = {"tasks": ["advice"], "tenants": [], "features": {"directStreaming": False}}
NO_LIES = check("no-lies", "MustNotMatch", pattern="Lyon")


@pytest.mark.parametrize("streaming", ["Immediate", "Draft"])
async def test_without_direct_streaming_nothing_is_shown_before_it_has_passed(
    pod: Pod, streaming: str
) -> None:
    await pod.hold(pod_config("v2", contract=[NO_LIES], streaming=streaming, switches=[HOLDS]))
    pod.engine.auto = ["Paris ", "or ", "Lyon."]
    held = await pod.post(chat_body(stream=True), headers=route_headers("v2", task="advice"))
    assert (held.status_code, held.json()["error"]["code"]) == (502, "contract_violation")
    assert "Paris" not in held.text
    shown = await pod.post(chat_body(stream=True), headers=route_headers("v2", task="chat"))
    assert shown.status_code == 200
    assert "Paris" in shown.text


async def test_without_direct_streaming_what_passed_is_verified(pod: Pod) -> None:
    await pod.hold(pod_config("v2", contract=[NO_LIES], switches=[HOLDS]))
    pod.engine.auto = ["Paris ", "it ", "is."]
    reply = await pod.post(chat_body(stream=True), headers=route_headers("v2", task="advice"))
    assert (reply.status_code, reply.headers["sluice-answer"]) == (200, "verified")
    _, whole, *_ = events(reply.text)
    assert whole["choices"][0]["delta"]["content"] == "Paris it is."
    assert whole["sluice"]["verified"] is True


@pytest.mark.parametrize("contract", [[], [check("style", "MustMatch", False, pattern="please")]])
async def test_without_a_check_that_can_fail_it_is_held_but_not_called_verified(
    pod: Pod, contract: list[dict[str, Any]]
) -> None:
    config = pod_config("v2", contract=contract, features={"prefixCache": True, "directStreaming": False})
    await pod.hold(config)
    asking = asyncio.create_task(pod.post(chat_body(stream=True), headers=route_headers("v2")))
    generation = await pod.engine.next()
    generation.token("Paris ")
    generation.fail()
    reply = await asking
    assert (reply.status_code, "Paris" in reply.text) == (500, False), "nothing had been sent"
    pod.engine.auto = ["Paris ", "it is."]
    reply = await pod.post(chat_body(stream=True), headers=route_headers("v2"))
    assert reply.status_code == 200
    assert "sluice-answer" not in reply.headers
    _, whole, *_ = events(reply.text)
    assert whole["choices"][0]["delta"]["content"] == "Paris it is."
    assert "sluice" not in whole
