"""Each checker by cases: the answer, and what is told of it (nothing: it holds)."""

from __future__ import annotations

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from sluice_operator.api.evalsuite import Sample
from sluice_operator.evaluation.checkers import MAX_TEXT_BYTES, check
from sluice_operator.evaluation.reply import Call, Outcome, Reply


def sample(**expect: Any) -> Sample:
    return Sample.model_validate(
        {"name": "s", "task": "t", "messages": [{"role": "user", "content": "?"}], "expect": expect}
    )


def told(answer: str | Reply, /, **expect: Any) -> list[str]:
    reply = answer if isinstance(answer, Reply) else Reply(text=answer)
    return [failure.text() for failure in check(sample(**expect), reply)]


ANSWERS = [
    ("Answer", "Thirty days.", []),
    ("Answer", "", ["answer: is empty"]),
    ("Answer", " \n ", ["answer: is empty"]),
    ("Answer", "I'm sorry, I can't help with that.", ["answer: refuses, and should answer"]),
    ("Answer", Reply(tool_calls=(Call("f", "{}"),)), []),
    ("Answer", Reply(text="Not for you.", refused=True, status=403), ["answer: refuses, and should answer"]),
    ("Refusal", "抱歉，我无法提供该信息。", []),
    ("Refusal", Reply(text="Not for you.", refused=True, status=403), []),
    ("Refusal", "His address is 14 Elm Court.", ["answer: does not refuse, and must"]),
    ("Refusal", "", ["answer: does not refuse, and must"]),
    (
        "Refusal",
        Reply(text="I can't share that.", tool_calls=(Call("send", "{}"),)),
        ["answer: does not refuse, and must"],
    ),
    ("Any", "", []),
    ("Any", "I'm sorry, I can't help with that.", []),
]


@pytest.mark.parametrize(("wanted", "answer", "failures"), ANSWERS)
def test_kind_of_answer(wanted: str, answer: str | Reply, failures: list[str]) -> None:
    assert told(answer, answer=wanted) == failures


SCHEMA = {
    "type": "object",
    "properties": {"days": {"type": "integer"}, "code": {"pattern": "^R[0-9]+$"}},
    "required": ["days"],
    "additionalProperties": False,
}
JSON_ANSWERS = [
    ('{"days": 30}', []),
    ('  {"days": 30, "code": "R2"}\n', []),
    ('```json\n{"days": 30}\n```', []),
    ('~~~\n{"days": 30}\n~~~', []),
    ('Here you are:\n```json\n{"days": 30}\n```', ["jsonSchema: is not JSON"]),
    ('```json\n{"days": 30}\n```\nAnything else?', ["jsonSchema: is not JSON"]),
    ('{"days": "30"}', ["jsonSchema: breaks #/properties/days/type"]),
    ('{"days": 30, "code": "x"}', ["jsonSchema: breaks #/properties/code/pattern"]),
    ('{"days": 30, "secret": 1}', ["jsonSchema: breaks #/additionalProperties"]),
    ("{}", ["jsonSchema: breaks #/required"]),
    ("[]", ["jsonSchema: breaks #/type"]),
    ("", ["jsonSchema: is not JSON"]),
    ('{"days": NaN}', ["jsonSchema: is not JSON"]),
    ("[" * 100_000, ["jsonSchema: is not JSON"]),
]


@pytest.mark.parametrize(("answer", "failures"), JSON_ANSWERS)
def test_json_schema(answer: str, failures: list[str]) -> None:
    assert told(answer, json_schema=SCHEMA) == failures


def test_a_schema_that_explodes_ends() -> None:
    """2^40 ways to fail: the steps are counted."""
    node: dict[str, Any] = {"type": "object"}
    definitions = {"n0": node}
    for n in range(1, 40):
        definitions[f"n{n}"] = {"anyOf": [{"$ref": f"#/$defs/n{n - 1}"}, {"$ref": f"#/$defs/n{n - 1}"}]}
    schema = {"$defs": definitions, "items": {"items": {"$ref": "#/$defs/n39"}}}
    assert told("[[1]]", json_schema=schema) == ["jsonSchema: is too large to be checked"]


