"""Samples from a suite or a ConfigMap: read strictly, and refused with the field that is wrong.

Invariant: what ``parse`` returns can be run: patterns and schemas compile, names are unique, and no text of a
ConfigMap, however odd, raises anything but SuiteRefused or costs more than its size.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

import yaml
from pydantic import ValidationError

from ..api.evalsuite import (
    Answer,
    EvalSuite,
    EvalSuiteStatus,
    Expectation,
    Language,
    Sample,
)
from ..plan.conditions import Fact, Problem, merge, truth
from . import patterns, sql
from .schema import Schema, SchemaRefused

MAX_SAMPLES = 500
_MAX_NODES = 200_000
_MAX_DEPTH = 64


class SuiteRefused(ValueError):
    """The samples can't be run; ``problem`` names the field and what to do."""

    def __init__(self, problem: Problem) -> None:
        super().__init__(problem.text())
        self.problem = problem


@dataclass(frozen=True)
class Suite:
    """Samples that can run."""

    name: str
    samples: tuple[Sample, ...]

    @cached_property
    def digest(self) -> str:
        """``sha256:…`` of the samples; their order does not matter, nor do defaults that are written out."""
        plain = [
            sample.model_dump(mode="json", by_alias=True)
            for sample in sorted(self.samples, key=lambda sample: sample.name)
        ]
        text = json.dumps(plain, sort_keys=True, ensure_ascii=False, separators=(",", ":"))
        return "sha256:" + hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()

    @property
    def label(self) -> str:
        """``name@digest``, as status and ledger name it."""
        return f"{self.name}@{self.digest}"

    @property
    def tasks(self) -> list[str]:
        """Tasks covered, sorted."""
        return sorted({sample.task for sample in self.samples})


def parse(suite: EvalSuite, data: Mapping[str, str] | None = None) -> Suite:
    """The suite's samples; ``data`` is the ConfigMap's where it names one (None: there is none).

    Raises SuiteRefused.
    """
    name, spec = suite.metadata.name, suite.spec
    if (spec.samples is None) == (spec.samples_from is None):
        raise _refused("InvalidSpec", "spec", "needs exactly one source: give samples or samplesFrom")
    if spec.samples is not None:
        return Suite(name, sound(spec.samples, "spec.samples", ""))
    source = spec.samples_from
    assert source is not None
    if data is None:
        told = f"ConfigMap {source.name!r} does not exist in this namespace; create it or correct the name"
        raise _refused("ConfigMapNotFound", "spec.samplesFrom.name", told)
    if source.key not in data:
        told = f"ConfigMap {source.name!r} has no key {source.key!r}; add it or correct the key"
        raise _refused("ConfigMapNotFound", "spec.samplesFrom.key", told)
    where = f"in ConfigMap {source.name}, key {source.key}: "
    return Suite(name, sound(read(data[source.key], where), "spec.samplesFrom", where))


def read(text: str, where: str = "", field: str = "spec.samplesFrom") -> list[Sample]:
    """Samples from a YAML list. Raises SuiteRefused, whose problem names ``field`` and begins with
    ``where``."""
    try:
        items = yaml.load(text, Loader=StrictLoader)  # noqa: S506 - a safe loader with less
    except (yaml.YAMLError, ValueError, RecursionError) as error:
        mark = getattr(error, "problem_mark", None)
        at = f" at line {mark.line + 1}" if mark else ""
        why = getattr(error, "problem", None) or "it can't be read"
        raise _refused("InvalidSamples", field, f"{where}not YAML{at}: {why}") from None
    if not isinstance(items, list) or not items:
        raise _refused("InvalidSamples", field, f"{where}must be a list of one or more samples")
    if len(items) > MAX_SAMPLES:
        told = f"{where}has {len(items)} samples, more than {MAX_SAMPLES}: make several suites"
        raise _refused("InvalidSamples", field, told)
    _bounded(items, field, where)
    return [_sample(index, item, field, where) for index, item in enumerate(items)]


def status(suite: EvalSuite, found: Suite | Problem, now: str) -> EvalSuiteStatus:
    """The whole status that is true now; ``now`` is RFC 3339. Samples that can't run stall the suite."""
    generation = suite.metadata.generation
    problem = found if isinstance(found, Problem) else None
    if problem is None and isinstance(found, Suite):
        ready = Fact("Ready", "True", "SamplesValid", f"{len(found.samples)} samples can run")
    else:
        assert problem is not None
        ready = Fact("Ready", "False", problem.reason, problem.text())
    stalled = Fact(
        "Stalled",
        truth(problem is not None),
        problem.reason if problem else "NoProblem",
        problem.text() if problem else "nothing to see to",
    )
    facts = [ready, Fact("Reconciling", "False", "AsDesired", "nothing is on its way"), stalled]
    conditions = merge(suite.status.conditions, facts, generation=generation, now=now)
    if isinstance(found, Problem):
        return EvalSuiteStatus(observed_generation=generation, conditions=conditions)
    return EvalSuiteStatus(
        observed_generation=generation,
        num_samples=len(found.samples),
        num_hard=sum(sample.hard for sample in found.samples),
        tasks=found.tasks,
        digest=found.digest,
        conditions=conditions,
    )


def _refused(reason: str, field: str, message: str) -> SuiteRefused:
    return SuiteRefused(Problem(reason, message, field))


def _sample(index: int, item: Any, field: str, where: str) -> Sample:
    try:
        return Sample.model_validate(item)
    except ValidationError as error:
        first = error.errors(include_url=False, include_input=False)[0]
        at = "".join(f"[{part}]" if isinstance(part, int) else f".{part}" for part in first["loc"])
        message = f"{where}[{index}]{at}: {first['msg'][:1].lower()}{first['msg'][1:]}"
        raise _refused("InvalidSamples", field, message) from None


