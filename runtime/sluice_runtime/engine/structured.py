"""Answers of a given form: grammars, compiled by llguidance, that say which token may come next.

A grammar comes from a request, so whatever it is must cost that request alone. Invariant: compilation and
each step's mask are bounded in work (`_LIMITS`), and a grammar that is too much is refused or fails by
itself; text in a grammar never makes a special token, for these are no text to llguidance either.
"""

from __future__ import annotations

import logging
import threading
from typing import Any

import numpy as np
import tokenizers
from llguidance import LLMatcher, LLParserLimits, LLTokenizer, TokenizerWrapper

from sluice_runtime.engine.tokenizer import Tokenizer
from sluice_runtime.engine.types import InvalidRequest

logger = logging.getLogger(__name__)

MAX_GRAMMAR_BYTES = 256 * 1024
_LIMITS = LLParserLimits(
    initial_lexer_fuel=500_000,  # about 10 ms
    step_lexer_fuel=100_000,  # about 7 ms
    step_max_items=50_000,
    max_lexer_states=20_000,  # 1 to 2 kB each
    max_grammar_size=100_000,
    verbose_errors=False,  # errors go to clients, and don't need the parser's state
)


class GrammarCompiler:
    """Compiles grammars for one model's vocabulary. `compile` may be called by any thread."""

    def __init__(self, tokenizer: Tokenizer, eos_token_ids: frozenset[int]) -> None:
        """Takes a second for a large vocabulary. `compile` refuses without an end-of-sequence, as no answer
        of a form could end, and for a vocabulary that llguidance can't take."""
        self._eos_token_ids = eos_token_ids
        self._vocabulary = None
        self._lacking = "this model has no end-of-sequence token, so its answers can't be given a form"
        if not eos_token_ids:
            return
        try:
            self._vocabulary = LLTokenizer(
                TokenizerWrapper(_Vocabulary(tokenizer, eos_token_ids)),
                n_vocab=tokenizer.vocab_size,
                eos_token=sorted(eos_token_ids),
            )
        except Exception as error:  # a model that can do everything else is not refused for this
            logger.warning("answers can't be given a form: %s", error)
            self._lacking = "this model's tokenizer does not allow its answers to be given a form"

    def compile(self, grammar: str) -> CompiledGrammar:
        """Raises `InvalidRequest` where the form can't be had; who knows the field names it. Blocks for
        milliseconds, without the GIL for most of it."""
        if self._vocabulary is None:
            raise InvalidRequest(self._lacking)
        if len(grammar) > MAX_GRAMMAR_BYTES:
            raise InvalidRequest(f"the form is larger than {MAX_GRAMMAR_BYTES} bytes once compiled")
        matcher = LLMatcher(self._vocabulary, grammar, log_level=0, limits=_LIMITS)
        if matcher.is_error():
            raise InvalidRequest(_first_line(matcher.get_error()))
        if not any(matcher.compute_bitmask()):
            raise InvalidRequest(_first_line(matcher.get_error()) or "no answer could fit")
        return CompiledGrammar(matcher, self._eos_token_ids)


def _first_line(error: str) -> str:
    lines = error.strip().splitlines()
    # What precedes is a place in our own text of the grammar.
    return lines[0].rpartition("failed to compile JSON schema: ")[2][:300] if lines else ""


class CompiledGrammar:
    """A grammar at its beginning. Never advanced itself: each answer gets a copy."""

    def __init__(self, matcher: LLMatcher, eos_token_ids: frozenset[int]) -> None:
        self._matcher = matcher
        self._eos_token_ids = eos_token_ids
        self._lock = threading.Lock()

    def matcher(self) -> GrammarMatcher:
        with self._lock:
            return GrammarMatcher(self._matcher.deep_copy(), self._eos_token_ids)


class GrammarMatcher:
    """Where one answer stands in its grammar."""

    def __init__(self, matcher: LLMatcher, eos_token_ids: frozenset[int]) -> None:
        self._matcher = matcher
        self._eos_token_ids = eos_token_ids

    def fill_mask(self, row: Any) -> None:
        """`types.Matcher.fill_mask`. Raises ValueError where the grammar has become too much."""
        mask = np.frombuffer(self._matcher.compute_bitmask(), dtype=np.int32)
        if self._matcher.is_error():
            raise ValueError(_first_line(self._matcher.get_error()))
        size = min(len(mask), len(row))
        row[:size] = mask[:size]

    def consume(self, token_id: int) -> None:
        """`types.Matcher.consume`."""
        if token_id in self._eos_token_ids and self._matcher.is_accepting():
            return
        if self._matcher.is_stopped() or not self._matcher.consume_token(token_id):
            raise ValueError("the token is none that the form allows")


class _Vocabulary:
    """Our tokenizer as llguidance wants one: each token's bytes, and text to ids where text is forced."""

    def __init__(self, tokenizer: Tokenizer, eos_token_ids: frozenset[int]) -> None:
        self.eos_token_id = min(eos_token_ids)
        self.bos_token_id = None
        ids = range(tokenizer.vocab_size)
        self._bytes = [tokenizer.token_bytes(i) for i in ids]
        # What stands for no text may only be produced as what it is, never as a spelling of its name.
        self.special_token_ids = [i for i in ids if not self._bytes[i] or i in eos_token_ids]
        special = set(self.special_token_ids)
        self.tokens = [tokenizer.token_text(i).encode() if i in special else self._bytes[i] for i in ids]
        self._ids = {self._bytes[i]: i for i in reversed(ids) if i not in special}
        self._longest = max(map(len, self._ids), default=1)
        # A copy of its own: the tokenizer's settings change while a prompt is encoded.
        self._backend = tokenizers.Tokenizer.from_str(tokenizer.hf.backend_tokenizer.to_str())
        self._backend.encode_special_tokens = True
        self._backend.no_truncation()
        self._backend.no_padding()

    def __call__(self, data: bytes | str) -> list[int]:
        """The model's own tokens for a text, or the longest ones where it would not write it just so."""
        raw = data.encode() if isinstance(data, str) else data
        try:
            ids: list[int] = self._backend.encode(raw.decode(), add_special_tokens=False).ids
        except UnicodeDecodeError:
            return self._longest_first(raw)
        if b"".join(self._bytes[i] for i in ids) == raw:
            return ids
        return self._longest_first(raw)

    def _longest_first(self, data: bytes) -> list[int]:
        ids: list[int] = []
        at = 0
        while at < len(data):
            for length in range(min(self._longest, len(data) - at), 0, -1):
                token_id = self._ids.get(data[at : at + length])
                if token_id is not None:
                    ids.append(token_id)
                    at += length
                    break
            else:
                at += 1  # a byte that no token spells
        return ids
