"""Verified streaming on the real engine: the same text, whole characters, no stop strings, and no KV while a
verifier thinks."""

from __future__ import annotations

import asyncio
import contextlib
from collections.abc import AsyncIterator
from typing import Any

import openai
import pytest

from sluice_runtime.api.app import api_app
from sluice_runtime.podconfig import HeldConfig, compile_config
from sluice_runtime.server import bind, listening
from sluice_runtime.state import Identity, Runtime, Settings
from unit.runtime.conformance.conftest import Server, tiny_engine
from unit.runtime.server.support import check, eventually, pod_config
from unit.runtime.server.test_verified import VerifierProcess, running_verifier

DIGEST = "sha256:" + "1" * 64


def under(server: Server, *checks: dict[str, Any], streaming: str = "Verified") -> None:
    config = pod_config(model="tiny", contract=list(checks), streaming=streaming)
    held = compile_config(config | {"scope": {**config["scope"], "isolation": "Public"}})
    assert isinstance(held, HeldConfig)
    server.runtime.local = held


@pytest.fixture
async def own_server() -> AsyncIterator[Server]:
    engine = tiny_engine()
    engine.start()
    runtime = Runtime(Settings("tiny", None, None))
    runtime.become_ready(engine, Identity(DIGEST, DIGEST, DIGEST))
    try:
        async with listening((api_app(runtime), bind("127.0.0.1", 0)), None) as ports:
            yield Server(f"http://127.0.0.1:{ports.api}", engine, runtime)
    finally:
        await asyncio.to_thread(engine.stop)


@pytest.fixture
async def facts() -> AsyncIterator[VerifierProcess]:
    async with running_verifier() as running:
        yield running


def client(server: Server) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(base_url=f"{server.url}/v1", api_key="unused", max_retries=0)


async def told(api: openai.AsyncOpenAI, **more: Any) -> list[str]:
    """Each delta's text. Bytes of UTF-8 lead bytes are likely, so that characters are cut across tokens."""
    options: Any = {"model": "tiny", "messages": [{"role": "user", "content": "你好"}], "seed": 11}
    lead = {str(i): 4.0 for i in range(128, 256)}
    stream = await api.chat.completions.create(
        **options, max_tokens=120, logit_bias=lead, stream=True, extra_body={"ignore_eos": True}, **more
    )
    return [chunk.choices[0].delta.content or "" async for chunk in stream if chunk.choices]


async def test_a_held_answer_is_the_answer(own_server: Server, facts: VerifierProcess) -> None:
    async with client(own_server) as api:
        under(own_server, check("any", "MustMatch", pattern="(?s)^.*$"), streaming="Immediate")
        pieces = [p for p in await told(api) if p]
        assert len(pieces) > 10
        text = "".join(pieces)
        at = len(text) // 2
        stop = text[at : at + 3]
        under(own_server, facts.check("/pass"))
        held = [p for p in await told(api) if p]
        assert held == [text], "one piece, with nothing lost or cut"
        stopped = "".join(await told(api, stop=stop))
        assert stopped == text[: text.index(stop)]
        asked = [(await facts.line())["question"]["answer"] for _ in range(2)]
        assert asked == [text, stopped]


async def test_no_kv_is_held_while_a_verifier_thinks(own_server: Server, facts: VerifierProcess) -> None:
    under(own_server, facts.check("/gate"))
    async with client(own_server) as api:
        asking = asyncio.create_task(told(api))
        await facts.line()
        load = own_server.engine.load()
        assert (load.num_running, load.num_waiting, load.kv_blocks_used) == (0, 0, 0)
        assert not asking.done()
        asking.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await asking
    assert await facts.line() == {"gone": True}
    await eventually(lambda: not own_server.runtime.running)


async def test_a_client_that_leaves_while_it_is_generated(own_server: Server, facts: VerifierProcess) -> None:
    under(own_server, facts.check("/pass"))
    async with client(own_server) as api:
        asking = asyncio.create_task(
            api.chat.completions.create(
                model="tiny",
                messages=[{"role": "user", "content": "x"}],
                max_tokens=1900,
                stream=True,
                extra_body={"ignore_eos": True},
            )
        )
        await eventually(lambda: own_server.engine.load().kv_blocks_used > 0)
        asking.cancel()
        with contextlib.suppress(asyncio.CancelledError):
            await asking
    await eventually(lambda: own_server.engine.load().kv_blocks_used == 0)
    assert await facts.ended() == [], "what nobody waits for is not verified"
