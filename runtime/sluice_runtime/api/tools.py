"""Functions that a model may call: told to it in its prompt, and read back from its text while that arrives.

The text of a call is Hermes' (engine/grammar.py). A chat template that knows it is given the tools and the
calls as they are; to any other, they are told as text. Invariant: what the reader gives out, put together, is
the whole text: each character is in exactly one place, as content, or as part of a call; but for the head of
a call that was cut in it.
"""

from __future__ import annotations

import json
import re
import uuid
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from sluice_runtime.engine.grammar import TOOL_BEGIN, TOOL_END

_HEAD = re.compile(r'\s*\{\s*"name"\s*:\s*"([A-Za-z0-9_-]{1,64})"\s*,\s*"arguments"\s*:\s*(?=\{)')
_HEAD_CHARS = 256  # a call's head that is longer is none
_PROMPT = """\
You may call functions. They are described within <tools></tools>, one JSON object a line:
<tools>
{tools}
</tools>
To call one, answer with its name and arguments as a JSON object within <tool_call></tool_call>:
<tool_call>
{{"name": "the name", "arguments": {{}}}}
</tool_call>"""


def knows_tools(chat_template: str | None) -> bool:
    """Whether a template tells tools to its model in the form that is read back here."""
    return chat_template is not None and TOOL_BEGIN in chat_template and "tools" in chat_template


def told_as_text(
    messages: Sequence[Mapping[str, Any]], tools: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """The same chat for a template that knows no tools: calls and their results become text."""
    told = [_as_text(message) for message in messages]
    if not tools:
        return told
    prompt = _PROMPT.format(tools="\n".join(json.dumps(tool, ensure_ascii=False) for tool in tools))
    if told and told[0]["role"] == "system":
        return [{"role": "system", "content": f"{told[0]['content']}\n\n{prompt}"}, *told[1:]]
    return [{"role": "system", "content": prompt}, *told]


def _as_text(message: Mapping[str, Any]) -> dict[str, Any]:
    role, content = message["role"], message["content"]
    if role == "tool":
        return {"role": "user", "content": f"<tool_response>\n{content}\n</tool_response>"}
    calls = [json.dumps(call["function"], ensure_ascii=False) for call in message.get("tool_calls", ())]
    parts = [content] if content else []
    return {"role": role, "content": "\n".join([*parts, *(f"{TOOL_BEGIN}\n{c}\n{TOOL_END}" for c in calls)])}


@dataclass
class ToolCall:
    """One call, as far as it has come."""

    name: str
    arguments: str = ""
    id: str = field(default_factory=lambda: f"call_{uuid.uuid4().hex[:24]}")

    def body(self) -> dict[str, Any]:
        function = {"name": self.name, "arguments": self.arguments}
        return {"id": self.id, "type": "function", "function": function}


@dataclass(frozen=True)
class ToolDelta:
    """More of call number `index`: with `call` its beginning, else more of its arguments."""

    index: int
    arguments: str
    call: ToolCall | None = None


Piece = str | ToolDelta


class ToolReader:
    r"""Cuts one answer's text into content and calls, as it arrives. What never becomes a call is content.

    Worked example: "Hm <tool", "_call>\n{", '"name": "f", "arguments": {"a"', ': 1}}\n</tool_call>' gives
    "Hm ", nothing, the call with '{"a"', and ': 1}'.
    """

    def __init__(self) -> None:
        self.calls: list[ToolCall] = []
        self.content = ""
        self.malformed = False
        self._text = ""
        self._inside = self._after_call = False
        self._json: _JsonEnd | None = None

    def push(self, text: str) -> list[Piece]:
        """What this text completes."""
        self._text += text
        pieces: list[Piece] = []
        while self._step(pieces):
            pass
        return pieces

    def flush(self, cut: bool = False) -> list[Piece]:
        """At the end of the text: what was held back as the beginning of a call. If its length `cut` it, such
        a beginning is nobody's: of neither content nor a call that has a name."""
        pieces: list[Piece] = []
        if self._inside and self._json is None:
            self.malformed = True
            if cut:
                return pieces
            self._give_up(pieces)
        elif self._json is not None or (self._after_call and not self._text.strip()):
            self._text = ""
        self._release(len(self._text), pieces)
        return pieces

    @property
    def complete(self) -> bool:
        """Whether no call is cut in its middle."""
        return not self.malformed and self._json is None

    def _step(self, pieces: list[Piece]) -> bool:
        if not self._inside:
            return self._find_call(pieces)
        if self._json is None:
            return self._read_head(pieces)
        if self._json.open:
            return self._read_arguments(pieces)
        return self._read_tail(pieces)

    def _find_call(self, pieces: list[Piece]) -> bool:
        at = self._text.find(TOOL_BEGIN)
        if at < 0:
            lengths = range(len(TOOL_BEGIN) - 1, 0, -1)
            held = next((n for n in lengths if self._text.endswith(TOOL_BEGIN[:n])), 0)
            end = len(self._text) - held
            if not (self._after_call and not self._text[:end].strip()):
                self._release(end, pieces)
            return False
        # Between two calls there is a line's end, which is nobody's content.
        if self._after_call and not self._text[:at].strip():
            self._text = self._text[at:]
            at = 0
        self._release(at, pieces)
        self._text = self._text[len(TOOL_BEGIN) :]
        self._inside = True
        return True

    def _read_head(self, pieces: list[Piece]) -> bool:
        match = _HEAD.match(self._text)
        if match is None:
            if len(self._text) < _HEAD_CHARS and TOOL_END not in self._text:
                return False
            self.malformed = True
            self._give_up(pieces)
            return True
        call = ToolCall(match[1])
        self.calls.append(call)
        pieces.append(ToolDelta(len(self.calls) - 1, "", call))
        self._text = self._text[match.end() :]
        self._json = _JsonEnd()
        return True

    def _read_arguments(self, pieces: list[Piece]) -> bool:
        assert self._json is not None
        length = self._json.feed(self._text)
        if length:
            self.calls[-1].arguments += self._text[:length]
            pieces.append(ToolDelta(len(self.calls) - 1, self._text[:length]))
            self._text = self._text[length:]
        return not self._json.open

    def _read_tail(self, pieces: list[Piece]) -> bool:
        at = self._text.find(TOOL_END)
        if at < 0:
            return False
        if self._text[:at].strip() != "}":
            self.malformed = True
        self._text = self._text[at + len(TOOL_END) :]
        self._inside, self._json, self._after_call = False, None, True
        return True

    def _give_up(self, pieces: list[Piece]) -> None:
        """It was no call after all."""
        self._inside = self._after_call = False
        self.content += TOOL_BEGIN
        pieces.append(TOOL_BEGIN)

    def _release(self, length: int, pieces: list[Piece]) -> None:
        if length > 0:
            self._after_call = False
            self.content += self._text[:length]
            pieces.append(self._text[:length])
            self._text = self._text[length:]


class _JsonEnd:
    """Finds where a JSON object ends, piece by piece."""

    def __init__(self) -> None:
        self.open = True
        self._depth = 0
        self._in_string = self._escaped = False

    def feed(self, text: str) -> int:
        """How many characters of `text` still belong to the object."""
        for i, char in enumerate(text):
            if self._in_string:
                if self._escaped:
                    self._escaped = False
                elif char == "\\":
                    self._escaped = True
                elif char == '"':
                    self._in_string = False
            elif char == '"':
                self._in_string = True
            elif char in "{[":
                self._depth += 1
            elif char in "}]":
                self._depth -= 1
                if self._depth == 0:
                    self.open = False
                    return i + 1
        return len(text)
