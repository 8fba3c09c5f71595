"""Tenants' shares through a whole pod: the operator's limits and the gateway's headers in, tokens or refusals
out of the real engine."""

from __future__ import annotations

import asyncio
import threading
from collections import Counter
from collections.abc import Callable
from pathlib import Path
from typing import Any

from sluice_runtime.engine.engine import Engine
from unit.runtime.server.support import (
    COMPLETIONS,
    IDENTITY,
    Pod,
    eventually,
    pod_config,
    route_headers,
    running_pod,
    soon,
)

NUM_CLIENTS = 6
"""Of each tenant, where 4 requests run at once: both always have some that wait."""
BODY = {"model": "assistant", "prompt": "Once upon a time", "max_tokens": 8, "temperature": 0}
CONFIG = pod_config(features={"prefixCache": False})


async def _weigh(pod: Pod, version: str, **tenants: dict[str, int]) -> None:
    limits = {"version": version, "backend": {}, "tenants": tenants}
    reply = await soon(pod.admin.put("/v1/configs", json={"configs": [CONFIG], "limits": limits}))
    assert reply.json() == {"versions": ["v1"], "limits": version, "access": "", "rejected": []}


async def _tokens(pod: Pod, skip: int, num: int) -> Counter[str]:
    """Output tokens by tenant of the next `num` requests after `skip`."""
    first = pod.runtime.evidence.seq + skip
    await eventually(lambda: pod.runtime.evidence.seq >= first + num, seconds=120)
    tokens: Counter[str] = Counter()
    for record in pod.records()[first : first + num]:
        assert record["outcome"] == "truncated", record
        tokens[record["tenant"]] += record["tokens"]["output"]
    return tokens


async def test_backlogged_tenants_get_tokens_by_weight_and_an_edit_holds_at_once(
    tmp_path: Path, make_engine: Callable[..., Engine]
) -> None:
    engine = make_engine(max_num_seqs=4, max_queue=100)
    async with running_pod(tmp_path, loaded=False) as pod:
        pod.runtime.become_ready(engine, IDENTITY)
        await _weigh(pod, "first", heavy={"weight": 3})
        stop = asyncio.Event()

        async def ask(tenant: str) -> None:
            while not stop.is_set():
                reply: Any = await pod.api.post(COMPLETIONS, json=BODY, headers=route_headers(tenant=tenant))
                assert reply.status_code == 200, reply.text

        async with asyncio.TaskGroup() as clients:
            for tenant in ("heavy", "light"):
                for _ in range(NUM_CLIENTS):
                    clients.create_task(ask(tenant))
            tokens = await _tokens(pod, skip=2 * NUM_CLIENTS, num=160)
            assert 2.7 <= tokens["heavy"] / tokens["light"] <= 3.3, tokens
            await _weigh(pod, "second", heavy={"weight": 1})
            # What was taken before the edit keeps the weight that it came with.
            tokens = await _tokens(pod, skip=2 * NUM_CLIENTS, num=96)
            assert 0.9 <= tokens["heavy"] / tokens["light"] <= 1.1, tokens
            await _weigh(pod, "third", heavy={"maxRunning": 1})
            tokens = await _tokens(pod, skip=2 * NUM_CLIENTS, num=96)
            assert 0.3 <= tokens["heavy"] / tokens["light"] <= 0.36, tokens
            stop.set()


async def test_a_flood_fills_the_queue_and_another_tenant_finds_room(
    tmp_path: Path, make_engine: Callable[..., Engine]
) -> None:
    engine = make_engine(max_num_seqs=1, max_queue=2)
    opened, execute = threading.Event(), engine._runner.execute

    def held(chunks: Any) -> Any:
        assert opened.wait(60)
        return execute(chunks)

    engine._runner.execute = held  # type: ignore[method-assign]
    async with running_pod(tmp_path, loaded=False) as pod:
        pod.runtime.become_ready(engine, IDENTITY)
        await pod.hold(CONFIG)

        def ask(name: str, tenant: str, **more: Any) -> asyncio.Task[Any]:
            headers = route_headers(tenant=tenant) | {"x-request-id": name}
            return asyncio.create_task(pod.post(BODY | more, COMPLETIONS, headers))

        runs = ask("runs", "flood")
        await eventually(lambda: engine.load().num_running == 1)
        waits = ask("waits", "flood")
        await eventually(lambda: engine.load().num_waiting == 1)
        youngest = ask("youngest", "flood", stream=True, n=2)
        await eventually(lambda: engine.load().num_waiting == 2)
        again = await ask("again", "flood")
        other = ask("other", "other", stream=True)
        await eventually(lambda: engine.load().num_displaced_total == 1)
        late = await ask("late", "other")
        opened.set()
        statuses = {task: (await task).status_code for task in (runs, waits, youngest, other)}
        assert statuses == {runs: 200, waits: 200, youngest: 429, other: 200}
        for refused in (youngest.result(), again, late):
            assert (refused.status_code, refused.headers["retry-after"]) == (429, "1")
            assert refused.json()["error"]["code"] == "queue_full"
        assert other.result().text.endswith("data: [DONE]\n\n")
        outcomes = {record["request_id"]: (record["outcome"], record["status"]) for record in pod.records()}
        assert outcomes == {
            "runs": ("truncated", 200),
            "waits": ("truncated", 200),
            "other": ("truncated", 200),
            **dict.fromkeys(("youngest", "again", "late"), ("rejected", 429)),
        }
        metrics = (await soon(pod.api.get("/metrics"))).text
        assert "sluice_requests_displaced_total 1.0" in metrics
