"""Tool calls as the server sees them: told, read back piece by piece, judged, and put on record."""

from __future__ import annotations

import asyncio
import json
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sluice_runtime.api.tools import Piece, ToolReader, told_as_text
from sluice_runtime.engine.types import FinishReason
from unit.runtime.server.support import Pod, chat_body, check, events, pod_config, route_headers

F = '<tool_call>\n{"name": "f", "arguments": {"a": "}</tool_call>{"}}\n</tool_call>'
G = '<tool_call>\n{"name": "g", "arguments": {}}\n</tool_call>'
TOOLS: list[Any] = [
    {
        "type": "function",
        "function": {"name": "f", "parameters": {"type": "object", "properties": {"a": {"type": "string"}}}},
    },
    {"type": "function", "function": {"name": "g"}},
]


def read(pieces: list[str]) -> tuple[str, list[tuple[str, str]], ToolReader]:
    """Content and calls, put together from what was given out; they must be what the reader says, too."""
    reader = ToolReader()
    out: list[Piece] = [p for piece in pieces for p in reader.push(piece)] + reader.flush()
    content, calls = "", []
    for piece in out:
        if isinstance(piece, str):
            content += piece
        elif piece.call is not None:
            assert piece.index == len(calls)
            calls.append([piece.call.name, piece.arguments])
        else:
            calls[piece.index][1] += piece.arguments
    assert content == reader.content
    assert [tuple(c) for c in calls] == [(c.name, c.arguments) for c in reader.calls]
    return content, [(n, a) for n, a in calls], reader


@pytest.mark.parametrize(
    ("text", "content", "calls", "complete"),
    [
        ("hello", "hello", [], True),
        (G, "", ["g"], True),
        (f"Hm. {F}\n{G}", "Hm. ", ["f", "g"], True),
        (f"{G}\n{G}\n", "", ["g", "g"], True),
        (f"{G}\nand more", "\nand more", ["g"], True),
        ("a <tool_cal", "a <tool_cal", [], True),
        ("a <tool_call>\n{nonsense}</tool_call>", "a <tool_call>\n{nonsense}</tool_call>", [], False),
        ("<tool_call>", "<tool_call>", [], False),
        ('<tool_call>{"name": "f"', '<tool_call>{"name": "f"', [], False),
        ('<tool_call>{"name": "f", "arguments": {"a": 1', "", ["f"], False),
        ('<tool_call>{"name": "f", "arguments": {}} x</tool_call>', "", ["f"], False),
        ('<tool_call>{"name": "f", "arguments": []}</tool_call>', None, [], False),
        ("<tool_call>" + " " * 300, None, [], False),
    ],
)
def test_what_is_content_and_what_is_a_call(
    text: str, content: str | None, calls: list[str], complete: bool
) -> None:
    found, called, reader = read([text])
    assert found == (text if content is None else content)
    assert [name for name, _ in called] == calls
    assert reader.complete == complete


@settings(max_examples=400)
@given(
    st.lists(st.sampled_from([F, G, "\n", "hi", "<tool", "<tool_call>", "{", '"', " }"]), max_size=6),
    st.data(),
)
def test_the_result_does_not_depend_on_the_cuts(parts: list[str], data: st.DataObject) -> None:
    text = "".join(parts)
    cuts = sorted(data.draw(st.lists(st.integers(0, len(text)), max_size=8)))
    pieces = [text[a:b] for a, b in zip([0, *cuts], [*cuts, len(text)], strict=True)]
    assert read(pieces)[:2] == read([text])[:2]


def test_arguments_may_hold_anything() -> None:
    _, [(_, arguments)], _ = read(list(F))
    assert json.loads(arguments) == {"a": "}</tool_call>{"}


def test_a_template_that_knows_no_tools_is_told_in_words() -> None:
    call = {"id": "1", "type": "function", "function": {"name": "f", "arguments": {"a": 1}}}
    told = told_as_text(
        [
            {"role": "system", "content": "Be brief."},
            {"role": "assistant", "content": "", "tool_calls": [call]},
            {"role": "tool", "content": "42", "tool_call_id": "1"},
        ],
        TOOLS,
    )
    assert [m["role"] for m in told] == ["system", "assistant", "user"]
    assert told[0]["content"].startswith("Be brief.\n\nYou may call functions.")
    assert json.dumps(TOOLS[0]) in told[0]["content"]
    assert told[1]["content"] == '<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>'
    assert "42" in told[2]["content"]
    assert told_as_text([{"role": "user", "content": "x"}], TOOLS)[0]["role"] == "system"
    assert told_as_text([{"role": "user", "content": "x"}], []) == [{"role": "user", "content": "x"}]


