"""Regular expressions from users, in time linear in the text; exists because Python's `re` can be made to

backtrack for ever.

Invariant: `search` does at most `MAX_WORK` steps of a compiled pattern; a pattern or text that would need
more is refused.

A pattern is *end-sensitive* if more text can undo its match: `foo$` and `foo\\b` match "foo" but not
"foobar". While text still grows, such a match counts only when it ends before the end of what is there.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import re2

MAX_PATTERN_CHARS = 4096
MAX_PROGRAM_SIZE = 4000
MAX_WORK = 400_000_000  # instructions × bytes; about 2.5 s when RE2 falls back to its slowest matcher
_WINDOW_WORK = 2_000_000  # on the event loop: about 12 ms at worst
_MIN_WINDOW, _MAX_WINDOW = 256, 4096


class PatternError(ValueError):
    """A pattern that is not RE2 syntax, or too large."""


class TooMuchWork(Exception):
    """The text is too long for this pattern."""


def _is_end_sensitive(pattern: str) -> bool:
    """Whether `$`, `\\z`, `\\b` or `\\B` may stand in the pattern. Errs on the side of True."""
    return "$" in pattern or any(f"\\{letter}" in pattern for letter in "zbB")


@dataclass(frozen=True)
class Pattern:
    """A compiled RE2 pattern over UTF-8 bytes, searched unanchored."""

    source: str
    program_size: int
    end_sensitive: bool
    _compiled: Any

    @property
    def window(self) -> int:
        """How many bytes before new text a scan on the event loop looks back."""
        return max(_MIN_WINDOW, min(_MAX_WINDOW, _WINDOW_WORK // max(1, self.program_size)))

    def search(self, text: bytes, start: int = 0) -> bool:
        """Whether the pattern matches somewhere from byte `start` on (what stands before it is still
        context).
        """
        return self._find(text, start) is not None

    def search_growing(self, text: bytes, start: int = 0) -> bool:
        """Like `search`, but only matches that no further text can undo."""
        end = self._find(text, start)
        return end is not None and not (self.end_sensitive and end == len(text))

    def _find(self, text: bytes, start: int) -> int | None:
        if self.program_size * (len(text) - start) > MAX_WORK:
            raise TooMuchWork(
                f"{len(text)} bytes are too much for a pattern of {self.program_size} instructions"
            )
        match = self._compiled.search(text, start)
        return None if match is None else int(match.end())


def compile_pattern(source: str) -> Pattern:
    """Compile RE2 syntax; PatternError says what is wrong with it."""
    if len(source) > MAX_PATTERN_CHARS:
        raise PatternError(f"longer than {MAX_PATTERN_CHARS} characters")
    options = re2.Options()
    options.log_errors = False
    try:
        compiled = re2.compile(source, options)
    except re2.error as e:
        reason = e.args[0].decode() if e.args and isinstance(e.args[0], bytes) else str(e)
        raise PatternError(f"not a valid RE2 pattern: {reason}") from None
    if compiled.programsize > MAX_PROGRAM_SIZE:
        raise PatternError(f"compiles to {compiled.programsize} instructions, more than {MAX_PROGRAM_SIZE}")
    return Pattern(source, compiled.programsize, _is_end_sensitive(source), compiled)
