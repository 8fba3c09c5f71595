"""CacheScope: who may share which cached work."""

from __future__ import annotations

from enum import StrEnum

from pydantic import Field

from .common import Condition, Metadata, Spec


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
    epoch: int = Field(default=0, ge=0)
    """Raise it to invalidate everything cached under this scope at once."""
    versions: dict[str, str] = Field(default_factory=dict)
    """Versions that form part of the key, such as prompt, tools, policy, knowledge."""
    prefix: PrefixCache = Field(default_factory=PrefixCache)
    """Prefix cache."""


class CacheScopeStatus(Spec):
    """Observed state."""

    observed_generation: int = 0
    """Generation that this status speaks of."""
    conditions: list[Condition] = Field(default_factory=list)
    """Ready: every pod that serves a rule with this scope holds this epoch."""


class CacheScope(Spec):
    """Who may share which cached work."""

    metadata: Metadata
    spec: CacheScopeSpec = Field(default_factory=CacheScopeSpec)
    status: CacheScopeStatus = Field(default_factory=CacheScopeStatus)
