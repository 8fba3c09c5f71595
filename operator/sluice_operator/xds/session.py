"""One gateway's stream: what it was sent, what it has acknowledged, and what comes next.

Make before break: clusters → their endpoints → listener → routes, each only when the one before is
acknowledged, and clusters that nobody names any more go last. The runtime layer (weights) waits for nothing
and nobody.
"""

from __future__ import annotations

import asyncio
import itertools
from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

from envoy.service.discovery.v3 import discovery_pb2

from .build import Resource, Snapshot
from .messages import CDS, ECDS, EDS, LDS, PREFIX, RDS, RTDS, TYPES, digest, duration
from .state import Endpoint, GatewayState

# Envoy quotes what it refuses, which may be the length of the configuration.
MESSAGE_LENGTH = 500


@dataclass
class Sent:
    """One response."""

    version: str
    snapshot: Snapshot
    resources: Mapping[str, Resource] = field(repr=False)
    nonce: str = ""
    refused: str = ""


class Session:
    """State of one stream. Nothing here waits: responses go into ``outbox``."""

    def __init__(self, target: Snapshot, ttl_seconds: float) -> None:
        self.node = ""
        self.target = target
        self.outbox: asyncio.Queue[Any] = asyncio.Queue()
        self.sent: dict[str, Sent] = {}
        self.acked: dict[str, Sent] = {}
        self._names: dict[str, frozenset[str]] = {}
        self._ttl = ttl_seconds
        self._nonces = itertools.count(1)

    def receive(self, request: Any) -> Sent | None:
        """Take a request; returns the response that it refuses, if it does."""
        self.node = request.node.id or self.node
        kind = request.type_url
        self._names[kind] = frozenset(request.resource_names)
        sent = self.sent.get(kind)
        if sent is None or request.response_nonce != sent.nonce:
            return None
        if request.HasField("error_detail"):
            told = without_secrets(request.error_detail.message, sent.snapshot.state)
            sent.refused = told[:MESSAGE_LENGTH] or "refused"
            return sent
        self.acked[kind] = sent
        return None

    def advance(self) -> None:
        """Send whatever may be sent now."""
        self._offer(RTDS)
        self._offer(CDS)
        # Not only once clusters are acknowledged: Envoy holds that back until their endpoints have arrived.
        self._offer(EDS)
        if not (self._settled(CDS) and self._endpoints_ready()):
            return
        self._offer(ECDS)
        self._offer(LDS)
        if self._settled(LDS) and self._settled(ECDS):
            self._offer(RDS)
            if self.has(RDS):
                self._offer(CDS)
                self._offer(EDS)

    def heartbeat(self) -> None:
        """Send the weights again, whole: their TTL starts anew, and a layer that had expired comes back."""
        if RTDS in self._names and RTDS in self.sent:
            self._send(RTDS, self.sent[RTDS])

    def in_force(self) -> bool:
        """Whether all of the target is acknowledged."""
        return all(self.has(kind) for kind in TYPES)

    def has(self, kind: str) -> bool:
        """Whether the target's part of this type is acknowledged."""
        if kind == EDS and not self._needed_endpoints():
            return True
        acked = self.acked.get(kind)
        if acked is None or kind not in self._names:
            return False
        if kind == EDS:
            return self._endpoints_ready() and acked.version == self.wanted(EDS)[0]
        if kind == CDS:
            return acked.version == self.wanted(CDS)[0]
        return acked.version == self.target.version(kind)

    def endpoints(self) -> dict[str, frozenset[Endpoint]]:
        """Clusters that this gateway has acknowledged, with their endpoints (of DNS clusters: none)."""
        found: dict[str, frozenset[Endpoint]] = {}
        assignments = self.acked[EDS].resources if EDS in self.acked else {}
        for name, resource in (self.acked[CDS].resources if CDS in self.acked else {}).items():
            service = resource.message.eds_cluster_config.service_name
            if not service:
                found[name] = frozenset()
            elif service in assignments:
                found[name] = frozenset(
                    Endpoint(
                        e.endpoint.address.socket_address.address,
                        e.endpoint.address.socket_address.port_value,
                    )
                    for group in assignments[service].message.endpoints
                    for e in group.lb_endpoints
                )
        return found

    def _offer(self, kind: str) -> None:
        if kind not in self._names:
            return
        version, resources = self.wanted(kind)
        if kind not in self.sent or self.sent[kind].version != version:
            self.sent[kind] = Sent(version, self.target, resources)
            self._send(kind, self.sent[kind])

    def _send(self, kind: str, sent: Sent) -> None:
        sent.nonce = str(next(self._nonces))
        response = discovery_pb2.DiscoveryResponse(version_info=sent.version, type_url=kind, nonce=sent.nonce)
        for name, resource in sent.resources.items():
            if kind == RTDS:
                wrapper = discovery_pb2.Resource(
                    name=name,
                    version=sent.version,
                    ttl=duration(self._ttl),
                    resource={"type_url": kind, "value": resource.data},
                )
                response.resources.add(
                    type_url=PREFIX + wrapper.DESCRIPTOR.full_name, value=wrapper.SerializeToString()
                )
            else:
                response.resources.add(type_url=kind, value=resource.data)
        self.outbox.put_nowait(response)

    def wanted(self, kind: str) -> tuple[str, Mapping[str, Resource]]:
        resources: Mapping[str, Resource] = self.target.resources[kind]
        if kind in (CDS, EDS):
            for sent in self._routes_before():
                resources = {**sent.snapshot.resources[kind], **resources}
        if kind == CDS:
            return _version(resources), resources
        if kind == EDS:
            resources = {name: r for name, r in resources.items() if name in self._names.get(EDS, ())}
            # A changed cluster of the same name warms up anew and waits for its endpoints to be sent again.
            return _version(resources, self.sent[CDS].version if CDS in self.sent else ""), resources
        return self.target.version(kind), resources

    def _routes_before(self) -> list[Sent]:
        """Route configurations that may still be in use and are not the target's."""
        version = self.target.version(RDS)
        acked = self.acked.get(RDS)
        if acked is None or acked.version == version:
            return []
        sent = self.sent[RDS]
        return [acked] if sent.version == version else [acked, sent]

    def _settled(self, kind: str) -> bool:
        return kind in self.acked and self.acked[kind].version == self.sent[kind].version

    def _needed_endpoints(self) -> frozenset[str]:
        sent = self.sent.get(CDS)
        if sent is None:
            return frozenset()
        services = (r.message.eds_cluster_config.service_name for r in sent.resources.values())
        return frozenset(filter(None, services))

    def _endpoints_ready(self) -> bool:
        needed = self._needed_endpoints()
        return not needed or (needed <= self._names.get(EDS, frozenset()) and self._settled(EDS))


def without_secrets(text: str, state: GatewayState) -> str:
    """What Envoy says of a configuration, for logs and statuses: it quotes what it refuses."""
    secrets = {state.credential, *(key for tenant in state.tenants for key in tenant.api_keys)} - {""}
    for secret in sorted(secrets, key=len, reverse=True):
        text = text.replace(secret, "[redacted]")
    return text


def _version(resources: Mapping[str, Resource], salt: str = "") -> str:
    return digest(
        (
            salt.encode(),
            *(
                part
                for name, resource in sorted(resources.items())
                for part in (name.encode(), resource.data)
            ),
        )
    )
