"""From a request to the prompt's token ids, off the event loop. Invariant: a prompt that can't fit is refused
before it is tokenised."""

from __future__ import annotations

import asyncio
from concurrent.futures import ThreadPoolExecutor

from sluice_runtime.api import errors
from sluice_runtime.api.schemas import ChatRequest, CompletionRequest
from sluice_runtime.api.tools import knows_tools, told_as_text
from sluice_runtime.state import EnginePort, TokenizerPort

_MAX_CHARS_PER_TOKEN = 64
# One thread: tokenizers hold settings that concurrent calls would change under each other.
_tokenizing = ThreadPoolExecutor(1, thread_name_prefix="tokenize")


async def encode(engine: EnginePort, request: ChatRequest | CompletionRequest) -> list[int]:
    """Ids of the prompt. ApiError for one that can't fit, InvalidRequest for what the template refuses."""
    if isinstance(request, CompletionRequest) and isinstance(request.prompt, list):
        return [int(i) for i in request.prompt]  # type: ignore[arg-type]
    limit = engine.max_model_len * _MAX_CHARS_PER_TOKEN
    if request.num_prompt_chars() > limit:
        raise errors.bad_request(
            f"This model's maximum context length is {engine.max_model_len} tokens; a prompt of "
            f"more than {limit} characters can't fit.",
            "messages" if isinstance(request, ChatRequest) else "prompt",
            "context_length_exceeded",
        )
    loop = asyncio.get_running_loop()
    if isinstance(request, ChatRequest):
        return await loop.run_in_executor(_tokenizing, _encode_chat, engine.tokenizer, request)
    assert isinstance(request.prompt, str)
    ids = await loop.run_in_executor(_tokenizing, engine.tokenizer.encode_text, request.prompt)
    if not ids:
        raise errors.bad_request("The prompt has no tokens.", "prompt", "invalid_value")
    return ids


def _encode_chat(tokenizer: TokenizerPort, request: ChatRequest) -> list[int]:
    messages = [message.plain() for message in request.messages]
    tools = request.told_tools
    if knows_tools(tokenizer.chat_template):
        return tokenizer.encode_chat(messages, tools or None)
    return tokenizer.encode_chat(told_as_text(messages, tools))
