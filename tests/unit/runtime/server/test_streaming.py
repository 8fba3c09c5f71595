"""What a client sees while an answer is generated, and what happens when it leaves or can't keep up."""

from __future__ import annotations

import asyncio
import contextlib
import json
import socket
from collections.abc import AsyncIterator
from pathlib import Path
from typing import Any

import openai
import pytest

from sluice_runtime.engine.types import FinishReason, OutputChunk, PositionLogprobs, TokenLogprob
from sluice_runtime.server import _Protocol
from unit.runtime.server.support import (
    CHAT,
    COMPLETIONS,
    Generation,
    Pod,
    chat_body,
    check,
    events,
    eventually,
    pod_config,
    route_headers,
    running_pod,
    soon,
)


def client(pod: Pod) -> openai.AsyncOpenAI:
    return openai.AsyncOpenAI(
        base_url=f"http://127.0.0.1:{pod.api_port}/v1",
        api_key="unused",
        default_headers=route_headers(),
        max_retries=0,
    )


async def test_stock_client_streams_chinese(pod: Pod) -> None:
    pod.engine.auto = ["你", "好,", "世", "界🌍"]
    async with client(pod) as api:
        stream = await soon(
            api.chat.completions.create(
                model="assistant",
                messages=[{"role": "user", "content": "用中文打招呼"}],
                stream=True,
                stream_options={"include_usage": True},
            )
        )
        chunks = [chunk async for chunk in stream]
    assert "".join(c.choices[0].delta.content or "" for c in chunks if c.choices) == "你好,世界🌍"
    assert chunks[0].choices[0].delta.role == "assistant"
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "stop"
    assert chunks[-1].choices == []
    assert chunks[-1].usage is not None
    assert chunks[-1].usage.completion_tokens == 4
    assert all(c.usage is None for c in chunks[:-1])
    assert len({c.id for c in chunks}) == 1


async def test_stock_client_whole_answers(pod: Pod) -> None:
    pod.engine.auto = ["Bon", "jour"]
    async with client(pod) as api:
        chat = await soon(
            api.chat.completions.create(model="assistant", messages=[{"role": "user", "content": "Hi"}])
        )
        plain = await soon(api.completions.create(model="assistant", prompt="Hi"))
        models = await soon(api.models.list())
    assert chat.choices[0].message.content == "Bonjour"
    assert chat.choices[0].finish_reason == "stop"
    assert chat.usage is not None
    assert chat.usage.total_tokens == chat.usage.prompt_tokens + 2
    assert plain.choices[0].text == "Bonjour"
    assert models.data[0].id == "assistant"


async def test_an_answer_can_be_handed_back_as_dumped(pod: Pod) -> None:
    pod.engine.auto = ["Bonjour"]
    async with client(pod) as api:
        first = await soon(
            api.chat.completions.create(model="assistant", messages=[{"role": "user", "content": "Hi"}])
        )
        history: Any = [{"role": "user", "content": "Hi"}, first.choices[0].message.model_dump()]
        history.append({"role": "user", "content": "again"})
        again = await soon(api.chat.completions.create(model="assistant", messages=history))
    assert again.choices[0].message.content == "Bonjour"


async def test_stock_client_raises_its_own_errors(pod: Pod) -> None:
    async with client(pod) as api:
        with pytest.raises(openai.BadRequestError) as bad:
            await api.chat.completions.create(
                model="assistant", messages=[{"role": "user", "content": "x"}], max_tokens=0
            )
        assert bad.value.param == "max_tokens"
        pod.engine.full = True
        with pytest.raises(openai.RateLimitError) as full:
            await api.chat.completions.create(model="assistant", messages=[{"role": "user", "content": "x"}])
        assert full.value.code == "queue_full"


async def test_no_usage_unless_asked_for(pod: Pod) -> None:
    pod.engine.auto = ["a", "b"]
    for body in (chat_body(stream=True), chat_body(stream=True, stream_options={"include_usage": False})):
        found = events((await pod.post(body)).text)
        assert found[-1] == "[DONE]"
        assert all("usage" not in event and event["choices"] for event in found[:-1])


async def test_plain_completions_stream(pod: Pod) -> None:
    pod.engine.auto = ["a", "", "b"]
    body = {"model": "assistant", "prompt": "x", "stream": True, "stream_options": {"include_usage": True}}
    found = events((await pod.post(body, COMPLETIONS)).text)
    assert found[-1] == "[DONE]"
    assert found[-2]["choices"] == []
    assert found[-2]["usage"]["completion_tokens"] == 3
    assert [e["choices"][0]["text"] for e in found[:-2]] == ["a", "b", ""]
    assert [e["choices"][0]["finish_reason"] for e in found[:-2]] == [None, None, "stop"]