async def test_a_call_is_answered_and_streamed(pod: Pod) -> None:
    pod.engine.auto = [f"Hm. {F}"[i : i + 5] for i in range(0, len(F) + 4, 5)]
    whole = (await pod.post(chat_body(tools=TOOLS))).json()["choices"][0]
    assert whole["finish_reason"] == "tool_calls"
    assert whole["message"]["content"] == "Hm. "
    (call,) = whole["message"]["tool_calls"]
    assert json.loads(call["function"]["arguments"]) == {"a": "}</tool_call>{"}
    found = events((await pod.post(chat_body(tools=TOOLS, stream=True))).text)
    deltas = [e["choices"][0]["delta"] for e in found[:-1]]
    assert "".join(d.get("content") or "" for d in deltas) == "Hm. "
    calls = [c for d in deltas for c in d.get("tool_calls", [])]
    assert calls[0]["function"]["name"] == "f"
    assert "".join(c["function"]["arguments"] for c in calls) == call["function"]["arguments"]
    assert found[-2]["choices"][0]["finish_reason"] == "tool_calls"
    assert [r["flags"]["tool_failed"] for r in pod.records()] == [False, False]


@pytest.mark.parametrize(
    ("text", "finish", "failed"),
    [
        (G, FinishReason.STOP, False),
        ("no call", FinishReason.STOP, False),
        (G.replace('"g"', '"h"'), FinishReason.STOP, True),
        ('<tool_call>\n{"name": "f", "arguments": {"a": 1}}\n</tool_call>', FinishReason.STOP, True),
        ("<tool_call>\nf()\n</tool_call>", FinishReason.STOP, True),
        ('<tool_call>\n{"name": "f", "arguments": {"a": ', FinishReason.STOP, True),
        ('<tool_call>\n{"name": "f", "arguments": {"a": ', FinishReason.LENGTH, False),
    ],
)
async def test_arguments_that_do_not_fit_are_on_record(
    pod: Pod, text: str, finish: FinishReason, failed: bool
) -> None:
    pod.engine.auto, pod.engine.auto_finish = [text], finish
    for stream in (False, True):
        assert (await pod.post(chat_body(tools=TOOLS, stream=stream))).status_code == 200
    assert [r["flags"]["tool_failed"] for r in pod.records()] == [failed, failed]


@pytest.mark.parametrize(
    ("text", "finish", "content", "num_calls"),
    [
        ('Hm <tool_call>\n{"na', FinishReason.LENGTH, "Hm ", 0),
        (f'{G}\n<tool_call>\n{{"name": "g", "arg', FinishReason.LENGTH, None, 1),
        ("Hm <tool_ca", FinishReason.LENGTH, "Hm <tool_ca", 0),
        ('Hm <tool_call>\n{"na', FinishReason.STOP, 'Hm <tool_call>\n{"na', 0),
    ],
)
async def test_the_head_of_a_call_that_its_length_cut_is_no_content(
    pod: Pod, text: str, finish: FinishReason, content: str | None, num_calls: int
) -> None:
    pod.engine.auto, pod.engine.auto_finish = list(text), finish
    message = (await pod.post(chat_body(tools=TOOLS))).json()["choices"][0]["message"]
    assert (message["content"], len(message.get("tool_calls", ()))) == (content, num_calls)
    found = events((await pod.post(chat_body(tools=TOOLS, stream=True))).text)
    deltas = [e["choices"][0]["delta"] for e in found[:-1]]
    assert "".join(d.get("content") or "" for d in deltas) == (content or "")
    assert found[-2]["choices"][0]["finish_reason"] == finish.value


async def test_the_model_is_told_what_it_may_call_and_held_to_it(pod: Pod) -> None:
    pod.engine.auto = [G]
    named = {"type": "function", "function": {"name": "g"}}
    for choice, told, held in (("none", False, 0), ("auto", True, 1), (named, True, 1)):
        pod.engine.grammars.clear()
        await pod.post(chat_body(tools=TOOLS, tool_choice=choice))
        prompt = pod.engine.tokenizer.decode((await pod.engine.next()).request.prompt_ids)
        assert ('"name": "f"' in prompt) == told
        assert bool(pod.engine.grammars) == bool(held)
    assert '\\"name\\": \\"f\\"' not in pod.engine.grammars[-1], "a named tool is the only one"


FORMAT = {
    "type": "json_schema",
    "json_schema": {"name": "x", "schema": {"type": "object", "required": ["a"]}},
}