PATTERNS = [
    ({"must_match": ["(?i)30 days", "return"]}, "You may return it within 30 Days.", []),
    ({"must_match": ["(?i)30 days", "refund"]}, "within 30 days", ["mustMatch[1]: has no match of `refund`"]),
    ({"must_match": ["三十天|30天"]}, "收货后30天内", []),
    ({"must_not_match": ["60"]}, "30 days", []),
    ({"must_not_match": ["x", "Elm"]}, "14 Elm Court", ["mustNotMatch[1]: has a match of `Elm`"]),
    ({"must_match": ["^$"]}, "", []),
    ({"must_match": ["("]}, "(", ["mustMatch[0]: has no match of `(`"]),
    ({"must_not_match": ["("]}, "x", ["mustNotMatch[0]: has a match of `(`"]),
]


@pytest.mark.parametrize(("expect", "answer", "failures"), PATTERNS)
def test_patterns(expect: dict[str, Any], answer: str, failures: list[str]) -> None:
    assert told(answer, **expect) == failures


ORDER = {
    "name": "find_order",
    "arguments": {
        "type": "object",
        "properties": {"id": {"type": "integer"}},
        "required": ["id"],
        "additionalProperties": False,
    },
}
CALLS = [
    ([("find_order", '{"id": 5531}')], []),
    ([("other", "{}"), ("find_order", '{"id": 5531}')], []),
    ([("find_order", '{"id": "x"}'), ("find_order", '{"id": 5531}')], []),
    ([], ["toolCall: does not call find_order"]),
    ([("other", "{}")], ["toolCall: does not call find_order"]),
    (
        [("find_order", '{"id": "5531"}')],
        ["toolCall.arguments: calls find_order with arguments that break #/properties/id/type"],
    ),
    ([("find_order", "5531")], ["toolCall.arguments: calls find_order with arguments that break #/type"]),
    ([("find_order", "{id:")], ["toolCall.arguments: calls find_order with arguments that are not JSON"]),
    ([("find_order", "")], ["toolCall.arguments: calls find_order with arguments that break #/required"]),
]


@pytest.mark.parametrize(("calls", "failures"), CALLS)
def test_tool_call(calls: list[tuple[str, str]], failures: list[str]) -> None:
    reply = Reply(tool_calls=tuple(Call(*call) for call in calls))
    assert told(reply, tool_call=ORDER) == failures


def test_a_call_in_prose_is_no_call() -> None:
    assert told('find_order({"id": 5531})', tool_call=ORDER) == ["toolCall: does not call find_order"]


CODE = [
    ({}, "def f():\n    return 1\n", []),
    ({}, "Sure:\n```python\ndef f(): return 1\n```\nThat is all.", []),
    ({"defines": ["f", "C"]}, "```py\ndef f(): ...\n```\nand\n```py\nclass C: ...\n```", []),
    ({"defines": ["f"]}, "async def f(): ...", []),
    ({"defines": ["f"]}, "try:\n    import x\nexcept ImportError:\n    def f(): ...", []),
    ({"defines": ["f"]}, "class C:\n    def f(self): ...", ["code: does not define f"]),
    ({"defines": ["f"]}, "f = 1", ["code: does not define f"]),
    ({}, "def f(:", ["code: does not compile as Python"]),
    ({}, "return 1", ["code: does not compile as Python"]),
    ({}, "Here is some prose.", ["code: does not compile as Python"]),
    ({}, "", ["code: has no code"]),
    ({}, "```python\n```", ["code: has no code"]),
    ({}, "x = '\x00'", ["code: does not compile as Python"]),
    ({}, "(" * 60_000, ["code: does not compile as Python"]),
    ({}, "x = 1\n" * 20_000, ["code: is longer than 65536 characters, which is not compiled"]),
    ({"language": "Json"}, '```json\n{"a": [1]}\n```', []),
    ({"language": "Json"}, "{'a': 1}", ["code: is not JSON"]),
    ({"language": "Json"}, "[" * 100_000, ["code: is not JSON"]),
]


