"""Whatever schema a request sends is a form that can be kept, or that request's own 400."""

from __future__ import annotations

import json
import random
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sluice_runtime.api.errors import ApiError
from sluice_runtime.api.forms import Form, form_of
from sluice_runtime.api.schemas import ChatRequest, parse
from sluice_runtime.engine.structured import GrammarCompiler
from sluice_runtime.engine.types import Grammar
from sluice_runtime.turns import Turns
from unit.runtime.conformance.conftest import EOS, byte_tokenizer
from unit.runtime.server.test_schema_shape import KEYWORDS, SCHEMAS, VALUES

ODD: list[Any] = [
    *VALUES,
    *(
        "#",
        "#/properties/x",
        "#/enum/0",
        "#/unknown",
        "https://json-schema.org/draft/2019-09/schema",
        "(",
        r"\u4e00",
    ),
    *(10**30, 2**63 - 1, -(2**63), 2**53 + 1, 1e300, 0.1, 1e-9, [{"required": 5}, 2**60]),
]
SCHEMAS_OF_REQUESTS = st.builds(
    lambda schema, more: {**(schema if isinstance(schema, dict) else {}), **more},
    SCHEMAS,
    st.dictionaries(
        st.sampled_from([*KEYWORDS, "$ref", "$schema", "$anchor", "x-guidance"]),
        st.sampled_from(ODD),
        max_size=2,
    ),
)
TEXTS = [
    "",
    "{}",
    "null",
    "5",
    '"a"',
    '{"x": {"a": [1, null]}, "a": true}',
    "[1, 2.5]",
    "1e400",
    "1" + "0" * 400,
]


class Compiler:
    def __init__(self) -> None:
        self.tokenizer, self.turns = byte_tokenizer(), Turns(1, "test")
        self._grammars = GrammarCompiler(self.tokenizer, frozenset({EOS}))

    def compile_grammar(self, grammar: str) -> Grammar:
        return self._grammars.compile(grammar)


@pytest.fixture(scope="module")
def compiler() -> Compiler:
    return Compiler()


def answer(compiler: Compiler, grammar: Grammar, seed: int) -> str | None:
    """A random text of the form; None: it did not end soon."""
    draw, matcher, ids = random.Random(seed), grammar.matcher(), []
    for _ in range(200):
        row = np.zeros(-(-compiler.tokenizer.vocab_size // 32), np.int32)
        matcher.fill_mask(row)
        allowed = [int(i) for i in np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little"))]
        if EOS in allowed:
            return compiler.tokenizer.decode(ids)
        ids.append(draw.choice(allowed))
        matcher.consume(ids[-1])
    return None


async def built(compiler: Compiler, **asked: Any) -> Form | ApiError:
    body = {"model": "m", "messages": [{"role": "user", "content": "x"}], **asked}
    try:
        request = parse(ChatRequest, json.dumps(body).encode())
        assert isinstance(request, ChatRequest)
        return await form_of(request, compiler, compiler.turns, "")
    except ApiError as error:
        return error


def assert_own(error: ApiError, param: str) -> None:
    assert error.status == 400
    assert str(error.param).startswith(param)


@given(SCHEMAS_OF_REQUESTS, st.integers(0, 1000))
@settings(max_examples=200)
async def test_any_schema_of_an_answer(compiler: Compiler, schema: dict[str, Any], seed: int) -> None:
    wanted = {"type": "json_schema", "json_schema": {"name": "x", "schema": schema}}
    form = await built(compiler, response_format=wanted)
    if isinstance(form, ApiError):
        assert_own(form, "response_format")
        return
    for text in TEXTS:
        form.fits(text)
    assert form.grammar is not None
    text = answer(compiler, form.grammar, seed)
    assert text is None or form.fits(text), text


@given(SCHEMAS_OF_REQUESTS)
@settings(max_examples=100)
async def test_any_schema_of_arguments(compiler: Compiler, schema: dict[str, Any]) -> None:
    tool = {"type": "function", "function": {"name": "f", "parameters": {**schema, "type": "object"}}}
    form = await built(compiler, tools=[tool])
    if isinstance(form, ApiError):
        assert_own(form, "tools")
        return
    reader = form.reader()
    assert reader is not None
    for text in TEXTS[1:2] + TEXTS[5:6]:
        reader.push(f'<tool_call>\n{{"name": "f", "arguments": {text}}}\n</tool_call>')
    assert len(reader.calls) == 2
    form.calls_fit(reader)
