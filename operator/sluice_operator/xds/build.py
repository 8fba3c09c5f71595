"""From what the gateway shall do to what Envoy is told: a pure, deterministic function.

Equal states give equal resources, byte for byte; a change of weights alone changes nothing but the runtime
layer.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from functools import cached_property

from .clusters import build_clusters, build_endpoints
from .identity import build_identity
from .listener import LISTENER, build_listener
from .messages import CDS, ECDS, EDS, LDS, RDS, RTDS, Message, Resources, digest
from .routes import ROUTES, build_routes
from .runtime import LAYER, build_runtime
from .state import GatewayState


@dataclass(frozen=True)
class Resource:
    """One resource and its bytes."""

    message: Message = field(repr=False)

    @cached_property
    def data(self) -> bytes:
        """Deterministic serialisation."""
        return bytes(self.message.SerializeToString(deterministic=True))


@dataclass(frozen=True)
class Snapshot:
    """All resources, by type and name, and the state that they speak of."""

    state: GatewayState = field(repr=False)
    resources: Mapping[str, Mapping[str, Resource]] = field(repr=False)

    def version(self, type_url: str) -> str:
        """Name of the content of one type."""
        return digest(
            part for name, r in sorted(self.resources[type_url].items()) for part in (name.encode(), r.data)
        )


def build(
    in_force: GatewayState,
    desired: GatewayState | None = None,
    *,
    address: str = "0.0.0.0",  # noqa: S104
    port: int = 8080,
) -> Snapshot:
    """Resources for a state; weights come from ``desired`` where that differs (see ``runtime``)."""
    return Snapshot(
        in_force,
        {
            CDS: _wrap(build_clusters(in_force)),
            EDS: _wrap(build_endpoints(in_force)),
            ECDS: _wrap(build_identity(in_force)),
            LDS: _wrap({LISTENER: build_listener(in_force, address, port)}),
            RDS: _wrap({ROUTES: build_routes(in_force)}),
            RTDS: _wrap({LAYER: build_runtime(desired or in_force, in_force)}),
        },
    )


def _wrap(messages: Resources) -> dict[str, Resource]:
    return {name: Resource(messages[name]) for name in sorted(messages)}
