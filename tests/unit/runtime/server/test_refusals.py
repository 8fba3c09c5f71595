"""Each kind of bad request gets its own 4xx in OpenAI's shape, and costs nothing but itself."""

from __future__ import annotations

import asyncio
import json
from pathlib import Path
from typing import Any

import pytest

from sluice_runtime.engine.types import FinishReason, OutputChunk
from unit.runtime.server.support import (
    CHAT,
    COMPLETIONS,
    Pod,
    chat_body,
    pod_config,
    route_headers,
    running_pod,
    soon,
    timing,
)

CALL: dict[str, Any] = {"id": "call_1", "type": "function", "function": {"name": "f", "arguments": "{}"}}
TOOL: dict[str, Any] = {"type": "function", "function": {"name": "f"}}


def _format(schema: dict[str, Any]) -> dict[str, Any]:
    return {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}


ODD_CHATS: dict[str, tuple[dict[str, Any], str | None, str | None]] = {
    "no messages": ({"messages": []}, "messages", "invalid_value"),
    "messages null": ({"messages": None}, "messages", "invalid_value"),
    "messages a string": ({"messages": "hi"}, "messages", "invalid_value"),
    "role unknown": ({"messages": [{"role": "robot", "content": "x"}]}, "messages[0].role", "invalid_value"),
    "role missing": ({"messages": [{"content": "x"}]}, "messages[0].role", "missing_required_parameter"),
    "content missing": (
        {"messages": [{"role": "user"}]},
        "messages[0].content",
        "missing_required_parameter",
    ),
    "content null": (
        {"messages": [{"role": "user", "content": None}]},
        "messages[0].content",
        "invalid_value",
    ),
    "content number": (
        {"messages": [{"role": "user", "content": 3}]},
        "messages[0].content",
        "invalid_value",
    ),
    "content no parts": (
        {"messages": [{"role": "user", "content": []}]},
        "messages[0].content",
        "invalid_value",
    ),
    "image part": (
        {"messages": [{"role": "user", "content": [{"type": "image_url", "image_url": {"url": "x"}}]}]},
        "messages[0].content[0].type",
        "invalid_value",
    ),
    "tool call": (
        {"messages": [{"role": "assistant", "content": "x", "tool_calls": [{"id": "1"}]}]},
        "messages[0].tool_calls[0].type",
        "missing_required_parameter",
    ),
    "tool calls of a user": (
        {"messages": [{"role": "user", "content": "x", "tool_calls": [CALL]}]},
        "messages[0].tool_calls",
        "invalid_value",
    ),
    "a result without a call": (
        {"messages": [{"role": "tool", "content": "x", "tool_call_id": "call_1"}]},
        "messages[0].tool_call_id",
        "invalid_value",
    ),
    "a result of another call": (
        {
            "messages": [
                {"role": "assistant", "content": None, "tool_calls": [CALL]},
                {"role": "tool", "content": "x", "tool_call_id": "call_2"},
            ]
        },
        "messages[1].tool_call_id",
        "invalid_value",
    ),
    "a result of nothing": (
        {"messages": [{"role": "tool", "content": "x"}]},
        "messages[0].tool_call_id",
        "invalid_value",
    ),
    "model null": ({"model": None}, "model", "invalid_value"),
    "model empty": ({"model": ""}, "model", "invalid_value"),
    "model too long": ({"model": "m" * 513}, "model", "invalid_value"),
    "max_tokens 0": ({"max_tokens": 0}, "max_tokens", "invalid_value"),
    "max_tokens negative": ({"max_tokens": -1}, "max_tokens", "invalid_value"),
    "max_tokens a string": ({"max_tokens": "5"}, "max_tokens", "invalid_value"),
    "max_tokens a float": ({"max_tokens": 5.5}, "max_tokens", "invalid_value"),
    "max_tokens true": ({"max_tokens": True}, "max_tokens", "invalid_value"),
    "max_completion_tokens 0": ({"max_completion_tokens": 0}, "max_completion_tokens", "invalid_value"),
    "both maxima": ({"max_tokens": 1, "max_completion_tokens": 2}, "max_tokens", "invalid_value"),
    "max_tokens beyond the context": ({"max_tokens": 1000}, "max_tokens", "context_length_exceeded"),
    "temperature negative": ({"temperature": -0.1}, "temperature", "invalid_value"),
    "temperature above 2": ({"temperature": 2.1}, "temperature", "invalid_value"),
    "temperature a list": ({"temperature": [1]}, "temperature", "invalid_value"),
    "top_p negative": ({"top_p": -0.01}, "top_p", "invalid_value"),
    "top_p above 1": ({"top_p": 1.01}, "top_p", "invalid_value"),
    "top_k negative": ({"top_k": -2}, "top_k", "invalid_value"),
    "min_p above 1": ({"min_p": 1.5}, "min_p", "invalid_value"),
    "presence_penalty": ({"presence_penalty": 2.5}, "presence_penalty", "invalid_value"),
    "frequency_penalty": ({"frequency_penalty": -2.5}, "frequency_penalty", "invalid_value"),
    "five stops": ({"stop": ["a", "b", "c", "d", "e"]}, "stop", "invalid_value"),
    "empty stop": ({"stop": ""}, "stop", "invalid_value"),
    "stop a number": ({"stop": 3}, "stop", "invalid_value"),
    "seed too large": ({"seed": 2**63}, "seed", "invalid_value"),
    "seed a string": ({"seed": "1"}, "seed", "invalid_value"),
    "bias out of range": ({"logit_bias": {"1": 101}}, "logit_bias", "invalid_value"),
    "bias of a word": ({"logit_bias": {"cat": 1}}, "logit_bias", "invalid_value"),
    "bias beyond the vocabulary": ({"logit_bias": {"60000": 1}}, "logit_bias", "invalid_value"),
    "top_logprobs alone": ({"top_logprobs": 3}, "top_logprobs", "invalid_value"),
    "top_logprobs 21": ({"logprobs": True, "top_logprobs": 21}, "top_logprobs", "invalid_value"),
    "logprobs a number": ({"logprobs": 5}, "logprobs", "invalid_value"),
    "repetition_penalty 0": ({"repetition_penalty": 0}, "repetition_penalty", "invalid_value"),
    "repetition_penalty 11": ({"repetition_penalty": 11}, "repetition_penalty", "invalid_value"),
    "n 17": ({"n": 17}, "n", "invalid_value"),
    "n 0": ({"n": 0}, "n", "invalid_value"),
    "stream a string": ({"stream": "yes"}, "stream", "invalid_value"),
    "stream_options unstreamed": ({"stream_options": {"include_usage": True}}, "stream_options", None),
    "tool without a function": (
        {"tools": [{"type": "function"}]},
        "tools[0].function",
        "missing_required_parameter",
    ),
    "tool of another kind": (
        {"tools": [{"type": "custom", "function": {"name": "f"}}]},
        "tools[0].type",
        "invalid_value",
    ),
    "no tools": ({"tools": [], "tool_choice": "auto"}, "tool_choice", "invalid_value"),
    "tool with an odd name": (
        {"tools": [{"type": "function", "function": {"name": 'f"'}}]},
        "tools[0].function.name",
        "invalid_value",
    ),
    "two tools of a name": ({"tools": [TOOL, TOOL]}, "tools[1].function.name", "invalid_value"),
    "tool with arguments that are no object": (
        {"tools": [{"type": "function", "function": {"name": "f", "parameters": {"type": "array"}}}]},
        "tools[0].function.parameters",
        "invalid_value",
    ),
    "tool_choice without tools": ({"tool_choice": "required"}, "tool_choice", "invalid_value"),
    "tool_choice of no tool": (
        {"tools": [TOOL], "tool_choice": {"type": "function", "function": {"name": "g"}}},
        "tool_choice.function.name",
        "invalid_value",
    ),
    "tool_choice odd": ({"tools": [TOOL], "tool_choice": "maybe"}, "tool_choice", "invalid_value"),
    "functions": ({"functions": [{"name": "f"}]}, "functions", "unsupported_parameter"),
    "json schema without a name": (
        {"response_format": {"type": "json_schema", "json_schema": {}}},
        "response_format.json_schema.name",
        "missing_required_parameter",
    ),
    "json schema without itself": (
        {"response_format": {"type": "json_schema"}},
        "response_format.json_schema",
        "invalid_value",
    ),
    "json schema that is none": (
        {"response_format": _format({"type": "nothing"})},
        "response_format.json_schema.schema",
        "invalid_value",
    ),
    "json schema that counts too far": (
        {"response_format": _format({"type": "array", "minItems": 100_000})},
        "response_format.json_schema.schema",
        "invalid_value",
    ),
    "json schema with an odd pattern": (
        {"response_format": _format({"type": "string", "pattern": "("})},
        "response_format.json_schema.schema",
        "invalid_value",
    ),
    "json schema of an odd dialect": (
        {"response_format": _format({"$schema": 5})},
        "response_format.json_schema.schema",
        "invalid_value",
    ),
    "json schema that refers to none": (
        {"response_format": _format({"$ref": "#/x", "x": {"required": 5}})},
        "response_format.json_schema.schema",
        "invalid_value",
    ),
    "json schema with a number that no float holds": (
        {"response_format": _format({"const": 2**60 + 1})},
        "response_format.json_schema.schema",
        "invalid_value",
    ),
    "form of another kind": ({"response_format": {"type": "xml"}}, "response_format.type", "invalid_value"),
    "a form without end": (
        {"response_format": {"type": "json_object"}, "ignore_eos": True},
        "ignore_eos",
        "invalid_value",
    ),
    "chat template": ({"chat_template": "{{ evil }}"}, "chat_template", "unsupported_parameter"),
    "template arguments": (
        {"chat_template_kwargs": {"a": 1}},
        "chat_template_kwargs",
        "unsupported_parameter",
    ),
    "cache salt": ({"cache_salt": "other-tenant"}, "cache_salt", "unsupported_parameter"),
    "unknown field": ({"temprature": 1}, "temprature", "unknown_parameter"),
}


