"""What others say of a request's time before it came here: the gateway, and the application that asks.

It is for people who look for slowness, and nothing is decided by it. Invariant: of what an application says
only seconds leave this module, under names of `STAGES`: neither text nor new series can come in by it.
"""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass, field
from types import MappingProxyType

STAGES = ("retrieval", "rerank", "tool-wait", "other")
MAX_STAGES = 16
MAX_AGE_S = 86_400.0
_SKEW_S = 5.0
_NUMBER = re.compile(r"[0-9]{1,12}(\.[0-9]{1,9})?", re.ASCII)
_NAME = re.compile(r"[a-z*][a-z0-9_.*-]{0,63}", re.ASCII)


class BadReport(ValueError):
    """A header that is not of its form; the message names it."""


@dataclass(frozen=True)
class Reported:
    """`gateway_time` and `user_time` in Unix seconds by the clocks of those who say so: when the gateway took
    the request, and when the user asked. `stages`: seconds, by names of `STAGES`."""

    gateway_time: float | None = None
    user_time: float | None = None
    stages: Mapping[str, float] = field(default_factory=lambda: MappingProxyType({}))

    def gateway_s(self, arrived: float) -> float | None:
        """Seconds from the gateway to here. `arrived` in Unix seconds."""
        return _since(self.gateway_time, arrived)

    def user_s(self, arrived: float) -> float | None:
        """Seconds from the user's asking to here."""
        return _since(self.user_time, arrived)


NOTHING = Reported()


def _since(then: float | None, now: float) -> float | None:
    """None where the clocks can't both be right."""
    if then is None or not -_SKEW_S <= now - then <= MAX_AGE_S:
        return None
    return max(0.0, now - then)


def parse_time(header: str, value: str) -> float | None:
    """Unix seconds, with or without a fraction. BadReport names the header."""
    if not value:
        return None
    if not _NUMBER.fullmatch(value):
        raise BadReport(f"{header} must be Unix seconds, such as 1764520000.25.")
    return float(value)


def parse_stages(header: str, value: str) -> Mapping[str, float]:
    """`retrieval=0.12, rerank=0.03`: a dictionary of decimals (RFC 9651) in seconds; names that are not ours
    are counted together as `other`. BadReport names the header."""
    if not value.strip():
        return NOTHING.stages
    members = value.split(",")
    found: dict[str, float] = {}
    for member in members:
        name, _, seconds = member.strip(" \t").partition("=")
        if not (_NAME.fullmatch(name) and _NUMBER.fullmatch(seconds)) or float(seconds) > MAX_AGE_S:
            raise BadReport(
                f"{header} must be names with seconds, such as retrieval=0.12, rerank=0.03;"
                f" each at most {MAX_AGE_S:g}."
            )
        name = name if name in STAGES else "other"
        found[name] = found.get(name, 0.0) + float(seconds)
    if len(members) > MAX_STAGES:
        raise BadReport(f"{header} has more than {MAX_STAGES} members.")
    return MappingProxyType(found)
