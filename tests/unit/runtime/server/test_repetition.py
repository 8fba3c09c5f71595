"""Which answers end in a loop, and which only look repetitive."""

from __future__ import annotations

import time

import pytest
from hypothesis import example, given
from hypothesis import strategies as st

from sluice_runtime.repetition import MIN_PLAIN_WIDTH, MIN_TIMES, MIN_WIDTH, TAIL, ends_in_loop

TABLE = "| day | orders | refunds |\n| --- | --- | --- |\n" + "".join(
    f"| {day} | {100 + day} | 0 |\n" for day in range(1, 32)
)
CODE = (
    "def f(x):\n    if x:\n        for i in range(x):\n            with open(i):\n                print(i)\n"
    + "".join(f"    assert f({i}) == {i * i}\n" for i in range(40))
    + "        }\n      }\n    }\n  }\n}\n"
)


@pytest.mark.parametrize(
    "text",
    [
        "It goes on and so on" + " and so on" * 20,
        "The answer is the " + "the " * 40,
        "I think that you should restart the server. " * 5,
        "The order was shipped on Monday and arrives soon.\n" * 5,
        "Wait" + ", let me think about this again" * 6 + ", let me th",
        "答案是" + "非常" * 30,
        "好的，" + "我来帮您查询一下。" * 8,
        "```sql\nSELECT a FROM t\n" + "UNION ALL SELECT a FROM t\n" * 6,
        "| a | b |\n" * 30,
        "ok " + "!" * 400,
        "\n".join(["0, 0, 0, 0, 0, 0, 0, 0"] * 30),
        "The end." + "\n" * 300,
        "🙂" + "x 🙂 " * 40 + "   \n",
    ],
)
def test_a_loop(text: str) -> None:
    assert ends_in_loop(text)


@pytest.mark.parametrize(
    "text",
    [
        "",
        "Paris.",
        "ha ha ha ha ha",
        "哈哈哈哈哈哈哈哈哈哈",
        "very, very, very, very good",
        "No, no, no, no, no!",
        TABLE,
        TABLE + "| --- | --- | --- |\n",
        "| x | y |\n|" + " --- |" * 12,
        CODE,
        "# Title\n" + "=" * 80,
        "-" * 100,
        "1. a\n2. a\n3. a\n4. a\n5. a\n6. a\n7. a\n8. a\n9. a\n",
        "[" + "0, " * 60 + "0]",
        "00000000-0000-0000-0000-000000000000",
        "- 待定\n" * 8,
        "It goes on" + " and so on" * 20 + ", until it ends well.",
        "I will not repeat myself. " * 3,
        "SELECT " + ", ".join(f"COALESCE(t.column_{i}, 0) AS column_{i}" for i in range(30)),
        "".join(f'{{"id": {i}, "state": "open", "owner": null}},\n' for i in range(30)),
    ],
)
def test_no_loop(text: str) -> None:
    assert not ends_in_loop(text)


def by_definition(text: str) -> bool:
    """The same in quadratic time."""
    end = text[-TAIL:]
    tail = end.rstrip()
    if len(end) - len(tail) >= MIN_PLAIN_WIDTH:
        return True
    for period in range(1, len(tail) // MIN_TIMES + 1):
        length = period
        while length < len(tail) and tail[-1 - length] == tail[-1 - length + period]:
            length += 1
        width = sum(2 if c >= "⺀" else 1 for c in tail[-length:])
        has_letter = any(c.isalpha() for c in tail[-period:])
        if length >= MIN_TIMES * period and width >= (MIN_WIDTH if has_letter else MIN_PLAIN_WIDTH):
            return True
    return False


pieces = st.builds(lambda f, n: f * n, st.text("ab文|0 \n", min_size=1, max_size=12), st.integers(1, 60))


@given(st.lists(pieces, max_size=3).map("".join))
@example("a" * 47 + "b" * 95)
@example("文" * 48)
def test_it_is_what_it_says(text: str) -> None:
    assert ends_in_loop(text) == by_definition(text)


@given(st.text(max_size=200), st.text("abc文字 .,\n", min_size=1, max_size=100), st.integers(0, 99))
def test_every_loop_of_words_is_found(before: str, fragment: str, cut: int) -> None:
    fragment = "w" + fragment
    assert ends_in_loop(before + fragment * (MIN_WIDTH // len(fragment) + MIN_TIMES + 2) + fragment[:cut])


def test_the_work_is_bounded() -> None:
    texts = [
        "a" * 10_000_000,
        "b" + "a" * (TAIL - 1),
        ("ab" * (TAIL // 2))[:-1] + "b",
        ("a" * 40 + "b") * 100 + "a" * 20,
        ("a" * 15 + "b") * 200 + "a" * 15 + "c" + "a" * 16,
    ]
    began = time.process_time()
    for text in texts:
        ends_in_loop(text)
    assert time.process_time() - began < 0.5