def assert_error(reply: Any, status: int, param: str | None, code: str | None) -> dict[str, Any]:
    assert reply.status_code == status, reply.text
    assert reply.headers["content-type"] == "application/json"
    body = reply.json()
    assert set(body) == {"error"}
    error: dict[str, Any] = body["error"]
    assert set(error) == {"message", "type", "param", "code"}
    assert error["message"]
    assert isinstance(error["type"], str)
    assert (error["param"], error["code"]) == (param, code), error
    return error


async def test_odd_chats(pod: Pod) -> None:
    for name, (change, param, code) in ODD_CHATS.items():
        reply = await pod.post(chat_body(**change))
        assert reply.status_code == 400, name
        error = reply.json()["error"]
        assert (error["param"], error["code"]) == (param, code), (name, error)
        assert_error(reply, 400, param, code)
    # Every one of them is on record as the client's fault, and the pod serves on.
    records = pod.records()
    assert len(records) == len(ODD_CHATS)
    assert {(r["outcome"], r["status"], r["final"]) for r in records} == {("rejected", 400, True)}
    assert pod.engine.generations == {}
    pod.engine.auto = ["fine"]
    assert (await pod.post(chat_body())).status_code == 200


@pytest.mark.parametrize(
    ("change", "param"),
    [
        ({"prompt": ""}, "prompt"),
        ({"prompt": []}, "prompt"),
        ({"prompt": [""]}, "prompt"),
        ({"prompt": ["a", "b"]}, "prompt"),
        ({"prompt": [1, "a"]}, "prompt"),
        ({"prompt": [-1]}, "prompt[0]"),
        ({"prompt": [[]]}, "prompt"),
        ({"prompt": None}, "prompt"),
        ({"prompt": 5}, "prompt"),
        ({"prompt": "x", "logprobs": 6}, "logprobs"),
        ({"prompt": "x", "best_of": 2}, "best_of"),
        ({"prompt": "x", "echo": True}, "echo"),
        ({"prompt": "x", "suffix": "y"}, "suffix"),
        ({"prompt": "x", "max_tokens": 0}, "max_tokens"),
        ({"prompt": "x", "messages": []}, "messages"),
    ],
)
async def test_odd_completions(pod: Pod, change: dict[str, Any], param: str) -> None:
    reply = await pod.post({"model": "assistant", **change}, COMPLETIONS)
    assert reply.status_code == 400, reply.text
    assert str(reply.json()["error"]["param"]).startswith(param), reply.text


