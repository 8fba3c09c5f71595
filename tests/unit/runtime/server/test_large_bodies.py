"""What a body may cost before it is refused: to read it holds the interpreter's lock, and all streams."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice_runtime.api import body
from sluice_runtime.api.body import MAX_VALUES
from sluice_runtime.api.errors import ApiError
from sluice_runtime.api.schemas import ChatRequest, CompletionRequest, parse
from unit.runtime.server.support import COMPLETIONS, Pod

MESSAGES = [{"role": "user", "content": "x"}]
MANY = MAX_VALUES - 10
JSON = st.recursive(
    st.one_of(st.none(), st.integers(-9, 9), st.text(st.sampled_from('a,[{"\\é'), max_size=4)),
    lambda inner: st.one_of(
        st.lists(inner, max_size=4),
        st.dictionaries(st.text(st.sampled_from('a,[{"\\'), max_size=3), inner, max_size=3),
    ),
    max_leaves=12,
)


def num_values(value: Any) -> int:
    """Items of all containers, and one for each that is empty."""
    if not isinstance(value, list | dict):
        return 0
    items = list(value.values()) if isinstance(value, dict) else value
    return max(1, len(items)) + sum(map(num_values, items))


@given(JSON, st.integers(0, 12), st.booleans())
def test_values_are_counted_without_reading_them(value: Any, most: int, ascii_only: bool) -> None:
    data = json.dumps(value, ensure_ascii=ascii_only, separators=(",", ":")).encode()
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(body, "MAX_VALUES", most)
        assert body.has_too_many_values(data) == (len(data) > most and num_values(value) > most)


@pytest.mark.parametrize(
    "data",
    [
        b'{"a":"' + b'\\",' * 400_000,
        b'"' + b',\\"' * 400_000,
        b'{"m":[' + b'"\\\\",' * 400_000,
        b'{"m":[' + b'"a",' * 1_500_000,
        b"\xff," * 400_000,
        b"[" * 1_000_000,
    ],
    ids=["unterminated", "escaped", "backslashes", "strings", "no text", "brackets"],
)
def test_what_is_no_json_is_soon_refused(data: bytes) -> None:
    began = time.thread_time()
    with pytest.raises(ApiError):
        parse(ChatRequest, data)
    assert time.thread_time() - began < 10


async def test_more_values_than_may_be(pod: Pod) -> None:
    reply = await pod.post({"model": "assistant", "prompt": [1] * (MAX_VALUES + 1)}, COMPLETIONS)
    assert (reply.status_code, reply.json()["error"]["code"]) == (413, "request_too_large")
    assert str(MAX_VALUES) in reply.json()["error"]["message"]
    assert pod.records()[0]["outcome"] == "rejected"


def test_text_may_look_like_many_values() -> None:
    for text in (
        "1,2,3\n" * 200_000,
        '{"a": [1, "b"]}\n' * 60_000,
        "\\" * 300_000,
        '"' * 300_000 + ",," * 200_000,
    ):
        body = {"model": "m", "messages": [{"role": "user", "content": text}]}
        for ascii_only in (False, True):
            request = parse(ChatRequest, json.dumps(body, ensure_ascii=ascii_only).encode())
            assert isinstance(request, ChatRequest)
            assert request.messages[0].text == text


@pytest.mark.parametrize(
    ("kind", "body", "param"),
    [
        (CompletionRequest, {"prompt": [-1] * MANY}, "prompt[0]"),
        (CompletionRequest, {"prompt": [1] * MANY + ["a"]}, f"prompt[{MANY}]"),
        (CompletionRequest, {"prompt": [True] * MANY}, "prompt[0]"),
        (CompletionRequest, {"prompt": ["a"] * MANY}, "prompt"),
        (ChatRequest, {"messages": [{"role": "user", "content": [{"type": "x"}] * (MANY // 2)}]}, None),
        (ChatRequest, {"messages": MESSAGES, "stop": [1] * MANY}, "stop"),
        (ChatRequest, {"messages": MESSAGES, "logit_bias": {str(i): "x" for i in range(MANY)}}, "logit_bias"),
        (ChatRequest, {"messages": MESSAGES, **{f"k{i}": 1 for i in range(MANY)}}, "k0"),
    ],
    ids=["negative", "one odd", "booleans", "prompts", "parts", "stops", "biases", "names"],
)
def test_many_faults_cost_little_more_than_one(kind: Any, body: dict[str, Any], param: str | None) -> None:
    """Negative ids took gigabytes and two minutes; the bound is far from what they take now."""
    data = json.dumps({"model": "m", **body}, separators=(",", ":")).encode()
    began = time.thread_time()
    with pytest.raises(ApiError) as caught:
        parse(kind, data)
    assert time.thread_time() - began < 10
    assert caught.value.status == 400
    assert param is None or caught.value.param == param


@pytest.mark.parametrize(
    ("prompt", "want"),
    [("a", "a"), (["a"], "a"), ([1, 2], [1, 2]), ([[1, 2]], [1, 2]), ([0, 2**31 - 1], None)],
)
def test_a_prompt_is_text_or_ids_alone_or_in_a_list(prompt: Any, want: Any) -> None:
    request = parse(CompletionRequest, json.dumps({"model": "m", "prompt": prompt}).encode())
    assert isinstance(request, CompletionRequest)
    assert request.prompt == (prompt if want is None else want)
