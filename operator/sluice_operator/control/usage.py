"""What the replicas of two arms cost while an attempt was under way, idle time included.

Seen once a decision, and summed over the time between. A restart of the operator begins anew, so hours are a
lower bound then.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from decimal import Decimal

from ..api.releaserecord import ArmEvidence
from ..gates.observation import ArmName

_GAP_S = 60.0
"""Longer than this nobody was looking."""


@dataclass
class _Arm:
    seen_at: float | None = None
    replica_s: float = 0.0
    peak_kv_percent: int = 0


@dataclass
class Usage:
    """Of one attempt."""

    _arms: dict[str, _Arm] = field(default_factory=lambda: {arm.value: _Arm() for arm in ArmName})

    def see(self, arm: str, num_replicas: int, kv_percent: int, now: float) -> None:
        """Replicas that serve now, and how full the fullest KV cache is."""
        kept = self._arms[arm]
        if kept.seen_at is not None and 0 < now - kept.seen_at <= _GAP_S:
            kept.replica_s += num_replicas * (now - kept.seen_at)
        kept.seen_at = now
        kept.peak_kv_percent = max(kept.peak_kv_percent, kv_percent)

    def told(
        self, stable: ArmEvidence, candidate: ArmEvidence, prices: Mapping[str, tuple[str, str]]
    ) -> tuple[ArmEvidence, ArmEvidence]:
        """The evidence of both arms with what they used; prices are per replica and hour, with currency."""
        return (
            self._told("stable", stable, prices.get("stable")),
            self._told("candidate", candidate, prices.get("candidate")),
        )

    def _told(self, arm: str, evidence: ArmEvidence, price: tuple[str, str] | None) -> ArmEvidence:
        kept = self._arms[arm]
        hours = Decimal(str(round(kept.replica_s / 3600, 6)))
        found: dict[str, object] = {
            "replica_hours": _text(hours),
            "peak_kv_percent": kept.peak_kv_percent,
        }
        if price is not None:
            cost = hours * Decimal(price[0])
            found |= {"cost": _text(cost), "currency": price[1]}
            succeeded = evidence.num_requests - evidence.counts.get("Unsuccessful", 0)
            if succeeded > 0:
                found["cost_per_success"] = _text((cost / succeeded).quantize(Decimal("1e-8")))
        return evidence.model_copy(update=found)


def _text(value: Decimal) -> str:
    return f"{value.normalize():f}"
