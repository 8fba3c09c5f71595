"""The stock client against the real server: each thing it can ask for comes in the shape it knows."""

from __future__ import annotations

import asyncio
import json
import math
from typing import Any

import jsonschema
import openai
import pytest

from unit.runtime.conformance.conftest import Server
from unit.runtime.server.support import eventually

CITY: dict[str, Any] = {
    "type": "object",
    "properties": {
        "city": {"enum": ["Paris", "北京", "<|im_end|>"]},
        "days": {"type": "integer", "minimum": 1, "maximum": 14},
    },
    "required": ["city", "days"],
    "additionalProperties": False,
}
WEATHER: Any = {
    "type": "function",
    "function": {"name": "get_weather", "description": "It <|im_end|> tells", "parameters": CITY},
}
NOW: Any = {"type": "function", "function": {"name": "now"}}
CITY_FORMAT: Any = {"type": "json_schema", "json_schema": {"name": "city", "strict": True, "schema": CITY}}


def asked(**options: Any) -> dict[str, Any]:
    return {
        "model": "tiny",
        "messages": [{"role": "user", "content": "How is the weather?"}],
        "max_tokens": 200,
        "seed": 1,
        **options,
    }


async def test_a_json_schema_is_kept(client: openai.AsyncOpenAI) -> None:
    for seed in range(5):
        answer = await client.chat.completions.create(**asked(response_format=CITY_FORMAT, seed=seed))
        choice = answer.choices[0]
        assert choice.finish_reason == "stop"
        jsonschema.validate(json.loads(choice.message.content or ""), CITY)


async def test_a_json_schema_is_kept_by_greedy_and_by_streams_too(client: openai.AsyncOpenAI) -> None:
    options = asked(response_format=CITY_FORMAT, temperature=0)
    whole = await client.chat.completions.create(**options)
    stream = await client.chat.completions.create(**options, stream=True)
    streamed = "".join([c.choices[0].delta.content or "" async for c in stream])
    assert streamed == whole.choices[0].message.content
    jsonschema.validate(json.loads(streamed), CITY)


def bias_for(server: Server, text: str, bias: int = 100) -> dict[str, int]:
    return {str(i): bias for i in server.engine.tokenizer.encode_text(text)}


async def test_json_mode_gives_objects(client: openai.AsyncOpenAI, server: Server) -> None:
    # A random model seldom closes a string: bias makes it.
    bias = bias_for(server, "}")
    answer = await client.chat.completions.create(
        **asked(response_format={"type": "json_object"}, logit_bias=bias)
    )
    assert isinstance(json.loads(answer.choices[0].message.content or ""), dict)


async def test_what_is_cut_by_its_length_says_so(client: openai.AsyncOpenAI) -> None:
    answer = await client.chat.completions.create(**asked(response_format=CITY_FORMAT, max_tokens=5))
    assert answer.choices[0].finish_reason == "length"
    assert (answer.choices[0].message.content or "").startswith("{")


@pytest.mark.parametrize(
    ("choice", "names"),
    [
        ("required", {"get_weather", "now"}),
        ({"type": "function", "function": {"name": "get_weather"}}, {"get_weather"}),
        ({"type": "function", "function": {"name": "now"}}, {"now"}),
    ],
)
async def test_tools_are_called_with_arguments_that_fit(
    client: openai.AsyncOpenAI, choice: Any, names: set[str]
) -> None:
    for seed in range(3):
        answer = await client.chat.completions.create(
            **asked(
                tools=[WEATHER, NOW], tool_choice=choice, parallel_tool_calls=False, max_tokens=400, seed=seed
            )
        )
        (found,) = answer.choices
        assert found.finish_reason == "tool_calls"
        assert found.message.content is None
        (call,) = found.message.tool_calls or []
        assert call.type == "function"
        assert call.function.name in names
        arguments = json.loads(call.function.arguments)
        jsonschema.validate(arguments, CITY if call.function.name == "get_weather" else {"maxProperties": 0})


