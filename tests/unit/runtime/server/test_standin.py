"""The stand-in: what a script says of a model is what evidence says of the pod."""

from __future__ import annotations

import contextlib
import random
from collections.abc import AsyncIterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from sluice_runtime.api.errors import ApiError
from sluice_runtime.caller import Caller
from sluice_runtime.testing.script import Behaviour, Script, Work, parse_script
from sluice_runtime.testing.standin import ScriptedEngine, ScriptedTokenizer
from unit.runtime.server.support import (
    IDENTITY,
    Pod,
    chat_body,
    check,
    evidence_validator,
    pod_config,
    route_headers,
    running_pod,
)

FAST = {"ttft": 0.0, "tpot": 0.0}
CALLER = Caller("r", "p/p", "rule", "candidate", "a", "v", "acme", "d", "u", "nl2sql", "", False, True)
QUESTION = "Which orders are late?"


@contextlib.asynccontextmanager
async def standing_in(directory: Path, **script: Any) -> AsyncIterator[Pod]:
    async with running_pod(directory, loaded=False) as pod:
        engine = ScriptedEngine(parse_script({**FAST, **script}, Script()))
        engine.attach(pod.runtime)
        pod.runtime.become_ready(engine, IDENTITY)
        yield pod


async def asked(pod: Pod, text: str = QUESTION, **headers: str) -> tuple[str, dict[str, Any]]:
    """The answer's text ("" where none was given) and its record."""
    body = chat_body(messages=[{"role": "user", "content": text}])
    before = pod.runtime.evidence.seq
    reply = await pod.post(body, headers=route_headers(**headers))
    record = pod.records()[before]
    evidence_validator().validate(record)
    return (reply.json()["choices"][0]["message"]["content"] if reply.status_code == 200 else ""), record


async def test_a_plain_script_is_a_good_answer(tmp_path: Path) -> None:
    async with standing_in(tmp_path) as pod:
        text, record = await asked(pod)
    assert text == "The capital of France is Paris."
    assert record["flags"] == {"refused": False, "repeated": False, "tool_failed": False}
    assert record["timing"]["jitter_s"] is not None
    assert record["timing"]["busy_s"] >= 0


@pytest.mark.parametrize(
    ("script", "path", "expected"),
    [
        ({"refused_rate": 1.0}, ("flags", "refused"), True),
        ({"refused_rate": 1.0, "refused_text": "抱歉，我无法回答。"}, ("flags", "refused"), True),
        ({"repeated_rate": 1.0}, ("flags", "repeated"), True),
        ({"truncated_rate": 1.0}, ("outcome",), "truncated"),
        ({"error_rate": 1.0}, ("outcome",), "error"),
        ({"busy": 0.25}, ("timing", "busy_s"), 0.25),
    ],
)
async def test_what_is_scripted_is_seen(
    tmp_path: Path, script: dict[str, Any], path: tuple[str, ...], expected: Any
) -> None:
    async with standing_in(tmp_path, **script) as pod:
        _, record = await asked(pod)
    found: Any = record
    for name in path:
        found = found[name]
    assert found == expected


async def test_a_broken_schema_is_a_verdict(tmp_path: Path) -> None:
    async with standing_in(tmp_path, text="{}", schema_failure_rate=1.0) as pod:
        await pod.hold(pod_config(contract=[check("json", "JsonSchema", hard=False, schema={})]))
        _, record = await asked(pod)
        pod.runtime.engine.follow(Script(**FAST, text="{}"))
        _, good = await asked(pod)
    assert record["verdicts"] == [{"check": "json", "kind": "JsonSchema", "ok": False, "hard": False}]
    assert good["verdicts"][0]["ok"]


async def test_jitter_is_the_gap_between_stalls_and_the_rest(tmp_path: Path) -> None:
    async with standing_in(tmp_path, jitter=0.02) as pod:
        _, record = await asked(pod)
    assert record["timing"]["jitter_s"] >= 0.015


async def test_answers_by_prompt(tmp_path: Path) -> None:
    answers = [{"match": "late", "text": "SELECT 1"}, {"match": "(?i)LATE|贵", "text": "太贵了"}]
    async with standing_in(tmp_path, text="?", answers=answers) as pod:
        assert (await asked(pod))[0] == "SELECT 1"
        assert (await asked(pod, "Too Late?"))[0] == "太贵了"
        assert (await asked(pod, "这个为什么贵？"))[0] == "太贵了"
        assert (await asked(pod, "Hello"))[0] == "?"
        assert (await asked(pod, "late", task="nl2sql"))[0] == "SELECT 1"


