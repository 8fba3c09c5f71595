"""Forms of answers as text for llguidance; exists so that who only writes them needs no tokenizer.

The text of a tool call is fixed up to its arguments (Hermes' form, which Qwen and others were trained on):

    <tool_call>\\n{"name": "get_weather", "arguments": {"city": "Paris"}}\\n</tool_call>

Invariant: what a request says stands in a grammar as a JSON schema only, never as grammar.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping, Sequence
from copy import deepcopy
from dataclasses import dataclass
from typing import Any

from sluice_runtime.engine.types import InvalidRequest
from sluice_runtime.schema_shape import parts

TOOL_BEGIN, TOOL_END = "<tool_call>", "</tool_call>"
MAX_COUNT = 10_000
"""The largest `minItems`, `maxLength` and the like."""
_COUNTS = frozenset(
    {
        "minItems",
        "maxItems",
        "minLength",
        "maxLength",
        "minProperties",
        "maxProperties",
        "minContains",
        "maxContains",
    }
)
_LOWEST, _HIGHEST = {"minimum", "exclusiveMinimum"}, {"maximum", "exclusiveMaximum"}
_MAX_BOUND = 2**63
_FORMATS = frozenset(
    {"date", "date-time", "duration", "email", "hostname", "ipv4", "ipv6", "time", "uri", "uuid"}
)
"""What llguidance enforces."""
# Without a bound a model may go on with white space for ever; this is a space, or a line and its indentation.
_JSON = {"whitespace_pattern": r" |\n[ \t]{0,20}", "lenient": False}


@dataclass(frozen=True)
class ToolForm:
    """A function that may be called: its name (letters, digits, `_` and `-`) and its arguments' schema."""

    name: str
    parameters: Mapping[str, Any]


def json_grammar(schema: Mapping[str, Any]) -> str:
    """Exactly one JSON value that fits."""
    return f"%llguidance {{}}\nstart: form\nform: {_json(schema)}\n"


def tool_grammar(
    tools: Sequence[ToolForm], *, required: bool, parallel: bool, schema: Mapping[str, Any] | None = None
) -> str:
    """Tool calls; text before them, or instead of them, unless `required`. With `schema`, what is no call is
    JSON that fits."""
    names = [f"tool_{i}" for i in range(len(tools))]
    calls = 'call ("\\n" call)*' if parallel else "call"
    lines = ["%llguidance {}"]
    if required:
        lines += [f"start: {calls}", f'call: "{TOOL_BEGIN}" body']
    elif schema is not None:
        lines += [f"start: form | {calls}", f"form: {_json(schema)}", f'call: "{TOOL_BEGIN}" body']
    else:
        # The lazy lexeme ends at the first marker: from there on it is a call.
        more = '("\\n" next)*' if parallel else ""
        lines += [
            f"start: TEXT | first body {more}",
            f'first[lazy]: /(.|\\n)*/ "{TOOL_BEGIN}"',
            f'next: "{TOOL_BEGIN}" body',
            "TEXT: /(.|\\n)*/",
        ]
    lines.append(f"body: {' | '.join(names)}")
    for name, tool in zip(names, tools, strict=True):
        head = json.dumps(f'\n{{"name": "{tool.name}", "arguments": ')
        tail = json.dumps(f"}}\n{TOOL_END}")
        lines.append(f"{name}: {head} {name}_arguments {tail}")
        lines.append(f"{name}_arguments: {_json(tool.parameters)}")
    return "\n".join(lines) + "\n"


def _json(schema: Mapping[str, Any]) -> str:
    # Whatever the request says about how it is compiled is not the request's to say.
    return "%json " + json.dumps({**_without_remarks(schema), "x-guidance": _JSON})


def _without_remarks(schema: Mapping[str, Any]) -> dict[str, Any]:
    """`schema` without formats that nobody enforces: to the standard any format is a remark, and llguidance
    refuses those that it does not know."""
    copy: dict[str, Any] = deepcopy(dict(schema))
    for _, part in parts(copy, item_lists=True):
        if part.get("format") not in _FORMATS:
            part.pop("format", None)
    return copy


def check_numbers(schema: Mapping[str, Any]) -> None:
    """Raise `InvalidRequest` where a schema counts beyond `MAX_COUNT`, which is cheap to write and dear to
    compile, or has a number that would be another one in its grammar, so that no answer could fit both."""
    for at, part in parts(schema, item_lists=True):
        for key, value in part.items():
            where = f"{key} at {at or '/'}"
            if key in _COUNTS and value > MAX_COUNT:
                raise InvalidRequest(f"{where} must be at most {MAX_COUNT}")
            if (key in _LOWEST and value >= _MAX_BOUND) or (key in _HIGHEST and value <= -_MAX_BOUND):
                raise InvalidRequest(f"{where} is beyond 64 bits")
            if key in ("const", "enum") and not all(map(_is_exact, _numbers(value))):
                raise InvalidRequest(f"{where} has a number that can't be kept exactly: use a string")


def _numbers(value: Any) -> Iterator[int | float]:
    if isinstance(value, int | float):
        yield value
    elif isinstance(value, list | dict):
        for item in value.values() if isinstance(value, dict) else value:
            yield from _numbers(item)


def _is_exact(number: int | float) -> bool:
    """Whether llguidance writes this one as it is: it reads numbers as floats, and is only sure to read those
    right whose digits and power of ten a float holds."""
    if isinstance(number, int):
        return abs(number) <= 2**53
    return number == 0 or (1e-7 <= abs(number) <= 2**53 and float(f"{number:.15g}") == number)
