"""Who is served next, and how a step's tokens are divided; exists so that a tenant's load is its own trouble.

A virtual token counter for each tenant (Sheng et al., "Fairness in Serving Large Language Models", arXiv
2401.00588): tokens computed for it, divided by its weight. Whoever has the smallest goes first. Two changes:
what an admitted request is expected to need is charged at once and settled as it comes (else the tenant with
the smallest counter takes every slot that falls free, and shares swing); prefixes found in the cache and
recomputation after a preemption cost nothing.

    A  ████████████░░░░     ░ prepaid: prompts and the expected answers of what runs
    B  ██████░░             B is next

A tenant that comes back from idleness is level with the least served one that waits, less a credit of
`burst_tokens`: it can't save up the right to shut out others, and its first prompts go before theirs.

Ageing: a tenant that waited `max_wait_s` without an admission goes first, whatever its counter says. It is
the tenant that ages, not each of its requests: a flood would be old within seconds and be back at first come,
first served. Invariant: within a tenant nobody is overtaken.

A tenant with as many requests running as it may (`max_running`) waits for itself: it neither ages nor saves
up, and who comes back from idleness is not measured by it. When it may go on, it is as if back from idleness.

Pure: no clock, no randomness; the time is an argument.
"""

from __future__ import annotations

from bisect import insort
from collections.abc import Collection, Iterator, Mapping, Sequence
from dataclasses import dataclass, field

from sluice_runtime.engine.plan import RequestState

DEFAULT_MAX_WAIT_S = 30.0
DEFAULT_BURST_TOKENS = 1024
_FIRST_GUESS = 64.0
"""Output tokens expected of a tenant that has finished nothing yet."""
_MEMORY = 0.1
"""Weight of the latest answer in a tenant's mean answer length."""


@dataclass(slots=True)
class _Tenant:
    """`served` tokens over weight, lifted on return from idleness; `prepaid` likewise, not yet computed."""

    served: float = 0.0
    prepaid: float = 0.0
    mean_output: float | None = None
    weight: float = 1.0
    waiting: list[RequestState] = field(default_factory=list)
    waits_since: float | None = None
    at_cap: bool = False

    @property
    def competes(self) -> bool:
        """Whether something waits for others, not for the tenant's own cap."""
        return bool(self.waiting) and not self.at_cap

    @property
    def counter(self) -> float:
        return self.served + self.prepaid


