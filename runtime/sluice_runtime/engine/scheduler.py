"""Which tokens of which requests the next step computes. Pure: no torch, no clock, no randomness, no thread.

There is no prefill or decode phase. A request's `num_computed_tokens` catches up with its tokens; a step
gives each running request some of what it lacks, within one token budget:

    token_ids             [ p p p p p p p p p p | o o o ]        p: prompt, o: output
    num_computed_tokens   ────────────────────────────▶│        lacks 1: a decode step
                          ─────────▶│                            lacks 7: a chunk, or several

KV blocks are taken as tokens come and given back at once. When one is missing, cached blocks are evicted,
then the least valuable running request is preempted (preemption.py): it waits, keeps its tokens, and later
computes their KV again without anything being shown twice. Who is admitted next is fairness.py's to say.

Guesses of what comes next (speculation/) take only what is left of a step: no guess delays a prompt or
preempts anybody. They never enter `token_ids` before the model has confirmed them, and blocks that only wrong
ones reached are given back after the step.

Invariant: the oldest running request always moves on, so every load that `add` accepts is served in the end;
and no request holds a block beyond the positions it has computed or is computing.
"""

from __future__ import annotations

from collections import Counter, OrderedDict
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from types import MappingProxyType

from sluice_runtime.engine.blocks import BlockManager
from sluice_runtime.engine.fairness import DEFAULT_BURST_TOKENS, DEFAULT_MAX_WAIT_S, Demand, FairQueue, split
from sluice_runtime.engine.plan import RequestState, ScheduledChunk, SchedulerOutput, TokenEvent
from sluice_runtime.engine.preemption import Shares, by_value, displaced
from sluice_runtime.engine.prefix import find, publish
from sluice_runtime.engine.types import EngineRequest, FinishReason, RequestTooLong

_NO_DRAFTS: Mapping[str, Sequence[int]] = MappingProxyType({})
_BACKLOG_STEPS = 80
"""In about so many steps a burst of prompts is worked off, whatever the streams. With the few tokens that do
not stretch a step, its first requests would end before its last begin, so that hardly any ran together. All
steps are as long meanwhile, so the slowest tokens stay within twice the median."""
_LIGHT_EXTRA = 0.75
"""So much again a step may hold for prompts of a light tenant, where others' prompts stretch it anyway: from
1.8 to 2.4 times what its streams take, so that it stays below twice its neighbours."""
_MAX_TRIES = 8
"""Heads of tenants that are tried for room in one step: looking up a prefix costs time."""


@dataclass(slots=True)
class _Step:
    """A plan in the making."""

    budget: int
    chunks: dict[str, ScheduledChunk] = field(default_factory=dict)
    tried: set[str] = field(default_factory=set)
    admitted: list[str] = field(default_factory=list)
    resumed: list[str] = field(default_factory=list)
    preempted: list[RequestState] = field(default_factory=list)


@dataclass(frozen=True, slots=True)
class _Room:
    """What admitting a request takes: its cached `prefix`, what follows of it in `slots` of host memory, and
    how many blocks are missing for it."""

    prefix: list[int]
    slots: list[int]
    num_blocks: int
    num_short: int


