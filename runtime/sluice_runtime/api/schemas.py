"""Request bodies of the OpenAI API, read strictly: what we don't do is refused, never silently dropped.

Invariant: `parse` gives a request that is safe to encode, or raises an `ApiError` that names the field.
Nothing of the body can choose a chat template, a cache scope or a tenant.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any, ClassVar, Literal

from pydantic import (
    AfterValidator,
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    PlainValidator,
    ValidationError,
)

from sluice_runtime.api.body import refuse_many_values
from sluice_runtime.api.errors import ApiError, bad_request, not_supported
from sluice_runtime.engine.types import MAX_TOP_LOGPROBS, SamplingParams
from sluice_runtime.podconfig import SamplingDefaults, dotted

MAX_MESSAGES = 4096
MAX_PARTS = 1024
MAX_BIAS = 1024
MAX_STOP = 4
MAX_N = 16
MAX_TOOLS = 128
MAX_CALLS = 128
_LEAST_TOP_P = 1e-9
"""What 0 means: the likeliest token alone, which is kept whatever its probability."""
_INT64 = 2**63


def _few_stops(value: Any) -> Any:
    """Before they are looked at one by one, as for biases."""
    if isinstance(value, list) and len(value) > MAX_STOP:
        raise ValueError(f"must be at most {MAX_STOP} strings of 1 to 1000 characters")
    return value


def _stop_strings(value: str | list[str] | None) -> str | list[str] | None:
    stops = [value] if isinstance(value, str) else value or []
    if any(not s or len(s) > 1000 for s in stops):
        raise ValueError(f"must be at most {MAX_STOP} strings of 1 to 1000 characters")
    return value


def _few_biases(value: Any) -> Any:
    if isinstance(value, dict) and len(value) > MAX_BIAS:
        raise ValueError(f"must have at most {MAX_BIAS} entries")
    return value


def _bias(value: dict[str, float] | None) -> dict[str, float] | None:
    for key, bias in (value or {}).items():
        if not (key.isascii() and key.isdecimal() and len(key) < 10):
            raise ValueError("must map token ids to numbers")
        if not -100 <= bias <= 100:
            raise ValueError("values must be between -100 and 100")
    return value


class _Body(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, allow_inf_nan=False)


class StreamOptions(_Body):
    include_usage: bool | None = None
    include_obfuscation: bool | None = None


class _Common(_Body):
    """Fields that chat and plain completions share."""

    model: Annotated[str, Field(min_length=1, max_length=512)]
    stream: bool | None = None
    stream_options: StreamOptions | None = None
    n: Annotated[int, Field(ge=1, le=MAX_N)] | None = None
    max_tokens: Annotated[int, Field(ge=1)] | None = None
    temperature: Annotated[float, Field(ge=0, le=2)] | None = None
    top_p: Annotated[float, Field(ge=0, le=1)] | None = None
    presence_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    frequency_penalty: Annotated[float, Field(ge=-2, le=2)] | None = None
    stop: Annotated[str | list[str] | None, BeforeValidator(_few_stops), AfterValidator(_stop_strings)] = None
    seed: Annotated[int, Field(ge=-_INT64, lt=_INT64)] | None = None
    logit_bias: Annotated[dict[str, float] | None, BeforeValidator(_few_biases), AfterValidator(_bias)] = None
    # Extensions that other servers of open models have too.
    top_k: Annotated[int, Field(ge=-1, lt=_INT64)] | None = None
    min_p: Annotated[float, Field(ge=0, le=1)] | None = None
    repetition_penalty: Annotated[float, Field(gt=0, le=10)] | None = None
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

    @property
    def form_wanted(self) -> str:
        """The type of its `response_format`."""
        return "text"

    @property
    def stops(self) -> bool:
        """Whether the request itself says where an answer is cut."""
        return bool(self.stop or self.stop_token_ids)

    def sampling(self, defaults: SamplingDefaults, max_tokens: int) -> SamplingParams:
        """What the engine is to do: the request's word, else the configuration's, else OpenAI's."""
        temperature = _first(self.temperature, defaults.temperature, 1.0)
        stop = [self.stop] if isinstance(self.stop, str) else self.stop or []
        return SamplingParams(
            max_tokens=max_tokens,
            temperature=temperature,
            top_p=max(_first(self.top_p, defaults.top_p, 1.0), _LEAST_TOP_P),
            top_k=max(self.top_k or 0, 0),
            min_p=self.min_p or 0.0,
            seed=self.seed,
            stop=tuple(stop),
            stop_token_ids=tuple(self.stop_token_ids or ()),
            presence_penalty=self.presence_penalty or 0.0,
            frequency_penalty=self.frequency_penalty or 0.0,
            repetition_penalty=_first(self.repetition_penalty, 1.0),
            logit_bias={int(k): v for k, v in (self.logit_bias or {}).items()},
            logprobs=self.num_logprobs,
            ignore_eos=bool(self.ignore_eos),
        )


