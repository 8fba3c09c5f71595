"""Verdicts: what is a violation, what is hard, what reaches the user, and that no pattern can hang us."""

from __future__ import annotations

import asyncio
import json
import time
from typing import Any

import pytest

from sluice_runtime.contract import Contract, ContractError, StreamJudge, Verdict
from sluice_runtime.engine.types import FinishReason
from sluice_runtime.patterns import PatternError, TooMuchWork, compile_pattern
from sluice_runtime.podconfig import CheckSpec
from sluice_runtime.schema_check import BoundedSchema, SchemaRefused
from unit.runtime.server.support import Pod, chat_body, check, events, pod_config, route_headers

PERSON = {
    "type": "object",
    "properties": {"name": {"type": "string", "pattern": "^[A-Z]"}, "age": {"type": "integer"}},
    "required": ["name"],
    "additionalProperties": False,
}


def contract(*specs: dict[str, Any]) -> Contract:
    return Contract([CheckSpec.model_validate(spec) for spec in specs])


@pytest.mark.parametrize(
    ("text", "ok"),
    [
        ('{"name": "Ada"}', True),
        (' {"name": "Ada", "age": 3}\n', True),
        ('{"name": "ada"}', False),
        ('{"name": "Ada", "x": 1}', False),
        ('{"age": 3}', False),
        ('{"name": "Ada", "age": NaN}', False),
        ('{"name": "Ada"', False),
        ('```json\n{"name": "Ada"}\n```', False),
        ("", False),
        ("[" * 100_000, False),
        ('{"name": "Ada", "age": ' + "9" * 5000 + "}", False),
    ],
)
def test_json_schema(text: str, ok: bool) -> None:
    judgement = contract(check("person", "JsonSchema", schema=PERSON)).judge(text, truncated=False)
    assert judgement.verdicts == (Verdict("person", "JsonSchema", ok, True),)
    assert judgement.withhold == (() if ok else ("person",))


@pytest.mark.parametrize(
    ("kind", "text", "truncated", "verdict"),
    [
        ("MustMatch", "the end.", False, (True, True)),
        ("MustMatch", "no full stop", False, (False, True)),
        ("MustMatch", "no full stop", True, (False, False)),
        ("MustNotMatch", "all good", False, (True, True)),
        ("MustNotMatch", "ends here.", False, (False, True)),
        ("MustNotMatch", "cut here.", True, (True, True)),
    ],
)
def test_patterns_that_look_at_the_end(
    kind: str, text: str, truncated: bool, verdict: tuple[bool, bool]
) -> None:
    judgement = contract(check("dot", kind, pattern=r"\.$")).judge(text, truncated)
    assert [(v.ok, v.hard) for v in judgement.verdicts] == [verdict]


def test_a_truncation_is_never_a_hard_violation_of_a_schema() -> None:
    judgement = contract(check("person", "JsonSchema", schema=PERSON)).judge('{"name": "A', truncated=True)
    assert judgement.verdicts == (Verdict("person", "JsonSchema", False, False),)
    assert judgement.withhold == ()


def test_a_forbidden_pattern_is_hard_whatever_came_after() -> None:
    judgement = contract(check("no-key", "MustNotMatch", pattern="sk-[a-z]{4}")).judge(
        "sk-abcd and", truncated=True
    )
    assert judgement.verdicts == (Verdict("no-key", "MustNotMatch", False, True),)


def test_soft_checks_withhold_nothing() -> None:
    judgement = contract(check("dot", "MustMatch", hard=False, pattern="x")).judge("y", truncated=False)
    assert judgement.verdicts == (Verdict("dot", "MustMatch", False, False),)
    assert judgement.withhold == ()


@pytest.mark.parametrize(
    ("spec", "field"),
    [
        (check("a", "MustMatch", pattern="("), "contract[0].pattern"),
        (check("a", "MustMatch", pattern="(?=x)"), "contract[0].pattern"),
        (check("a", "MustMatch", pattern=r"(a)\1"), "contract[0].pattern"),
        (check("a", "MustMatch", pattern="a" * 5000), "contract[0].pattern"),
        (check("a", "MustMatch", pattern="(?:.*){1000}"), "contract[0].pattern"),
        (check("a", "MustMatch"), "contract[0].pattern"),
        (check("a", "MustMatch", pattern="a", schema={}), "contract[0].schema"),
        (check("a", "JsonSchema"), "contract[0].schema"),
        (check("a", "JsonSchema", schema={}, pattern="a"), "contract[0].pattern"),
        (check("a", "JsonSchema", schema={"type": "nonsense"}), "contract[0].schema"),
        (check("a", "JsonSchema", schema={"pattern": "("}), "contract[0].schema"),
        (check("a", "JsonSchema", schema={"$ref": "http://example.com/x"}), "contract[0].schema"),
        (check("a", "JsonSchema", schema={"$ref": "#/$defs/none"}), "contract[0].schema"),
        (check("a", "JsonSchema", schema={"$ref": "#"}), "contract[0].schema"),
        (check("a", "JsonSchema", schema={"unevaluatedProperties": False}), "contract[0].schema"),
        (
            check("a", "JsonSchema", schema={"$schema": "http://json-schema.org/draft-04/schema#"}),
            "contract[0].schema",
        ),
        (check("a", "JsonSchema", schema={"enum": ["x" * 70_000]}), "contract[0].schema"),
    ],
)
def test_what_does_not_compile_names_its_field(spec: dict[str, Any], field: str) -> None:
    with pytest.raises(ContractError) as e:
        contract(spec)
    assert e.value.field == field