async def test_calls_are_streamed_and_put_together_by_the_client(client: openai.AsyncOpenAI) -> None:
    options = asked(tools=[WEATHER, NOW], tool_choice="required", parallel_tool_calls=False, max_tokens=400)
    whole = await client.chat.completions.create(**options)
    stream = await client.chat.completions.create(
        **options, stream=True, stream_options={"include_usage": True}
    )
    chunks = [chunk async for chunk in stream]
    deltas = [c.choices[0].delta for c in chunks if c.choices]
    calls = [call for delta in deltas for call in delta.tool_calls or []]
    assert calls[0].id
    assert calls[0].type == "function"
    assert all(call.index == 0 and call.id is None for call in calls[1:])
    assert all(call.function and call.function.name is None for call in calls[1:])
    assert len(calls) > 2, "arguments come as they are written"
    arguments = "".join(call.function.arguments or "" for call in calls if call.function)
    want = (whole.choices[0].message.tool_calls or [])[0]
    assert want.type == "function"
    assert calls[0].function
    assert (calls[0].function.name, arguments) == (want.function.name, want.function.arguments)
    assert not any(delta.content for delta in deltas)
    assert [c.choices[0].finish_reason for c in chunks if c.choices][-1] == "tool_calls"
    assert chunks[-1].usage is not None
    assert chunks[-1].usage == whole.usage or chunks[-1].usage.completion_tokens > 0


async def test_several_calls_at_once(client: openai.AsyncOpenAI) -> None:
    num_calls = set()
    for seed in range(8):
        answer = await client.chat.completions.create(
            **asked(tools=[NOW], tool_choice="required", parallel_tool_calls=True, max_tokens=400, seed=seed)
        )
        calls = answer.choices[0].message.tool_calls or []
        assert len({call.id for call in calls}) == len(calls) > 0
        num_calls.add(len(calls))
    assert max(num_calls) > 1


async def test_a_call_and_its_result_can_be_handed_back(client: openai.AsyncOpenAI) -> None:
    options = asked(tools=[WEATHER], tool_choice="required", parallel_tool_calls=False, max_tokens=400)
    first = await client.chat.completions.create(**options)
    message = first.choices[0].message
    history = [
        *options["messages"],
        message.model_dump(),
        {"role": "tool", "tool_call_id": (message.tool_calls or [])[0].id, "content": "rain"},
    ]
    again = await client.chat.completions.create(
        **asked(messages=history, tools=[WEATHER], tool_choice="none", max_tokens=5)
    )
    assert not again.choices[0].message.tool_calls


async def test_none_and_auto_leave_it_to_text(client: openai.AsyncOpenAI) -> None:
    for choice in ("none", "auto", None):
        answer = await client.chat.completions.create(
            **asked(tools=[WEATHER], tool_choice=choice, max_tokens=20)
        )
        assert answer.choices[0].message.content
        assert not answer.choices[0].message.tool_calls


async def test_seeds_repeat_alone_and_in_a_crowd(client: openai.AsyncOpenAI) -> None:
    async def text(seed: int) -> str | None:
        answer = await client.chat.completions.create(**asked(seed=seed, max_tokens=30, top_p=0.9))
        return answer.choices[0].message.content

    alone = await text(5)
    crowd = await asyncio.gather(*(text(seed) for seed in (1, 5, 2, 5)))
    assert crowd[1] == crowd[3] == alone
    assert len({alone, crowd[0], crowd[2]}) == 3


