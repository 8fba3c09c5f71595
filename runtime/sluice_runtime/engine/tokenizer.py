"""Text to token ids and back, such that text from users can never become a control token.

Invariant: of the ids that `encode_chat` and `encode_text` return, only those that the model's own chat template wrote
are special.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any


class Tokenizer:
    """A model's tokenizer and chat template."""

    vocab_size: int
    eos_token_ids: frozenset[int]

    def encode_chat(self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None = None) -> list[int]:
        """Render the model's chat template with a generation prompt. `InvalidRequest` if it can't be rendered."""
        raise NotImplementedError

    def encode_text(self, text: str) -> list[int]:
        """Ids of plain text for completions (with BOS if the model wants one); specials in it stay text."""
        raise NotImplementedError

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of the ids, special tokens left out."""
        raise NotImplementedError
