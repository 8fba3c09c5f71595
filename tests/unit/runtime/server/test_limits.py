"""Tenants' weights, caps and deadlines: from the operator and the gateway, never from a client."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from jsonschema import Draft202012Validator

from sluice_runtime.engine.types import FinishReason
from sluice_runtime.limits import Deadline, LimitSet, LimitStore, TenantLimits, deadline, narrowest
from sluice_runtime.podconfig import Caps
from unit.runtime.server.support import (
    CHAT,
    CONTRACTS,
    Pod,
    chat_body,
    events,
    eventually,
    evidence_validator,
    pod_config,
    route_headers,
    soon,
)

ROUTE = {"x-envoy-expected-rq-timeout-ms": "30000"}
FULL = {
    "weight": 3,
    "maxRunning": 2,
    "maxInFlight": 4,
    "maxInputTokens": 100,
    "maxOutputTokens": 50,
    "maxContextTokens": 120,
    "maxSeconds": 60,
}


def limit_set(version: str = "l1", backend: dict[str, int] | None = None, **tenants: Any) -> dict[str, Any]:
    return {"version": version, "backend": backend or {}, "tenants": tenants}


async def limit(pod: Pod, limits: dict[str, Any]) -> dict[str, Any]:
    reply = await soon(pod.admin.put("/v1/configs", json={"configs": [pod_config()], "limits": limits}))
    assert reply.status_code == 200, reply.text
    body: dict[str, Any] = reply.json()
    return body


def test_the_type_and_the_schema_agree() -> None:
    schema = json.loads((CONTRACTS / "limits.schema.json").read_text())
    full = limit_set(backend={"maxInputTokens": 9, "maxOutputTokens": 9}, acme=FULL)
    Draft202012Validator(schema).validate(full)
    assert LimitSet.model_validate(full).model_dump(by_alias=True, exclude_none=True) == full
    tenant = schema["properties"]["tenants"]["additionalProperties"]["properties"]
    assert set(tenant) == {f.alias or name for name, f in TenantLimits.model_fields.items()} == set(FULL)
    assert set(LimitSet.model_json_schema()["required"]) == set(schema["required"])


async def test_limits_go_to_the_engine_and_a_new_set_holds_for_the_next_request(pod: Pod) -> None:
    pod.engine.auto = ["fine"]
    asked = []
    for limits in (
        limit_set("l1", acme={"weight": 3, "maxRunning": 2}),
        limit_set("l2", acme={"weight": 5}),
        limit_set("l3", other={"weight": 7}),
    ):
        assert (await limit(pod, limits))["limits"] == limits["version"]
        await pod.post(chat_body())
        asked.append((await pod.engine.next()).request)
    assert [(r.tenant, r.weight, r.max_running) for r in asked] == [
        ("acme", 3, 2),
        ("acme", 5, None),
        ("acme", 1, None),
    ]
    await pod.hold(pod_config())
    assert pod.runtime.limits.version == "l3", "a set that names no limits leaves them"


async def test_no_header_or_field_of_a_client_changes_a_weight(pod: Pod) -> None:
    pod.engine.auto = ["fine"]
    await limit(pod, limit_set(acme={"weight": 2}))
    headers = route_headers() | {"x-sluice-weight": "9", "sluice-weight": "9"}
    await pod.post(chat_body(user="other"), headers=headers)
    assert (await pod.engine.next()).request.weight == 2


async def test_a_wrong_set_is_rejected_alone_and_the_old_one_stays(pod: Pod) -> None:
    await limit(pod, limit_set("good", acme={"weight": 3}))
    for tenants, field in (
        ({"acme": {"weight": 0}}, "limits.tenants.acme.weight"),
        ({"acme": {"weight": 1001}}, "limits.tenants.acme.weight"),
        ({"acme": {"maxRunning": 0}}, "limits.tenants.acme.maxRunning"),
        ({"acme": {"most": 1}}, "limits.tenants.acme.most"),
        ({"acme": {"maxSeconds": "9"}}, "limits.tenants.acme.maxSeconds"),
    ):
        told = await limit(pod, limit_set("bad", **tenants))
        assert (told["versions"], told["limits"]) == (["v1"], "good")
        assert [(r["version"], r["field"]) for r in told["rejected"]] == [("bad", field)]
    store = LimitStore()
    for raw in (None, [], "x", {}, {"version": 1}):
        assert store.replace(raw) is not None
    assert pod.runtime.limits.of("acme").weight == 3


async def test_more_in_flight_than_a_tenant_may_is_429_and_says_nothing_of_the_arm(pod: Pod) -> None:
    await limit(pod, limit_set(acme={"maxInFlight": 2}))
    running = [asyncio.create_task(pod.post(chat_body())) for _ in range(2)]
    generations = [await pod.engine.next() for _ in running]
    refused = await pod.post(chat_body())
    assert (refused.status_code, refused.json()["error"]["code"]) == (429, "tenant_limit")
    assert refused.headers["x-sluice-limited"] == "tenant"
    assert "retry-after" in refused.headers
    assert (await pod.record())["outcome"] == "limited"
    # Others, and copies that nobody waits for, are not counted.
    pod.engine.auto = ["fine"]
    for headers in (route_headers(tenant="other"), route_headers(mirror="1")):
        assert (await pod.post(chat_body(), headers=headers)).status_code == 200
    for generation in generations:
        generation.answer("done")
    assert [(await task).status_code for task in running] == [200, 200]
    assert (await pod.post(chat_body())).status_code == 200


async def test_copies_wait_for_no_cap_of_the_tenant(pod: Pod) -> None:
    pod.engine.auto = ["fine"]
    await limit(pod, limit_set(acme={"maxRunning": 1, "weight": 4}))
    await pod.post(chat_body(), headers=route_headers(mirror="1"))
    request = (await pod.engine.next()).request
    assert (request.max_running, request.weight, request.priority) == (None, 4, -1)


@pytest.mark.parametrize(
    ("backend", "tenant", "body", "param", "told"),
    [
        ({"maxInputTokens": 2}, {}, {}, "messages", "at most 2 tokens"),
        ({"maxInputTokens": 500}, {"maxInputTokens": 3}, {}, "messages", "at most 3 tokens"),
        ({"maxOutputTokens": 5}, {"maxOutputTokens": 9}, {"max_tokens": 6}, "max_tokens", "At most 5"),
        ({}, {"maxContextTokens": 50}, {"max_tokens": 49}, "max_tokens", "at most 50 tokens"),
        ({}, {"maxContextTokens": 2}, {}, "messages", "at most 2 tokens"),
    ],
)
async def test_token_caps(
    pod: Pod, backend: dict[str, int], tenant: dict[str, int], body: dict[str, Any], param: str, told: str
) -> None:
    await limit(pod, limit_set(backend=backend, acme=tenant))
    reply = await pod.post(chat_body(**body))
    error = reply.json()["error"]
    assert (reply.status_code, error["param"]) == (400, param), error
    assert told in error["message"]
    assert (await pod.record())["outcome"] == "rejected"


async def test_what_is_left_open_fits_the_narrowest_cap(pod: Pod) -> None:
    pod.engine.auto = ["fine"]
    got = []
    for backend, tenant in (
        ({"maxOutputTokens": 30}, {}),
        ({"maxOutputTokens": 30}, {"maxOutputTokens": 20}),
        ({}, {"maxContextTokens": 40}),
    ):
        await limit(pod, limit_set(backend=backend, acme=tenant))
        assert (await pod.post(chat_body())).status_code == 200
        request = (await pod.engine.next()).request
        got.append(
            request.sampling.max_tokens + (len(request.prompt_ids) if "maxContextTokens" in tenant else 0)
        )
    assert got == [30, 20, 40]


def test_narrowest() -> None:
    assert narrowest(Caps(maxInputTokens=5), Caps(maxInputTokens=3, maxOutputTokens=9), Caps()) == Caps(
        maxInputTokens=3, maxOutputTokens=9
    )


@pytest.mark.parametrize(
    ("route", "tenant", "client", "want"),
    [
        (None, None, None, None),
        (30.0, None, None, Deadline(130.0, False)),
        (30.0, 20.0, None, Deadline(120.0, False)),
        (30.0, 40.0, 50.0, Deadline(130.0, False)),
        (30.0, 20.0, 2.5, Deadline(102.5, True)),
        (None, None, 5.0, Deadline(105.0, True)),
        (5.0, None, 5.0, Deadline(105.0, False)),
    ],
)
def test_a_client_can_only_shorten(
    route: float | None, tenant: float | None, client: float | None, want: Deadline | None
) -> None:
    assert deadline(100.0, route_s=route, tenant_s=tenant, client_s=client) == want


@pytest.mark.parametrize(
    ("headers", "limits", "seconds", "status"),
    [
        (ROUTE, {}, 30, 504),
        ({}, {"maxSeconds": 9}, 9, 504),
        (ROUTE | {"x-sluice-timeout": "60"}, {}, 30, 504),
        (ROUTE | {"x-sluice-timeout": "2.5"}, {}, 2.5, 408),
        ({"x-sluice-timeout": "2.5"}, {"maxSeconds": 9}, 2.5, 408),
    ],
)
async def test_a_deadline_ends_as_whoever_set_it_is_told(
    pod: Pod, headers: dict[str, str], limits: dict[str, int], seconds: float, status: int
) -> None:
    await limit(pod, limit_set(acme=limits))
    post = asyncio.create_task(pod.post(chat_body(), headers=route_headers() | headers))
    generation = await pod.engine.next()
    assert generation.request.deadline is not None
    arrived = next(iter(pod.runtime.running.values())).started
    assert generation.request.deadline - arrived == pytest.approx(seconds)
    generation.token("", FinishReason.DEADLINE)
    reply = await post
    assert (reply.status_code, reply.json()["error"]["code"]) == (status, "deadline_exceeded")
    assert reply.headers.get("x-should-retry") == ("false" if status == 408 else None)
    record = await pod.record()
    assert (record["outcome"], record["status"]) == ("error" if status == 504 else "cancelled", status)


async def test_a_stream_that_was_cut_is_marked_as_incomplete(pod: Pod) -> None:
    headers = route_headers() | {"x-sluice-timeout": "1"}
    post = asyncio.create_task(pod.post(chat_body(stream=True), headers=headers))
    generation = await pod.engine.next()
    generation.token("half an ")
    generation.token("", FinishReason.DEADLINE)
    last = events((await post).text)[-1]
    assert last["incomplete"] is True
    assert last["error"]["code"] == "deadline_exceeded"
    assert (await pod.record())["outcome"] == "cancelled"


@pytest.mark.parametrize(
    "value", ["0", "0.0", "-1", "1e3", "soon", "nan", "inf", "9999999", "1.", ".5", "1 s", "１"]
)
async def test_what_is_no_time_is_refused(pod: Pod, value: str) -> None:
    raw = {**route_headers(), "x-sluice-timeout": value}
    sent = {k: v.encode() for k, v in raw.items()}
    reply = await soon(pod.api.post(CHAT, json=chat_body(), headers=sent))
    assert reply.status_code == 400, reply.text
    assert "sluice-timeout" in reply.json()["error"]["message"]


async def test_the_stream_tells_which_limits_are_held(pod: Pod) -> None:
    await limit(pod, limit_set("l9", acme={"weight": 2}))
    seen = []
    async with asyncio.timeout(60), pod.admin.stream("GET", "/v1/stream") as lines:
        async for line in lines.aiter_lines():
            told = json.loads(line)
            evidence_validator().validate(told)
            seen.append((told["type"], told.get("limits")))
            if told["type"] == "heartbeat":
                break
    assert seen == [("hello", "l9"), ("heartbeat", "l9")]
    await eventually(lambda: not pod.runtime.running)