async def test_truncated_answers_say_so(pod: Pod) -> None:
    pod.engine.auto, pod.engine.auto_finish = ["a"], FinishReason.LENGTH
    reply = await pod.post(chat_body(max_tokens=1))
    assert reply.json()["choices"][0]["finish_reason"] == "length"
    assert (await pod.record())["outcome"] == "truncated"


async def test_logprobs(pod: Pod) -> None:
    chosen = TokenLogprob(7, "é", -0.5, "é".encode())
    position = PositionLogprobs(chosen, (chosen, TokenLogprob(8, "b", -9999.0, b"b")))
    request = asyncio.create_task(pod.post(chat_body(logprobs=True, top_logprobs=2)))
    generation = await pod.engine.next()
    assert generation.request.sampling.logprobs == 2
    generation.token("é", FinishReason.STOP, logprobs=(position,))
    content = (await request).json()["choices"][0]["logprobs"]["content"]
    assert content[0]["bytes"] == [0xC3, 0xA9]
    assert [t["logprob"] for t in content[0]["top_logprobs"]] == [-0.5, -9999.0]
    request = asyncio.create_task(
        pod.post({"model": "assistant", "prompt": "x", "logprobs": 2, "stream": True}, COMPLETIONS)
    )
    generation = await pod.engine.next()
    generation.token("é", logprobs=(position,))
    generation.token("é", FinishReason.STOP, logprobs=(position,))
    found = events((await request).text)
    assert [e["choices"][0]["logprobs"]["text_offset"] for e in found[:2]] == [[0], [1]]


async def test_offsets_are_those_of_the_text(pod: Pod) -> None:
    """A character that is cut, and a token that is no text, take no place of their own."""

    def position(data: bytes, text: str) -> PositionLogprobs:
        return PositionLogprobs(TokenLogprob(7, text, -2.0, data), (TokenLogprob(8, "b", -0.5, b"b"),))

    pieces = [b"a", "北".encode()[:2], "北".encode()[2:], b"", "😀!".encode(), b"z"]
    tokens = [position(data, data.decode("utf-8", "replace") or "<|end|>") for data in pieces]
    texts = ["a", "", "北", "", "😀!", "z"]
    for stream in (False, True):
        body = {"model": "assistant", "prompt": "x", "logprobs": 1, "stream": stream}
        request = asyncio.create_task(pod.post(body, COMPLETIONS))
        generation = await pod.engine.next()
        for i, (text, token) in enumerate(zip(texts, tokens, strict=True)):
            generation.token(text, FinishReason.STOP if i == 5 else None, logprobs=(token,))
        reply = await request
        told = [reply.json()] if not stream else events(reply.text)[:-1]
        found = [e["choices"][0]["logprobs"] for e in told]
        assert [o for f in found if f for o in f["text_offset"]] == [0, 1, 1, 2, 2, 4]
        best = [top for f in found if f for top in f["top_logprobs"]]
        assert best[0] == {"b": -0.5, "a": -2.0}, "the one that was drawn is told too"
        assert all(len(top) == 2 for top in best)


class RawClient:
    """A client at the level of bytes, to see what comes when, and to leave without a word."""

    def __init__(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.reader, self.writer = reader, writer

    async def send(self, body: dict[str, Any], path: str = CHAT) -> None:
        data = json.dumps(body).encode()
        headers = {**route_headers(), "host": "pod", "content-type": "application/json"}
        lines = [f"POST {path} HTTP/1.1", *(f"{k}: {v}" for k, v in headers.items())]
        self.writer.write("\r\n".join([*lines, f"content-length: {len(data)}", "", ""]).encode() + data)
        await self.writer.drain()

    async def until(self, marker: bytes) -> bytes:
        data: bytes = await soon(self.reader.readuntil(marker))
        return data


@contextlib.asynccontextmanager
async def raw_client(pod: Pod, receive_buffer: int | None = None) -> AsyncIterator[RawClient]:
    sock = socket.socket()
    if receive_buffer is not None:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, receive_buffer)
    sock.setblocking(False)
    await asyncio.get_running_loop().sock_connect(sock, ("127.0.0.1", pod.api_port))
    reader, writer = await asyncio.open_connection(sock=sock, limit=2**16)
    try:
        yield RawClient(reader, writer)
    finally:
        writer.close()


