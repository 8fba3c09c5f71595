"""Recorded requests get answers of the recorded shape: no key lacks, and none is there that is not in it."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import httpx
import pytest

from unit.runtime.conformance.conftest import Server

RECORDED = json.loads((Path(__file__).parent / "shapes.json").read_text())
TYPES = {"str": str, "int": int, "float": (int, float), "null": type(None), "dict": dict}


def fits(value: Any, shape: Any, at: str = "answer") -> None:
    if isinstance(shape, dict):
        assert isinstance(value, dict), at
        assert set(value) == set(shape), at
        for key, inner in shape.items():
            fits(value[key], inner, f"{at}.{key}")
    elif isinstance(shape, list):
        assert isinstance(value, list), at
        assert value, at
        for i, item in enumerate(value):
            fits(item, shape[0], f"{at}[{i}]")
    elif shape.startswith("="):
        assert value == shape[1:], at
    elif shape.startswith("@"):
        fits(value, RECORDED["shapes"][shape[1:]], at)
    elif not (shape.startswith("?") and value is None):
        assert isinstance(value, TYPES[shape.lstrip("?")]), (at, value)
        assert not isinstance(value, bool), at


@pytest.mark.parametrize("case", RECORDED["cases"], ids=lambda c: c["name"])
def test_recorded(server: Server, case: dict[str, Any]) -> None:
    reply = httpx.post(server.url + case["path"], json=case["request"], timeout=120)
    assert reply.status_code == case.get("status", 200), reply.text
    fits(reply.json(), case["answer"])


@pytest.mark.parametrize("case", RECORDED["cases"][:5], ids=lambda c: c["name"])
@pytest.mark.parametrize("usage", [None, True])
def test_recorded_streams(server: Server, case: dict[str, Any], usage: bool | None) -> None:
    body = {**case["request"], "stream": True}
    if usage:
        body["stream_options"] = {"include_usage": True}
    reply = httpx.post(server.url + case["path"], json=body, timeout=120)
    assert reply.headers["content-type"].startswith("text/event-stream")
    blocks = [b.removeprefix("data: ") for b in reply.text.split("\n\n") if b]
    assert blocks[-1] == "[DONE]"
    chunks = [json.loads(b) for b in blocks[:-1]]
    if usage:
        last = chunks.pop()
        assert last["choices"] == []
        fits(last["usage"], RECORDED["shapes"]["usage"])
        assert [c.pop("usage") for c in chunks] == [None] * len(chunks)
    for chunk in chunks:
        fits(chunk, RECORDED["chunk"])
        assert len(chunk["choices"]) == 1
    num = case["request"].get("n", 1)
    choices = [c["choices"][0] for c in chunks]
    assert sorted(c["index"] for c in choices if c["finish_reason"]) == list(range(num))
    assert [c["delta"]["role"] for c in choices if "role" in c["delta"]] == ["assistant"] * num


def test_the_description_is_valid(server: Server) -> None:
    found = httpx.get(f"{server.url}/openapi.json").json()
    assert found["openapi"].startswith("3.1")
    assert {"/v1/chat/completions", "/v1/completions", "/v1/models"} <= set(found["paths"])
    body = found["components"]["schemas"]["ChatRequest"]
    assert body["additionalProperties"] is False
    assert {"messages", "tools", "response_format", "n"} <= set(body["properties"])
