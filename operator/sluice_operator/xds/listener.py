"""The listener: the fixed chain that every request passes, the same for all tenants and policies.

Its order is the security argument: our headers are removed before anything reads them; a caller is proven
before a byte of the body is buffered; claims are checked before they become context; routes are chosen
last. It changes only with the body limit: connections that are open keep the listener that they came
through.
"""

from __future__ import annotations

from typing import Any

from envoy.config.listener.v3 import listener_pb2
from envoy.extensions.access_loggers.filters.cel.v3 import cel_pb2
from envoy.extensions.access_loggers.grpc.v3 import als_pb2
from envoy.extensions.filters.http.buffer.v3 import buffer_pb2
from envoy.extensions.filters.http.header_mutation.v3 import header_mutation_pb2
from envoy.extensions.filters.http.header_to_metadata.v3 import header_to_metadata_pb2
from envoy.extensions.filters.http.json_to_metadata.v3 import json_to_metadata_pb2
from envoy.extensions.filters.http.rbac.v3 import rbac_pb2
from envoy.extensions.filters.http.router.v3 import router_pb2
from envoy.extensions.filters.network.http_connection_manager.v3 import http_connection_manager_pb2 as hcm_pb2
from envoy.extensions.http.early_header_mutation.header_mutation.v3 import header_mutation_pb2 as early_pb2

from ..api.common import DataClass, Risk
from .identity import discovered
from .messages import Message, duration, error_body, extension
from .parts import IDENTITY, INVALID, LIMITED, METADATA, OVERWRITE
from .permissions import RBAC_FILTER
from .routes import ROUTES
from .state import GatewayState

LISTENER = "sluice"
ALS_CLUSTER = "sluice-als"
LOGGED_HEADERS = (
    "x-sluice-policy",
    "x-sluice-rule",
    "x-sluice-arm",
    "x-sluice-attempt",
    "x-sluice-tenant",
    "x-sluice-task",
    "x-sluice-mirror",
    "x-sluice-conversation",
    "x-envoy-attempt-count",
)
CLAIMS = ("sluice-task", "sluice-data-class", "sluice-risk")
CONVERSATION = "sluice-conversation"
PATIENCE = "sluice-timeout"
"""For how many seconds a client waits: it can only shorten what the rule allows."""
ADD_IF_ABSENT = 1


def build_listener(state: GatewayState, address: str, port: int) -> Message:
    """The one listener for clients."""
    manager = hcm_pb2.HttpConnectionManager(
        stat_prefix="sluice",
        rds={"route_config_name": ROUTES, "config_source": {"ads": {}, "resource_api_version": 2}},
        http_filters=_filters(state),
        early_header_mutation_extensions=[
            extension("envoy.http.early_header_mutation.header_mutation", _clean())
        ],
        # Nobody is internal: such a caller could choose the request id and steer Envoy by x-envoy-*.
        use_remote_address={"value": True},
        internal_address_config={},
        normalize_path={"value": True},
        merge_slashes=True,
        always_set_request_id_in_response=True,
        server_header_transformation=hcm_pb2.HttpConnectionManager.PASS_THROUGH,
        common_http_protocol_options={"idle_timeout": duration(3600)},
        request_headers_timeout=duration(10),
        stream_idle_timeout=duration(60),
        access_log=[_access_log("request")],
        local_reply_config=_local_replies(),
    )
    return listener_pb2.Listener(
        name=LISTENER,
        address={"socket_address": {"address": address, "port_value": port}},
        per_connection_buffer_limit_bytes={"value": 256 * 1024},
        filter_chains=[{"filters": [extension("envoy.filters.network.http_connection_manager", manager)]}],
    )


def _clean() -> Message:
    prefixes = ("x-sluice-", "x-envoy-", "x-request-id")
    return early_pb2.HeaderMutation(
        mutations=[{"remove_on_match": {"key_matcher": {"prefix": p, "ignore_case": True}}} for p in prefixes]
    )


def _filters(state: GatewayState) -> list[dict[str, Any]]:
    return [
        *discovered(),
        extension("sluice.identity", _split_identity()),
        extension("sluice.context", _mutation(_context())),
        extension(RBAC_FILTER, rbac_pb2.RBAC(rules={"action": 0, "policies": {}})),
        extension("sluice.strictest", _mutation(_strictest())),
        extension("sluice.buffer", buffer_pb2.Buffer(max_request_bytes={"value": state.max_body_bytes})),
        extension("sluice.model", _model()),
        extension(
            "envoy.filters.http.router",
            router_pb2.Router(
                upstream_log=[_access_log("attempt")],
                upstream_log_options={"flush_upstream_log_on_upstream_stream": True},
            ),
        ),
    ]


def _split_identity() -> Message:
    def part(key: str, group: str) -> dict[str, Any]:
        return {
            "header": IDENTITY,
            "on_header_present": {
                "metadata_namespace": METADATA,
                "key": key,
                "regex_value_rewrite": {"pattern": {"regex": r"^(\S+) (\S+)$"}, "substitution": group},
            },
        }

    return header_to_metadata_pb2.Config(request_rules=[part("tenant", r"\1"), part("domain", r"\2")])


def _mutation(mutations: list[dict[str, Any]]) -> Message:
    return header_mutation_pb2.HeaderMutation(mutations={"request_mutations": mutations})