def test_check_names_are_unique() -> None:
    with pytest.raises(ContractError) as e:
        contract(check("a", "MustMatch", pattern="a"), check("a", "MustMatch", pattern="b"))
    assert e.value.field == "contract[1].name"


@pytest.mark.parametrize(
    "pattern", ["(a+)+$", "(a|aa)+$", "(a|a?)+$", "(.*a){12}$", "^(([a-z])+.)+[A-Z]([a-z])+$"]
)
def test_catastrophic_patterns_finish(pattern: str) -> None:
    text = "a" * 100_000 + "!"
    began = time.monotonic()
    judge = contract(
        check("p", "MustMatch", pattern=pattern), check("s", "JsonSchema", schema={"pattern": pattern})
    )
    judge.judge(json.dumps(text), truncated=False)
    assert time.monotonic() - began < 60


def test_schemas_that_blow_up_finish() -> None:
    defs: dict[str, Any] = {"d0": {"type": "object"}}
    for i in range(1, 30):
        reference = {"$ref": f"#/$defs/d{i - 1}"}
        defs[f"d{i}"] = {"anyOf": [{"allOf": [reference, {"minProperties": 9}]}, reference]}
    began = time.monotonic()
    with pytest.raises(SchemaRefused):
        BoundedSchema({"$ref": "#/$defs/d29", "$defs": defs, "type": ["object", "null"]})
    assert time.monotonic() - began < 60


def test_many_items_are_compared_in_linear_time() -> None:
    schema = BoundedSchema({"uniqueItems": True})
    began = time.monotonic()
    assert schema.check(json.dumps([{"i": i} for i in range(20_000)]))
    assert time.monotonic() - began < 60
    assert not schema.check("[1, 1.0]")
    assert schema.check("[1, true]")
    assert not schema.check('[{"a": 1, "b": 2}, {"b": 2, "a": 1}]')


def test_what_could_not_be_judged_is_withheld_but_is_no_hard_violation() -> None:
    judgement = contract(check("p", "MustMatch", pattern="x")).judge("y" * 300_000, truncated=False)
    assert judgement.verdicts == (Verdict("p", "MustMatch", False, False),)
    assert judgement.withhold == ("p",)


def test_work_is_bounded() -> None:
    pattern = compile_pattern("((a{1,100}){1,10})x")
    with pytest.raises(TooMuchWork):
        pattern.search(b"a" * 1_000_000)
    with pytest.raises(PatternError):
        compile_pattern(r"(\pL{50}){20}")


def feed(judge: StreamJudge, *texts: str) -> list[list[str]]:
    return [[v.check for v in judge.feed(text)] for text in texts]


def test_a_pattern_across_chunks_is_seen_when_complete() -> None:
    judge = StreamJudge(contract(check("key", "MustNotMatch", pattern="sk-[a-z]{4}")))
    assert feed(judge, "my s", "k-ab", "c", "d!", "sk-zzzz") == [[], [], [], ["key"], []]


@pytest.mark.parametrize(("pattern", "first"), [(r"foo$", False), (r"foo\b", False), (r"foo", True)])
def test_matches_that_more_text_can_undo_wait(pattern: str, first: bool) -> None:
    judge = StreamJudge(contract(check("c", "MustNotMatch", pattern=pattern)))
    assert [bool(found) for found in feed(judge, "foo", "bar")] == [first, False]


def test_a_word_boundary_is_seen_with_the_next_text() -> None:
    judge = StreamJudge(contract(check("c", "MustNotMatch", pattern=r"foo\b")))
    assert feed(judge, "foo", " ", "bar") == [[], ["c"], []]


def test_the_start_of_the_text_is_not_the_start_of_a_chunk() -> None:
    judge = StreamJudge(contract(check("c", "MustNotMatch", pattern="^bad")))
    assert feed(judge, "so ", "bad", "x" * 20_000, "bad") == [[], [], [], []]


def test_a_long_stream_is_watched_in_bounded_time() -> None:
    judge = StreamJudge(
        contract(check("c", "MustNotMatch", pattern="(a|b)*c{3}"), check("d", "MustNotMatch", pattern="好坏"))
    )
    began = time.monotonic()
    for _ in range(10_000):
        assert judge.feed("abab ab 好 ") == []
    assert time.monotonic() - began < 60
    assert [v.check for v in judge.feed("好坏")] == ["d"]


FORBID = [check("no-secret", "MustNotMatch", pattern="TOP SECRET")]
JSON = [
    check("person", "JsonSchema", schema=PERSON),
    check("short", "MustMatch", hard=False, pattern="^.{0,5}$"),
]