@pytest.mark.parametrize(
    ("text", "change", "status", "ok"),
    [
        ('{"a": 1}', {}, 200, True),
        ("{}", {}, 502, False),
        ("{}", {"stop": "x"}, 200, False),
    ],
)
async def test_a_form_is_checked_again_at_the_end(
    pod: Pod, text: str, change: dict[str, Any], status: int, ok: bool
) -> None:
    pod.engine.auto = [text[:1], text[1:]]
    reply = await pod.post(chat_body(response_format=FORMAT, **change))
    assert reply.status_code == status
    streamed = events((await pod.post(chat_body(response_format=FORMAT, stream=True, **change))).text)
    if status == 502:
        assert reply.json()["error"]["code"] == "response_format_violation"
        assert streamed[-1]["error"]["param"] == "response_format"
    wanted = [{"check": "response_format", "kind": "JsonSchema", "ok": ok, "hard": False}]
    assert [r["verdicts"] for r in pod.records()] == [wanted, wanted]


async def test_what_its_length_cut_is_no_broken_form(pod: Pod) -> None:
    pod.engine.auto, pod.engine.auto_finish = ['{"a'], FinishReason.LENGTH
    reply = await pod.post(chat_body(response_format=FORMAT))
    assert reply.json()["choices"][0]["finish_reason"] == "length"
    assert pod.records()[0]["outcome"] == "truncated"


async def test_several_answers_are_one_request(pod: Pod) -> None:
    await pod.hold(pod_config(contract=[check("no-b", "MustNotMatch", False, pattern="b")]))
    request = asyncio.create_task(pod.post(chat_body(n=3, seed=4)))
    first = await pod.engine.next()
    assert pod.engine.arrived.empty(), "the others wait for the first one's prompt"
    first.token("a")
    second, third = await pod.engine.next(), await pod.engine.next()
    assert len({g.request.request_id for g in (first, second, third)}) == 3
    assert len({g.request.sampling.seed for g in (first, second, third)}) == 3
    assert first.request.sampling.seed == 4
    assert {g.request.prompt_ids for g in (second, third)} == {first.request.prompt_ids}
    third.answer("c", finish=FinishReason.LENGTH)
    second.answer("b", "b")
    first.token("a", FinishReason.STOP)
    body = (await request).json()
    assert [c["message"]["content"] for c in body["choices"]] == ["aa", "bb", "c"]
    assert [c["finish_reason"] for c in body["choices"]] == ["stop", "stop", "length"]
    assert body["usage"]["completion_tokens"] == 5
    assert body["usage"]["prompt_tokens"] == len(first.request.prompt_ids)
    (record,) = pod.records()
    assert (record["outcome"], record["tokens"]["output"]) == ("truncated", 5)
    assert [v["ok"] for v in record["verdicts"]] == [False]
    assert record["timing"]["busy_s"] == pytest.approx(3 * 0.04)


async def test_a_refused_further_answer_refuses_the_request(pod: Pod) -> None:
    request = asyncio.create_task(pod.post(chat_body(n=2, stream=True)))
    first = await pod.engine.next()
    pod.engine.full = True
    first.token("a")
    reply = await request
    assert (reply.status_code, reply.json()["error"]["code"]) == (429, "queue_full")
    assert first.cancelled.is_set()


async def test_each_of_several_answers_is_cancelled(pod: Pod) -> None:
    request = asyncio.create_task(pod.post(chat_body(n=2)))
    first = await pod.engine.next()
    first.token("a")
    second = await pod.engine.next()
    second.fail("broken")
    assert (await request).status_code == 500
    assert first.cancelled.is_set()
    assert second.cancelled.is_set()


async def test_answers_share_a_prompt_where_the_prefix_cache_is_off(pod: Pod) -> None:
    await pod.hold(pod_config(features={"prefixCache": False}))
    scopes = []
    for _ in range(2):
        request = asyncio.create_task(pod.post(chat_body(n=2)))
        first = await pod.engine.next()
        first.answer("a")
        second = await pod.engine.next()
        second.answer("b")
        await request
        assert first.request.scope == second.request.scope
        assert second.request.prefix_cache
        scopes.append(first.request.scope)
    assert scopes[0] != scopes[1], "but with nobody else"


async def test_a_pair_is_one_answer(pod: Pod) -> None:
    pod.engine.auto = ["a"]
    reply = await pod.post(chat_body(n=3), headers=route_headers(mirror="pair"))
    assert len(reply.json()["choices"]) == 1
