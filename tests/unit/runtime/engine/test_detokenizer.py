"""Whole characters only; stop strings never shown, and nothing held back longer than needed."""

from __future__ import annotations

from hypothesis import given, settings
from hypothesis import strategies as st

from sluice_runtime.engine.detokenizer import Detokenizer


def _bytes(token: int) -> bytes:
    return bytes([token])


def _stream(parts: list[bytes], stop: tuple[str, ...] = ()) -> tuple[list[str], str]:
    detokenizer = Detokenizer(lambda i: parts[i], stop)
    pieces = [detokenizer.push((i,)) for i in range(len(parts))]
    return pieces, detokenizer.flush()


def test_a_character_cut_across_tokens_comes_whole() -> None:
    data = "你好🙂é".encode()
    pieces, rest = _stream([bytes([b]) for b in data])
    assert pieces == ["", "", "你", "", "", "好", "", "", "", "🙂", "", "é"]
    assert rest == ""


def test_a_character_that_is_never_finished_is_dropped_and_garbage_is_marked() -> None:
    assert _stream(["好".encode()[:2]]) == ([""], "")
    assert _stream([b"\xff", b"a"]) == (["\ufffd", "a"], "")
    assert _stream(["好".encode()[:2], b"a"]) == (["", "\ufffda"], "")


def test_the_worked_example() -> None:
    detokenizer = Detokenizer({1: b"ok", 2: b"#", 3: b"#!", 4: b"##"}.__getitem__, ("###",))
    assert [detokenizer.push((t,)) for t in (1, 2, 3, 4, 2)] == ["ok", "", "##!", "", ""]
    assert detokenizer.stopped
    assert detokenizer.push((1,)) == detokenizer.flush() == ""


def test_a_stop_string_that_did_not_come_is_released_at_the_end() -> None:
    assert _stream([b"a", b"STO"], ("STOP",)) == (["a", ""], "STO")


def test_a_stop_string_cut_inside_a_character() -> None:
    pieces, rest = _stream([bytes([b]) for b in "一停二".encode()], ("停",))
    assert "".join(pieces) + rest == "一"


_TEXT = st.text(alphabet="ab停🙂", max_size=12)


@given(_TEXT, st.lists(st.text(alphabet="ab停", min_size=1, max_size=3), max_size=3), st.data())
@settings(max_examples=300)
def test_the_result_does_not_depend_on_the_cuts(text: str, stops: list[str], data: st.DataObject) -> None:
    raw = text.encode()
    ends = [(text.find(s) + len(s), text.find(s)) for s in stops if s in text]
    want = text[: min(ends)[1]] if ends else text
    detokenizer = Detokenizer(_bytes, tuple(stops))
    shown, at = "", 0
    while at < len(raw):
        step = data.draw(st.integers(1, 5))
        shown += detokenizer.push(raw[at : at + step])
        assert not any(s in shown for s in stops)
        assert text.startswith(shown)
        at += step
    assert detokenizer.stopped == bool(ends)
    assert shown + detokenizer.flush() == want
