"""Who has a place, running or in the queue, and who loses it to a newcomer when all are taken; exists so that
a tenant's flood fills its own part of the queue and nobody else's.

Longest queue drop (McKenney, "Stochastic fairness queueing", INFOCOM 1990; Suter et al., "Buffer management
schemes for supporting TCP in gigabit routers with per-flow queueing", JSAC 1999): the tenant with the most in
the queue for its weight, the newcomer counted in, loses its youngest. Nothing is reserved, so a tenant alone
has the whole queue.

    6 places wait    A A A A A A
    B comes          A A A A A B      A's youngest is refused
    B comes thrice   A A A B B B      the third itself: B has as much as A

Invariant: there are never more than so many requests, and whoever has no more than its part of the queue by
weight neither is refused nor loses anything while another has more than that and can lose it. What has
started, or has shown something, stays.

Pure: whoever calls sees to it that one thread does at a time.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable

from sluice_runtime.engine.types import EngineRequest, QueueFull


class Places:
    """`num_places` are those that can run and those of the queue."""

    def __init__(self, num_places: int) -> None:
        self._num_places = num_places
        self._waiting: dict[str, EngineRequest] = {}  # in order of arrival
        self._started: set[str] = set()

    def __len__(self) -> int:
        return len(self._waiting) + len(self._started)

    @property
    def num_waiting(self) -> int:
        """Those that have not started yet."""
        return len(self._waiting)

    def take(self, request: EngineRequest) -> str | None:
        """Give a new request a place. Returns the id of the request that lost it to this one, if one had to.
        Raises `QueueFull`."""
        loser = None
        if len(self) >= self._num_places:
            loser = self._loser(request)
            if loser is None:
                raise QueueFull(self.num_waiting)
            del self._waiting[loser]
        self._waiting[request.request_id] = request
        return loser

    def start(self, request_ids: Iterable[str]) -> None:
        """They begin to run, and can't lose their places any more."""
        for request_id in request_ids:
            if self._waiting.pop(request_id, None) is not None:
                self._started.add(request_id)

    def leave(self, request_id: str) -> None:
        """It is over; does nothing for who has no place."""
        self._waiting.pop(request_id, None)
        self._started.discard(request_id)

    def _loser(self, newcomer: EngineRequest) -> str | None:
        """Whose place a newcomer may have; None if it is the newcomer that is too much."""
        if newcomer.priority < 0:
            return None  # nobody waits for it
        waiting = self._waiting.values()
        weights = {request.tenant: request.weight for request in waiting}
        held = Counter(request.tenant for request in waiting)
        lengths = {tenant: num / weights[tenant] for tenant, num in held.items()}
        own = (held[newcomer.tenant] + 1) / newcomer.weight
        candidates = [
            (lengths[request.tenant], -request.priority, arrival, request.request_id)
            for arrival, request in enumerate(waiting)
            if request.tenant != newcomer.tenant and lengths[request.tenant] > own and not request.keeps_place
        ]
        return max(candidates)[-1] if candidates else None
