"""How a stand-in behaves, by arm, tenant and task; exists so that a candidate can be bad in one way only.

Invariant: a script says what a model would do, never what evidence says of it: refusals, loops and broken
schemas are texts, and are judged like any other. Example:
`{"refused_rate": 0.1, "by_task": {"nl2sql": {"by_arm": {"candidate": {"error_rate": 1.0}}}}}`.
"""

from __future__ import annotations

import math
import random
from functools import lru_cache
from typing import Annotated, Any

from pydantic import AfterValidator, BaseModel, ConfigDict, Field, ValidationError

from sluice_runtime.api.errors import bad_request
from sluice_runtime.caller import Arm, Caller
from sluice_runtime.patterns import Pattern, compile_pattern
from sluice_runtime.podconfig import dotted

CHARS_PER_TOKEN = 4
NUM_REPEATS = 40
_EVERY = 4  # each fourth gap between tokens is a stall

Rate = Annotated[float, Field(ge=0, le=1)]
Seconds = Annotated[float, Field(ge=0)]

_compiled = lru_cache(maxsize=1024)(compile_pattern)


def _is_pattern(value: str) -> str:
    _compiled(value)
    return value


class _Strict(BaseModel):
    model_config = ConfigDict(extra="forbid", strict=True, frozen=True, allow_inf_nan=False)


class ScriptedAnswer(_Strict):
    """The answer to prompts in which an RE2 pattern is found. A prompt reads "role: content", a line each."""

    match: Annotated[str, AfterValidator(_is_pattern)]
    text: str

    @property
    def pattern(self) -> Pattern:
        return _compiled(self.match)


class Behaviour(_Strict):
    """Times are median seconds; a request draws its factor exp(sigma·N(0,1))."""

    ttft: Seconds = 0.02
    tpot: Seconds = 0.002
    sigma: Annotated[float, Field(ge=0, le=5)] = 0.0
    jitter: Seconds = 0.0
    busy: Seconds | None = None
    slow_rate: Rate = 0.0
    slow_factor: Annotated[float, Field(ge=1)] = 10.0
    error_rate: Rate = 0.0
    error_after_tokens: Annotated[int, Field(ge=0)] = 0
    truncated_rate: Rate = 0.0
    text: str = "The capital of France is Paris."
    answers: list[ScriptedAnswer] = []
    bad_text: str = "forbidden"
    bad_rate: Rate = 0.0
    refused_text: str = "I'm sorry, but I can't help with that."
    refused_rate: Rate = 0.0
    schema_failure_text: str = "{"
    schema_failure_rate: Rate = 0.0
    repeated_text: str = "and so on "
    repeated_rate: Rate = 0.0
    pair_differ_rate: Rate = 0.0
    by_arm: dict[Arm, Behaviour] = {}
    by_tenant: dict[str, Behaviour] = {}
    by_task: dict[str, Behaviour] = {}

    def _changes(self, caller: Caller) -> dict[str, Any]:
        """The fields that are set for this caller: task wins over tenant, over arm, over all."""
        tables = (
            self.by_arm.get(caller.arm),
            self.by_tenant.get(caller.tenant),
            self.by_task.get(caller.task),
        )
        changes = {name: getattr(self, name) for name in self.model_fields_set & _CHANGEABLE}
        for table in tables:
            if table is not None:
                changes |= table._changes(caller)
        return changes

    def towards(self, caller: Caller | None) -> Behaviour:
        """How to behave towards this caller."""
        if caller is None or not (self.by_arm or self.by_tenant or self.by_task):
            return self
        return Behaviour().model_copy(update=self._changes(caller))


_CHANGEABLE = Behaviour.model_fields.keys() - {"by_arm", "by_tenant", "by_task"}


class Script(Behaviour):
    """What is said of a stand-in as a whole, too."""

    seed: int = 0
    healthy: bool = True

    def body(self) -> dict[str, Any]:
        """Every field, but of what is said by arm, tenant and task only what is set there."""
        return {**self.model_dump(), **self.model_dump(exclude_unset=True)}


class Work:
    """One request's share of a script, drawn when it arrives: later changes are for later requests."""

    def __init__(self, script: Script, draw: random.Random, prompt: str, caller: Caller | None) -> None:
        b = script.towards(caller)
        factor = math.exp(b.sigma * draw.gauss(0, 1)) if b.sigma else 1.0
        if draw.random() < b.slow_rate:
            factor *= b.slow_factor
        self.ttft_s, self.tpot_s, self._jitter_s = b.ttft * factor, b.tpot * factor, b.jitter
        self.busy_s = None if b.busy is None else b.busy * factor
        self.fails_after = b.error_after_tokens if draw.random() < b.error_rate else None
        text = _text(b, draw, prompt)
        is_cut, differs = draw.random() < b.truncated_rate, draw.random() < b.pair_differ_rate
        if differs and caller is not None and caller.pair:
            text = f"{text} {draw.getrandbits(64):x}"
        self.pieces = [text[i : i + CHARS_PER_TOKEN] for i in range(0, len(text), CHARS_PER_TOKEN)] or [""]
        self.cut_after = max(1, len(self.pieces) // 2) if is_cut else None

    def gap_s(self, i: int) -> float:
        """Seconds before piece `i`."""
        if i == 0:
            return self.ttft_s
        return self.tpot_s + (self._jitter_s if i % _EVERY == 2 else 0.0)


def _text(b: Behaviour, draw: random.Random, prompt: str) -> str:
    text = b.text
    if b.answers:
        data = prompt.encode("utf-8", "replace")
        text = next((answer.text for answer in b.answers if answer.pattern.search(data)), text)
    for other, rate in (
        (b.bad_text, b.bad_rate),
        (b.refused_text, b.refused_rate),
        (b.schema_failure_text, b.schema_failure_rate),
        (b.repeated_text * NUM_REPEATS, b.repeated_rate),
    ):
        if draw.random() < rate:
            text = other
    return text


def parse_script(raw: Any, base: Script) -> Script:
    """`base` with the fields of `raw` changed; ApiError names a wrong one."""
    if not isinstance(raw, dict):
        raise bad_request("A script is a JSON object.")
    try:
        return Script.model_validate({**base.model_dump(exclude_unset=True), **raw})
    except ValidationError as e:
        first = e.errors(include_url=False, include_input=False)[0]
        at = dotted(first["loc"])
        raise bad_request(f"Invalid value for '{at}': {first['msg']}.", at) from None