def _first(*values: float | None) -> float:
    return next(v for v in values if v is not None)


class TextPart(_Body):
    type: Literal["text"]
    text: str


_NAME = r"^[A-Za-z0-9_-]{1,64}$"


class CalledFunction(_Body):
    name: Annotated[str, Field(pattern=_NAME)]
    arguments: str


class CalledTool(_Body):
    id: Annotated[str, Field(min_length=1, max_length=256)]
    type: Literal["function"]
    function: CalledFunction

    def plain(self) -> dict[str, Any]:
        """As chat templates want it: arguments as an object, where they are one."""
        arguments: Any = self.function.arguments
        try:
            value = json.loads(arguments)
            arguments = value if isinstance(value, dict) else arguments
        except (ValueError, RecursionError):
            pass
        function = {"name": self.function.name, "arguments": arguments}
        return {"id": self.id, "type": "function", "function": function}


class Message(_Body):
    role: Literal["system", "developer", "user", "assistant", "tool"]
    content: str | Annotated[list[TextPart], Field(min_length=1, max_length=MAX_PARTS)] | None = None
    name: Annotated[str, Field(max_length=512)] | None = None
    tool_calls: Annotated[list[CalledTool], Field(min_length=1, max_length=MAX_CALLS)] | None = None
    tool_call_id: Annotated[str, Field(max_length=256)] | None = None
    # An answer handed back as the stock client dumps it.
    refusal: None = None
    annotations: None = None
    audio: None = None
    function_call: None = None

    @property
    def text(self) -> str:
        if isinstance(self.content, list):
            return "\n".join(part.text for part in self.content)
        return self.content or ""

    def problem(self, open_calls: frozenset[str]) -> tuple[str, str] | None:
        """Field and fault, if this message can't stand after calls that are `open_calls`."""
        if self.tool_calls is not None and self.role != "assistant":
            return "tool_calls", "only the assistant calls tools"
        if (self.tool_call_id is not None) != (self.role == "tool"):
            return "tool_call_id", "belongs to messages with the role tool, and to each of them"
        if self.role == "tool" and self.tool_call_id not in open_calls:
            return "tool_call_id", "must answer one of the tool_calls before it"
        if self.content is None and self.tool_calls is None:
            if "content" not in self.model_fields_set:
                return "content", "missing"
            return "content", "must be a string or a list of parts"
        return None

    def plain(self) -> dict[str, Any]:
        """As chat templates want it: a role they know, and one string."""
        plain: dict[str, Any] = {
            "role": "system" if self.role == "developer" else self.role,
            "content": self.text,
        }
        if self.tool_calls is not None:
            plain["tool_calls"] = [call.plain() for call in self.tool_calls]
        if self.tool_call_id is not None:
            plain["tool_call_id"] = self.tool_call_id
        return plain


class Function(_Body):
    name: Annotated[str, Field(pattern=_NAME)]
    description: Annotated[str, Field(max_length=16_384)] | None = None
    parameters: dict[str, Any] | None = None
    strict: bool | None = None


class Tool(_Body):
    type: Literal["function"]
    function: Function

    def plain(self) -> dict[str, Any]:
        function = self.function.model_dump(exclude_none=True, exclude={"strict"})
        return {"type": "function", "function": {"parameters": {"type": "object"}, **function}}


class NamedFunction(_Body):
    name: str


class NamedTool(_Body):
    type: Literal["function"]
    function: NamedFunction


class JsonSchemaFormat(_Body):
    name: Annotated[str, Field(pattern=_NAME)]
    description: str | None = None
    schema_: Annotated[dict[str, Any] | None, Field(alias="schema")] = None
    strict: bool | None = None


