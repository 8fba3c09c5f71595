"""JSON schema 2020-12 over an answer, within bounds.

A schema is written by people and met by models, so both are taken for hostile: nothing is fetched, patterns
run on RE2, and each keyword that is evaluated is counted. Invariant: ``failure`` ends after ``MAX_STEPS``
keywords, and names places of the schema, never of the answer. The same schemas are taken as by a rule's
contract, which pods check.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import referencing
from jsonschema import Draft202012Validator
from jsonschema.exceptions import ValidationError
from jsonschema.validators import extend
from referencing.exceptions import Unresolvable

from .. import metaschema
from . import patterns

MAX_SCHEMA_BYTES = 64 * 1024
MAX_SCHEMA_DEPTH = 32
MAX_STEPS = 50_000
_DRAFT = "https://json-schema.org/draft/2020-12/schema"
_REFUSED = {"$dynamicRef", "$dynamicAnchor", "unevaluatedProperties", "unevaluatedItems", "$anchor"}
_NAMES_BELOW = ("properties", "$defs", "patternProperties", "dependentSchemas")
_PROBES: tuple[Any, ...] = (None, 0, "", [], {}, [0], {"a": 0})
_Keyword = Callable[[Any, Any, Any, Mapping[str, Any]], Iterable[ValidationError] | None]


class SchemaRefused(ValueError):
    """Not valid, not self-contained, or not bounded."""


class TooManySteps(Exception):
    """The value takes more steps than allowed."""


class Schema:
    """A schema that was accepted."""

    def __init__(self, schema: Mapping[str, Any]) -> None:
        """Raises SchemaRefused."""
        text = _bounded(schema)
        if str(schema.get("$schema", _DRAFT)).rstrip("#") != _DRAFT:
            raise SchemaRefused(f"$schema must be {_DRAFT} or absent")
        _walk(schema, ())
        if metaschema.num_parts(text) > metaschema.MAX_PARTS:
            raise SchemaRefused(f"has more than {metaschema.MAX_PARTS} objects and booleans")
        if wrong := metaschema.wrong(text):
            at = "/".join(map(str, wrong.at)) or "its root"
            raise SchemaRefused(f"is not a JSON schema (2020-12), at {at}: {wrong.message[:200]}")
        self._num_steps = 0
        counted: Any = extend(  # type: ignore[no-untyped-call]
            Draft202012Validator,
            {n: self._counted(k) for n, k in {**Draft202012Validator.VALIDATORS, **_OWN}.items()},
        )
        self._validator = counted(schema, registry=referencing.Registry())
        self._probe()

    def failure(self, text: str) -> str:
        """Why ``text`` does not hold to the schema; empty: it does. Not for several threads at once."""
        try:
            value = json.loads(text, parse_constant=_refuse)
        except (ValueError, RecursionError):
            return "is not JSON"
        try:
            error = self._first_error(value)
        except TooManySteps:
            return "is too large to be checked"
        except patterns.TooMuchWork:
            return "is too long for a pattern of the schema"
        except RecursionError:
            return "is nested too deep to be checked"
        if error is None:
            return ""
        return "breaks #" + "".join(f"/{part}" for part in error.absolute_schema_path)

    def _first_error(self, value: Any) -> ValidationError | None:
        self._num_steps = 0
        found: ValidationError | None = next(self._validator.iter_errors(value), None)
        return found

    def _counted(self, keyword: _Keyword) -> _Keyword:
        def run(
            validator: Any, value: Any, instance: Any, schema: Mapping[str, Any]
        ) -> Iterator[ValidationError]:
            self._num_steps += 1
            if self._num_steps > MAX_STEPS:
                raise TooManySteps
            yield from keyword(validator, value, instance, schema) or ()

        return run

    def _probe(self) -> None:
        """References that lead nowhere or in a circle are found now, rather than on somebody's answer."""
        for probe in _PROBES:
            try:
                self._first_error(probe)
            except Unresolvable as error:
                raise SchemaRefused(f"has a $ref that leads nowhere: {str(error)[:200]}") from None
            except RecursionError:
                raise SchemaRefused("has a $ref that leads in a circle") from None
            except TooManySteps:
                raise SchemaRefused("takes too many steps even on tiny values") from None


