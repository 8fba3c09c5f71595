"""Conditions as kstatus reads them.

Invariant: ``lastTransitionTime`` changes when, and only when, ``status`` changes, so that an unchanged
world yields an unchanged status and nothing is written.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from typing import Literal

from ..api.common import Condition

Truth = Literal["True", "False", "Unknown"]


@dataclass(frozen=True)
class Problem:
    """Something a person must change. ``message`` names the field and the next step."""

    reason: str
    message: str
    field: str = ""

    def text(self) -> str:
        return f"{self.field}: {self.message}" if self.field else self.message


@dataclass(frozen=True)
class Fact:
    """A condition without its bookkeeping."""

    type: str
    status: Truth
    reason: str
    message: str


def truth(value: bool) -> Truth:
    return "True" if value else "False"


def merge(old: Sequence[Condition], facts: Iterable[Fact], *, generation: int, now: str) -> list[Condition]:
    """Conditions for ``facts``; what is not named any more is gone."""
    before = {c.type: c for c in old}
    merged = []
    for fact in facts:
        known = before.get(fact.type)
        since = known.last_transition_time if known and known.status == fact.status else now
        merged.append(
            Condition(
                type=fact.type,
                status=fact.status,
                reason=fact.reason,
                message=fact.message[:1024],
                last_transition_time=since,
                observed_generation=generation,
            )
        )
    return merged


def find(conditions: Iterable[Condition], kind: str) -> Condition | None:
    return next((c for c in conditions if c.type == kind), None)
