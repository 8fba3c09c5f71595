"""What all resources share: the base model, names, quantities and conditions.

The pydantic models in this package are the one source of truth for the resources; ``crds/`` is
generated from them (``make crds``) and a test fails when the two differ. No floats in a spec:
ratios are integers in percent, shares of α are decimal strings (Kubernetes API conventions).
"""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, Any, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field
from pydantic.alias_generators import to_camel

from .declare import INT_OR_STRING, Cel, validations

GROUP = "sluice.dev"
VERSION = "v1alpha1"
API_VERSION = f"{GROUP}/{VERSION}"
FIELD_MANAGER = "sluice"
FINALIZER = f"{GROUP}/drain"

MAX_SAFE_INTEGER = 9_007_199_254_740_991
"""Largest integer that every JSON reader holds exactly."""


def _from_integer(value: Any) -> Any:
    """`cpu: 2` in YAML is an integer."""
    return str(value) if isinstance(value, int) and not isinstance(value, bool) else value


def _is_re2() -> Cel:
    """CEL's `matches` is RE2: what can't be compiled makes the rule fail, whatever the answer would be."""
    return Cel("''.matches(self) in [true, false]", "must be a regular expression in RE2 syntax")


DnsLabel = Annotated[str, Field(min_length=1, max_length=63, pattern=r"^[a-z0-9]([-a-z0-9]*[a-z0-9])?$")]
Cpu = Annotated[
    str,
    Field(max_length=32, pattern=r"^[0-9]+(\.[0-9]+)?m?$", json_schema_extra=INT_OR_STRING),
    BeforeValidator(_from_integer),
]
Quantity = Annotated[
    str,
    Field(
        max_length=32,
        pattern=r"^[0-9]+(\.[0-9]+)?(k|M|G|T|P|Ki|Mi|Gi|Ti|Pi)?$",
        json_schema_extra=INT_OR_STRING,
    ),
    BeforeValidator(_from_integer),
]
Decimal = Annotated[str, Field(max_length=16, pattern=r"^[0-9]+(\.[0-9]+)?$")]
Regex = Annotated[str, Field(min_length=1, max_length=512, json_schema_extra=validations(_is_re2()))]
Percent = Annotated[int, Field(ge=0, le=100)]
Count = Annotated[int, Field(ge=0)]


class Spec(BaseModel):
    """Base of all of a spec or a status: camelCase on the wire, unknown fields refused, frozen in Python."""

    model_config = ConfigDict(
        alias_generator=to_camel,
        populate_by_name=True,
        extra="forbid",
        frozen=True,
        use_attribute_docstrings=True,
    )


class DataClass(StrEnum):
    """How sensitive a request's content is, ascending; a request that claims none counts as Restricted."""

    PUBLIC = "Public"
    INTERNAL = "Internal"
    CONFIDENTIAL = "Confidential"
    RESTRICTED = "Restricted"


class Risk(StrEnum):
    """What a wrong answer costs, in ascending order; a request that claims none counts as High."""

    LOW = "Low"
    MEDIUM = "Medium"
    HIGH = "High"


def named(max_length: int = 63) -> Cel:
    """Rule for a root object: its name stands in labels, in references and in names of Services."""
    return Cel(
        f"self.metadata.name.size() <= {max_length}"
        " && self.metadata.name.matches('^[a-z]([-a-z0-9]*[a-z0-9])?$')",
        "metadata.name must begin with a letter and hold only a-z, 0-9 and '-',"
        f" {max_length} characters at most: rename it",
    )


class TokenCaps(Spec):
    """Bounds of a request, in tokens; one beyond them gets 400 with the counts."""

    max_input_tokens: int | None = Field(default=None, ge=1, le=1_048_576)
    """Longest prompt; absent: what the context leaves."""
    max_output_tokens: int | None = Field(default=None, ge=1, le=1_048_576)
    """Longest answer that may be asked for; absent: what the context leaves."""


class SecretKeyRef(Spec):
    """A key of a Secret in the same namespace."""

    name: DnsLabel
    """Name of the Secret."""
    key: str = Field(default="key", min_length=1, max_length=253)
    """Key inside the Secret."""


class BundleRef(Spec):
    """A key of an object in the same namespace that holds certificates."""

    name: str = Field(min_length=1, max_length=253, pattern=r"^[a-z0-9]([-a-z0-9.]*[a-z0-9])?$")
    """Name of the object, such as kube-root-ca.crt."""
    key: str = Field(default="ca.crt", min_length=1, max_length=253)
    """Key inside it."""


class Condition(Spec):
    """metav1.Condition."""

    type: str = Field(max_length=316)
    """Kind of the condition, such as Ready, Reconciling or Stalled."""
    status: Literal["True", "False", "Unknown"]
    """Whether it holds."""
    reason: str
    """Machine-readable cause, CamelCase."""
    message: str
    """What happened and what to do next, for people."""
    last_transition_time: str
    """RFC 3339 time at which status last changed."""
    observed_generation: int = 0
    """Generation of the spec that this condition speaks of."""


class Metadata(BaseModel):
    """The part of ObjectMeta that decisions need."""

    model_config = ConfigDict(alias_generator=to_camel, populate_by_name=True, extra="ignore", frozen=True)

    name: str
    namespace: str
    uid: str = ""
    generation: int = 0
    resource_version: str = ""
    creation_timestamp: str = ""
    deletion_timestamp: str | None = None
    finalizers: tuple[str, ...] = ()
    labels: dict[str, str] = Field(default_factory=dict)
    annotations: dict[str, str] = Field(default_factory=dict)