class Scheduler:
    """Owns all request states and, through `blocks`, all KV. Not thread-safe: the engine's thread owns it."""

    def __init__(
        self,
        blocks: BlockManager,
        *,
        max_num_seqs: int,
        max_batch_tokens: int,
        max_model_len: int,
        eos_token_ids: frozenset[int] = frozenset(),
        max_wait_s: float = DEFAULT_MAX_WAIT_S,
        burst_tokens: float = DEFAULT_BURST_TOKENS,
    ) -> None:
        """`max_wait_s`: a tenant with nothing admitted for so long goes first. `burst_tokens`: the
        credit that idleness earns."""
        if max_batch_tokens < max_num_seqs:
            raise ValueError("max_batch_tokens below max_num_seqs would starve running requests")
        self.blocks = blocks
        self.max_num_seqs = max_num_seqs
        self.max_batch_tokens = max_batch_tokens
        self.max_model_len = min(max_model_len, blocks.num_blocks * blocks.block_size)
        self.eos_token_ids = eos_token_ids
        self.prefix_query_tokens_total = 0
        self.prefix_hit_tokens_total = 0
        self.num_preemptions_total = 0
        self.num_recomputed_tokens_total = 0
        self._num_arrivals = 0
        self._queue = FairQueue(max_wait_s, burst_tokens)
        self._running: OrderedDict[str, RequestState] = OrderedDict()

    @property
    def num_waiting(self) -> int:
        return len(self._queue)

    @property
    def num_running(self) -> int:
        return len(self._running)

    def running(self) -> Iterator[RequestState]:
        return iter(self._running.values())

    def get(self, request_id: str) -> RequestState | None:
        """The state of a request that has not ended."""
        return self._running.get(request_id) or self._queue.find(request_id)

    def add(self, request: EngineRequest) -> None:
        """Queue a request. Raises `RequestTooLong` if it could never be admitted. How many may wait is
        places.py's to say."""
        num_prompt, max_tokens = len(request.prompt_ids), request.sampling.max_tokens
        if num_prompt + max_tokens > self.max_model_len:
            raise RequestTooLong(num_prompt, max_tokens, self.max_model_len)
        self._num_arrivals += 1
        self._queue.add(RequestState(request, list(request.prompt_ids), self._num_arrivals))

    def finish(self, request_id: str) -> RequestState | None:
        """End a request, whatever its state, and give back its KV. None if it is unknown (ended already)."""
        state = self._running.pop(request_id, None)
        if state is not None:
            self._release(state)
        else:
            state = self._queue.find(request_id)
            if state is None:
                return None
            self._queue.remove(state)
        self._queue.ended(state, sum(1 for s in self._running.values() if s.tenant == state.tenant))
        return state

    def _release(self, state: RequestState) -> None:
        self.blocks.release(state.block_table)
        # A new list: plans that were handed out hold the old one.
        state.block_table = []

    def schedule(
        self,
        now: float,
        max_prompt_tokens: int | None = None,
        drafts: Mapping[str, Sequence[int]] = _NO_DRAFTS,
    ) -> SchedulerOutput:
        """Plan one step at monotonic time `now`: end what is past its deadline, then spend the token budget.
        `max_prompt_tokens`: at most so many of them for prompts where streams run too (rate.py), or an
        80th of all that could run, if that is more; and as many again, less a quarter, for prompts of a light
        tenant beside others'. `drafts`: what may come next in requests that lack one token; as much of it as
        there is room for is put to the test.

        Requests that lack one token come first, so that a long prompt never delays a running stream by more
        than one step; then admissions; then prompts, divided among tenants, oldest first within one.
        """
        expired = tuple(
            state.request_id
            for state in [*self._queue, *self._running.values()]
            if state.request.deadline is not None and now >= state.request.deadline
        )
        for request_id in expired:
            self.finish(request_id)
        self._hold_capped()
        self._queue.start_waiting(now)
        step = _Step(self.max_batch_tokens)
        for state in by_value(self._running.values()):
            if state.num_lacking == 1 and state.request_id in self._running:
                self._compute(step, state, 1)
        num_extra = 0
        if step.chunks and max_prompt_tokens is not None:
            whole = step.budget
            step.budget = min(whole, max(max_prompt_tokens, self._num_due() // _BACKLOG_STEPS))
            num_extra = min(int(step.budget * _LIGHT_EXTRA), whole - step.budget)
        self._admit_waiting(step, now)
        demands = self._demands(step)
        if num_extra > 0:
            step.budget += min(num_extra, self._num_light(demands))
        self._compute_prompts(step, demands)
        if drafts:
            self._compute_drafts(step, drafts)
        return SchedulerOutput(
            tuple(step.chunks.values()),
            tuple(step.admitted),
            expired,
            tuple(state.request_id for state in step.preempted),
            tuple(step.resumed),
            self.blocks.take_moves(),
        )

    def _num_due(self) -> int:
        """Tokens of prompts that have a slot, and of as many that wait as there are slots for, whichever of
        them is next."""
        num_due = sum(state.num_lacking for state in self._running.values() if state.num_lacking > 1)
        num_next = min(len(self._queue), self.max_num_seqs - len(self._running))
        if num_next > 0:
            num_due += sum(state.num_lacking for state in self._queue) * num_next // len(self._queue)
        return num_due

    def _num_light(self, demands: Sequence[Demand]) -> int:
        """Tokens that the prompts of the least served tenant lack, beside prompts of others, if it is light:
        has at most half its share of slots. A flood's prompts then cost it hardly more steps than an equal's.
        """
        if len(demands) < 2:
            return 0
        least, slots = min(demands, key=lambda d: d.served), self._slots()
        return least.num_tokens if 2 * slots.held[least.tenant] <= slots.fair[least.tenant] else 0

    # -- KV --------------------------------------------------------------------------------------------------

    def _compute(self, step: _Step, state: RequestState, num_tokens: int) -> None:
        """Plan up to `num_tokens` of a running request; none if there is no block for it now."""
        start = state.num_computed_tokens
        end = self._cover(step, state, start + num_tokens)
        step.tried.add(state.request_id)
        if end > start:
            samples = end == len(state.token_ids)
            step.chunks[state.request_id] = ScheduledChunk(
                state.request_id, state.token_ids[start:end], start, state.block_table, samples
            )
            step.budget -= end - start

    def _cover(self, step: _Step, state: RequestState, end: int) -> int:
        """Take blocks for the positions below `end`; less valuable requests are preempted if there is none at
        all. Returns how far the blocks reach."""
        size, table = self.blocks.block_size, state.block_table
        missing = self.blocks.num_blocks_for(end) - len(table)
        if missing > 0 and len(table) * size <= state.num_computed_tokens:
            while self.blocks.num_available == 0:
                victim = by_value(self._running.values())[-1]
                if victim is state:
                    break  # all others are worth more: it waits, and keeps what it has
                self._preempt(step, victim)
        if missing > 0:
            table += self.blocks.allocate(min(missing, self.blocks.num_available)) or ()
        return min(end, len(table) * size)

    def _preempt(self, step: _Step, state: RequestState) -> None:
        """Take a running request's KV and let it wait. Its full blocks stay in the prefix cache until they
        are needed."""
        del self._running[state.request_id]
        chunk = step.chunks.pop(state.request_id, None)
        if chunk is not None:
            step.budget += len(chunk.token_ids)
        self._release(state)
        state.num_computed_tokens = state.num_published = 0
        state.num_preemptions += 1
        self.num_preemptions_total += 1
        step.preempted.append(state)
        self._queue.put_back(state)

    # -- admission -------------------------------------------------------------------------------------------

    def _admit_waiting(self, step: _Step, now: float) -> None:
        # Who was preempted in this very step would only take back what was just taken.
        skipped: set[str] = set()
        insisting = False
        for _ in range(self.max_num_seqs + _MAX_TRIES):
            skipped.update(s.tenant for s in step.preempted if s.request_id not in self._running)
            state = self._queue.next(now, skipped)
            if state is None or len(skipped) > _MAX_TRIES:
                return
            if self._has_budget(step, state) and self._admit(step, state, now, insisting):
                self._hold_capped()
                continue
            skipped.add(state.tenant)
            insisting = insisting or self._queue.insists(state, now)

    def _hold_capped(self) -> None:
        capped = (s.tenant for s in self._running.values() if s.request.max_running is not None)
        self._queue.hold(Counter(capped))

    def _has_budget(self, step: _Step, state: RequestState) -> bool:
        """Whether tokens of this step are left for it: the prompts before it don't take them all, or its
        tenant is due some of them."""
        demands = {demand.tenant: demand for demand in self._demands(step)}
        own = demands.setdefault(state.tenant, self._demand(state.tenant, 0))
        if sum(demand.num_tokens for demand in demands.values()) < step.budget:
            return True
        if own.served <= min(demand.served for demand in demands.values()):
            return own.num_tokens < step.budget
        return own.num_tokens < int(step.budget * own.weight / sum(d.weight for d in demands.values()))

    def _admit(self, step: _Step, state: RequestState, now: float, insisting: bool) -> bool:
        """Let a request run if there is room, or if its tenant is due room that others have beyond their
        share. `insisting`: another waits for just this room, so only the latter."""
        room = self._room(state)
        slot_short = len(self._running) >= self.max_num_seqs
        if slot_short or room.num_short > 0 or insisting:
            victims = self._displaced(step, state, room, slot_short)
            if victims is None:
                return False
            for victim in victims:
                self._preempt(step, victim)
        self._start(step, state, room, now)
        return True

    def _start(self, step: _Step, state: RequestState, room: _Room, now: float) -> None:
        request, first_time = state.request, state.num_preemptions == 0
        asked_again = first_time and request.priority >= 0
        table = self.blocks.allocate(len(room.prefix), room.prefix, asked_again=asked_again)
        assert table is not None
        table += self.blocks.restore(room.slots, asked_again=asked_again)
        state.block_table = table
        state.num_published = len(table)
        state.num_computed_tokens = len(table) * self.blocks.block_size
        self._queue.admitted(state, len(state.token_ids) - state.num_computed_tokens, now)
        self._running[state.request_id] = state
        if not first_time:
            step.resumed.append(state.request_id)
            return
        step.admitted.append(state.request_id)
        state.num_cached_tokens = state.num_ever_computed = state.num_computed_tokens
        if request.prefix_cache:
            self.prefix_query_tokens_total += len(request.prompt_ids)
            self.prefix_hit_tokens_total += state.num_cached_tokens

    def _room(self, state: RequestState) -> _Room:
        """What it takes to let a waiting request run beside what is promised to those that do."""
        prefix, slots = find(self.blocks, state)
        num_blocks = self._num_promised(state) - len(prefix) + self.blocks.num_idle(prefix)
        promised = sum(self._num_promised(s) - len(s.block_table) for s in self._running.values())
        return _Room(prefix, slots, num_blocks, num_blocks + promised - self.blocks.num_available)

    def _num_promised(self, state: RequestState) -> int:
        """Blocks for all that is known of it, and one to grow into, where it may grow so far."""
        num_most = len(state.request.prompt_ids) + state.request.sampling.max_tokens
        num_blocks_for = self.blocks.num_blocks_for
        return min(num_blocks_for(len(state.token_ids)) + 1, num_blocks_for(num_most))

    def _weights(self) -> dict[str, float]:
        present = (*self._queue.tenants(), *(state.tenant for state in self._running.values()))
        return {name: self._queue.weight(name) for name in present}

    def _slots(self) -> Shares:
        held = Counter(state.tenant for state in self._running.values())
        return Shares.of(held, self._weights(), self.max_num_seqs, 1)

    def _displaced(
        self, step: _Step, state: RequestState, room: _Room, slot_short: bool
    ) -> list[RequestState] | None:
        """Whom to preempt so that `state`, whose tenant is within its share, can run; None if that is not its
        due."""
        held_blocks: Counter[str] = Counter()
        for other in self._running.values():
            held_blocks[other.tenant] += len(other.block_table)
        slots = self._slots()
        blocks = Shares.of(held_blocks, self._weights(), self.blocks.num_blocks, 0)
        if not slots.may_have(state.tenant, 1) or not blocks.may_have(state.tenant, room.num_blocks):
            return None
        if not slot_short and room.num_short <= 0:
            return []
        counter, fresh = self._queue.counter(state.tenant), {*step.admitted, *step.resumed}
        return displaced(
            # Not whom this very step has let in.
            [s for s in by_value(self._running.values()) if s.request_id not in fresh],
            state.tenant,
            slots=slots if slot_short else None,
            blocks=blocks if room.num_short > 0 else None,
            num_blocks_short=room.num_short,
            gain=lambda s: (
                self.blocks.num_exclusive(s.block_table) + self._num_promised(s) - len(s.block_table)
            ),
            less_served=lambda tenant: counter <= self._queue.counter(tenant),
        )

    # -- prompts ---------------------------------------------------------------------------------------------

    def _prompts(self, step: _Step) -> list[RequestState]:
        """Running requests that this step has not looked at yet, oldest first."""
        todo = [state for state in self._running.values() if state.request_id not in step.tried]
        return sorted(todo, key=lambda s: s.arrival)

    def _demands(self, step: _Step) -> list[Demand]:
        num_tokens: dict[str, int] = {}
        for state in self._prompts(step):
            num_tokens[state.tenant] = num_tokens.get(state.tenant, 0) + state.num_lacking
        return [self._demand(name, num) for name, num in num_tokens.items()]

    def _demand(self, tenant: str, num_tokens: int) -> Demand:
        return Demand(tenant, num_tokens, self._queue.weight(tenant), self._queue.served(tenant))

    def _compute_prompts(self, step: _Step, demands: Sequence[Demand]) -> None:
        shares = split(step.budget, demands)
        for state in self._prompts(step):
            num_tokens = min(state.num_lacking, shares[state.tenant])
            if num_tokens > 0 and state.request_id in self._running:
                self._compute(step, state, num_tokens)
                shares[state.tenant] -= num_tokens

    # -- drafts ----------------------------------------------------------------------------------------------

    def _compute_drafts(self, step: _Step, drafts: Mapping[str, Sequence[int]]) -> None:
        """Lengthen decode steps by guesses, the most valuable requests first, as far as budget and free
        blocks go."""
        if all(chunk.is_stream for chunk in step.chunks.values()):
            # No prompt is here to be protected from a long step, or to protect streams from.
            step.budget = self.max_batch_tokens - len(step.chunks)
        for request_id, chunk in list(step.chunks.items()):
            state, drafted = self._running[request_id], drafts.get(request_id, ())
            if not chunk.is_stream or not chunk.samples or not drafted or step.budget <= 0:
                continue
            # One token comes after the last guess, however many are right.
            left = state.request.sampling.max_tokens - state.num_output_tokens - 1
            end = chunk.start + 1 + min(len(drafted), left, step.budget)
            size, table = self.blocks.block_size, state.block_table
            missing = min(self.blocks.num_blocks_for(end) - len(table), self.blocks.num_available)
            if missing > 0:
                table += self.blocks.allocate(missing) or ()
            num_drafted = min(end, len(table) * size) - chunk.start - 1
            if num_drafted > 0:
                token_ids = [*chunk.token_ids, *drafted[:num_drafted]]
                step.chunks[request_id] = replace(chunk, token_ids=token_ids, num_drafted=num_drafted)
                step.budget -= num_drafted

    # -- after a step ----------------------------------------------------------------------------------------

    def update_from_output(
        self, plan: SchedulerOutput, sampled: Mapping[str, Sequence[int]]
    ) -> list[TokenEvent]:
        """Fold a step that was run back in: `sampled` maps each request whose chunk samples to its new
        tokens: guesses that were right, and one more.

        Requests that ended since the plan was made are skipped; so is one that should have a token and has
        none (its sampling failed: the caller ends it).
        """
        events: list[TokenEvent] = []
        for chunk in plan.chunks:
            state = self._running.get(chunk.request_id)
            if state is None:
                continue
            token_ids = sampled.get(chunk.request_id, ()) if chunk.samples else ()
            taken, reason = self._take(state, token_ids[: chunk.num_sampled])
            num_right = max(0, len(taken) - 1)
            self._computed(state, len(chunk.token_ids) - chunk.num_drafted + num_right)
            self._discard(state, chunk.num_drafted - num_right)
            if reason is not None:
                self.finish(chunk.request_id)
            if taken:
                events.append(TokenEvent(chunk.request_id, taken, reason))
        return events

    def _take(
        self, state: RequestState, token_ids: Sequence[int]
    ) -> tuple[tuple[int, ...], FinishReason | None]:
        """Append new tokens, up to the one that ends the request; which were, and why it ended."""
        for num, token_id in enumerate(token_ids, 1):
            state.token_ids.append(token_id)
            reason = self._finish_reason(state, token_id)
            if reason is not None:
                return tuple(token_ids[:num]), reason
        return tuple(token_ids), None

    def _computed(self, state: RequestState, num_tokens: int) -> None:
        state.num_computed_tokens += num_tokens
        num_new = max(0, state.num_computed_tokens - state.num_ever_computed)
        self.num_recomputed_tokens_total += num_tokens - min(num_tokens, num_new)
        state.num_ever_computed = max(state.num_ever_computed, state.num_computed_tokens)
        self._queue.computed(state, num_new)
        publish(self.blocks, state)

    def _discard(self, state: RequestState, num_wrong: int) -> None:
        """Guesses that were wrong are charged too, for they took the same time; blocks that only they
        reached go back."""
        if num_wrong <= 0:
            return
        self._queue.computed(state, num_wrong)
        num_blocks = self.blocks.num_blocks_for(state.num_computed_tokens)
        surplus = state.block_table[num_blocks:]
        if surplus:
            self.blocks.release(surplus)
            # A new list: plans that were handed out hold the old one.
            state.block_table = state.block_table[:num_blocks]

    def _finish_reason(self, state: RequestState, token_id: int) -> FinishReason | None:
        sampling = state.request.sampling
        if token_id in sampling.stop_token_ids or (
            token_id in self.eos_token_ids and not sampling.ignore_eos
        ):
            return FinishReason.STOP
        if state.num_output_tokens >= sampling.max_tokens:
            return FinishReason.LENGTH
        return None

    def check_integrity(self) -> None:
        """Raise AssertionError unless blocks, tables and counters agree. Between steps only."""
        running = list(self._running.values())
        self.blocks.check_integrity(state.block_table for state in running)
        self._queue.check_integrity(running)
        for state in self._queue:
            assert not state.block_table, f"{state.request_id} waits and owns KV"
            assert state.num_computed_tokens == 0, f"{state.request_id} waits and has computed"
        for request_id, state in self._running.items():
            assert request_id == state.request_id
            assert 0 <= state.num_computed_tokens < len(state.token_ids), f"{request_id}: nothing to compute"
            num_blocks = self.blocks.num_blocks_for(state.num_computed_tokens)
            assert len(state.block_table) == num_blocks, f"{request_id}: more or less KV than it has computed"
            assert state.num_published <= num_blocks
        if not running:
            assert self.blocks.num_used == 0, "nobody runs and KV is in use"
