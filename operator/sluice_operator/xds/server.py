"""The ADS server: brings one state to all gateways, and knows what each of them has in force.

A push never waits for a gateway, and a gateway that refuses something never keeps weights from going down:
weights are a resource of their own that is sent at once, for the routes in force as well as for those on
their way.
"""

from __future__ import annotations

import asyncio
import logging
import time
from collections.abc import AsyncIterator, Callable, Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import grpc
from envoy.service.accesslog.v3 import als_pb2_grpc
from envoy.service.discovery.v3 import ads_pb2_grpc

from .admission import Admission
from .als import AccessLog, Losses
from .bootstrap import TlsFiles
from .build import Resource, Snapshot, build
from .messages import ECDS, LDS, RDS, RTDS, TYPES
from .rule_routes import policy_without_weights
from .runtime import LAYER, build_runtime
from .session import Sent, Session
from .state import AccessRecord, Endpoint, GatewayState

log = logging.getLogger(__name__)
PATIENCE_S = 2.0
"""How long routes that are being replaced may let through what their candidate shall no longer have."""


@dataclass(frozen=True)
class PushResult:
    """What a push set in motion."""

    versions: Mapping[str, str]
    """Version of each resource type that is now wanted of every gateway."""
    changed: frozenset[str]
    """Types whose content differs from what was wanted before; weights change only the runtime layer."""
    quarantined: Mapping[str, str]
    """``kind/name`` of every object held back, with the reason."""
    num_gateways: int


@dataclass(frozen=True)
class InForce:
    """Whether every connected gateway has acknowledged what is wanted."""

    ok: bool
    """False also where no gateway is connected."""
    num_gateways: int
    quarantined: Mapping[str, str] = field(default_factory=dict)


