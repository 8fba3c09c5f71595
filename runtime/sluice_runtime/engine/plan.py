"""What the scheduler keeps of a request, and what it hands to who runs a step. Plain data, without torch.

Invariant: a `SchedulerOutput` is complete: who runs it needs nothing else of the scheduler, and folds it back
with `Scheduler.update_from_output`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

from sluice_runtime.engine.host_tier import NO_MOVES, KvMoves
from sluice_runtime.engine.types import EngineRequest, FinishReason


@dataclass(slots=True)
class RequestState:
    """A request and how far it is. `block_table` is empty while it waits.

    `arrival` counts requests as they came. `num_ever_computed` is the furthest position whose KV was there
    before a preemption took it: what lies below it is computed again at nobody's charge. `prepaid` tokens
    have been charged to the tenant in advance.
    """

    request: EngineRequest
    token_ids: list[int]
    arrival: int = 0
    num_computed_tokens: int = 0
    num_cached_tokens: int = 0
    num_ever_computed: int = 0
    num_preemptions: int = 0
    prepaid: float = 0.0
    block_table: list[int] = field(default_factory=list)
    block_keys: list[bytes] = field(default_factory=list)
    num_published: int = 0

    @property
    def request_id(self) -> str:
        return self.request.request_id

    @property
    def tenant(self) -> str:
        return self.request.tenant

    @property
    def num_lacking(self) -> int:
        return len(self.token_ids) - self.num_computed_tokens

    @property
    def num_output_tokens(self) -> int:
        return len(self.token_ids) - len(self.request.prompt_ids)


@dataclass(frozen=True, slots=True)
class ScheduledChunk:
    """Tokens of one request to compute: positions `start` to `start + len(token_ids)`, KV into `block_table`.

    `samples`: the chunk reaches the end of what is known, so its last position yields the next token. The
    last `num_drafted` tokens are guesses (speculation/): they are computed as if they were known, and the
    position before each yields what tells whether it is right.

        token_ids   [ known known | d1 d2 d3 ]      num_drafted 3
        sampled             ▲       ▲  ▲  ▲         num_sampled 4, the chunk's last positions
    """

    request_id: str
    token_ids: list[int]
    start: int
    block_table: list[int]
    samples: bool
    num_drafted: int = 0

    @property
    def num_sampled(self) -> int:
        """How many of its last positions yield logits."""
        return 1 + self.num_drafted if self.samples else 0

    @property
    def drafted(self) -> list[int]:
        return self.token_ids[len(self.token_ids) - self.num_drafted :]

    @property
    def is_stream(self) -> bool:
        """Whether one known token is computed: a decode step."""
        return len(self.token_ids) - self.num_drafted == 1


@dataclass(frozen=True, slots=True)
class SchedulerOutput:
    """The plan for one step.

    `expired` requests have ended already. `admitted` ones started with this step, for the first time;
    `resumed` ones go on after a preemption. `preempted` ones have lost their KV, wait, and keep their tokens.
    `moves` are copies of KV to do before anything is computed, also where nothing is.
    """

    chunks: tuple[ScheduledChunk, ...]
    admitted: tuple[str, ...]
    expired: tuple[str, ...]
    preempted: tuple[str, ...] = ()
    resumed: tuple[str, ...] = ()
    moves: KvMoves = NO_MOVES

    @property
    def num_tokens(self) -> int:
        return sum(len(chunk.token_ids) for chunk in self.chunks)

    @property
    def num_streams(self) -> int:
        """Chunks of one known token."""
        return sum(chunk.is_stream for chunk in self.chunks)

    @property
    def num_drafted(self) -> int:
        return sum(chunk.num_drafted for chunk in self.chunks)


@dataclass(frozen=True, slots=True)
class TokenEvent:
    """The new tokens of a request, one or, after right guesses, more; and why it ended with the last, if it
    did."""

    request_id: str
    token_ids: tuple[int, ...]
    finish_reason: FinishReason | None
