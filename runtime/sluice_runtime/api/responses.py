"""OpenAI's answer shapes, streamed and whole. Invariant: the usage chunk comes only when asked for, last,

with no choices.
"""

from __future__ import annotations

import json
import time
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from sluice_runtime.engine.types import FinishReason, OutputChunk, PositionLogprobs, TokenLogprob
from sluice_runtime.evidence import Tokens

DONE = b"data: [DONE]\n\n"


def sse(body: Mapping[str, Any]) -> bytes:
    """One event, as UTF-8."""
    text = json.dumps(body, ensure_ascii=False, allow_nan=False, separators=(",", ":"))
    return b"data: " + text.encode("utf-8", "replace") + b"\n\n"


def usage(tokens: Tokens) -> dict[str, Any]:
    return {
        "prompt_tokens": tokens.prompt,
        "completion_tokens": tokens.output,
        "total_tokens": tokens.prompt + tokens.output,
        "prompt_tokens_details": {"cached_tokens": tokens.cached},
    }


def _chat_logprobs(positions: Sequence[PositionLogprobs]) -> dict[str, Any]:
    def one(t: TokenLogprob) -> dict[str, Any]:
        return {"token": t.token, "logprob": t.logprob, "bytes": list(t.data)}

    return {
        "content": [{**one(p.chosen), "top_logprobs": [one(t) for t in p.top]} for p in positions],
        "refusal": None,
    }


@dataclass
class ChatFormat:
    """`chat.completion` and its chunks."""

    id: str
    model: str
    include_usage: bool = False
    created: int = field(default_factory=lambda: int(time.time()))

    def _chunk(self, choices: list[dict[str, Any]], **more: Any) -> bytes:
        body = {
            "id": f"chatcmpl-{self.id}",
            "object": "chat.completion.chunk",
            "created": self.created,
            "model": self.model,
            "choices": choices,
            **({"usage": None} if self.include_usage else {}),
            **more,
        }
        return sse(body)

    @staticmethod
    def _choice(delta: dict[str, Any], finish: str | None, logprobs: Any = None) -> dict[str, Any]:
        return {"index": 0, "delta": delta, "logprobs": logprobs, "finish_reason": finish}

    def opening(self) -> bytes:
        return self._chunk([self._choice({"role": "assistant", "content": ""}, None)])

    def delta(self, chunk: OutputChunk) -> bytes:
        """The event for a chunk's text; nothing if it has neither text nor log-probabilities."""
        if not chunk.text and not chunk.logprobs:
            return b""
        logprobs = _chat_logprobs(chunk.logprobs) if chunk.logprobs else None
        return self._chunk([self._choice({"content": chunk.text}, None, logprobs)])

    def closing(self, reason: FinishReason, tokens: Tokens) -> bytes:
        data = self._chunk([self._choice({}, reason.value)])
        if self.include_usage:
            data += self._chunk([], usage=usage(tokens))
        return data + DONE

    def whole(
        self, text: str, reason: FinishReason, tokens: Tokens, logprobs: Sequence[PositionLogprobs] | None
    ) -> dict[str, Any]:
        choice = {
            "index": 0,
            "message": {"role": "assistant", "content": text, "refusal": None},
            "logprobs": None if logprobs is None else _chat_logprobs(logprobs),
            "finish_reason": reason.value,
        }
        return {
            "id": f"chatcmpl-{self.id}",
            "object": "chat.completion",
            "created": self.created,
            "model": self.model,
            "choices": [choice],
            "usage": usage(tokens),
        }


@dataclass
class CompletionFormat:
    """`text_completion`, whose chunks have the same shape."""

    id: str
    model: str
    include_usage: bool = False
    created: int = field(default_factory=lambda: int(time.time()))
    _offset: int = 0

    def _body(self, choices: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
        return {
            "id": f"cmpl-{self.id}",
            "object": "text_completion",
            "created": self.created,
            "model": self.model,
            "choices": choices,
            **more,
        }

    def _chunk(self, choices: list[dict[str, Any]]) -> bytes:
        return sse(self._body(choices, **({"usage": None} if self.include_usage else {})))

    def _logprobs(self, positions: Sequence[PositionLogprobs] | None) -> dict[str, Any] | None:
        if positions is None:
            return None
        offsets = []
        for p in positions:
            offsets.append(self._offset)
            self._offset += len(p.chosen.token)
        return {
            "tokens": [p.chosen.token for p in positions],
            "token_logprobs": [p.chosen.logprob for p in positions],
            "top_logprobs": [{t.token: t.logprob for t in p.top} for p in positions],
            "text_offset": offsets,
        }

    @staticmethod
    def _choice(text: str, finish: str | None, logprobs: Any = None) -> dict[str, Any]:
        return {"index": 0, "text": text, "logprobs": logprobs, "finish_reason": finish}

    def opening(self) -> bytes:
        return b""

    def delta(self, chunk: OutputChunk) -> bytes:
        if not chunk.text and not chunk.logprobs:
            return b""
        return self._chunk([self._choice(chunk.text, None, self._logprobs(chunk.logprobs))])

    def closing(self, reason: FinishReason, tokens: Tokens) -> bytes:
        data = self._chunk([self._choice("", reason.value)])
        if self.include_usage:
            data += sse(self._body([], usage=usage(tokens)))
        return data + DONE

    def whole(
        self, text: str, reason: FinishReason, tokens: Tokens, logprobs: Sequence[PositionLogprobs] | None
    ) -> dict[str, Any]:
        return self._body([self._choice(text, reason.value, self._logprobs(logprobs))], usage=usage(tokens))


Format = ChatFormat | CompletionFormat
