"""Policies and tenants as one route configuration.

Everything that must take effect on open connections is here and not in the listener: keys, permissions,
routes. The first route that matches wins, so the order of the list is: who are you, what do you call, the
rules of each policy in order, and what is left is an error. Weights are never here (see ``runtime``).
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

from envoy.config.route.v3 import route_components_pb2, route_pb2

from .clusters import FEEDBACK
from .messages import Message, duration, error_body
from .parts import ENDLESS, INVALID, answer, header, model_is, one_of
from .permissions import overrides
from .rule_routes import policy_routes
from .state import GatewayState, Policy, Tenant

ROUTES = "sluice"
COMPLETION_PATHS = r"/v1/(chat/)?completions"
FEEDBACK_PATH = "/v1/feedback"
FEEDBACK_SECONDS = 5.0
FEEDBACK_BYTES = 4096
ANYWHERE = {"prefix": "/"}
WITHHELD = "x-envoy-ratelimited"
"""Of a pod, to this gateway: it withheld the answer, which must not be tried again. Nobody limits a rate."""


def build_routes(state: GatewayState) -> Message:
    """The route configuration."""
    routes = [*_front(state)]
    for policy in state.policies:
        routes.extend(policy_routes(policy))
    routes.extend(_rest())
    return route_pb2.RouteConfiguration(
        name=ROUTES,
        max_direct_response_body_size_bytes={"value": 1 << 20},
        virtual_hosts=[
            {
                "name": "sluice",
                "domains": ["*"],
                "routes": routes,
                "include_request_attempt_count": True,
                "request_headers_to_add": [header("x-sluice-credential", state.credential)]
                if state.credential
                else [],
                "response_headers_to_remove": [WITHHELD],
                # Retries and mirrors need the whole body; what is above this limit was refused before.
                "request_body_buffer_limit": {"value": state.max_body_bytes},
                "typed_per_filter_config": overrides(state.tenants),
            }
        ],
    )


def _front(state: GatewayState) -> Iterable[Message]:
    """Routes before those of the policies."""
    yield answer(
        "unknown-caller",
        {**ANYWHERE, "headers": [{"name": "x-sluice-tenant", "present_match": True, "invert_match": True}]},
        401,
        error_body("Incorrect or missing API key.", INVALID, "invalid_api_key"),
    )
    yield from _models(state)
    if state.feedback is not None:
        yield from _feedback()
    yield answer(
        "unknown-path",
        {
            **ANYWHERE,
            "headers": [
                {
                    "name": ":path",
                    "invert_match": True,
                    "string_match": {"safe_regex": {"regex": COMPLETION_PATHS + r"(\?.*)?"}},
                }
            ],
        },
        404,
        error_body("There is no such path here.", INVALID, "not_found"),
    )
    yield _only_post(ANYWHERE)


def _only_post(match: dict[str, Any]) -> Message:
    other = {"name": ":method", "invert_match": True, "string_match": {"exact": "POST"}}
    return answer(
        "unknown-method",
        {**match, "headers": [other]},
        405,
        error_body("Only POST is allowed here.", INVALID, "method_not_allowed"),
    )


def _feedback() -> Iterable[Message]:
    """What people say of answers goes to the operator, with the tenant and without the key."""
    match = {"path": FEEDBACK_PATH}
    yield _only_post(match)
    large = {"start": FEEDBACK_BYTES + 1, "end": ENDLESS}
    yield answer(
        "large-feedback",
        {**match, "headers": [{"name": "content-length", "range_match": large}]},
        413,
        error_body(f"The body has more than {FEEDBACK_BYTES} bytes.", INVALID, "request_too_large"),
    )
    yield route_components_pb2.Route(
        name="feedback",
        match=match,
        route={
            "cluster": FEEDBACK,
            "host_rewrite_literal": FEEDBACK,
            "timeout": duration(FEEDBACK_SECONDS),
            "retry_policy": {"retry_on": "connect-failure,refused-stream", "num_retries": {"value": 1}},
        },
    )


def _models(state: GatewayState) -> Iterable[Message]:
    groups: dict[tuple[str, ...], list[str]] = {}
    for tenant, models in visible_models(state.policies, state.tenants).items():
        groups.setdefault(models, []).append(tenant)
    for models, tenants in sorted(groups.items()):
        listing = {
            "object": "list",
            "data": [
                {"id": model, "object": "model", "created": 0, "owned_by": "sluice"} for model in models
            ],
        }
        yield answer(
            "models",
            {
                "path": "/v1/models",
                "headers": [
                    {"name": ":method", "string_match": {"exact": "GET"}},
                    one_of("x-sluice-tenant", tenants),
                ],
            },
            200,
            json.dumps(listing),
        )


def visible_models(policies: Iterable[Policy], tenants: Iterable[Tenant]) -> dict[str, tuple[str, ...]]:
    """For each tenant the names of the models that some rule gives to it."""
    everybody: list[str] = []
    chosen: dict[str, list[str]] = {}
    for policy in policies:
        if any(not rule.tenants for rule in policy.rules):
            everybody.append(policy.model)
            continue
        for tenant in {name for rule in policy.rules for name in rule.tenants}:
            chosen.setdefault(tenant, []).append(policy.model)
    everybody.sort()
    return {
        t.name: tuple(sorted((*everybody, *chosen[t.name])) if t.name in chosen else everybody)
        for t in tenants
    }


def _rest() -> Iterable[Message]:
    """Routes after those of the policies."""
    yield answer(
        "unknown-model",
        {**ANYWHERE, "dynamic_metadata": [model_is({"safe_regex": {"regex": r"(?s).+"}})]},
        404,
        error_body("There is no such model.", INVALID, "model_not_found", "model"),
    )
    yield answer(
        "no-model",
        ANYWHERE,
        400,
        error_body(
            "The body must be application/json, an object with a string 'model'.", INVALID, "invalid_body"
        ),
    )
