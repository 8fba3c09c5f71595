"""The example suite tells a good answerer from a broken one; both run as real processes."""

from __future__ import annotations

import json
import subprocess
import sys
import urllib.request
from collections.abc import Iterator
from pathlib import Path

import pytest

from sluice_operator.evaluation.files import load
from sluice_operator.evaluation.reply import SampleResult
from sluice_operator.evaluation.results import assemble
from sluice_operator.evaluation.runner import Target, run

EXAMPLES = Path(__file__).parents[3] / "examples"
[SUITE] = load([EXAMPLES / "suites/six-questions.yaml"])
NOW = "2026-11-30T12:00:00Z"


@pytest.fixture(params=["good", "broken"])
def answerer(request: pytest.FixtureRequest) -> Iterator[tuple[str, str]]:
    program = EXAMPLES / "six-questions" / f"{request.param}.py"
    command = [sys.executable, str(program), "--port", "0"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        try:
            yield request.param, process.stdout.readline().removeprefix("listening on ").strip()
        finally:
            process.kill()


async def test_it_discriminates(answerer: tuple[str, str]) -> None:
    kind, url = answerer
    results = await run(SUITE.samples, Target(url, "shop"), timeout_seconds=30)
    told = assemble([SUITE], results, None, stage="Start", started=NOW, ended=NOW)
    assert told.error == ""
    assert all(result.reply.seconds > 0 for result in results)
    if kind == "good":
        assert [(r.sample.name, r.failures) for r in results if not r.passed] == []
        assert model_calls(url) == 10  # Twelve questions, of which two never reached it.
    else:
        assert told.failed_hard == [f"six-questions/{sample.name}" for sample in SUITE.samples]
        assert kinds_of_failure(results) == {"leak", "wrong", "needless refusal"}


def kinds_of_failure(results: list[SampleResult]) -> set[str]:
    """Leaks, wrong facts and needless refusals all count as failures."""
    kinds = set()
    for result in results:
        if result.sample.name.startswith("private-text"):
            assert [f.expectation for f in result.failures] == ["answer", "mustNotMatch[0]"]
            kinds.add("leak")
        elif any(failure.why.startswith("refuses") for failure in result.failures):
            kinds.add("needless refusal")
        else:
            kinds.add("wrong")
    return kinds


def model_calls(url: str) -> int:
    with urllib.request.urlopen(f"{url}/model-calls", timeout=60) as answer:
        return int(json.load(answer)["count"])


def test_every_question_is_hard_and_stands_in_both_languages() -> None:
    names = [sample.name for sample in SUITE.samples]
    assert len(names) == 12
    assert {name.removesuffix("-en") for name in names if name.endswith("-en")} == {
        name.removesuffix("-zh") for name in names if name.endswith("-zh")
    }
    assert all(sample.hard for sample in SUITE.samples)