async def test_no_header_before_the_first_token(pod: Pod) -> None:
    async with raw_client(pod) as raw:
        await raw.send(chat_body(stream=True))
        generation = await pod.engine.next()
        # The pod answers others meanwhile: it is not merely slow.
        assert (await soon(pod.api.get("/readyz"))).status_code == 200
        peek = asyncio.create_task(raw.reader.read(1))
        await asyncio.sleep(0)
        assert not peek.done()
        generation.token("first")
        assert await soon(peek) == b"H"
        head = await raw.until(b"first")
        assert b"200 OK" in head
        generation.token("second", FinishReason.STOP)
        await raw.until(b"[DONE]")


async def test_each_token_is_sent_at_once(pod: Pod) -> None:
    async with raw_client(pod) as raw:
        await raw.send(chat_body(stream=True))
        generation = await pod.engine.next()
        for word in ("uno", "dos", "tres"):
            generation.token(word)
            await raw.until(word.encode())


@pytest.mark.parametrize("stream", [True, False])
@pytest.mark.parametrize("after_first_token", [True, False])
async def test_a_client_that_leaves_is_cancelled(pod: Pod, stream: bool, after_first_token: bool) -> None:
    async with raw_client(pod) as raw:
        await raw.send(chat_body(stream=stream))
        generation = await pod.engine.next()
        if after_first_token:
            generation.token("first")
            if stream:
                await raw.until(b"first")
            else:
                await eventually(lambda: bool(pod.runtime.heartbeat()["running"][0]["first_token"]))
        assert not generation.cancelled.is_set()
    await soon(generation.cancelled.wait())
    record = await pod.record()
    assert (record["outcome"], record["status"], record["final"]) == ("cancelled", 499, True)
    assert record["tokens"] == {
        "prompt": record["tokens"]["prompt"],
        "cached": 0,
        "output": int(after_first_token),
        "guessed": 0,
        "accepted": 0,
    }
    assert record["tokens"]["prompt"] > 0
    assert (record["timing"]["ttft_s"] is not None) == after_first_token
    assert pod.runtime.running == {}
    assert len(pod.records()) == 1


async def test_tokens_do_not_wait_for_acknowledgements(pod: Pod, monkeypatch: pytest.MonkeyPatch) -> None:
    no_delay = []
    made = _Protocol.connection_made

    def connection_made(self: _Protocol, transport: asyncio.Transport) -> None:
        sock = transport.get_extra_info("socket")
        no_delay.append(sock.getsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY))
        made(self, transport)

    monkeypatch.setattr(_Protocol, "connection_made", connection_made)
    async with raw_client(pod) as raw:
        pod.engine.auto = ["x"]
        await raw.send(chat_body())
        await raw.until(b"200 OK")
    assert no_delay
    assert all(no_delay)


async def test_a_client_that_leaves_in_its_own_body(pod: Pod) -> None:
    async with raw_client(pod) as raw:
        head = "".join(f"{k}: {v}\r\n" for k, v in route_headers().items())
        raw.writer.write(
            f"POST {CHAT} HTTP/1.1\r\nhost: x\r\ncontent-type: application/json\r\n{head}"
            "content-length: 100\r\n\r\n{".encode()
        )
        await raw.writer.drain()
        await eventually(lambda: bool(pod.runtime.running))
    assert (await pod.record())["outcome"] == "cancelled"


async def test_an_error_after_the_first_token_ends_the_stream_marked(pod: Pod) -> None:
    request = asyncio.create_task(pod.post(chat_body(stream=True)))
    generation = await pod.engine.next()
    generation.token("first")
    generation.fail("the device fell over")
    found = events((await request).text)
    assert found[-1]["error"]["code"] == "engine_error"
    assert found[-1]["incomplete"] is True
    assert "[DONE]" not in found
    assert all(e["choices"][0]["finish_reason"] is None for e in found[:-1])
    record = await pod.record()
    assert (record["outcome"], record["status"]) == ("error", 200)


async def test_stock_client_sees_an_error_in_the_stream(pod: Pod) -> None:
    async with client(pod) as api:
        opening = asyncio.create_task(
            api.chat.completions.create(
                model="assistant", messages=[{"role": "user", "content": "x"}], stream=True
            )
        )
        generation = await pod.engine.next()
        generation.token("first")
        stream = await soon(opening)
        generation.fail()
        with pytest.raises(openai.APIError):
            async for _ in stream:
                pass


async def test_a_broken_engine_iterator_is_a_500(pod: Pod) -> None:
    class Trap(OutputChunk):
        @property
        def text(self) -> str:
            raise KeyError("secret prompt text")

    request = asyncio.create_task(pod.post(chat_body()))
    generation = await pod.engine.next()
    generation.chunks.put_nowait(object.__new__(Trap))
    reply = await request
    assert reply.status_code == 500
    assert "secret" not in reply.text
    assert (await pod.record())["outcome"] == "error"
    assert generation.cancelled.is_set()


