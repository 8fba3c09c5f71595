"""Judges a model's answer against its rule's contract; exists because the pod alone sees the text, and only

verdicts leave it.

Invariant: what a stop in the middle (length cap, client gone, engine error) may have caused is never a
*hard* violation; a forbidden pattern that stands in the text is one whatever happened after it.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal

from sluice_runtime.patterns import Pattern, PatternError, TooMuchWork, compile_pattern
from sluice_runtime.schema_check import BoundedSchema, OutOfTime, SchemaRefused

if TYPE_CHECKING:
    from sluice_runtime.podconfig import CheckSpec, VerifierSpec

Kind = Literal["JsonSchema", "MustMatch", "MustNotMatch", "Verifier"]

RESPONSE_FORMAT = "response_format"
"""The check of the form that a request itself asks for; never a hard one."""
MAX_TEXT_BYTES = 256 * 1024
_INLINE_BYTES = 16 * 1024  # more than this is judged off the event loop
_FULL_SCAN_GROWTH = 8  # a growing text is scanned as a whole again each time it has grown by one eighth


class ContractError(ValueError):
    """A contract that can't be compiled. `field` is the path within the PodConfig."""

    def __init__(self, field: str, message: str) -> None:
        super().__init__(message)
        self.field = field


@dataclass(frozen=True)
class Verdict:
    """One check's judgement. `hard` only where a violation is certain to be the model's. `reasons` are names
    that a verifier gave, or one of ours, with a "/", that says why there is none."""

    check: str
    kind: Kind
    ok: bool
    hard: bool
    reasons: tuple[str, ...] = ()

    def body(self) -> dict[str, str | bool | list[str]]:
        told: dict[str, str | bool | list[str]] = {
            "check": self.check,
            "kind": self.kind,
            "ok": self.ok,
            "hard": self.hard,
        }
        return told | {"reasons": list(self.reasons)} if self.reasons else told


@dataclass(frozen=True)
class Finding:
    """What a verifier says of an answer. `passed` None: it gave no verdict, and `reasons` says why."""

    passed: bool | None
    reasons: tuple[str, ...] = ()

    @property
    def result(self) -> str:
        """For metrics: `passed`, `failed`, or why there is no verdict."""
        if self.passed is None:
            return self.reasons[0].partition("/")[2]
        return "passed" if self.passed else "failed"


@dataclass(frozen=True)
class Judgement:
    """All verdicts on one answer. `withhold` names the hard checks that it broke, or that could not be
    judged; `failed` names these and the hard ones that it may have failed only because it was cut off.
    """

    verdicts: tuple[Verdict, ...] = ()
    withhold: tuple[str, ...] = ()
    failed: tuple[str, ...] = ()

    @property
    def unverified(self) -> bool:
        """Whether nothing but verifiers without a verdict withholds it."""
        silent = {v.check for v in self.verdicts if v.kind == "Verifier" and not (v.ok or v.hard)}
        return bool(self.withhold) and silent.issuperset(self.withhold)


@dataclass(frozen=True)
class _Check:
    name: str
    kind: Kind
    hard: bool
    schema: BoundedSchema | None = None
    must_match: Pattern | None = None
    must_not_match: Pattern | None = None
    verifier: VerifierSpec | None = None


class Contract:
    """A compiled list of checks; shared by all requests of a configuration, hence without state."""

    def __init__(self, specs: Sequence[CheckSpec]) -> None:
        """Raises ContractError, which names the field."""
        compiled = tuple(_compile(i, spec) for i, spec in enumerate(specs))
        self.checks = tuple(c for c in compiled if c.verifier is None)
        self.verifiers = {c.name: c.verifier for c in compiled if c.verifier is not None}
        self._hard = frozenset(c.name for c in compiled if c.hard)
        names = [check.name for check in compiled]
        for i, name in enumerate(names):
            if name in names[:i]:
                raise ContractError(f"contract[{i}].name", f"another check is named {name!r} already")
        self.forbidden = tuple(c for c in self.checks if c.must_not_match is not None)
        self.has_schema = any(c.schema is not None for c in self.checks)

    def judge(self, text: str, truncated: bool, violated: frozenset[str] = frozenset()) -> Judgement:
        """Judge an answer that ended by itself, or was cut by its length cap (`truncated`).

        `violated` names the checks that a `StreamJudge` saw broken on the way.
        """
        data = text.encode("utf-8", "replace")
        verdicts: list[Verdict] = []
        withhold: list[str] = []
        failed: list[str] = []
        for check in self.checks:
            verdict, certain = _judge(check, text, data, truncated, check.name in violated)
            verdicts.append(verdict)
            if check.hard and (not certain or (verdict.hard and not verdict.ok)):
                withhold.append(check.name)
            if check.hard and not verdict.ok:
                failed.append(check.name)
        return Judgement(tuple(verdicts), tuple(withhold), tuple(failed))

    def with_findings(
        self, judgement: Judgement, findings: Mapping[str, Finding], truncated: bool
    ) -> Judgement:
        """The judgement with what verifiers found, by the names of their checks."""
        verdicts, withhold, failed = [*judgement.verdicts], [*judgement.withhold], [*judgement.failed]
        for name, finding in findings.items():
            is_hard, ok, silent = name in self._hard, finding.passed is True, finding.passed is None
            # Of an answer that was cut off a verifier may miss what was still to come.
            hard = is_hard and not silent and (ok or not truncated)
            verdicts.append(Verdict(name, "Verifier", ok, hard, finding.reasons))
            if is_hard and not ok:
                failed.append(name)
                if hard or silent:
                    withhold.append(name)
        return Judgement(tuple(verdicts), tuple(withhold), tuple(failed))

    @property
    def can_fail(self) -> bool:
        """Whether it has a hard check: to pass it means something."""
        return bool(self._hard)

    def is_heavy(self, num_chars: int) -> bool:
        """Whether judging so much text belongs into a thread."""
        return self.has_schema or num_chars > _INLINE_BYTES


