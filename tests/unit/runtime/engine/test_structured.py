"""Forms: what a grammar allows is what it says, bounded, and never a special token."""

from __future__ import annotations

import asyncio
import json
import random
import time
import uuid
from typing import Any

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from jsonschema import Draft202012Validator

from sluice_runtime.api.tools import ToolReader
from sluice_runtime.engine.grammar import MAX_COUNT, ToolForm, check_numbers, json_grammar, tool_grammar
from sluice_runtime.engine.structured import GrammarCompiler
from sluice_runtime.engine.tokenizer import Tokenizer
from sluice_runtime.engine.types import EngineRequest, FinishReason, InvalidRequest, SamplingParams

EOS = 257  # <|im_end|> of the tests' tokenizer
CITY: dict[str, Any] = {
    "type": "object",
    "properties": {
        "a": {"enum": ["<|im_end|>", "é\n\"'"]},
        "b": {"type": "integer", "minimum": 0, "maximum": 9},
    },
    "required": ["a", "b"],
    "additionalProperties": False,
}
NOTHING: dict[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}


@pytest.fixture(scope="module")
def compiler(tokenizer: Tokenizer) -> GrammarCompiler:
    return GrammarCompiler(tokenizer, frozenset({EOS}))


def _allowed(matcher: Any, size: int = 300) -> list[int]:
    row = np.zeros(-(-size // 32), np.int32)
    matcher.fill_mask(row)
    return [int(i) for i in np.flatnonzero(np.unpackbits(row.view(np.uint8), bitorder="little"))]


def _walk(compiler: GrammarCompiler, tokenizer: Tokenizer, grammar: str, seed: int, begin: str = "") -> str:
    """A random text that the grammar allows, from its beginning to its end."""
    draw, matcher = random.Random(seed), compiler.compile(grammar).matcher()
    forced, ids = tokenizer.encode_text(begin), []
    for _ in range(2000):
        allowed = _allowed(matcher)
        assert allowed
        token = forced.pop(0) if forced else draw.choice(allowed)
        assert token in allowed
        matcher.consume(token)
        if token == EOS:
            return tokenizer.decode(ids)
        assert token != 256, "the only special token is the end"
        ids.append(token)
    raise AssertionError("without end")


@pytest.mark.parametrize("seed", range(6))
def test_whatever_is_drawn_fits(compiler: GrammarCompiler, tokenizer: Tokenizer, seed: int) -> None:
    value = json.loads(_walk(compiler, tokenizer, json_grammar(CITY), seed))
    Draft202012Validator(CITY).validate(value)


_SCALARS = st.sampled_from(
    [
        {"type": "integer", "minimum": -3, "maximum": 12},
        {"type": "boolean"},
        {"type": "null"},
        {"enum": ["a", "b", 3]},
        {"const": "<think>"},
        {"type": "string", "maxLength": 3},
        {"type": "string", "pattern": "^[ab]{1,3}$"},
    ]
)
_SCHEMAS = st.recursive(
    _SCALARS,
    lambda inner: st.one_of(
        st.builds(lambda i: {"type": "array", "items": i, "minItems": 1, "maxItems": 2}, inner),
        st.builds(
            lambda a, b: {
                "type": "object",
                "properties": {"x": a, "y": b},
                "required": ["x"],
                "additionalProperties": False,
            },
            inner,
            inner,
        ),
        st.builds(lambda a, b: {"anyOf": [a, b]}, inner, inner),
    ),
    max_leaves=4,
)


@given(_SCHEMAS, st.integers(0, 1000))
@settings(max_examples=40, derandomize=True)
def test_any_schema_is_kept(
    compiler: GrammarCompiler, tokenizer: Tokenizer, schema: dict[str, Any], seed: int
) -> None:
    value = json.loads(_walk(compiler, tokenizer, json_grammar(schema), seed))
    Draft202012Validator(schema).validate(value)


def test_a_request_can_not_say_how_it_is_compiled(compiler: GrammarCompiler) -> None:
    lenient = {"not": {"type": "string"}, "x-guidance": {"lenient": True}}
    with pytest.raises(InvalidRequest, match="not"):
        compiler.compile(json_grammar(lenient))


@pytest.mark.parametrize("seed", range(4))
@pytest.mark.parametrize("parallel", [False, True])
def test_calls_are_of_the_form_that_is_read_back(
    compiler: GrammarCompiler, tokenizer: Tokenizer, seed: int, parallel: bool
) -> None:
    tools = [ToolForm("f", CITY), ToolForm("g-1", NOTHING)]
    for required, begin in ((True, ""), (False, "Well <tool <tool_call>")):
        text = _walk(
            compiler, tokenizer, tool_grammar(tools, required=required, parallel=parallel), seed, begin
        )
        reader = ToolReader()
        reader.push(text)
        reader.flush()
        assert reader.complete
        assert reader.content == ("" if required else "Well <tool ")
        assert len(reader.calls) == 1 or (parallel and reader.calls)
        for call in reader.calls:
            schema = {"f": CITY, "g-1": NOTHING}[call.name]
            Draft202012Validator(schema).validate(json.loads(call.arguments))


def test_without_being_required_text_is_free(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    grammar = tool_grammar([ToolForm("f", CITY)], required=False, parallel=False)
    matcher = compiler.compile(grammar).matcher()
    for token in tokenizer.encode_text("anything <tool_cal at all"):
        matcher.consume(token)
    assert EOS in _allowed(matcher)
    either = tool_grammar([ToolForm("f", NOTHING)], required=False, parallel=False, schema=CITY)
    first = {tokenizer.decode([i]) for i in _allowed(compiler.compile(either).matcher())}
    assert first == {"<", "{"}


def test_what_is_not_allowed_is_not_consumed(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    grammar = compiler.compile(json_grammar(NOTHING))
    one, other = grammar.matcher(), grammar.matcher()
    for token in tokenizer.encode_text("{}"):
        one.consume(token)
    assert _allowed(one) == [EOS]
    one.consume(EOS)
    with pytest.raises(ValueError, match="form"):
        other.consume(EOS)
    assert _allowed(grammar.matcher()), "the compiled form is as it was"


HOSTILE: list[dict[str, Any]] = [
    {"type": "array", "minItems": 100_000},
    {"type": "string", "minLength": 10**9},
    {"type": "string", "pattern": "((a{1,100}){1,100}){1,100}"},
    {"type": "string", "pattern": "(a|aa)+$"},
    {"type": "string", "pattern": "(x+x+)+y"},
    {"type": "string", "pattern": "[a-z]{1,5000}[b-y]{1,5000}"},
    {"enum": [f"value {i}" for i in range(5000)]},
    {"type": "object", "properties": {f"p{i}": {"type": "string"} for i in range(1000)}},
    {"anyOf": [{"type": "object", "required": [f"p{i}"]} for i in range(200)]},
    {"$ref": "#/$defs/a", "$defs": {"a": {"type": "array", "items": {"$ref": "#/$defs/a"}}}},
]


@pytest.mark.parametrize("number", range(len(HOSTILE)))
def test_a_hostile_schema_costs_little(compiler: GrammarCompiler, number: int) -> None:
    schema = HOSTILE[number]
    began = time.perf_counter()
    try:
        check_numbers(schema)
        matcher = compiler.compile(json_grammar(schema)).matcher()
        for _ in range(20):
            matcher.consume(random.Random(number).choice(_allowed(matcher)))
    except (InvalidRequest, ValueError):
        pass  # refused, or failed by itself
    assert time.perf_counter() - began < 60


def test_counts_are_bounded_wherever_they_stand() -> None:
    check_numbers({"minItems": MAX_COUNT, "properties": {"maxLength": {"type": "string"}}})
    with pytest.raises(InvalidRequest, match="minItems at /properties/x"):
        check_numbers({"properties": {"x": {"minItems": MAX_COUNT + 1}}})
    with pytest.raises(InvalidRequest, match="maxLength"):
        check_numbers({"anyOf": [{"maxLength": 1e9}]})


@pytest.mark.parametrize(
    ("schema", "where"),
    [
        ({"const": 2**53 + 1}, "const at /"),
        ({"properties": {"id": {"enum": [1, {"a": [-(2**60)]}]}}}, "enum at /properties/id"),
        ({"const": 123456789.12345679}, "const at /"),
        ({"enum": [1e300]}, "enum at /"),
        ({"type": "integer", "minimum": 10**30, "maximum": 10**31}, "minimum at /"),
        ({"type": "integer", "exclusiveMaximum": -(2**63)}, "exclusiveMaximum at /"),
    ],
)
def test_a_number_that_would_be_another_is_refused(schema: dict[str, Any], where: str) -> None:
    with pytest.raises(InvalidRequest, match=where):
        check_numbers(schema)


@given(
    st.one_of(
        st.integers(),
        st.floats(allow_nan=False, allow_infinity=False),
        st.decimals(-1000, 1000, places=3).map(float),
        st.decimals(-1, 1, places=9).map(float),
    )
)
@settings(max_examples=200)
def test_a_number_that_is_taken_is_written_as_it_is(
    compiler: GrammarCompiler, tokenizer: Tokenizer, number: int | float
) -> None:
    try:
        check_numbers({"const": number})
    except InvalidRequest:
        return
    assert json.loads(_walk(compiler, tokenizer, json_grammar({"const": number}), 0)) == number


def test_large_bounds_are_kept(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    for schema in (
        {"type": "integer", "minimum": -(2**53) + 1, "maximum": 2**53 - 1},
        {"type": "integer", "minimum": 0, "maximum": 2**63 - 1},
        {"type": "integer", "minimum": 2**62, "maximum": 10**30},
    ):
        check_numbers(schema)
        for seed in range(20):
            value = json.loads(_walk(compiler, tokenizer, json_grammar(schema), seed))
            Draft202012Validator(schema).validate(value)


def test_a_format_that_nobody_enforces_is_a_remark(compiler: GrammarCompiler, tokenizer: Tokenizer) -> None:
    schema = {
        "type": "object",
        "properties": {
            "format": {"type": "string", "format": "password", "maxLength": 2},
            "id": {"type": "string", "format": "uuid"},
            "data": {"const": {"format": "byte"}},
        },
        "required": ["format", "id", "data"],
        "additionalProperties": False,
    }
    value = json.loads(_walk(compiler, tokenizer, json_grammar(schema), 1))
    assert str(uuid.UUID(value["id"])) == value["id"].lower()
    assert value["data"] == {"format": "byte"}
    assert schema["properties"]["format"]["format"] == "password", "the request's own is as it was"  # type: ignore[index]


def test_compiling_lets_others_run(compiler: GrammarCompiler) -> None:
    """A compilation holds neither the loop nor, for most of it, the interpreter."""

    async def run() -> int:
        task = asyncio.ensure_future(asyncio.to_thread(compiler.compile, json_grammar(HOSTILE[6])))
        num_turns = 0
        while not task.done():
            await asyncio.sleep(0)
            num_turns += 1
        await task
        return num_turns

    assert asyncio.run(run()) > 3


def test_without_an_end_there_is_no_form(tokenizer: Tokenizer) -> None:
    with pytest.raises(InvalidRequest, match="end-of-sequence"):
        GrammarCompiler(tokenizer, frozenset()).compile(json_grammar(CITY))


async def test_the_engine_keeps_each_sequence_to_its_own_form(make_engine: Any, tokenizer: Tokenizer) -> None:
    engine = make_engine(eos=frozenset({EOS}))

    def asked(number: int, schema: dict[str, Any] | None, **options: Any) -> EngineRequest:
        grammar = None if schema is None else engine.compile_grammar(json_grammar(schema))
        params = SamplingParams(max_tokens=120, seed=number, **options)
        return EngineRequest(str(number), (1, 2, number), params, "s", grammar=grammar)

    async def text(request: EngineRequest) -> str:
        chunks = [chunk async for chunk in engine.submit(request)]
        assert chunks[-1].finish_reason is FinishReason.STOP or request.grammar is None
        return "".join(chunk.text for chunk in chunks)

    requests = [
        asked(1, CITY),
        asked(2, None),
        asked(3, NOTHING, temperature=0.0),
        asked(4, {"enum": ["yes", "no"]}, top_p=0.5),
        asked(5, CITY, temperature=0.0, logprobs=2),
    ]
    answers = await asyncio.gather(*(text(r) for r in requests))
    for answer, schema in zip(answers, (CITY, None, NOTHING, {"enum": ["yes", "no"]}, CITY), strict=True):
        if schema is not None:
            Draft202012Validator(schema).validate(json.loads(answer))
    with pytest.raises(InvalidRequest, match="ignore_eos"):
        engine.submit(asked(6, CITY, ignore_eos=True))
    with pytest.raises(InvalidRequest):
        engine.compile_grammar(json_grammar({"not": {}}))


async def test_a_form_that_becomes_too_much_fails_alone(make_engine: Any) -> None:
    engine = make_engine(eos=frozenset({EOS}))

    class Broken:
        def matcher(self) -> Broken:
            return self

        def fill_mask(self, row: Any) -> None:
            raise ValueError("too complex")

        def consume(self, token_id: int) -> None: ...

    params = SamplingParams(max_tokens=6, temperature=0.0, ignore_eos=True)
    good = engine.submit(EngineRequest("good", (1, 2), params, "s"))
    held = SamplingParams(max_tokens=6)
    bad = engine.submit(EngineRequest("bad", (1, 2), held, "s", grammar=Broken()))
    ends = [[c async for c in stream][-1] for stream in (good, bad)]
    assert [end.finish_reason for end in ends] == [FinishReason.LENGTH, FinishReason.ERROR]
