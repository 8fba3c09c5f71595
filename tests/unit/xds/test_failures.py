"""Pods that fail, are missing or are full: what the client gets and what the records say."""

from __future__ import annotations

import asyncio
from dataclasses import replace
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from sluice_operator.xds.als import unit
from sluice_operator.xds.state import Arm, Cluster, Endpoint, Rule

pytestmark = [pytest.mark.envoy, pytest.mark.asyncio(loop_scope="session")]

PLAIN = Rule("all", Arm("ns/stable", "c-stable"), retries=1)


def status(code: int) -> Any:
    async def answer(request: web.Request) -> web.StreamResponse:
        return web.json_response(
            {"error": {"message": "m", "type": "t", "param": None, "code": "own"}}, status=code
        )

    return answer


async def reset(request: web.Request) -> web.StreamResponse:
    assert request.transport
    request.transport.abort()
    await asyncio.sleep(10)
    return web.Response()


async def reset_after_first_chunk(request: web.Request) -> web.StreamResponse:
    response = web.StreamResponse(headers={"content-type": "text/event-stream"})
    await response.prepare(request)
    await response.write(b"data: 1\n\n")
    await asyncio.sleep(0.05)
    assert request.transport
    request.transport.abort()
    await asyncio.sleep(10)
    return response


async def final_records(world: Any, eventually: Any, kind: str, count: int) -> list[Any]:
    """Records of one kind, once there are so many."""

    def probe() -> list[Any] | None:
        found = [r for r in world.records if r.kind == kind and r.final]
        return found if len(found) >= count else None

    found = await eventually(probe)
    assert len(found) == count, found
    return list(found)


