"""Whose KV goes when there is not enough, or when somebody has more than a fair share. Pure choices:
nothing here changes anything.

KV is kept by value: what runs, before what is cached (blocks.py evicts that first). Of what runs, a low
priority gives way first, then a low weight, then the youngest. Invariant: the oldest running request is never
chosen, whoever asks. It therefore ends, then the next oldest is the oldest: preemption never goes in circles.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Sequence
from dataclasses import dataclass

from sluice_runtime.engine.plan import RequestState


def by_value(running: Collection[RequestState]) -> list[RequestState]:
    """Running requests, the most valuable first: the oldest, then by priority, weight and age."""
    if not running:
        return []
    oldest = min(running, key=lambda s: s.arrival)
    rest = [state for state in running if state is not oldest]
    return [oldest, *sorted(rest, key=lambda s: (-s.request.priority, -s.request.weight, s.arrival))]


@dataclass(frozen=True, slots=True)
class Shares:
    """What tenants hold of a resource with `capacity` units, beside what is fair.

    Fair is `capacity` by weight, rounded down, but never under `least`: of 16 slots each of 50 tenants may
    have one.
    """

    held: dict[str, int]
    fair: dict[str, int]

    @classmethod
    def of(cls, held: dict[str, int], weights: dict[str, float], capacity: int, least: int) -> Shares:
        total = sum(weights.values())
        return cls(held, {name: max(least, int(capacity * w / total)) for name, w in weights.items()})

    def may_have(self, tenant: str, more: int) -> bool:
        """Whether it is within its share with `more` units."""
        return self.held.get(tenant, 0) + more <= self.fair[tenant]

    def may_lose(self, tenant: str, units: int) -> bool:
        """Whether it still has its share without `units`: then nobody can take them back in turn."""
        return self.held.get(tenant, 0) - units >= self.fair[tenant]


def displaced(
    running: Sequence[RequestState],
    newcomer: str,
    *,
    slots: Shares | None,
    blocks: Shares | None,
    num_blocks_short: int,
    gain: Callable[[RequestState], int],
    less_served: Callable[[str], bool],
) -> list[RequestState] | None:
    """Requests of other tenants that make room for one of `newcomer`, which is within its own share; None if
    that can't be had fairly.

    `running` has the most valuable first. `slots` and `blocks` are given where that resource is short.
    `gain(state)`: blocks that its end would free. `less_served(tenant)`: the newcomer is behind that tenant.
    """
    chosen: list[RequestState] = []
    lost_slots: dict[str, int] = {}
    lost_blocks: dict[str, int] = {}
    num_blocks, want_slot = num_blocks_short, slots is not None
    for state in reversed(running[1:]):
        if num_blocks <= 0 and not want_slot:
            break
        tenant = state.tenant
        if tenant == newcomer or not less_served(tenant):
            continue
        num_slots = lost_slots.get(tenant, 0) + 1
        num_held = lost_blocks.get(tenant, 0) + len(state.block_table)
        if want_slot and slots is not None and not slots.may_lose(tenant, num_slots):
            continue
        if num_blocks > 0 and (blocks is None or not blocks.may_lose(tenant, num_held)):
            continue
        chosen.append(state)
        lost_slots[tenant], lost_blocks[tenant] = num_slots, num_held
        num_blocks -= gain(state)
        want_slot = False
    return chosen if num_blocks <= 0 and not want_slot else None
