"""Tenants' weights through a whole pod: the operator's limits and the gateway's headers in, tokens out of the
real engine."""

from __future__ import annotations

import asyncio
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
