"""What the scheduler keeps of a request, and what it hands to who runs a step. Plain data, without torch.

Invariant: a `SchedulerOutput` is complete: who runs it needs nothing else of the scheduler, and folds it back
with `Scheduler.update_from_output`.
"""

from __future__ import annotations

from dataclasses import dataclass, field

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

    `samples`: the chunk reaches the end of what is known, so its last position yields the next token.
    """

    request_id: str
    token_ids: list[int]
    start: int
    block_table: list[int]
    samples: bool


@dataclass(frozen=True, slots=True)
class SchedulerOutput:
    """The plan for one step.

    `expired` requests have ended already. `admitted` ones started with this step, for the first time;
    `resumed` ones go on after a preemption. `preempted` ones have lost their KV, wait, and keep their tokens.
    """

    chunks: tuple[ScheduledChunk, ...]
    admitted: tuple[str, ...]
    expired: tuple[str, ...]
    preempted: tuple[str, ...] = ()
    resumed: tuple[str, ...] = ()

    @property
    def num_tokens(self) -> int:
        return sum(len(chunk.token_ids) for chunk in self.chunks)

    @property
    def num_streams(self) -> int:
        """Chunks of one token."""
        return sum(len(chunk.token_ids) == 1 for chunk in self.chunks)


@dataclass(frozen=True, slots=True)
class TokenEvent:
    """A new token of a request, and why the request ended with it, if it did."""

    request_id: str
    token_id: int
    finish_reason: FinishReason | None
