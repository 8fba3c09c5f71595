"""Who is calling: an API key or a JSON Web Token, whichever is sent, becomes one identity header.

These filters reach Envoy by extension discovery and not inside the listener, so that a new token issuer
holds at once, on open connections too. A credential that looks like a token is never tried as a key, and
the other way round; while the filters change one after the other, a caller may be refused but is never
taken for another.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any

from envoy.config.core.v3 import extension_pb2
from envoy.extensions.common.matching.v3 import extension_matcher_pb2
from envoy.extensions.filters.common.matcher.action.v3 import skip_action_pb2
from envoy.extensions.filters.http.api_key_auth.v3 import api_key_auth_pb2
from envoy.extensions.filters.http.composite.v3 import composite_pb2
from envoy.extensions.filters.http.header_mutation.v3 import header_mutation_pb2
from envoy.extensions.filters.http.jwt_authn.v3 import config_pb2 as jwt_pb2
from envoy.extensions.matching.common_inputs.network.v3 import network_inputs_pb2
from envoy.extensions.matching.input_matchers.metadata.v3 import metadata_pb2
from envoy.type.matcher.v3 import http_inputs_pb2

from .messages import PREFIX, Message, Resources, extension
from .parts import IDENTITY, OVERWRITE
from .permissions import API_KEY_FILTER, identity
from .state import GatewayState, Jwt, Tenant

JWT_SHAPE = r"(?i:bearer) +ey[A-Za-z0-9_-]+\.[A-Za-z0-9_-]+\.[A-Za-z0-9_-]*"
JWT_FILTER = "sluice.jwt"
JWT_TENANT_FILTER = "sluice.jwt_tenant"


def build_identity(state: GatewayState) -> Resources:
    """The filters' configurations, by filter name."""
    issuers = _issuers(state.tenants)
    return {
        name: extension_pb2.TypedExtensionConfig(**extension(name, message))
        for name, message in (
            (JWT_FILTER, _jwt(issuers)),
            (JWT_TENANT_FILTER, _jwt_tenant(state.tenants)),
            (API_KEY_FILTER, _api_key(bool(issuers))),
        )
    }


def discovered() -> Iterable[dict[str, Any]]:
    """The filters' places in the chain."""
    either = extension_matcher_pb2.ExtensionWithMatcher
    for name, kinds in (
        (JWT_FILTER, [jwt_pb2.JwtAuthentication]),
        (JWT_TENANT_FILTER, [either, header_mutation_pb2.HeaderMutation]),
        (API_KEY_FILTER, [either, api_key_auth_pb2.ApiKeyAuth]),
    ):
        yield {
            "name": name,
            "config_discovery": {
                "config_source": {"ads": {}, "resource_api_version": 2},
                "type_urls": [PREFIX + kind.DESCRIPTOR.full_name for kind in kinds],
            },
        }


def _api_key(beside_jwt: bool) -> Message:
    plain = api_key_auth_pb2.ApiKeyAuth(
        key_sources=[{"header": "Authorization"}], forwarding={"header": IDENTITY, "hide_credentials": True}
    )
    if not beside_jwt:
        return plain
    skip = {"action": extension("skip", skip_action_pb2.SkipFilter())}
    is_jwt = {
        "single_predicate": {
            "input": extension(
                "authorization", http_inputs_pb2.HttpRequestHeaderMatchInput(header_name="authorization")
            ),
            "value_match": {"safe_regex": {"regex": JWT_SHAPE, "google_re2": {}}},
        }
    }
    return extension_matcher_pb2.ExtensionWithMatcher(
        extension_config=extension("api_key", plain),
        xds_matcher={"matcher_list": {"matchers": [{"predicate": is_jwt, "on_match": skip}]}},
    )


def _issuers(tenants: Iterable[Tenant]) -> dict[str, Jwt]:
    """Distinct token sources, by name; tenants of one issuer are told apart by claims."""
    return {issuer_name(tenant.jwt): tenant.jwt for tenant in tenants if tenant.jwt is not None}


def issuer_name(jwt: Jwt) -> str:
    """Name of what verifies a token: issuer, audiences and keys."""
    return hashlib.sha256(repr((jwt.issuer, jwt.audiences, jwt.jwks)).encode()).hexdigest()[:16]


def _jwt(issuers: dict[str, Jwt]) -> Message:
    """Verifies what looks like a token; nothing else gets here."""
    if not issuers:
        return jwt_pb2.JwtAuthentication()
    requirements = [{"provider_name": name} for name in sorted(issuers)]
    return jwt_pb2.JwtAuthentication(
        providers={
            name: {
                "issuer": jwt.issuer,
                "audiences": list(jwt.audiences),
                "local_jwks": {"inline_string": jwt.jwks},
                "from_headers": [{"name": "authorization", "value_prefix": "Bearer "}],
                "forward": True,
                "require_expiration": True,
                "payload_in_metadata": name,
                "claim_to_headers": [{"header_name": "x-sluice-user", "claim_name": "sub"}],
            }
            for name, jwt in issuers.items()
        },
        rules=[
            {
                "match": {
                    "prefix": "/",
                    "headers": [
                        {"name": "authorization", "string_match": {"safe_regex": {"regex": JWT_SHAPE}}}
                    ],
                },
                "requires": requirements[0]
                if len(requirements) == 1
                else {"requires_any": {"requirements": requirements}},
            }
        ],
    )


def _jwt_tenant(tenants: Iterable[Tenant]) -> Message:
    # The most specific tenant first: more claims before fewer.
    proven = sorted((t for t in tenants if t.jwt), key=lambda t: (-len(t.jwt.claims) if t.jwt else 0, t.name))
    if not proven:
        return header_mutation_pb2.HeaderMutation()
    return extension_matcher_pb2.ExtensionWithMatcher(
        extension_config=extension("composite", composite_pb2.Composite()),
        xds_matcher={
            "matcher_list": {
                "matchers": [
                    {
                        "predicate": _claims_predicate(t.jwt),
                        "on_match": {"action": extension("tenant", _identify(t))},
                    }
                    for t in proven
                    if t.jwt
                ]
            }
        },
    )


def _claims_predicate(jwt: Jwt) -> dict[str, Any]:
    parts = [_claim_is(issuer_name(jwt), name, value) for name, value in (("iss", jwt.issuer), *jwt.claims)]
    return parts[0] if len(parts) == 1 else {"and_matcher": {"predicate": parts}}


def _claim_is(provider: str, claim: str, value: str) -> dict[str, Any]:
    return {
        "single_predicate": {
            "input": extension(
                "claim",
                network_inputs_pb2.DynamicMetadataInput(
                    filter="envoy.filters.http.jwt_authn", path=[{"key": provider}, {"key": claim}]
                ),
            ),
            "custom_match": extension(
                "value", metadata_pb2.Metadata(value={"string_match": {"exact": value}})
            ),
        }
    }


def _identify(tenant: Tenant) -> Message:
    mutation = header_mutation_pb2.HeaderMutation(
        mutations={
            "request_mutations": [
                {
                    "append": {
                        "header": {"key": IDENTITY, "value": identity(tenant)},
                        "append_action": OVERWRITE,
                    }
                },
            ]
        }
    )
    return composite_pb2.ExecuteFilterAction(typed_config=extension("identity", mutation))
