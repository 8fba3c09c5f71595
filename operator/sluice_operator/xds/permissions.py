"""Who may call and what such a caller may claim, as overrides on the route configuration.

There, and not in the listener, a revocation takes effect on open connections too.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from typing import Any

from envoy.extensions.filters.http.api_key_auth.v3 import api_key_auth_pb2
from envoy.extensions.filters.http.rbac.v3 import rbac_pb2

from .messages import Message, pack
from .parts import IDENTITY, one_of
from .state import Tenant

API_KEY_FILTER = "sluice.api_key"
RBAC_FILTER = "sluice.claims"


def identity(tenant: Tenant) -> str:
    """Name and security domain in one value, as authentication forwards it."""
    return f"{tenant.name} {tenant.domain}"


def overrides(tenants: Sequence[Tenant]) -> dict[str, Message]:
    """What the filters do with these tenants, by filter name."""
    return {
        API_KEY_FILTER: pack(_api_keys(tenants)),
        RBAC_FILTER: pack(rbac_pb2.RBACPerRoute(rbac={"rules": permissions(tenants)})),
    }


def permissions(tenants: Iterable[Tenant]) -> dict[str, Any]:
    """RBAC rules: each tenant with the claims it may make; whoever is not named is refused."""
    return {
        "action": 0,
        "policies": {
            tenant.name: {
                "principals": [{"header": {"name": IDENTITY, "string_match": {"exact": identity(tenant)}}}],
                "permissions": [
                    {
                        "and_rules": {
                            "rules": [
                                _claim("x-sluice-task", tenant.tasks),
                                _claim("x-sluice-data-class", tenant.data_classes),
                                _claim("x-sluice-risk", tenant.risks),
                            ]
                        }
                    }
                ],
            }
            for tenant in tenants
        },
    }


def _api_keys(tenants: Iterable[Tenant]) -> Message:
    # An override without forwarding would lose the tenant and hand the key to the pods.
    return api_key_auth_pb2.ApiKeyAuthPerRoute(
        credentials=[{"key": key, "client": identity(t)} for t in tenants for key in t.api_keys],
        key_sources=[{"header": "Authorization"}],
        forwarding={"header": IDENTITY, "hide_credentials": True},
    )


def _claim(header: str, allowed: Sequence[str]) -> dict[str, Any]:
    absent = {"not_rule": {"header": {"name": header, "present_match": True}}}
    given = [{"header": one_of(header, [value])} for value in allowed]
    return {"or_rules": {"rules": [absent, *given]}}