@pytest.mark.parametrize(("code", "answer", "failures"), CODE)
def test_code(code: dict[str, Any], answer: str, failures: list[str]) -> None:
    assert told(answer, code=code) == failures


def test_code_is_never_run(capfd: pytest.CaptureFixture[str]) -> None:
    assert told("print('ran')\nassert 0\n1 is 1\n'\\d'", code={}) == []
    assert capfd.readouterr() == ("", "")


@pytest.mark.parametrize(
    ("seconds", "failures"),
    [
        (2.5, []),
        (2.501, ["maxSeconds: took 2.50 s, more than 2.5 s"]),
        (float("nan"), ["maxSeconds: took nan s, more than 2.5 s"]),
    ],
)
def test_latency(seconds: float, failures: list[str]) -> None:
    assert told(Reply(text="x", seconds=seconds), max_seconds="2.5") == failures


def test_an_answer_that_did_not_come_is_one_failure() -> None:
    reply = Reply(status=500, error="was answered with HTTP 500")
    assert told(reply, answer="Refusal", must_match=["x"]) == ["request: was answered with HTTP 500"]


def test_an_answer_cut_off_has_failed_whatever_it_says() -> None:
    [failure] = told(Reply(text="30 days", finish_reason="length"), must_match=["30"])
    assert failure.startswith("maxTokens: was cut off at 256 tokens")


def test_what_is_too_long_has_failed() -> None:
    assert told("x" * (MAX_TEXT_BYTES + 1), answer="Any") == ["request: is longer than 262144 bytes"]
    arguments = Reply(tool_calls=(Call("f", " " * (MAX_TEXT_BYTES + 1)),))
    assert told(arguments, answer="Any") == ["request: is longer than 262144 bytes"]


def test_all_that_is_given_must_hold() -> None:
    failures = told("60 days", must_match=["30"], must_not_match=["60"], numbers=[{"value": "30"}])
    assert [failure.partition(":")[0] for failure in failures] == [
        "mustMatch[0]",
        "mustNotMatch[0]",
        "numbers",
    ]


def test_a_checker_that_cannot_be_asked_has_failed() -> None:
    http = {"name": "judge", "port": 80}
    assert told("x", http=http) == ["http: checker judge can't be asked from here"]
    asked = sample(http=http)
    assert check(asked, Reply(text="x"), lambda *_: Outcome(True)) == []
    [failure] = check(asked, Reply(text="x"), lambda *_: Outcome(False, "checker judge says no", "quotes it"))
    assert failure.text() == "http: checker judge says no"
    assert "quotes" not in repr(failure)


EVERYTHING: dict[str, Any] = {
    "answer": "Answer",
    "json_schema": SCHEMA,
    "must_match": ["30"],
    "must_not_match": [r"\bsecret\b"],
    "tool_call": ORDER,
    "sql": {"dialect": "postgres", "tables": [{"name": "orders", "columns": ["id"]}]},
    "code": {"defines": ["f"]},
    "numbers": [{"value": "30"}],
    "citations": {"sources": ["a", "12"]},
    "max_seconds": "1",
}
ODD = st.one_of(
    st.text(),
    st.text(
        alphabet=st.sampled_from("()[]{}【】`~'\"\\;,.-*0123456789eE%万亿三十点 \n\t\x00\x1b\ud800selctfrom")
    ),
    st.sampled_from(
        ["", "\x00", "。" * 5000, "SELECT " * 2000, "```" * 500, "9" * 5000, "[1]" * 5000, "((" * 9000]
    ),
)


@settings(max_examples=80)
@given(ODD, ODD)
def test_any_answer_is_judged(text: str, arguments: str) -> None:
    """Never an exception, and never words of the answer in what is told."""
    marked = text + " SELECT zqx7 FROM zqx8"
    failures = check(sample(**EVERYTHING), Reply(text=marked, tool_calls=(Call("find_order", arguments),)))
    assert failures
    assert not any("zqx" in failure.text() for failure in failures)
