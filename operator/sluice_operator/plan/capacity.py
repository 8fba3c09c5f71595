"""What a candidate can be sent: tested safe throughput and Little's law.

`safe` is what one replica carried within the SLO (`sluice calibrate`), never where it collapsed. Example:
20 requests/s at weight 50 are 10/s for the candidate; replicas that safely take 4/s each: three are needed.
"""

from __future__ import annotations

import math

from .scope import Eligibility
from .situation import World

_ROUNDING = 1e-9
"""10/s at 2.5/s each are four replicas, not five because of a last bit."""


def replicas_for(rate: float, safe: float) -> int:
    """Replicas that carry `rate` requests/s at `safe` requests/s each; at least one."""
    if safe <= 0:
        raise ValueError(f"safe throughput must be above 0, not {safe}")
    return max(1, math.ceil(rate / safe - _ROUNDING))


def in_flight(rate: float, mean_seconds: float) -> float:
    """Requests in the system at once: L = λW (Little, Operations Research 9(3), 1961)."""
    return rate * mean_seconds


def candidate_rate(world: World, percent: int, who: Eligibility) -> float:
    """Requests/s that the candidate gets of those eligible; 0: unknown.

    Without rates by slice all of the rule's requests count, which errs towards too small.
    """
    rate = world.request_rate
    if world.slice_rates:
        rate = sum(rate for (task, tenant), rate in world.slice_rates.items() if who.allows(task, tenant))
    return rate * percent / 100


def shortage(world: World, percent: int, who: Eligibility) -> str:
    """Why `percent` of the eligible requests are more than the candidate safely takes, with what would do;
    empty: they are not, or it is not known."""
    rate = candidate_rate(world, percent, who)
    if world.safe_rate is None or world.safe_rate <= 0 or rate <= 0:
        return ""
    safe = world.safe_rate * world.ready_replicas
    if rate <= safe + _ROUNDING:
        return ""
    needed = replicas_for(rate, world.safe_rate)
    law = ""
    if world.mean_seconds > 0:
        law = f"; by Little's law {in_flight(rate, world.mean_seconds):.3g} requests are then in flight"
    return (
        f"{percent} % of the traffic are {rate:.3g} requests/s, and {world.ready_replicas} ready replica(s)"
        f" safely take {safe:.3g}/s: scale the candidate to {needed}{law}"
    )


def rollback_cost(world: World, percent: int, who: Eligibility, cached: float) -> str:
    """What it costs to take `percent` of the eligible requests back from a candidate of another backend, for
    people: the load that the target gets, and caches that are cold there. Empty: nothing, or not known.
    `cached`: share of the candidate's prompt tokens that its prefix cache had."""
    stable, candidate = world.arms.stable.backend, world.arms.candidate
    if percent == 0 or candidate is None or candidate.backend == stable:
        return ""
    parts = []
    more = candidate_rate(world, percent, who)
    if more > 0:
        parts.append(overload(world) or f"{stable} gets {more:.3g} requests/s more{_room(world)}")
    if cached >= 0.01:
        share = f"{100 * cached:.0f} % of the candidate's prompt tokens come from its cache"
        parts.append(f"{share}, which is cold at the target")
    return "; ".join(parts)


def overload(world: World) -> str:
    """Why the target would be sent more than it safely takes, with what would do; empty: it would not, or it
    is not known."""
    stable, safe, rate = world.arms.stable.backend, world.stable_safe_rate, world.request_rate
    if safe is None or safe <= 0 or rate <= safe * world.stable_replicas + _ROUNDING:
        return ""
    return (
        f"{stable} gets {rate:.3g} requests/s in all, and its {world.stable_replicas} ready replica(s) safely"
        f" take {safe * world.stable_replicas:.3g}/s: scale it to {replicas_for(rate, safe)}"
    )


def _room(world: World) -> str:
    if world.stable_safe_rate is None:
        return f", and what it safely takes was not measured ({world.stable_replicas} ready replica(s))"
    safe = world.stable_safe_rate * world.stable_replicas
    return f", {world.request_rate:.3g} in all, of {safe:.3g} that it safely takes"
