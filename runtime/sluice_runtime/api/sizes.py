"""How many tokens a request may have: in its prompt, in its answer, and in both together."""

from __future__ import annotations

from sluice_runtime.api.errors import bad_request
from sluice_runtime.api.schemas import ChatRequest, CompletionRequest
from sluice_runtime.podconfig import Caps, SamplingDefaults

_TOO_LONG = "context_length_exceeded"


def check_prompt(num_prompt: int, param: str, cap: int | None, max_model_len: int) -> None:
    """ApiError where a prompt is longer than allowed, or leaves no room for an answer."""
    if cap is not None and num_prompt > cap:
        message = f"Prompts of at most {cap} tokens are allowed here. However, yours has {num_prompt} tokens."
        raise bad_request(message, param, _TOO_LONG)
    if num_prompt >= max_model_len:
        message = (
            f"This model's maximum context length is {max_model_len} tokens. However, your {param} "
            f"resulted in {num_prompt} tokens. Please reduce the length of the {param}."
        )
        raise bad_request(message, param, _TOO_LONG)


def check_context(num_prompt: int, max_tokens: int, prompt_param: str, param: str, context: int) -> None:
    """ApiError where prompt and answer are more than a tenant's cap; the model's own the engine checks."""
    if num_prompt + max_tokens > context:
        message = (
            f"Requests of at most {context} tokens are allowed here. However, you requested "
            f"{num_prompt + max_tokens} tokens ({num_prompt} in the prompt, {max_tokens} in the completion)."
        )
        raise bad_request(message, prompt_param if num_prompt >= context else param, _TOO_LONG)


def max_new_tokens(
    request: ChatRequest | CompletionRequest, defaults: SamplingDefaults, caps: Caps, room: int
) -> int:
    """How many tokens may be generated. `room` is what the prompt leaves of the context; the engine refuses
    more.
    """
    param, wanted = request.wanted_max_tokens
    cap = caps.max_output_tokens
    if wanted is not None:
        if cap is not None and wanted > cap:
            message = f"{param} is too large: {wanted}. At most {cap} completion tokens are allowed here."
            raise bad_request(message, param, "invalid_value")
        return wanted
    default = request.default_max_tokens if defaults.max_tokens is None else defaults.max_tokens
    limits = [v for v in (default, cap) if v is not None]
    return max(1, min(room, *limits) if limits else room)
