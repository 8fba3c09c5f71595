"""JSON Schema over model output within bounded time and size; exists because a schema is written by people

and met by models.

Invariant: `check` returns or raises within about `MAX_SECONDS`, whatever schema was accepted and whatever
the text is: patterns run on RE2, nothing is fetched, and each keyword that is evaluated looks at the clock.
"""

from __future__ import annotations

import contextlib
import json
import re
import threading
import time
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any

import referencing
from jsonschema import Draft7Validator, Draft201909Validator, Draft202012Validator
from jsonschema.exceptions import ValidationError
from jsonschema.validators import extend

from sluice_runtime.patterns import Pattern, PatternError, TooMuchWork, compile_pattern
from sluice_runtime.schema_shape import Malformed, parts

MAX_SCHEMA_BYTES = 64 * 1024
MAX_SCHEMA_DEPTH = 64
MAX_SECONDS = 1.0
"""Of the thread's own time: that others keep it waiting says nothing of schema or value."""
MAX_PROBE_STEPS = 50_000
"""Keywords evaluated, for all probes together: twice what a union of a thousand objects takes."""
_DRAFT = "json-schema.org/draft/2020-12/schema"
_REFUSED = {
    "$anchor",
    "$dynamicAnchor",
    "$dynamicRef",
    "$recursiveAnchor",
    "$recursiveRef",
    "unevaluatedItems",
    "unevaluatedProperties",
}
_ESCAPE = re.compile(r"\\(?:u([0-9A-Fa-f]{4})|.)", re.DOTALL)
_PROBES: tuple[Any, ...] = (None, 0, "", [], {}, [0], {"a": 0})


class SchemaRefused(ValueError):
    """A schema that is not valid, not self-contained or not bounded."""


class OutOfTime(Exception):
    """Validation took longer than `MAX_SECONDS`, or, of a probe, `MAX_PROBE_STEPS`."""


class _Budget(threading.local):
    deadline = num_steps = float("inf")
    patterns: Mapping[str, Pattern] = {}


_budget = _Budget()
_Keyword = Callable[[Any, Any, Any, Mapping[str, Any]], Iterable[ValidationError] | None]


def _timed(keyword: _Keyword) -> _Keyword:
    def run(
        validator: Any, value: Any, instance: Any, schema: Mapping[str, Any]
    ) -> Iterator[ValidationError]:
        _budget.num_steps -= 1
        if _budget.num_steps < 0 or time.thread_time() > _budget.deadline:
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


def _bounded(draft: Any) -> Any:
    keywords = {**draft.VALIDATORS, **_OWN}
    timed = {name: _timed(keyword) for name, keyword in keywords.items()}
    return extend(draft, timed)  # type: ignore[no-untyped-call]


_DRAFTS = {
    _DRAFT: _bounded(Draft202012Validator),
    "json-schema.org/draft/2019-09/schema": _bounded(Draft201909Validator),
    "json-schema.org/draft-07/schema": _bounded(Draft7Validator),
}


def _dialect(schema: Mapping[str, Any]) -> str:
    """Which draft `schema` says that it is of, as a key of `_DRAFTS`; people write it with http and https."""
    return str(schema.get("$schema", f"https://{_DRAFT}")).rstrip("#").partition("://")[2]


def _refuse_deep(schema: Any) -> None:
    """Level by level: what is nested without end would exhaust whatever recurses into it."""
    level = [schema]
    for _ in range(MAX_SCHEMA_DEPTH + 1):
        groups = [n.values() if isinstance(n, dict) else n for n in level if isinstance(n, dict | list)]
        level = [child for group in groups for child in group]
        if not level:
            return
    raise SchemaRefused(f"nested deeper than {MAX_SCHEMA_DEPTH}")


def _as_re2(pattern: str) -> str:
    r"""JavaScript's way to write a character by its number, \uXXXX, which RE2 has not, as RE2 writes it."""
    return _ESCAPE.sub(lambda m: f"\\x{{{m[1]}}}" if m[1] else m[0], pattern)


class BoundedSchema:
    """A schema that was accepted. `check` may be called from any thread."""

    def __init__(self, schema: Mapping[str, Any]) -> None:
        """Raises SchemaRefused."""
        if len(json.dumps(schema)) > MAX_SCHEMA_BYTES:
            raise SchemaRefused(f"larger than {MAX_SCHEMA_BYTES} bytes")
        _refuse_deep(schema)
        dialect = _dialect(schema)
        if dialect not in _DRAFTS:
            raise SchemaRefused(f"$schema must be https://{_DRAFT}, draft 2019-09, draft-07 or absent")
        self._patterns: dict[str, Pattern] = {}
        try:
            for at, part in parts(schema, item_lists=dialect != _DRAFT):
                self._take(part, at)
        except Malformed as e:
            raise SchemaRefused(f"not a valid schema at {e.at[1:] or 'its root'}: {e}") from None
        self._validator = _DRAFTS[dialect](schema, registry=referencing.Registry())
        self._probe()

    def _take(self, part: Mapping[str, Any], at: str) -> None:
        """Refuse what can't be bounded, and compile patterns."""
        if refused := _REFUSED & part.keys():
            raise SchemaRefused(f"{min(refused)} at {at or '/'} is not supported")
        if at and (rooted := {"$id", "$schema"} & part.keys()):
            raise SchemaRefused(f"{min(rooted)} at {at} is only supported at the root")
        if not part.get("$ref", "#").startswith("#"):
            raise SchemaRefused(f"$ref at {at or '/'} must stay within the schema (#/…)")
        sources = [*part.get("patternProperties", ())]
        if "pattern" in part:
            sources.append(part["pattern"])
        for source in sources:
            try:
                self._patterns[source] = compile_pattern(_as_re2(source))
            except PatternError as e:
                raise SchemaRefused(f"pattern at {at or '/'}: {e}") from None

    def _probe(self) -> None:
        """Find references that lead in a circle, and what takes too long whatever the value, now rather than
        on somebody's answer."""
        _budget.num_steps = MAX_PROBE_STEPS
        try:
            with self._allowed():
                for probe in _PROBES:
                    next(self._validator.iter_errors(probe), None)
        except RecursionError:
            raise SchemaRefused("$ref leads in a circle") from None
        except OutOfTime:
            raise SchemaRefused("takes too long even on tiny values") from None
        finally:
            _budget.num_steps = float("inf")

    @contextlib.contextmanager
    def _allowed(self) -> Iterator[None]:
        """The time and the patterns that the validator has in this thread meanwhile."""
        _budget.deadline, _budget.patterns = time.thread_time() + MAX_SECONDS, self._patterns
        try:
            yield
        finally:
            _budget.deadline, _budget.patterns = float("inf"), {}

    def check(self, text: str) -> bool:
        """Whether `text` is JSON that fits. OutOfTime and TooMuchWork mean that it could not be judged."""
        try:
            value = json.loads(text, parse_constant=_refuse_constant)
            with self._allowed():
                return next(self._validator.iter_errors(value), None) is None
        except (ValueError, RecursionError, OverflowError):
            return False  # not JSON, or nested deeper, or a larger number, than anybody's contract means


def _refuse_constant(name: str) -> Any:
    raise ValueError(f"{name} is not JSON")


__all__ = ["BoundedSchema", "OutOfTime", "SchemaRefused", "TooMuchWork"]
