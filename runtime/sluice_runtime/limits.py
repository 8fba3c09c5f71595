"""What tenants and this backend are limited to, as the operator told it, and when a request must have ended.

Kept apart from configurations: a version of those names what answers, and an edit of a tenant's weight must
move no route and restart no rollout. Invariant: the held set is replaced as a whole and by name alone; what a
client sends can only shorten its own time.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Annotated, Any

from pydantic import Field, ValidationError

from sluice_runtime.podconfig import Caps, Name, Rejected, StrictModel, invalid

MAX_TENANTS = 20_000
Positive = Annotated[int, Field(ge=1)]


class TenantLimits(Caps):
    """One tenant at one replica. `max_running` requests run at once and more wait; `max_in_flight` run or
    wait and one more is refused."""

    weight: Annotated[int, Field(ge=1, le=1000)] = 1
    max_running: Positive | None = Field(default=None, alias="maxRunning")
    max_in_flight: Positive | None = Field(default=None, alias="maxInFlight")
    max_context_tokens: Positive | None = Field(default=None, alias="maxContextTokens")
    max_seconds: Positive | None = Field(default=None, alias="maxSeconds")


class LimitSet(StrictModel):
    """docs/contracts/limits.schema.json as a type. A tenant that is not named has weight 1 and no caps."""

    version: Name
    backend: Caps
    tenants: Annotated[dict[Name, TenantLimits], Field(max_length=MAX_TENANTS)]


NO_LIMITS = TenantLimits()


class LimitStore:
    """The held set. Belongs to the event loop."""

    def __init__(self) -> None:
        self.version = ""
        self.backend = Caps()
        self._tenants: Mapping[str, TenantLimits] = MappingProxyType({})

    def of(self, tenant: str) -> TenantLimits:
        return self._tenants.get(tenant, NO_LIMITS)

    def replace(self, raw: Any) -> Rejected | None:
        """Hold this set from the next request on; if it is wrong, what was held stays."""
        try:
            told = LimitSet.model_validate(raw)
        except ValidationError as e:
            return invalid(raw, e, "limits")
        self.version, self.backend, self._tenants = told.version, told.backend, MappingProxyType(told.tenants)
        return None


def narrowest(*caps: Caps) -> Caps:
    """Of each cap the least that is set."""

    def least(values: list[int | None]) -> int | None:
        return min((v for v in values if v is not None), default=None)

    return Caps(
        maxInputTokens=least([c.max_input_tokens for c in caps]),
        maxOutputTokens=least([c.max_output_tokens for c in caps]),
    )


@dataclass(frozen=True, slots=True)
class Deadline:
    """`at` is in seconds of `time.monotonic`. `by_client`: nobody but the client asked for it to be so soon,
    so that what it cuts off is no failure of who answers."""

    at: float
    by_client: bool


def deadline(
    arrived: float, *, route_s: float | None, tenant_s: float | None, client_s: float | None
) -> Deadline | None:
    """When a request that arrived then must have ended; None: whenever it has.

    >>> deadline(100.0, route_s=30.0, tenant_s=None, client_s=2.5)
    Deadline(at=102.5, by_client=True)
    """
    ours = min((s for s in (route_s, tenant_s) if s is not None), default=None)
    if client_s is not None and (ours is None or client_s < ours):
        return Deadline(arrived + client_s, True)
    return None if ours is None else Deadline(arrived + ours, False)
