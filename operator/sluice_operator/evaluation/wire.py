"""Requests and answers in the OpenAI form. Pure.

Invariant: whatever bytes a service answers with, ``reply`` returns a Reply, and its ``error`` holds none of
them but a short code of the service's.
"""

from __future__ import annotations

import json
import re
from collections.abc import Mapping
from typing import Any

from ..api.evalsuite import HttpChecker, Sample
from .reply import Call, Outcome, Reply

_CODE = re.compile(r"[a-z][a-z0-9_]{0,39}")
_REFUSED_CODES = frozenset({"refused", "content_filter", "content_policy_violation"})
_OUT_OF_REACH = (429, 503)
_MAX_CALLS = 64
_MAX_DETAIL = 300
_FILLER = (
    "Paragraph {}: This part of the document describes how the archive is arranged. It has no bearing on the "
    "question below. "
)
_CHARS_PER_TOKEN = 4


def request_body(sample: Sample, model: str, temperature: float | None) -> dict[str, Any]:
    """The request; what it does not set, such as sampling, is the arm's own."""
    messages = [message.model_dump(mode="json", by_alias=True) for message in sample.messages]
    if sample.context_tokens:
        last = messages[-1]
        last["content"] = f"{_filler(sample.context_tokens)}\n\n{last['content']}"
    body: dict[str, Any] = {
        "model": model,
        "messages": messages,
        "max_tokens": sample.max_tokens,
        "stream": False,
    }
    if sample.tools:
        body["tools"] = sample.tools
    if temperature is not None:
        body["temperature"] = temperature
    return body


def _filler(num_tokens: int) -> str:
    """Neutral text of about so many tokens, the same each time."""
    num_chars = num_tokens * _CHARS_PER_TOKEN
    paragraphs = (_FILLER.format(n) for n in range(1, num_chars // len(_FILLER) + 2))
    return "".join(paragraphs)[:num_chars]


def claims(sample: Sample, *, to_pod: bool) -> dict[str, str]:
    """Headers that say what kind of request it is: as a client claims it, or as the gateway tells a pod
    (docs/contracts)."""
    prefix = "x-sluice-" if to_pod else "sluice-"
    told = {
        f"{prefix}task": sample.task,
        f"{prefix}data-class": sample.data_class.value,
        f"{prefix}risk": sample.risk.value,
    }
    if to_pod and sample.tenant is not None:
        told["x-sluice-tenant"] = sample.tenant
    return told


def reply(status: int, body: bytes, seconds: float) -> Reply:
    """The answer, a refusal, or why it is neither."""
    data = _json(body)
    if status != 200:
        return _not_ok(status, data, seconds)
    message, finish_reason = _choice(data)
    if message is None:
        return Reply(status=status, seconds=seconds, error="the answer is not a chat completion")
    refusal, content = message.get("refusal"), message.get("content")
    text = _text(refusal) if refusal else _text(content)
    calls = _calls(message.get("tool_calls"))
    if text is None or calls is None:
        return Reply(status=status, seconds=seconds, error="the answer is not a chat completion")
    return Reply(
        text=text,
        tool_calls=calls,
        finish_reason=finish_reason,
        seconds=seconds,
        status=status,
        refused=bool(refusal) or finish_reason == "content_filter",
    )


def _not_ok(status: int, data: Any, seconds: float) -> Reply:
    error = data.get("error") if isinstance(data, dict) else None
    code, message = (error.get("code"), error.get("message")) if isinstance(error, dict) else (None, None)
    if isinstance(code, str) and code in _REFUSED_CODES:
        text = message if isinstance(message, str) else ""
        return Reply(text=text, finish_reason="content_filter", seconds=seconds, status=status, refused=True)
    named = f" ({code})" if isinstance(code, str) and _CODE.fullmatch(code) else ""
    return Reply(
        seconds=seconds,
        status=status,
        error=f"was answered with HTTP {status}{named}",
        out_of_reach=status in _OUT_OF_REACH,
    )


def _json(body: bytes) -> Any:
    try:
        return json.loads(body)
    except (ValueError, RecursionError):
        return None


def _choice(data: Any) -> tuple[Mapping[str, Any] | None, str]:
    choices = data.get("choices") if isinstance(data, dict) else None
    first = choices[0] if isinstance(choices, list) and choices else None
    message = first.get("message") if isinstance(first, dict) else None
    if not isinstance(first, dict) or not isinstance(message, dict):
        return None, ""
    reason = first.get("finish_reason")
    return message, reason if isinstance(reason, str) else ""


def _text(content: Any) -> str | None:
    """A string, none, or parts with text; None: something else."""
    if content is None:
        return ""
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        return None
    parts = [part.get("text") for part in content if isinstance(part, dict)]
    return "".join(part for part in parts if isinstance(part, str))


def _calls(calls: Any) -> tuple[Call, ...] | None:
    if calls is None:
        return ()
    if not isinstance(calls, list) or len(calls) > _MAX_CALLS:
        return None
    found = []
    for call in calls:
        function = call.get("function") if isinstance(call, dict) else None
        name = function.get("name") if isinstance(function, dict) else None
        arguments = function.get("arguments", "") if isinstance(function, dict) else None
        if not isinstance(name, str) or not isinstance(arguments, str):
            return None
        found.append(Call(name, arguments))
    return tuple(found)


def question(sample: Sample, answer: Reply) -> dict[str, Any]:
    """What a checker of the user's is POSTed."""
    return {
        "sample": sample.model_dump(mode="json", by_alias=True, exclude_none=True),
        "answer": {
            "text": answer.text,
            "toolCalls": [{"name": call.name, "arguments": call.arguments} for call in answer.tool_calls],
            "finishReason": answer.finish_reason,
            "refused": answer.refused,
            "seconds": round(answer.seconds, 3),
        },
    }


def outcome(checker: HttpChecker, status: int, body: bytes) -> Outcome:
    """What the checker said; anything but ``{"ok": true}`` with status 200 has failed."""
    if status != 200:
        return Outcome(False, f"checker {checker.name} answered with HTTP {status}")
    data = _json(body)
    if not isinstance(data, dict) or not isinstance(data.get("ok"), bool):
        return Outcome(False, f'checker {checker.name} did not answer with {{"ok": true}} or false')
    if data["ok"]:
        return Outcome(True)
    reason = data.get("reason")
    detail = " ".join(reason.split())[:_MAX_DETAIL] if isinstance(reason, str) else ""
    return Outcome(False, f"checker {checker.name} says no", detail)
