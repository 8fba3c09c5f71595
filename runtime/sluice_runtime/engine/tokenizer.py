"""Text to token ids and back, such that text from users can never become a control token.

A chat template writes control tokens as text, so template and user text meet in one string before
tokenisation. Text that spells a control token is therefore *broken* before rendering, by a sentinel character
that occurs nowhere else; after rendering, what still spells one was written by the template, and everything
else is encoded as plain text, the sentinels taken out. Text that spells none takes the tokenizer's own path,
so it is tokenised just as `apply_chat_template` does.

Invariant: of the ids that `encode_chat` and `encode_text` return, only those that the template (or the
tokenizer's own BOS) wrote are special.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

from sluice_runtime.engine.types import InvalidRequest

ROLES = frozenset({"system", "developer", "user", "assistant", "tool", "function"})
_SENTINELS = [chr(c) for c in range(0xE000, 0xE100)]


class Tokenizer:
    """A model's (fast) tokenizer and chat template. Thread-safe for reading; a call takes milliseconds."""

    def __init__(self, hf_tokenizer: Any, eos_token_ids: frozenset[int] = frozenset()) -> None:
        self.hf = hf_tokenizer
        self.vocab_size = len(hf_tokenizer)
        self.chat_template: str | None = getattr(hf_tokenizer, "chat_template", None)
        own_eos = (
            frozenset() if hf_tokenizer.eos_token_id is None else frozenset({int(hf_tokenizer.eos_token_id)})
        )
        self.eos_token_ids = eos_token_ids or own_eos
        added = hf_tokenizer.added_tokens_decoder
        self._added_ids = {token.content: int(i) for i, token in added.items()}
        self.special_ids = frozenset(int(i) for i, token in added.items() if token.special)
        self._special = frozenset(token.content for token in added.values() if token.special)
        # Looked up by length: some models have hundreds of special tokens, and a chat hundreds of strings.
        self._beginnings = frozenset(t[:n] for t in self._special for n in range(1, len(t)))
        self._endings = frozenset(t[n:] for t in self._special for n in range(1, len(t)))
        self._longest = max(map(len, self._special), default=0)
        self._plain_added_ids = frozenset(self._added_ids.values()) - self.special_ids
        self._literals = _pattern({t: re.escape(t) for t in self._added_ids})
        # Some tokens swallow the white space beside them.
        self._template_literals = _pattern(
            {
                t.content: (r"\s*" if t.lstrip else "") + re.escape(t.content) + (r"\s*" if t.rstrip else "")
                for t in added.values()
            }
        )
        self._byte_level = _is_byte_level(hf_tokenizer)
        self._token_bytes = lru_cache(maxsize=1 << 17)(self._compute_token_bytes)

    # -- text to ids -----------------------------------------------------------------------------------------

    def encode_chat(
        self, messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]] | None = None
    ) -> list[int]:
        """Ids of the rendered chat, ending in the prompt for the assistant's answer.

        Raises `InvalidRequest` (param `messages`) for an unknown role, or where the template refuses.
        """
        for message in messages:
            if message.get("role") not in ROLES:
                raise InvalidRequest(f"unknown role {message.get('role')!r}", "messages")
        sentinel = _unused_sentinel([messages, tools or []])
        guarded = [
            {
                key: value if key == "role" else self._guard(value, sentinel, message["role"] == "assistant")
                for key, value in message.items()
            }
            for message in messages
        ]
        guarded_tools = self._guard(list(tools), sentinel, False) if tools else None
        text = self._render(guarded, guarded_tools)
        if sentinel not in text:
            return [int(i) for i in self.hf.encode(text, add_special_tokens=False)]
        return self._encode_guarded(text, sentinel)

    def _render(self, messages: list[dict[str, Any]], tools: list[Any] | None) -> str:
        if not self.chat_template:
            raise InvalidRequest("this model has no chat template; use completions", "messages")
        try:
            text = self.hf.apply_chat_template(
                messages, tools=tools, tokenize=False, add_generation_prompt=True
            )
        except Exception as error:  # Jinja's own errors and whatever a template's Python expressions raise
            raise InvalidRequest(
                f"the model's chat template refuses these messages: {error}", "messages"
            ) from error
        assert isinstance(text, str)
        return text

    def _guard(self, value: Any, sentinel: str, from_assistant: bool) -> Any:
        """`value` with each string in it broken where it spells, or could help to spell, an added token."""
        if isinstance(value, str):
            return self._guard_text(value, sentinel, from_assistant)
        if isinstance(value, Mapping):
            return {
                self._guard(key, sentinel, from_assistant): self._guard(item, sentinel, from_assistant)
                for key, item in value.items()
            }
        if isinstance(value, list | tuple):
            return [self._guard(item, sentinel, from_assistant) for item in value]
        return value

    def _guard_text(self, text: str, sentinel: str, from_assistant: bool) -> str:
        if self._literals is None or not text:
            return text

        def break_up(match: re.Match[str]) -> str:
            literal = match[0]
            # Templates look for markers such as </think> in the assistant's own turns; those control nothing.
            if from_assistant and literal not in self._special:
                return literal
            return literal[0] + sentinel + literal[1:]

        text = self._literals.sub(break_up, text)
        # A token could also be put together from two neighbouring strings: part the edges where that is
        # possible.
        start = len(text) - len(text.lstrip())
        end = len(text.rstrip())
        if start < end:
            body = text[start:end]
            head = sentinel if self._may_continue(body) else ""
            tail = sentinel if self._may_begin(body) else ""
            text = text[:start] + head + body + tail + text[end:]
        return text

    def _may_begin(self, body: str) -> bool:
        """Whether an end of the text begins a special token."""
        return any(body[-n:] in self._beginnings for n in range(1, min(self._longest, len(body) + 1)))

    def _may_continue(self, body: str) -> bool:
        return any(body[:n] in self._endings for n in range(1, min(self._longest, len(body) + 1)))

    def _encode_guarded(self, text: str, sentinel: str) -> list[int]:
        ids: list[int] = []
        at = 0
        pattern = self._template_literals
        assert pattern is not None, "a sentinel without a token to break"
        for match in pattern.finditer(text):
            if match.end() < len(text) and len(match[0].strip()) == 1 and text[match.end()] == sentinel:
                continue  # a token of one character can't be broken inside
            ids += self._encode_plain(text[at : match.start()], sentinel)
            token = match[0]
            ids.append(self._added_ids[token if token in self._added_ids else token.strip()])
            at = match.end()
        return ids + self._encode_plain(text[at:], sentinel)

    def _encode_plain(self, text: str, sentinel: str = "", add_special_tokens: bool = False) -> list[int]:
        """Ids of text in which nothing is special; `sentinel` marks where it was broken."""
        whole = text.replace(sentinel, "") if sentinel else text
        if not whole and not add_special_tokens:
            return []
        ids = [
            int(i)
            for i in self.hf.encode(whole, add_special_tokens=add_special_tokens, split_special_tokens=True)
        ]
        if not self._plain_added_ids.isdisjoint(ids) and sentinel and sentinel in text:
            # Tokens that are added but not "special" are not split by the tokenizer: encode the broken pieces
            # apart.
            pieces = [piece for piece in text.split(sentinel) if piece]
            encode = self.hf.encode
            ids = [
                int(i) for p in pieces for i in encode(p, add_special_tokens=False, split_special_tokens=True)
            ]
        return ids

    def encode_text(self, text: str) -> list[int]:
        """Ids of plain text for completions (with BOS where the tokenizer adds one); specials in it stay
        text."""
        return self._encode_plain(text, add_special_tokens=True)

    # -- ids to text -----------------------------------------------------------------------------------------

    def decode(self, token_ids: Sequence[int]) -> str:
        """Text of the ids, special tokens left out, broken characters as U+FFFD."""
        return b"".join(map(self.token_bytes, token_ids)).decode("utf-8", "replace")

    def token_bytes(self, token_id: int) -> bytes:
        """The bytes a token adds to the text: none for special ids and for ids beyond the vocabulary."""
        return self._token_bytes(token_id)

    def token_text(self, token_id: int) -> str:
        """A token for people to read, special tokens spelled out."""
        data = self.token_bytes(token_id)
        if data or not 0 <= token_id < self.vocab_size:
            return data.decode("utf-8", "replace")
        return str(self.hf.convert_ids_to_tokens(token_id))

    def _compute_token_bytes(self, token_id: int) -> bytes:
        if token_id in self.special_ids or not 0 <= token_id < self.vocab_size:
            return b""
        token = self.hf.convert_ids_to_tokens(token_id)
        if token is None:
            return b""
        if token in self._added_ids:
            return str(token).encode()
        if self._byte_level:
            table = _byte_of_char()
            return bytes(table[c] for c in token) if all(c in table for c in token) else str(token).encode()
        if re.fullmatch(r"<0x[0-9A-Fa-f]{2}>", token):
            return bytes([int(token[3:5], 16)])
        return str(token).replace("\u2581", " ").encode()


