"""Tells an answer that got stuck in a loop; exists because nothing else about such an answer looks wrong.

A tail of period `p` repeats its last `p` characters. It counts if it holds them `MIN_TIMES` and is
`MIN_WIDTH` columns wide; without a letter in it (rulers, rows of zeros) `MIN_PLAIN_WIDTH`. Example: two lines
of "and so on"; but no ruler, no table and no "ha ha ha".

Invariant: looks at the last `TAIL` characters alone, in time linear in them.
"""

from __future__ import annotations

TAIL = 4096
MIN_TIMES = 4
MIN_WIDTH = 96
MIN_PLAIN_WIDTH = 256
_KEY = 16


def ends_in_loop(text: str) -> bool:
    """Whether the text ends in a fragment repeated over and over."""
    end = text[-TAIL:]
    tail = end.rstrip()
    if len(end) - len(tail) >= MIN_PLAIN_WIDTH:
        return True
    # A repeated tail's last characters stand one period earlier too: most answers are done with here.
    if len(tail) < MIN_WIDTH // 2 or tail.find(tail[-_KEY:]) == len(tail) - _KEY:
        return False
    backwards = tail[::-1]
    for period, matching in enumerate(_matches(backwards, len(tail) // MIN_TIMES), 1):
        length = period + matching
        if length < MIN_TIMES * period:
            continue
        repeated = backwards[:length]
        has_letter = any(c.isalpha() for c in repeated[:period])
        if _width(repeated) >= (MIN_WIDTH if has_letter else MIN_PLAIN_WIDTH):
            return True
    return False


def _matches(text: str, limit: int) -> list[int]:
    """How much of `text[i:]` equals the beginning of `text`, for i from 1 to `limit`: the Z-function (D.
    Gusfield, *Algorithms on Strings, Trees and Sequences*, 1.4). No character is compared more than twice.
    """
    size, found = len(text), [0] * (limit + 1)
    left = right = 0
    for i in range(1, limit + 1):
        length = min(right - i, found[i - left]) if i < right else 0
        while i + length < size and text[length] == text[i + length]:
            length += 1
        found[i] = length
        if i + length > right:
            left, right = i, i + length
    return found[1:]


def _width(text: str) -> int:
    """Columns; a Chinese character takes two, as it says about as much as two Latin ones or more."""
    return sum(2 if c >= "⺀" else 1 for c in text)
