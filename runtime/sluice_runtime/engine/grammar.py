"""Forms of answers as text for llguidance; exists so that who only writes them needs no tokenizer.

The text of a tool call is fixed up to its arguments (Hermes' form, which Qwen and others were trained on):

    <tool_call>\\n{"name": "get_weather", "arguments": {"city": "Paris"}}\\n</tool_call>

Invariant: what a request says stands in a grammar as a JSON schema only, never as grammar.
"""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from sluice_runtime.engine.types import InvalidRequest

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
    return "%json " + json.dumps({**schema, "x-guidance": _JSON})


def check_counts(node: Any, path: str = "") -> None:
    """Raise `InvalidRequest` where a schema counts beyond `MAX_COUNT`: cheap to write, dear to compile."""
    if isinstance(node, list):
        for i, item in enumerate(node):
            check_counts(item, f"{path}/{i}")
    if isinstance(node, Mapping):
        for key, value in node.items():
            is_number = isinstance(value, int | float) and not isinstance(value, bool)
            if key in _COUNTS and is_number and value > MAX_COUNT:
                raise InvalidRequest(f"{key} at {path or '/'} must be at most {MAX_COUNT}")
            check_counts(value, f"{path}/{key}")