async def test_streams_pass_unbuffered(world: Any) -> None:
    await world.push(world.state())
    arrived = asyncio.Event()

    async def answer(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse(headers={"content-type": "text/event-stream"})
        await response.prepare(request)
        await response.write(b"data: first\n\n")
        await asyncio.wait_for(arrived.wait(), 60)
        await response.write(b"data: [DONE]\n\n")
        return response

    world.pods["stable"].answer = answer
    async with world.http.post(
        f"http://127.0.0.1:{world.port}/v1/completions",
        json={"model": "m", "stream": True},
        headers={"authorization": "Bearer key-acme"},
    ) as response:
        assert await response.content.readline() == b"data: first\n"
        arrived.set()
        assert b"[DONE]" in await response.read()


@pytest.mark.parametrize("failure", [status(503), status(502), reset])
async def test_one_retry_before_the_first_byte(world: Any, eventually: Any, failure: Any) -> None:
    await world.push(world.state(PLAIN))
    pod = world.pods["stable"]

    async def once(request: web.Request) -> web.StreamResponse:
        pod.answer = None
        return await failure(request)  # type: ignore[no-any-return]

    pod.answer = once
    assert (await world.chat()).status == 200
    assert len(pod.requests) == 2
    attempts = await final_records(world, eventually, "attempt", 2)
    assert sorted((r.outcome, r.retried, r.interrupted) for r in attempts) == [
        ("error", False, False),
        ("ok", True, False),
    ]
    (request,) = await final_records(world, eventually, "request", 1)
    assert (request.outcome, request.retried) == ("ok", True)


@pytest.mark.parametrize("code", [429, 400, 500, 504])
async def test_answers_are_never_retried(world: Any, code: int) -> None:
    await world.push(world.state(PLAIN))
    world.pods["stable"].answer = status(code)
    answer = await world.chat()
    assert (answer.status, answer.json["error"]["code"]) == (code, "own")
    assert len(world.seen("stable")) == 1


async def test_nothing_is_retried_after_the_first_byte(world: Any, eventually: Any) -> None:
    await world.push(world.state(PLAIN))
    world.pods["stable"].answer = reset_after_first_chunk
    with pytest.raises(aiohttp.ClientError):
        await world.chat()
    (record,) = await final_records(world, eventually, "attempt", 1)
    assert record.outcome == "error", record
    assert (record.status, record.interrupted, record.retried) == (200, True, False)
    assert len(world.seen("stable")) == 1
    (record,) = await final_records(world, eventually, "request", 1)
    assert (record.outcome, record.interrupted) == ("error", True), record


async def test_fallback_with_evidence_for_each_attempt(world: Any, eventually: Any) -> None:
    rule = replace(
        PLAIN,
        retries=0,
        candidate=Arm("ns/candidate", "c-candidate"),
        attempt="a1",
        weight=100,
        fallbacks=("ns/third",),
    )
    await world.push(world.state(rule))
    world.pods["candidate"].answer = status(503)
    answer = await world.chat()
    assert (answer.status, answer.json) == (200, {"pod": world.pods["third"].port})
    attempts = await final_records(world, eventually, "attempt", 2)
    assert [(r.cluster, r.arm, r.attempt, r.status, r.outcome) for r in attempts] == [
        ("ns/candidate", "candidate", "a1", 503, "error"),
        ("ns/third", "candidate", "a1", 200, "ok"),
    ]
    (request,) = await final_records(world, eventually, "request", 1)
    assert (request.status, request.outcome, request.cluster) == (200, "ok", "ns/third")


async def test_fallback_where_nobody_is_home(world: Any) -> None:
    clusters = (Cluster("ns/stable"), *world.clusters()[1:])
    await world.push(world.state(replace(PLAIN, fallbacks=("ns/third",)), clusters=clusters))
    assert (await world.chat()).json == {"pod": world.pods["third"].port}


async def test_no_endpoint(world: Any, eventually: Any) -> None:
    clusters = (Cluster("ns/stable"), *world.clusters()[1:])
    await world.push(world.state(PLAIN, clusters=clusters))
    answer = await world.chat()
    assert (answer.status, answer.code, answer.headers["retry-after"]) == (503, "no_endpoint", "1")
    (record,) = await final_records(world, eventually, "request", 1)
    assert (record.policy, record.rule, record.cluster, record.outcome) == (
        "ns/policy",
        "all",
        "ns/stable",
        "error",
    )
    assert record.tenant == "acme"
    assert record.arm == "stable"


async def test_an_unknown_cluster_is_no_endpoint(world: Any) -> None:
    await world.push(world.state(replace(PLAIN, stable=Arm("ns/unknown", "c"))))
    answer = await world.chat()
    assert (answer.status, answer.code) == (503, "no_endpoint")


async def test_a_pod_that_is_gone(world: Any, eventually: Any) -> None:
    clusters = (Cluster("ns/stable", (Endpoint("127.0.0.1", 1),)), *world.clusters()[1:])
    await world.push(world.state(PLAIN, clusters=clusters))
    answer = await world.chat()
    assert (answer.status, answer.code) == (503, "backend_failed")
    attempts = await final_records(world, eventually, "attempt", 2)
    assert {(r.outcome, r.cluster, r.arm) for r in attempts} == {("error", "ns/stable", "stable")}


async def test_circuit_breaker(world: Any) -> None:
    await world.push(world.state(PLAIN, clusters=world.clusters(max_requests=2, max_pending=1)))
    gate = asyncio.Event()

    async def wait(request: web.Request) -> web.StreamResponse:
        await asyncio.wait_for(gate.wait(), 60)
        return web.json_response({})

    world.pods["stable"].answer = wait
    tasks = [asyncio.create_task(world.chat()) for _ in range(12)]
    done, pending = await asyncio.wait(tasks, return_when=asyncio.FIRST_COMPLETED, timeout=60)
    gate.set()
    refused = [t.result() for t in done]
    assert refused
    assert {(a.status, a.code, a.headers["retry-after"]) for a in refused} == {(503, "overloaded", "1")}
    answers = await asyncio.gather(*pending)
    assert 200 in {a.status for a in answers}


async def test_timeouts(world: Any, eventually: Any) -> None:
    await world.push(world.state(replace(PLAIN, total_seconds=1), Rule("never", refusal=(403, "x"))))

    async def slow(request: web.Request) -> web.StreamResponse:
        await asyncio.sleep(30)
        return web.json_response({})

    world.pods["stable"].answer = slow
    answer = await world.chat()
    assert (answer.status, answer.code) == (504, "timeout")
    assert len(world.seen("stable")) == 1
    await world.push(world.state(replace(PLAIN, idle_seconds=1)))
    answer = await world.chat()
    assert (answer.status, answer.code) == (504, "timeout")
    assert len(world.seen("stable")) == 1


async def test_records_of_a_request(world: Any, eventually: Any) -> None:
    await world.push(
        world.state(replace(PLAIN, candidate=Arm("ns/candidate", "c"), attempt="a1", shadow_percent=100))
    )
    answer = await world.chat(headers={"sluice-conversation": "secret talk", "sluice-task": "kyc"})
    attempts = await final_records(world, eventually, "attempt", 2)
    (request,) = await final_records(world, eventually, "request", 1)
    mirror, live = sorted(attempts, key=lambda r: not r.mirror)
    for record, arm in ((mirror, "candidate"), (live, "stable"), (request, "stable")):
        assert (record.policy, record.rule, record.arm, record.attempt) == ("ns/policy", "all", arm, "a1")
        assert (record.tenant, record.task, record.status, record.outcome) == ("acme", "kyc", 200, "ok")
        assert record.cluster == f"ns/{arm}"
        assert record.request_id == answer.headers["x-request-id"]
        assert record.unit == unit("ns/policy", "secret talk", record.request_id)
        assert 0 < record.first_byte_s <= record.total_s
        assert "secret" not in repr(record)
    assert not request.mirror
    starts = [r for r in world.records if r.kind == "attempt" and not r.final]
    assert sorted(r.arm for r in starts) == ["candidate", "stable"]


async def test_failed_mirrors_are_recorded(world: Any, eventually: Any) -> None:
    clusters = (*world.clusters()[:1], Cluster("ns/candidate", (Endpoint("127.0.0.1", 1),)))
    await world.push(
        world.state(
            replace(PLAIN, candidate=Arm("ns/candidate", "c"), attempt="a1", shadow_percent=100),
            clusters=clusters,
        )
    )
    assert (await world.chat()).status == 200
    mirrors = await eventually(lambda: [r for r in world.records if r.mirror and r.final])
    assert {(r.kind, r.outcome, r.arm, r.cluster) for r in mirrors} == {
        ("attempt", "error", "candidate", "ns/candidate")
    }


@pytest.mark.parametrize("streaming", [False, True])
async def test_a_client_that_leaves_is_recorded(world: Any, eventually: Any, streaming: bool) -> None:
    await world.push(world.state(PLAIN))
    started, cancelled = asyncio.Event(), asyncio.Event()

    async def wait(request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        try:
            if streaming:
                await response.prepare(request)
                await response.write(b"data: 1\n\n")
            started.set()
            await asyncio.sleep(30)
        except asyncio.CancelledError:
            cancelled.set()
            raise
        return response

    world.pods["stable"].answer = wait
    task = asyncio.create_task(world.chat())
    await asyncio.wait_for(started.wait(), 60)
    await asyncio.sleep(0)
    task.cancel()
    await asyncio.wait_for(cancelled.wait(), 60)
    (attempt,) = await final_records(world, eventually, "attempt", 1)
    (request,) = await final_records(world, eventually, "request", 1)
    assert (attempt.outcome, request.outcome) == ("cancelled", "cancelled")
    assert request.status == (200 if streaming else 0)


async def test_pods_are_told_how_long_the_rule_waits(world: Any) -> None:
    """What is left of it, where the first pod took its time to fail."""

    async def slow_failure(request: web.Request) -> web.StreamResponse:
        if request.headers["x-envoy-attempt-count"] != "1":
            return web.json_response({})
        await asyncio.sleep(0.3)
        return web.json_response({}, status=503)

    await world.push(world.state(replace(PLAIN, total_seconds=30, retries=1)))
    world.pods["stable"].answer = slow_failure
    assert (await world.chat()).status == 200
    first, second = (int(h["x-envoy-expected-rq-timeout-ms"]) for h in world.seen("stable"))
    assert 29_000 < first <= 30_000
    assert second <= first - 250


async def test_a_tenants_own_cap_is_told_from_a_full_queue(world: Any, eventually: Any) -> None:
    async def limited(request: web.Request) -> web.StreamResponse:
        headers = {"x-sluice-limited": "tenant"} if request.headers["x-sluice-task"] == "kyc" else {}
        return web.json_response({}, status=429, headers=headers)

    await world.push(world.state(PLAIN))
    world.pods["stable"].answer = limited
    for task in ("kyc", "chat"):
        assert (await world.chat(headers={"sluice-task": task})).status == 429
    attempts = await final_records(world, eventually, "attempt", 2)
    assert {r.task: r.limited for r in attempts} == {"kyc": True, "chat": False}
    assert {r.outcome for r in attempts} == {"rejected"}
