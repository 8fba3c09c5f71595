"""Whether a JSON schema is one, and which parts it has; exists because the metaschema takes a millisecond a
part to ask in Python: 15 seconds for one schema that a request may send.

Read as 2020-12, 2019-09 and draft-07 have it (their metaschemas are the tests' oracle). A reference may lead
anywhere within the schema, and what it leads to is a part too. Invariant: time linear in the schema's size;
each part is given once, by its JSON pointer (RFC 6901).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any
from urllib.parse import unquote

_TYPES = frozenset({"array", "boolean", "integer", "null", "number", "object", "string"})
_ONE = frozenset(
    {
        "additionalItems",
        "additionalProperties",
        "contains",
        "contentSchema",
        "else",
        "if",
        "items",
        "not",
        "propertyNames",
        "then",
    }
)
_SEVERAL = frozenset({"allOf", "anyOf", "oneOf", "prefixItems"})
_NAMED = frozenset(
    {"$defs", "definitions", "dependencies", "dependentSchemas", "patternProperties", "properties"}
)


class Malformed(ValueError):
    """No schema. `at` is a JSON pointer to what is wrong."""

    def __init__(self, at: str, message: str) -> None:
        super().__init__(message)
        self.at = at


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool)


def _is_count(value: Any) -> bool:
    """3.0 is one as well as 3."""
    return _is_number(value) and value >= 0 and (isinstance(value, int) or value.is_integer())


def _are_names(value: Any) -> bool:
    return (
        isinstance(value, list) and all(isinstance(v, str) for v in value) and len(set(value)) == len(value)
    )


def _is_type(value: Any) -> bool:
    names = [value] if isinstance(value, str) else value
    return _are_names(names) and len(names) > 0 and _TYPES.issuperset(names)


def _is_string(value: Any) -> bool:
    return isinstance(value, str)


def _is_boolean(value: Any) -> bool:
    return isinstance(value, bool)


def _is_list(value: Any) -> bool:
    return isinstance(value, list)


_Value = tuple[Callable[[Any], bool], str]


def _values(keywords: str, holds: Callable[[Any], bool], what: str) -> dict[str, _Value]:
    return dict.fromkeys(keywords.split(), (holds, what))


_VALUES: Mapping[str, _Value] = {
    **_values(
        "$schema $ref $comment title description pattern format contentEncoding contentMediaType",
        _is_string,
        "a string",
    ),
    **_values(
        "$id", lambda v: isinstance(v, str) and re.fullmatch(r"[^#]*#?", v) is not None, "a URI reference"
    ),
    **_values("maximum exclusiveMaximum minimum exclusiveMinimum", _is_number, "a number"),
    **_values("multipleOf", lambda v: _is_number(v) and v > 0, "a number above 0"),
    **_values(
        "maxLength minLength maxItems minItems maxProperties minProperties maxContains minContains",
        _is_count,
        "a whole number, at least 0",
    ),
    **_values("uniqueItems deprecated readOnly writeOnly", _is_boolean, "a boolean"),
    **_values("enum examples", _is_list, "a list"),
    **_values("type", _is_type, "a type's name, or a list of different ones"),
    **_values("required", _are_names, "a list of different strings"),
    **_values(
        "dependentRequired",
        lambda v: isinstance(v, dict) and all(map(_are_names, v.values())),
        "an object of lists of different strings",
    ),
    **_values(
        "$vocabulary",
        lambda v: isinstance(v, dict) and all(isinstance(one, bool) for one in v.values()),
        "an object of booleans",
    ),
}


def parts(schema: Any, *, item_lists: bool = False) -> Iterator[tuple[str, dict[str, Any]]]:
    """All schemas within `schema` that are objects, itself first, with their JSON pointers; Malformed at the
    first that is none. `item_lists`: `items` may be a list, as before 2020-12."""
    seen: set[str] = set()
    todo: list[tuple[str, Any]] = [("", schema)]
    while todo:
        at, part = todo.pop()
        if at in seen or isinstance(part, bool):
            continue
        seen.add(at)
        if not isinstance(part, dict):
            raise Malformed(at, "must be an object or a boolean")
        for key, value in part.items():
            todo += _within(f"{at}/{_escaped(key)}", key, value, item_lists)
        ref = part.get("$ref", "")
        if ref.startswith("#"):
            todo.append(_resolved(schema, ref, at))
        yield at, part


def _within(at: str, key: str, value: Any, item_lists: bool) -> Iterable[tuple[str, Any]]:
    """The parts that one keyword holds."""
    if key in _VALUES:
        holds, what = _VALUES[key]
        if not holds(value):
            raise Malformed(at, f"must be {what}")
    elif key in _SEVERAL or (key == "items" and item_lists and isinstance(value, list)):
        if not isinstance(value, list) or not value:
            raise Malformed(at, "must be a list of schemas, at least one")
        return [(f"{at}/{i}", one) for i, one in enumerate(value)]
    elif key in _ONE:
        return [(at, value)]
    elif key in _NAMED:
        if not isinstance(value, dict):
            raise Malformed(at, "must be an object of schemas")
        named = [(f"{at}/{_escaped(name)}", one) for name, one in value.items()]
        return [(p, one) for p, one in named if not (key == "dependencies" and _are_names(one))]
    return ()


def _escaped(name: str) -> str:
    return name.replace("~", "~0").replace("/", "~1")


def _resolved(schema: Any, ref: str, at: str) -> tuple[str, Any]:
    """What a reference `#…` leads to, and its pointer."""
    pointer = unquote(ref[1:])
    found, path = schema, ""
    for token in pointer.split("/")[1:]:
        name = token.replace("~1", "/").replace("~0", "~")
        if isinstance(found, dict) and name in found:
            found = found[name]
        elif isinstance(found, list) and re.fullmatch(r"0|[1-9][0-9]{0,5}", name) and int(name) < len(found):
            found = found[int(name)]
        else:
            raise Malformed(f"{at}/$ref", "leads nowhere")
        path += f"/{_escaped(name)}"
    if not pointer.startswith("/") and pointer:
        raise Malformed(f"{at}/$ref", "must be # or #/…")
    return path, found
