"""Token ids to a stream of text: whole characters only, stop strings never shown. One instance a request.

Invariant: the concatenation of everything returned does not depend on how the tokens were cut into calls, and
never holds any part of a stop string that was found.

Worked example, stop "###", tokens "ok", "#", "#!", "##", "#": returned "ok", "", "##!", "", "" and then
stopped.
"""

from __future__ import annotations

import codecs
from collections.abc import Callable, Iterable


class Detokenizer:
    """`token_bytes(id)` gives the bytes a token stands for (empty for special tokens)."""

    def __init__(self, token_bytes: Callable[[int], bytes], stop: tuple[str, ...] = ()) -> None:
        self._token_bytes = token_bytes
        self._stop = tuple(s for s in stop if s)
        # Bytes that can never become UTF-8 turn into U+FFFD; bytes that still may are kept inside the
        # decoder.
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")
        self._held = ""
        self.stopped = False

    def push(self, token_ids: Iterable[int]) -> str:
        """The text that these tokens release. After a stop string (`stopped`) always empty."""
        if self.stopped:
            return ""
        text = self._decoder.decode(b"".join(map(self._token_bytes, token_ids)))
        if not self._stop:
            return text
        text = self._held + text
        end, start = min(
            ((at + len(s), at) for s in self._stop if (at := text.find(s)) >= 0),
            default=(-1, -1),
        )
        if end >= 0:
            self.stopped, self._held = True, ""
            return text[:start]
        num_held = self._num_held(text)
        released = text[: len(text) - num_held]
        self._held = text[len(text) - num_held :]
        return released

    def _num_held(self, text: str) -> int:
        """Length of the longest end of `text` that begins some stop string."""
        longest = min(len(text), max(map(len, self._stop)) - 1)
        for length in range(longest, 0, -1):
            tail = text[len(text) - length :]
            if any(s.startswith(tail) for s in self._stop):
                return length
        return 0

    def flush(self) -> str:
        """At the end: what was held back for a stop string that did not come. A character cut in half is
        dropped."""
        held, self._held = self._held, ""
        return held
