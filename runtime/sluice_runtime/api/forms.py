"""What form a request asks of its answers: from `response_format` and `tools` to a grammar, and to a check.

Invariant: a form that is refused is its own request's 400, named by field, found before anything is queued;
building it never runs on the event loop.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable, Mapping
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, Protocol, TypeVar

from sluice_runtime.api import errors
from sluice_runtime.api.tools import ToolReader
from sluice_runtime.engine.grammar import ToolForm, check_numbers, json_grammar, tool_grammar
from sluice_runtime.engine.types import Grammar, InvalidRequest
from sluice_runtime.schema_check import BoundedSchema, OutOfTime, SchemaRefused, TooMuchWork
from sluice_runtime.turns import Turns

if TYPE_CHECKING:
    from sluice_runtime.api.schemas import ChatRequest

T = TypeVar("T")
COMPILE_SECONDS = 2.0
_NO_ARGUMENTS: Mapping[str, Any] = {"type": "object", "properties": {}, "additionalProperties": False}


class Compiler(Protocol):
    """What compiles grammars: an engine. A stand-in's gives None and enforces nothing."""

    def compile_grammar(self, grammar: str) -> Grammar | None: ...


@dataclass(frozen=True)
class Form:
    """What the answers of one request must look like."""

    grammar: Grammar | None
    schema: BoundedSchema | None = None
    tools: Mapping[str, BoundedSchema] | None = None

    def reader(self) -> ToolReader | None:
        return None if self.tools is None else ToolReader()

    def fits(self, content: str) -> bool | None:
        """Whether an answer's content is what `response_format` asks for; None if it asks for nothing, or if
        it can't be told within bounds."""
        if self.schema is None:
            return None
        try:
            return self.schema.check(content)
        except (OutOfTime, TooMuchWork):
            return None

    def calls_fit(self, reader: ToolReader) -> bool:
        """Whether each call names a tool and its arguments are what that takes."""
        assert self.tools is not None
        try:
            return reader.complete and all(
                call.name in self.tools and self.tools[call.name].check(call.arguments)
                for call in reader.calls
            )
        except (OutOfTime, TooMuchWork):
            return False


NO_FORM = Form(None)


async def form_of(request: ChatRequest, compiler: Compiler, turns: Turns, caller: Hashable) -> Form:
    """Build and compile, when it is the caller's turn. ApiError names the field at fault."""
    if request.schema_wanted is None and not request.callable_tools:
        return NO_FORM
    try:
        return await turns.run(caller, lambda: _build(request, compiler), COMPILE_SECONDS)
    except TimeoutError:
        param = "tools" if request.callable_tools else "response_format"
        raise errors.bad_request(
            f"The form asked for takes more than {COMPILE_SECONDS:g} seconds to compile: make it simpler.",
            param,
            "invalid_value",
        ) from None


_SCHEMA = "response_format.json_schema.schema"


def _build(request: ChatRequest, compiler: Compiler) -> Form:
    wanted = request.schema_wanted
    schema = None if wanted is None else _bounded(wanted, _SCHEMA)
    forms: list[ToolForm] = []
    checks: dict[str, BoundedSchema] = {}
    for i, tool in request.callable_tools:
        at = f"tools[{i}].function.parameters"
        parameters = tool.function.parameters
        if parameters is None:
            parameters = dict(_NO_ARGUMENTS)
        elif parameters.get("type", "object") != "object":
            raise _refused(at, "must be a schema of type object")
        checks[tool.function.name] = _bounded(parameters, at)
        forms.append(ToolForm(tool.function.name, {"type": "object", **parameters}))
    if not forms:
        assert wanted is not None
        return Form(_compile(compiler, json_grammar(wanted), _SCHEMA), schema)
    required = request.must_call
    grammar = tool_grammar(
        forms,
        required=required,
        parallel=request.may_call_in_parallel,
        schema=None if required else wanted,
    )
    try:
        compiled = compiler.compile_grammar(grammar)
    except InvalidRequest as e:
        # Which of them is it? Only a request that is refused anyway pays for the answer.
        for form, (i, _) in zip(forms, request.callable_tools, strict=True):
            _compile(compiler, json_grammar(form.parameters), f"tools[{i}].function.parameters")
        if wanted is not None:
            _compile(compiler, json_grammar(wanted), _SCHEMA)
        raise _refused("tools", str(e)) from None
    return Form(compiled, None if required else schema, checks)


def _bounded(schema: Mapping[str, Any], at: str) -> BoundedSchema:
    return _naming(at, lambda: _checked(schema))


def _checked(schema: Mapping[str, Any]) -> BoundedSchema:
    bounded = BoundedSchema(schema)
    check_numbers(schema)
    return bounded


def _compile(compiler: Compiler, grammar: str, at: str) -> Grammar | None:
    return _naming(at, lambda: compiler.compile_grammar(grammar))


def _naming(at: str, build: Callable[[], T]) -> T:
    try:
        return build()
    except (SchemaRefused, InvalidRequest, RecursionError) as e:
        raise _refused(at, str(e) or "is nested too deeply") from None


def _refused(at: str, why: str) -> errors.ApiError:
    return errors.bad_request(f"Invalid value for '{at}': {why}.", at, "invalid_value")
