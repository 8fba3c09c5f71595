"""Each sample of the example suites takes a right answer and refuses wrong ones."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import yaml

from sluice_operator.api.evalsuite import Sample
from sluice_operator.evaluation.checkers import check
from sluice_operator.evaluation.excerpt import split
from sluice_operator.evaluation.files import load
from sluice_operator.evaluation.reply import Call, Reply

EXAMPLES = Path(__file__).parents[3] / "examples/suites"
SUITES = {s.name: s for s in load(sorted(EXAMPLES.glob("*.yaml"))) if s.name != "six-questions"}
ANSWERS = yaml.safe_load((Path(__file__).parent / "example_answers.yaml").read_text())
CASES = [
    pytest.param(sample, answers, id=f"{suite.name}/{sample.name}")
    for suite in SUITES.values()
    for sample in suite.samples
    for answers in [ANSWERS[suite.name][sample.name]]
]


def reply(given: Any) -> Reply:
    return Reply(text=given) if isinstance(given, str) else Reply(tool_calls=(Call(**given),))


@pytest.mark.parametrize(("sample", "answers"), CASES)
def test_right_answers_pass_and_wrong_ones_do_not(sample: Sample, answers: dict[str, list[Any]]) -> None:
    assert answers["good"]
    assert answers["bad"]
    for answer in answers["good"]:
        assert [failure.text() for failure in check(sample, reply(answer))] == [], answer
    for answer in answers["bad"]:
        assert check(sample, reply(answer)), answer


def test_the_five_kinds_of_task_are_covered() -> None:
    assert {task for suite in SUITES.values() for task in suite.tasks} == {
        "summary", "kb-qa", "nl2sql", "code", "compliance",
    }  # fmt: skip
    assert all(4 <= len(suite.samples) <= 8 for suite in SUITES.values())


def test_the_page_shows_a_suite_that_can_run(tmp_path: Path) -> None:
    _, blocks = split((EXAMPLES.parents[1] / "docs/evaluation.md").read_text())
    manifest = next(block.content for block in blocks if "kind: EvalSuite" in block.content)
    (tmp_path / "shop.yaml").write_text(manifest)
    [suite] = load([tmp_path / "shop.yaml"])
    right = Reply(text="Within 30 days.")
    assert [check(sample, right) for sample in suite.samples] == [[]]


def test_the_checkers_are_shown() -> None:
    used = {
        field
        for suite in SUITES.values()
        for sample in suite.samples
        for field in sample.expect.model_fields_set
    }
    assert used == {
        "answer", "json_schema", "must_match", "must_not_match", "tool_call", "sql", "code", "numbers",
        "citations", "max_seconds",
    }  # fmt: skip
