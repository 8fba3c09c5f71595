"""What may differ between two arms of the same backend: feature switches and sampling defaults."""

from __future__ import annotations

from pydantic import Field

from .common import Decimal, DnsLabel, Spec
from .declare import SET, Cel, validations


class Features(Spec):
    """Switches that need no restart. Absent means the default."""

    prefix_cache: bool | None = None
    """Reuse of cached prompt prefixes within the cache scope; default on."""
    speculation: bool | None = None
    """Speculative decoding, where the backend has it; default on."""
    direct_streaming: bool | None = None
    """Answers are streamed as the contract's streaming says; default on. Off: each is held until it is whole
    and has passed the contract, as with streaming Verified."""


class Sampling(Spec):
    """Defaults for what a request leaves open."""

    temperature: Decimal | None = Field(
        default=None,
        json_schema_extra=validations(
            Cel("double(self) <= 2.0", "temperature must be from 0 to 2, as a string such as '0.7'")
        ),
    )
    """Temperature, 0 to 2; 0 is greedy. A string, such as "0.7"."""
    top_p: Decimal | None = Field(
        default=None,
        json_schema_extra=validations(
            Cel(
                "double(self) > 0.0 && double(self) <= 1.0",
                "topP must be above 0 and at most 1, as a string such as '0.9'",
            )
        ),
    )
    """Nucleus mass, above 0 to 1. A string, such as "0.9"."""
    max_tokens: int | None = Field(default=None, ge=1, le=1_048_576)
    """Length of the answer, in tokens."""


class Switch(Spec):
    """Features switched for some requests, whatever their arm: in force in seconds, without a restart."""

    features: Features = Field(json_schema_extra={"minProperties": 1})
    """What is switched; what is left out stays as the arm has it."""
    tasks: list[DnsLabel] = Field(default_factory=list, max_length=32, json_schema_extra=SET)
    """For requests of these tasks; absent: of any."""
    tenants: list[DnsLabel] = Field(default_factory=list, max_length=256, json_schema_extra=SET)
    """For requests of these tenants; absent: of any."""
