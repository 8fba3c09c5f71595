"""Guesses from a request's own text: what followed when its last tokens stood there before.

Prompt lookup, and SuffixDecoding (arXiv 2411.04975) within one request: code, JSON, quotes and tables repeat
themselves. Nothing is kept across requests, so nobody's text can help, or be seen by, anybody else.

Worked example: after "a b c d a b" the longest end that stood there before is "a b", so "c d" is guessed.

Invariant: bounded in memory (`MAX_TOKENS` of the latest text, at most twice that between two trims) and in
time (`MAX_CANDIDATES` places are compared for each guess).
"""

from __future__ import annotations

from array import array
from collections.abc import Sequence

from sluice_runtime.engine.speculation.proposer import Wanted

MIN_MATCH = 2
"""Tokens that must agree: a single one says little. Pairs are what the index finds."""
MAX_MATCH = 32
MAX_CANDIDATES = 32
MAX_TOKENS = 4096


class SuffixIndex:
    """The places where each pair of tokens stands in one text, latest first; pairs are keys as they are, so
    nothing collides."""

    def __init__(self, max_tokens: int = MAX_TOKENS, max_candidates: int = MAX_CANDIDATES) -> None:
        self._max_tokens = max_tokens
        self._max_candidates = max_candidates
        self._tokens = array("q")
        self._latest: dict[tuple[int, int], int] = {}
        # For each place the one before it that ends in the same pair, or -1.
        self._earlier = array("q")

    def __len__(self) -> int:
        return len(self._tokens)

    def extend(self, token_ids: Sequence[int]) -> None:
        """Text goes on."""
        for token_id in token_ids[-self._max_tokens :]:
            self._append(token_id)
            if len(self._tokens) >= 2 * self._max_tokens:
                kept = self._tokens[-self._max_tokens :]
                self._tokens, self._earlier = array("q"), array("q")
                self._latest.clear()
                for token in kept:
                    self._append(token)

    def _append(self, token_id: int) -> None:
        at = len(self._tokens)
        self._tokens.append(token_id)
        if at == 0:
            self._earlier.append(-1)
            return
        pair = (self._tokens[at - 1], token_id)
        self._earlier.append(self._latest.get(pair, -1))
        self._latest[pair] = at

    def longest_match(self) -> tuple[int, int]:
        """Where the text's longest end stood before (the place of its last token there; the latest of
        several) and how long it is, at most `MAX_MATCH`; (-1, 0) if under `MIN_MATCH`."""
        tokens, last = self._tokens, len(self._tokens) - 1
        best, best_length = -1, 0
        at = self._earlier[last] if last > 0 else -1
        for _ in range(self._max_candidates):
            if at < 0:
                break
            length = MIN_MATCH
            most = min(MAX_MATCH, at + 1)
            while length < most and tokens[at - length] == tokens[last - length]:
                length += 1
            if length > best_length:
                best, best_length = at, length
                if length == MAX_MATCH:
                    break
            at = self._earlier[at]
        return best, best_length

    def guess(self, num_tokens: int) -> list[int]:
        """What may come next: no more tokens than have agreed, for a short match is often chance. What runs
        into the end of the text goes on with the guess itself, so that a loop is guessed as a loop."""
        at, length = self.longest_match()
        guessed: list[int] = []
        size = len(self._tokens)
        for i in range(at + 1, at + 1 + min(num_tokens, length)):
            guessed.append(self._tokens[i] if i < size else guessed[i - size])
        return guessed


class Suffix:
    """The proposer: an index for each request that asked, dropped when it ends."""

    def __init__(self) -> None:
        self._indexes: dict[str, tuple[SuffixIndex, int]] = {}

    def propose(self, wanted: Sequence[Wanted]) -> dict[str, list[int]]:
        guesses: dict[str, list[int]] = {}
        for each in wanted:
            index, num_seen = self._indexes.get(each.request_id) or (SuffixIndex(), 0)
            index.extend(each.token_ids[num_seen:])
            self._indexes[each.request_id] = index, len(each.token_ids)
            guess = index.guess(each.num_tokens)
            if guess:
                guesses[each.request_id] = guess
        return guesses

    def forget(self, request_id: str) -> None:
        self._indexes.pop(request_id, None)

    @property
    def num_held(self) -> int:
        return len(self._indexes)

    def check_integrity(self) -> None:
        for request_id, (index, num_seen) in self._indexes.items():
            assert len(index) <= min(num_seen, 2 * MAX_TOKENS), f"{request_id}: more than was seen"
