"""Tenant: who a caller is, and what such a caller may claim."""

from __future__ import annotations

from typing import Annotated, ClassVar

from pydantic import Field

from .common import Condition, DataClass, DnsLabel, Metadata, Risk, SecretKeyRef, Spec, named
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


class TenantSpec(Spec):
    """Identity and permissions."""

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