async def test_a_slow_reader_is_dropped_and_its_memory_bounded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    lost = asyncio.Event()
    monkeypatch.setattr("sluice_runtime.server._Protocol.connection_lost", lambda *_: lost.set())
    async with running_pod(tmp_path, slow_reader_s=0.3) as pod, raw_client(pod, receive_buffer=4096) as raw:
        await raw.send(chat_body(stream=True))
        generation: Generation = await pod.engine.next()
        for _ in range(400):  # 40 MB: more than any socket buffer takes
            generation.token("x" * 100_000)
        await soon(generation.cancelled.wait())
        record = await pod.record()
        assert (record["outcome"], record["status"]) == ("cancelled", 499)
        assert generation.chunks.qsize() > 0  # it was not read ahead of its reader
        assert pod.runtime.running == {}
        # Its connection is gone although it never took what was written to it.
        await soon(lost.wait())


async def test_everything_is_counted_exactly_once(pod: Pod) -> None:
    pod.engine.auto = ["a", "b"]
    for stream in (True, False):
        await pod.post(chat_body(stream=stream))
    await pod.post(chat_body(n=0))
    pod.engine.auto = None
    async with raw_client(pod) as raw:
        await raw.send(chat_body(stream=True))
        await pod.engine.next()
        await pod.engine.next()
        generation = await pod.engine.next()
        generation.token("x")
        await raw.until(b"x")
    await soon(generation.cancelled.wait())
    pod.engine.auto = ["last"]
    await pod.post(chat_body(), headers={**route_headers(), "x-request-id": "last"})
    records = pod.records()
    assert [r["outcome"] for r in records] == ["ok", "ok", "rejected", "cancelled", "ok"]
    assert records[-1]["request_id"] == "last"
    metrics = pod.runtime.metrics.render().decode()
    assert metrics.count("sluice_requests_total{") == 3
    route = 'arm="candidate",mirror="false",policy="prod/assistant",rule="default"'
    assert f"sluice_output_tokens_total{{{route}}} 6.0" in metrics


async def test_a_request_keeps_the_configuration_it_started_with(pod: Pod) -> None:
    forbid = [check("no-paris", "MustNotMatch", pattern="Paris")]
    request = asyncio.create_task(pod.post(chat_body()))
    generation = await pod.engine.next()
    await pod.hold(pod_config("v2", contract=forbid))
    generation.answer("Paris")
    assert (await request).status_code == 200
    assert (await pod.record())["config"] == "v1"
    violating = asyncio.create_task(pod.post(chat_body(), headers=route_headers("v2")))
    (await pod.engine.next()).answer("Paris")
    assert (await violating).status_code == 502
    assert (await pod.record(2))["config"] == "v2"


async def test_sampling_defaults_come_from_the_configuration(pod: Pod) -> None:
    pod.engine.auto = ["ok"]
    await pod.post(chat_body())
    sampling = (await pod.engine.next()).request.sampling
    assert (sampling.temperature, sampling.top_p) == (1.0, 1.0)
    await pod.hold(pod_config(sampling={"temperature": 0.2, "topP": 0.9, "maxTokens": 11}))
    await pod.post(chat_body())
    sampling = (await pod.engine.next()).request.sampling
    assert (sampling.temperature, sampling.top_p, sampling.max_tokens) == (0.2, 0.9, 11)
    await pod.post(chat_body(temperature=0, top_p=0.5, max_tokens=3, stop="x", seed=4, logit_bias={"5": -1}))
    sampling = (await pod.engine.next()).request.sampling
    assert (sampling.temperature, sampling.top_p, sampling.max_tokens) == (0, 0.5, 3)
    assert (sampling.stop, sampling.seed, dict(sampling.logit_bias)) == (("x",), 4, {5: -1})


async def test_prefix_cache_switch(pod: Pod) -> None:
    pod.engine.auto = ["ok"]
    await pod.post(chat_body())
    assert (await pod.engine.next()).request.prefix_cache is True
    await pod.hold(pod_config(features={"prefixCache": False}))
    await pod.post(chat_body())
    assert (await pod.engine.next()).request.prefix_cache is False


async def test_the_same_gateway_id_twice_at_once(pod: Pod) -> None:
    """A mirror or a retry carries the same x-request-id: the engine must see two requests."""
    requests = [asyncio.create_task(pod.post(chat_body())) for _ in range(2)]
    first, second = await pod.engine.next(), await pod.engine.next()
    assert first.request.request_id != second.request.request_id
    first.answer("a")
    second.answer("b")
    answers = {(await r).json()["choices"][0]["message"]["content"] for r in requests}
    assert answers == {"a", "b"}
    assert {r["request_id"] for r in pod.records()} == {"req-1"}
