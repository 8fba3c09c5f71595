"""Which beginnings of an answer are a refusal by the model: tables of what must count and what must not."""

from __future__ import annotations

import json
import time
from typing import Any

import pytest

from sluice_runtime.refusal import HEAD, is_refusal
from unit.runtime.server.support import CONTRACTS

SHARED = json.loads((CONTRACTS / "refusals.json").read_text())["cases"]

REFUSAL = "I'm sorry, but I can't help with that."


@pytest.mark.parametrize("case", SHARED, ids=lambda case: case["text"][:40])
def test_what_the_operator_takes_for_a_refusal_too(case: dict[str, Any]) -> None:
    assert is_refusal(case["text"]) == case["refusal"]


def test_only_the_beginning_counts() -> None:
    assert not is_refusal("The capital of France is Paris. " + REFUSAL)
    assert not is_refusal("Hello, " * (HEAD // 7 + 1) + REFUSAL)


def test_long_and_strange_texts_cost_nothing() -> None:
    texts = [
        "a" * 1_000_000,
        "," * 1_000_000,
        "<think>" * 100_000,
        "抱歉，" * 300_000,
        "i'm sorry " * 100_000,
        "\ud800",
    ]
    began = time.process_time()
    for text in texts:
        is_refusal(text)
    assert time.process_time() - began < 0.5
