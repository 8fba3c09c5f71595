"""What of an answer is meant: fenced blocks, or all of it."""

from __future__ import annotations

import json

import pytest
from hypothesis import given
from hypothesis import strategies as st

from sluice_operator.evaluation import wire
from sluice_operator.evaluation.excerpt import meant, split, unfenced

CASES = [
    ("x", ["py"], "x"),
    ("a\n```py\nx\n```\nb", ["py"], "x"),
    ("```PY\nx\n```\n```text\nout\n```\n```py\ny\n```", ["py"], "x|y"),
    ("```\nx\n```", ["py"], "x"),
    ("```text\nx\n```", ["py"], "x"),
    ("```py\nx", ["py"], "x"),
    ("~~~py\n```\n~~~", ["py"], "```"),
    ("````py\n```\nx\n```\n````", ["py"], "```\nx\n```"),
    ('```py title="a"\nx\n```', ["py"], "x"),
    ("use ```x``` here", ["py"], "use ```x``` here"),
    ("", ["py"], ""),
]


@pytest.mark.parametrize(("text", "languages", "found"), CASES)
def test_meant(text: str, languages: list[str], found: str) -> None:
    assert meant(text, languages, "|") == found


@pytest.mark.parametrize(
    ("text", "found"),
    [
        ("```json\n{}\n```", "{}"),
        (" \n```\n{}\n\n```\n ", "{}\n"),
        ("Here:\n```json\n{}\n```", "Here:\n```json\n{}\n```"),
        ("```json\n{}", "```json\n{}"),
        ("```\n1\n```\n```\n2\n```", "```\n1\n```\n```\n2\n```"),
        (" {} ", "{}"),
    ],
)
def test_unfenced(text: str, found: str) -> None:
    assert unfenced(text) == found


@given(st.text(alphabet="`~ \n\tpy{}x\x0b\u2028"))
def test_any_text_is_split(text: str) -> None:
    prose, blocks = split(text)
    assert len(prose) + sum(len(block.content) for block in blocks) <= len(text)
    unfenced(text)


JSON = st.recursive(
    st.none() | st.booleans() | st.integers() | st.text(max_size=5),
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(
            st.sampled_from(
                [
                    "choices",
                    "message",
                    "content",
                    "tool_calls",
                    "function",
                    "name",
                    "arguments",
                    "error",
                    "code",
                ]
            ),
            inner,
            max_size=4,
        )
    ),
    max_leaves=20,
)


@given(st.integers(100, 599), st.binary() | JSON.map(lambda value: json.dumps(value).encode()))
def test_any_body_is_an_answer_or_none(status: int, body: bytes) -> None:
    told = wire.reply(status, body, 1.0)
    assert told.error or told.refused or status == 200
