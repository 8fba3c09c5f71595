"""A real gateway in front of stand-in pods on loopback, shared by all tests of this folder."""

from __future__ import annotations

import asyncio
import contextlib
import json
import os
import time
from collections.abc import AsyncIterator, Awaitable, Callable
from dataclasses import dataclass, field
from typing import Any

import aiohttp
import pytest
import pytest_asyncio
from aiohttp import web

from sluice_operator.api.common import DataClass, Risk
from sluice_operator.xds.local import LocalEnvoy, free_port
from sluice_operator.xds.server import AdsServer
from sluice_operator.xds.state import AccessRecord, Arm, Cluster, Endpoint, GatewayState, Policy, Rule, Tenant

PATIENCE_S = 60.0
"""What takes milliseconds may take seconds on a busy machine; who waits for what never comes fails then."""


class Pod:
    """An HTTP stand-in that remembers what it got; ``answer`` may be replaced."""

    def __init__(self) -> None:
        self.requests: list[tuple[dict[str, str], bytes]] = []
        self.answer: Callable[[web.Request], Awaitable[web.StreamResponse]] | None = None
        self.port = 0
        self._runner: web.AppRunner | None = None

    async def start(self) -> Pod:
        app = web.Application(client_max_size=64 << 20)
        app.router.add_route("*", "/{path:.*}", self._handle)
        self._runner = web.AppRunner(app, handler_cancellation=True)
        await self._runner.setup()
        site = web.TCPSite(self._runner, "127.0.0.1", self.port)
        await site.start()
        self.port = self._runner.addresses[0][1]
        return self

    async def stop(self) -> None:
        if self._runner:
            await self._runner.cleanup()

    async def _handle(self, request: web.Request) -> web.StreamResponse:
        body = await request.read()
        self.requests.append(({k.lower(): v for k, v in request.headers.items()}, body))
        if self.answer:
            return await self.answer(request)
        return web.json_response({"pod": self.port})

    @property
    def endpoint(self) -> Endpoint:
        return Endpoint("127.0.0.1", self.port)


@dataclass
class Answer:
    """A response, read to its end."""

    status: int
    headers: dict[str, str]
    text: str

    @property
    def json(self) -> Any:
        return json.loads(self.text)

    @property
    def code(self) -> str:
        """OpenAI error code; the shape is asserted."""
        error = self.json["error"]
        assert set(error) == {"message", "type", "param", "code"}
        assert error["message"]
        assert error["type"]
        assert self.headers["content-type"] == "application/json"
        return str(error["code"])


@dataclass
class World:
    """Everything a test needs."""

    server: AdsServer
    port: int
    http: aiohttp.ClientSession
    pods: dict[str, Pod]
    all_records: list[AccessRecord]
    quarantines: list[tuple[str, str]]
    ads_port: int
    envoy: LocalEnvoy | None = None
    pushes: list[float] = field(default_factory=list)
    began: float = 0

    @property
    def records(self) -> list[AccessRecord]:
        """Access records of requests that began in this test."""
        return [r for r in self.all_records if r.start >= self.began]

    def clusters(self, **kwargs: Any) -> tuple[Cluster, ...]:
        return tuple(Cluster(f"ns/{n}", (pod.endpoint,), **kwargs) for n, pod in self.pods.items())

    def state(self, *rules: Rule, **kwargs: Any) -> GatewayState:
        rules = rules or (Rule("all", Arm("ns/stable", "c-stable")),)
        fields: dict[str, Any] = {
            "clusters": self.clusters(),
            "policies": (Policy("ns/policy", "m", rules),),
            "tenants": (
                Tenant(
                    "acme",
                    "finance",
                    ("key-acme",),
                    tasks=("chat", "kyc"),
                    data_classes=tuple(DataClass),
                    risks=tuple(Risk),
                ),
                Tenant(
                    "small",
                    "retail",
                    ("key-small",),
                    tasks=("chat",),
                    data_classes=(DataClass.PUBLIC,),
                    risks=(Risk.LOW,),
                ),
            ),
            "credential": "pod-secret%",
        }
        return GatewayState(**{**fields, **kwargs})

    async def push(self, state: GatewayState, **kwargs: Any) -> None:
        start = time.perf_counter()
        await self.server.push(state)
        result = await self.server.wait_in_force(PATIENCE_S, **kwargs)
        self.pushes.append(time.perf_counter() - start)
        assert result.ok, (result, self.envoy and self.envoy.log)
        # Afterwards, so that copies of earlier requests which nobody waited for are gone too.
        for pod in self.pods.values():
            pod.requests.clear()

    async def chat(
        self,
        model: Any = "m",
        *,
        key: str | None = "key-acme",
        headers: dict[str, str] | None = None,
        body: Any = None,
        path: str = "/v1/chat/completions",
        method: str = "POST",
        session: aiohttp.ClientSession | None = None,
    ) -> Answer:
        sent = {
            "content-type": "application/json",
            **({"authorization": f"Bearer {key}"} if key else {}),
            **(headers or {}),
        }
        data = body if body is not None else json.dumps({"model": model, "messages": []})
        async with (session or self.http).request(
            method,
            f"http://127.0.0.1:{self.port}{path}",
            data=data if method == "POST" else None,
            headers=sent,
        ) as response:
            text = await response.text()
            return Answer(response.status, {k.lower(): v for k, v in response.headers.items()}, text)

    async def many(self, count: int, **kwargs: Any) -> list[Answer]:
        gate = asyncio.Semaphore(32)

        async def one(index: int) -> Answer:
            async with gate:
                headers = {"sluice-conversation": f"c{index}"}
                return await self.chat(headers=headers, **kwargs)

        return await asyncio.gather(*(one(i) for i in range(count)))

    def seen(self, name: str) -> list[dict[str, str]]:
        """Headers of the requests that a pod got."""
        return [headers for headers, _ in self.pods[name].requests]