_NEEDS: Mapping[Kind, str] = {
    "JsonSchema": "schema",
    "MustMatch": "pattern",
    "MustNotMatch": "pattern",
    "Verifier": "verifier",
}


def _compile(i: int, spec: CheckSpec) -> _Check:
    at = f"contract[{i}]"
    needed = _NEEDS[spec.kind]
    for field, value in (("schema", spec.schema_), ("pattern", spec.pattern), ("verifier", spec.verifier)):
        if (value is None) and field == needed:
            raise ContractError(f"{at}.{field}", f"is required for kind {spec.kind}")
        if (value is not None) and field != needed:
            raise ContractError(f"{at}.{field}", f"means nothing for kind {spec.kind}")
    if spec.verifier is not None:
        return _Check(spec.name, spec.kind, spec.hard, verifier=spec.verifier)
    if spec.schema_ is not None:
        try:
            return _Check(spec.name, spec.kind, spec.hard, schema=BoundedSchema(spec.schema_))
        except SchemaRefused as e:
            raise ContractError(f"{at}.schema", str(e)) from None
    assert spec.pattern is not None
    try:
        pattern = compile_pattern(spec.pattern)
    except PatternError as e:
        raise ContractError(f"{at}.pattern", str(e)) from None
    if spec.kind == "MustMatch":
        return _Check(spec.name, spec.kind, spec.hard, must_match=pattern)
    return _Check(spec.name, spec.kind, spec.hard, must_not_match=pattern)


def _judge(check: _Check, text: str, data: bytes, truncated: bool, violated: bool) -> tuple[Verdict, bool]:
    """The verdict, and whether it could be reached within bounds."""
    if violated:
        return Verdict(check.name, check.kind, False, check.hard), True
    try:
        if len(data) > MAX_TEXT_BYTES:
            raise TooMuchWork
        if check.must_not_match is not None:
            # Cut text can end where a `$` then matches; that would be the cap's doing.
            search = check.must_not_match.search_growing if truncated else check.must_not_match.search
            return Verdict(check.name, check.kind, not search(data), check.hard), True
        if check.schema is not None:
            ok = check.schema.check(text)
        else:
            assert check.must_match is not None
            ok = check.must_match.search(data)
    except (TooMuchWork, OutOfTime):
        return Verdict(check.name, check.kind, False, False), False
    return Verdict(check.name, check.kind, ok, check.hard and (ok or not truncated)), True


class StreamJudge:
    """Watches one answer while it grows, for forbidden patterns. Not thread-safe.

    Each call looks at the new text and a window before it; the whole text is scanned each time it has grown
    by an eighth, so all calls together do a constant multiple of one scan of the final text. What needs more
    context than the window is found at the next whole scan, at the latest by `Contract.judge`.
    """

    def __init__(self, contract: Contract) -> None:
        self._forbidden = contract.forbidden
        self._data = bytearray()
        self._scanned = 0
        self.seen: tuple[Verdict, ...] = ()

    @property
    def violated(self) -> frozenset[str]:
        return frozenset(verdict.check for verdict in self.seen)

    def feed(self, text: str) -> list[Verdict]:
        """The violations that this text brings, each check once."""
        if not self._forbidden or not text or len(self._data) > MAX_TEXT_BYTES:
            return []
        start = len(self._data)
        self._data += text.encode("utf-8", "replace")
        whole = len(self._data) < _INLINE_BYTES // 4 or len(self._data) >= self._scanned * (
            1 + 1 / _FULL_SCAN_GROWTH
        )
        data = bytes(self._data)
        if whole:
            self._scanned = len(data)
        found = []
        violated = self.violated
        for check in self._forbidden:
            pattern = check.must_not_match
            assert pattern is not None
            if check.name in violated or not self._seen(pattern, data, 0 if whole else start):
                continue
            found.append(Verdict(check.name, check.kind, False, check.hard))
        self.seen += tuple(found)
        return found

    @staticmethod
    def _seen(pattern: Pattern, data: bytes, start: int) -> bool:
        begin = max(0, start - pattern.window) if start else 0
        if begin == 0 and pattern.program_size * len(data) > 4_000_000:
            begin = max(
                0, len(data) - pattern.window
            )  # too slow for the event loop: left to `Contract.judge`
        return pattern.search_growing(data, begin)
