"""Tenant: who a caller is, and what such a caller may claim."""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import Field

from .common import Condition, DataClass, DnsLabel, Metadata, Risk, SecretKeyRef, Spec, TokenCaps, named
from .declare import AGE, MESSAGE, READY, REASON, SET, Cel, Column, Kind, keyed_by, obeys


class JwtIdentity(Spec):
    """Callers with a JSON Web Token (RFC 7519)."""

    issuer: str = Field(min_length=1, max_length=500)
    """Value of `iss`."""
    audiences: list[Annotated[str, Field(max_length=500)]] = Field(default_factory=list, max_length=16)
    """Accepted values of `aud`; empty: any."""
    jwks_secret: SecretKeyRef
    """JSON Web Key Set (RFC 7517) that signs the tokens."""
    claims: dict[str, Annotated[str, Field(max_length=500)]] = Field(default_factory=dict, max_length=16)
    """Claims that a token must carry, with their values, to be this tenant."""


class TenantLimits(TokenCaps):
    """What its callers may take. Each replica counts for itself: a backend of 4 runs up to 4 × maxRunning."""

    model_config = obeys(
        Cel(
            "!has(self.maxRunning) || !has(self.maxInFlight) || self.maxRunning <= self.maxInFlight",
            "maxRunning must not exceed maxInFlight, which counts what runs too: lower it or raise the other",
            ".maxRunning",
        )
    )

    max_running: int | None = Field(default=None, ge=1, le=100_000)
    """Sequences of its that run at once on a replica; more wait. Absent: what its weight gives it."""
    max_in_flight: int | None = Field(default=None, ge=1, le=100_000)
    """Requests of its that run or wait on a replica; one more gets 429. Absent: the replica's own bounds."""
    max_context_tokens: int | None = Field(default=None, ge=2, le=1_048_576)
    """Longest prompt and answer together; absent: the backend's maxModelLen."""
    max_seconds: int | None = Field(default=None, ge=1, le=86_400)
    """Longest request; past it it ends with 504. Absent: the rule's totalSeconds alone."""


class TenantSpec(Spec):
    """Identity, permissions and share."""

    api_keys: list[SecretKeyRef] = Field(
        default_factory=list, max_length=64, json_schema_extra=keyed_by("name", "key")
    )
    """API keys, each a Secret's value; sent as `Authorization: Bearer KEY`."""
    jwt: JwtIdentity | None = None
    """Tokens that prove this tenant."""
    security_domain: DnsLabel = "default"
    """Tenants of one domain may share what a CacheScope with isolation SecurityDomain holds."""
    tasks: list[DnsLabel] = Field(default_factory=list, max_length=64, json_schema_extra=SET)
    """Tasks that its callers may claim. A request without a claim has no task."""
    data_classes: list[DataClass] = Field(default_factory=lambda: list(DataClass), max_length=4)
    """Data classes that its callers may claim. A request without a claim is Restricted."""
    risks: list[Risk] = Field(default_factory=lambda: list(Risk), max_length=3)
    """Risks that its callers may claim. A request without a claim is High."""
    weight: int = Field(default=1, ge=1, le=1000)
    """Its share where tenants want more than there is: 3 gets thrice the tokens of 1. In force in seconds."""
    limits: TenantLimits = Field(default_factory=TenantLimits)
    """What its callers may take. In force in seconds."""


class TenantStatus(Spec):
    """Observed state."""

    observed_generation: int = 0
    """Generation that this status speaks of."""
    conditions: list[Condition] = Field(default_factory=list, json_schema_extra=keyed_by("type"))
    """Ready: the gateway knows its keys."""


class Tenant(Spec):
    """Who a caller is."""

    KIND: ClassVar = Kind(
        plural="tenants",
        short_names=("tn",),
        columns=(
            Column("Domain", ".spec.securityDomain", "Security domain."),
            READY,
            REASON,
            AGE,
            MESSAGE,
        ),
    )
    model_config = obeys(
        named(),
        Cel(
            "self.metadata.name != 'sluice-eval'",
            "metadata.name sluice-eval is the operator's own, for suites and load ramps: rename it",
        ),
    )

    metadata: Metadata
    spec: TenantSpec = Field(default_factory=TenantSpec)
    status: TenantStatus = Field(default_factory=TenantStatus)
