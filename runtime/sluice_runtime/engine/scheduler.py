"""Which tokens of which requests the next step computes. Pure: no torch, no clock, no randomness, no thread.

There is no prefill or decode phase. A request's `num_computed_tokens` catches up with its tokens; a step
gives each running request some of what it lacks, within one token budget:

    token_ids             [ p p p p p p p p p p | o o o ]        p: prompt, o: output
    num_computed_tokens   ────────────────────────────▶│        lacks 1: a decode step
                          ─────────▶│                            lacks 7: a chunk, or several

Invariant: a request is admitted only when blocks for prompt + max_tokens are its own, so a running request
never waits for memory: no preemption, no deadlock, no OOM. Admission is first come, first served: nobody is
overtaken.
"""

from __future__ import annotations

from collections import OrderedDict, deque
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field

from sluice_runtime.engine.blocks import ROOT_KEY, BlockManager, block_key
from sluice_runtime.engine.types import EngineRequest, FinishReason, QueueFull, RequestTooLong


@dataclass(slots=True)
class RequestState:
    """A request and how far it is. `block_table` is empty while it waits."""

    request: EngineRequest
    token_ids: list[int]
    num_computed_tokens: int = 0
    num_cached_tokens: int = 0
    block_table: list[int] = field(default_factory=list)
    block_keys: list[bytes] = field(default_factory=list)
    num_published: int = 0

    @property
    def num_lacking(self) -> int:
        return len(self.token_ids) - self.num_computed_tokens

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - len(self.request.prompt_ids)


@dataclass(frozen=True, slots=True)
class ScheduledChunk:
    """Tokens of one request to compute: positions `start` to `start + len(token_ids)`, KV into `block_table`.

    `samples`: the chunk reaches the end of what is known, so its last position yields the next token.
    """

    request_id: str
    token_ids: list[int]
    start: int
    block_table: list[int]
    samples: bool


@dataclass(frozen=True, slots=True)
class SchedulerOutput:
    """The plan for one step. `expired` requests have ended already; `admitted` ones started with this
    step."""

    chunks: tuple[ScheduledChunk, ...]
    admitted: tuple[str, ...]
    expired: tuple[str, ...]

    @property
    def num_tokens(self) -> int:
        return sum(len(chunk.token_ids) for chunk in self.chunks)


@dataclass(frozen=True, slots=True)
class TokenEvent:
    """A new token of a request, and why the request ended with it, if it did."""

    request_id: str
    token_id: int
    finish_reason: FinishReason | None


