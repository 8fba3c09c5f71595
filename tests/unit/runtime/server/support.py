"""A pod on loopback with an engine that a test drives by hand; nothing here imports torch."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator, Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx
from jsonschema import Draft202012Validator

from sluice_runtime.admin import admin_app
from sluice_runtime.api.app import api_app
from sluice_runtime.engine.types import (
    EngineLoad,
    EngineRequest,
    FinishReason,
    InvalidRequest,
    OutputChunk,
    QueueFull,
    RequestTiming,
    RequestTooLong,
)
from sluice_runtime.server import bind, listening
from sluice_runtime.state import Identity, Runtime, SecretFile, Settings
from sluice_runtime.testing.standin import ScriptedTokenizer

CONTRACTS = Path(__file__).parents[4] / "docs" / "contracts"
CREDENTIAL, TOKEN = "gateway-secret", "admin-secret"
DEADLINE_S = 60.0
CHAT = "/v1/chat/completions"
COMPLETIONS = "/v1/completions"
IDENTITY = Identity("sha256:" + "1" * 64, "sha256:" + "2" * 64, "sha256:" + "3" * 64)


async def soon(awaitable: Any) -> Any:
    """The awaitable's result, or a failure: nothing in these tests takes seconds, but on a busy machine."""
    async with asyncio.timeout(DEADLINE_S):
        return await awaitable


async def eventually(fact: Callable[[], bool], seconds: float = DEADLINE_S) -> None:
    """Wait until a fact about the pod's inside holds."""
    async with asyncio.timeout(seconds):
        while not fact():  # noqa: ASYNC110 (facts of the code under test have no events)
            await asyncio.sleep(0.005)


def timing(num_prompt: int = 3, num_output: int = 2, num_cached: int = 1) -> RequestTiming:
    return RequestTiming(
        0.01, 0.02, 0.03, 0.004, 0.005, 0.05, num_prompt, num_cached, num_output, 0.006, 0.04
    )


@dataclass
class Generation:
    """One request inside the hand-driven engine."""

    request: EngineRequest
    chunks: asyncio.Queue[OutputChunk] = field(default_factory=asyncio.Queue)
    cancelled: asyncio.Event = field(default_factory=asyncio.Event)

    def token(self, text: str, finish: FinishReason | None = None, **more: Any) -> None:
        ended = {"finish_reason": finish, "timing": timing()} if finish else {}
        self.chunks.put_nowait(OutputChunk(text, (7,), **{**ended, **more}))

    def answer(self, *texts: str, finish: FinishReason = FinishReason.STOP) -> None:
        for text in texts[:-1]:
            self.token(text)
        self.token(texts[-1], finish)

    def fail(self, message: str = "out of luck") -> None:
        chunk = OutputChunk("", (), finish_reason=FinishReason.ERROR, error=message, timing=timing())
        self.chunks.put_nowait(chunk)


class HandEngine:
    """An engine in which each request waits for the test to produce its tokens; `auto` answers at once."""

    def __init__(self, max_model_len: int = 1000) -> None:
        self.max_model_len = max_model_len
        self.tokenizer = ScriptedTokenizer()
        self.generations: dict[str, Generation] = {}
        self.grammars: list[str] = []
        self.arrived: asyncio.Queue[Generation] = asyncio.Queue()
        self.full = False
        self.alive = True
        self.auto: Sequence[str] | None = None
        self.auto_finish = FinishReason.STOP

    def compile_grammar(self, grammar: str) -> None:
        self.grammars.append(grammar)

    def submit(self, request: EngineRequest) -> AsyncIterator[OutputChunk]:
        if self.full:
            raise QueueFull(5)
        if request.sampling.logit_bias and max(request.sampling.logit_bias) > 50_000:
            raise InvalidRequest("token ids must be below 50000", "logit_bias")
        if len(request.prompt_ids) + request.sampling.max_tokens > self.max_model_len:
            raise RequestTooLong(len(request.prompt_ids), request.sampling.max_tokens, self.max_model_len)
        generation = self.generations[request.request_id] = Generation(request)
        if self.auto is not None:
            generation.answer(*self.auto, finish=self.auto_finish)
        self.arrived.put_nowait(generation)
        return self._chunks(generation)

    async def _chunks(self, generation: Generation) -> AsyncIterator[OutputChunk]:
        while True:
            yield await generation.chunks.get()

    async def next(self) -> Generation:
        generation: Generation = await soon(self.arrived.get())
        return generation

    def cancel(self, request_id: str) -> None:
        if request_id in self.generations:
            self.generations[request_id].cancelled.set()

    def stop(self) -> None: ...

    def load(self) -> EngineLoad:
        return EngineLoad(1, 2, 3, 4, 5, 0.1, 6.0, 7, 8, 9, 10, 11, 12)

    def healthy(self) -> bool:
        return self.alive