class ResponseFormat(_Body):
    type: Literal["text", "json_object", "json_schema"]
    json_schema: JsonSchemaFormat | None = None


class ChatRequest(_Common):
    messages: Annotated[list[Message], Field(min_length=1, max_length=MAX_MESSAGES)]
    max_completion_tokens: Annotated[int, Field(ge=1)] | None = None
    logprobs: bool | None = None
    top_logprobs: Annotated[int, Field(ge=0, le=MAX_TOP_LOGPROBS)] | None = None
    response_format: ResponseFormat | None = None
    tools: Annotated[list[Tool], Field(max_length=MAX_TOOLS)] | None = None
    tool_choice: Literal["none", "auto", "required"] | NamedTool | None = None
    parallel_tool_calls: bool | None = None

    def check(self) -> None:
        """What fields say of each other. ApiError names one."""
        if self.top_logprobs and not self.logprobs:
            raise _invalid("top_logprobs", "needs logprobs to be true")
        both = self.max_tokens is not None and self.max_completion_tokens is not None
        if both and self.max_tokens != self.max_completion_tokens:
            raise _invalid("max_tokens", "contradicts max_completion_tokens")
        self._check_messages()
        self._check_tools()
        wanted = self.response_format
        if wanted is not None and (wanted.type == "json_schema") != (wanted.json_schema is not None):
            raise _invalid("response_format.json_schema", "belongs to the type json_schema, and to it alone")
        if self.ignore_eos and (self.schema_wanted is not None or self.callable_tools):
            raise _invalid("ignore_eos", "an answer of a given form ends by itself")

    def _check_messages(self) -> None:
        open_calls: frozenset[str] = frozenset()
        for i, message in enumerate(self.messages):
            problem = message.problem(open_calls)
            if problem is not None:
                at = f"messages[{i}].{problem[0]}"
                raise _missing(at) if problem[1] == "missing" else _invalid(at, problem[1])
            if message.tool_calls is not None:
                open_calls = frozenset(call.id for call in message.tool_calls)
            elif message.role != "tool":
                open_calls = frozenset()

    def _check_tools(self) -> None:
        names = [tool.function.name for tool in self.tools or ()]
        for i, name in enumerate(names):
            if name in names[:i]:
                raise _invalid(f"tools[{i}].function.name", "is the name of another tool, too")
        if not names:
            if self.tool_choice not in (None, "none"):
                raise _invalid("tool_choice", "needs tools")
            if self.parallel_tool_calls is not None and self.tools is not None:
                raise _invalid("tools", "must not be empty")
        if isinstance(self.tool_choice, NamedTool) and self.tool_choice.function.name not in names:
            raise _invalid("tool_choice.function.name", "is the name of no tool")

    @property
    def form_wanted(self) -> str:
        return "text" if self.response_format is None else self.response_format.type

    @property
    def schema_wanted(self) -> dict[str, Any] | None:
        """What `response_format` says about the answer, as a JSON schema."""
        wanted = self.response_format
        if wanted is None or wanted.type == "text":
            return None
        schema = None if wanted.json_schema is None else wanted.json_schema.schema_
        return {"type": "object"} if schema is None else schema

    @property
    def callable_tools(self) -> list[tuple[int, Tool]]:
        """The tools that this answer may call, with their places in `tools`."""
        tools = list(enumerate(self.tools or ()))
        if self.tool_choice == "none":
            return []
        if isinstance(self.tool_choice, NamedTool):
            return [(i, t) for i, t in tools if t.function.name == self.tool_choice.function.name]
        return tools

    @property
    def must_call(self) -> bool:
        return self.tool_choice == "required" or isinstance(self.tool_choice, NamedTool)

    @property
    def may_call_in_parallel(self) -> bool:
        return self.parallel_tool_calls is not False and not isinstance(self.tool_choice, NamedTool)

    @property
    def told_tools(self) -> list[dict[str, Any]]:
        """What the model is told about: nothing that it may not call."""
        return [] if self.tool_choice == "none" else [tool.plain() for tool in self.tools or ()]

    @property
    def num_logprobs(self) -> int | None:
        return (self.top_logprobs or 0) if self.logprobs else None

    @property
    def wanted_max_tokens(self) -> tuple[str, int | None]:
        if self.max_completion_tokens is not None:
            return "max_completion_tokens", self.max_completion_tokens
        return "max_tokens", self.max_tokens

    def num_prompt_chars(self) -> int:
        calls = [c.function for m in self.messages for c in m.tool_calls or ()]
        told = sum(len(json.dumps(tool, ensure_ascii=False)) for tool in self.told_tools)
        return sum(len(m.text) for m in self.messages) + sum(len(f.arguments) for f in calls) + told


