"""Checks one answer against what its sample expects.

Pure: an HTTP checker of the user's is asked by whoever calls, and its outcome handed in. Invariant: every
expectation that does not hold is a Failure that names it and says why, without words of the answer; what
can't be checked has failed.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import replace

from ..api.evalsuite import Answer, HttpChecker, Sample, ToolCall
from . import citing, figures, patterns, source, sql
from .excerpt import unfenced
from .refusals import is_refusal
from .reply import Call, Failure, Outcome, Reply
from .schema import Schema, SchemaRefused

MAX_TEXT_BYTES = 256 * 1024
"""Longer answers are looked at by no checker, and so have failed."""

AskHttp = Callable[[HttpChecker, Sample, Reply], Outcome]


def check(sample: Sample, answer: Reply, http: AskHttp | None = None) -> list[Failure]:
    """All expectations of ``sample`` that ``answer`` does not meet, in the order of the fields.

    An answer that never came, or was cut off, is one failure and nothing else of it is looked at.
    """
    if answer.error:
        return [Failure("request", answer.error)]
    if answer.finish_reason == "length":
        told = f"was cut off at {sample.max_tokens} tokens: raise maxTokens if a right answer needs more"
        return [Failure("maxTokens", told)]
    data = answer.text.encode("utf-8", "replace")
    if len(data) + sum(len(call.arguments) for call in answer.tool_calls) > MAX_TEXT_BYTES:
        return [Failure("request", f"is longer than {MAX_TEXT_BYTES} bytes")]
    whole = replace(answer, text=data.decode())
    return [failure for find in _CHECKERS for failure in find(sample, whole)] + _http(sample, whole, http)


def _answer(sample: Sample, answer: Reply) -> Iterator[Failure]:
    wanted = sample.expect.answer
    if wanted is Answer.ANY:
        return
    refuses = answer.refused or (not answer.tool_calls and is_refusal(answer.text))
    if wanted is Answer.REFUSAL and not refuses:
        yield Failure("answer", "does not refuse, and must")
    if wanted is Answer.ANSWER and refuses:
        yield Failure("answer", "refuses, and should answer")
    if wanted is Answer.ANSWER and not answer.text.strip() and not answer.tool_calls:
        yield Failure("answer", "is empty")


def _json_schema(sample: Sample, answer: Reply) -> Iterator[Failure]:
    schema = sample.expect.json_schema
    if schema is not None and (told := _schema_failure(schema, unfenced(answer.text))):
        yield Failure("jsonSchema", told)


def _schema_failure(schema: dict[str, object], text: str) -> str:
    try:
        return Schema(schema).failure(text)
    except SchemaRefused as error:
        return f"can't be checked, since the schema {error}"


def _patterns(sample: Sample, answer: Reply) -> Iterator[Failure]:
    for index, pattern in enumerate(sample.expect.must_match):
        if not _found(pattern, answer.text, otherwise=False):
            yield Failure(f"mustMatch[{index}]", f"has no match of {_shown(pattern)}")
    for index, pattern in enumerate(sample.expect.must_not_match):
        if _found(pattern, answer.text, otherwise=True):
            yield Failure(f"mustNotMatch[{index}]", f"has a match of {_shown(pattern)}")


def _shown(pattern: str) -> str:
    return f"`{pattern}`" if pattern.isprintable() else repr(pattern)


def _found(pattern: str, text: str, *, otherwise: bool) -> bool:
    try:
        return patterns.found(pattern, text)
    except (patterns.PatternRefused, patterns.TooMuchWork):
        return otherwise


def _tool_call(sample: Sample, answer: Reply) -> Iterator[Failure]:
    wanted = sample.expect.tool_call
    if wanted is None:
        return
    calls = [call for call in answer.tool_calls if call.name == wanted.name]
    if not calls:
        yield Failure("toolCall", f"does not call {wanted.name}")
        return
    told = [_arguments_failure(wanted, call) for call in calls[:16]]
    if all(told):
        yield Failure("toolCall.arguments", f"calls {wanted.name} with arguments that {told[0]}")


def _arguments_failure(wanted: ToolCall, call: Call) -> str:
    told = _schema_failure(wanted.arguments if wanted.arguments is not None else {}, call.arguments or "{}")
    return told.replace("is not JSON", "are not JSON").replace("breaks ", "break ")


def _sql(sample: Sample, answer: Reply) -> Iterator[Failure]:
    if sample.expect.sql is not None:
        yield from (Failure("sql", told) for told in sql.failures(answer.text, sample.expect.sql))


def _code(sample: Sample, answer: Reply) -> Iterator[Failure]:
    if sample.expect.code is not None:
        yield from (Failure("code", told) for told in source.failures(answer.text, sample.expect.code))


def _numbers(sample: Sample, answer: Reply) -> Iterator[Failure]:
    wanted = sample.expect.numbers
    for number in figures.missing(answer.text, wanted) if wanted else ():
        near = f" within {number.tolerance_percent} %" if number.tolerance_percent else ""
        yield Failure("numbers", f"does not state {number.value}{near}")


def _citations(sample: Sample, answer: Reply) -> Iterator[Failure]:
    wanted = sample.expect.citations
    if wanted is not None:
        yield from (Failure("citations", told) for told in citing.failures(answer.text, wanted))


def _latency(sample: Sample, answer: Reply) -> Iterator[Failure]:
    limit = sample.expect.max_seconds
    if limit is not None and not answer.seconds <= float(limit):
        yield Failure("maxSeconds", f"took {answer.seconds:.2f} s, more than {limit} s")


def _http(sample: Sample, answer: Reply, http: AskHttp | None) -> list[Failure]:
    checker = sample.expect.http
    if checker is None:
        return []
    if http is None:
        return [Failure("http", f"checker {checker.name} can't be asked from here")]
    outcome = http(checker, sample, answer)
    return [] if outcome.ok else [Failure("http", outcome.why, outcome.detail)]


_CHECKERS: tuple[Callable[[Sample, Reply], Iterator[Failure]], ...] = (
    _answer,
    _json_schema,
    _patterns,
    _tool_call,
    _sql,
    _code,
    _numbers,
    _citations,
    _latency,
)