class AdsServer(ads_pb2_grpc.AggregatedDiscoveryServiceServicer):  # type: ignore[misc]
    """Serves ADS and, on the same port, the access log service."""

    def __init__(
        self,
        *,
        host: str = "0.0.0.0",  # noqa: S104
        port: int = 18000,
        tls: TlsFiles | None = None,
        gateway_address: tuple[str, int] = ("0.0.0.0", 8080),  # noqa: S104
        on_quarantine: Callable[[str, str], None] = lambda name, message: None,
        on_record: Callable[[AccessRecord], None] = lambda record: None,
        ttl_seconds: float = 15,
    ) -> None:
        self._bind = (host, port)
        self._tls = tls
        self._gateway_address = gateway_address
        self._on_quarantine = on_quarantine
        self._ttl = ttl_seconds
        self._access_log = AccessLog(on_record)
        self._admission = Admission()
        self._target: Snapshot | None = None
        self._shape: GatewayState | None = None
        self._moving_since: float | None = None
        """Since when routes are on their way that no gateway has taken yet."""
        self._sessions: set[Session] = set()
        self._acked: dict[str, frozenset[Endpoint]] | None = None
        self._news = asyncio.Condition()
        self._tasks: set[asyncio.Task[None]] = set()
        self._server: grpc.aio.Server | None = None

    @property
    def losses(self) -> Losses:
        """How complete the access records are."""
        return self._access_log.losses

    @property
    def quarantined(self) -> dict[str, str]:
        """``kind/name`` of every object held back, with the reason."""
        return {f"{kind}/{name}": message for (kind, name), message in self._admission.held_back.items()}

    @property
    def num_gateways(self) -> int:
        """Connected gateways."""
        return len(self._sessions)

    async def start(self) -> int:
        """Listen; returns the port."""
        # Gateways are few and long-lived; a dead peer must be noticed within seconds, or Ready would lie.
        self._server = grpc.aio.server(
            options=[
                ("grpc.keepalive_time_ms", 5_000),
                ("grpc.keepalive_timeout_ms", 3_000),
                ("grpc.http2.min_ping_interval_without_data_ms", 1_000),
                ("grpc.keepalive_permit_without_calls", 1),
                ("grpc.http2.max_ping_strikes", 0),
                ("grpc.so_reuseport", 0),
                ("grpc.max_receive_message_length", 64 << 20),
                ("grpc.max_send_message_length", 256 << 20),
            ]
        )
        ads_pb2_grpc.add_AggregatedDiscoveryServiceServicer_to_server(self, self._server)
        als_pb2_grpc.add_AccessLogServiceServicer_to_server(self._access_log, self._server)
        where = f"{self._bind[0]}:{self._bind[1]}"
        credentials = await asyncio.to_thread(_credentials, self._tls) if self._tls else None
        port = (
            self._server.add_secure_port(where, credentials)
            if credentials
            else self._server.add_insecure_port(where)
        )
        await self._server.start()
        self._spawn(self._heartbeats())
        return int(port)

    async def stop(self) -> None:
        """Hang up. Gateways keep what they have; weights return to stable when their TTL has run out."""
        for task in self._tasks:
            task.cancel()
        if self._server:
            await self._server.stop(grace=0)

    async def push(self, state: GatewayState) -> PushResult:
        """Make this the wanted state of all gateways, present and future."""
        before = self._target
        for (kind, name), message in self._admission.want(state):
            self._on_quarantine(f"{kind}/{name}", message)
        target = self._retarget()
        versions = {kind: target.version(kind) for kind in TYPES}
        return PushResult(
            versions,
            frozenset(kind for kind in TYPES if before is None or before.version(kind) != versions[kind]),
            self.quarantined,
            len(self._sessions),
        )

    async def wait_in_force(self, timeout: float, *, weights_only: bool = False) -> InForce:  # noqa: ASYNC109
        """Wait until every connected gateway (at least one) has acknowledged all, or just the weights."""

        def done() -> bool:
            sessions = self._sessions
            held = bool(self._admission.held) and not weights_only
            return (
                bool(sessions)
                and not held
                and all(s.has(RTDS) if weights_only else s.in_force() for s in sessions)
            )

        try:
            async with asyncio.timeout(timeout), self._news:
                await self._news.wait_for(done)
        except TimeoutError:
            return InForce(False, len(self._sessions), self.quarantined)
        return InForce(True, len(self._sessions), self.quarantined)

    def acked_clusters(self) -> dict[str, frozenset[Endpoint]]:
        """Clusters that every connected gateway has acknowledged, with the endpoints that all have."""
        if self._acked is None:
            views = [session.endpoints() for session in self._sessions]
            names = set.intersection(*(set(view) for view in views)) if views else set()
            self._acked = {name: frozenset.intersection(*(view[name] for view in views)) for name in names}
        return self._acked

    async def StreamAggregatedResources(
        self, requests: AsyncIterator[Any], context: grpc.aio.ServicerContext[Any, Any]
    ) -> AsyncIterator[Any]:
        """One gateway, until it hangs up."""
        session = Session(self._target or build(GatewayState()), self._ttl)
        reader = asyncio.create_task(self._read(session, requests))
        try:
            while (response := await session.outbox.get()) is not None:
                yield response
        finally:
            reader.cancel()
            self._sessions.discard(session)
            await self._tell()

    async def _read(self, session: Session, requests: AsyncIterator[Any]) -> None:
        try:
            async for request in requests:
                if session not in self._sessions:
                    session.target = self._target or session.target
                    self._sessions.add(session)
                refused = session.receive(request)
                if refused:
                    self._refused(session, request.type_url, refused)
                elif self._target is not None:
                    session.advance()
                    self._accepted(session)
                await self._tell()
        finally:
            session.outbox.put_nowait(None)

    def _accepted(self, session: Session) -> None:
        target = self._target
        if (
            target is None
            or session.target is not target
            or not all(session.has(kind) for kind in (ECDS, LDS, RDS))
        ):
            return
        self._moving_since = None
        if target.state != self._admission.accepted:
            self._admission.accept(target.state)
            self._retarget()

    def _refused(self, session: Session, kind: str, sent: Sent) -> None:
        log.warning("gateway %s refused %s: %s", session.node, kind.rsplit(".", 1)[-1], sent.refused)
        if self._target is None or sent.version != session.wanted(kind)[0]:
            session.advance()
            return
        culprit = self._admission.refuse(sent.snapshot.state, kind, sent.refused)
        if culprit:
            self._on_quarantine(f"{culprit[0]}/{culprit[1]}", sent.refused)
        self._retarget()

    def _retarget(self) -> Snapshot:
        admitted = self._admission.admitted()
        shape = replace(admitted, policies=tuple(map(policy_without_weights, admitted.policies)))
        address, port = self._gateway_address
        if self._target is not None and shape == self._shape:
            target = Snapshot(admitted, {**self._target.resources, RTDS: self._layer(admitted)})
        else:
            self._moving_since = self._moving_since or time.monotonic()
            built = build(admitted, address=address, port=port)
            target = Snapshot(admitted, {**built.resources, RTDS: self._layer(admitted)})
        self._target, self._shape = target, shape
        for session in self._sessions:
            session.target = target
            session.advance()
        return target

    def _layer(self, admitted: GatewayState) -> dict[str, Resource]:
        """Weights for the routes on their way and for those still in force."""
        leaving = self._moving_since is not None and time.monotonic() - self._moving_since < PATIENCE_S
        message = build_runtime(self._admission.desired, self._admission.accepted, leaving)
        message.layer.update(build_runtime(self._admission.desired, admitted).layer)
        return {LAYER: Resource(message)}

    async def _heartbeats(self) -> None:
        while True:
            await asyncio.sleep(self._ttl / 3)
            if self._target is not None and self._target.state != self._admission.accepted:
                self._retarget()
            for session in self._sessions:
                session.heartbeat()

    async def _tell(self) -> None:
        self._acked = None
        async with self._news:
            self._news.notify_all()

    def _spawn(self, work: Any) -> None:
        task = asyncio.create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)


def _credentials(tls: TlsFiles) -> Any:
    def read() -> Any:
        key, certificate, authority = (p.read_bytes() for p in (tls.key, tls.certificate, tls.authority))
        return grpc.ssl_server_certificate_configuration([(key, certificate)], root_certificates=authority)

    # Read at each handshake, so that a renewed certificate holds without a restart.
    return grpc.dynamic_ssl_server_credentials(read(), read, require_client_authentication=True)