@pytest.mark.parametrize(
    "change",
    [
        {"temperature": None, "stop": None, "tools": None, "n": None, "seed": None, "logit_bias": None},
        {"n": 1, "response_format": {"type": "text"}, "tool_choice": "none", "parallel_tool_calls": True},
        {"user": "u", "metadata": {"a": "b"}, "store": False, "service_tier": "auto"},
        {"top_p": 0, "top_k": -1},
        {"temperature": 0, "top_p": 1, "stop": ["a"], "seed": -1, "max_completion_tokens": 3},
        {"messages": [{"role": "developer", "content": "d"}, {"role": "user", "content": "x", "name": "me"}]},
        {
            "messages": [
                {"role": "user", "content": [{"type": "text", "text": "a"}, {"type": "text", "text": "b"}]}
            ]
        },
    ],
)
async def test_what_the_stock_clients_send_is_taken(pod: Pod, change: dict[str, Any]) -> None:
    pod.engine.auto = ["ok"]
    reply = await pod.post(chat_body(**change))
    assert reply.status_code == 200, reply.text


@pytest.mark.parametrize(
    "data",
    [
        b"",
        b"{",
        b"nonsense",
        b'{"model": "assistant", "messages": NaN}',
        b'{"model": "\xff"}',
        b'{"model": "assistant", "messages": [{"role": "user", "content": "\\ud800"}]}',
        b"[" * 100_000,
        b'{"seed": ' + b"9" * 5000 + b"}",
    ],
)
async def test_what_is_not_json(pod: Pod, data: bytes) -> None:
    headers = {**route_headers(), "content-type": "application/json"}
    reply = await soon(pod.api.post(CHAT, content=data, headers=headers))
    assert_error(reply, 400, None, "invalid_json")


