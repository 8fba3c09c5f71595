"""What pods must know of tenants and of their own backend beside configurations: weights and caps.

Apart from the PodConfig on purpose: its version is what routes name and what a rollout compares, and neither
may move because a tenant was given another weight. Invariant: the version is the digest of all the rest.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterable
from typing import Any

from ..api.common import TokenCaps
from ..api.tenant import Tenant
from .tenants import named_once

LimitSet = dict[str, Any]
"""As in docs/contracts/limits.schema.json."""


def tenant_limits(tenants: Iterable[Tenant]) -> dict[str, dict[str, int]]:
    """By tenant, in wire names; those that are like one nobody has heard of are left out."""
    told = {tenant.metadata.name: _told(tenant) for tenant in named_once(tenants)}
    return {name: limits for name, limits in sorted(told.items()) if limits}


def _told(tenant: Tenant) -> dict[str, int]:
    limits: dict[str, int] = tenant.spec.limits.model_dump(by_alias=True, exclude_none=True)
    return limits if tenant.spec.weight == 1 else {"weight": tenant.spec.weight, **limits}


def limit_set(backend: TokenCaps, tenants: dict[str, dict[str, int]]) -> LimitSet:
    """For the pods of one backend. ``tenants``: as ``tenant_limits`` tells them."""
    body = {"backend": backend.model_dump(by_alias=True, exclude_none=True), "tenants": tenants}
    canonical = json.dumps(body, sort_keys=True, separators=(",", ":"))
    return {"version": hashlib.sha256(canonical.encode()).hexdigest()[:16], **body}
