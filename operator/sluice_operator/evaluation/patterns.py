"""Patterns over an answer, by RE2: linear in the text whatever the pattern is."""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import re2

MAX_WORK = 100_000_000
"""Instructions of a pattern times bytes of text that one search may cost; about 0.6 s at worst."""
_MAX_MEMORY = 1 << 20


class PatternRefused(ValueError):
    """Not RE2 syntax, or too large."""


class TooMuchWork(Exception):
    """The text is too long for this pattern."""


@lru_cache(maxsize=1024)
def _compiled(pattern: str) -> Any:
    options = re2.Options()
    options.max_mem = _MAX_MEMORY
    options.log_errors = False
    try:
        return re2.compile(pattern, options)
    except re2.error as error:
        told = error.args[0] if error.args else error
        words = told.decode(errors="replace") if isinstance(told, bytes) else str(told)
        raise PatternRefused(f"is not an RE2 pattern: {words}") from None


def accept(pattern: str) -> None:
    """Raises PatternRefused."""
    _compiled(pattern)


def found(pattern: str, text: str) -> bool:
    """Whether ``text`` contains a match. Raises PatternRefused and TooMuchWork."""
    compiled, data = _compiled(pattern), text.encode("utf-8", "replace")
    if compiled.programsize * len(data) > MAX_WORK:
        raise TooMuchWork
    return compiled.search(data) is not None