@pytest.mark.parametrize("data", [b"[]", b"null", b'"x"', b"3"])
async def test_json_that_is_no_object(pod: Pod, data: bytes) -> None:
    headers = {**route_headers(), "content-type": "application/json"}
    reply = await soon(pod.api.post(CHAT, content=data, headers=headers))
    assert_error(reply, 400, None, None)


@pytest.mark.parametrize("kind", ["text/plain", "application/x-www-form-urlencoded", ""])
async def test_wrong_content_type(pod: Pod, kind: str) -> None:
    headers = {**route_headers(), "content-type": kind}
    reply = await soon(pod.api.post(CHAT, content=b"{}", headers=headers))
    assert_error(reply, 415, None, "unsupported_media_type")


async def test_any_charset_is_taken(pod: Pod) -> None:
    pod.engine.auto = ["ok"]
    headers = {**route_headers(), "content-type": "application/json; charset=utf-8"}
    reply = await soon(pod.api.post(CHAT, content=json.dumps(chat_body()), headers=headers))
    assert reply.status_code == 200


async def test_unknown_paths_and_methods(pod: Pod) -> None:
    reply = await soon(pod.api.get("/v1/nothing"))
    assert_error(reply, 404, None, "unknown_url")
    reply = await soon(pod.api.get(CHAT))
    assert_error(reply, 405, None, "method_not_allowed")
    assert reply.headers["allow"] == "POST"
    reply = await soon(pod.api.delete("/v1/models"))
    assert_error(reply, 405, None, "method_not_allowed")


