"""OpenAI's answer shapes, streamed and whole. Invariant: the usage chunk comes only when asked for, last,

with no choices.
"""

from __future__ import annotations

import codecs
import json
import time
from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from sluice_runtime.api.tools import Piece, ToolCall, ToolDelta
from sluice_runtime.engine.types import PositionLogprobs, TokenLogprob
from sluice_runtime.evidence import Tokens

DONE = b"data: [DONE]\n\n"


ANSWER_HEADER = "sluice-answer"


@dataclass(frozen=True)
class Mark:
    """What an answer says of itself under a rule that does not just stream. `times`: seconds since the
    request arrived here, None for what has not come."""

    streaming: str
    verified: bool = False
    times: Mapping[str, float | None] = field(default_factory=dict)

    def body(self) -> dict[str, Any]:
        times = {name: None if s is None else round(s, 6) for name, s in self.times.items()}
        return {"sluice": {"streaming": self.streaming, "verified": self.verified, **times}}


class _Marked:
    """What both formats do with a mark: it is in each event, and a header goes before them."""

    mark: Mark | None

    @property
    def headers(self) -> dict[str, str]:
        return {} if self.mark is None else {ANSWER_HEADER: "verified" if self.mark.verified else "draft"}

    @property
    def _mark(self) -> dict[str, Any]:
        return {} if self.mark is None else self.mark.body()


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
        # Rejected ones are no part of the answer, nor of completion_tokens.
        "completion_tokens_details": {
            "accepted_prediction_tokens": tokens.accepted,
            "rejected_prediction_tokens": tokens.guessed - tokens.accepted,
        },
    }


@dataclass(frozen=True)
class Answer:
    """One whole choice."""

    text: str
    finish_reason: str
    logprobs: Sequence[PositionLogprobs] | None = None
    calls: Sequence[ToolCall] = ()


def _chat_logprobs(positions: Sequence[PositionLogprobs]) -> dict[str, Any]:
    def one(t: TokenLogprob) -> dict[str, Any]:
        return {"token": t.token, "logprob": t.logprob, "bytes": list(t.data)}

    return {
        "content": [{**one(p.chosen), "top_logprobs": [one(t) for t in p.top]} for p in positions],
        "refusal": None,
    }


def _call_delta(delta: ToolDelta) -> dict[str, Any]:
    if delta.call is None:
        return {"index": delta.index, "function": {"arguments": delta.arguments}}
    function = {"name": delta.call.name, "arguments": delta.arguments}
    return {"index": delta.index, "id": delta.call.id, "type": "function", "function": function}


@dataclass
class ChatFormat(_Marked):
    """`chat.completion` and its chunks."""

    id: str
    model: str
    include_usage: bool = False
    num_choices: int = 1
    created: int = field(default_factory=lambda: int(time.time()))
    mark: Mark | None = None

    def _chunk(self, choices: list[dict[str, Any]], **more: Any) -> bytes:
        body = {
            "id": f"chatcmpl-{self.id}",
            "object": "chat.completion.chunk",
            "created": self.created,
            "model": self.model,
            "choices": choices,
            **({"usage": None} if self.include_usage else {}),
            **self._mark,
            **more,
        }
        return sse(body)

    @staticmethod
    def _choice(
        index: int, delta: dict[str, Any], finish: str | None, logprobs: Any = None
    ) -> dict[str, Any]:
        return {"index": index, "delta": delta, "logprobs": logprobs, "finish_reason": finish}

    def opening(self) -> bytes:
        delta = {"role": "assistant", "content": ""}
        return b"".join(self._chunk([self._choice(i, delta, None)]) for i in range(self.num_choices))

    def delta(
        self, index: int, pieces: Sequence[Piece], positions: Sequence[PositionLogprobs] | None
    ) -> bytes:
        """The events for what a chunk brings; nothing if it has neither text nor log-probabilities."""
        logprobs = _chat_logprobs(positions) if positions else None
        deltas: list[dict[str, Any]] = [
            {"content": piece} if isinstance(piece, str) else {"tool_calls": [_call_delta(piece)]}
            for piece in pieces
            if piece
        ]
        if logprobs is not None and not deltas:
            deltas = [{"content": ""}]
        # A chunk's log-probabilities go with its first event.
        return b"".join(
            self._chunk([self._choice(index, delta, None, None if i else logprobs)])
            for i, delta in enumerate(deltas)
        )

    def ended(self, index: int, finish_reason: str, mark: Mark | None = None) -> bytes:
        """The last event of one choice, which may have a mark of its own."""
        more = {} if mark is None else mark.body()
        return self._chunk([self._choice(index, {}, finish_reason)], **more)

    def closing(self, tokens: Tokens) -> bytes:
        """What follows the last choice."""
        return (self._chunk([], usage=usage(tokens)) if self.include_usage else b"") + DONE

    def whole(self, answers: Sequence[Answer], tokens: Tokens) -> dict[str, Any]:
        return {
            "id": f"chatcmpl-{self.id}",
            "object": "chat.completion",
            "created": self.created,
            "model": self.model,
            "choices": [self._whole_choice(i, answer) for i, answer in enumerate(answers)],
            "usage": usage(tokens),
            **self._mark,
        }

    @staticmethod
    def _whole_choice(index: int, answer: Answer) -> dict[str, Any]:
        content = None if answer.calls and not answer.text else answer.text
        message: dict[str, Any] = {"role": "assistant", "content": content, "refusal": None}
        if answer.calls:
            message["tool_calls"] = [call.body() for call in answer.calls]
        return {
            "index": index,
            "message": message,
            "logprobs": None if answer.logprobs is None else _chat_logprobs(answer.logprobs),
            "finish_reason": answer.finish_reason,
        }