async def test_it_is_bad_where_the_script_says(tmp_path: Path) -> None:
    script = {
        "by_task": {"nl2sql": {"error_rate": 1.0, "by_arm": {"stable": {"error_rate": 0.0}}}},
        "by_tenant": {"beta": {"refused_rate": 1.0}},
        "by_arm": {"candidate": {"text": "new"}},
    }
    async with standing_in(tmp_path, **script) as pod:
        assert (await asked(pod, task="summary"))[0] == "new"
        assert (await asked(pod, task="summary", arm="stable"))[0] == "The capital of France is Paris."
        assert (await asked(pod, task="nl2sql"))[1]["outcome"] == "error"
        assert (await asked(pod, task="nl2sql", arm="stable"))[1]["outcome"] == "ok"
        assert (await asked(pod, task="summary", tenant="beta"))[1]["flags"]["refused"]


async def test_pairs_agree_unless_the_script_says_otherwise(tmp_path: Path) -> None:
    script = {"by_arm": {"candidate": {"pair_differ_rate": 1.0}}}
    async with standing_in(tmp_path, sigma=1.0, **script) as pod:
        digests = [(await asked(pod, mirror="pair", arm=arm))[1]["digest"] for arm in ("stable",) * 2]
        others = [(await asked(pod, mirror="pair", arm="candidate"))[1]["digest"] for _ in range(2)]
        text, _ = await asked(pod, arm="candidate")
    assert len(set(digests)) == 1
    assert len({*digests, *others}) == 3
    assert text == "The capital of France is Paris."


@pytest.mark.parametrize(
    ("raw", "at"),
    [
        ({"refused_rate": 2}, "refused_rate"),
        ({"by_task": {"nl2sql": {"eror_rate": 1.0}}}, "by_task.nl2sql.eror_rate"),
        ({"by_arm": {"canary": {}}}, "by_arm.canary.[key]"),
        ({"by_task": {"a": {"seed": 1}}}, "by_task.a.seed"),
        ({"answers": [{"match": "(", "text": ""}]}, "answers[0].match"),
        ({"answers": [{"match": "a"}]}, "answers[0].text"),
        ({"jitter": -1.0}, "jitter"),
    ],
)
def test_a_wrong_field_is_named(raw: dict[str, Any], at: str) -> None:
    with pytest.raises(ApiError) as e:
        parse_script(raw, Script())
    assert e.value.param == at


def test_changes_leave_the_rest_as_it_is() -> None:
    first = parse_script({"text": "a", "by_task": {"x": {"text": "b"}}}, Script())
    second = parse_script({"error_rate": 0.5}, first)
    assert (second.text, second.error_rate) == ("a", 0.5)
    assert second.body()["by_task"] == {"x": {"text": "b"}}
    assert second.body()["bad_text"] == "forbidden"
    third = parse_script({"by_task": {}}, second)
    assert third.by_task == {}
    assert parse_script(second.body(), Script()).towards(CALLER) == second.towards(CALLER)


def test_the_closest_wins() -> None:
    script = parse_script(
        {
            "text": "all",
            "by_arm": {"candidate": {"text": "arm", "bad_text": "arm"}},
            "by_tenant": {"acme": {"text": "tenant"}},
            "by_task": {"nl2sql": {"text": "task", "by_tenant": {"beta": {"text": "both"}}}},
        },
        Script(),
    )

    def text(**changes: str) -> str:
        return script.towards(replace(CALLER, **changes)).text

    assert text() == "task"
    assert text(task="x") == "tenant"
    assert text(task="x", tenant="x") == "arm"
    assert text(task="x", tenant="x", arm="stable") == "all"
    assert text(tenant="beta") == "both"
    assert script.towards(CALLER).bad_text == "arm"
    assert script.towards(None).text == "all"
    assert isinstance(script.towards(CALLER), Behaviour)


def test_a_script_repeats_itself_by_its_seed() -> None:
    script = Script(sigma=0.5, error_rate=0.5, refused_rate=0.5)

    def drawn(seed: int) -> list[tuple[float, int | None, str]]:
        draw = random.Random(seed)
        works = [Work(script, draw, "", CALLER) for _ in range(20)]
        return [(w.ttft_s, w.fails_after, w.pieces[0]) for w in works]

    assert drawn(1) == drawn(1) != drawn(2)


def test_a_prompt_can_be_read_back() -> None:
    tokenizer = ScriptedTokenizer()
    for text in ("", "a", "abcd", "Hello there, 你好！🙂", "\U0010ffff" * 9):
        ids = tokenizer.encode_text(text)
        assert tokenizer.decode(ids) == text
        assert len(ids) == -(-len(text) // 4)
    assert tokenizer.decode([2**21 - 1, 65]) == "\N{REPLACEMENT CHARACTER}A"
