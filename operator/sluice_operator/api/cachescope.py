"""CacheScope: who may share which cached work."""

from __future__ import annotations

from enum import StrEnum
from typing import Annotated, ClassVar

from pydantic import Field

from .common import MAX_SAFE_INTEGER, Condition, Metadata, Spec, named
from .declare import AGE, MESSAGE, READY, REASON, Cel, Column, Kind, keyed_by, obeys, validations


class Isolation(StrEnum):
    """Within what a cached prefix may be shared, from narrow to wide."""

    USER = "User"
    TENANT = "Tenant"
    SECURITY_DOMAIN = "SecurityDomain"
    PUBLIC = "Public"


class PrefixCache(Spec):
    """The cache of prompt prefixes (KV blocks)."""

    enabled: bool = True
    """Whether prefixes are shared at all."""


class CacheScopeSpec(Spec):
    """Who shares, and what invalidates."""

    isolation: Isolation = Isolation.TENANT
    """Within what cached work may be shared."""
    epoch: int = Field(default=0, ge=0, le=MAX_SAFE_INTEGER)
    """Raise it to invalidate everything cached under this scope at once."""
    versions: dict[Annotated[str, Field(max_length=63)], Annotated[str, Field(max_length=200)]] = Field(
        default_factory=dict,
        max_length=32,
        json_schema_extra=validations(
            Cel(
                "self.all(name, name.matches('^[A-Za-z0-9]([-A-Za-z0-9_.]{0,61}[A-Za-z0-9])?$'))",
                "versions: each name must be 1 to 63 letters, digits, '-', '_' or '.', such as prompt",
            )
        ),
    )
    """Versions that form part of the key, such as prompt, tools, policy, knowledge."""
    prefix: PrefixCache = Field(default_factory=PrefixCache)
    """Prefix cache."""


class CacheScopeStatus(Spec):
    """Observed state."""

    observed_generation: int = 0
    """Generation that this status speaks of."""
    conditions: list[Condition] = Field(default_factory=list, json_schema_extra=keyed_by("type"))
    """Ready: every pod that serves a rule with this scope holds this epoch."""


class CacheScope(Spec):
    """Who may share which cached work."""

    KIND: ClassVar = Kind(
        plural="cachescopes",
        short_names=("csc",),
        columns=(
            Column("Isolation", ".spec.isolation", "Within what cached work may be shared."),
            Column("Epoch", ".spec.epoch", "Raised to invalidate everything at once.", "integer"),
            READY,
            REASON,
            AGE,
            MESSAGE,
        ),
    )
    model_config = obeys(named())

    metadata: Metadata
    spec: CacheScopeSpec = Field(default_factory=CacheScopeSpec)
    status: CacheScopeStatus = Field(default_factory=CacheScopeStatus)