_TokenIds = list[Annotated[int, Field(ge=0, lt=2**31)]]


def _one_prompt(value: Any) -> str | list[int]:
    """Text, or token ids; of a list of prompts its only one. By hand, because for each id of a long list
    pydantic would keep an error for each kind of list that it is not: gigabytes, and minutes of the GIL."""
    if isinstance(value, list) and value and isinstance(value[0], str | list):
        if len(value) > 1:
            raise ValueError("several prompts in one request are not supported: send several")
        value = value[0]
    if not isinstance(value, str | list):
        raise ValueError("must be text or token ids")
    if not value:
        raise ValueError("must not be empty")
    for i, token_id in enumerate(value if isinstance(value, list) else ()):
        if type(token_id) is not int or not 0 <= token_id < 2**31:
            raise _invalid(f"prompt[{i}]", "must be a token id")
    return value


class CompletionRequest(_Common):
    prompt: Annotated[
        str | list[int],
        PlainValidator(_one_prompt, json_schema_input_type=str | list[str] | _TokenIds | list[_TokenIds]),
    ]
    logprobs: Annotated[int, Field(ge=0, le=5)] | None = None

    def check(self) -> None:
        """Its fields say nothing of each other."""

    @property
    def num_logprobs(self) -> int | None:
        return self.logprobs

    default_max_tokens: ClassVar[int | None] = 16

    def num_prompt_chars(self) -> int:
        return len(self.prompt)


# Fields that OpenAI has and we don't (yet), with the values that mean "as if absent".
_NEUTRAL: Mapping[str, tuple[Any, ...]] = {
    "functions": (),
    "function_call": ("none",),
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
    for name in raw:
        if name not in kind.model_fields:
            raise _unknown(name)
    try:
        request = kind.model_validate(raw)
    except ValidationError as e:
        raise _explain(e) from None
    request.check()
    if request.stream_options is not None and not request.stream:
        raise bad_request("stream_options is only allowed when stream is true.", "stream_options")
    return request


def _json_object(data: bytes) -> dict[str, Any]:
    refuse_many_values(data)
    try:
        raw = json.loads(data.decode(), parse_constant=_refuse_constant)
        json.dumps(raw, ensure_ascii=False).encode()  # refuses lone surrogates, which no tokenizer takes
    except (ValueError, RecursionError):
        raise bad_request("The request body is not valid JSON in UTF-8.", code="invalid_json") from None
    if not isinstance(raw, dict):
        raise bad_request("The request body must be a JSON object.")
    return raw


def _missing(param: str) -> ApiError:
    return bad_request(f"Missing required parameter: '{param}'.", param, "missing_required_parameter")


def _unknown(param: str) -> ApiError:
    name = param[:200]
    return bad_request(f"Unrecognized request argument supplied: {name}", name, "unknown_parameter")


def _invalid(param: str, why: str) -> ApiError:
    return bad_request(f"Invalid value for '{param}': {why}.", param, "invalid_value")


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
        return _missing(str(param))
    if kind == "extra_forbidden":
        return _unknown(dotted(loc))
    if param is None:
        words = text.split(maxsplit=1)
        param = words[0].rstrip(":") if words else None
        return bad_request(f"Invalid request: {text}.", param, "invalid_value")
    return bad_request(f"Invalid value for '{param}': {text}.", param, "invalid_value")


def _is_union_branch(part: int | str) -> bool:
    return isinstance(part, str) and (
        part == "str" or "[" in part or part in ("constrained-str", "NamedTool")
    )


def _most_telling(problems: list[Any]) -> Any:
    """Of a union's branches the one that got furthest: `content[0].type` rather than `content is not a
    string`.
    """
    return max(problems[:32], key=lambda p: len(p["loc"]) if p["loc"][:1] == problems[0]["loc"][:1] else 0)