def sound(samples: Sequence[Sample], field: str, where: str) -> tuple[Sample, ...]:
    """``samples`` as they are. Raises SuiteRefused, naming the first that can't be run."""
    seen = set[str]()
    for index, sample in enumerate(samples):
        problems = list(_problems(sample))
        if sample.name in seen:
            problems.insert(0, ("name", f"{sample.name!r} is used twice: rename one"))
        seen.add(sample.name)
        if problems:
            at, told = problems[0]
            if where:
                raise _refused("InvalidSamples", field, f"{where}[{index}].{at} ({sample.name}): {told}")
            raise _refused("InvalidSamples", f"{field}[{index}].{at}", f"({sample.name}) {told}")
    return tuple(samples)


def _problems(sample: Sample) -> Iterator[tuple[str, str]]:
    """What the schema of the resource can't say, as field and words."""
    expect = sample.expect
    if expect == Expectation():
        yield "expect", "expects nothing, so any answer would pass: say what a right answer looks like"
    yield from _pattern_problems(expect)
    yield from _tool_problems(sample)
    for at, schema in (
        ("expect.jsonSchema", expect.json_schema),
        ("expect.toolCall.arguments", expect.tool_call.arguments if expect.tool_call else None),
    ):
        if schema is not None:
            try:
                Schema(schema)
            except SchemaRefused as error:
                yield at, f"the schema {error}"
    if expect.sql is not None and not sql.known_dialect(expect.sql.dialect):
        yield "expect.sql.dialect", f"{expect.sql.dialect!r} is not known: use one such as postgres or mysql"
    if expect.code is not None and expect.code.defines and expect.code.language is not Language.PYTHON:
        yield "expect.code.defines", "only Python defines names: remove it, or set language: Python"
    if expect.citations is not None and expect.citations.min_citations > len(expect.citations.sources):
        yield "expect.citations.minCitations", "is more than there are sources"
    if expect.max_seconds is not None and float(expect.max_seconds) <= 0:
        yield "expect.maxSeconds", "must be more than 0"


def _pattern_problems(expect: Expectation) -> Iterator[tuple[str, str]]:
    given = (("mustMatch", expect.must_match), ("mustNotMatch", expect.must_not_match))
    for at, sources in given:
        for index, source in enumerate(sources):
            try:
                patterns.accept(source)
            except patterns.PatternRefused as error:
                yield f"expect.{at}[{index}]", f"{source!r} {error}"


def _tool_problems(sample: Sample) -> Iterator[tuple[str, str]]:
    offered = list[str]()
    for index, tool in enumerate(sample.tools):
        function = tool.get("function")
        name = function.get("name") if isinstance(function, dict) else None
        if tool.get("type") != "function" or not isinstance(name, str):
            yield f"tools[{index}]", "must be {type: function, function: {name: …}}"
        else:
            offered.append(name)
    wanted = sample.expect.tool_call
    if wanted is None:
        return
    if wanted.name not in offered:
        yield "expect.toolCall.name", f"{wanted.name!r} is not among the tools that the sample offers"
    if sample.expect.answer is Answer.REFUSAL:
        yield "expect.toolCall", "contradicts answer: Refusal, since a call is no refusal: remove one"


def _bounded(items: Any, field: str, where: str) -> None:
    """References in YAML can make a small text a huge tree, or one without end. Only JSON values pass."""
    num_nodes, level = 0, [items]
    for _ in range(_MAX_DEPTH):
        below: list[Any] = []
        for node in level:
            if isinstance(node, dict):
                if not all(isinstance(key, str) for key in node):
                    raise _refused("InvalidSamples", field, f"{where}has a key that is not a string")
                below += node.values()
            elif isinstance(node, list):
                below += node
            elif not (node is None or isinstance(node, str | int | bool | float)):
                raise _refused("InvalidSamples", field, f"{where}has a value that JSON does not have")
            elif node in (float("inf"), float("-inf")) or node != node:
                raise _refused("InvalidSamples", field, f"{where}has a number that JSON does not have")
            if num_nodes + len(below) > _MAX_NODES:
                raise _refused("InvalidSamples", field, f"{where}is larger than {_MAX_NODES} values")
        num_nodes, level = num_nodes + len(below), below
        if not level:
            return
    raise _refused("InvalidSamples", field, f"{where}is nested deeper than {_MAX_DEPTH} levels")


class StrictLoader(yaml.CSafeLoader):
    """YAML as JSON has it: no dates, and no key twice (of which the last would win in silence). The parser in
    C bounds nesting by itself; the one in Python takes seconds to find that a text is nested too deep."""

    yaml_implicit_resolvers = {  # noqa: RUF012 - as the base class has it
        first: [(tag, pattern) for tag, pattern in resolvers if tag != "tag:yaml.org,2002:timestamp"]
        for first, resolvers in yaml.SafeLoader.yaml_implicit_resolvers.items()
    }

    def construct_mapping(self, node: yaml.MappingNode, deep: bool = False) -> dict[Any, Any]:
        """As SafeLoader does; a key that stands twice is an error."""
        seen = set[str]()
        for key, _ in node.value:
            if key.value == "<<" or not isinstance(key.value, str):
                continue
            if key.value in seen:
                raise yaml.constructor.ConstructorError(
                    None, None, f"key {key.value!r} stands twice", key.start_mark
                )
            seen.add(key.value)
        return super().construct_mapping(node, deep)