class FairQueue:
    """Requests that wait, by tenant, and the counters of all tenants with something here."""

    def __init__(
        self, max_wait_s: float = DEFAULT_MAX_WAIT_S, burst_tokens: float = DEFAULT_BURST_TOKENS
    ) -> None:
        self._max_wait_s = max_wait_s
        self._burst_tokens = burst_tokens
        self._tenants: dict[str, _Tenant] = {}
        self._idle: dict[str, None] = {}
        self._floor = 0.0
        self._num_waiting = 0

    def __len__(self) -> int:
        return self._num_waiting

    def __iter__(self) -> Iterator[RequestState]:
        return (state for tenant in self._tenants.values() for state in tenant.waiting)

    def tenants(self) -> Collection[str]:
        """Those with something waiting."""
        return [name for name, tenant in self._tenants.items() if tenant.waiting]

    def weight(self, name: str) -> float:
        return self._tenants[name].weight

    def counter(self, name: str) -> float:
        """Weighted tokens, what is prepaid included."""
        return self._tenants[name].counter

    def served(self, name: str) -> float:
        """Weighted tokens that were computed."""
        return self._tenants[name].served

    def add(self, state: RequestState) -> None:
        """A new request. A tenant that had nothing waiting is behind the least served one that has by its
        burst at most."""
        tenant = self._tenants.setdefault(state.tenant, _Tenant())
        tenant.weight = state.request.weight
        self._idle.pop(state.tenant, None)
        if not tenant.waiting:
            self._level(tenant)
        self._put(tenant, state)

    def _level(self, tenant: _Tenant) -> None:
        floor = self._least_waiting() - self._burst_tokens / tenant.weight
        tenant.served = max(tenant.served, floor)

    def hold(self, num_running: Mapping[str, int]) -> None:
        """Hold back tenants whose next request would be one more than may run at once. `num_running`: of each
        tenant, requests with a cap."""
        for name, tenant in self._tenants.items():
            most = tenant.waiting[0].request.max_running if tenant.waiting else None
            at_cap = most is not None and num_running.get(name, 0) >= most
            if at_cap:
                tenant.waits_since = None
            elif tenant.at_cap:
                self._level(tenant)
            tenant.at_cap = at_cap

    def put_back(self, state: RequestState) -> None:
        """A preempted request, in its order of arrival; it stays charged."""
        self._put(self._tenants[state.tenant], state)

    def _put(self, tenant: _Tenant, state: RequestState) -> None:
        insort(tenant.waiting, state, key=lambda s: s.arrival)
        self._num_waiting += 1

    def find(self, request_id: str) -> RequestState | None:
        return next((state for state in self if state.request_id == request_id), None)

    def remove(self, state: RequestState) -> None:
        """Take a request out, whatever for."""
        tenant = self._tenants[state.tenant]
        tenant.waiting.remove(state)
        self._num_waiting -= 1
        if not tenant.waiting:
            tenant.waits_since = None
            self._floor = tenant.served

    def start_waiting(self, now: float) -> None:
        """Note the time for tenants that have begun to wait since the last step."""
        for tenant in self._tenants.values():
            if tenant.competes and tenant.waits_since is None:
                tenant.waits_since = now

    def next(self, now: float, skipped: Collection[str]) -> RequestState | None:
        """The request to admit next, of tenants neither `skipped` nor held: those that were preempted, oldest
        first; then tenants that have aged; then the least served."""
        heads = [(t, t.waiting[0]) for name, t in self._tenants.items() if t.competes and name not in skipped]
        if not heads:
            return None

        def rank(entry: tuple[_Tenant, RequestState]) -> tuple[float, ...]:
            tenant, head = entry
            if head.num_preemptions:
                return (0, head.arrival)
            if self._has_aged(tenant, now):
                return (1, tenant.waits_since or now, head.arrival)
            return (2, tenant.counter, head.arrival)

        return min(heads, key=rank)[1]

    def insists(self, state: RequestState, now: float) -> bool:
        """Whether nobody may pass this head of a tenant while it does not fit."""
        return state.num_preemptions > 0 or self._has_aged(self._tenants[state.tenant], now)

    def _has_aged(self, tenant: _Tenant, now: float) -> bool:
        return tenant.waits_since is not None and now - tenant.waits_since >= self._max_wait_s

    def admitted(self, state: RequestState, num_prompt_tokens: int, now: float) -> None:
        """It leaves the queue. Charge in advance `num_prompt_tokens` that have to be computed and, the first
        time, the answer it is expected to give."""
        tenant = self._tenants[state.tenant]
        self.remove(state)
        if tenant.waiting:
            tenant.waits_since = now
        if state.num_preemptions == 0:
            guess = _FIRST_GUESS if tenant.mean_output is None else tenant.mean_output
            state.prepaid = num_prompt_tokens + min(guess, state.request.sampling.max_tokens)
            tenant.prepaid += state.prepaid / state.request.weight

    def computed(self, state: RequestState, num_tokens: int) -> None:
        """Tokens were computed for it, for the first time: settle what was prepaid, charge what is beyond."""
        tenant, weight = self._tenants[state.tenant], state.request.weight
        settled = min(state.prepaid, num_tokens)
        state.prepaid -= settled
        tenant.prepaid -= settled / weight
        tenant.served += num_tokens / weight

    def ended(self, state: RequestState, num_others: int) -> None:
        """It is over and out of the queue: refund what was prepaid, and learn how long answers are.
        `num_others` of its tenant still run."""
        tenant = self._tenants[state.tenant]
        tenant.prepaid -= state.prepaid / state.request.weight
        state.prepaid = 0.0
        if state.num_output_tokens:
            known = tenant.mean_output
            latest = float(state.num_output_tokens)
            tenant.mean_output = latest if known is None else known + _MEMORY * (latest - known)
        if not num_others and not tenant.waiting:
            tenant.prepaid = 0.0  # what rounding left
            self._idle[state.tenant] = None
        self._forget()

    def _forget(self) -> None:
        """Drop tenants with nothing here whose counter says nothing any more. What they owe is kept, unless
        nobody is left to owe it to."""
        if len(self._idle) == len(self._tenants):
            self._idle.clear()
            self._tenants.clear()
            self._floor = 0.0
            return
        floor = self._least_waiting() - self._burst_tokens
        for name in [name for name in self._idle if self._tenants[name].served <= floor]:
            del self._idle[name], self._tenants[name]

    def _least_waiting(self) -> float:
        return min((t.served for t in self._tenants.values() if t.competes), default=self._floor)

    def check_integrity(self, running: Sequence[RequestState]) -> None:
        """Raise AssertionError unless what is prepaid is that of the requests here."""
        assert self._num_waiting == sum(len(t.waiting) for t in self._tenants.values())
        for name, tenant in self._tenants.items():
            own = [s for s in (*running, *tenant.waiting) if s.tenant == name]
            prepaid = sum(s.prepaid / s.request.weight for s in own)
            assert abs(prepaid - tenant.prepaid) < 1e-3 * max(1.0, prepaid), f"{name}: prepaid is off"
            arrivals = [s.arrival for s in tenant.waiting]
            assert arrivals == sorted(arrivals), f"{name}: somebody was overtaken"
            assert tenant.waits_since is None or tenant.waiting, f"{name} waits for nothing"
            assert (name in self._idle) == (not own), f"{name}: wrongly (not) idle"


@dataclass(frozen=True, slots=True)
class Demand:
    """Tokens that a tenant's prompts lack; `served` as in the queue."""

    tenant: str
    num_tokens: int
    weight: float
    served: float


def split(budget: int, demands: Sequence[Demand]) -> dict[str, int]:
    """Divide `budget` tokens: a quarter by weight, so that every tenant moves on; the rest to
    the least served first. The first gets at least one.

    >>> split(100, [Demand("long", 4000, 1.0, served=500.0), Demand("short", 60, 1.0, served=20.0)])
    {'long': 40, 'short': 60}
    """
    given = _by_weight(min(budget, -(-budget // 4)), demands)
    left = budget - sum(given.values())
    for demand in sorted(demands, key=lambda d: d.served):
        part = min(left, demand.num_tokens - given[demand.tenant])
        given[demand.tenant] += part
        left -= part
    return given


def _by_weight(budget: int, demands: Sequence[Demand]) -> dict[str, int]:
    """By weight; what one does not need goes to the others."""
    given = {demand.tenant: 0 for demand in demands}
    open_ = [demand for demand in demands if demand.num_tokens > 0]
    while budget > 0 and open_:
        round_budget, total = budget, sum(demand.weight for demand in open_)
        for demand in open_:
            part = max(1, int(round_budget * demand.weight / total))
            part = min(part, budget, demand.num_tokens - given[demand.tenant])
            given[demand.tenant] += part
            budget -= part
        open_ = [demand for demand in open_ if given[demand.tenant] < demand.num_tokens]
    return given