class _Reading:
    """How far the tokens of one choice have come in its text."""

    def __init__(self) -> None:
        self._at = 0
        self._decoder = codecs.getincrementaldecoder("utf-8")("replace")

    def offset(self, data: bytes) -> int:
        """In characters, where this token begins: of one that ends a character that was cut, where that one
        does."""
        begins = self._at
        self._at += len(self._decoder.decode(data))
        return begins


@dataclass
class CompletionFormat(_Marked):
    """`text_completion`, whose chunks have the same shape."""

    id: str
    model: str
    include_usage: bool = False
    num_choices: int = 1
    created: int = field(default_factory=lambda: int(time.time()))
    mark: Mark | None = None
    _read: defaultdict[int, _Reading] = field(default_factory=lambda: defaultdict(_Reading))

    def _body(self, choices: list[dict[str, Any]], **more: Any) -> dict[str, Any]:
        return {
            "id": f"cmpl-{self.id}",
            "object": "text_completion",
            "created": self.created,
            "model": self.model,
            "choices": choices,
            **self._mark,
            **more,
        }

    def _chunk(self, choices: list[dict[str, Any]], **more: Any) -> bytes:
        return sse(self._body(choices, **({"usage": None} if self.include_usage else {}), **more))

    def _logprobs(self, index: int, positions: Sequence[PositionLogprobs] | None) -> dict[str, Any] | None:
        if positions is None:
            return None
        # The sampled token is among the best ones even if it is none of them.
        told = [(*p.top, p.chosen) if p.top else () for p in positions]
        return {
            "tokens": [_token_name(p.chosen) for p in positions],
            "token_logprobs": [p.chosen.logprob for p in positions],
            "top_logprobs": [{_token_name(t): t.logprob for t in tokens} for tokens in told],
            "text_offset": [self._read[index].offset(p.chosen.data) for p in positions],
        }

    @staticmethod
    def _choice(index: int, text: str, finish: str | None, logprobs: Any = None) -> dict[str, Any]:
        return {"index": index, "text": text, "logprobs": logprobs, "finish_reason": finish}

    def opening(self) -> bytes:
        return b""

    def delta(
        self, index: int, pieces: Sequence[Piece], positions: Sequence[PositionLogprobs] | None
    ) -> bytes:
        text = "".join(piece for piece in pieces if isinstance(piece, str))
        if not text and not positions:
            return b""
        return self._chunk([self._choice(index, text, None, self._logprobs(index, positions or None))])

    def ended(self, index: int, finish_reason: str, mark: Mark | None = None) -> bytes:
        more = {} if mark is None else mark.body()
        return self._chunk([self._choice(index, "", finish_reason)], **more)

    def closing(self, tokens: Tokens) -> bytes:
        return (sse(self._body([], usage=usage(tokens))) if self.include_usage else b"") + DONE

    def whole(self, answers: Sequence[Answer], tokens: Tokens) -> dict[str, Any]:
        choices = [
            self._choice(i, answer.text, answer.finish_reason, self._logprobs(i, answer.logprobs))
            for i, answer in enumerate(answers)
        ]
        return self._body(choices, usage=usage(tokens))


def _token_name(token: TokenLogprob) -> str:
    """A token's text; where it is part of a character, its bytes, or two tokens would have one name."""
    try:
        token.data.decode()
    except UnicodeDecodeError:
        return "bytes:" + "".join(f"\\x{byte:02x}" for byte in token.data)
    return token.token


Format = ChatFormat | CompletionFormat
