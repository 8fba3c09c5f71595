"""Citations: every one that an answer gives must exist.

What counts is a bracket whose content is the id of a source, or looks like one: [12], [a; b], [^3], 【a】.
Links, check boxes and code are none. Invariant: an id that no source has fails, so that an invented source
can't hide between good ones.
"""

from __future__ import annotations

import re

from ..api.evalsuite import Citations
from .excerpt import split

_BRACKET = re.compile(r"(?<!\!)\[\^?([^\[\]\n]{1,200})\](?!\()|【([^【】\n]{1,200})】")
_CHECKBOX = re.compile(r"^[ \t]*[-*+] \[[ xX]\] ", re.MULTILINE)
_INLINE_CODE = re.compile(r"`[^`\n]*`")
_NARROW = str.maketrans("［］", "[]")
_SEPARATORS = re.compile(r"\s*[,;，；、]\s*")
_RANGE = re.compile(r"(\d{1,6})\s*[-–]\s*(\d{1,6})")
_DIGITS = re.compile(r"\d+")
_WORD = re.compile(r"[A-Za-z0-9_.:/#-]+")


def failures(text: str, expected: Citations) -> list[str]:
    """Why the citations are not right; empty: they are."""
    known = frozenset(expected.sources)
    cited, unknown = _cited(_prose(text), known)
    told = []
    if unknown:
        told.append(f"cites {unknown} source(s) that do not exist")
    if len(cited) < expected.min_citations:
        told.append(f"cites {len(cited)} of the sources, fewer than {expected.min_citations}")
    return told


def _prose(text: str) -> str:
    """The text without code and check boxes, where brackets mean something else."""
    return _CHECKBOX.sub("", _INLINE_CODE.sub("", split(text)[0])).translate(_NARROW)


def _cited(text: str, known: frozenset[str]) -> tuple[set[str], int]:
    cited, unknown = set[str](), set[str]()
    for match in _BRACKET.finditer(text):
        content = (match[1] or match[2]).partition("†")[0].strip()
        if content in known:
            cited.add(content)
            continue
        parts = [part for whole in _SEPARATORS.split(content) for part in _ends(whole, known) if part]
        if not parts or not all(part in known or _looks_like(part, known) for part in parts):
            continue
        cited.update(part for part in parts if part in known)
        unknown.update(part for part in parts if part not in known)
    return cited, len(unknown)


def _ends(part: str, known: frozenset[str]) -> tuple[str, ...]:
    """Both ends of a range such as 1-3; else the part itself."""
    ends = _RANGE.fullmatch(part)
    return (ends[1], ends[2]) if ends and part not in known else (part,)


def _looks_like(part: str, known: frozenset[str]) -> bool:
    """Whether ``part`` is of the kind that ids here are: number, word, or text in another script."""
    return _kind(part) == "number" or _kind(part) in {_kind(source) for source in known}


def _kind(part: str) -> str:
    if _DIGITS.fullmatch(part):
        return "number"
    if _WORD.fullmatch(part):
        return "word"
    return "script" if not re.search(r"[\sA-Za-z]", part) else "phrase"
