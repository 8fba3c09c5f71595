"""What counts as a refusal: the cases that operator and runtime share."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice_operator.evaluation.refusals import is_refusal

CASES = json.loads((Path(__file__).parents[3] / "docs/contracts/refusals.json").read_text())["cases"]


@pytest.mark.parametrize("case", CASES, ids=lambda case: case["text"][:40] or "empty")
def test_shared_cases(case: dict[str, object]) -> None:
    assert is_refusal(str(case["text"])) is case["refusal"]


def test_a_refusal_begins_an_answer() -> None:
    """What is declined after a whole answer does not make the answer a refusal."""
    assert not is_refusal("The return period is 30 days. " * 20 + "I can't help with anything else.")


@given(st.text())
def test_any_text_is_judged(text: str) -> None:
    assert is_refusal(text) in (True, False)