async def test_not_even_http(pod: Pod) -> None:
    import asyncio

    reader, writer = await asyncio.open_connection("127.0.0.1", pod.api_port)
    writer.write(b"HELLO\x00 nonsense\r\n\r\n")
    answer = await soon(reader.read())
    writer.close()
    head, _, body = answer.partition(b"\r\n\r\n")
    assert head.startswith(b"HTTP/1.1 400")
    assert json.loads(body)["error"]["code"] == "invalid_http"


@pytest.mark.parametrize("chunked", [False, True])
async def test_body_too_large(tmp_path: Path, chunked: bool) -> None:
    async with running_pod(tmp_path, body_limit=1000) as pod:
        data = json.dumps(chat_body(user="x" * 2000)).encode()

        async def pieces() -> Any:
            yield data[:900]
            yield data[900:]

        headers = {**route_headers(), "content-type": "application/json"}
        reply = await soon(pod.api.post(CHAT, content=pieces() if chunked else data, headers=headers))
        assert_error(reply, 413, None, "request_too_large")
        assert (await pod.record())["outcome"] == "rejected"


@pytest.mark.parametrize("credential", ["", "wrong", "gateway-secret2"])
async def test_credential(pod: Pod, credential: str) -> None:
    for path in (CHAT, COMPLETIONS):
        reply = await pod.post(chat_body(), path, route_headers(credential=credential))
        assert_error(reply, 401, None, "invalid_credential")
    reply = await soon(pod.api.get("/v1/models", headers=route_headers(credential=credential)))
    assert_error(reply, 401, None, "invalid_credential")
    assert pod.records() == []


async def test_configuration_not_held(pod: Pod) -> None:
    for config in ("v2", ""):
        reply = await pod.post(chat_body(), headers=route_headers(config=config))
        assert_error(reply, 503, None, "config_unknown")
        assert reply.headers["retry-after"]
    assert [(r["outcome"], r["config"]) for r in pod.records()] == [("error", "v2"), ("error", "")]


async def test_incomplete_context(pod: Pod) -> None:
    for change in ({"arm": ""}, {"arm": "blue"}, {"policy": ""}, {"rule": ""}):
        reply = await pod.post(chat_body(), headers=route_headers(**change))
        assert_error(reply, 400, None, "invalid_context")
    assert pod.records() == []


async def test_model_not_found(pod: Pod) -> None:
    reply = await pod.post(chat_body(model="gpt-9"))
    error = assert_error(reply, 404, "model", "model_not_found")
    assert "gpt-9" in error["message"]


async def test_queue_full(pod: Pod) -> None:
    pod.engine.full = True
    reply = await pod.post(chat_body())
    assert_error(reply, 429, None, "queue_full")
    assert int(reply.headers["retry-after"]) >= 1
    record = await pod.record()
    assert (record["outcome"], record["status"]) == ("rejected", 429)


@pytest.mark.parametrize("n", [1, 3])
@pytest.mark.parametrize("stream", [False, True])
@pytest.mark.parametrize("streaming", ["Immediate", "Draft", "Verified"])
async def test_a_place_in_the_queue_that_is_lost_later_is_the_same_refusal(
    pod: Pod, streaming: str, stream: bool, n: int
) -> None:
    await pod.hold(pod_config(streaming=streaming))
    asked = asyncio.create_task(pod.post(chat_body(stream=stream, n=n)))
    generation = await pod.engine.next()
    generation.chunks.put_nowait(OutputChunk("", (), finish_reason=FinishReason.REFUSED, timing=timing()))
    reply = await asked
    assert_error(reply, 429, None, "queue_full")
    assert int(reply.headers["retry-after"]) >= 1
    record = await pod.record()
    assert (record["outcome"], record["status"], record["tokens"]["output"]) == ("rejected", 429, 0)
    assert len(pod.engine.generations) == 1, "what comes after a first token is not asked for"
    assert pod.runtime.running == {}