def _put(key: str, value: str, action: int = OVERWRITE) -> dict[str, Any]:
    return {"append": {"header": {"key": key, "value": value}, "append_action": action}}


def _context() -> list[dict[str, Any]]:
    """Claims as context, one value each, before they are checked.

    Of a header that was sent twice a matcher may take the other value: a check of what the client sent would
    let through a value that nobody checked.
    """
    return [
        _put("x-sluice-tenant", f"%DYNAMIC_METADATA({METADATA}:tenant)%"),
        _put("x-sluice-domain", f"%DYNAMIC_METADATA({METADATA}:domain)%"),
        _put("x-sluice-time", "%START_TIME(%s.%6f)%"),
        *(_put(f"x-{name}", f"%REQ({name})%") for name in (*CLAIMS, CONVERSATION, PATIENCE)),
        *({"remove": name} for name in (*CLAIMS, CONVERSATION, PATIENCE)),
    ]


def _strictest() -> list[dict[str, Any]]:
    """What was not claimed becomes the strictest."""
    return [
        _put("x-sluice-data-class", DataClass.RESTRICTED, ADD_IF_ABSENT),
        _put("x-sluice-risk", Risk.HIGH, ADD_IF_ABSENT),
        *({"remove": name} for name in (IDENTITY, "authorization")),
    ]


def _model() -> Message:
    def problem(value: str) -> dict[str, Any]:
        return {"metadata_namespace": METADATA, "key": "problem", "value": {"string_value": value}}

    return json_to_metadata_pb2.JsonToMetadata(
        request_rules={
            "rules": [
                {
                    "selectors": [{"key": "model"}],
                    "on_present": {"metadata_namespace": METADATA, "key": "model"},
                    "on_missing": problem("no_model"),
                    "on_error": problem("not_json"),
                }
            ],
            "allow_content_types_regex": {"regex": r"(?i)application/json\s*(;.*)?"},
        }
    )


def _access_log(name: str) -> dict[str, Any]:
    return extension(
        "envoy.access_loggers.http_grpc",
        als_pb2.HttpGrpcAccessLogConfig(
            common_config={
                "log_name": name,
                "grpc_service": {"envoy_grpc": {"cluster_name": ALS_CLUSTER}},
                "transport_api_version": 2,
                "buffer_flush_interval": duration(0.05),
                "custom_tags": [
                    {
                        "tag": tag,
                        "metadata": {
                            "kind": {kind: {}},
                            "metadata_key": {"key": METADATA, "path": [{"key": tag}]},
                        },
                    }
                    for tag, kind in (("cluster", "host"), ("stable", "route"), ("candidate", "route"))
                ],
            },
            additional_request_headers_to_log=list(LOGGED_HEADERS),
            additional_response_headers_to_log=[LIMITED],
        ),
    )


def _local_replies() -> dict[str, Any]:
    """Every answer that Envoy itself gives, in OpenAI's error shape."""

    def shaped(text: str) -> dict[str, Any]:
        return {"text_format_source": {"inline_string": text}, "content_type": "application/json"}

    def mapper(
        condition: dict[str, Any], body: str, retry_after: bool = False, status: int = 0
    ) -> dict[str, Any]:
        entry: dict[str, Any] = {"filter": condition, "body_format_override": shaped(body)}
        if retry_after:
            entry["headers_to_add"] = [
                {"header": {"key": "retry-after", "value": "1"}, "append_action": OVERWRITE}
            ]
        if status:
            entry["status_code"] = {"value": status}
        return entry

    def details(expression: str) -> dict[str, Any]:
        return {
            "extension_filter": extension(
                "envoy.access_loggers.extension_filters.cel", cel_pb2.ExpressionFilter(expression=expression)
            )
        }

    def status(value: int, op: int = 0) -> dict[str, Any]:
        comparison = {"op": op, "value": {"default_value": value, "runtime_key": "sluice.unused"}}
        return {"status_code_filter": {"comparison": comparison}}

    def flags(*names: str) -> dict[str, Any]:
        return {"response_flag_filter": {"flags": list(names)}}

    server = "server_error"
    return {
        "mappers": [
            mapper(details("response.code_details == 'direct_response'"), "%LOCAL_REPLY_BODY%"),
            mapper(status(401), error_body("Incorrect or missing API key.", INVALID, "invalid_api_key")),
            mapper(
                status(403),
                error_body(
                    "This caller may not do that, or not with these claims.",
                    "permission_error",
                    "permission_denied",
                ),
            ),
            mapper(status(413), error_body("The body is too large.", INVALID, "request_too_large")),
            mapper(flags("UO"), error_body("Too many requests in flight.", server, "overloaded"), True, 503),
            mapper(
                flags("UH", "NC"), error_body("No pod is ready to answer.", server, "no_endpoint"), True, 503
            ),
            mapper(
                flags("UT", "SI", "DT"),
                error_body("The answer took too long.", server, "timeout"),
                False,
                504,
            ),
            mapper(
                flags("UF", "UC", "UR", "LR", "URX"),
                error_body("The pod that should have answered failed.", server, "backend_failed"),
                True,
            ),
            mapper(status(500, 1), error_body("The gateway failed.", server, "gateway_error")),
        ],
        "body_format": shaped(error_body("The request is malformed.", INVALID, "bad_request")),
    }
