"""JSON Schema over model output within bounded time and size; exists because a schema is written by people

and met by models.

Invariant: `check` returns or raises within about `MAX_SECONDS`, whatever schema was accepted and whatever
the text is: patterns run on RE2, nothing is fetched, and each keyword that is evaluated looks at the clock.
"""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import referencing
from jsonschema import Draft202012Validator
from jsonschema.exceptions import SchemaError, ValidationError
from jsonschema.validators import extend
from referencing.exceptions import Unresolvable

from sluice_runtime.patterns import Pattern, PatternError, TooMuchWork, compile_pattern

MAX_SCHEMA_BYTES = 64 * 1024
MAX_SCHEMA_DEPTH = 64
MAX_SECONDS = 1.0
_DRAFT = "https://json-schema.org/draft/2020-12/schema"
_REFUSED = {"$dynamicRef", "$dynamicAnchor", "unevaluatedProperties", "unevaluatedItems", "$anchor"}
_PROBES: tuple[Any, ...] = (None, 0, "", [], {}, [0], {"a": 0})


class SchemaRefused(ValueError):
    """A schema that is not valid, not self-contained or not bounded."""


class OutOfTime(Exception):
    """Validation took longer than `MAX_SECONDS`."""


class _Budget(threading.local):
    deadline = float("inf")
    patterns: Mapping[str, Pattern] = {}


_budget = _Budget()
_Keyword = Callable[[Any, Any, Any, Mapping[str, Any]], Iterable[ValidationError] | None]


def _timed(keyword: _Keyword) -> _Keyword:
    def run(
        validator: Any, value: Any, instance: Any, schema: Mapping[str, Any]
    ) -> Iterator[ValidationError]:
        if time.monotonic() > _budget.deadline:
            raise OutOfTime
        yield from keyword(validator, value, instance, schema) or ()

    return run


def _matches(pattern: str, text: str) -> bool:
    return _budget.patterns[pattern].search(text.encode("utf-8", "replace"))


def _pattern(
    validator: Any, value: Any, instance: Any, schema: Mapping[str, Any]
) -> Iterator[ValidationError]:
    if isinstance(instance, str) and not _matches(value, instance):
        yield ValidationError("does not match the pattern")


def _pattern_properties(
    validator: Any, value: Any, instance: Any, schema: Mapping[str, Any]
) -> Iterator[ValidationError]:
    if not isinstance(instance, dict):
        return
    for pattern, subschema in value.items():
        for name, item in instance.items():
            if _matches(pattern, name):
                yield from validator.descend(item, subschema, path=name, schema_path=pattern)


def _additional_properties(
    validator: Any, value: Any, instance: Any, schema: Mapping[str, Any]
) -> Iterator[ValidationError]:
    if not isinstance(instance, dict):
        return
    patterns = schema.get("patternProperties", {})
    for name, item in instance.items():
        if name in schema.get("properties", {}) or any(_matches(p, name) for p in patterns):
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
_Validator: Any = extend(  # type: ignore[no-untyped-call]
    Draft202012Validator,
    {name: _timed(keyword) for name, keyword in {**Draft202012Validator.VALIDATORS, **_OWN}.items()},
)


class BoundedSchema:
    """A schema that was accepted. `check` may be called from any thread."""

    def __init__(self, schema: Mapping[str, Any]) -> None:
        """Raises SchemaRefused."""
        if len(json.dumps(schema)) > MAX_SCHEMA_BYTES:
            raise SchemaRefused(f"larger than {MAX_SCHEMA_BYTES} bytes")
        if schema.get("$schema", _DRAFT).rstrip("#") != _DRAFT:
            raise SchemaRefused(f"$schema must be {_DRAFT} or absent")
        self._patterns: dict[str, Pattern] = {}
        self._walk(schema, "", 0)
        try:
            Draft202012Validator.check_schema(schema)
        except SchemaError as e:
            path = "/".join(map(str, e.absolute_path))
            raise SchemaRefused(f"not a valid schema at {path or 'its root'}: {e.message[:200]}") from None
        self._validator = _Validator(schema, registry=referencing.Registry())
        self._probe()

    def _walk(self, node: Any, path: str, depth: int) -> None:
        """Compile patterns and refuse what can't be bounded. Data (`const`, `enum`) is walked too: harmless,
        and simpler.
        """
        if depth > MAX_SCHEMA_DEPTH:
            raise SchemaRefused(f"nested deeper than {MAX_SCHEMA_DEPTH}")
        if isinstance(node, list):
            for i, item in enumerate(node):
                self._walk(item, f"{path}/{i}", depth + 1)
        if not isinstance(node, dict):
            return
        self._refuse_keywords(node, path)
        sources = [node["pattern"]] if isinstance(node.get("pattern"), str) else []
        if isinstance(node.get("patternProperties"), dict):
            sources += node["patternProperties"]
        for source in sources:
            try:
                self._patterns[source] = compile_pattern(source)
            except PatternError as e:
                raise SchemaRefused(f"pattern at {path or '/'}: {e}") from None
        for key, value in node.items():
            self._walk(value, f"{path}/{key}", depth + 1)

    @staticmethod
    def _refuse_keywords(node: Mapping[str, Any], path: str) -> None:
        at_property_names = path.endswith(
            ("/properties", "/$defs", "/patternProperties", "/dependentSchemas")
        )
        if at_property_names:
            return
        if refused := _REFUSED & node.keys():
            raise SchemaRefused(f"{min(refused)} at {path or '/'} is not supported")
        if "$id" in node and path:
            raise SchemaRefused(f"$id at {path} is only supported at the root")
        ref = node.get("$ref")
        if isinstance(ref, str) and not (ref == "#" or ref.startswith("#/")):
            raise SchemaRefused(f"$ref at {path or '/'} must stay within the schema (#/…)")

    def _probe(self) -> None:
        """Find references that lead nowhere or in a circle now, rather than on somebody's answer."""
        for probe in _PROBES:
            try:
                self._is_valid(probe)
            except Unresolvable as e:
                raise SchemaRefused(f"$ref leads nowhere: {str(e)[:200]}") from None
            except RecursionError:
                raise SchemaRefused("$ref leads in a circle") from None
            except OutOfTime:
                raise SchemaRefused("takes too long even on tiny values") from None

    def _is_valid(self, value: Any) -> bool:
        _budget.deadline, _budget.patterns = time.monotonic() + MAX_SECONDS, self._patterns
        try:
            return next(self._validator.iter_errors(value), None) is None
        finally:
            _budget.deadline, _budget.patterns = float("inf"), {}

    def check(self, text: str) -> bool:
        """Whether `text` is JSON that fits. OutOfTime and TooMuchWork mean that it could not be judged."""
        try:
            value = json.loads(text, parse_constant=_refuse_constant)
            return self._is_valid(value)
        except (ValueError, RecursionError):  # not JSON, or nested too deep to be anybody's contract
            return False


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


__all__ = ["BoundedSchema", "OutOfTime", "SchemaRefused", "TooMuchWork"]