async def test_n_shares_the_prompt_and_counts_it_once(client: openai.AsyncOpenAI, server: Server) -> None:
    options = asked(n=4, max_tokens=10, messages=[{"role": "user", "content": "count " * 40}])
    hits = server.engine.load().prefix_hit_tokens_total
    answer = await client.chat.completions.create(**options)
    assert [c.index for c in answer.choices] == [0, 1, 2, 3]
    assert len({c.message.content for c in answer.choices}) == 4
    assert answer.usage is not None
    assert answer.usage.prompt_tokens < 300
    assert answer.usage.completion_tokens <= 40
    assert server.engine.load().prefix_hit_tokens_total - hits >= 3 * (answer.usage.prompt_tokens // 16 * 16)
    again = await client.chat.completions.create(**options)
    assert [c.message.content for c in again.choices] == [c.message.content for c in answer.choices]
    single = await client.chat.completions.create(**{**options, "n": 1})
    assert single.choices[0].message.content == answer.choices[0].message.content
    stream = await client.chat.completions.create(**options, stream=True)
    texts, ends = ["", "", "", ""], []
    async for chunk in stream:
        for choice in chunk.choices:
            texts[choice.index] += choice.delta.content or ""
            if choice.finish_reason:
                ends.append(choice.index)
    assert texts == [c.message.content for c in answer.choices]
    assert sorted(ends) == [0, 1, 2, 3]


async def test_logprobs_of_chats(client: openai.AsyncOpenAI) -> None:
    options = asked(logprobs=True, top_logprobs=3, max_tokens=12)
    answer = await client.chat.completions.create(**options)
    found = answer.choices[0].logprobs
    assert found is not None
    assert found.content
    data = bytes(b for token in found.content for b in token.bytes or [])
    assert data.decode(errors="replace").startswith((answer.choices[0].message.content or "")[:5])
    for token in found.content:
        assert math.isfinite(token.logprob)
        assert token.logprob <= 0
        assert len(token.top_logprobs) == 3
        values = [t.logprob for t in token.top_logprobs]
        assert values == sorted(values, reverse=True)
        assert values[0] >= token.logprob
    stream = await client.chat.completions.create(**options, stream=True)
    streamed = [t async for c in stream if c.choices and c.choices[0].logprobs for t in _content(c)]
    assert [t.token for t in streamed] == [t.token for t in found.content]


def _content(chunk: Any) -> list[Any]:
    return chunk.choices[0].logprobs.content or []


async def test_logprobs_of_completions(client: openai.AsyncOpenAI) -> None:
    answer = await client.completions.create(
        model="tiny", prompt="abc", logprobs=2, max_tokens=8, seed=3, n=2
    )
    for choice in answer.choices:
        found = choice.logprobs
        assert found is not None
        assert found.tokens
        assert len(found.tokens) == len(found.token_logprobs or []) == len(found.text_offset or [])
        for token, top in zip(found.tokens, found.top_logprobs or [], strict=True):
            assert token in top
            assert 2 <= len(top) <= 3
        assert all(math.isfinite(v) for top in found.top_logprobs or [] for v in top.values())


async def test_impossible_tokens_have_a_finite_logprob(client: openai.AsyncOpenAI) -> None:
    # The grammar allows one token where the model would say another: its own logprob, never -inf.
    schema = {"type": "object", "properties": {}, "additionalProperties": False}
    wanted: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    answer = await client.chat.completions.create(
        **asked(response_format=wanted, logprobs=True, top_logprobs=20, temperature=0)
    )
    found = answer.choices[0].logprobs
    assert found is not None
    assert all(math.isfinite(t.logprob) for p in found.content or [] for t in (p, *p.top_logprobs))


async def test_stops_and_bias(client: openai.AsyncOpenAI, server: Server) -> None:
    bias = bias_for(server, "ab")
    answer = await client.chat.completions.create(**asked(logit_bias=bias, stop=["ab"], max_tokens=100))
    assert answer.choices[0].finish_reason == "stop"
    assert "ab" not in (answer.choices[0].message.content or "")
    assert set(answer.choices[0].message.content or "") <= {"a", "b"}
    (stop_id,) = bias_for(server, "x")
    answer = await client.chat.completions.create(
        **asked(logit_bias={stop_id: 100}, extra_body={"stop_token_ids": [int(stop_id)]})
    )
    assert (answer.choices[0].message.content, answer.choices[0].finish_reason) == ("", "stop")
    answer = await client.chat.completions.create(
        **asked(logit_bias={"257": 100}, max_tokens=6, extra_body={"ignore_eos": True})
    )
    assert answer.usage is not None
    assert answer.usage.completion_tokens == 6


async def test_what_tools_of_other_makers_say_of_their_arguments_is_taken(client: openai.AsyncOpenAI) -> None:
    """Draft-07, as MCP servers and zod write it, with a format that nobody enforces and a pattern of
    JavaScript's."""
    parameters = {
        "$schema": "http://json-schema.org/draft-07/schema#",
        "type": "object",
        "properties": {
            "city": {"type": "string", "pattern": "^[\\u4e00-\\u4e03]{1,2}$"},
            "pair": {
                "type": "array",
                "items": [{"const": 1}, {"enum": [2, 3]}],
                "minItems": 2,
                "maxItems": 2,
            },
            "key": {"type": "string", "format": "password", "maxLength": 2},
            "unit": {"$ref": "#/definitions/unit"},
        },
        "required": ["city", "pair", "key", "unit"],
        "additionalProperties": False,
        "definitions": {"unit": {"enum": ["C", "F"]}},
    }
    tool: Any = {"type": "function", "function": {"name": "f", "parameters": parameters}}
    answer = await client.chat.completions.create(
        **asked(tools=[tool], tool_choice="required", parallel_tool_calls=False, max_tokens=500)
    )
    (call,) = answer.choices[0].message.tool_calls or []
    assert call.type == "function"
    jsonschema.Draft7Validator(parameters).validate(json.loads(call.function.arguments))


async def test_a_top_p_of_0_is_greedy(client: openai.AsyncOpenAI) -> None:
    texts = []
    for options in ({"temperature": 0}, {"top_p": 0}, {"top_p": 0, "extra_body": {"top_k": -1}}):
        answer = await client.chat.completions.create(**asked(max_tokens=20, **options))
        texts.append(answer.choices[0].message.content)
    assert texts[0] == texts[1] == texts[2]


async def test_a_schema_that_does_not_compile_is_its_own_400(client: openai.AsyncOpenAI) -> None:
    good = client.chat.completions.create(**asked(max_tokens=60))
    running = asyncio.create_task(good)
    for schema in (
        {"not": {"type": "string"}},
        {"type": "string", "pattern": "(?=x)y"},
        {"type": "array", "minItems": 100_000},
        {"allOf": [{"type": "string"}, {"type": "integer"}]},
        {"$ref": "https://example.com/schema"},
    ):
        wanted: Any = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
        with pytest.raises(openai.BadRequestError) as caught:
            await client.chat.completions.create(**asked(response_format=wanted))
        assert caught.value.param == "response_format.json_schema.schema", schema
        tool: Any = {
            "type": "function",
            "function": {
                "name": "f",
                "parameters": {"type": "object", "properties": {"x": schema}, "required": ["x"]},
            },
        }
        with pytest.raises(openai.BadRequestError) as caught:
            await client.chat.completions.create(**asked(tools=[NOW, tool]))
        assert caught.value.param == "tools[1].function.parameters", schema
    assert (await running).choices[0].finish_reason in ("stop", "length")


async def test_ids_beyond_the_vocabulary_touch_nobody_else(client: openai.AsyncOpenAI) -> None:
    running = asyncio.create_task(client.chat.completions.create(**asked(max_tokens=60)))
    for body, param in (
        ({"prompt": [1, 2, 300]}, "prompt"),
        ({"prompt": [2**31 - 1]}, "prompt"),
        ({"prompt": "x", "logit_bias": {"300": 1}}, "logit_bias"),
    ):
        with pytest.raises(openai.BadRequestError) as caught:
            await client.completions.create(model="tiny", **body)  # type: ignore[call-overload]
        assert caught.value.param == param
    alone = await client.chat.completions.create(**asked(max_tokens=60))
    assert (await running).choices[0].message.content == alone.choices[0].message.content


@pytest.mark.parametrize("options", [{}, {"stream": True}, {"n": 3}, {"n": 3, "stream": True}])
async def test_a_client_that_leaves_gives_its_kv_back(
    client: openai.AsyncOpenAI, server: Server, options: dict[str, Any]
) -> None:
    body = asked(max_tokens=1500, extra_body={"ignore_eos": True}, **options)
    request = asyncio.create_task(client.chat.completions.create(**body))
    await eventually(lambda: server.engine.load().num_running == options.get("n", 1))
    if options.get("stream"):
        stream = await request
        await stream.response.aclose()
    else:
        request.cancel()
    await eventually(lambda: server.engine.load().kv_blocks_used == 0)
    assert server.engine.load().num_waiting == 0
