"""What one gateway's stream makes of answers, without a gateway."""

from __future__ import annotations

from envoy.service.discovery.v3 import discovery_pb2

from sluice_operator.xds.build import build
from sluice_operator.xds.messages import RDS
from sluice_operator.xds.session import MESSAGE_LENGTH, Sent, Session
from sluice_operator.xds.state import GatewayState, Tenant


def test_what_envoy_quotes_shows_no_secret() -> None:
    """Envoy's refusals quote the configuration; they go to logs and into statuses."""
    tenant = Tenant("t", "d", api_keys=("the-key", "the-key-2"))
    state = GatewayState(tenants=(tenant,), credential="between-us")
    session = Session(build(state), 15)
    session.sent[RDS] = Sent("1", session.target, {}, nonce="n")
    request = discovery_pb2.DiscoveryRequest(type_url=RDS, response_nonce="n")
    request.error_detail.message = "x" * (MESSAGE_LENGTH - 4) + "the-key, the-key-2, between-us: too long"
    refused = session.receive(request)
    assert refused is not None
    assert "the" not in refused.refused
    request.error_detail.message = "the-key-2 between-us"
    assert session.receive(request).refused == "[redacted] [redacted]"  # type: ignore[union-attr]