def pod_config(version: str = "v1", **changes: Any) -> dict[str, Any]:
    return {
        "version": version,
        "policy": "prod/assistant",
        "rule": "default",
        "model": "assistant",
        "contract": [],
        "features": {"prefixCache": True},
        "switches": [],
        "scope": {"name": "prod/shared", "isolation": "Tenant", "epoch": 1, "versions": {"tokenizer": "1"}},
        "sampling": {},
        "caps": {},
        **changes,
    }


def check(name: str, kind: str, hard: bool = True, **rest: Any) -> dict[str, Any]:
    return {"name": name, "kind": kind, "hard": hard, **rest}


def route_headers(config: str = "v1", **changes: str) -> dict[str, str]:
    """What the gateway sends along; a changed header with an empty value is left out."""
    headers = {
        "x-request-id": "req-1",
        "x-sluice-credential": CREDENTIAL,
        "x-sluice-tenant": "acme",
        "x-sluice-domain": "corp",
        "x-sluice-user": "alice@example.com",
        "x-sluice-task": "chat",
        "x-sluice-conversation": "conversation-77",
        "x-sluice-policy": "prod/assistant",
        "x-sluice-rule": "default",
        "x-sluice-arm": "candidate",
        "x-sluice-attempt": "abc123",
        "x-sluice-config": config,
        **{f"x-sluice-{name}".replace("_", "-"): value for name, value in changes.items()},
    }
    return {name: value for name, value in headers.items() if value}


def chat_body(**changes: Any) -> dict[str, Any]:
    return {"model": "assistant", "messages": [{"role": "user", "content": "Hello there"}], **changes}


@dataclass
class Pod:
    """A running pod and clients for both of its ports."""

    runtime: Runtime
    engine: HandEngine
    api: httpx.AsyncClient
    admin: httpx.AsyncClient
    api_port: int
    admin_port: int

    async def hold(self, *configs: dict[str, Any]) -> dict[str, Any]:
        reply = await soon(self.admin.put("/v1/configs", json={"configs": list(configs)}))
        assert reply.status_code == 200, reply.text
        body: dict[str, Any] = reply.json()
        return body

    async def post(
        self, body: Mapping[str, Any], path: str = CHAT, headers: dict[str, str] | None = None
    ) -> httpx.Response:
        sent = route_headers() if headers is None else headers
        reply: httpx.Response = await soon(self.api.post(path, json=body, headers=sent))
        return reply

    def records(self) -> list[dict[str, Any]]:
        return [json.loads(line) for line in self.runtime.evidence.after(0, 100_000)[1]]

    async def record(self, seq: int = 1) -> dict[str, Any]:
        """The record with this number, once it is there."""
        await eventually(lambda: self.runtime.evidence.seq >= seq)
        return self.records()[seq - 1]


@contextlib.asynccontextmanager
async def running_pod(
    directory: Path, *, loaded: bool = True, insecure: bool = False, **settings: Any
) -> AsyncIterator[Pod]:
    (directory / "credential").write_text(CREDENTIAL + "\n")
    (directory / "token").write_text(TOKEN + "\n")
    credential = None if insecure else SecretFile(directory / "credential")
    runtime = Runtime(Settings("prod/smol", credential, SecretFile(directory / "token"), **settings))
    engine = HandEngine()
    if loaded:
        runtime.become_ready(engine, IDENTITY)
    api, admin = api_app(runtime), admin_app(runtime)
    async with listening((api, bind("127.0.0.1", 0)), (admin, bind("127.0.0.1", 0))) as ports:
        assert ports.admin is not None
        bearer = {"authorization": f"Bearer {TOKEN}"}
        async with (
            httpx.AsyncClient(
                base_url=f"http://127.0.0.1:{ports.api}", timeout=DEADLINE_S, verify=False
            ) as api_client,
            httpx.AsyncClient(
                base_url=f"http://127.0.0.1:{ports.admin}", timeout=DEADLINE_S, headers=bearer, verify=False
            ) as admin_client,
        ):
            pod = Pod(runtime, engine, api_client, admin_client, ports.api, ports.admin)
            await pod.hold(pod_config())
            yield pod


def evidence_validator() -> Draft202012Validator:
    return Draft202012Validator(json.loads((CONTRACTS / "evidence.schema.json").read_text()))


def events(text: str) -> list[Any]:
    """The data of each server-sent event; `[DONE]` as a string."""
    found = []
    for block in text.split("\n\n"):
        if block:
            assert block.startswith("data: "), block
            data = block.removeprefix("data: ")
            found.append(data if data == "[DONE]" else json.loads(data))
    return found
