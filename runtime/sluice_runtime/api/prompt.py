"""From a request to the prompt's token ids, off the event loop and in the caller's turn.

Invariant: a prompt that is far too long is refused before all of it is tokenised, so that nobody waits for
more than about two contexts of another caller's text at a time.
"""

from __future__ import annotations

import json
from collections.abc import Hashable
from functools import partial

from sluice_runtime.api.errors import ApiError, bad_request
from sluice_runtime.api.schemas import ChatRequest, CompletionRequest
from sluice_runtime.api.tools import knows_tools, told_as_text
from sluice_runtime.state import EnginePort, TokenizerPort
from sluice_runtime.turns import Turns

_MAX_CHARS_PER_TOKEN = 64
_USUAL_CHARS_PER_TOKEN = 4
"""A prompt that fits seldom has more: English has about as many, Chinese one or two."""
_SLICE_CHARS = 16 * 1024
_THOUGHTS_END = "</think>"


async def encode(
    engine: EnginePort, request: ChatRequest | CompletionRequest, turns: Turns, caller: Hashable
) -> list[int]:
    """Ids of the prompt. ApiError for one that can't fit, InvalidRequest for what the template refuses."""
    if isinstance(request, CompletionRequest) and isinstance(request.prompt, list):
        return request.prompt
    tokenizer = engine.tokenizer
    await _refuse_far_too_long(engine, request, turns, caller)
    if isinstance(request, ChatRequest):
        return await turns.run(caller, lambda: _encode_chat(tokenizer, request))
    text = request.prompt
    assert isinstance(text, str)
    ids = await turns.run(caller, lambda: tokenizer.encode_text(text))
    if not ids:
        raise bad_request("The prompt has no tokens.", "prompt", "invalid_value")
    return ids


async def _refuse_far_too_long(
    engine: EnginePort, request: ChatRequest | CompletionRequest, turns: Turns, caller: Hashable
) -> None:
    """ApiError where the prompt has more characters than any that fits, or, counted in slices, each a turn of
    its own, more than twice the tokens: a cut in a word costs a token or two."""
    context, tokenizer = engine.max_model_len, engine.tokenizer
    num_chars, num_tokens = request.num_prompt_chars(), 0
    if num_chars > context * _MAX_CHARS_PER_TOKEN:
        raise _too_long(request, context, f"more than {context * _MAX_CHARS_PER_TOKEN} characters")
    if num_chars <= context * _USUAL_CHARS_PER_TOKEN:
        return
    text = _told_text(request, tokenizer.chat_template)
    for at in range(0, len(text), _SLICE_CHARS):
        count = partial(tokenizer.encode_text, text[at : at + _SLICE_CHARS])
        num_tokens += len(await turns.run(caller, count))
        if num_tokens > 2 * context:
            raise _too_long(request, context, f"more than {num_tokens // 2} tokens")


def _told_text(request: ChatRequest | CompletionRequest, template: str | None) -> str:
    """What the model is told, or less: some templates leave out the assistant's earlier thoughts."""
    if isinstance(request, CompletionRequest):
        assert isinstance(request.prompt, str)
        return request.prompt
    texts: list[str] = []
    for message in request.messages:
        thoughtless = message.role == "assistant" and template is not None and _THOUGHTS_END in template
        texts.append(message.text.rpartition(_THOUGHTS_END)[2] if thoughtless else message.text)
        texts += [call.function.arguments for call in message.tool_calls or ()]
    return "\n".join([*texts, *(json.dumps(tool, ensure_ascii=False) for tool in request.told_tools)])


def _too_long(request: ChatRequest | CompletionRequest, context: int, size: str) -> ApiError:
    param = "messages" if isinstance(request, ChatRequest) else "prompt"
    message = (
        f"This model's maximum context length is {context} tokens. However, your {param} resulted in {size}. "
        f"Please reduce the length of the {param}."
    )
    return bad_request(message, param, "context_length_exceeded")


def _encode_chat(tokenizer: TokenizerPort, request: ChatRequest) -> list[int]:
    messages = [message.plain() for message in request.messages]
    tools = request.told_tools
    if knows_tools(tokenizer.chat_template):
        return tokenizer.encode_chat(messages, tools or None)
    return tokenizer.encode_chat(told_as_text(messages, tools))
