"""Numbers that an answer states, in the forms in which people write them.

1,234.5 · 1 234,5 · 1.234,5 · 1'234 · 12,5 % · 1.2e3 · 3.5 million · 1.5万 · 3亿5000万 · １２３ · 三百二十万.
Where a form has two honest readings (12,5 may be a list) both count, since a suite asks whether the right
number is there. Invariant: the work is linear in the text; digits that belong to a name or a version are no
number.
"""

from __future__ import annotations

import re
import unicodedata
from collections.abc import Iterable, Iterator
from decimal import Decimal

from ..api.evalsuite import Number

_MAX_DIGITS = 40
_SPACE = "\u00a0\u2007\u2009\u202f"
_NUMBER = re.compile(
    rf"""
    (?<![A-Za-z_0-9]) (?<![0-9][.,]) (?P<sign>(?<![0-9A-Za-z\)\]])[-\u2212])?
    (?:
        (?P<comma>[1-9][0-9]{{0,2}}(?:,[0-9]{{3}})+(?:\.[0-9]+)?)(?![0-9]|,[0-9])
      | (?P<indian>[1-9][0-9]?(?:,[0-9]{{2}})+,[0-9]{{3}}(?:\.[0-9]+)?)(?![0-9]|,[0-9])
      | (?P<dot>[1-9][0-9]{{0,2}}(?:(?:\.[0-9]{{3}})+,[0-9]+|(?:\.[0-9]{{3}}){{2,}}))(?![0-9]|[.,][0-9])
      | (?P<space>[1-9][0-9]{{0,2}}(?:[ {_SPACE}][0-9]{{3}})+(?:[.,][0-9]+)?)(?![0-9]|[.,][0-9])
      | (?P<swiss>[1-9][0-9]{{0,2}}(?:['’][0-9]{{3}})+(?:\.[0-9]+)?)(?![0-9])
      | (?P<decimal>[0-9]+,[0-9]+)(?![0-9]|[.,][0-9])
      | (?P<plain>(?:[0-9]+(?:\.[0-9]+)?|\.[0-9]+)(?:[eE][-+]?[0-9]{{1,2}})?)(?![0-9]|\.[0-9])
    )
    (?P<scale>\ ?(?:thousand|million|billion|trillion|bn|mn)\b|[kKMB](?![A-Za-z0-9])|\ ?[十百千万萬亿億]+)?
    """,
    re.VERBOSE,
)
_SCALES = {
    "thousand": 10**3, "million": 10**6, "mn": 10**6, "billion": 10**9, "bn": 10**9, "trillion": 10**12,
    "k": 10**3, "m": 10**6, "b": 10**9,
}  # fmt: skip
_UNITS = {"十": 10, "百": 100, "千": 1000, "万": 10**4, "萬": 10**4, "亿": 10**8, "億": 10**8}
_DIGITS = {c: i for i, c in enumerate("零一二三四五六七八九")} | {"〇": 0, "两": 2, "兩": 2}
_COUNTED = "天日年月周元次件条條项項小分秒人倍"
_HAN = re.compile(
    rf"(?:[{''.join(_DIGITS)}]|十)[{''.join(_DIGITS)}{''.join(_UNITS)}]{{0,30}}(?:点[{''.join(_DIGITS)}]{{1,10}})?"
)


def missing(text: str, wanted: Iterable[Number]) -> list[Number]:
    """Those of ``wanted`` that ``text`` does not state."""
    found = stated(text)
    return [number for number in wanted if not any(_is(number, value) for value in found)]


def _is(number: Number, value: Decimal) -> bool:
    wanted = Decimal(number.value)
    return abs(value - wanted) <= abs(wanted) * number.tolerance_percent / 100


def stated(text: str) -> frozenset[Decimal]:
    """Every reading of every number in ``text``."""
    plain = "".join(map(_ascii, text))
    return frozenset([*_arabic(plain), *_han(plain)])


def _ascii(char: str) -> str:
    """Digits of any script, and their full-width company, as ASCII."""
    if char < "\x7f":
        return char
    digit = unicodedata.decimal(char, None)
    return str(digit) if digit is not None else {"．": ".", "％": "%", "－": "-"}.get(char, char)


def _arabic(text: str) -> Iterator[Decimal]:
    run: tuple[int, Decimal, int] | None = None
    for match in _NUMBER.finditer(text):
        if len(match[0]) > _MAX_DIGITS:
            continue
        sign = -1 if match["sign"] else 1
        scale = _scale(match["scale"] or "")
        for value in _readings(match):
            yield sign * value * scale
        if match["scale"] and len(match["scale"]) == 1 and match["scale"] in "kKMB":
            yield from (sign * value for value in _readings(match))
        run = _compound(match, run, scale)
        if run is not None:
            yield run[1]


def _compound(
    match: re.Match[str], before: tuple[int, Decimal, int] | None, scale: int
) -> tuple[int, Decimal, int] | None:
    """3亿5000万 is one number: its end, value so far, and last scale."""
    value = next(_readings(match)) * scale
    if before is not None and before[0] == match.start() and scale < before[2]:
        return match.end(), before[1] + value, scale
    return (match.end(), value, scale) if scale >= 10**4 and match["scale"].strip()[0] in _UNITS else None


def _scale(suffix: str) -> int:
    word = suffix.strip()
    if word.lower() in _SCALES:
        return _SCALES[word.lower()]
    product = 1
    for char in word[:6]:
        product *= _UNITS[char]
    return product


def _readings(match: re.Match[str]) -> Iterator[Decimal]:
    """The whole number first."""
    if match["comma"] or match["indian"]:
        yield Decimal((match["comma"] or match["indian"]).replace(",", ""))
    elif match["dot"]:
        yield Decimal(match["dot"].replace(".", "").replace(",", "."))
    elif match["swiss"]:
        yield Decimal(match["swiss"].replace("'", "").replace("’", ""))
    elif match["space"]:
        parts = re.split(rf"[ {_SPACE}]", match["space"])
        yield Decimal("".join(parts).replace(",", "."))
        if " " in match["space"]:
            yield from (Decimal(part.replace(",", ".")) for part in parts)
    elif match["decimal"]:
        left, right = match["decimal"].split(",")
        yield Decimal(f"{left}.{right}")
        yield from (Decimal(left), Decimal(right))
    else:
        yield Decimal(match["plain"])


def _han(text: str) -> Iterator[Decimal]:
    for match in _HAN.finditer(text):
        word, _, fraction = match[0].partition("点")
        follower = text[match.end() : match.end() + 1]
        is_word = len(match[0]) == 1 and (not follower or follower not in _COUNTED)
        if is_word or (word == "十" and follower == "分"):  # 一个, 十分 are no numbers
            continue
        value = _han_value(word)
        digits = "".join(str(_DIGITS[char]) for char in fraction)
        yield Decimal(f"{value}.{digits}") if digits else Decimal(value)


def _han_value(word: str) -> int:
    if not any(char in _UNITS for char in word):
        return int("".join(str(_DIGITS[char]) for char in word))
    total = section = digit = 0
    for char in word:
        unit = _UNITS.get(char)
        if unit is None:
            digit = _DIGITS[char]
        elif unit < 10**4:
            section += (digit or 1) * unit
            digit = 0
        elif unit == 10**4:
            total += (section + digit) * unit
            section = digit = 0
        else:
            total = (total + section + digit) * unit
            section = digit = 0
    return total + section + digit
