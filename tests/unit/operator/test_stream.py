"""What the operator makes a pod hold, against a pod that is a few lines of aiohttp."""

from __future__ import annotations

import asyncio
import json
import logging
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager
from pathlib import Path
from typing import Any

import aiohttp
import jsonschema
import pytest
from aiohttp import web

from sluice_operator.evidence.stream import SCHEMA, PodStream
from sluice_operator.plan.cut import Cut
from sluice_operator.plan.observed import PodView

DEADLINE_S = 60.0


class Pod:
    """Holds what it is told, unless it is to reject it. ``puts`` has each set as it came."""

    def __init__(self) -> None:
        self.puts: asyncio.Queue[dict[str, Any]] = asyncio.Queue()
        self.versions: list[str] = []
        self.limits = self.access = ""
        self.rejects: set[str] = set()
        self.refusal: dict[str, Any] | None = None
        """What it answers with 400 to whatever it is sent."""
        self.hello: dict[str, Any] = {
            "type": "hello", "schema": SCHEMA, "boot": "b", "seq": 0, "oldest": 0, "identity": "sha256:0",
        }  # fmt: skip
        self.lines: list[dict[str, Any]] = []
        """What it tells with the next heartbeat."""
        self.beat = asyncio.Event()
        self.heard: list[str] = []
        """Kinds of the lines that the operator passed on."""
        self.num_unread = 0
        """Records that it did not."""

    async def configs(self, request: web.Request) -> web.Response:
        body = await request.json()
        if self.refusal is not None:
            self.puts.put_nowait(body)
            return web.json_response({"error": self.refusal}, status=400)
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
        await response.write(self._line(self.hello))
        while True:
            await self.beat.wait()
            self.beat.clear()
            for line in self.lines:
                await response.write(json.dumps(line).encode() + b"\n")
            self.lines = []
            load = {"kv_used": 0, "kv_total": 1}
            await response.write(self._line({"type": "heartbeat", "load": load, "running": []}))

    def count(self) -> None:
        self.num_unread += 1

    def _line(self, said: dict[str, Any]) -> bytes:
        return json.dumps({**said, **self._held()}).encode() + b"\n"

    def _held(self) -> dict[str, Any]:
        return {"versions": self.versions, "limits": self.limits, "access": self.access}

    @staticmethod
    def _beside(body: dict[str, Any]) -> tuple[str, str]:
        return body["limits"]["version"], body["access"]["version"]


@asynccontextmanager
async def listening(pod: Pod) -> AsyncIterator[PodStream]:
    """The operator's side of it."""
    app = web.Application()
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
            on_line=lambda _, line: pod.heard.append(line["type"]),
            on_change=lambda _: None,
            on_gap=lambda _, lost: None,
            on_unread=lambda _: pod.count(),
        )
        running = asyncio.create_task(stream.run())
        yield stream
        running.cancel()
        await asyncio.gather(running, return_exceptions=True)
    await runner.cleanup()


@pytest.fixture
async def world() -> AsyncIterator[tuple[Pod, PodStream]]:
    pod = Pod()
    async with listening(pod) as stream:
        yield pod, stream


def limits(version: str) -> dict[str, Any]:
    return {"version": version, "backend": {}, "tenants": {"acme": {"weight": int(version)}}}


def access(version: str) -> dict[str, Any]:
    return {"version": version, "tokens": {"ns/Secret/facts/key": f"token-{version}"}, "authorities": {}}


OTHER = "0123456789abcdef"
CONFIGS = {"v1": {"version": "v1"}}
NOBODY = {"version": "", "tokens": {}, "authorities": {}}
NONE, LEAKED = Cut(), Cut(frozenset({"b", "a"}), frozenset({"acme"}))


async def put(pod: Pod) -> dict[str, Any]:
    return await asyncio.wait_for(pod.puts.get(), DEADLINE_S)


async def until(true: Callable[[], bool]) -> None:
    async with asyncio.timeout(DEADLINE_S):
        while not true():  # noqa: ASYNC110 (a view has no events)
            await asyncio.sleep(0)


def record(seq: int) -> dict[str, Any]:
    return {"type": "record", "seq": seq, "verdicts": []}


async def test_other_limits_alone_are_told_at_once(world: tuple[Pod, PodStream]) -> None:
    pod, stream = world
    stream.configure(CONFIGS, limits("1"), NOBODY, NONE)
    assert (await put(pod)) == {"configs": [{"version": "v1"}], "limits": limits("1"), "access": NOBODY}
    stream.configure(CONFIGS, limits("2"), NOBODY, NONE)
    assert (await put(pod))["limits"] == limits("2")
    assert stream.view.versions == {"v1"}


async def test_a_pod_that_lost_its_limits_is_told_again(world: tuple[Pod, PodStream]) -> None:
    pod, stream = world
    stream.configure(CONFIGS, limits("1"), NOBODY, NONE)
    await put(pod)
    pod.limits = ""
    pod.beat.set()
    assert (await put(pod))["limits"] == limits("1")


async def test_a_rotated_token_alone_is_told_at_once(world: tuple[Pod, PodStream]) -> None:
    pod, stream = world
    for version in ("1", "2"):
        stream.configure(CONFIGS, limits("1"), access(version), NONE)
        assert (await put(pod))["access"] == access(version)
    pod.access = ""
    pod.beat.set()
    assert (await put(pod))["access"] == access("2"), "told again to a pod that lost it"