async def test_context_length_counts(pod: Pod) -> None:
    body: dict[str, Any] = {"model": "assistant", "prompt": [1] * 990, "max_tokens": 20}
    error = assert_error(await pod.post(body, COMPLETIONS), 400, "max_tokens", "context_length_exceeded")
    assert "1000 tokens" in error["message"]
    assert "1010 tokens" in error["message"]
    assert "990 in the prompt" in error["message"]
    body = {"model": "assistant", "prompt": [1] * 1000}
    error = assert_error(await pod.post(body, COMPLETIONS), 400, "prompt", "context_length_exceeded")
    assert "resulted in 1000 tokens" in error["message"]
    reply = await pod.post(chat_body(messages=[{"role": "user", "content": "x" * 100_000}]))
    assert_error(reply, 400, "messages", "context_length_exceeded")


async def test_caps_of_the_configuration(pod: Pod) -> None:
    await pod.hold(pod_config(caps={"maxInputTokens": 5, "maxOutputTokens": 7}, sampling={"maxTokens": 100}))
    body: dict[str, Any] = {"model": "assistant", "prompt": [1] * 6}
    error = assert_error(await pod.post(body, COMPLETIONS), 400, "prompt", "context_length_exceeded")
    assert "6 tokens" in error["message"]
    body = {"model": "assistant", "prompt": [1], "max_tokens": 8}
    assert_error(await pod.post(body, COMPLETIONS), 400, "max_tokens", "invalid_value")
    pod.engine.auto, pod.engine.auto_finish = ["x"], FinishReason.LENGTH
    assert (await pod.post({"model": "assistant", "prompt": [1]}, COMPLETIONS)).status_code == 200
    assert (await pod.engine.next()).request.sampling.max_tokens == 7


async def test_engine_errors_before_the_first_token(pod: Pod) -> None:
    import asyncio

    for stream in (False, True):
        request = asyncio.create_task(pod.post(chat_body(stream=stream)))
        (await pod.engine.next()).fail("numerical trouble")
        error = assert_error(await request, 500, None, "engine_error")
        assert error["message"] == "numerical trouble"
    assert {(r["outcome"], r["status"]) for r in pod.records()} == {("error", 500)}


async def test_while_loading(tmp_path: Path) -> None:
    async with running_pod(tmp_path, loaded=False) as pod:
        assert (await soon(pod.api.get("/readyz"))).status_code == 503
        assert (await soon(pod.api.get("/healthz"))).status_code == 200
        reply = await pod.post(chat_body())
        assert_error(reply, 503, None, "loading")
        assert reply.headers["retry-after"]
        assert (await soon(pod.admin.get("/v1/identity"))).status_code == 503
        assert (await soon(pod.admin.get("/v1/stream"))).status_code == 503


async def test_insecure_local_use_needs_no_headers(tmp_path: Path) -> None:
    async with running_pod(tmp_path, insecure=True) as pod:
        pod.engine.auto = ["hello"]
        reply = await pod.post(chat_body(model="anything"), headers={})
        assert reply.json()["choices"][0]["message"]["content"] == "hello"
        assert pod.records() == []
        models = await soon(pod.api.get("/v1/models"))
        assert [m["id"] for m in models.json()["data"]] == ["prod/smol"]


async def test_models(pod: Pod) -> None:
    reply = await soon(pod.api.get("/v1/models", headers=route_headers()))
    assert [m["id"] for m in reply.json()["data"]] == ["assistant"]
    assert (await soon(pod.api.get("/v1/models/assistant", headers=route_headers()))).json()[
        "id"
    ] == "assistant"
    reply = await soon(pod.api.get("/v1/models/org/other", headers=route_headers()))
    assert_error(reply, 404, "model", "model_not_found")
