"""Envoy's own configuration: where the operator is, and nothing else.

Everything about requests arrives over ADS, so this file changes only with addresses and certificates. The
runtime layer ``sluice`` is what weights travel in.
"""

from __future__ import annotations

import argparse
import sys
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import yaml

from .listener import ALS_CLUSTER
from .runtime import LAYER

ADS_CLUSTER = "sluice-operator"
ADMIN_CLUSTER = "sluice-admin"
RE2_PROGRAM_SIZE = 1_000_000
RECONNECT = {"retry_policy": {"retry_back_off": {"base_interval": "0.1s", "max_interval": "1s"}}}
"""Envoy's own patience grows to 30 s: an operator that came back would go unheard for as long."""


@dataclass(frozen=True)
class TlsFiles:
    """Certificate, key and authority, as files; the same for both sides of the channel."""

    certificate: Path
    key: Path
    authority: Path


def render(
    operator: tuple[str, int],
    *,
    als: tuple[str, int] | None = None,
    node_id: str = "gateway",
    admin_port: int = 9901,
    ops_port: int | None = None,
    tls: TlsFiles | None = None,
    server_name: str = "",
) -> dict[str, Any]:
    """The bootstrap as data.

    ``als`` is where access logs go (default: to the operator). ``ops_port`` shows readiness and metrics,
    and nothing else of the administration, to the cluster.
    """
    admin = ("127.0.0.1", admin_port)
    return {
        "node": {"id": node_id, "cluster": "sluice-gateway"},
        "admin": {"address": _address(admin)},
        "dynamic_resources": {
            "ads_config": {
                "api_type": "GRPC",
                "transport_api_version": "V3",
                "set_node_on_first_message_only": True,
                "grpc_services": [{"envoy_grpc": {"cluster_name": ADS_CLUSTER, **RECONNECT}}],
            },
            "cds_config": {"ads": {}, "resource_api_version": "V3"},
            "lds_config": {"ads": {}, "resource_api_version": "V3"},
        },
        "layered_runtime": {
            "layers": [
                # Envoy's default refuses long regular expressions: some thirty tasks in a rule are too many.
                {"name": "limits", "static_layer": {"re2.max_program_size.error_level": RE2_PROGRAM_SIZE}},
                {
                    "name": LAYER,
                    "rtds_layer": {
                        "name": LAYER,
                        "rtds_config": {"ads": {}, "resource_api_version": "V3"},
                    },
                },
            ],
        },
        "static_resources": {
            "listeners": [_ops_listener(ops_port)] if ops_port else [],
            "clusters": [
                *([_admin_cluster(admin)] if ops_port else []),
                _grpc_cluster(ADS_CLUSTER, operator, tls, server_name),
                _grpc_cluster(ALS_CLUSTER, als or operator, tls, server_name),
            ],
        },
    }


def _address(pair: tuple[str, int]) -> dict[str, Any]:
    return {"socket_address": {"address": pair[0], "port_value": pair[1]}}


def _admin_cluster(admin: tuple[str, int]) -> dict[str, Any]:
    endpoint = {"endpoint": {"address": _address(admin)}}
    return {
        "name": ADMIN_CLUSTER,
        "type": "STATIC",
        "connect_timeout": "1s",
        "load_assignment": {"cluster_name": ADMIN_CLUSTER, "endpoints": [{"lb_endpoints": [endpoint]}]},
    }


def _ops_listener(port: int) -> dict[str, Any]:
    def route(path: str, rewritten: str) -> dict[str, Any]:
        only_get = [{"name": ":method", "string_match": {"exact": "GET"}}]
        target = {"cluster": ADMIN_CLUSTER, "prefix_rewrite": rewritten}
        return {"match": {"path": path, "headers": only_get}, "route": target}

    routes = [route("/readyz", "/ready"), route("/metrics", "/stats/prometheus")]
    prefix = "type.googleapis.com/envoy.extensions.filters"
    router = {"@type": f"{prefix}.http.router.v3.Router"}
    manager = {
        "@type": f"{prefix}.network.http_connection_manager.v3.HttpConnectionManager",
        "stat_prefix": "ops",
        "route_config": {"virtual_hosts": [{"name": "ops", "domains": ["*"], "routes": routes}]},
        "http_filters": [{"name": "envoy.filters.http.router", "typed_config": router}],
    }
    connection_manager = {"name": "envoy.filters.network.http_connection_manager", "typed_config": manager}
    return {
        "name": "ops",
        "address": _address(("0.0.0.0", port)),  # noqa: S104
        "filter_chains": [{"filters": [connection_manager]}],
    }


def _grpc_cluster(
    name: str, address: tuple[str, int], tls: TlsFiles | None, server_name: str
) -> dict[str, Any]:
    cluster: dict[str, Any] = {
        "name": name,
        "type": "STRICT_DNS",
        "connect_timeout": "1s",
        "dns_refresh_rate": "2s",
        "typed_extension_protocol_options": {
            "envoy.extensions.upstreams.http.v3.HttpProtocolOptions": {
                "@type": "type.googleapis.com/envoy.extensions.upstreams.http.v3.HttpProtocolOptions",
                "explicit_http_config": {
                    "http2_protocol_options": {
                        "connection_keepalive": {"interval": "3s", "timeout": "2s"},
                    }
                },
            },
        },
        "load_assignment": {
            "cluster_name": name,
            "endpoints": [{"lb_endpoints": [{"endpoint": {"address": _address(address)}}]}],
        },
    }
    if tls:
        cluster["transport_socket"] = {
            "name": "envoy.transport_sockets.tls",
            "typed_config": {
                "@type": "type.googleapis.com/envoy.extensions.transport_sockets.tls.v3.UpstreamTlsContext",
                "sni": server_name or address[0],
                "common_tls_context": {
                    "tls_certificates": [
                        {
                            "certificate_chain": {"filename": str(tls.certificate)},
                            "private_key": {"filename": str(tls.key)},
                        }
                    ],
                    "validation_context": {
                        "trusted_ca": {"filename": str(tls.authority)},
                        "match_typed_subject_alt_names": [
                            {"san_type": "DNS", "matcher": {"exact": server_name or address[0]}},
                        ],
                    },
                },
            },
        }
    return cluster


def _pair(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    return host, int(port)


def main() -> None:
    """Print the bootstrap."""
    parser = argparse.ArgumentParser(description="Print the gateway's Envoy bootstrap as YAML.")
    parser.add_argument("--operator", type=_pair, default=("sluice-operator", 18000), metavar="HOST:PORT")
    parser.add_argument(
        "--als", type=_pair, metavar="HOST:PORT", help="where access logs go (default: the operator)"
    )
    parser.add_argument("--node-id", default="gateway")
    parser.add_argument("--ops-port", type=int, help="serve /readyz and /metrics there (default: nowhere)")
    parser.add_argument("--admin-port", type=int, default=9901)
    parser.add_argument("--tls", type=Path, metavar="DIR", help="directory with tls.crt, tls.key and ca.crt")
    parser.add_argument(
        "--server-name", default="", help="name in the operator's certificate (default: its host)"
    )
    options = parser.parse_args()
    tls = (
        TlsFiles(*(options.tls / name for name in ("tls.crt", "tls.key", "ca.crt"))) if options.tls else None
    )
    yaml.safe_dump(
        render(
            options.operator,
            als=options.als,
            node_id=options.node_id,
            admin_port=options.admin_port,
            ops_port=options.ops_port,
            tls=tls,
            server_name=options.server_name,
        ),
        sys.stdout,
        sort_keys=False,
    )


if __name__ == "__main__":
    main()