def test_what_is_withdrawn_keeps_to_its_contract() -> None:
    path = Path(__file__).parents[3] / "docs/contracts/withdrawn.schema.json"
    jsonschema.validate(LEAKED.body, json.loads(path.read_text()))
    assert LEAKED.body == {"attempts": ["a", "b"], "tenants": ["acme"]}
    assert not NONE
    assert Cut(tenants=frozenset({"acme"}))


async def test_what_is_withdrawn_is_told_once_and_again_to_a_process_that_can_not_know(
    world: tuple[Pod, PodStream],
) -> None:
    pod, stream = world
    stream.configure(CONFIGS, limits("1"), NOBODY, NONE)
    assert "withdrawn" not in await put(pod), "an older pod knows no such field"
    for _ in range(2):
        stream.configure(CONFIGS, limits("1"), NOBODY, LEAKED)
    assert (await put(pod))["withdrawn"] == LEAKED.body
    stream.configure(CONFIGS, limits("2"), NOBODY, LEAKED)
    assert (await put(pod))["withdrawn"] == LEAKED.body, "a set is told as a whole"
    assert pod.puts.empty()
    stream.configure(CONFIGS, limits("2"), NOBODY, NONE)
    assert "withdrawn" not in await put(pod)


async def test_an_operator_that_restarts_takes_back_what_the_one_before_told_to_withdraw() -> None:
    """Or a tenant that is there again would be refused for as long as the pod lives."""
    pod = Pod()
    pod.versions, pod.limits, pod.access = ["v1"], "1", ""
    async with listening(pod) as stream:
        await until(lambda: stream.view.heard)
        stream.configure(CONFIGS, limits("1"), NOBODY, NONE)
        assert "withdrawn" not in await put(pod)


async def test_a_new_process_of_a_pod_is_told_what_is_withdrawn() -> None:
    pod = Pod()
    async with listening(pod) as stream:
        stream.configure(CONFIGS, limits("1"), NOBODY, LEAKED)
        await put(pod)
        pod.hello |= {"boot": "another"}
        pod.lines = [{**pod.hello, **pod._held()}]
        pod.beat.set()
        assert (await put(pod))["withdrawn"] == LEAKED.body


async def test_limits_that_a_pod_rejects_hold_nothing_up_and_are_not_told_for_ever(
    world: tuple[Pod, PodStream],
) -> None:
    pod, stream = world
    pod.rejects = {"1"}
    stream.configure(CONFIGS, limits("1"), NOBODY, NONE)
    await put(pod)
    for _ in range(3):
        pod.beat.set()
    stream.configure({**CONFIGS, "v2": {"version": "v2"}}, limits("1"), NOBODY, NONE)
    await put(pod)
    assert pod.puts.empty()
    await until(lambda: stream.view.versions == {"v1", "v2"})
    assert stream.view.rejected == {"1": "x: no"}
    assert (stream.view.beside, stream.view.refused) == ("x: no", ""), "no policy would tell of it"
    assert stream.view.heard


async def test_evidence_of_another_schema_is_counted_and_not_read() -> None:
    """The pod serves on and is configured; what its records mean is not guessed."""
    pod = Pod()
    pod.hello |= {"schema": OTHER, "seq": 2}
    async with listening(pod) as stream:
        stream.configure(CONFIGS, limits("1"), NOBODY, NONE)
        await put(pod)
        await until(lambda: stream.view.versions == {"v1"})
        assert (stream.view.connected, stream.view.heard) == (True, False)
        assert (stream.view.identity, stream.view.unreadable) == ("sha256:0", OTHER)
        pod.lines = [record(2), record(3), {"type": "record", "seq": 4, "outcome": {"of": "the future"}}]
        pod.beat.set()
        await until(lambda: pod.num_unread == 2)  # what was before this operator its predecessor counted
        assert set(pod.heard) == {"hello"}
        assert stream.view.connected, "nothing of it is read, so nothing of it can break the stream"


@pytest.mark.parametrize(
    ("missing", "schema", "told"),
    [("schema", None, "none"), ("boot", OTHER, OTHER)],
)
async def test_a_hello_of_another_version_is_told_for_what_it_is(
    missing: str, schema: str | None, told: str
) -> None:
    """Of one that names no schema, and of one whose hello itself can't be read."""
    pod = Pod()
    pod.hello["schema"] = schema
    del pod.hello[missing]
    async with listening(pod) as stream:
        await until(lambda: bool(stream.view.unreadable))
        assert stream.view.unreadable == told
        assert not stream.view.heard
        if missing == "boot":
            assert not stream.view.connected
            assert stream.view.settled({"v1"}), "waiting brings no more"


async def test_a_pod_that_takes_nothing_says_why_once(
    world: tuple[Pod, PodStream], caplog: pytest.LogCaptureFixture
) -> None:
    caplog.set_level(logging.INFO)
    pod, stream = world
    pod.refusal = {"message": "Unknown.", "param": "access"}
    stream.configure(CONFIGS, limits("1"), NOBODY, NONE)
    for _ in range(3):
        await put(pod)
    assert stream.view.refused == "access: Unknown."
    assert stream.view.settled({"v1"}), "there is nothing to wait for"
    pod.refusal = None
    await until(lambda: stream.view.versions == {"v1"})
    assert not stream.view.refused
    told = [r for r in caplog.records if r.message == "a pod did not take its configuration"]
    assert len(told) == 1
