"""What the operator makes a pod hold, against a pod that is a few lines of aiohttp."""

from __future__ import annotations

import asyncio
import json
from collections.abc import AsyncIterator
from typing import Any

import aiohttp
import pytest
from aiohttp import web

from sluice_operator.evidence.stream import PodStream
from sluice_operator.plan.observed import PodView

DEADLINE_S = 10.0


class Pod:
    """Holds what it is told, unless it is to reject it. ``puts`` has each set as it came."""

    def __init__(self) -> None:
        self.puts: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self.versions: list[str] = []
        self.limits = self.access = ""
        self.rejects: set[str] = set()
        self.beat = asyncio.Event()

    async def configs(self, request: web.Request) -> web.Response:
        body = await request.json()
        rejected = [
            {"version": version, "field": "x", "message": "no"}
            for version in (*(c["version"] for c in body["configs"]), *self._beside(body))
            if version in self.rejects
        ]
        self.versions = [c["version"] for c in body["configs"] if c["version"] not in self.rejects]
        limited, reached = self._beside(body)
        self.limits = self.limits if limited in self.rejects else limited
        self.access = self.access if reached in self.rejects else reached
        self.puts.put_nowait(body)
        return web.json_response({**self._held(), "rejected": rejected})

    async def stream(self, request: web.Request) -> web.StreamResponse:
        response = web.StreamResponse()
        await response.prepare(request)
        hello = {"type": "hello", "boot": "b", "seq": 0, "oldest": 0, "identity": "sha256:0"}
        await response.write(self._line(hello))
        while True:
            await self.beat.wait()
            self.beat.clear()
            load = {"kv_used": 0, "kv_total": 1}
            await response.write(self._line({"type": "heartbeat", "load": load, "running": []}))

    def _line(self, said: dict[str, Any]) -> bytes:
        return json.dumps({**said, **self._held()}).encode() + b"\n"

    def _held(self) -> dict[str, Any]:
        return {"versions": self.versions, "limits": self.limits, "access": self.access}

    @staticmethod
    def _beside(body: dict[str, Any]) -> tuple[str, str]:
        return body["limits"]["version"], body["access"]["version"]


@pytest.fixture
async def world() -> AsyncIterator[tuple[Pod, PodStream]]:
    pod, app = Pod(), web.Application()
    app.router.add_put("/v1/configs", pod.configs)
    app.router.add_get("/v1/stream", pod.stream)
    runner = web.AppRunner(app, shutdown_timeout=0.01)
    await runner.setup()
    site = web.TCPSite(runner, "127.0.0.1", 0)
    await site.start()
    port = runner.addresses[0][1]
    async with aiohttp.ClientSession() as session:
        stream = PodStream(
            PodView("a1", "ns", "a", ip="127.0.0.1", admin_port=port),
            session,
            lambda: "token",
            on_line=lambda pod, line: None,
            on_change=lambda pod: None,
            on_gap=lambda pod, lost: None,
        )
        running = asyncio.create_task(stream.run())
        yield pod, stream
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
    await runner.cleanup()


def limits(version: str) -> dict[str, Any]:
    return {"version": version, "backend": {}, "tenants": {"acme": {"weight": int(version)}}}


def access(version: str) -> dict[str, Any]:
    return {"version": version, "tokens": {"ns/Secret/facts/key": f"token-{version}"}, "authorities": {}}


CONFIGS = {"v1": {"version": "v1"}}
NOBODY = {"version": "", "tokens": {}, "authorities": {}}


async def put(pod: Pod) -> dict[str, Any]:
    return await asyncio.wait_for(pod.puts.get(), DEADLINE_S)


async def test_other_limits_alone_are_told_at_once(world: tuple[Pod, PodStream]) -> None:
    pod, stream = world
    stream.configure(CONFIGS, limits("1"), NOBODY)
    assert (await put(pod)) == {"configs": [{"version": "v1"}], "limits": limits("1"), "access": NOBODY}
    stream.configure(CONFIGS, limits("2"), NOBODY)
    assert (await put(pod))["limits"] == limits("2")
    assert stream.view.versions == {"v1"}


async def test_a_pod_that_lost_its_limits_is_told_again(world: tuple[Pod, PodStream]) -> None:
    pod, stream = world
    stream.configure(CONFIGS, limits("1"), NOBODY)
    await put(pod)
    pod.limits = ""
    pod.beat.set()
    assert (await put(pod))["limits"] == limits("1")


async def test_a_rotated_token_alone_is_told_at_once(world: tuple[Pod, PodStream]) -> None:
    pod, stream = world
    for version in ("1", "2"):
        stream.configure(CONFIGS, limits("1"), access(version))
        assert (await put(pod))["access"] == access(version)
    pod.access = ""
    pod.beat.set()
    assert (await put(pod))["access"] == access("2"), "told again to a pod that lost it"


async def test_limits_that_a_pod_rejects_hold_nothing_up_and_are_not_told_for_ever(
    world: tuple[Pod, PodStream],
) -> None:
    pod, stream = world
    pod.rejects = {"1"}
    stream.configure(CONFIGS, limits("1"), NOBODY)
    await put(pod)
    for _ in range(3):
        pod.beat.set()
    stream.configure({**CONFIGS, "v2": {"version": "v2"}}, limits("1"), NOBODY)
    await put(pod)
    assert pod.puts.empty()
    async with asyncio.timeout(DEADLINE_S):
        while stream.view.versions != {"v1", "v2"}:  # noqa: ASYNC110 (a view has no events)
            await asyncio.sleep(0)
    assert stream.view.rejected == {"1": "x: no"}
