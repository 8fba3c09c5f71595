"""Request bodies of the OpenAI API, read strictly: what we don't do is refused, never silently dropped.

Invariant: `parse` gives a request that is safe to encode, or raises an `ApiError` that names the field.
Nothing of the body can choose a chat template, a cache scope or a tenant.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError, model_validator

from sluice_runtime.api.errors import ApiError, bad_request, not_supported
from sluice_runtime.engine.types import MAX_TOP_LOGPROBS, SamplingParams
from sluice_runtime.podconfig import Caps, SamplingDefaults, dotted

MAX_MESSAGES = 4096
MAX_STOP = 4
_INT64 = 2**63


def _stop_strings(value: str | list[str] | None) -> str | list[str] | None:
    stops = [value] if isinstance(value, str) else value or []
    if len(stops) > MAX_STOP or any(not s or len(s) > 1000 for s in stops):
        raise ValueError(f"must be at most {MAX_STOP} strings of 1 to 1000 characters")
    return value


def _bias(value: dict[str, float] | None) -> dict[str, float] | None:
    for key, bias in (value or {}).items():
        if not (key.isascii() and key.isdecimal() and len(key) < 10):
            raise ValueError("must map token ids to numbers")
        if not -100 <= bias <= 100:
            raise ValueError("values must be between -100 and 100")
    if value and len(value) > 1024:
        raise ValueError("must have at most 1024 entries")
    return value


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class StreamOptions(_Body):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class _Common(_Body):
    """Fields that chat and plain completions share."""

    model: Annotated[str, Field(min_length=1)]
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: int | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(gt=0, le=1)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    stop: Annotated[str | list[str] | None, AfterValidator(_stop_strings)] = None
    seed: Annotated[int, Field(ge=-_INT64, lt=_INT64)] | None = None
    logit_bias: Annotated[dict[str, float] | None, AfterValidator(_bias)] = None
    # Extensions that other servers of open models have too.
    top_k: Annotated[int, Field(ge=0, lt=_INT64)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    stop_token_ids: Annotated[list[Annotated[int, Field(ge=0, lt=2**31)]], Field(max_length=64)] | None = None
    ignore_eos: bool | None = None
    # Hints that change nothing about an answer.
    user: Any = None
    metadata: Any = None
    safety_identifier: Any = None
    prompt_cache_key: Any = None

    default_max_tokens: ClassVar[int | None] = None

    @property
    def wants_usage(self) -> bool:
        return self.stream_options is not None and bool(self.stream_options.include_usage)

    @property
    def num_logprobs(self) -> int | None:
        raise NotImplementedError

    @property
    def wanted_max_tokens(self) -> tuple[str, int | None]:
        return "max_tokens", self.max_tokens

    def sampling(self, defaults: SamplingDefaults, max_tokens: int) -> SamplingParams:
        """What the engine is to do: the request's word, else the configuration's, else OpenAI's."""
        temperature = _first(self.temperature, defaults.temperature, 1.0)
        stop = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return SamplingParams(
            max_tokens=max_tokens,
            temperature=temperature,
            top_p=_first(self.top_p, defaults.top_p, 1.0),
            top_k=self.top_k or 0,
            min_p=self.min_p or 0.0,
            seed=self.seed,
            stop=tuple(stop),
            stop_token_ids=tuple(self.stop_token_ids or ()),
            presence_penalty=self.presence_penalty or 0.0,
            frequency_penalty=self.frequency_penalty or 0.0,
            logit_bias={int(k): v for k, v in (self.logit_bias or {}).items()},
            logprobs=self.num_logprobs,
            ignore_eos=bool(self.ignore_eos),
        )


def _first(*values: float | None) -> float:
    return next(v for v in values if v is not None)


class TextPart(_Body):
    type: Literal["text"]
    text: str


class Message(_Body):
    role: Literal["system", "developer", "user", "assistant"]
    content: str | Annotated[list[TextPart], Field(min_length=1)]
    name: Annotated[str, Field(max_length=512)] | None = None
    # An answer handed back as the stock client dumps it.
    refusal: None = None
    annotations: None = None
    audio: None = None
    function_call: None = None
    tool_calls: None = None

    def plain(self) -> dict[str, str]:
        """As chat templates want it: a role they know, and one string."""
        text = (
            self.content if isinstance(self.content, str) else "\n".join(part.text for part in self.content)
        )
        return {"role": "system" if self.role == "developer" else self.role, "content": text}


class ChatRequest(_Common):
    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None

    @model_validator(mode="after")
    def _consistent(self) -> ChatRequest:
        if self.top_logprobs and not self.logprobs:
            raise ValueError("top_logprobs needs logprobs to be true")
        both = self.max_tokens is not None and self.max_completion_tokens is not None
        if both and self.max_tokens != self.max_completion_tokens:
            raise ValueError("max_tokens and max_completion_tokens contradict each other")
        return self

    @property
    def num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def wanted_max_tokens(self) -> tuple[str, int | None]:
        if self.max_completion_tokens is not None:
            return "max_completion_tokens", self.max_completion_tokens
        return "max_tokens", self.max_tokens

    def num_prompt_chars(self) -> int:
        return sum(len(m.plain()["content"]) for m in self.messages)


