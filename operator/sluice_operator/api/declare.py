"""What a model tells the API server beyond types: CEL rules, list semantics, columns.

Rules stand beside the types they speak of, so that a field can't be renamed without its rule.
Invariant: a rule's message begins with the field that is wrong and ends with what to do about it,
because it is all that the person at kubectl sees.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

from pydantic import ConfigDict
from pydantic.config import JsonDict

VALIDATIONS = "x-kubernetes-validations"
INT_OR_STRING: JsonDict = {"x-kubernetes-int-or-string": True}
FREE_FORM: JsonDict = {"x-kubernetes-preserve-unknown-fields": True}
SET: JsonDict = {"x-kubernetes-list-type": "set"}
"""Only for lists without a default: server-side apply merges sets, and nobody owns what a default put in."""

Reason = Literal["FieldValueInvalid", "FieldValueForbidden", "FieldValueRequired", "FieldValueDuplicate"]


@dataclass(frozen=True)
class Cel:
    """One CEL rule; `path` (such as `.model`) is the field that the API server's error names."""

    rule: str
    message: str
    path: str = ""
    reason: Reason = "FieldValueInvalid"

    def to_json(self) -> JsonDict:
        """The entry in `x-kubernetes-validations`."""
        entry: JsonDict = {"rule": self.rule, "message": self.message, "reason": self.reason}
        return entry | {"fieldPath": self.path} if self.path else entry


def validations(*rules: Cel) -> JsonDict:
    """`json_schema_extra` for a field that must obey `rules`."""
    return {VALIDATIONS: [rule.to_json() for rule in rules]}


def obeys(*rules: Cel) -> ConfigDict:
    """`model_config` for a model that must obey `rules`; pydantic merges it with the base's."""
    return ConfigDict(json_schema_extra=validations(*rules))


def keyed_by(*keys: str) -> JsonDict:
    """`json_schema_extra` for a list whose items are told apart by `keys`: duplicates are refused."""
    return {"x-kubernetes-list-type": "map", "x-kubernetes-list-map-keys": list(keys)}


def exactly_one(*fields: str) -> str:
    """CEL: exactly one of the optional `fields` is present."""
    return f"[{', '.join(f'has(self.{field})' for field in fields)}].exists_one(x, x)"


def unchanged(field: str, *, optional: bool, advice: str) -> Cel:
    """Rule for the parent of `field`: an optional field may neither appear nor vanish."""
    same = f"self.{field} == oldSelf.{field}"
    if optional:
        same = f"has(self.{field}) == has(oldSelf.{field}) && (!has(self.{field}) || {same})"
    return Cel(same, f"{field} is immutable: {advice}", f".{field}", "FieldValueForbidden")


@dataclass(frozen=True)
class Column:
    """A column of `kubectl get`; priority 1 shows with `-o wide` only."""

    name: str
    path: str
    description: str
    type: Literal["string", "integer", "date"] = "string"
    priority: int = 0


def condition(kind: str, part: Literal["status", "reason", "message"]) -> str:
    """JSONPath of a part of a condition."""
    return f'.status.conditions[?(@.type=="{kind}")].{part}'


READY = Column("Ready", condition("Ready", "status"), "Whether it does now what its spec says.")
REASON = Column("Reason", condition("Ready", "reason"), "Why it is or is not ready.")
MESSAGE = Column("Message", condition("Ready", "message"), "What happened and what to do next.", priority=1)
AGE = Column("Age", ".metadata.creationTimestamp", "Time since creation.", "date")


@dataclass(frozen=True)
class Kind:
    """Names and views of a custom resource."""

    plural: str
    short_names: tuple[str, ...]
    columns: tuple[Column, ...]
    scale: Mapping[str, str] | None = None
