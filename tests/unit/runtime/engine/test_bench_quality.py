"""`make bench-quality` can tell settings apart: what it counts, and a model that Int4 changes, over HTTP."""

from __future__ import annotations

import contextlib
import json
import re
from collections.abc import AsyncIterator, Sequence
from pathlib import Path
from typing import Any

import pytest
from benches import quality

from sluice_operator.api.evalsuite import Sample
from sluice_operator.evaluation.reply import Call, Failure, Reply, SampleResult
from sluice_operator.evaluation.runner import Target, run
from sluice_runtime.api.app import api_app
from sluice_runtime.engine.engine import Engine
from sluice_runtime.engine.types import EngineConfig
from sluice_runtime.models import ModelSource, load
from sluice_runtime.server import bind, listening
from sluice_runtime.state import Identity, Runtime, Settings

NUM_TOKENS = 24


def sample(name: str, task: str = "a", match: str = ".", question: str = "?") -> Sample:
    return Sample.model_validate(
        {
            "name": name,
            "task": task,
            "messages": [{"role": "user", "content": question}],
            "maxTokens": NUM_TOKENS,
            "expect": {"mustMatch": [match]},
        }
    )


def result(asked: Sample, text: str, passed: bool, *calls: Call) -> SampleResult:
    failures = () if passed else (Failure("mustMatch[0]", "has no match"),)
    return SampleResult(asked, Reply(text=text, tool_calls=calls), failures)


def encode(text: str) -> list[str]:
    return text.split()


def test_answers_are_counted_by_task_and_beside_the_first_setting_s() -> None:
    samples = [sample("x"), sample("y"), sample("z"), sample("w", "b")]
    first = [
        result(samples[0], "one two three", True),
        result(samples[1], "one two", False),
        result(samples[2], "one", False),
        result(samples[3], "", True, Call("f", "{}")),
    ]
    other = [
        result(samples[0], "one two four", False),
        result(samples[1], "one two", True),
        result(samples[2], "two", False),
        result(samples[3], "", True, Call("f", '{"a": 1}')),
    ]
    told = quality.compare(first, other, encode)
    assert told["a"] == quality.Task(
        3, passed=1, lost=1, gained=1, identical=1, prefix_tokens=1.3, tokens=2.0
    )
    assert (told["b"].identical, told["b"].passed) == (0, 1)  # not the same call
    assert quality.compare(first, first, encode)["a"].identical == 3
    with pytest.raises(ValueError, match="w is compared with x"):
        quality.compare(first[3:], other[:1], encode)


def test_the_table_has_a_column_for_each_setting() -> None:
    samples = [sample("x"), sample("y", "b")]
    first = [result(samples[0], "one two", True), result(samples[1], "one", True)]
    other = [result(samples[0], "one", False), result(samples[1], "one", True)]
    compared = {n: quality.compare(first, r, encode) for n, r in ((quality.FIRST, first), ("Int4", other))}
    scored = {"bf16": {"perplexity": 10.0, "delta_percent": 0.0}}
    lines = [line.split() for line in quality.table(scored, compared).splitlines()]
    assert lines[0] == ["bf16", "Int4"]
    assert ["perplexity", "10.00"] in lines  # of Int4 it was not asked
    assert ["all", "2/2", "1/2"] in lines
    assert ["lost,", "gained", "-0", "+0", "-1", "+0"] in lines
    assert ["a", "2/2", "1/2"] in lines


@contextlib.asynccontextmanager
async def serving(directory: Path, kind: Any) -> AsyncIterator[str]:
    engine = Engine(
        load(ModelSource(path=directory, dtype="float32", quantization=kind)),
        EngineConfig(num_kv_blocks=256, block_size=4, num_threads=1),
    )
    engine.start()
    runtime = Runtime(Settings("tiny", None, None))
    runtime.become_ready(engine, Identity("sha256:m", "sha256:s", "sha256:r"))
    try:
        async with listening((api_app(runtime), bind("127.0.0.1", 0)), None) as ports:
            yield f"http://127.0.0.1:{ports.api}"
    finally:
        engine.stop()


async def asked(directory: Path, samples: Sequence[Sample], kind: str | None = None) -> list[SampleResult]:
    async with serving(directory, kind) as url:
        target = Target(url, "tiny", temperature=0.0)
        return await run(samples, target, timeout_seconds=60, concurrency=len(samples))


async def test_a_model_that_a_setting_changes_is_seen(tmp_path: Path, llama: Any, hf_tokenizer: Any) -> None:
    llama.reference.save_pretrained(tmp_path)
    hf_tokenizer.save_pretrained(tmp_path)
    # Many tokens end an answer, so that some answers of a random model end.
    (tmp_path / "generation_config.json").write_text(json.dumps({"eos_token_id": list(range(0, 300, 8))}))
    plain = [sample(f"s{i}", question=f"Question {i}?") for i in range(12)]
    answers = [r.reply for r in await asked(tmp_path, plain)]
    # What the model itself answers is what is right: the suite tells apart whatever changes an answer.
    suite = [
        sample(s.name, match=f"^{re.escape(answer.text)}$", question=s.messages[0].content)
        for s, answer in zip(plain, answers, strict=True)
        if answer.finish_reason == "stop" and answer.text
    ]
    assert len(suite) >= 4
    first, again = await asked(tmp_path, suite), await asked(tmp_path, suite)
    same = quality.compare(first, again, list)["a"]
    assert (same.passed, same.lost, same.identical) == (len(suite), 0, len(suite))
    other = quality.compare(first, await asked(tmp_path, suite, "Int4"), list)["a"]
    assert other.lost == len(suite) - other.passed > 0
    assert other.identical < len(suite)
    assert other.prefix_tokens < other.tokens