TokenIds = list[Annotated[int, Field(ge=0, lt=2**31)]]


class CompletionRequest(_Common):
    prompt: str | list[str] | TokenIds | list[TokenIds]
    logprobs: Annotated[int, Field(ge=0, le=5)] | None = None

    @model_validator(mode="after")
    def _one_prompt(self) -> CompletionRequest:
        if isinstance(self.prompt, list) and self.prompt and not isinstance(self.prompt[0], int):
            if len(self.prompt) > 1:
                raise ValueError("prompt: several prompts in one request are not supported yet")
            self.prompt = self.prompt[0]
        if not self.prompt:
            raise ValueError("prompt must not be empty")
        return self

    @property
    def num_logprobs(self) -> int | None:
        return self.logprobs

    default_max_tokens: ClassVar[int | None] = 16

    def num_prompt_chars(self) -> int:
        return len(self.prompt)


# Fields that OpenAI has and we don't (yet), with the values that mean "as if absent".
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "tools": (),
    "tool_choice": ("none",),
    "parallel_tool_calls": (True, False),
    "functions": (),
    "function_call": ("none",),
    "response_format": ({"type": "text"},),
    "modalities": (["text"],),
    "audio": (),
    "prediction": (),
    "store": (False,),
    "service_tier": ("auto", "default"),
    "reasoning_effort": (),
    "verbosity": (),
    "web_search_options": (),
    "best_of": (1,),
    "echo": (False,),
    "suffix": ("",),
    "guided_json": (),
    "guided_regex": (),
}
_REFUSED = {
    "chat_template": "Chat templates come with the model and can't be sent with a request.",
    "chat_template_kwargs": "Chat templates come with the model and can't be sent with a request.",
    "cache_salt": "Who shares a cache follows from who the caller is and can't be sent with a request.",
}


def parse(kind: type[ChatRequest] | type[CompletionRequest], data: bytes) -> ChatRequest | CompletionRequest:
    """A valid request, or an ApiError with status 400."""
    raw = _json_object(data)
    for name, message in _REFUSED.items():
        if raw.pop(name, None) is not None:
            raise bad_request(message, name, "unsupported_parameter")
    for name, neutral in _NEUTRAL.items():
        value = raw.pop(name, None)
        if value is not None and value not in neutral:
            raise not_supported(f"`{name}`", name)
    try:
        request = kind.model_validate(raw)
    except ValidationError as e:
        raise _explain(e) from None
    if request.n is not None and request.n != 1:
        raise bad_request(
            "Only n=1 is supported: send several requests instead.", "n", "unsupported_parameter"
        )
    if request.stream_options is not None and not request.stream:
        raise bad_request("stream_options is only allowed when stream is true.", "stream_options")
    return request


def _json_object(data: bytes) -> dict[str, Any]:
    try:
        raw = json.loads(data.decode(), parse_constant=_refuse_constant)
        json.dumps(raw, ensure_ascii=False).encode()  # refuses lone surrogates, which no tokenizer takes
    except (ValueError, RecursionError):
        raise bad_request("The request body is not valid JSON in UTF-8.", code="invalid_json") from None
    if not isinstance(raw, dict):
        raise bad_request("The request body must be a JSON object.")
    return raw


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _explain(error: ValidationError) -> ApiError:
    """OpenAI's words for the first problem. Input is never quoted back."""
    problems = error.errors(include_url=False, include_input=False)
    first = _most_telling(problems)
    loc = [part for i, part in enumerate(first["loc"]) if not (i and _is_union_branch(part))]
    param = dotted(loc) or None
    kind, text = first["type"], str(first["msg"]).removeprefix("Value error, ")
    if kind == "missing":
        return bad_request(f"Missing required parameter: '{param}'.", param, "missing_required_parameter")
    if kind == "extra_forbidden":
        name = dotted(loc)[:200]
        return bad_request(f"Unrecognized request argument supplied: {name}", name, "unknown_parameter")
    if param is None:
        words = text.split(maxsplit=1)
        param = words[0].rstrip(":") if words else None
        return bad_request(f"Invalid request: {text}.", param, "invalid_value")
    return bad_request(f"Invalid value for '{param}': {text}.", param, "invalid_value")


def _is_union_branch(part: int | str) -> bool:
    return isinstance(part, str) and (part == "str" or "[" in part or part == "constrained-str")


def _most_telling(problems: list[Any]) -> Any:
    """Of a union's branches the one that got furthest: `content[0].type` rather than `content is not a
    string`.
    """
    return max(problems[:32], key=lambda p: len(p["loc"]) if p["loc"][:1] == problems[0]["loc"][:1] else 0)


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
