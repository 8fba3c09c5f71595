"""Backends as Envoy clusters, and their pods as endpoints.

Three kinds share one set of endpoints (an EDS resource named like the backend): the backend itself; an
alias, for an arm that has the same backend as its sibling (weighted clusters and their runtime keys need
distinct names); and an aggregate, which goes on to the fallbacks when the arm fails before the first byte.
"""

from __future__ import annotations

from typing import Any

from envoy.config.cluster.v3 import cluster_pb2
from envoy.config.endpoint.v3 import endpoint_pb2
from envoy.extensions.clusters.aggregate.v3 import cluster_pb2 as aggregate_pb2
from envoy.extensions.upstreams.http.v3 import http_protocol_options_pb2

from .messages import Message, Resources, duration, extension, pack, struct
from .scopes import parts
from .state import Cluster, GatewayState, Rule

FEEDBACK = "sluice-feedback"
ALIAS = "@candidate"
CHAIN = "|"
METADATA = "sluice"
# uvicorn closes idle connections after 5 s; one that is reused in that very moment fails a request.
UPSTREAM_IDLE_SECONDS = 4


def arm_clusters(rule: Rule) -> tuple[str, str]:
    """Names of the Envoy clusters of stable and candidate ('' where there is none)."""
    if rule.stable is None:
        return "", ""
    stable, candidate = rule.stable.cluster, ""
    if rule.candidate is not None:
        candidate = rule.candidate.cluster
        if candidate == stable:
            candidate += ALIAS
        candidate = CHAIN.join((candidate, *rule.fallbacks))
    return CHAIN.join((stable, *rule.fallbacks)), candidate


def backend_of(cluster: str) -> str:
    """Name of the backend that a request for this Envoy cluster is meant for."""
    return cluster.split(CHAIN, 1)[0].removesuffix(ALIAS)


def build_clusters(state: GatewayState) -> dict[str, Message]:
    """All clusters that backends and routes need."""
    known = {cluster.name: cluster for cluster in state.clusters}
    found = {name: _cluster(name, cluster) for name, cluster in known.items()}
    for policy in state.policies:
        for part in (part for rule in policy.rules for part in parts(rule)):
            for name in filter(None, arm_clusters(part)):
                first, *rest = name.split(CHAIN)
                base = known.get(first.removesuffix(ALIAS))
                if base is None:
                    continue
                found.setdefault(first, _cluster(first, base))
                if rest:
                    found.setdefault(name, _aggregate(name, [first, *(r for r in rest if r in known)]))
    if state.feedback is not None:
        found[FEEDBACK] = _cluster(FEEDBACK, Cluster(FEEDBACK, dns=state.feedback))
    return found


def build_endpoints(state: GatewayState) -> Resources:
    """Load assignments of all backends that run in pods; Envoy waits for each, so an empty one counts."""
    return {
        cluster.name: endpoint_pb2.ClusterLoadAssignment(
            cluster_name=cluster.name,
            endpoints=[
                {
                    "lb_endpoints": [
                        _endpoint(cluster.name, e.address, e.port)
                        for e in sorted(cluster.endpoints, key=lambda e: (e.address, e.port))
                    ]
                }
            ]
            if cluster.endpoints
            else [],
        )
        for cluster in state.clusters
        if cluster.dns is None
    }


def _endpoint(cluster: str, address: str, port: int) -> dict[str, Any]:
    return {
        "endpoint": {"address": {"socket_address": {"address": address, "port_value": port}}},
        "metadata": {"filter_metadata": {METADATA: struct({"cluster": cluster})}},
    }


def _cluster(name: str, backend: Cluster) -> Message:
    threshold = {
        "max_connections": {"value": backend.max_requests},
        "max_requests": {"value": backend.max_requests},
        # A request is pending even while its connection is being opened: 0 would refuse everything.
        "max_pending_requests": {"value": max(1, backend.max_pending)},
        "max_retries": {"value": backend.max_requests},
    }
    message = cluster_pb2.Cluster(
        name=name,
        connect_timeout=duration(1),
        lb_policy=cluster_pb2.Cluster.LEAST_REQUEST,
        common_lb_config={"healthy_panic_threshold": {"value": 0}},
        circuit_breakers={"thresholds": [threshold]},
        outlier_detection=_outlier_detection(),
        typed_extension_protocol_options={
            "envoy.extensions.upstreams.http.v3.HttpProtocolOptions": pack(
                http_protocol_options_pb2.HttpProtocolOptions(
                    explicit_http_config={"http_protocol_options": {}},
                    common_http_protocol_options={"idle_timeout": duration(UPSTREAM_IDLE_SECONDS)},
                )
            )
        },
    )
    if backend.dns is None:
        message.type = cluster_pb2.Cluster.EDS
        message.eds_cluster_config.service_name = backend.name
        message.eds_cluster_config.eds_config.ads.SetInParent()
        message.eds_cluster_config.eds_config.resource_api_version = 2
    else:
        host, port = backend.dns
        message.type = cluster_pb2.Cluster.STRICT_DNS
        message.load_assignment.CopyFrom(
            endpoint_pb2.ClusterLoadAssignment(
                cluster_name=name, endpoints=[{"lb_endpoints": [_endpoint(backend.name, host, port)]}]
            )
        )
    return message


def _outlier_detection() -> dict[str, Any]:
    """Pods that can't be reached or answer like a dead proxy are left out for a while, at most half of them.

    Plain 500s don't count: a prompt that always fails must not take pods away from everybody.
    """
    return {
        "interval": duration(1),
        "base_ejection_time": duration(5),
        "max_ejection_time": duration(60),
        "max_ejection_percent": {"value": 50},
        "split_external_local_origin_errors": True,
        "consecutive_local_origin_failure": {"value": 3},
        "consecutive_gateway_failure": {"value": 5},
        "enforcing_consecutive_gateway_failure": {"value": 100},
        "enforcing_consecutive_5xx": {"value": 0},
        "enforcing_success_rate": {"value": 0},
        "enforcing_local_origin_success_rate": {"value": 0},
    }


def _aggregate(name: str, members: list[str]) -> Message:
    return cluster_pb2.Cluster(
        name=name,
        connect_timeout=duration(1),
        lb_policy=cluster_pb2.Cluster.CLUSTER_PROVIDED,
        common_lb_config={"healthy_panic_threshold": {"value": 0}},
        cluster_type=extension("envoy.clusters.aggregate", aggregate_pb2.ClusterConfig(clusters=members)),
    )