async def test_a_whole_answer_that_breaks_its_contract_is_withheld(pod: Pod) -> None:
    await pod.hold(pod_config(contract=JSON))
    pod.engine.auto = ["not ", "json at all"]
    reply = await pod.post(chat_body())
    assert reply.status_code == 502
    assert reply.json()["error"]["code"] == "contract_violation"
    assert "json at all" not in reply.text
    record = await pod.record()
    assert (record["outcome"], record["status"]) == ("error", 502)
    assert record["verdicts"] == [
        {"check": "person", "kind": "JsonSchema", "ok": False, "hard": True},
        {"check": "short", "kind": "MustMatch", "ok": False, "hard": False},
    ]


async def test_an_answer_that_keeps_it_passes(pod: Pod) -> None:
    await pod.hold(pod_config(contract=JSON))
    pod.engine.auto = ['{"name": ', '"Ada"}']
    reply = await pod.post(chat_body())
    assert reply.json()["choices"][0]["message"]["content"] == '{"name": "Ada"}'
    assert (await pod.record())["verdicts"][0] == {
        "check": "person",
        "kind": "JsonSchema",
        "ok": True,
        "hard": True,
    }


async def test_a_mirror_only_records(pod: Pod) -> None:
    await pod.hold(pod_config(contract=FORBID))
    pod.engine.auto = ["a ", "TOP SECRET", " b"]
    for stream in (False, True):
        reply = await pod.post(chat_body(stream=stream), headers=route_headers(mirror="1"))
        assert reply.status_code == 200
        assert "TOP SECRET" in reply.text
    records = pod.records()
    assert [(r["final"], r["mirror"], r["outcome"]) for r in records] == [
        (False, True, "ok"),
        (True, True, "ok"),
    ] * 2
    assert all(
        r["verdicts"] == [{"check": "no-secret", "kind": "MustNotMatch", "ok": False, "hard": True}]
        for r in records
    )


async def test_a_stream_is_cut_at_a_forbidden_pattern(pod: Pod) -> None:
    await pod.hold(pod_config(contract=FORBID))
    request = asyncio.create_task(pod.post(chat_body(stream=True)))
    generation = await pod.engine.next()
    generation.token("it is TOP ")
    generation.token("SECRET that")
    found = events((await request).text)
    assert found[-1]["error"]["code"] == "contract_violation"
    assert "[DONE]" not in found
    assert "SECRET" not in json.dumps(found)
    assert generation.cancelled.is_set()
    early, final = pod.records()
    assert (early["final"], final["final"]) == (False, True)
    assert (final["outcome"], final["status"]) == ("error", 200)
    assert (
        early["verdicts"]
        == final["verdicts"]
        == [{"check": "no-secret", "kind": "MustNotMatch", "ok": False, "hard": True}]
    )


async def test_the_early_record_does_not_wait_for_the_end(pod: Pod) -> None:
    await pod.hold(pod_config(contract=FORBID))
    request = asyncio.create_task(pod.post(chat_body(stream=True), headers=route_headers(mirror="1")))
    generation = await pod.engine.next()
    generation.token("TOP SECRET")
    record = await pod.record()
    assert record["final"] is False
    assert len(pod.runtime.heartbeat()["running"]) == 1
    generation.token("x", FinishReason.STOP)
    await request


async def test_a_violation_in_the_first_token_is_a_status(pod: Pod) -> None:
    await pod.hold(pod_config(contract=FORBID))
    pod.engine.auto = ["TOP SECRET", "x"]
    assert (await pod.post(chat_body(stream=True))).status_code == 502


async def test_a_stream_that_ends_in_violation_is_marked(pod: Pod) -> None:
    await pod.hold(pod_config(contract=JSON))
    pod.engine.auto = ["not", " json"]
    found = events((await pod.post(chat_body(stream=True))).text)
    assert found[-1]["error"]["code"] == "contract_violation"
    assert found[-1]["incomplete"] is True
    assert (await pod.record())["verdicts"][0] == {
        "check": "person",
        "kind": "JsonSchema",
        "ok": False,
        "hard": True,
    }


async def test_a_truncated_answer_is_given_and_not_held_against_the_arm(pod: Pod) -> None:
    await pod.hold(pod_config(contract=JSON))
    pod.engine.auto, pod.engine.auto_finish = ['{"name": "A'], FinishReason.LENGTH
    assert (await pod.post(chat_body())).status_code == 200
    record = await pod.record()
    assert record["outcome"] == "truncated"
    assert record["verdicts"][0] == {"check": "person", "kind": "JsonSchema", "ok": False, "hard": False}


async def test_a_cancelled_answer_is_not_held_against_the_arm(pod: Pod) -> None:
    await pod.hold(pod_config(contract=JSON))
    request = asyncio.create_task(pod.post(chat_body()))
    generation = await pod.engine.next()
    generation.token('{"na')
    request.cancel()
    record = await pod.record()
    assert (record["outcome"], record["verdicts"]) == ("cancelled", [])