class Scheduler:
    """Owns all request states and, through `blocks`, all KV. Not thread-safe: the engine's thread owns it."""

    def __init__(
        self,
        blocks: BlockManager,
        *,
        max_num_seqs: int,
        max_batch_tokens: int,
        max_model_len: int,
        max_waiting: int,
        eos_token_ids: frozenset[int] = frozenset(),
    ) -> None:
        if max_batch_tokens < max_num_seqs:
            raise ValueError("max_batch_tokens below max_num_seqs would starve running requests")
        self.blocks = blocks
        self.max_num_seqs = max_num_seqs
        self.max_batch_tokens = max_batch_tokens
        self.max_model_len = min(max_model_len, blocks.num_blocks * blocks.block_size)
        self.max_waiting = max_waiting
        self.eos_token_ids = eos_token_ids
        self.prefix_query_tokens_total = 0
        self.prefix_hit_tokens_total = 0
        self._waiting: deque[RequestState] = deque()
        self._running: OrderedDict[str, RequestState] = OrderedDict()

    @property
    def num_waiting(self) -> int:
        return len(self._waiting)

    @property
    def num_running(self) -> int:
        return len(self._running)

    def running(self) -> Iterator[RequestState]:
        return iter(self._running.values())

    def get(self, request_id: str) -> RequestState | None:
        """The state of a running request."""
        return self._running.get(request_id)

    def add(self, request: EngineRequest) -> None:
        """Queue a request. Raises `RequestTooLong` if it could never be admitted, `QueueFull`."""
        num_prompt, max_tokens = len(request.prompt_ids), request.sampling.max_tokens
        if num_prompt + max_tokens > self.max_model_len:
            raise RequestTooLong(num_prompt, max_tokens, self.max_model_len)
        if len(self._waiting) >= self.max_waiting:
            raise QueueFull(len(self._waiting))
        self._waiting.append(RequestState(request, list(request.prompt_ids)))

    def finish(self, request_id: str) -> RequestState | None:
        """End a request, whatever its state, and give back its KV. None if it is unknown (ended already)."""
        state = self._running.pop(request_id, None)
        if state is None:
            state = next((s for s in self._waiting if s.request.request_id == request_id), None)
            if state is not None:
                self._waiting.remove(state)
            return state
        self.blocks.release(state.block_table)
        state.block_table = []
        return state

    def schedule(self, now: float) -> SchedulerOutput:
        """Plan one step at monotonic time `now`: end what is past its deadline, then spend the token budget.

        Requests that lack one token come first, so that a long prompt never delays a running stream by more
        than one step; then longer chunks, oldest request first; then admissions.
        """
        expired = tuple(
            state.request.request_id
            for state in [*self._waiting, *self._running.values()]
            if state.request.deadline is not None and now >= state.request.deadline
        )
        for request_id in expired:
            self.finish(request_id)
        budget = self.max_batch_tokens
        chunks: list[ScheduledChunk] = []
        for state in self._running.values():
            if state.num_lacking == 1:
                chunks.append(self._chunk(state, 1))
                budget -= 1
        for state in self._running.values():
            if state.num_lacking > 1 and budget > 0:
                chunks.append(self._chunk(state, budget))
                budget -= len(chunks[-1].token_ids)
        admitted: list[str] = []
        while budget > 0 and self._waiting and len(self._running) < self.max_num_seqs:
            state = self._waiting[0]
            if not self._admit(state):
                break
            self._waiting.popleft()
            self._running[state.request.request_id] = state
            admitted.append(state.request.request_id)
            chunks.append(self._chunk(state, budget))
            budget -= len(chunks[-1].token_ids)
        return SchedulerOutput(tuple(chunks), tuple(admitted), expired)

    @staticmethod
    def _chunk(state: RequestState, budget: int) -> ScheduledChunk:
        start = state.num_computed_tokens
        token_ids = state.token_ids[start : start + budget]
        samples = start + len(token_ids) == len(state.token_ids)
        return ScheduledChunk(state.request.request_id, token_ids, start, state.block_table, samples)

    def _admit(self, state: RequestState) -> bool:
        """Reserve all blocks the request can ever need, cached prefix first; False if there is no room
        now."""
        request = state.request
        prefix: list[int] = []
        # The last prompt token is always computed: its logits give the first output token.
        max_prefix_blocks = (len(request.prompt_ids) - 1) // self.blocks.block_size
        if request.prefix_cache:
            self._extend_keys(state, max_prefix_blocks)
            prefix = self.blocks.find_prefix(
                request.scope, state.block_keys[:max_prefix_blocks], state.token_ids
            )
        num_blocks = self.blocks.num_blocks_for(len(request.prompt_ids) + request.sampling.max_tokens)
        block_table = self.blocks.allocate(num_blocks, prefix)
        if block_table is None:
            return False
        state.block_table = block_table
        state.num_published = len(prefix)
        state.num_cached_tokens = state.num_computed_tokens = len(prefix) * self.blocks.block_size
        if request.prefix_cache:
            self.prefix_query_tokens_total += len(request.prompt_ids)
            self.prefix_hit_tokens_total += state.num_cached_tokens
        return True

    def _extend_keys(self, state: RequestState, num_blocks: int) -> None:
        size = self.blocks.block_size
        while len(state.block_keys) < num_blocks:
            i = len(state.block_keys)
            parent = state.block_keys[-1] if i else ROOT_KEY
            state.block_keys.append(
                block_key(state.request.scope, parent, state.token_ids[i * size : (i + 1) * size])
            )

    def update_from_output(self, plan: SchedulerOutput, sampled: Mapping[str, int]) -> list[TokenEvent]:
        """Fold a step that was run back in: `sampled` maps each request whose chunk samples to its new token.

        Requests that ended since the plan was made are skipped; so is one that should have a token and has
        none (its sampling failed: the caller ends it).
        """
        events: list[TokenEvent] = []
        for chunk in plan.chunks:
            state = self._running.get(chunk.request_id)
            if state is None:
                continue
            state.num_computed_tokens += len(chunk.token_ids)
            if state.request.prefix_cache:
                self._publish(state)
            token_id = sampled.get(chunk.request_id) if chunk.samples else None
            if token_id is None:
                continue
            state.token_ids.append(token_id)
            reason = self._finish_reason(state, token_id)
            if reason is not None:
                self.finish(chunk.request_id)
            events.append(TokenEvent(chunk.request_id, token_id, reason))
        return events

    def _publish(self, state: RequestState) -> None:
        size, scope = self.blocks.block_size, state.request.scope
        num_full = state.num_computed_tokens // size
        self._extend_keys(state, num_full)
        for i in range(state.num_published, num_full):
            parent = state.block_keys[i - 1] if i else ROOT_KEY
            tokens = state.token_ids[i * size : (i + 1) * size]
            self.blocks.publish(state.block_table[i], state.block_keys[i], scope, parent, tokens)
        state.num_published = max(state.num_published, num_full)

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
        """Raise AssertionError unless blocks, tables and counters agree."""
        self.blocks.check_integrity(state.block_table for state in self._running.values())
        for state in self._waiting:
            assert not state.block_table, f"{state.request.request_id} waits and owns KV"
        for request_id, state in self._running.items():
            assert request_id == state.request.request_id
            assert 0 <= state.num_computed_tokens < len(state.token_ids), (
                f"{request_id}: nothing left to compute"
            )
            assert len(state.block_table) * self.blocks.block_size >= len(state.token_ids), (
                f"{request_id}: KV too small"
            )