def _pattern(literals: Mapping[str, str]) -> re.Pattern[str] | None:
    """A pattern that finds added tokens; `literals` maps each to its own pattern. Longest first, as
    tokenizers do."""
    if not literals:
        return None
    return re.compile("|".join(literals[token] for token in sorted(literals, key=len, reverse=True)))


def _unused_sentinel(values: Any) -> str:
    text = json.dumps(values, ensure_ascii=False, default=str)
    for char in _SENTINELS:
        if char not in text:
            return char
    raise InvalidRequest("the messages use too many private-use characters", "messages")


def _is_byte_level(hf_tokenizer: Any) -> bool:
    """Whether tokens spell bytes in GPT-2's alphabet (as Llama 3, Qwen and SmolLM do) and not SentencePiece
    pieces."""
    decoder = json.loads(hf_tokenizer.backend_tokenizer.to_str()).get("decoder") or {}
    kinds = {decoder.get("type"), *(d.get("type") for d in decoder.get("decoders", []))}
    return "ByteLevel" in kinds


@lru_cache(maxsize=1)
def _byte_of_char() -> dict[str, int]:
    """GPT-2's alphabet: printable Latin-1 bytes stand for themselves, the others for U+0100 and up, in
    order."""
    printable = [*range(0x21, 0x7F), *range(0xA1, 0xAD), *range(0xAE, 0x100)]
    others = [b for b in range(0x100) if b not in printable]
    return {chr(b): b for b in printable} | {chr(0x100 + i): b for i, b in enumerate(others)}
