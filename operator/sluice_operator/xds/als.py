"""Envoy's access logs as records of requests and attempts.

Two logs arrive: ``request`` (what a client got) and ``attempt`` (each try at a pod, mirrors and failures
included; once when it starts, once when it ends). The conversation leaves this module only as ``unit``.
What Envoy had buffered when a connection broke is lost without a trace, so breaks are counted: evidence
with a break in it has a hole.
"""

from __future__ import annotations

import hashlib
from collections.abc import AsyncIterator, Callable
from dataclasses import dataclass
from typing import Any

import grpc
from envoy.data.accesslog.v3 import accesslog_pb2
from envoy.service.accesslog.v3 import als_pb2, als_pb2_grpc

from .clusters import backend_of
from .mirrors import PAIR
from .parts import LIMITED
from .state import AccessRecord

FLAGS = {
    "failed_local_healthcheck": "LH",
    "no_healthy_upstream": "UH",
    "upstream_request_timeout": "UT",
    "local_reset": "LR",
    "upstream_remote_reset": "UR",
    "upstream_connection_failure": "UF",
    "upstream_connection_termination": "UC",
    "upstream_overflow": "UO",
    "no_route_found": "NR",
    "downstream_connection_termination": "DC",
    "upstream_retry_limit_exceeded": "URX",
    "stream_idle_timeout": "SI",
    "downstream_protocol_error": "DPE",
    "upstream_protocol_error": "UPE",
    "upstream_max_stream_duration_reached": "UMSDR",
    "response_from_cache_filter": "RFCF",
    "no_filter_config_found": "NFCF",
    "duration_timeout": "DT",
    "no_cluster_found": "NC",
    "overload_manager": "OM",
    "dns_resolution_failure": "DF",
    "downstream_remote_reset": "DR",
}
CLIENT_LEFT = {"DC", "DR"}
FAILED = {"UH", "UT", "LR", "UR", "UF", "UC", "UO", "URX", "SI", "UPE", "UMSDR", "DT", "NC", "OM", "DF"}


def unit(policy: str, conversation: str, request_id: str) -> str:
    """What the tests count: the same for all requests of a conversation."""
    return hashlib.sha256(f"sluice-unit\0{policy}\0{conversation or request_id}".encode()).hexdigest()[:16]


def to_record(kind: str, entry: Any) -> AccessRecord:
    """One entry of Envoy's log; ``kind`` is the log's name."""
    common, request, response = entry.common_properties, entry.request, entry.response
    headers = request.request_headers
    policy, _, rule = common.route_name.partition(" ")
    if "/" not in policy:
        policy = rule = ""
    policy = headers.get("x-sluice-policy", policy)
    flags = [short for name, short in FLAGS.items() if getattr(common.response_flags, name)]
    status = int(response.response_code.value)
    arm = headers.get("x-sluice-arm", "")
    tags = common.custom_tags
    outcome = _outcome(kind, common, status, flags)
    first_byte = _seconds(common, "time_to_first_upstream_rx_byte")
    mirror = headers.get("x-sluice-mirror", "")
    return AccessRecord(
        kind=kind,
        request_id=request.request_id,
        policy=policy,
        rule=headers.get("x-sluice-rule", rule),
        arm=arm,
        attempt=headers.get("x-sluice-attempt", ""),
        tenant=headers.get("x-sluice-tenant", ""),
        task=headers.get("x-sluice-task", ""),
        unit=unit(policy, headers.get("x-sluice-conversation", ""), request.request_id),
        mirror=bool(mirror),
        pair=mirror == PAIR,
        cluster=tags.get("cluster") or tags.get(arm) or backend_of(common.upstream_cluster),
        status=status,
        outcome=outcome,
        flags=",".join(flags),
        start=common.start_time.ToNanoseconds() / 1e9,
        first_byte_s=first_byte,
        total_s=_seconds(common, "duration"),
        final=common.access_log_type != accesslog_pb2.UpstreamPoolReady,
        retried=headers.get("x-envoy-attempt-count", "1") != "1",
        interrupted=outcome == "error" and first_byte is not None and 200 <= status < 400,
        limited=LIMITED in response.response_headers,
    )


def _outcome(kind: str, common: Any, status: int, flags: list[str]) -> str:
    if CLIENT_LEFT & set(flags):
        return "cancelled"
    if status >= 500 or FAILED & set(flags):
        return "error"
    if kind == "attempt" and not common.HasField("time_to_last_upstream_rx_byte"):
        # Attempts have no flag for it: a response without an end that nothing broke was cut by its client.
        return "cancelled"
    return "rejected" if status >= 400 else "ok"


def _seconds(common: Any, name: str) -> float | None:
    return getattr(common, name).ToNanoseconds() / 1e9 if common.HasField(name) else None


@dataclass
class Losses:
    """How far the records can be trusted to be complete."""

    num_records: int = 0
    num_streams: int = 0
    """Streams ever opened; each gateway needs one for each of its two logs and worker threads."""
    num_breaks: int = 0
    """Streams that ended while the server went on: what was buffered behind them may be lost."""


class AccessLog(als_pb2_grpc.AccessLogServiceServicer):  # type: ignore[misc]
    """Receives the logs of all gateways and hands each record on."""

    def __init__(self, on_record: Callable[[AccessRecord], None]) -> None:
        self.losses = Losses()
        self._on_record = on_record

    async def StreamAccessLogs(
        self, requests: AsyncIterator[Any], context: grpc.aio.ServicerContext[Any, Any]
    ) -> Any:
        """Until Envoy hangs up."""
        self.losses.num_streams += 1
        kind = ""
        try:
            async for message in requests:
                kind = message.identifier.log_name or kind
                for entry in message.http_logs.log_entry:
                    self.losses.num_records += 1
                    self._on_record(to_record(kind, entry))
        finally:
            self.losses.num_breaks += 1
        return als_pb2.StreamAccessLogsResponse()