def _bounded(schema: Mapping[str, Any]) -> str:
    """The schema as JSON. Level by level, since what is nested without end would exhaust whatever recurses
    into it."""
    level: list[Any] = [schema]
    for _ in range(MAX_SCHEMA_DEPTH):
        groups = [n.values() if isinstance(n, dict) else n for n in level if isinstance(n, dict | list)]
        level = [child for group in groups for child in group]
        if not level:
            break
        if len(level) > MAX_SCHEMA_BYTES:
            raise SchemaRefused(f"is larger than {MAX_SCHEMA_BYTES} bytes")
    else:
        raise SchemaRefused(f"is nested deeper than {MAX_SCHEMA_DEPTH} levels")
    try:
        text = json.dumps(schema, ensure_ascii=False, allow_nan=False)
    except (TypeError, ValueError):
        raise SchemaRefused("is not JSON") from None
    if len(text.encode("utf-8", "replace")) > MAX_SCHEMA_BYTES:
        raise SchemaRefused(f"is larger than {MAX_SCHEMA_BYTES} bytes")
    return text


def _walk(node: Any, path: tuple[str, ...]) -> None:
    """Compiles patterns and refuses what can't be bounded. Data (``const``, ``enum``) is walked too."""
    if isinstance(node, list):
        for index, item in enumerate(node):
            _walk(item, (*path, str(index)))
    if not isinstance(node, dict):
        return
    at = "/" + "/".join(path)
    if not (path and path[-1] in _NAMES_BELOW):
        if refused := _REFUSED & node.keys():
            raise SchemaRefused(f"uses {min(refused)} at {at}, which is not supported")
        ref = node.get("$ref")
        if isinstance(ref, str) and not (ref == "#" or ref.startswith("#/")):
            raise SchemaRefused(f"has a $ref at {at} that points outside; nothing is fetched: use #/…")
        if "$id" in node and path:
            raise SchemaRefused(f"has an $id at {at}, which is only supported at the root")
    sources = [node["pattern"]] if isinstance(node.get("pattern"), str) else []
    if isinstance(node.get("patternProperties"), dict):
        sources += [source for source in node["patternProperties"] if isinstance(source, str)]
    for source in sources:
        try:
            patterns.accept(source)
        except patterns.PatternRefused as error:
            raise SchemaRefused(f"has a pattern at {at} that {error}") from None
    for key, value in node.items():
        _walk(value, (*path, str(key)))


def _refuse(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


def _pattern(
    validator: Any, value: Any, instance: Any, schema: Mapping[str, Any]
) -> Iterator[ValidationError]:
    if isinstance(instance, str) and not patterns.found(value, instance):
        yield ValidationError("does not match the pattern")


def _pattern_properties(
    validator: Any, value: Any, instance: Any, schema: Mapping[str, Any]
) -> Iterator[ValidationError]:
    if not isinstance(instance, dict):
        return
    for pattern, subschema in value.items():
        for name, item in instance.items():
            if patterns.found(pattern, name):
                yield from validator.descend(item, subschema, path=name, schema_path=pattern)


def _additional_properties(
    validator: Any, value: Any, instance: Any, schema: Mapping[str, Any]
) -> Iterator[ValidationError]:
    if not isinstance(instance, dict):
        return
    sources = schema.get("patternProperties", {})
    for name, item in instance.items():
        if name in schema.get("properties", {}) or any(patterns.found(p, name) for p in sources):
            continue
        if value is False:
            yield ValidationError("has a property that is not allowed")
        else:
            yield from validator.descend(item, value, path=name)


def _unique_items(
    validator: Any, value: Any, instance: Any, schema: Mapping[str, Any]
) -> Iterator[ValidationError]:
    if value and isinstance(instance, list) and len({_canonical(item) for item in instance}) < len(instance):
        yield ValidationError("has items that are not unique")


def _canonical(item: Any) -> str:
    """Equal JSON values give equal strings: 1 and 1.0 do, 1 and true don't, and key order does not matter."""

    def plain(value: Any) -> Any:
        if isinstance(value, float) and value.is_integer():
            return int(value)
        if isinstance(value, list):
            return [plain(v) for v in value]
        if isinstance(value, dict):
            return {k: plain(v) for k, v in value.items()}
        return value

    return json.dumps(plain(item), sort_keys=True)


_OWN: dict[str, _Keyword] = {
    "pattern": _pattern,
    "patternProperties": _pattern_properties,
    "additionalProperties": _additional_properties,
    "uniqueItems": _unique_items,
}