async def eventually(probe: Callable[[], Any], seconds: float = PATIENCE_S) -> Any:
    """Poll until the probe (which may be async) gives something true."""
    deadline = time.monotonic() + seconds
    while True:
        value = probe()
        if asyncio.iscoroutine(value):
            value = await value
        if value:
            return value
        assert time.monotonic() < deadline, "did not come true"
        await asyncio.sleep(0.01)


@contextlib.asynccontextmanager
async def open_world(*, envoy: bool = True, **server_options: Any) -> AsyncIterator[World]:
    """A server, pods and, by default, one Envoy."""
    port = free_port()
    records: list[AccessRecord] = []
    quarantines: list[tuple[str, str]] = []
    server = AdsServer(
        host="127.0.0.1",
        port=free_port(),  # some tests listen there once more
        gateway_address=("127.0.0.1", port),
        on_record=records.append,
        on_quarantine=lambda name, message: quarantines.append((name, message)),
        **server_options,
    )
    ads_port = await server.start()
    pods = {name: await Pod().start() for name in ("stable", "candidate", "third")}
    async with contextlib.AsyncExitStack() as stack:
        connector = aiohttp.TCPConnector(limit=200)
        http = await stack.enter_async_context(aiohttp.ClientSession(connector=connector))
        world = World(server, port, http, pods, records, quarantines, ads_port)
        if envoy:
            world.envoy = await stack.enter_async_context(LocalEnvoy(ads_port))
            await world.push(world.state())
        try:
            yield world
        finally:
            if os.environ.get("SLUICE_ENVOY_LOG") and world.envoy:
                print(world.envoy.log)
    await server.stop()
    for pod in pods.values():
        await pod.stop()


@pytest_asyncio.fixture(scope="session", loop_scope="session")
async def shared_world() -> AsyncIterator[World]:
    """Started once."""
    async with open_world() as world:
        yield world


@pytest_asyncio.fixture(loop_scope="session")
async def world(shared_world: World) -> AsyncIterator[World]:
    """The shared world, clean."""
    for pod in shared_world.pods.values():
        pod.requests.clear()
        pod.answer = None
    shared_world.all_records.clear()
    shared_world.began = time.time()
    shared_world.quarantines.clear()
    yield shared_world
    for pod in shared_world.pods.values():
        pod.answer = None


@pytest.fixture(name="open_world")
def open_world_fixture() -> Any:
    """For tests that need a gateway of their own."""
    return open_world


@pytest.fixture(name="eventually")
def eventually_fixture() -> Any:
    """Polling with a deadline."""
    return eventually
